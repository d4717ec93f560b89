"""Backtests: targets, a strategy or a trained run over real bars, in float64.

The accounting is `envs.account`, scanned; an agent sees features from the same scan that trained
it. Nothing else happens here but choosing what is ordered at each close.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax import Array

from nca_trader.agents.heads import account_features, best_target
from nca_trader.agents.policy import Params, Policy
from nca_trader.agents.rules import Strategy
from nca_trader.config import capital_problems, limit_problems
from nca_trader.config.ranges import expect, nearest, one_of, refuse
from nca_trader.data.samples import earlier_looks
from nca_trader.data.synthetic import Task
from nca_trader.envs.account.state import Account, Legs, Rules, legs_of, open_account, rules_of
from nca_trader.envs.account.step import on_bar, place
from nca_trader.envs.market import features_of, observed_states
from nca_trader.envs.rewards import begun, remembered, up_to_first
from nca_trader.errors import BarError, ConfigError, argument, in_a_command
from nca_trader.evaluate.result import Result, Trace
from nca_trader.evaluate.targets import (
    LARGEST,
    as_targets,
    cut_of,
    in_force,
    refuse_no_targets,
    strategy_targets,
)
from nca_trader.numerics import float64_on_cpu
from nca_trader.runs import trials
from nca_trader.runs.manifest import Run, now, seen_rows
from nca_trader.runs.trials import data_record
from nca_trader.types import Bars, Costs

log = logging.getLogger(__name__)
CHUNK = 2048  # bars encoded at once: bounds memory whatever the history's length


def backtest(
    bars: Bars | Task,
    targets: Any,
    costs: Costs | None = None,
    fill: str | None = None,
    order: str | None = None,
    *,
    start: str | None = None,
    stop: str | None = None,
    name: str | None = None,
    look: bool = True,
    **limits: Any,
) -> Result:
    """Runs `targets` over `bars` and accounts for every bar in float64.

    Args:
      bars: N bars of A assets; or a synthetic task, whose state a run may have been given.
      targets: `[N]` (one asset) or `[N, A]` target weights, NaN for no order; or a `Strategy`;
        or a `Run`, whose selected agent takes its most probable action.
      costs, fill, order: None is what the run trained with, or no costs, "next_open", and of
        order "on_change" for a strategy, which trades when its target changes, and "rebalance"
        for weights: each number given is an order. fill "next_open" fills at the open after the
        decision, so the last target never fills; "close" at the close that was seen, which is
        idealised.
      start, stop: trade from the first bar at or after `start` to the last before `stop`; bars
        before are history for warm-up, and the account begins flat with equity 1. Without
        `start` a run trades from the first bar after those that trained or selected it, where
        there is one, and a log line says so.
      name: for reports.
      look: counts a run on bars that it has not seen as a look at them, in the ledger of trials
        in the folder of its run folder. False is for bars that select among agents.
      limits: fields of `nca_trader.envs.account.state.Rules` by name, e.g. `max_gross=1.0`, or
        `capital=1e5, lot=1.0, min_notional=10.0, max_participation=0.1`; what is not given is the
        run's, or no limit.

    Returns:
      The result over the traded bars.

    Raises:
      BarError: targets that do not fit the bars, order nothing, or are above 10; no bars between
        start and stop; bars of other symbols than the run's, or too few for it to decide.
      ConfigError: an argument of another type, or swapped with another; a strategy that raises; an
        unknown `fill`, `order` or limit, one out of its range, or one that needs
        `capital`; a date that is none.
      RunError, StateError: the run's parameters can't be had; see `Run.params`.
    """
    accepted = "Bars, e.g. of nca.read_bars, or a synthetic Task"
    expect("bars", bars, Bars | Task, accepted, targets=targets)
    expect("costs", costs, Costs | None, "nca.Costs, e.g. nca.Costs(commission=5e-4)")
    task, bars = bars, bars.bars if isinstance(bars, Task) else bars
    first, last = _rows(bars, start, stop)
    run = targets if isinstance(targets, Run) else None
    if run and start is None:
        first, last = _rows(bars, _after_seen(bars, run), stop)
    costs = costs or (run.env_config.costs if run else Costs())
    if run is None:
        refuse_no_targets(targets)
        order = order or ("on_change" if isinstance(targets, Strategy) else "rebalance")
    rules = _rules(rules_of(run.env_config) if run else Rules(), fill, order, costs, limits)
    logits, in_sample, looks = None, None, None
    if run:
        trace, logits = _run_agent(task, run, costs, rules, first, last)
        in_sample = max(min(seen_rows(bars, run), last) - first, 0)
        if look and first + in_sample < last:  # counted before a number is shown
            looks = count_look(run, bars[first + in_sample : last])
    else:
        if isinstance(targets, Strategy):
            name = name or targets.name
            targets = strategy_targets(bars, targets)
        targets = as_targets(targets, bars, max(LARGEST, rules.max_gross or 0.0))
        trace = _run_targets(bars, in_force(targets, first), costs, rules, first, last)
    index, symbols = bars.index[first:last], list(bars.symbols)
    result = Result(
        name=name or (run.name if run else "targets"),
        equity=pd.Series(np.exp(trace.log_equity), index, name="equity"),
        log_equity=np.asarray(trace.log_equity),
        targets=pd.DataFrame(trace.target, index, symbols),
        weights=pd.DataFrame(trace.weight, index, symbols),
        turnover=pd.Series(np.abs(trace.traded).sum(1), index, name="turnover"),
        cost=pd.Series(trace.cost, index, name="cost"),
        flows=pd.DataFrame(trace.flows._asdict(), index),
        logits=logits,
        charged=costs,
        rules=rules,
        bars_per_year=bars.bars_per_year,
        note=bars.note,
        in_sample=in_sample,
        looks=looks,
        cut=cut_of(np.asarray(trace.target), rules),
    )
    # A command shows them beside the figures. Who orders nothing expects no fill.
    if not in_a_command() and np.nan_to_num(trace.target).any():
        for caution in result.cautions:
            log.warning("%s: %s", result.name, caution)
    return result


def _after_seen(bars: Bars, run: Run) -> str | None:
    """The time of the first bar after those that trained or selected `run`; None without one."""
    seen = seen_rows(bars, run)
    if not 0 < seen < len(bars):
        return None
    log.warning(
        "%s starts on %s, after the bars that it was trained or selected on; give %s to begin "
        "elsewhere",
        run.name,
        bars.index[seen].date(),
        argument("start"),
    )
    return str(bars.index[seen])


def count_look(run: Run, judged: Bars) -> int:
    """Notes in the ledger that `run` is judged on bars that it has not seen.

    Args:
      judged: those bars and no others.

    Returns:
      `looks_at` them, with this one.
    """
    entry = {"kind": "test", "run": run.name, "seed": run.selected, "time": now()}
    trials.record(run.root, entry | trials.named(data_record(judged)))
    return looks_at(run, judged)


def looks_at(run: Run, judged: Bars) -> int:
    """How often agents were judged on these symbols in years that overlap, as far as is known.

    By the ledger of `run`, and by what the sample bars ship with, see `EARLIER_LOOKS`.
    """
    data = data_record(judged)
    earlier = earlier_looks(trials.markets(data), data["first"], data["last"])
    return trials.count(run.root, "test", data) + earlier


def _rows(bars: Bars, start: str | None, stop: str | None) -> tuple[int, int]:
    """The first row to trade and the row after the last."""
    first = 0 if start is None else bars.row(start, "start")
    last = len(bars) if stop is None else bars.row(stop, "stop")
    if first >= last:
        there = (
            f"there are bars from {bars.index[0]} to {bars.index[-1]}." if len(bars) else "empty."
        )
        raise BarError(
            f"{bars.source or 'bars'}: no bar from {start or 'the first'} to {stop or 'the last'}; "
            + there
        )
    return first, last


def _rules(
    base: Rules, fill: str | None, order: str | None, costs: Costs, limits: dict[str, Any]
) -> Rules:
    """The rules of a backtest: `base` with what is given in its place."""
    for name in limits.keys() - set(Rules._fields):
        if name in Costs.__dataclass_fields__:
            raise ConfigError(f"{name} is one of the costs; give costs=nca.Costs({name}=...).")
        raise ConfigError(
            f"unknown limit {name!r}; {nearest(name, Rules._fields)}"
            f"There are {', '.join(Rules._fields)}."
        )
    given = {"fill": fill, "order": order}
    given = {name: value for name, value in given.items() if value is not None}
    rules = base._replace(**given, **limits)
    refuse(
        one_of(rules, "fill", ("next_open", "close")),
        one_of(rules, "order", ("on_change", "rebalance")),
        limit_problems(rules),
        capital_problems(rules, costs),
    )
    return rules


def _span(bars: Bars, costs: Costs, rules: Rules, first: int, last: int) -> Legs:
    """Legs of the rows first .. last - 1. The account is flat until then: the gap does not act.

    Nor does time before the first of them: cash earns interest from its close on.
    """
    legs = jax.tree.map(lambda leg: leg[first:last], legs_of(bars, costs, rules))
    if legs.years is not None:
        years = legs.years.copy()
        years[0] = 0.0
        legs = legs._replace(years=years)
    return legs


def _step(account: Account, legs: Legs, decide: Callable, costs: Costs, rules: Rules):
    """One bar of a backtest: live through it, decide at its close, order."""
    account, opened = on_bar(account, legs, costs, rules)
    account, target, seen = decide(account)
    account, closed = place(account, target, legs.at_close, costs, rules)
    trace = Trace(
        log_equity=account.log_equity + account.log_equity_low,
        weight=account.held,
        target=target,
        traded=opened.traded + closed.traded,
        cost=opened.cost + closed.cost,
        flows=jax.tree.map(jnp.add, opened.flows, closed.flows),
    )
    return account, (trace, seen)


@functools.partial(jax.jit, static_argnums=3)
def _scan_targets(legs: Legs, targets: Array, costs: Costs, rules: Rules) -> Trace:
    def step(account, xs):
        legs_t, target = xs
        return _step(account, legs_t, lambda account: (account, target, ()), costs, rules)

    account = open_account(jnp.zeros(targets.shape[1], targets.dtype))
    return jax.lax.scan(step, account, (legs, targets))[1][0]


def _run_targets(
    bars: Bars, targets: np.ndarray, costs: Costs, rules: Rules, first: int, last: int
) -> Trace:
    with float64_on_cpu():
        legs = _span(bars, costs, rules, first, last)
        trace = _scan_targets(legs, targets[first:last], costs, rules)
        return jax.tree.map(np.asarray, trace)


def encode(policy: Policy, params: Any, features: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Cells `[N, A, C]` float32 of every bar, encoded in chunks with the halo they need."""
    halo = policy.receptive_field - 1
    function = jax.jit(policy.encode)
    pieces = []
    for begin in range(0, len(features), CHUNK):
        first, end = max(begin - halo, 0), min(begin + CHUNK, len(features))
        # One shape for all chunks, so one compilation. A bar has one place in its chunk, however
        # many bars follow it, because a matrix product may round its rows by their place.
        pad = ((halo - (begin - first), begin + CHUNK - end), (0, 0))
        x = np.pad(features[first:end], (*pad, (0, 0)))
        m = np.pad(present[first:end], pad)
        cells = function(params, x[None], m[None])[0, halo : halo + end - begin]
        pieces.append(np.asarray(cells))
    return np.concatenate(pieces)


