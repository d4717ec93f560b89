"""Risk limits: one code for backtest and paper, and a plain ledger that shares none of it."""

import itertools
import math

import numpy as np
import pytest

import nca_trader as nca
from nca_trader.envs.account.risk import (
    CODES,
    Allow,
    Clip,
    Deny,
    Intent,
    apply_limits,
    lifted,
    open_guard,
    verdict,
)
from nca_trader.errors import ConfigError, HaltError
from nca_trader.evaluate.backtest import backtest
from nca_trader.numerics import float64_on_cpu
from nca_trader.paper.journal.journal import read_events, verify
from nca_trader.paper.session.halts import resume


def guard(limits, assets=1):
    with float64_on_cpu():
        return open_guard(assets, limits, float)


def decide(memory, what, limits, order="rebalance"):
    """The state after the limits, and their verdict."""

    def is_order(target):
        return ~np.isnan(target) & ((order == "rebalance") | (target != what.ordered))

    with float64_on_cpu():
        memory, target = apply_limits(memory, what, limits, is_order)
    return memory, verdict(memory, np.asarray(what.target), np.asarray(target))


def intent(target, held=None, ordered=None, equity=1.0, seconds=0, moved=None):
    none = np.zeros(len(target))
    held = none if held is None else np.array(held, float)
    return Intent(
        np.array(target, float),
        held,
        held if ordered is None else np.array(ordered, float),
        np.log(equity),
        seconds,
        none if moved is None else np.array(moved, float),
    )


def asked(limits, order="rebalance", **given):
    what = intent(**given)
    return decide(guard(limits, len(what.target)), what, limits, order)[1]


@pytest.mark.parametrize(
    ("limits", "given", "target", "code"),
    [
        (dict(max_position=0.5), dict(target=[0.8, -0.9]), [0.5, -0.5], "max-position"),
        (dict(max_gross=1.0), dict(target=[1.5, -0.5]), [0.75, -0.25], "max-gross"),
        # What is not ordered now stands as it was ordered.
        (
            dict(max_gross=1.0),
            dict(target=[np.nan, 0.9], held=[0.3, 0.0], ordered=[0.4, 0.0]),
            [np.nan, 0.6], "max-gross",
        ),
        (dict(max_order=0.25), dict(target=[1.0, -1.0], held=[0.5, 0.0]), [0.75, -0.25],
         "max-order"),
        (dict(max_order=0.25), dict(target=[0.0], held=[1.0]), [0.75], "max-order"),
    ],
)  # fmt: skip
def test_a_target_is_cut_to_its_limit(limits, given, target, code):
    found = asked(nca.Limits(**limits), **given)
    assert isinstance(found, Clip) and set(found.codes.values()) == {code}
    np.testing.assert_array_equal(found.target, target)


def test_a_bar_that_moves_too_far_is_not_traded():
    limits = nca.Limits(price_collar=0.1)
    found = asked(limits, target=[1.0, 1.0], moved=[0.11, -0.09])
    np.testing.assert_array_equal(found.target, [np.nan, 1.0])
    assert found.codes == {0: "price-collar"}
    assert asked(limits, target=[1.0], moved=[-0.2]) == Deny("price-collar", {"assets": 1})


def test_orders_of_a_minute_are_counted_and_exits_come_first():
    limits = nca.Limits(max_orders_per_minute=2)
    memory = guard(limits, 3)
    memory, found = decide(memory, intent([0.3, 0.3, 0.0], held=[0, 0, 1], seconds=100), limits)
    np.testing.assert_array_equal(found.target, [0.3, np.nan, 0.0])
    assert found.codes == {1: "max-orders-per-minute"}
    memory, found = decide(memory, intent([np.nan, 0.3, np.nan], seconds=159), limits)
    assert found == Deny("max-orders-per-minute", {"assets": 1})
    memory, found = decide(memory, intent([np.nan, 0.3, np.nan], seconds=160), limits)
    assert found == Allow()
    # Under "on_change" the same target again is no order.
    again = intent([0.3, 0.3, 0.3], ordered=[0.3, 0.3, 0.3], seconds=161)
    assert decide(memory, again, limits, "on_change")[1] == Allow()


