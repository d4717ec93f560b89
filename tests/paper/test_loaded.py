"""`nca.load`: one decision in another program is that of the backtest."""

import asyncio
import dataclasses
import functools
import json

import numpy as np
import pandas as pd
import pytest
from documents import ROOT, blocks
from drawn import random_bars
from tiny import AGENT
from untrained import untrained_run

import nca_trader as nca
from nca_trader.config import EnvConfig
from nca_trader.errors import ConfigError
from nca_trader.runs.exported import Coding, compact, write_exported

FEATURES = ("return_1", "rsi")
BASE = dataclasses.replace(AGENT.policy, base="half_and_half(lookback=30)", tilt_limit=0.5)
# What decides, in which environment; and whether its orders are chosen from a few.
CASES = {
    "directions": ({}, {}, True),
    "steps of orders": ({"actions": "orders"}, {}, True),
    "sizes by volatility": ({"sizing": "volatility"}, {}, True),
    "sizes by covariance": ({"sizing": "covariance"}, {}, True),
    "weights": ({"actions": "weights", "order": "rebalance"}, {}, False),
    "tilts of a base": ({"actions": "weights"}, {"policy": BASE}, False),
    "the mean of three": ({}, {"num_seeds": 3}, True),
    "a margin": ({"maintenance_margin": 0.25, "borrow": True, "max_gross": 2.0}, {}, True),
    "fills at the close": ({"actions": "weights", "fill": "close"}, {}, False),
}


def holey(num_bars=200, num_assets=2):
    """Random bars, a tenth of them missing."""
    bars = random_bars(np.random.default_rng(3), num_bars, num_assets)
    frame = pd.DataFrame(
        {"time": np.repeat(bars.index, num_assets), "symbol": list(bars.symbols) * num_bars}
        | {name: getattr(bars, name).ravel() for name in ("open", "high", "low", "close", "volume")}
    )
    gone = np.random.default_rng(4).random(len(frame)) < 0.1
    gone[: 2 * num_assets] = gone[-2 * num_assets :] = False
    return nca.read_bars(frame[~gone])


@pytest.fixture(scope="module")
def backtested(tmp_path_factory):
    """Bars, an agent that never trained, and its backtest; each made once."""
    made = {}

    def of(env, agent):
        key = repr((env, agent))
        if key not in made:
            bars, config = holey(), EnvConfig(features=FEATURES, **env)
            agent = dataclasses.replace(AGENT, **agent)
            run = untrained_run(tmp_path_factory.mktemp("runs") / "a", bars, config, agent)
            made[key] = bars, run, nca.backtest(bars, run)
        return made[key]

    return of


load = functools.cache(nca.load)  # what it compiles serves each test of the same run


def before(result, row):
    """What was held at a close before its decision, and what was last ordered."""
    held = result.weights.to_numpy()[row]
    if result.fill == "close":  # the table has the weights after the fill at this close
        earlier = result.weights.to_numpy()[row - 1]
        close = result.bars.close
        grown = earlier * (close[row] / close[row - 1])
        held = grown / (1.0 + (grown - earlier).sum())
    return held, result.targets.ffill().to_numpy()[row - 1]


def test_what_is_loaded_is_taken_where_a_run_is(backtested, tmp_path):
    bars, run, result = backtested({}, {})
    agent = nca.load(run.path)
    assert nca.backtest(bars, agent).equity.equals(result.equity)
    mixes = [
        nca.blend({"a": (x, 0.5), "b": (nca.rules.sma_cross(3, 9), 0.5)}) for x in (agent, run)
    ]
    mixed, same = (nca.backtest(bars, mix, look=False).equity for mix in mixes)
    assert mixed.equals(same)
    nca.write_bars(bars, tmp_path / "bars.parquet")
    given = agent, f"replay:{tmp_path}/bars.parquet", tmp_path / "paper.db"
    done = nca.paper_trade(*given)
    assert done["equity"] == pytest.approx(result.equity.iloc[-1], rel=1e-9)
    for name, value in (("seed", 0), ("force_agent", True), ("allow_code", True)):
        with pytest.raises(ConfigError, match=f"{name}.*: the run is open; give it to nca.load"):
            nca.paper_trade(*given, **{name: value})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.few(2)
