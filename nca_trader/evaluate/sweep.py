"""Sweeps: a rule with every combination of its parameters, and whether the best of them is luck."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import importlib.machinery
import inspect
import json
import logging
import os
import pathlib
import time as clock
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from tqdm import tqdm

from nca_trader.agents.rolling import periods_up_to
from nca_trader.agents.rules import buy_and_hold
from nca_trader.agents.strategy import Strategy
from nca_trader.agents.targets import LARGEST, TRACED, needs_account, strategy_faults
from nca_trader.config.ranges import described, expect
from nca_trader.envs.account.state import Rules, with_limits
from nca_trader.errors import BarError, ConfigError, NcaTraderError, StateError
from nca_trader.evaluate import metrics
from nca_trader.evaluate.backtest import backtest
from nca_trader.evaluate.combinations import (
    Combination,
    combinations_of,
    takes_bars,
    traced_parameters,
    valid,
)
from nca_trader.evaluate.multiple import block_returns
from nca_trader.evaluate.search import counted, judge
from nca_trader.evaluate.sweep_program import WIDEST, Given, Outcome, compiled, in_blocks
from nca_trader.evaluate.tally import Tally, summaries
from nca_trader.machine import cores, write_atomically
from nca_trader.numerics import float64_on_cpu
from nca_trader.parallel.jobs import Job, run_jobs
from nca_trader.types import Bars, Costs

BLOCKS = 2000  # of bars, at most: returns are kept by block, for the verdict
BLOCK_NUMBERS = 64_000_000  # block returns of all combinations, at most: 256 MB
STATE_BYTES = 200_000_000  # of one program
LOOP_SECONDS = 10.0  # of a loop of backtests, above which processes are worth their start
HOLD = buy_and_hold()  # one object, so that its program is compiled once
PRECISIONS = {"f32": "float32", "f64": "float64"}
log = logging.getLogger(__name__)


class Done(NamedTuple):
    """The metrics of M combinations by name, `[M]` each, and their block returns `[blocks, M]`."""

    metrics: dict[str, np.ndarray]
    blocks: np.ndarray


def sweep(
    bars: Bars,
    rule: Callable[..., Any],
    grid: Mapping[str, Iterable[Any]],
    costs: Costs | None = None,
    fill: str | None = None,
    order: str | None = None,
    *,
    precision: str = "f32",
    sample: int | None = None,
    method: str = "sobol",
    seed: int = 0,
    resume: str | os.PathLike[str] | None = None,
    trials: str | os.PathLike[str] | None = "runs",
    **limits: Any,
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
      costs: None charges nothing.
      fill: "next_open" (default) or "close", as in `backtest`.
      order: "on_change" or "rebalance"; None is the rule's own.
      precision: of the accounts: "f32" is within 1e-6 of the equity of `backtest`, "f64" 1e-9.
      sample: draws so many combinations in place of the whole grid; an entry may then be a range
        `(low, high)`.
      method: of drawing: "sobol", "halton", "latin" or "random".
      seed: of drawing.
      resume: folder in which finished parts are kept; a sweep that was interrupted goes on there.
      trials: project folder whose trial log counts every combination, and whose count the deflated
        Sharpe ratio uses; None counts this sweep alone.
      limits: as in `backtest`, e.g. `max_gross=1.0`.

    Returns:
      One row per combination: its parameters, and `equity` (final), `total_return`, `cagr`,
      `annual_volatility`, `sharpe`, `sortino`, `max_drawdown`, `calmar`, `hit_rate`, `skewness`,
      `kurtosis`, `exposure`, `turnover`, `trades`, `win_rate`, `profit_factor`, `expectancy`.
      `.attrs["verdict"]` says in words whether the best is luck; `.attrs["search"]` has its
      numbers, `.attrs["parameters"]` the names of the parameters.

    Raises:
      ConfigError: no combination or too many, a parameter that the rule does not have, a value
        that it refuses, a strategy that raises, `resume` of another sweep.
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
    expect("costs", costs, Costs | None, "nca.Costs, e.g. nca.Costs(commission=5e-4)")
    if precision not in PRECISIONS:
        raise ConfigError(f"precision {precision!r}: there are 'f32' and 'f64'.")
    combinations = combinations_of(rule, grid, sample, method, seed)
    if len(bars) < 2:
        raise BarError(f"{bars.source or 'bars'}: {len(bars)} bars; a sweep needs at least two.")
    costs, parameters = costs or Costs(), list(combinations[0])
    most = max(50, min(BLOCKS, BLOCK_NUMBERS // len(combinations)))
    name = getattr(rule, "__name__", "rule")
    loop = takes_bars(rule, grid)
    left_out, why = 0, ""
    if not loop:
        combinations, left_out, why = valid(rule, combinations)
        first = rule(**combinations[0])
        if not isinstance(first, Strategy):
            raise ConfigError(
                f"{name} returns {described(first)}; let it return a Strategy, or take bars as its "
                "first parameter and return targets."
            )
        name, order = first.name if len(combinations) == 1 else name, order or first.order
    account = with_limits(Rules(), fill, order or "rebalance", costs, limits)
    setting = Setting(bars, rule, combinations, costs, account, PRECISIONS[precision], most, limits)
    if loop:
        log.warning("%s takes bars, so it runs once per combination and not as one program", name)
        done = _looped(setting)
    else:
        try:
            done = _as_one_program(setting, resume)
        except ConfigError as error:
            if not isinstance(error.__cause__, TRACED):
                raise
            log.warning("one by one and not as one program: %s", error)
            done = _looped(setting)
    if left_out:
        log.warning("%d combinations are left out, which %s refuses: %s", left_out, name, why)
    # A parameter may be None, which a column of floats would turn into NaN.
    mixed = {p: object for p in parameters if any(one[p] is None for one in combinations)}
    table = pd.DataFrame(combinations, columns=parameters).astype(mixed)
    for p in mixed:
        table[p] = pd.Series([one[p] for one in combinations], dtype=object)
    table = table.assign(**done.metrics)
    table.attrs["parameters"] = parameters
    benchmark = _benchmark(setting)
    held = (block_returns(benchmark[0], most), benchmark[1])
    number = counted(trials, name, bars, combinations)
    table.attrs |= judge(
        table, parameters, done.blocks, *held, len(bars), bars.bars_per_year, number
    )
    return table


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all combinations of a sweep share; the fields are those of `sweep`."""

    bars: Bars
    rule: Callable[..., Any]
    combinations: list[Combination]
    costs: Costs
    account: Rules
    dtype: str
    most_blocks: int
    limits: dict[str, Any]

    def key(self, width: int) -> str:
        """Return a digest of everything that the numbers depend on."""
        try:
            source = inspect.getsource(self.rule)
        except (OSError, TypeError):
            source = ""
        facts = (self.bars.digest(), self.rule.__qualname__, source, self.combinations, width)
        rest = (self.costs, self.account, self.dtype, self.most_blocks)
        return hashlib.sha256(repr((*facts, *rest)).encode()).hexdigest()


