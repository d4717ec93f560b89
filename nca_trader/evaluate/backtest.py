"""Backtests: targets, a strategy or a trained run over real bars, in float64.

The accounting is `envs.account`, scanned; an agent sees features from the same scan that trained
it. Nothing else happens here but choosing what is ordered at each close.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax import Array

from nca_trader.agents.heads import account_features
from nca_trader.agents.policy import Params, Policy, greedy
from nca_trader.agents.rules import Strategy
from nca_trader.data.features import feature_set
from nca_trader.envs.account import (
    Account,
    Legs,
    Rules,
    legs_of,
    on_bar,
    open_account,
    place,
)
from nca_trader.envs.trading import rules_of
from nca_trader.errors import BarError, ConfigError, StateError
from nca_trader.evaluate import metrics
from nca_trader.runs.manifest import Run
from nca_trader.types import Bar, Bars, Costs, Tensor

CHUNK = 2048  # bars encoded at once: bounds memory whatever the history's length


class Trace(NamedTuple):
    """What the account did at each bar, `[N]` or `[N, A]` float64, as of the close of the bar.

    log_equity, weight: high parts plus low parts. target: as decided, NaN is no order. traded:
    signed notional as a fraction of equity. cost: likewise.
    """

    log_equity: Tensor
    weight: Tensor
    target: Tensor
    traded: Tensor
    cost: Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a backtest found, by bar; a bar's entry is as of its close, after a fill there.

    Attributes:
      name: of the strategy. equity: `[N]`, capital before the first bar is 1.0.
      log_equity: `[N]` its logarithm, with the digits that a large equity loses.
      targets: `[N, A]` weights decided, NaN is no order. weights: `[N, A]` held.
      turnover: `[N]` sum of absolute traded notional over equity. cost: `[N]` commission and
        slippage as a fraction of equity.
      logits: `[N, A, n]` float32 of an agent, NaN where it did not decide; None of a strategy.
      costs, fill, order: as given. bars_per_year: of the bars. note: what a report must say.
      in_sample: how many of these bars are no later than the last that trained the agent or
        selected it, see `seen_rows`; None where no run is behind the targets, so that nobody
        knows what they were chosen on.
    """

    name: str
    equity: pd.Series
    log_equity: np.ndarray
    targets: pd.DataFrame
    weights: pd.DataFrame
    turnover: pd.Series
    cost: pd.Series
    logits: np.ndarray | None
    costs: Costs
    fill: str
    order: str
    bars_per_year: float
    note: str = ""
    in_sample: int | None = None

    @functools.cached_property
    def metrics(self) -> dict[str, float]:
        """The figures of `metrics.summary`, of this result."""
        return metrics.summary(self.equity, self.weights, self.turnover, self.bars_per_year)

    def to_frame(self) -> pd.DataFrame:
        """One row a bar: time, equity, log_equity, turnover, cost, `target:SYM`, `weight:SYM`.

        An agent's logits are `logits:SYM:i` for action i.
        """
        columns: dict[str, Any] = {
            "time": self.equity.index,
            "equity": self.equity.to_numpy(),
            "log_equity": self.log_equity,
            "turnover": self.turnover.to_numpy(),
            "cost": self.cost.to_numpy(),
        }
        for i, symbol in enumerate(self.targets.columns):
            columns[f"target:{symbol}"] = self.targets[symbol].to_numpy()
            columns[f"weight:{symbol}"] = self.weights[symbol].to_numpy()
            if self.logits is not None:
                for action in range(self.logits.shape[-1]):
                    columns[f"logits:{symbol}:{action}"] = self.logits[:, i, action]
        return pd.DataFrame(columns)

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Writes `to_frame()`, every digit kept, as Parquet or, to a name in .csv, as CSV.

        Raises:
          StateError: it cannot be written; then nothing is.
        """
        path = pathlib.Path(path)
        part = path.with_name(path.name + ".part")
        try:
            if path.suffix == ".csv":
                self.to_frame().to_csv(part, index=False)
            else:
                self.to_frame().to_parquet(part, index=False)
            os.replace(part, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            what = error.strerror or str(error)
            raise StateError(f"{path}: cannot be written ({what}); mend that.") from None
        return path


def backtest(
    bars: Bars,
    targets: Any,
    costs: Costs | None = None,
    fill: str | None = None,
    order: str | None = None,
    *,
    start: str | None = None,
    stop: str | None = None,
    max_gross: float | None = None,
    name: str | None = None,
) -> Result:
    """Runs `targets` over `bars` and accounts for every bar in float64.

    Args:
      bars: N bars of A assets.
      targets: `[N]` (one asset) or `[N, A]` target weights, NaN for no order; or a `Strategy`;
        or a `Run`, whose selected agent takes its most probable action.
      costs, fill, order: None is what the run trained with, or no costs, "next_open" and
        "on_change". fill "next_open" fills at the open after the decision, so the last target
        never fills; "close" at the close that was seen, which is idealised.
      start, stop: trade from the first bar at or after `start` to the last before `stop`; bars
        before are history for warm-up, and the account begins flat with equity 1.
      max_gross: cap on the sum of absolute targets; None is the run's, or no cap.
      name: for reports.

    Returns:
      The result over the traded bars.

    Raises:
      BarError: targets that do not fit the bars; no bars between start and stop; bars of other
        symbols than the run's, or too few for it to decide.
      ConfigError: an unknown `fill` or `order`, a cap that is not above 0, a date that is none.
      RunError, StateError: the run's parameters can't be had; see `Run.params`.
    """
    first = 0 if start is None else bars.row(start)
    last = len(bars) if stop is None else bars.row(stop)
    if first >= last:
        raise BarError(
            f"{bars.source or 'bars'}: no bar from {start or 'the first'} to {stop or 'the last'}; "
            + (
                f"there are bars from {bars.index[0]} to {bars.index[-1]}."
                if len(bars)
                else "empty."
            )
        )
    if max_gross is not None and not max_gross > 0.0:
        raise ConfigError(f"max_gross = {max_gross} is not above 0; None is no cap.")
    run = targets if isinstance(targets, Run) else None
    base = rules_of(run.env_config) if run else Rules()
    rules = base._replace(
        fill=_known("fill", fill or base.fill, ("next_open", "close")),
        order=_known("order", order or base.order, ("on_change", "rebalance")),
        max_gross=base.max_gross if max_gross is None else max_gross,
    )
    costs = costs or (run.env_config.costs if run else Costs())
    logits, in_sample = None, None
    if run:
        trace, logits = _run_agent(bars, run, costs, rules, first, last)
        in_sample = max(min(seen_rows(bars, run), last) - first, 0)
    else:
        if isinstance(targets, Strategy):
            name = name or targets.name
            targets = strategy_targets(bars, targets)
        trace = _run_targets(
            bars, _in_force(_as_targets(targets, bars), first), costs, rules, first, last
        )
    index, symbols = bars.index[first:last], list(bars.symbols)
    return Result(
        name=name or (run.name if run else "targets"),
        equity=pd.Series(np.exp(trace.log_equity), index, name="equity"),
        log_equity=np.asarray(trace.log_equity),
        targets=pd.DataFrame(trace.target, index, symbols),
        weights=pd.DataFrame(trace.weight, index, symbols),
        turnover=pd.Series(np.abs(trace.traded).sum(1), index, name="turnover"),
        cost=pd.Series(trace.cost, index, name="cost"),
        logits=logits,
        costs=costs,
        fill=rules.fill,
        order=rules.order,
        bars_per_year=bars.bars_per_year,
        note=bars.note,
        in_sample=in_sample,
    )


def strategy_targets(bars: Bars, strategy: Strategy) -> np.ndarray:
    """`[N, A]` float64 targets of a strategy: the scan of its update over all bars."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        state = strategy.init(bars.num_assets)
        bar = Bar(*(jnp.asarray(field) for field in bars.as_bar()))
        # A state that changes its type under the update is the user's slip, not ours to mend.
        _, targets = jax.jit(lambda s, b: jax.lax.scan(strategy.update, s, b))(state, bar)
        return np.asarray(targets, np.float64)


