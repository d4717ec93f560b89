"""`nca-trader prove`: what it trains, says, writes and fails for."""

import dataclasses
import math

import numpy as np
import pytest

from nca_trader import load_agent
from nca_trader.cli import prove, prove_runs
from nca_trader.cli.prove_runs import Point, Proof, contenders, prepare
from nca_trader.data.synthetic import task_of
from nca_trader.errors import ConfigError
from nca_trader.evaluate.prove import Reached


def reached(fraction=0.97, turnover=0.05, excess=-1e-5):
    return Reached(fraction, 0.001, 1e-3, 1e-5, excess, 1e-6, turnover)


def proof(*reaches, market="ou_mid", bar=0.95, **beside):
    curve = [Point(2.0 * (i + 1), 1000 * (i + 1), r) for i, r in enumerate(reaches)]
    return Proof(market=market, seed=7, bar=bar, curve=curve, beside=beside)


def test_the_last_point_of_a_curve_counts():
    assert proof(reached(0.2), reached(0.97)).passed
    assert not proof(reached(0.97), reached(0.2)).passed
    assert proof(reached(0.2), reached(0.96), reached(0.97)).seconds_to_bar == 4.0
    assert proof(reached(0.2)).seconds_to_bar is None


def test_more_than_can_be_earned_is_no_success():
    cheat = proof(reached(1.2, excess=1e-5))
    assert not cheat.passed and "looks ahead" in cheat.complaint


@pytest.mark.parametrize(
    ("turnover", "excess", "says"),
    [(0.005, -1e-6, ""), (0.02, -1e-6, "trades 0.020 a step"), (0.005, 1e-3, "looks ahead")],
)
def test_where_nothing_can_be_earned_the_bar_is_to_hardly_trade(turnover, excess, says):
    fair = proof(reached(math.nan, turnover, excess), market="martingale", bar=0.0)
    assert says in fair.complaint and fair.passed == (says == "")
    assert fair.row()["fraction"] is None


def test_a_market_of_real_bars_is_refused(command):
    said = command("prove", "index_daily")
    assert said.code == 2 and "no optimum is known" in said.err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["ou_mdi"], "did you mean 'ou_mid'"),
        (["ou_mid", "--agent=nanno"], "did you mean 'nano'"),
        (["ou_mid", "--out=curves.pdf"], "give a file that ends in .html, .png, .svg"),
        (["ou_mid", "--seed=-1"], "--seed -1 is not a whole number of at least 0"),
        (["ou_mid", "--steps=0"], "--steps 0 is not a whole number of at least 1"),
    ],
)
def test_what_is_wrong_is_one_line_before_anything_trains(command, args, says):
    said = command("prove", *args)
    assert said.code == 2 and says in said.err and len(said.err.splitlines()) == 1


def test_every_claim_is_a_market_of_its_own_and_nothing_but_a_bar():
    for name, bar in prove.BARS.items():
        trial = prepare(name, load_agent("nano"))
        assert 0.0 <= bar < 1.0 and trial.config.market
        # What is seen is the same for all, and none of it is the market's own state.
        assert trial.config.features == prove_runs.FEATURES and not trial.config.market_state


def test_the_estimator_follows_the_kind_of_actions():
    for name in prove.BARS:
        trial = prepare(name, load_agent("nano"))
        expected = "exact" if trial.config.actions == "direction" else "gae"
        assert {agent.learner.advantages for agent in trial.agents.values()} == {expected}


def test_a_path_whose_price_leaves_the_floats_is_drawn_shorter():
    coin = prepare("kelly", load_agent("nano")).config
    wild = dataclasses.replace(coin, market_bars=4096, market="kelly(p=0.55, move=0.9)")
    with pytest.raises(ConfigError, match=r"the price is exp\(-2616\)"):
        task_of(wild, 0)
    env = prove_runs._env_of(wild, 0)
    assert len(env) == 1024 and np.isfinite(np.log(env.bars.close)).all()


@pytest.mark.parametrize(("market", "steps"), [("ou_mid", 24_000_000), ("ring", 3_000_000)])
def test_where_assets_share_what_is_learnt_fewer_steps_do(market, steps):
    own = load_agent("nano")
    assert own.learner.steps == 24_000_000
    agents = prepare(market, own).agents.values()
    assert {agent.learner.steps for agent in agents} == {steps}