def test_a_loss_halts_until_it_is_lifted_and_counts_from_there():
    limits = nca.Limits(max_drawdown=0.1, max_daily_loss=0.05)
    memory, day = guard(limits), 86_400
    for equity, seconds in ((1.0, 0), (1.2, 100), (1.15, day), (1.145, day + 60), (1.10, 2 * day)):
        memory, found = decide(memory, intent([0.5], equity=equity, seconds=seconds), limits)
        assert found == Allow(), equity
    memory, found = decide(memory, intent([0.5], equity=1.079, seconds=3 * day), limits)
    assert found.code == "max-drawdown" and found.halts
    assert found.detail["loss"] == pytest.approx(1 - 1.079 / 1.2)
    memory, found = decide(memory, intent([0.5], equity=1.3, seconds=4 * day), limits)
    assert found.code == "max-drawdown"  # latched, whatever equity does
    memory = lifted(memory)
    memory, found = decide(memory, intent([0.5], equity=1.24, seconds=4 * day + 1), limits)
    assert found == Allow()
    memory, found = decide(memory, intent([0.5], equity=1.23, seconds=4 * day + 2), limits)
    assert found.code == "max-daily-loss"
    assert found.detail["loss"] == pytest.approx(1 - 1.23 / 1.3)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_drawdwn": 0.1, "max_order": float("nan")}, ["did you mean 'max_drawdown'?"]),
        (
            {"max_position": -1.0, "max_drawdown": 1.0, "max_orders_per_minute": 0},
            ["max_position", "max_drawdown", "max_orders_per_minute"],
        ),
        ({"max_order": float("nan"), "price_collar": "5%"}, ["max_order=nan", "price_collar='5%'"]),
    ],
)
def test_all_wrong_limits_are_refused_at_once(values, said):
    with pytest.raises(ConfigError) as caught:
        nca.Limits(**values)
    assert all(text in str(caught.value) for text in said)
    assert len(str(caught.value).splitlines()) == len(said)


# A ledger in plain Python: cash and units, prices in money, one asset after the other.


def cut_by_hand(target, held, ordered, limits, moved, recent, on_change):
    """The targets that may be ordered; what a person would do with a pocket calculator."""
    is_order = lambda i, t: not np.isnan(t) and not (on_change and t == ordered[i])  # noqa: E731
    out = [float(t) for t in target]
    for i, t in enumerate(out):
        if limits.price_collar and is_order(i, t) and abs(moved[i]) > limits.price_collar:
            out[i] = np.nan
        elif limits.max_position and not np.isnan(t):
            out[i] = min(max(t, -limits.max_position), limits.max_position)
    if limits.max_gross:
        fixed = sum(abs(o) for o, t in zip(ordered, out, strict=True) if np.isnan(t))
        want = sum(abs(t) for t in out if not np.isnan(t))
        if want > limits.max_gross - fixed:
            share = max(limits.max_gross - fixed, 0.0) / want
            out = [t * share for t in out]
    if limits.max_order:
        was_cut = False
        for i, t in enumerate(out):
            if is_order(i, t) and abs(t - held[i]) > limits.max_order:
                out[i] = stepped(held[i], held[i] + np.sign(t - held[i]) * limits.max_order)
                was_cut = True
        if limits.max_gross and was_cut:
            after = [o if np.isnan(t) else t for o, t in zip(ordered, out, strict=True)]
            grows = [i for i, t in enumerate(out) if is_order(i, t) and abs(t) > abs(held[i])]
            more = sum(abs(after[i]) - abs(held[i]) for i in grows)
            room = limits.max_gross - (sum(map(abs, after)) - more)
            if more > room:
                for i in grows:
                    share = max(room, 0.0) / more
                    out[i] = stepped(held[i], held[i] + (out[i] - held[i]) * share)
    if limits.max_orders_per_minute:
        left = limits.max_orders_per_minute - recent
        asks = [i for i, t in enumerate(out) if is_order(i, t)]
        asks.sort(key=lambda i: (abs(out[i]) >= abs(held[i]) - 1e-9, i))
        for i in asks[max(left, 0) :]:
            out[i] = np.nan
    return np.array(out)


