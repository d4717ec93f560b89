"""Sweeps: a rule with every combination of its parameters, and whether the best of them is luck."""

from __future__ import annotations

import dataclasses
import math
import os
import time as clock
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nca_trader.config import AccountConfig
from nca_trader.config.account import complete_account, gather_account
from nca_trader.config.ranges import expect
from nca_trader.envs.account.risk import warn_shrunk
from nca_trader.errors import BarError, ConfigError, NcaTraderError, argument, logger
from nca_trader.evaluate.backtest import backtest, digest_of_trace
from nca_trader.evaluate.benchmark import HOLD
from nca_trader.evaluate.combinations import (
    Combination,
    combinations_of,
    make_subject,
    refuse_seen,
    takes_bars,
    valid,
    with_levels_of,
)
from nca_trader.evaluate.evidence.inference import block_returns
from nca_trader.evaluate.evidence.verdict import sweep_verdict
from nca_trader.evaluate.sweep.parts import (
    TAILS,
    Done,
    GridRun,
    Part,
    every_part,
    run_as_one_program,
    tail_metrics,
)
from nca_trader.machine import cores
from nca_trader.parallel.jobs import Job, parse_workers, run_jobs, sendable
from nca_trader.runs.trials import count_rules
from nca_trader.strategies.targets import TRACED
from nca_trader.types import Bars, Costs

BLOCKS = 2000  # of bars, at most: returns are kept by block, for the verdict
BLOCK_NUMBERS = 64_000_000  # block returns of all combinations, at most: 256 MB
BLOCK_SUMS, DIGESTS = "blocks", "digests"  # names among the metrics
LOOP_SECONDS = 10.0  # of a loop of backtests, above which processes are worth their start
# Metrics of each combination, next to its final `equity`.
METRICS = (
    "total_return", "cagr", "annual_volatility", "sharpe", "sortino", "max_drawdown", "calmar",
    "hit_rate", "skewness", "kurtosis", "exposure", "turnover", "trades", "win_rate",
    "profit_factor", "expectancy",
)  # fmt: skip
PRECISIONS = {"f32": "float32", "f64": "float64"}
log = logger(__name__)


