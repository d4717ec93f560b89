"""The study of agents: training ends before its date, and one look at each test span."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

import nca_trader as nca
from benchmarks import agents, curves, planted
from nca_trader.data.features import feature_set


@pytest.mark.slow
def test_no_agent_is_trained_on_a_bar_of_its_span(monkeypatch):
    bars, _ = planted.drawn(planted.QUICK, 2_000, seed=0)
    seen = {}
    monkeypatch.setattr(nca, "train", lambda env, agent, folder: seen.update({folder: env.bars}))
    dates = (str(bars.index[900])[:10], str(bars.index[1_400])[:10])
    for date in dates:
        agents.trained(bars, planted.PANEL, "mlp", date, pathlib.Path("runs"))
    for (folder, known), row in zip(seen.items(), (900, 1_400), strict=True):
        assert folder.name in dates and len(known) == row
        assert known.index[-1] < bars.index[row]


def test_a_selection_span_ends_where_the_test_span_begins():
    for study in agents.STUDIES.values():
        dates = [*study.selecting, *study.testing]
        assert dates == sorted(set(dates)) and len(study.selecting) == len(study.testing[:2])


def learner_of(row):
    """The learner of a row, its key of earlier versions under today's name."""
    given = dict(row["manifest"]["agent"]["learner"])
    return given | {"target_kl": given.pop("max_kl")} if "max_kl" in given else given


def test_each_recipe_looked_once_at_each_test_span_and_the_page_shows_it(root):
    rows = agents.rows_of(agents.RESULTS)
    keys = [(row["bars"], row["policy"], row["phase"]) for row in rows]
    assert len(keys) == len(set(keys)) and set(agents.STUDIES) == {key[0] for key in keys}
    page = (root / "docs" / "lab-notes" / "agents-on-real-bars.md").read_text()
    selection, test = ([r for r in rows if r["phase"] == phase] for phase in ("selection", "test"))
    for line in [*agents.brief(selection).splitlines(), *agents.table(test).splitlines()]:
        assert line in page
    first = learner_of(rows[0])
    for row in rows:  # one learner and one environment for all, but for costs and policy
        assert learner_of(row) == first
        assert row["manifest"]["env"]["features"] == rows[0]["manifest"]["env"]["features"]
        assert row["manifest"]["env"]["random_costs"] == [5.0, 10.0]


def test_the_recipe_of_the_presets_is_that_of_the_rows():
    def told(config):
        return json.loads(json.dumps(dataclasses.asdict(config)))

    agent, env = told(nca.load_agent("panel")), told(nca.load_env("panel_daily"))
    for row in agents.rows_of(agents.RESULTS):
        known = row["manifest"]
        assert learner_of(row).items() <= agent["learner"].items()
        assert known["agent"]["optimizer"].items() <= agent["optimizer"].items()
        assert known["agent"]["num_seeds"] == agent["num_seeds"]
        # A study has its own costs, and 1 as the largest size where money cannot be borrowed.
        own = {"costs", "size_cap"}
        assert {k: v for k, v in known["env"].items() if k not in own}.items() <= env.items()
        policy = told(agents.agent_of(row["policy"]).policy)
        assert known["agent"]["policy"].items() <= policy.items()
    assert told(agents.agent_of("linear")) == agent
    assert told(agents.agent_of("nca")) == told(nca.load_agent("panel_nca"))


def test_curves_are_those_of_the_rows_and_no_account_of_training_went_bankrupt():
    rows = {(r["bars"], r["policy"], r["phase"]): r for r in agents.rows_of(agents.RESULTS)}
    drawn = agents.rows_of(curves.CURVES)
    assert {row["phase"] for row in drawn} == {"selection", "test"}
    for row in drawn:
        known = rows[row["bars"], row["policy"], row["phase"]]
        half = next(v for k, v in known["baselines"].items() if k.startswith(agents.HALF))
        # Rules are computed alike; agents were trained again by later code.
        assert row["equity"][agents.HALF][-1] - 1.0 == pytest.approx(half["total_return"], abs=1e-4)
        assert row["sharpe"][curves.AGENT] == pytest.approx(known["agent"]["sharpe"], abs=0.02)
        assert [row["months"][i] for i in (0, -1)] == [date[:7] for date in known["span"]]
        assert row["bankrupt"] == 0.0 and row["updates"] > 200


def test_a_row_that_is_there_is_not_computed_again(monkeypatch, tmp_path, capsys):
    out = tmp_path / "agents.jsonl"
    row = agents.rows_of(agents.RESULTS)[0]
    rows = [row | {"policy": p, "phase": "test"} for p in agents.POLICIES]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(agents, "row_of", lambda *given: pytest.fail("looked again"))
    agents.main(["test", "--only", row["bars"], "--out", str(out)])
    assert "| linear |" in capsys.readouterr().out


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_day_of_look_ahead_in_one_feature_is_caught(ahead):
    """The recipe's features, one of which is that of the next day."""
    names = agents.env_of(planted.PANEL).features
    bars = planted.drawn(planted.QUICK, 500, seed=0)[0].select("HIDDEN_LEVEL0")

    def shown(bars):
        found = np.array(feature_set(names).batch(bars))[:, 0]
        column = names.index("return_21")
        if ahead:
            found[:-1, column] = found[1:, column].copy()
        return found

    report = nca.leakcheck(shown, bars, cases=6)
    assert report.ok == (not ahead)
    if ahead:
        assert report.example.row == report.example.t  # a day, and no more