def stepped(held, target):
    """A multiple of 2 ** -30 on the way from what is held."""
    steps = target * 2**30
    return (math.floor(steps) if target > held else math.ceil(steps)) / 2**30


def ledger(bars, targets, costs, limits, fill, order):
    """Equity at each close, the orders, and the row at which a loss halts."""
    cash, units = 1.0, np.zeros(bars.num_assets)
    ordered, pending = np.zeros(bars.num_assets), np.full(bars.num_assets, np.nan)
    equity, orders, peak, before, opened, day, times = [], [], 1.0, 1.0, 1.0, None, []
    halted = None

    def trade(price):
        nonlocal cash
        worth = cash + (units * price).sum()
        for i in np.flatnonzero(~np.isnan(pending)):
            more = pending[i] * worth / price[i] - units[i]
            paid = price[i] * (1 + np.sign(more) * costs.slippage)
            cash -= more * paid + abs(more) * paid * costs.commission
            units[i] += more
            pending[i] = np.nan

    for row in range(len(bars)):
        if fill == "next_open":
            trade(bars.open[row])
        close, now = bars.close[row], cash + (units * bars.close[row]).sum()
        equity.append(now)
        seconds = int(bars.time[row].astype("datetime64[s]").astype(int))
        if seconds // 86_400 != day:
            day, opened = seconds // 86_400, before
        peak, before = max(peak, now), now
        if halted is None and (
            (limits.max_drawdown and now < peak * (1 - limits.max_drawdown))
            or (limits.max_daily_loss and now < opened * (1 - limits.max_daily_loss))
        ):
            halted = row
            pending[:] = np.nan
        if halted is not None:
            orders.append(np.full(bars.num_assets, np.nan))
            continue
        held, last = units * close / now, bars.close[row - 1] if row else bars.open[row]
        recent = sum(t > seconds - 60 for t in times)
        target = cut_by_hand(
            targets[row], held, ordered, limits, close / last - 1.0, recent, order == "on_change"
        )
        new = ~np.isnan(target) & ((order == "rebalance") | (target != ordered))
        times += [seconds] * int(new.sum())
        ordered = np.where(np.isnan(target), ordered, target)
        pending = np.where(new, target, pending)
        orders.append(np.where(new, target, np.nan))
        if fill == "close":
            trade(close)
            equity[-1] = cash + (units * close).sum()
    return np.array(equity), np.array(orders), halted


