"""Backtests of targets, a strategy or a trained run over real bars."""

from __future__ import annotations

import dataclasses
import os
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nca_trader.config import AccountConfig
from nca_trader.config.account import complete_account, gather_account
from nca_trader.config.ranges import expect
from nca_trader.data.time_frames import refuse_other_length
from nca_trader.envs.account.exits import Order
from nca_trader.envs.account.risk import shrunk_bars
from nca_trader.errors import BarError, ConfigError, argument, in_a_command, logger
from nca_trader.evaluate import metrics, trades
from nca_trader.evaluate.lookahead.outputs import function_targets
from nca_trader.evaluate.result import Result, columns_of
from nca_trader.evaluate.simulate import (
    simulate_agent,
    simulate_strategy,
    simulate_targets,
)
from nca_trader.evaluate.trades import part_earnings
from nca_trader.evaluate.wording import in_sample_sentence
from nca_trader.machine import keep_freed_memory
from nca_trader.markets import Task
from nca_trader.runs import trials as trial_log
from nca_trader.runs.folder import now
from nca_trader.runs.manifest import Run, seen_rows
from nca_trader.runs.trials import data_record
from nca_trader.strategies.blend import parts_of
from nca_trader.strategies.strategy import (
    Strategy,
    covariance_once,
    orders_by_covariance,
    run_in,
    sized_once,
    weights_until_sized,
)
from nca_trader.strategies.targets import (
    as_orders,
    as_targets,
    cut_of,
    in_force,
    largest_weight,
    late,
    needs_account,
    orders_in_force,
    refuse_no_targets,
    strategy_targets,
)
from nca_trader.types import Bars, Costs

log = logger(__name__)