def test_a_decision_is_that_of_the_backtest_bit_for_bit(backtested, case):
    env, agent, _ = CASES[case]
    bars, run, result = backtested(env, agent)
    loaded, targets = load(run.path), result.targets.to_numpy()
    first = run.policy.first_decision
    rows = [first, *range(first + 1, len(bars), 80), len(bars) - 1]
    for row in rows:
        found = loaded.decide(bars[: row + 1], *before(result, row))
        if result.fill == "close":  # what is held is computed by hand here, to rounding
            np.testing.assert_allclose(found, targets[row], rtol=0, atol=1e-6)
        else:
            np.testing.assert_array_equal(found, targets[row])
    assert len(np.unique(targets[rows])) > 1


@pytest.mark.parametrize("case", CASES)
@pytest.mark.few(2)
def test_a_stream_decides_as_the_backtest(backtested, case):
    env, agent, chosen = CASES[case]
    bars, run, result = backtested(env, agent)
    live, targets = load(run.path).stream(), result.targets.to_numpy()
    first = run.policy.first_decision
    assert (live.first_decision, live.symbols, live.rows) == (first, bars.symbols, 0)
    for row, bar in enumerate(bars.each()):
        held = before(result, row)[0] if row else np.zeros(2)
        found = live.update(bar, held)
        if row < first:
            assert np.isnan(found).all()
        elif chosen:
            # Sizes are float64, and the tests' flags round a loop otherwise than a single step.
            np.testing.assert_allclose(found, targets[row], rtol=1e-14 * ("sizes" in case))
        else:
            np.testing.assert_allclose(found, targets[row], rtol=0, atol=1e-5)
    assert live.rows == len(bars)


def test_a_stream_that_begins_with_history_is_the_same_stream(backtested):
    bars, run, _ = backtested({}, {})
    agent = load(run.path)
    whole, late = agent.stream(), agent.stream(bars[:150])
    held = [0.25, -0.5]
    for bar in bars[:150].each():
        whole.update(bar, held, ordered=held)
    for row in range(150, 200):
        # Bars of one row, and weights by symbol, are the same call.
        named = dict(zip(bars.symbols[::-1], held[::-1], strict=True))
        one = whole.update(next(bars[row : row + 1].each()), held, ordered=held)
        np.testing.assert_array_equal(late.update(bars[row : row + 1], named, ordered=named), one)


@pytest.mark.heavy
@pytest.mark.parametrize("sizing", ["fixed", "volatility"])
def test_a_baseline_that_was_deployed_decides_in_the_agents_place(backtested, monkeypatch, sizing):
    bars, run, _ = backtested({"sizing": sizing}, {})
    rule = nca.rules.sma_cross(5, 20)
    monkeypatch.setattr(type(run), "replacement", property(lambda self: rule))
    agent = nca.load(run.path)
    assert repr(agent) == f"LoadedAgent({rule.name!r}, {', '.join(bars.symbols)})"
    result = nca.backtest(bars, agent.run)
    live, standing = agent.stream(), result.targets.ffill().to_numpy()
    for row in range(len(bars)):
        found = live.update(bars[row : row + 1], [0.0, 0.0])
        # As above: sizes of a loop and of a single step differ in their last bit here.
        want = result.targets.to_numpy()[row]
        np.testing.assert_allclose(found, want, rtol=1e-14 * (sizing == "volatility"))
        if row % 40 == 30:
            found = agent.decide(bars[: row + 1], [0.0, 0.0])
            np.testing.assert_array_equal(found, standing[row])


@pytest.mark.heavy
def test_the_service_of_the_guide_answers_with_target_weights(opened):
    bars, agent = opened
    *_, service = blocks((ROOT / "docs" / "guides" / "serve.md").read_text(), "python")
    space = {"nca": nca, "live": agent.stream(bars[:100])}
    exec(service, space)
    bar = next(bars[100:101].each())
    fields = {name: x.tolist() for name, x in bar._asdict().items() if x is not None}
    sent = json.dumps({"bar": fields, "held": [0.0, 0.5]}).encode()
    said = []

    async def receive():
        return {"type": "http.request", "body": sent}

    async def send(message):
        said.append(message)

    scope = {"type": "http", "method": "POST", "path": "/update", "headers": []}
    asyncio.run(space["app"](scope, receive, send))
    assert said[0]["status"] == 200
    expected = agent.stream(bars[:100]).update(bar, [0.0, 0.5])
    np.testing.assert_array_equal(json.loads(said[1]["body"]), expected)