def _run_agent(
    source: Bars | Task, run: Run, costs: Costs, rules: Rules, first: int, last: int
) -> tuple[Trace, np.ndarray]:
    """The run's selected agent over rows first .. last - 1, in the order training knows them."""
    bars = source.bars if isinstance(source, Task) else source
    check_symbols(run, bars)
    policy, params = run.policy, run.params()
    if last <= policy.first_decision:
        raise BarError(
            f"{bars.source or 'bars'}: {last} bars, but the agent decides from bar "
            f"{policy.first_decision + 1} on ({policy.spec.warmup} of feature warm-up and a "
            f"receptive field of {policy.receptive_field}); give more bars before the span."
        )
    states = observed_states(source, run.env_config)[1]
    features = features_of(bars[:last], run.env_config, states[:last])
    cells = encode(policy, params, features, bars.present[:last])[first:last]
    ready = np.arange(first, last) >= policy.first_decision
    with float64_on_cpu():
        legs = _span(bars, costs, rules, first, last)
        trace, logits = _scan_agent(params, legs, cells, ready, policy, costs, rules)
        return jax.tree.map(np.asarray, trace), np.asarray(logits)


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def _scan_agent(
    params: Params,
    legs: Legs,
    cells: Array,
    ready: Array,
    policy: Policy,
    costs: Costs,
    rules: Rules,
) -> tuple[Trace, Array]:
    """Decides greedily at every `ready` `[N]` bar, from `cells` `[N, A, C]` and the account."""
    spec = policy.spec

    def step(account: Account, xs):
        legs_t, cells_t, ready_t, first_t = xs

        def decide(account: Account) -> tuple[Account, Array, Array]:
            account = remembered(spec, account, first_t)
            logits, _ = policy.act(params, cells_t, account_features(spec, account))
            target = best_target(spec, logits, account.ordered)
            target = jnp.where(ready_t, target, jnp.nan)
            return account, target, jnp.where(ready_t, logits, jnp.nan)

        return _step(account, legs_t, decide, costs, rules)

    account = begun(spec, open_account(jnp.zeros(spec.num_assets, jnp.float64)))
    xs = (legs, cells, ready, up_to_first(ready))
    return jax.lax.scan(step, account, xs)[1]


def check_symbols(run: Run, bars: Bars) -> None:
    """Refuses bars of other assets than the run's; one of shards knows those of each shard."""
    universes = run.manifest["data"].get("universes", [list(run.spec.symbols)])
    if list(bars.symbols) not in universes:
        more = f" (or {len(universes) - 1} other choices)" if len(universes) > 1 else ""
        raise BarError(
            f"{bars.source or 'bars'}: symbols {', '.join(bars.symbols)}, but the run "
            f"{run.name} trades {', '.join(universes[0])}{more}, in this order; select those."
        )