def test_what_stands_beside_an_agent_learns_as_it_does():
    nano = load_agent("nano")
    found = contenders(nano, 16)
    assert list(found) == ["nca", "mlp", "one bar", "own history"]
    assert found["one bar"].policy.window == 1
    assert found["own history"].policy == dataclasses.replace(nano.policy, neighbours="none")
    assert {(a.learner, a.optimizer, a.curriculum) for a in found.values()} == {
        (nano.learner, nano.optimizer, nano.curriculum)
    }
    assert "own history" not in contenders(nano, 1)


@pytest.fixture
def trained(monkeypatch):
    """Replaces training; notes what was asked for. Fractions by seed and agent."""
    asked = []

    def train(config, agent, seed):
        asked.append((config.market.split("(")[0], agent.policy.kind, agent.policy.window, seed))
        fraction = 0.99 if agent.policy.kind == "nca" else 0.5
        return [Point(1.0, 10, reached(0.1)), Point(2.0, 20, reached(fraction))]

    monkeypatch.setattr(prove_runs, "train_and_judge", train)
    return asked


def test_three_seeds_are_drawn_and_printed_and_the_others_stand_beside_the_first(command, trained):
    said = command("prove", "ou_mid", "--json")
    assert said.code == 0
    results = said.json["results"]
    seeds = [row["seed"] for row in results]
    assert len(set(seeds)) == 3 and said.out.startswith(f"seeds {', '.join(map(str, seeds))};")
    agents = [(kind, window) for _, kind, window, seed in trained if seed == seeds[0]]
    assert agents == [("nca", 63), ("mlp", 63), ("mlp", 1)]
    assert len(trained) == 5
    assert results[0]["beside"] == {"mlp": 0.5, "one bar": 0.5} and results[1]["beside"] == {}
    assert (
        results[0] | {"market": "ou_mid", "fraction": 0.99, "bar": 0.95, "passed": True}
        == results[0]
    )
    assert (results[0]["steps"], results[0]["seconds"]) == (20, 2.0)
    again = command("prove", "ou_mid", "--json").json["results"]
    assert [row["seed"] for row in again] != seeds


def test_a_seed_that_is_given_is_the_only_one(command, trained):
    said = command("prove", "ou_mid", "hidden", "--seed=5", "--alone", "--json")
    assert [row["seed"] for row in said.json["results"]] == [5, 5]
    assert trained == [("ou", "nca", 63, 5), ("markov_drift", "nca", 63, 5)]


def test_a_missed_bar_is_exit_1_and_says_which(command, trained, tmp_path):
    config = tmp_path / "mine.toml"
    config.write_text('features = []\nreward = "pnl"\nmarket = "ou(phi=0.9)"\n')
    said = command("prove", config, "--agent=mlp", "--seed=3", "--alone", "--json")
    assert said.code == 1 and f"1 of 1 runs missed their bar: {config}" in said.err
    assert said.json["results"][0]["passed"] is False  # the last line of stdout all the same


@pytest.mark.parametrize("kind", ["html", "png", "svg"])
def test_curves_are_written(command, trained, tmp_path, kind):
    out = tmp_path / "new" / f"curves.{kind}"
    said = command("prove", "ou_mid", "ring", "martingale", "--seed=5", f"--out={out}")
    assert said.code == 0 and str(out) in said.out and out.stat().st_size > 5_000
    if kind == "html":
        text = out.read_text()
        assert "ou_mid, seed 5: 99.0%" in text and text.count("<svg") == 1
        assert "own history" in text and "#050505" not in text


def test_nano_learns_a_market_in_seconds(command, monkeypatch):
    """The whole of it once: another draw, an unseen path, the bar of the claim."""
    monkeypatch.setattr(prove_runs, "LOOKS", 1)  # looks are long without optimisation
    said = command("prove", "ou_mid", "--seed=1", "--steps=4000000", "--alone", "--json")
    (row,) = said.json["results"]
    assert said.code == 0 and row["passed"] and row["fraction"] > 0.95 and row["error"] < 0.01


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_claim_holds(command, tmp_path):
    said = command("prove", "--json", f"--out={tmp_path / 'claims.html'}")
    assert said.code == 0, said.out
    for row in said.json["results"]:
        if row["market"].startswith("ring") and row["beside"]:
            assert abs(row["beside"]["own history"]) < 0.1