@pytest.fixture(scope="module")
def opened(backtested):
    bars, run, _ = backtested({}, {})
    return bars, load(run.path)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.5], "weights = .*give a finite number for each of"),
        ([0.5, np.nan], "weights = .*give a finite number"),
        ("half", "weights = 'half'"),
        ({"A": 0.5}, "weights are of A; give"),
        (pd.Series([0.5, 0.5]), "weights are of 0, 1; give"),
    ],
)
def test_weights_that_do_not_fit_are_refused(opened, weights, message):
    bars, agent = opened
    with pytest.raises(nca.ConfigError, match=message):
        agent.decide(bars, weights)
    with pytest.raises(nca.ConfigError, match=message):
        agent.stream().update(bars[:1], weights)


def test_bars_that_do_not_fit_are_refused_and_lose_nothing(opened):
    bars, agent = opened
    live, held = agent.stream(bars[:100]), [0.0, 0.0]
    good = next(bars[100:101].each())
    for bad, message in (
        (bars[99:100], "is not after the last bar's"),
        (bars[100:102], "bar is 2 bars of"),
        (bars[100:101].select(bars.symbols[0]), "bar is 1 bars of .*; give one of"),
        (good._replace(close=good.close[:1]), r"close has shape \(1,\)"),
        (good._replace(low=good.high * 2), "has impossible prices"),
        (good._replace(open=np.array([np.nan, 1.0])), "has impossible prices"),
    ):
        with pytest.raises(nca.BarError, match=message):
            live.update(bad, held)
    for worth in (-1.0, 0.0):
        with pytest.raises(nca.ConfigError, match="equity is"):
            live.update(good, held, equity=worth)
    expected = agent.stream(bars[:100]).update(good, held)
    np.testing.assert_array_equal(live.update(good, held), expected)
    with pytest.raises(nca.BarError, match="give more bars"):
        agent.decide(bars[:20], held)
    with pytest.raises(nca.ConfigError, match=r"look swapped|give nca\.Bars"):
        agent.decide(held, bars)
    with pytest.raises(nca.RunError):
        nca.load("no-such-run")
    with pytest.raises(nca.ConfigError, match="path is the number"):
        nca.load(3)


@pytest.mark.heavy
def test_what_was_ordered_before_is_what_the_last_call_returned(backtested):
    bars, run, result = backtested({"actions": "orders"}, {})
    agent, first = nca.load(run.path), run.policy.first_decision
    told, untold = (agent.stream(bars[:first]) for _ in range(2))
    rows = range(first, len(bars))
    weights, last = result.weights.to_numpy(), result.targets.shift(1).fillna(0.0).to_numpy()
    found = [untold.update(bars[r : r + 1], weights[r]) for r in rows]
    again = [told.update(bars[r : r + 1], weights[r], ordered=last[r]) for r in rows]
    np.testing.assert_array_equal(found, again)
    assert len(np.unique(found)) > 2


@pytest.mark.heavy
def test_an_agent_that_remembers_what_it_earned_streams_with_its_equity(backtested):
    bars, run, result = backtested({"reward": "drawdown"}, {})
    agent, first = nca.load(run.path), run.policy.first_decision
    with pytest.raises(nca.ConfigError, match=r"observes what it earned.*use `stream`"):
        agent.decide(bars, [0.0, 0.0])
    live = agent.stream(bars[:first])
    with pytest.raises(nca.ConfigError, match="equity: the agent observes"):
        live.update(bars[first : first + 1], [0.0, 0.0])
    for row in range(first, len(bars)):
        held, worth = result.weights.to_numpy()[row], 7e6 * result.equity.iloc[row]
        found = live.update(bars[row : row + 1], held, equity=worth)
        np.testing.assert_array_equal(found, result.targets.to_numpy()[row])


@pytest.mark.heavy
def test_an_exported_file_and_other_symbols_decide_too(backtested, tmp_path):
    bars, run, _ = backtested({}, {})
    file = tmp_path / "agent.nca"
    write_exported(file, run, compact(run, run.params(), Coding(bits=16), None, None))
    agent = nca.load(file)
    assert agent.symbols == bars.symbols
    other = random_bars(np.random.default_rng(9), 120, 3)
    result = nca.backtest(other, agent.run)
    found = agent.decide(other, *before(result, 119))
    np.testing.assert_array_equal(found, result.targets.to_numpy()[119])
    assert agent.stream(other[:10]).symbols == other.symbols