def backtest(
    bars: Bars | Task,
    targets: Any,
    costs: Costs | None = None,
    fill: str | None = None,
    order: str | None = None,
    *,
    account: AccountConfig | None = None,
    start: str | None = None,
    stop: str | None = None,
    name: str | None = None,
    look: bool = True,
    check: bool = True,
    trials: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Result:
    """Run `targets` over `bars` and account for every bar in float64.

    Args:
      bars: N bars of A assets; or a synthetic task, whose state a run may have observed.
      targets: `[N]` (one asset) or `[N, A]` target weights, NaN for no order; a `Strategy`; a
        function of bars that returns such weights, row t decided with bars up to t; or a `Run`,
        or what `nca.load` opened, whose agents take their most probable actions: the mean of their
        orders is traded, or the baseline that its deployment.json names.
      costs: None is what the run trained with, or those of a blend's runs, or no costs.
      fill: "next_open" fills at the open after the decision, so the last target never fills;
        "close" fills at the close that the decision saw, which is idealised. None is the run's,
        or "next_open".
      order: "on_change" trades when the target changes, "rebalance" at each number. None is the
        run's or the strategy's own, and "rebalance" for weights and functions of bars.
      account: all that the account is given, with costs, fill and order, in one record.
      start: trade from the first bar at or after this date. Bars before it are history for
        warm-up, and the account begins flat with equity 1. Without it a run trades from the first
        bar after those that trained or selected it, if there is one, and a log line says so.
      stop: trade before this date.
      name: for reports.
      look: whether a run on bars that it has not seen counts as an evaluation on them, in the
        trial log next to its run folder. False is for bars that select among agents.
      check: whether a function of bars runs again on three truncated histories, and is refused
        where a past target changes.
      trials: project folder whose trial log counts a strategy on these bars, as a sweep does; the
        same targets on the same bars count once. None does not count. Runs are counted where they
        are trained, and at each look.
      settings: other fields of `nca.AccountConfig` by name, in the place of the record: max_gross,
        max_net, borrow, floor, maintenance_margin, capital, lot, tick, min_notional,
        max_participation, delist_after, delist_haircut, sizing, volatility_target,
        volatility_span, volatility_floor, size_cap, correlation_span, shrinkage, dead_band, risk,
        delay. What is not given is the run's, or no limit.

    Returns:
      The `Result` over the traded bars.

    Raises:
      BarError: targets that do not fit the bars, order nothing, or are above 10; no bars between
        start and stop; bars of symbols that the run does not trade, or too
        few for it to decide.
      ConfigError: an argument of another type, or swapped with another; a strategy that raises; an
        unknown field of an account, one outside its range, without effect, or that needs `capital`;
        an invalid date.
      RunError: the run has no parameters yet, see `Run.params`.
      StateError: the run's parameters are damaged, see `Run.params`.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[-500:]
      >>> costs = nca.Costs(commission=5e-4, slippage=2e-4)
      >>> result = nca.backtest(bars, nca.rules.sma_cross(10, 30), costs)
      >>> result.name, len(result.equity), result.num_fills > 10
      ('SMA cross 10/30', 500, True)
    """
    accepted = "Bars, e.g. of nca.read_bars, or a synthetic Task"
    expect("bars", bars, Bars | Task, accepted, targets=targets)
    expect("name", name, str | None, "a text")
    if isinstance(stop, Real):
        raise ConfigError(
            f"stop={float(stop):g}: is the date before which it trades; a level at which a "
            f"position is closed is stop_loss={float(stop):g}."
        )
    given = gather_account(account, {"costs": costs, "fill": fill, "order": order} | settings)
    keep_freed_memory()
    targets = run_in(targets)
    task, bars = bars, bars.bars if isinstance(bars, Task) else bars
    run = targets if isinstance(targets, Run) else None
    runs = (run,) if run else targets.runs if isinstance(targets, Strategy) else ()
    # By default an agent is evaluated on bars that neither trained nor selected it.
    seen = max((seen_rows(bars, each) for each in runs), default=0) if len(bars) else 0
    if start is None and 0 < seen < len(bars):
        start = _unseen(bars, seen, targets.name)
    if run is None:
        refuse_no_targets(targets)
    rules = complete_account(given, targets)
    if run is not None and (rule := run.replacement) is not None:
        run.refuse(bars)
        # The page must not show a baseline's result under the agent's name.
        named = name or f"{rule.name}, in the place of {run.name}"
        result = backtest(bars, rule, account=rules, name=named, start=start, stop=stop)
        return _in_its_place(result, run, seen - (0 if start is None else bars.row(start, "start")))
    span = first, last = rows_between(bars, start, stop)
    if run is not None:
        done = _of_run(task, run, bars, rules, first, last)
    elif isinstance(targets, Strategy) and targets.parts:
        done = _of_blend(targets, bars, rules, first, last)
    else:
        done = _of_targets(targets, bars, rules, first, last, check)
    # Counted here, because a run that was refused above is not an evaluation.
    in_sample, evaluations = _looked(runs, bars, span, seen, look) if runs else (None, None)
    trace, name = done.trace, name or done.name
    index, symbols = bars.index[first:last], pd.Index(bars.symbols)
    # Not `done` itself, which would keep the trace for as long as `again` lives.
    own, own_bars = done.again, done.known

    def again(baseline: Strategy | None = None, **changes: Any) -> Result:
        known, subject, length, same = task if run else own_bars, own, len(own_bars), rules
        if baseline is not None:
            known, subject, length, same = bars, baseline, len(bars), rules.without_levels
        return backtest(
            known,
            subject,
            # Complete, so that a rerun of a strategy's targets trades as the strategy does.
            account=dataclasses.replace(same, **changes),
            start=start,
            stop=stop if last < length else None,
            name=name if baseline is None else None,
            look=False,
        )

    result = Result(
        name=name,
        **columns_of(trace, index, symbols, rules.costs),
        logits=done.logits,
        rules=rules,
        bars_per_year=bars.bars_per_year,
        note=bars.note,
        in_sample=in_sample,
        evaluations=evaluations,
        cut=cut_of(np.asarray(trace.target), rules)._replace(small=trace.small),
        shrunk=_shrunk(bars[:last], np.asarray(trace.target), rules),
        bars=bars,
        run=run,
        unchecked=done.unchecked,
        parts=done.parts,
        indicators=targets.indicators if isinstance(targets, Strategy) else None,
        again=again,
    )
    if trials is not None and run is None:
        result, _ = count_trial(result, bars, first, trials, "backtest")
    # A command prints them with the metrics. Targets that order nothing expect no fill.
    if look and not in_a_command() and np.nan_to_num(trace.target).any():
        for caution in result.cautions:
            log.warning("%s: %s", result.name, caution)
    return result


def _shrunk(bars: Bars, ordered: np.ndarray, rules: AccountConfig) -> int:
    """Return on how many of the last bars the correlations of what was held were shrunk further."""
    sizing = rules.covariance
    if sizing is None or not sizing.may_shrink:
        return 0
    held = np.zeros(bars.close.shape, bool)
    held[len(bars) - len(ordered) :] = pd.DataFrame(ordered).ffill().fillna(0.0).to_numpy() != 0.0
    return shrunk_bars(bars, sizing, held)


class _Simulated(NamedTuple):
    """What was simulated; most fields are those of `Result`.

    known, again: the bars and targets that a rerun is given.
    """

    trace: Any
    name: str
    known: Bars
    again: Any
    logits: np.ndarray | None = None
    unchecked: bool = False
    parts: pd.DataFrame | None = None


def _unseen(bars: Bars, seen: int, name: str) -> str:
    """Return the time of the first bar that trained or selected nothing, and log it."""
    log.warning(
        "%s starts on %s, after the bars that it was trained or selected on; give %s to begin "
        "at another bar",
        name,
        bars.index[seen].date(),
        argument("start"),
    )
    return str(bars.index[seen])


def rows_between(
    bars: Bars, start: str | None, stop: str | None, least: int = 1
) -> tuple[int, int]:
    """Return the rows from `start` to before `stop`; there are at least so many."""
    first = 0 if start is None else bars.row(start, "start")
    last = len(bars) if stop is None else bars.row(stop, "stop")
    if last - first < least:
        known = "empty."
        if len(bars):
            known = f"there are bars from {bars.index[0]} to {bars.index[-1]}."
        few = f"{max(last - first, 0) or 'no'} bar"
        asked = f"{few} from {start or 'the first'} to {stop or 'the last'}"
        raise BarError(f"{bars.source or 'bars'}: {asked}; {known}")
    return first, last


def _in_its_place(result: Result, run: Run, seen: int) -> Result:
    """Return the result of the baseline that is deployed in the place of a run's agent.

    seen: its bars that trained or selected the run; more or fewer than it has.
    """
    # The gate chose it on the bars that selected the agent, so these are in sample for it too.
    over = max(min(seen, len(result.equity)), 0)
    standing = in_sample_sentence(over, len(result.equity)) if over else "Out of sample."
    notes = [result.note, run.deployment.sentence if run.deployment else ""]
    return dataclasses.replace(result, standing=standing, note=" ".join(filter(None, notes)))


def _of_run(
    task: Bars | Task, run: Run, bars: Bars, rules: AccountConfig, first: int, last: int
) -> _Simulated:
    """Simulate a run's agents."""
    trace, (logits,), targets = simulate_agent(task, run, (run.params(),), rules, first, last)
    if rules.delay:
        # The agent decided on the account it would have had; only its orders come late, and are
        # sized then, as those of a rule.
        decided = np.full(bars.close.shape, np.nan)
        decided[first:last] = targets
        trace = _by_orders(bars, bars, Order(decided), rules, first, last)
    return _Simulated(trace, run.name, bars, run, logits)


def _looked(
    runs: tuple[Run, ...], bars: Bars, span: tuple[int, int], seen: int, look: bool
) -> tuple[int, int | None]:
    """Return how many bars of a span some runs have seen, and count an evaluation on the others."""
    first, last = span
    in_sample = max(min(seen, last) - first, 0)
    # Only bars after those that the runs saw are a test. It is counted before any number is shown.
    if not look or first + in_sample >= last:
        return in_sample, None
    return in_sample, max(count_look(run, bars[first + in_sample : last]) for run in runs)


def _of_blend(mix: Strategy, bars: Bars, rules: AccountConfig, first: int, last: int) -> _Simulated:
    """Simulate a blend, and divide what it earned among its parts."""
    for run in mix.runs:
        refuse_other_length(bars, run.spec.bar_seconds)
    # Before the simulation, so that an error names the part that it is of.
    asked = parts_of(bars[:last], mix, first)
    done = _of_targets(mix, bars, rules, first, last, check=False)
    flat = late(asked.reshape(len(asked), -1), rules.delay + mix.lag)
    asked = in_force(flat, first)[first:].reshape(asked[first:].shape)
    traded, equity = bars[first:last], np.exp(done.trace.log_equity)
    units = trades.units_held(traded, equity, np.asarray(done.trace.weight))
    fills, at_open = trades.fills_in(traded, done.trace, rules), rules.fill == "next_open"
    return done._replace(
        parts=part_earnings(traded, mix.parts, asked, fills, units, equity, at_open)
    )


def _of_targets(
    targets: Any, bars: Bars, rules: AccountConfig, first: int, last: int, check: bool
) -> _Simulated:
    """Simulate a strategy, a function of bars, or an array of target weights."""
    most = largest_weight(rules)
    if isinstance(targets, Strategy):
        targets = sized_once(targets, rules.scale)
    if needs_account(bars, targets):
        # The delay is inside the strategy, because what it decides depends on fills that are late
        # as well.
        sized = covariance_once(targets.with_delay(rules.delay), rules.covariance)
        trace = simulate_strategy(bars, sized, rules, first, last)
        as_targets(trace.target, bars[first:last], most)  # refuses what is not a weight
        return _Simulated(trace, targets.name, bars, targets)
    known, name, unchecked = bars, "targets", False
    if isinstance(targets, Strategy):
        name, targets = targets.name, strategy_targets(bars, targets)
    elif callable(targets):
        # The function gets no bars after the span, because it may use all bars that it gets.
        known, name, unchecked = bars[:last], getattr(targets, "__name__", name), not check
        targets = function_targets(known, targets, check)
    if isinstance(targets, Order):
        orders = as_orders(targets, known, most)
    else:
        orders = Order(as_targets(targets, known, most))
    again = weights_until_sized(np.asarray(orders.target), known.present, rules.scale)
    orders = orders._replace(target=again)
    trace = _by_orders(bars, known, orders, rules, first, last)
    own = orders if orders.has_exits or isinstance(orders.size, np.ndarray) else again
    return _Simulated(trace, name, known, own, unchecked=unchecked)


def _by_orders(
    bars: Bars, known: Bars, orders: Order, rules: AccountConfig, first: int, last: int
) -> Any:
    """Simulate known orders, whose target is `[N, A]`, with their delay and sizes by covariance.

    `known` are the bars on which they were decided.
    """
    orders = Order._make(late(x, rules.delay) if isinstance(x, np.ndarray) else x for x in orders)
    if rules.covariance:
        orders = orders_by_covariance(known, orders, rules.covariance)
    orders = orders_in_force(orders, first)
    levels = rules.has_exits or orders.has_exits
    asked = orders if levels else orders.target * orders.size
    return simulate_targets(bars, asked, rules, first, last)


def count_trial(
    result: Result, bars: Bars, first: int, folder: Any, kind: str
) -> tuple[Result, trial_log.Tried]:
    """Count a result in a trial log; return it with the count.

    Args:
      result: over `bars` from row `first` on.
      bars: all that were given.
      first: row of its first bar.
      folder: of the log.
      kind: what made it, for readers.
    """
    digests = np.array([digest_of_trace(result.trace, first)], np.uint64)
    ratios = np.array([metrics.sharpe(result.excess_returns, float(len(result.equity)))])
    tried = trial_log.count_rules(folder, f"{kind} {result.name}", bars, digests, ratios)
    more = {"tried": tried.number, "tried_variance": tried.variance}
    return dataclasses.replace(result, **more), tried


def digest_of_trace(trace: Any, first: int) -> int:
    """Return the digest of what an account ordered from row `first` on, by which it is a trial."""
    return trial_log.digest_of_targets(trace.target, first, trace.left)


def count_look(run: Run, bars: Bars) -> int:
    """Record in the trial log that `run` is evaluated on these bars, which it has not seen.

    Returns:
      How many were counted on these symbols in years that overlap, with this one.
    """
    more, data = {"seed": run.selected, "time": now()}, data_record(bars)
    # Recorded first, so that the count below includes it.
    trial_log.record(run.root, trial_log.entry_of("test", run.name, data, **more))
    return trial_log.count(run.root, "test", data)
