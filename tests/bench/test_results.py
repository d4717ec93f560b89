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


def test_tilts_did_their_base_no_harm(rows):
    found = rows("tilts.jsonl")
    test = [row for row in found if row["phase"] == "test"]
    keys = {(row["bars"], row["preset"]) for row in test}
    assert len(keys) == len(test) == 10 and {preset for _, preset in keys} == {"panel", "panel_nca"}
    for row in test:
        assert row["less"][0] == pytest.approx(row["agent"] - row["base"], abs=1e-3)
        assert row["less"][0] >= -0.05 and row["turnover"][0] <= 1.3 * row["turnover"][1]
    # What was looked at before, on years before every test span of these bars.
    looked = [row for row in found if row["phase"] == "selection"]
    assert len(looked) == 32 and {row["span"][1] for row in looked} == {"1989-12-31"}
    agent = nca.load_agent("panel")
    chosen = agent.policy.tilt_penalty, agent.optimizer.learning_rate, agent.learner.steps
    keys = ("tilt_penalty", "learning_rate", "steps")
    assert chosen in [tuple(row[key] for key in keys) for row in looked]


def test_the_panel_recipe_was_chosen_before_it_met_1990(rows):
    found = rows("panel.jsonl")
    looked = [row for row in found if row.get("phase") == "choosing"]
    assert 0 < len(looked) <= 40 and max(row["span"][1] for row in looked) <= "1989-12-31"
    trained = [row for row in looked if "less" in row and row["span"][0] == "1982-01-04"]
    best = max(trained, key=lambda row: row["sharpe"])
    agent, env = nca.load_agent("panel"), nca.load_env("panel_daily")
    assert best["learning_rate"] == agent.optimizer.learning_rate
    assert best["sizing"] == env.sizing and agent.policy.base.startswith("1/3 * equal_weight")
    judged = [row for row in found if "phase" not in row]
    assert len({row["cell"] for row in judged}) == len(judged)
    for row in judged:
        assert row["less_1"][0] == pytest.approx(row["agent"] - row["base"], abs=1e-9)
        assert row["less_1"][1] <= row["less_1"][0] <= row["less_1"][2]


def test_the_joint_environment_is_that_of_all_lines(rows):
    """It was composed after its years were seen, so it is a preset of its own."""
    daily, joint = (nca.load_env(name) for name in ("panel_daily", "panel_joint"))
    ranks = tuple(f"rank:return_{bars}" for bars in (21, 63, 252))
    other = {"features": (*daily.features, *ranks), "sizing": "covariance"}
    assert joint == dataclasses.replace(daily, **other)
    found = [row for row in rows("panel.jsonl") if row["cell"].endswith("all lines")]
    assert {row["cell"] for row in found} >= {"futures, linear, all lines"}
    for row in found:
        assert (tuple(row["features"]), row["sizing"]) == (joint.features, joint.sizing)


def test_panels_whose_truth_is_known_are_within_their_bounds(rows):
    found = rows("planted.jsonl")
    passed = {p: [r["passed"] for r in found if r["part"] == p] for p in ("noise", "power")}
    assert {part: len(each) for part, each in passed.items()} == {"noise": 100, "power": 100}
    assert sum(passed["noise"]) <= 0.1 * len(passed["noise"])
    assert sum(passed["power"]) >= 0.8 * len(passed["power"])
    shares = [r["fraction"] for r in found if r["part"] == "optimum"]
    assert len(shares) == 20 and np.mean(shares) >= 0.9


def test_each_recipe_looked_once_at_each_test_span(rows):
    found = rows("agents.jsonl")
    keys = [(row["bars"], row["policy"], row["phase"]) for row in found]
    assert len(keys) == len(set(keys)) == 40
    first = learner_of(found[0])
    for row in found:  # one learner and one environment for all, but for costs and policy
        assert learner_of(row) == first
        assert row["manifest"]["env"]["features"] == found[0]["manifest"]["env"]["features"]
        assert row["manifest"]["env"]["random_costs"] == [5.0, 10.0]
