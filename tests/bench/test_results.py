"""The results of finished studies: what the presets and the notes say of them."""

import dataclasses
import json

import numpy as np
import pytest

import nca_trader as nca


@pytest.fixture
def rows(root):
    def read(name):
        text = (root / "benchmarks" / "results" / name).read_text()
        return [json.loads(line) for line in text.splitlines()]

    return read


def learner_of(row):
    """The learner of a row, its key of earlier versions under today's name."""
    given = dict(row["manifest"]["agent"]["learner"])
    return given | {"target_kl": given.pop("max_kl")} if "max_kl" in given else given


def test_each_recipe_looked_once_at_each_test_span(rows):
    found = rows("agents.jsonl")
    keys = [(row["bars"], row["policy"], row["phase"]) for row in found]
    assert len(keys) == len(set(keys)) == 40
    first = learner_of(found[0])
    for row in found:  # one learner and one environment for all, but for costs and policy
        assert learner_of(row) == first
        assert row["manifest"]["env"]["features"] == found[0]["manifest"]["env"]["features"]
        assert row["manifest"]["env"]["random_costs"] == [5.0, 10.0]


def test_the_recipe_of_the_presets_is_that_of_the_rows(rows):
    def plain(config):
        return json.loads(json.dumps(dataclasses.asdict(config)))

    env = plain(nca.load_env("panel_daily"))
    for row in rows("agents.jsonl"):
        known = row["manifest"]
        agent = plain(nca.load_agent("panel_nca" if row["policy"] == "nca" else "panel"))
        # The recipe before agents tilted on a base, apart from what that changed.
        assert learner_of(row).items() <= agent["learner"].items()
        rate = known["agent"]["optimizer"] | {"learning_rate": agent["optimizer"]["learning_rate"]}
        assert rate.items() <= agent["optimizer"].items()
        assert known["agent"]["num_seeds"] == agent["num_seeds"]
        # A study has its own costs, and 1 as the largest size where money cannot be borrowed.
        own = {"costs", "size_cap"}
        assert {k: v for k, v in known["env"].items() if k not in own}.items() <= env.items()
        if row["policy"] in ("linear", "nca"):  # those that ship
            assert known["agent"]["policy"].items() <= agent["policy"].items()


def test_panels_whose_truth_is_known_are_within_their_bounds(rows):
    found = rows("planted.jsonl")
    passed = {p: [r["passed"] for r in found if r["part"] == p] for p in ("noise", "power")}
    assert {part: len(each) for part, each in passed.items()} == {"noise": 100, "power": 100}
    assert sum(passed["noise"]) <= 0.1 * len(passed["noise"])
    assert sum(passed["power"]) >= 0.8 * len(passed["power"])
    shares = [r["fraction"] for r in found if r["part"] == "optimum"]
    assert len(shares) == 20 and np.mean(shares) >= 0.9