def sweep(
    bars: Bars,
    rule: Callable[..., Any],
    grid: Mapping[str, Iterable[Any]],
    account: AccountConfig | Costs | None = None,
    *,
    precision: str = "f32",
    sample: int | None = None,
    method: str = "sobol",
    seed: int = 0,
    tails: bool = False,
    resume: str | os.PathLike[str] | None = None,
    trials: str | os.PathLike[str] | None = "runs",
    workers: int | str | None = None,
    **settings: Any,
) -> pd.DataFrame:
    """Run a rule with every combination of its parameters over bars.

    All combinations are one program, whose numbers are those of `nca.backtest`: signals are decided
    in float64, so a crossing is the same crossing. A function of bars cannot be traced; it runs
    once for each combination, on all cores where that takes long, and a log line says so.

    Args:
      bars: N bars of A assets.
      rule: a function of its parameters that returns a `Strategy`, e.g. `nca.rules.sma_cross`; or
        a function of bars and parameters that returns targets. Numbers arrive as traced jax
        numbers; a combination that the rule refuses (fast >= slow) is left out.
      grid: values by parameter, e.g. `{"fast": range(5, 35), "slow": range(40, 190, 5)}`.
      account: all that the accounts are given in one record, or only its costs.
      precision: of the accounts: "f32" is within 1e-6 of the equity of `backtest`, "f64" 1e-9.
      sample: draws so many combinations in place of the whole grid; an entry may then be a range
        `(low, high)`.
      method: of drawing: "sobol", "halton", "latin" or "random".
      seed: of drawing.
      tails: adds `value_at_risk`, `expected_shortfall`, `tail_ratio` and `omega`, which need every
        return: the combinations run once more.
      resume: folder in which finished parts are kept; a sweep that was interrupted goes on there.
      trials: project folder whose trial log counts what every combination orders, and whose count
        the deflated Sharpe ratio uses; None counts this sweep alone.
      workers: threads of the one program, or processes of a function of bars, which may also be
        those of a cluster, see `nca_trader.parallel.jobs`; None is one for each core, where it
        pays. The numbers do not depend on it.
      settings: other fields of `nca.AccountConfig` by name, in the place of the record, as in
        `backtest`, e.g. `fill="close", max_gross=1.0`; `order` None is the rule's own.

    Returns:
      One row per combination: its parameters, and `equity` (final), `total_return`, `cagr`,
      `annual_volatility`, `sharpe`, `sortino`, `max_drawdown`, `calmar`, `hit_rate`, `skewness`,
      `kurtosis`, `exposure`, `turnover`, `trades`, `win_rate`, `profit_factor`, `expectancy`.
      `.attrs["verdict"]` says in sentences whether there is an edge, and whether the choice within
      the grid is luck; `.attrs["search"]` is a dict of its numbers, with `deflated_sharpe`,
      `trials`, `spa_cash`, `spa_hold` and `pbo`; `.attrs["parameters"]` has the names of the
      parameters, `.attrs["about"]` the bars and the costs in words.

    Raises:
      ConfigError: no combination or too many, a parameter that the rule does not have, a value
        that it refuses, a strategy that raises.
      RunError: `resume` holds another sweep. StateError: a file there is damaged.
      BarError: too few bars, or targets that are not weights.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500").select("SP500")[-500:]
      >>> grid = {"fast": [5, 10], "slow": [20, 50]}
      >>> costs = nca.Costs(commission=5e-4)
      >>> table = nca.sweep(bars, nca.rules.sma_cross, grid, costs, trials=None)
      >>> table[["fast", "slow"]].to_numpy().tolist()
      [[5, 20], [5, 50], [10, 20], [10, 50]]
      >>> table.attrs["verdict"].startswith("The best of 4 combinations by Sharpe ratio is")
      True
    """
    expect("bars", bars, Bars, "Bars, e.g. of nca.read_bars", rule=rule)
    given = gather_account(account, settings)
    if precision not in PRECISIONS:
        raise ConfigError(f"precision {precision!r}: there are 'f32' and 'f64'.")
    rule = with_levels_of(rule, grid if isinstance(grid, Mapping) else ())
    combinations = combinations_of(rule, grid, sample, method, seed)
    if isinstance(chosen := parse_workers(workers), int) and workers is not None:
        workers = chosen
    swept = run_combinations(bars, rule, combinations, given, precision, tails, resume, workers)
    grid_run, table = swept.run, swept.table
    if not takes_bars(rule, grid_run.combinations[0]):
        remedy = 'sweep bars.between("{date}", None)'
        refuse_seen(bars, make_subject(rule, grid_run.combinations[0]), 0, remedy)
    if swept.refused:
        log.warning("%s", swept.refused)
    # Buy and hold in the same account, which the best has to beat.
    same = dataclasses.replace(grid_run.rules.without_levels, order="on_change")
    hold = backtest(bars, HOLD, account=same, look=False)
    held = block_returns(hold.excess_returns, grid_run.most_blocks)
    ratios = table["sharpe"].to_numpy(np.float64) * math.sqrt(len(bars) / bars.bars_per_year)
    tried = count_rules(trials, f"sweep {swept.name}", bars, swept.digests, ratios)
    table.attrs["about"] = _about(grid_run)
    table.attrs |= sweep_verdict(table, swept.blocks, held, hold.metrics["sharpe"], bars, tried)
    return table


class Swept(NamedTuple):
    """What `run_combinations` returns.

    Attributes:
      table: one row per combination, see `sweep`.
      blocks: `[blocks, M]` returns in excess of interest, summed over blocks of bars.
      digests: `[M]` of what each ordered, see `trials.digest_of_targets`.
      name: of the rule.
      run: with the combinations that were not refused.
      refused: how many were, and why; "" for none.
    """

    table: pd.DataFrame
    blocks: np.ndarray
    digests: np.ndarray
    name: str
    run: GridRun
    refused: str