def _known(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(f"{name} = {value!r} is unknown; there are {' and '.join(allowed)}.")
    return value


def seen_rows(bars: Bars, run: Run) -> int:
    """Rows of `bars` that are not after the last bar that trained the run or selected its seed."""
    spans = [run.manifest["data"], run.selection.get("data")]
    last = max(np.datetime64(span["last"]) for span in spans if span)
    return int(np.searchsorted(bars.time, last, "right"))


def _as_targets(targets: Any, bars: Bars) -> np.ndarray:
    """Targets as `[N, A]` float64; refuses what does not fit or is infinite."""
    _refuse_other_labels(targets, bars)
    try:
        array = np.asarray(targets, np.float64)
    except (TypeError, ValueError) as error:
        raise BarError(
            f"targets are not numbers ({error}); give weights, NaN for no order."
        ) from None
    if array.ndim == 1 and bars.num_assets == 1:
        array = array[:, None]
    expected = (len(bars), bars.num_assets)
    if array.shape != expected:
        one = "; for one asset of them, pass bars.select(SYMBOL)" if array.ndim == 1 else ""
        raise BarError(
            f"targets have shape {np.shape(targets)}, but the bars have [N, A] = {expected} "
            f"({', '.join(bars.symbols)}){one}."
        )
    if np.isinf(array).any():
        row = int(np.argwhere(np.isinf(array))[0, 0])
        raise BarError(f"targets row {row} is infinite; a weight is a finite fraction of equity.")
    return array


def _refuse_other_labels(targets: Any, bars: Bars) -> None:
    """Refuses a frame or series whose rows or columns are named, and not as those of the bars."""
    if isinstance(targets, pd.DataFrame) and not isinstance(targets.columns, pd.RangeIndex):
        if tuple(targets.columns) != bars.symbols:
            raise BarError(
                f"targets have the columns {', '.join(map(str, targets.columns))}, but the bars "
                f"are {', '.join(bars.symbols)}; give the columns in this order."
            )
    index = targets.index if isinstance(targets, pd.DataFrame | pd.Series) else None
    if isinstance(index, pd.DatetimeIndex) and len(index) == len(bars):
        there = index.tz_localize("UTC") if index.tz is None else index.tz_convert("UTC")
        if (there != bars.index).any():
            row = int(np.argmax(there != bars.index))
            raise BarError(
                f"targets row {row} is of {index[row]}, but the bar there of {bars.time[row]}; "
                "reindex the targets by bars.index."
            )


def _in_force(targets: np.ndarray, first: int) -> np.ndarray:
    """Puts what was last ordered before row `first` at it: a span begins in that position."""
    if first == 0:
        return targets
    held = pd.DataFrame(targets[: first + 1]).ffill().to_numpy()[-1]
    return np.vstack([targets[:first], held[None], targets[first + 1 :]])


def _span(bars: Bars, first: int, last: int) -> Legs:
    """Legs of the rows first .. last - 1. The account is flat until then: the gap does not act."""
    return Legs(*(leg[first:last] for leg in legs_of(bars)))


def _step(account: Account, legs: Legs, decide: Callable, costs: Costs, rules: Rules):
    """One bar of a backtest: live through it, decide at its close, order."""
    account, opened = on_bar(account, legs, costs, rules)
    target, seen = decide(account)
    account, closed = place(account, target, legs.present, costs, rules)
    trace = Trace(
        log_equity=account.log_equity + account.log_equity_low,
        weight=account.weight + account.weight_low,
        target=target,
        traded=opened.traded + closed.traded,
        cost=opened.cost + closed.cost,
    )
    return account, (trace, seen)


@functools.partial(jax.jit, static_argnums=3)
def _scan_targets(legs: Legs, targets: Array, costs: Costs, rules: Rules) -> Trace:
    def step(account, xs):
        legs_t, target = xs
        return _step(account, legs_t, lambda _: (target, ()), costs, rules)

    account = open_account(jnp.zeros(targets.shape[1], targets.dtype))
    return jax.lax.scan(step, account, (legs, targets))[1][0]


def _run_targets(
    bars: Bars, targets: np.ndarray, costs: Costs, rules: Rules, first: int, last: int
) -> Trace:
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        trace = _scan_targets(_span(bars, first, last), targets[first:last], costs, rules)
        return jax.tree.map(np.asarray, trace)


def encode(policy: Policy, params: Any, features: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Cells `[N, A, C]` float32 of every bar, encoded in chunks with the halo they need."""
    halo = policy.receptive_field - 1
    function = jax.jit(policy.encode)
    pieces = []
    for begin in range(0, len(features), CHUNK):
        first, end = max(begin - halo, 0), min(begin + CHUNK, len(features))
        # One shape for all chunks, so one compilation: shorter ones are padded in front, where
        # cells that no decision reads see zeros.
        pad = ((CHUNK + halo - (end - first), 0), (0, 0))
        x = np.pad(features[first:end], (*pad, (0, 0)))
        m = np.pad(present[first:end], pad)
        pieces.append(np.asarray(function(params, x[None], m[None])[0, begin - end :]))
    return np.concatenate(pieces)


def _run_agent(
    bars: Bars, run: Run, costs: Costs, rules: Rules, first: int, last: int
) -> tuple[Trace, np.ndarray]:
    """The run's selected agent over rows first .. last - 1, in the order training knows them."""
    check_symbols(run, bars)
    policy, params = run.policy, run.params()
    if last <= policy.first_decision:
        raise BarError(
            f"{bars.source or 'bars'}: {last} bars, but the agent decides from bar "
            f"{policy.first_decision + 1} on ({policy.spec.warmup} of feature warm-up and a "
            f"receptive field of {policy.receptive_field}); give more bars before the span."
        )
    features = feature_set(run.env_config.features).batch(bars[:last])
    cells = encode(policy, params, features, bars.present[:last])[first:last]
    ready = np.arange(first, last) >= policy.first_decision
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        legs = _span(bars, first, last)
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
    weights = jnp.asarray(policy.spec.targets, jnp.float64)

    def step(account: Account, xs):
        legs_t, cells_t, ready_t = xs

        def decide(account: Account) -> tuple[Array, Array]:
            logits, _ = policy.act(params, cells_t, account_features(account, policy.size))
            target = jnp.where(ready_t, weights[greedy(logits)], jnp.nan)
            return target, jnp.where(ready_t, logits, jnp.nan)

        return _step(account, legs_t, decide, costs, rules)

    account = open_account(jnp.zeros(policy.spec.num_assets, jnp.float64))
    return jax.lax.scan(step, account, (legs, cells, ready))[1]


def check_symbols(run: Run, bars: Bars) -> None:
    """Refuses bars of other assets than the run's."""
    if bars.symbols != run.spec.symbols:
        raise BarError(
            f"{bars.source or 'bars'}: symbols {', '.join(bars.symbols)}, but the run "
            f"{run.name} trades {', '.join(run.spec.symbols)}, in this order; select those."
        )
