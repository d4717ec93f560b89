"""Slower time frames and comparisons: the same in training, backtests, Gymnasium and sessions."""

import contextlib
import dataclasses

import gymnasium
import jax
import numpy as np
import pandas as pd
import pytest
from drawn import bars_of, random_bars
from livedesk import Tape
from tiny import AGENT
from untrained import untrained_run

import nca_trader as nca
from nca_trader.cli import main
from nca_trader.data.shards import write_shards
from nca_trader.errors import BarError, RunError
from nca_trader.numerics import float64_on_cpu
from nca_trader.paper.journal.journal import Journal, read_events
from nca_trader.paper.session.agents import run_agent
from nca_trader.paper.session.trade import open_session
from nca_trader.paper.venues.exchange import Exchange
from nca_trader.runs.exported import read_run
from nca_trader.runs.portable import portable

STEP = 1800  # seconds
ENV = nca.EnvConfig(
    features=("return_1", "1h:rsi", "1d:rsi", "rank:1h:rsi", "zscore:return_1"),
    sessions="new_york",
    costs=nca.Costs(commission=5e-4, slippage=2e-4),
)
WARMUP = 16 * 13 - 2  # 14 days, the worst first day, and the day that gives the value


@pytest.fixture(scope="module")
def bars():
    """Half hours of New York over a change of the clock, with missing bars and a whole hole."""
    days = [d for d in pd.bdate_range("2024-02-12", "2024-03-28") if f"{d:%m-%d}" != "02-19"]
    hours = [pd.date_range(d + pd.Timedelta("9.5h"), periods=13, freq="30min") for d in days]
    times = hours[0].append(hours[1:]).tz_localize("America/New_York").tz_convert(None)
    drawn = random_bars(np.random.default_rng(5), len(times), 2, missing=0.05)
    drawn = dataclasses.replace(drawn, time=times.to_numpy("datetime64[ns]"))
    rows = np.delete(np.arange(len(times)), slice(103, 110))
    fields = {name: getattr(drawn, name)[rows] for name in ("time", *drawn.fields)}
    return dataclasses.replace(drawn, **fields)


@pytest.fixture(scope="module")
def run(bars, tmp_path_factory):
    return untrained_run(tmp_path_factory.mktemp("runs") / "slow", bars[:300], ENV, AGENT)


@pytest.fixture(scope="module")
def result(bars, run):
    return nca.backtest(bars, run, start=str(bars.time[0]), look=False)


def test_the_warm_up_counts_bars_outside_the_sessions():
    time = pd.date_range("2024-02-12", periods=1_200, freq="30min").to_numpy("datetime64[ns]")
    drawn = random_bars(np.random.default_rng(0), len(time), 1)
    clock = dataclasses.replace(drawn, time=time)
    spec = nca.TradingEnv(clock, dataclasses.replace(ENV, features=("1d:rsi",))).spec
    # From the bar after an open to the close 15 sessions later: three weeks, the holiday of
    # 19 February, and the 11 half hours from 10:00 to the one that ends at 16:00.
    assert spec.warmup == 22 * 48 + 11
    for first in (0, 1, 20, 21, 50):
        part = clock[first : first + 1_120]
        late = nca.TradingEnv(part, dataclasses.replace(ENV, features=("1d:rsi",)))
        assert (np.asarray(late.features)[spec.warmup :] != 0).all()


@pytest.mark.heavy
def test_paper_and_an_exported_agent_decide_as_the_backtest(bars, run, result, tmp_path):
    nca.write_bars(bars, tmp_path / "bars.parquet")
    nca.paper_trade(run.path, f"replay:{tmp_path}/bars.parquet", tmp_path / "paper.db")
    events = list(read_events(tmp_path / "paper.db", "decision"))
    assert len(events) > 50
    at = np.searchsorted(bars.time.astype(np.int64), [event.ts_event for event in events])
    paper = np.array([event.body["target"] for event in events])
    np.testing.assert_array_equal(paper, result.targets.to_numpy()[at])
    file = tmp_path / "slow.nca"
    words = ["--run", str(run.path), "--data", f"{tmp_path}/bars.parquet", "--out", str(file)]
    assert main(["export", *words]) == 0  # with rounded weights
    exported = nca.backtest(bars, read_run(file), start=str(bars.time[0]), look=False)
    nca.paper_trade(file, f"replay:{tmp_path}/bars.parquet", tmp_path / "file.db")
    events = read_events(tmp_path / "file.db", "decision")
    paper = np.array([event.body["target"] for event in events])
    np.testing.assert_array_equal(paper, exported.targets.to_numpy()[at])


class Asked(Tape):
    """Remembers how many bars of history it is asked for."""

    def history(self, count):
        self.asked = count
        return super().history(count)


@pytest.mark.heavy
def test_a_live_session_asks_for_enough_history_and_sees_what_the_backtest_sees(
    bars, run, tmp_path
):
    agent, seen = run_agent(run, ENV.account), []

    def act(memory, bar, *rest):
        memory, account, decision = agent.act(memory, bar, *rest)
        seen.extend([] if decision is None else [(int(bar.time[0]), decision.features)])
        return memory, account, decision

    # It begins in the midst of a day, so the slow bars of a part of a day come first.
    late = bars[4:]
    tape = Asked(late, tmp_path / "place", agent.first_decision + 1, period=STEP)
    venue = Exchange(tmp_path / "books", 1e5, agent.symbols, agent.rules)
    with contextlib.closing(venue), Journal(tmp_path / "live.db", tape.now) as journal:
        session = open_session(agent._replace(act=act), tape, venue, journal, 1e5, warmup=1)
        session.trade(lambda: len(seen) > 40)
    # The bars on which a value depends; the tape has fewer, so it is asked once more.
    assert tape.asked == 2 * agent.history > agent.first_decision > WARMUP
    features, rows = np.asarray(nca.TradingEnv(late, ENV).features), late.seconds.tolist()
    assert len(seen) > 40
    for second, values in seen:
        np.testing.assert_array_equal(values, features[rows.index(second)])