CASES = {
    "sizes": dict(max_position=0.35, max_gross=0.6, max_order=0.2),
    "one order at a time": dict(max_orders_per_minute=1, price_collar=0.015),
    "a daily loss": dict(max_daily_loss=0.012, max_position=0.5),
    "a drawdown": dict(max_drawdown=0.05),
    "all": dict(
        max_position=0.45, max_gross=0.7, max_order=0.3, max_orders_per_minute=3,
        price_collar=0.03, max_daily_loss=0.2, max_drawdown=0.08,
    ),
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("case", "fill", "order"),
    [
        *((case, "next_open", "on_change") for case in CASES),
        ("all", "close", "rebalance"),
        ("one order at a time", "next_open", "rebalance"),
    ],
)
@pytest.mark.few(3)
def test_backtest_ledger_and_paper_agree_under_limits(tmp_path, stage, case, fill, order):
    limits = nca.Limits(**CASES[case])
    bars = stage.bars(num_bars=150, seed=5)
    agent = stage.agent(
        targets=(-0.4, 0.0, 0.5), fill=fill, order=order, risk=limits, borrow=True, max_gross=None
    )
    path, stopped = tmp_path / "paper.db", False
    try:
        stage.replay(path, bars, agent)
    except HaltError as error:
        stopped, said = True, str(error)
    targets = stage.decided(path, bars)
    rules = dict(fill=fill, order=order, borrow=True, risk=limits)
    result = backtest(bars, targets, stage.costs, **rules)
    equity, orders, halted = ledger(bars, targets, stage.costs, limits, fill, order)
    end = len(bars) if halted is None else halted + 1
    np.testing.assert_allclose(result.equity.to_numpy()[:end], equity[:end], rtol=1e-12)
    events = list(read_events(path))
    # Paper: the same halt, the same orders bit for bit, and its equity.
    assert stopped == (halted is not None)
    if stopped:
        code = events[-1].body["code"]
        assert events[-1].kind == "halt" and code in said and code in CODES
        assert int(events[-1].ts_event) == bars.time[halted].astype(int)
        assert any(code in caution for caution in result.cautions)
        assert np.flatnonzero(result.trace.halted)[0] == halted
    sent = {(e.ts_event, e.body["symbol"]): e.body["weight"] for e in events
            if e.kind == "order_intent"}  # fmt: skip
    for row, i in itertools.product(range(end), range(2)):
        expected = orders[row, i]
        found = sent.pop((int(bars.time[row].astype(int)), bars.symbols[i]), np.nan)
        np.testing.assert_allclose(found, expected, rtol=1e-14)
    assert not sent
    snapshots = [e.body["equity"] for e in events if e.kind == "snapshot"]
    begin = stage.first_decision
    np.testing.assert_allclose(snapshots, result.equity.to_numpy()[begin:end], rtol=4e-15)
    # The limits matter here: without them the orders are others.
    assert {e.body["code"] for e in events if e.kind == "risk"} - {"policy-not-finite"}
    assert any("LIMITED" in c or "HALTED" in c for c in result.cautions)


def test_a_journal_without_limits_is_as_before_and_limits_are_part_of_a_session(tmp_path, stage):
    bars = stage.bars()
    plain = stage.replay(tmp_path / "a.db", bars, stage.agent())
    started = next(read_events(tmp_path / "a.db", "run_started")).body
    assert "limits" not in started and "risk" not in started["rules"]
    wide = nca.Limits(max_position=10.0, max_drawdown=0.99)
    limited = stage.replay(tmp_path / "b.db", bars, stage.agent(risk=wide))
    assert (limited["equity"], limited["orders"]) == (plain["equity"], plain["orders"])
    started = next(read_events(tmp_path / "b.db", "run_started")).body
    assert started["limits"] == {"max_position": 10.0, "max_drawdown": 0.99}
    with pytest.raises(ConfigError, match=r"another session .*limits\.max_position"):
        stage.replay(tmp_path / "b.db", bars, stage.agent(risk=nca.Limits(max_position=1.0)))


@pytest.mark.heavy
def test_a_halt_survives_restarts_and_after_resume_the_session_goes_on(tmp_path, stage):
    limits = nca.Limits(max_drawdown=0.05)
    bars = stage.bars(num_bars=200, seed=5)
    agent = stage.agent(risk=limits)
    path, halts = tmp_path / "paper.db", []
    while True:
        try:
            result = stage.replay(path, bars, agent)
            break
        except HaltError as error:
            assert "max-drawdown" in str(error) and "nca-trader resume" in str(error)
            halts.append(verify(path))
            with pytest.raises(HaltError, match="was halted at"):
                stage.replay(path, bars, agent)
            assert verify(path) == halts[-1]  # nothing was written
            resume(path, "looked at it", 0)
    assert len(halts) >= 2 and result["bars"] == 200
    events = list(read_events(path))
    marks = [e for e in events if e.kind in ("halt", "resume")]
    assert [e.kind for e in marks] == ["halt", "resume"] * len(halts)
    assert stage.replay(path, bars, agent) == result  # and repeats all of it
    # From each halt on, losses count from its close: by the snapshots alone.
    times = [e.ts_event for e in marks if e.kind == "halt"]
    peak = 1.0
    for event in events:
        if event.kind == "snapshot":
            now = event.body["equity"]
            peak = max(peak, now)
            assert (now < 0.95 * peak) == (event.ts_event in times)
            peak = now if event.ts_event in times else peak