def run_combinations(
    bars: Bars,
    rule: Callable[..., Any],
    combinations: list[Combination],
    given: AccountConfig = AccountConfig(),
    precision: str = "f32",
    tails: bool = False,
    resume: str | os.PathLike[str] | None = None,
    workers: int | str | None = None,
) -> Swept:
    """Run the combinations of a sweep, without its verdict.

    Args:
      bars: as in `sweep`.
      rule: as in `sweep`.
      combinations: of parameters; those that the rule refuses are left out.
      given: what the accounts are given.
      precision: as in `sweep`.
      tails: as in `sweep`.
      resume: as in `sweep`.
      workers: as in `sweep`.

    Raises:
      ConfigError: see `sweep`.
      BarError: see `sweep`.
    """
    if len(bars) < 2:
        raise BarError(f"{bars.source or 'bars'}: {len(bars)} bars; a sweep needs at least two.")
    parameters = list(combinations[0])
    most = max(50, min(BLOCKS, BLOCK_NUMBERS // len(combinations)))
    name = getattr(rule, "__name__", "rule")
    loop = takes_bars(rule, combinations[0])
    left_out, why, first = 0, "", rule
    if not loop:
        combinations, left_out, why = valid(rule, combinations)
        first = make_subject(rule, combinations[0])
        name = first.name if len(combinations) == 1 else name
    rules = complete_account(given, first)
    warn_shrunk(bars, rules)
    dtype = PRECISIONS[precision]
    run = GridRun(bars, rule, combinations, rules, dtype, most, tails, workers)
    if isinstance(workers, str) and not loop:
        raise ConfigError(
            f"{argument('workers', workers)}: {name} runs as one program on this machine; give a "
            "number of threads, or leave it out."
        )
    if loop:
        log.warning("%s takes bars, so it runs once per combination and not as one program", name)
        done = _looped(run, resume)
    else:
        try:
            done = run_as_one_program(run, resume)
            if tails:
                done.metrics.update(tail_metrics(run, done.metrics["turnover"]))
        except ConfigError as error:
            if not isinstance(error.__cause__, TRACED):
                raise
            log.warning("not as one program: %s", error)
            done = _looped(run, resume)
    # A parameter may be None, which a column of floats would turn into NaN.
    mixed = {p: object for p in parameters if any(one[p] is None for one in combinations)}
    table = pd.DataFrame(combinations, columns=parameters).astype(mixed)
    for p in mixed:
        table[p] = pd.Series([one[p] for one in combinations], dtype=object)
    table = table.assign(**done.metrics)
    table.attrs["parameters"] = parameters
    refused = ""
    if left_out:
        refused = f"{left_out} combinations are left out, which {name} refuses: {why}"
    return Swept(table, done.blocks, done.digests, name, run, refused)


def _about(run: GridRun) -> str:
    """Return what the metrics are of: bars, span, costs, and that nothing was held back."""
    bars, charged = run.bars, dataclasses.asdict(run.rules.costs)
    own = charged.pop("own") or ()
    paid = [f"{key.replace('_', ' ')} {value:g}" for key, value in charged.items() if value]
    paid += own
    return (
        f"{', '.join(bars.symbols)}: {len(bars):,} bars, {bars.index[0]:%Y-%m-%d} to "
        f"{bars.index[-1]:%Y-%m-%d}; {', '.join(paid) or 'no costs'}. In sample: the best "
        "combination was chosen on these bars."
    )


def _looped(run: GridRun, resume: str | os.PathLike[str] | None) -> Done:
    """Backtest the combinations one by one, in processes where that takes long."""
    began = clock.perf_counter()
    first, rest = _several(run, run.combinations[:1]), run.combinations[1:]
    seconds = (clock.perf_counter() - began) * len(run.combinations)
    workers = run.workers
    if workers is None and seconds > LOOP_SECONDS and sendable(run.rule):
        workers = cores()
    where = f"by {workers} workers" if workers not in (None, 1) else "in this process"
    log.warning("%d combinations are backtested one by one %s", len(rest) + 1, where)
    each = workers if isinstance(workers, int) else cores()
    store = run.parts(resume, max(1, len(rest) // (8 * each)))
    width = int(store.settings["width"])
    parts = [rest[i : i + width] for i in range(0, len(rest), width)]

    def run_all(missing: list[int], keep: Callable[[int, Part], None]) -> None:
        jobs = [Job(f"combinations {k * width + 2} and on", (parts[k],)) for k in missing]

        def numbered(job: int, part: Part) -> None:
            keep(missing[job], part)

        run_jobs(_several, jobs, run, workers=workers, done=numbered)

    every = [first, *every_part(store, [len(part) for part in parts], run_all)]
    joined = {name: np.concatenate([part[name] for part in every], axis=-1) for name in first}
    return Done(joined, joined.pop(BLOCK_SUMS), joined.pop(DIGESTS))


def _several(run: GridRun, combinations: list[Combination]) -> dict[str, np.ndarray]:
    """Return the metrics of combinations by name, `[M]`, and the other fields of `Done`."""
    rows = [_one(run, one) for one in combinations]
    return {name: np.stack([one[name] for one in rows], axis=-1) for name in rows[0]}


def _one(run: GridRun, one: Combination) -> dict[str, Any]:
    """Backtest one combination; return its metrics, block returns and digest."""
    try:
        result = backtest(run.bars, make_subject(run.rule, one), account=run.rules)
    except NcaTraderError as error:
        raise type(error)(f"combination {one}: {error}") from None
    names = (*METRICS, *TAILS) if run.tails else METRICS
    found = {"equity": float(result.equity.iloc[-1])}
    found |= {name: result.metrics[name] for name in names if name in result.metrics}
    blocks = block_returns(result.excess_returns, run.most_blocks)
    return {name: np.float64(x) for name, x in found.items()} | {
        BLOCK_SUMS: blocks.astype(np.float32),
        DIGESTS: np.uint64(digest_of_trace(result.trace, 0)),
    }