def test_bars_of_another_length_are_refused_wherever_a_run_goes(bars, run, tmp_path):
    hours = bars_of(bars.close, step="h", start="2024-05-01", symbols=bars.symbols)
    for subject in (run, nca.blend({"agent": (run, 1.0)})):
        with pytest.raises(BarError, match="are of 3600 s, and the features of 1800 s"):
            nca.backtest(hours, subject, look=False)
    nca.write_bars(hours, tmp_path / "hours.parquet")
    with pytest.raises(BarError, match="are of 3600 s, and the features of 1800 s"):
        nca.paper_trade(run.path, f"replay:{tmp_path}/hours.parquet", tmp_path / "paper.db")


@pytest.mark.heavy
def test_own_code_of_a_slower_frame_needs_the_same_consent(bars, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_slow.py").write_text(
        "import jax.numpy as jnp\nimport numpy as np\n"
        "from nca_trader.data.features import make_feature\n"
        "def gap(times=1.0):\n"
        "    def update(state, bar, count):\n"
        "        return state, times * jnp.log(bar.close / bar.open)\n"
        "    return make_feature(lambda: np.zeros(()), update, warmup=0)\n"
    )
    env = dataclasses.replace(ENV, features=("1h:mine_slow:gap(times=2.0)", "mine_slow:gap"))
    run = untrained_run(tmp_path / "runs" / "own", bars[:100], env, AGENT)
    assert set(run.manifest.code) == {"mine_slow:gap(times=2.0)", "mine_slow:gap"}
    features = np.asarray(nca.TradingEnv(bars[:100], env).features)
    slow = nca.resample(bars[:100], "1h", nca.new_york(2024, 2024))
    last = int(np.searchsorted(slow.time, bars.time[90] + np.timedelta64(30, "m"), "right")) - 1
    want = 2.0 * np.log(slow.close[last] / slow.open[last])
    here = bars.present[90] & slow.present[last]
    np.testing.assert_allclose(features[90, here, 0], want[here], rtol=1e-6)
    (run.path / "signature").unlink()
    monkeypatch.setattr("nca_trader.runs.consent._allowed", set())
    with pytest.raises(RunError, match="mine_slow"):
        nca.Run(run.path)


@pytest.mark.heavy
def test_an_environment_holds_until_its_slow_bars_are_warm(bars, run):
    for first in range(13):  # of any first bar of a day, with holes
        part = bars[first : first + 260]
        env = nca.TradingEnv(part, ENV)
        assert env.spec.warmup == WARMUP and env.spec.bar_seconds == STEP
        shown = np.asarray(env.features)[WARMUP:]
        assert (shown[..., :3][part.present[WARMUP:]] != 0).all()
        # Only where both assets have a bar there is something to compare with.
        both = part.present[WARMUP:].all(axis=1)
        assert (shown[both, :, 3:] != 0).all() and not shown[~both, :, 3:].any()
    assert run.spec.warmup == WARMUP == nca.Run(run.path).spec.warmup
    assert run.policy.first_decision > WARMUP


@pytest.mark.heavy
def test_gymnasium_shards_and_a_blend_see_what_the_backtest_sees(bars, run, result, tmp_path):
    env = nca.TradingEnv(bars, ENV)
    made = gymnasium.make("nca_trader/Trading-v0", bars=bars, config=ENV, window=1)
    row = env.spec.warmup + 40
    seen, _ = made.reset(options={"start": row})
    features = np.asarray(env.features)[row].ravel()
    np.testing.assert_array_equal(seen[: len(features)], features)
    shards = write_shards(bars, tmp_path / "shards", rows=len(bars))
    np.testing.assert_array_equal(nca.TradingEnv(shards, ENV).features, env.features)
    blended = nca.backtest(
        bars, nca.blend({"agent": (run, 1.0)}), ENV.costs, start=str(bars.time[0]), look=False
    )
    targets = result.targets.to_numpy()
    assert np.isfinite(targets).any()
    np.testing.assert_array_equal(blended.targets.to_numpy()[-100:], targets[-100:])


@pytest.mark.heavy
def test_a_loaded_agent_and_its_compiled_functions_see_the_same(bars, run):
    late = bars[: run.policy.first_decision + 30]
    seen = np.asarray(nca.TradingEnv(late, ENV).features)
    made = portable(run)
    memory = made.begin["observe"]
    observe = jax.jit(made.observe.call)
    with float64_on_cpu():
        for row, bar in enumerate(late.each()):
            memory, values, _, _ = observe(memory, *(getattr(bar, name) for name in made.fields))
            np.testing.assert_array_equal(values, seen[row])
    agent, flat = nca.load(run.path), np.zeros(2)
    live = agent.stream()
    for row, bar in enumerate(late.each()):
        target = live.update(bar, flat)
        if row == len(late) - 1:
            np.testing.assert_array_equal(target, agent.decide(late, flat, ordered=flat))