def _benchmark(setting: Setting) -> tuple[np.ndarray, float]:
    """Return the returns `[N]` and the Sharpe ratio of buy and hold, with the same costs."""
    level = logging.getLogger("nca_trader.evaluate.backtest")
    before, level.disabled = level.disabled, True
    try:
        held = backtest(
            setting.bars,
            HOLD,
            setting.costs,
            setting.account.fill,
            "on_change",
            **setting.limits,
        )
    finally:
        level.disabled = before
    return metrics.simple_returns(held.equity), held.metrics["sharpe"]


def _as_one_program(setting: Setting, resume: str | os.PathLike[str] | None) -> Done:
    """Run the combinations in programs of equal width, a thread for each core."""
    bars, combinations = setting.bars, setting.combinations
    first = setting.rule(**combinations[0])
    traced = traced_parameters(combinations)
    parts: list[tuple[list[int], dict[str, Any]]] = []
    # Parameters that are not numbers, e.g. None for no stop, are compiled in.
    by_fixed: dict[str, list[int]] = {}
    for k, one in enumerate(combinations):
        fixed = {p: v for p, v in one.items() if p not in traced}
        by_fixed.setdefault(repr(fixed), []).append(k)
    devices = jax.local_devices(backend="cpu")
    workers = max(cores(), 1) if len(devices) == 1 else len(devices)
    width = _width(setting, first, max(map(len, by_fixed.values())), workers)
    for group in by_fixed.values():
        fixed = {p: v for p, v in combinations[group[0]].items() if p not in traced}
        parts += [(group[i : i + width], fixed) for i in range(0, len(group), width)]
    store = _Store(resume, setting.key(width))
    whole = [int(one[p]) for one in combinations for p in traced if isinstance(one[p], int)]
    with float64_on_cpu():
        blocks = in_blocks(bars, setting.costs, setting.account, setting.dtype, setting.most_blocks)

    longest = max([*whole, 1])
    missing = [number for number in range(len(parts)) if not store.has(number)]
    used = devices[: max(1, min(len(devices), len(missing)))]
    with float64_on_cpu():
        on_devices = [jax.device_put(blocks, device) for device in used]
    programs: dict[tuple[str, int], Any] = {}
    for number in missing:
        fixed, place = parts[number][1], number % len(used)
        if (repr(fixed), place) in programs:
            continue
        # A stop of None has no exits, and another value has.
        sees = needs_account(bars, setting.rule(**combinations[parts[number][0][0]]))
        given = (tuple(traced), tuple(fixed.items()), sees, setting.costs, setting.account)
        # Compiled in this thread: the others only run it.
        with float64_on_cpu(), jax.default_device(used[place]), strategy_faults(bars, first):
            values = _values(combinations, [0], traced, width)
            programs[repr(fixed), place] = compiled(
                Given(setting.rule, *given, setting.dtype, longest), values, on_devices[place]
            )

    def run(number: int) -> tuple[int, Outcome]:
        rows, fixed = parts[number]
        place = number % len(used)
        with float64_on_cpu(), jax.default_device(used[place]):
            values = _values(combinations, rows, traced, width)
            found = programs[repr(fixed), place](values, on_devices[place])
            found = jax.tree.map(np.asarray, found)
        # The last part is filled up with its own first combination.
        n = len(rows)
        tally = jax.tree.map(lambda x: x[:n], found.tally)
        return number, Outcome(found.log_equity[:n], tally, found.blocks[:, :n])

    outcomes = {number: store.read(number) for number in range(len(parts)) if store.has(number)}
    with (
        tqdm(total=len(combinations), unit=" combinations", disable=None, leave=False) as shown,
        concurrent.futures.ThreadPoolExecutor(workers) as pool,
    ):
        shown.update(sum(len(parts[number][0]) for number in outcomes))
        for number, outcome in _in_any_order(pool, run, missing):
            store.write(number, outcome)
            outcomes[number] = outcome
            shown.update(len(parts[number][0]))
    order = np.concatenate([rows for rows, _ in parts])
    ordered = [outcomes[number] for number in range(len(parts))]
    log_equity = np.concatenate([o.log_equity for o in ordered])[np.argsort(order)]
    tally = Tally(
        *(
            np.concatenate([getattr(o.tally, field) for o in ordered])[np.argsort(order)]
            for field in Tally._fields
        )
    )
    block_sums = np.concatenate([o.blocks for o in ordered], axis=1)[:, np.argsort(order)]
    _refuse_no_weights(setting, tally, log_equity)
    found = summaries(tally, log_equity, len(bars), bars.bars_per_year)
    return Done(found, block_sums)


def _in_any_order(
    pool: concurrent.futures.Executor, run: Callable[[int], Any], numbers: list[int]
) -> Iterator[Any]:
    """Yield results as they come; what has not begun is cancelled if the caller stops."""
    futures = [pool.submit(run, number) for number in numbers]
    try:
        for future in concurrent.futures.as_completed(futures):
            yield future.result()
    finally:
        for future in futures:
            future.cancel()


def _width(setting: Setting, strategy: Strategy, count: int, workers: int) -> int:
    """Return how many combinations one program runs: equally many for each core, within memory."""
    num_assets = setting.bars.num_assets
    with float64_on_cpu(), periods_up_to(1):
        state = jax.eval_shape(lambda: strategy.init(num_assets))
    own = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    widest = max(8, min(WIDEST, STATE_BYTES // (own + 400 * num_assets)))
    programs = -(-count // widest)
    if count >= 32 * workers:  # below that a second core is not worth its start
        programs = -(-programs // workers) * workers
    return -(-count // programs)


def _values(
    combinations: list[Combination], rows: list[int], traced: list[str], width: int
) -> dict[str, jax.Array]:
    """Return `[width]` values of each traced parameter; the first row fills up the rest."""
    rows = [*rows, *[rows[0]] * (width - len(rows))]
    whole = {p: all(isinstance(one[p], int) for one in combinations) for p in traced}
    return {
        p: jnp.asarray([combinations[k][p] for k in rows], jnp.int64 if whole[p] else jnp.float64)
        for p in traced
    }


def _refuse_no_weights(setting: Setting, tally: Tally, log_equity: np.ndarray) -> None:
    """Refuse infinite targets and percent, as `as_targets` does for one backtest."""
    largest = max(LARGEST, setting.account.max_gross or 0.0)
    wrong = ~np.isfinite(log_equity) | ~(np.asarray(tally.largest) <= largest)
    if wrong.any():
        k = int(np.argmax(wrong))
        raise BarError(
            f"combination {setting.combinations[k]} orders a weight of {tally.largest[k]:g}; a "
            "weight is a fraction of equity, neither percent nor units. Divide it, or give "
            "max_gross of at least that where so much leverage is meant."
        )


class _Store:
    """Finished parts of a sweep in a folder; without a folder it keeps nothing."""

    def __init__(self, folder: str | os.PathLike[str] | None, key: str):
        self.folder = None if folder is None else pathlib.Path(folder)
        if self.folder is None:
            return
        about = self.folder / "sweep.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            there = json.loads(about.read_text()).get("key") if about.exists() else key
            write_atomically(about, json.dumps({"key": there}))
        except (OSError, ValueError) as error:
            raise StateError(f"{folder}: cannot keep parts of a sweep ({error}).") from None
        if there != key:
            raise ConfigError(
                f"resume={str(folder)!r}: another sweep is there (other bars, rule, grid, costs or "
                "precision); give another folder, or remove it."
            )

    def _path(self, number: int) -> pathlib.Path:
        return (self.folder or pathlib.Path()) / f"part-{number:05d}.npz"

    def has(self, number: int) -> bool:
        """Return whether the part is there."""
        return self.folder is not None and self._path(number).exists()

    def read(self, number: int) -> Outcome:
        """Return a part that is there."""
        try:
            with np.load(self._path(number)) as arrays:
                tally = Tally(*(arrays[field] for field in Tally._fields))
                return Outcome(arrays["log_equity"], tally, arrays["blocks"])
        except (OSError, ValueError, KeyError) as error:
            raise StateError(
                f"{self._path(number)}: a damaged part of a sweep ({error}); remove that file."
            ) from None

    def write(self, number: int, outcome: Outcome) -> None:
        """Keep a part; a file is whole or not there."""
        if self.folder is None:
            return
        path = self._path(number)
        partial = path.with_name(f".{path.stem}-{os.getpid()}.npz")
        arrays: dict[str, Any] = outcome.tally._asdict() | {
            "log_equity": outcome.log_equity,
            "blocks": outcome.blocks,
        }
        with open(partial, "wb") as file:
            np.savez(file, **arrays)
        partial.replace(path)


def _looped(setting: Setting) -> Done:
    """Backtest the combinations one by one, in processes where that takes long."""
    began = clock.perf_counter()
    rows = [_one(setting, setting.combinations[0])]
    seconds = (clock.perf_counter() - began) * len(setting.combinations)
    rest = setting.combinations[1:]
    many = seconds > LOOP_SECONDS and _importable(setting.rule)
    workers = cores() if many else None
    size = max(1, len(rest) // (8 * cores()))
    jobs = [
        Job(f"combinations {i + 1} to {i + len(rest[i : i + size])}", (rest[i : i + size],))
        for i in range(0, len(rest), size)
    ]
    with tqdm(total=len(rows) + len(rest), unit=" combinations", disable=None, leave=False) as bar:
        bar.update(1)

        def advance(_: int, part: list[Any]) -> None:
            bar.update(len(part))

        for part in run_jobs(_several, jobs, setting, workers=workers, done=advance):
            rows += part
    names = list(rows[0][0])
    found = {name: np.array([one[name] for one, _ in rows]) for name in names}
    return Done(found, np.stack([blocks for _, blocks in rows], axis=1))


def _several(setting: Setting, combinations: list[Combination]) -> list[Any]:
    return [_one(setting, one) for one in combinations]


def _one(setting: Setting, one: Combination) -> tuple[dict[str, float], np.ndarray]:
    """Backtest one combination; return its metrics and block returns."""
    account = setting.account
    takes = takes_bars(setting.rule, one)
    subject = functools.partial(setting.rule, **one) if takes else setting.rule(**one)
    try:
        result = backtest(
            setting.bars, subject, setting.costs, account.fill, account.order, **setting.limits
        )
    except NcaTraderError as error:
        raise type(error)(f"combination {one}: {error}") from None
    names = (
        "total_return", "cagr", "annual_volatility", "sharpe", "sortino", "max_drawdown", "calmar",
        "hit_rate", "skewness", "kurtosis", "exposure", "turnover", "trades", "win_rate",
        "profit_factor", "expectancy",
    )  # fmt: skip
    found = {"equity": float(result.equity.iloc[-1])}
    found |= {name: result.metrics[name] for name in names if name in result.metrics}
    returns = metrics.simple_returns(result.equity)
    return found, block_returns(returns, setting.most_blocks).astype(np.float32)


def _importable(rule: Callable[..., Any]) -> bool:
    """Return whether another process can find the rule by its name."""
    found = importlib.machinery.PathFinder.find_spec(rule.__module__.partition(".")[0])
    return "<" not in rule.__qualname__ and (found is not None or rule.__module__ == "__main__")
