"""A sweep as programs of many combinations each; finished parts can be kept."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nca_trader.config import AccountConfig
from nca_trader.config.records import plain
from nca_trader.errors import BarError
from nca_trader.evaluate import metrics
from nca_trader.evaluate.combinations import Combination, traced_parameters
from nca_trader.evaluate.sweep.program import (
    WIDEST,
    Blocks,
    Given,
    compile_program,
    in_blocks,
    program,
    program_of_returns,
)
from nca_trader.evaluate.sweep.sums import AccountSums, summaries
from nca_trader.machine import cores
from nca_trader.numerics import cpu, float64_on_cpu
from nca_trader.progress import Progress
from nca_trader.runs.consent import codes_of
from nca_trader.runs.folder import NUMBERS
from nca_trader.runs.parts import WorkFolder
from nca_trader.strategies.identity import identity
from nca_trader.strategies.rolling import longest_of, periods_up_to
from nca_trader.strategies.strategy import Strategy
from nca_trader.strategies.targets import largest_weight, needs_account, strategy_faults
from nca_trader.types import Bars

STATE_BYTES = 200_000_000  # of one program
RETURNS_BYTES = 400_000_000  # of the returns of one program, of every bar
# Metrics that need every return of an account and not sums of them.
TAILS = ("value_at_risk", "expected_shortfall", "tail_ratio", "omega")


class Done(NamedTuple):
    """What M combinations did.

    metrics: by name, `[M]` each. blocks: `[blocks, M]` returns in excess of interest, summed over
    blocks of bars. digests: `[M]` uint64, of `trials.digest_of_targets`.
    """

    metrics: dict[str, np.ndarray]
    blocks: np.ndarray
    digests: np.ndarray


@dataclasses.dataclass(frozen=True)
class GridRun:
    """Every combination of a grid over the same bars, in accounts that are given the same."""

    bars: Bars
    rule: Callable[..., Any]
    combinations: list[Combination]
    rules: AccountConfig
    dtype: str
    most_blocks: int
    tails: bool
    workers: int | str | None = None

    @functools.cached_property
    def longest(self) -> int:
        """The longest period of the rule's indicators, and the largest whole number of the grid."""
        values = [v for one in self.combinations for v in one.values() if isinstance(v, int)]
        # A rule may add to its parameter: a period beyond its window would be another one.
        made = longest_of(functools.partial(self.rule, **one) for one in self.combinations)
        return max([*map(int, values), made])

    def parts(self, folder: str | os.PathLike[str] | None, width: int) -> WorkFolder:
        """Return the finished parts in a folder, of `width` combinations each.

        A folder that is there keeps its own width, so that a sweep also resumes on a machine of
        other cores.

        Raises:
          RunError: the parts of another sweep are there.
        """
        if folder is None:
            return WorkFolder(None, "", "sweep", {"width": width})
        settings = {
            # Parts of another version may differ in their last digits.
            "version": NUMBERS,
            "kept": AccountSums._fields,
            "bars": self.bars.digest(),
            "rule": identity(self.rule),
            "grid": hashlib.sha256(repr(self.combinations).encode()).hexdigest(),
            "costs": plain(self.rules.costs),
            "code": plain(codes_of(dict.fromkeys(self.rules.costs.own or (), "costs")) or {}),
            "account": plain({**self.rules.stored, "risk": self.rules.risk}),
            "precision": self.dtype,
            "blocks": self.most_blocks,
            "tails": self.tails,
            "width": width,
        }
        return WorkFolder(folder, "sweep.json", "sweep", settings, adopted="width")


Part = dict[str, np.ndarray]


def every_part(
    store: WorkFolder,
    sizes: list[int],
    run: Callable[[list[int], Callable[[int, Part], None]], None],
) -> list[Part]:
    """Return all parts of a sweep; those that are not in the folder are kept as they come.

    Args:
      store: of the parts.
      sizes: combinations in each part.
      run: `(missing, keep)` computes the missing parts, and calls `keep(number, part)` with each.
    """
    found = {k: part for k in range(len(sizes)) if (part := store.read(k)) is not None}
    with Progress(sum(sizes), "sweep", "combinations") as shown:
        shown.skip(sum(sizes[k] for k in found))

        def keep(number: int, part: Part) -> None:
            store.write(number, part)
            found[number] = part
            shown.update(sizes[number])

        run([k for k in range(len(sizes)) if k not in found], keep)
    return [found[k] for k in range(len(sizes))]


def run_as_one_program(grid: GridRun, resume: str | os.PathLike[str] | None) -> Done:
    """Run the combinations in programs of equal width, a thread for each core."""
    bars, combinations = grid.bars, grid.combinations
    first = grid.rule(**combinations[0])
    traced = traced_parameters(combinations)
    groups = _groups(combinations, traced)
    workers = grid.workers if isinstance(grid.workers, int) else max(cores(), 1)
    width = _width(grid, first, max(len(group) for group, _ in groups), workers)
    store = grid.parts(resume, width)
    width = int(store.settings["width"])
    parts = _parts(groups, width)
    blocks = _blocks(grid)
    programs: dict[str, Any] = {}

    def run(number: int) -> tuple[int, dict[str, np.ndarray]]:
        rows, fixed = parts[number]
        with float64_on_cpu():
            values = _values(combinations, rows, traced, width)
            out = jax.tree.map(np.asarray, programs[repr(fixed)](values, blocks))
        # The last part is filled up with its own first combination.
        n = len(rows)
        sums = {field: x[:n] for field, x in out.sums._asdict().items()}
        return number, sums | {"log_equity": out.log_equity[:n], "blocks": out.blocks[:, :n]}

    def run_all(missing: list[int], keep: Callable[[int, Part], None]) -> None:
        for number in missing:
            fixed = repr(parts[number][1])
            if fixed not in programs:
                given = _given(grid, traced, width, *parts[number])
                # Compiled in this thread: the others only run it.
                with float64_on_cpu(), strategy_faults(bars, first):
                    values = _values(combinations, [0], traced, width)
                    programs[fixed] = compile_program(program, given, values, blocks)
        pool = concurrent.futures.ThreadPoolExecutor(workers)
        try:
            for job in concurrent.futures.as_completed([pool.submit(run, k) for k in missing]):
                keep(*job.result())
        finally:
            pool.shutdown(cancel_futures=True)

    every = every_part(store, [len(rows) for rows, _ in parts], run_all)
    # Parts follow the groups of equal programs, and the table follows the grid.
    order = np.argsort(np.concatenate([rows for rows, _ in parts]))
    block_sums = np.concatenate([part["blocks"] for part in every], axis=1)[:, order]
    names = (*AccountSums._fields, "log_equity")
    joined = {name: np.concatenate([part[name] for part in every])[order] for name in names}
    log_equity, sums = joined.pop("log_equity"), AccountSums(**joined)
    _refuse_no_weights(grid, sums, log_equity)
    digests = sums.high.astype(np.uint64) << np.uint64(32) | sums.low
    summary = summaries(sums, log_equity, len(bars), bars.bars_per_year)
    return Done(summary, block_sums, digests)


def _blocks(grid: GridRun) -> Blocks:
    """Return the bars of a sweep as its programs take them."""
    with float64_on_cpu():
        blocks = in_blocks(grid.bars, grid.rules, grid.dtype, grid.most_blocks)
        return jax.device_put(blocks, cpu())


Group = tuple[list[int], dict[str, Any]]  # numbers of combinations, and what they share


def _groups(combinations: list[Combination], traced: list[str]) -> list[Group]:
    """Group combinations by the parameters that are not numbers, which are compiled in."""
    found: dict[str, Group] = {}
    for k, one in enumerate(combinations):
        fixed = {p: v for p, v in one.items() if p not in traced}
        found.setdefault(repr(fixed), ([], fixed))[0].append(k)
    return list(found.values())


def _parts(groups: list[Group], width: int) -> list[Group]:
    """Cut groups into parts of at most `width` combinations."""
    return [
        (rows[i : i + width], fixed) for rows, fixed in groups for i in range(0, len(rows), width)
    ]


def _given(
    grid: GridRun, traced: list[str], width: int, rows: list[int], fixed: dict[str, Any]
) -> Given:
    # A stop of None has no exits, and another value has.
    sees = needs_account(grid.bars, grid.rule(**grid.combinations[rows[0]]))
    sees = sees or grid.rules.has_exits
    return Given(
        grid.rule,
        tuple(traced),
        tuple(fixed.items()),
        sees,
        grid.rules,
        grid.dtype,
        grid.longest,
        width,
    )


def tail_metrics(grid: GridRun, turnover: np.ndarray) -> dict[str, np.ndarray]:
    """Compute `TAILS` of every combination, `[M]` each, in programs that return every return.

    Args:
      grid: of the sweep.
      turnover: `[M]` of the combinations; one that never traded has no ratios.
    """
    bars, combinations = grid.bars, grid.combinations
    traced = traced_parameters(combinations)
    # 16 bytes: two returns of float64 for each bar.
    width = max(1, min(WIDEST, RETURNS_BYTES // (16 * len(bars)), len(combinations)))
    blocks = _blocks(grid)
    found = {name: np.full(len(combinations), np.nan) for name in TAILS}
    with Progress(len(combinations), "tails", "combinations") as shown:
        for rows, fixed in _parts(_groups(combinations, traced), width):
            with float64_on_cpu():
                values = _values(combinations, rows, traced, width)
                given = _given(grid, traced, width, rows, fixed)
                every = compile_program(program_of_returns, given, values, blocks)(values, blocks)
            plain, excess = np.asarray(every, np.float64)[..., : len(bars)]
            for place, k in enumerate(rows):
                grown, ratios = (
                    metrics.traded_returns(r[place], turnover[k]) for r in (plain, excess)
                )
                for name, value in metrics.of_tails(plain[place], grown, ratios).items():
                    found[name][k] = value
                shown.update()
    return found


def _width(grid: GridRun, strategy: Strategy, count: int, workers: int) -> int:
    """Return how many combinations one program runs: equally many for each core, within memory."""
    num_assets = grid.bars.num_assets
    # Windows of closes are not counted, because all combinations share one, see `agents.rolling`.
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


def _refuse_no_weights(grid: GridRun, sums: AccountSums, log_equity: np.ndarray) -> None:
    """Refuse infinite targets and percent, as `as_targets` does for one backtest."""
    largest = largest_weight(grid.rules)
    wrong = ~np.isfinite(log_equity) | ~(np.asarray(sums.largest) <= largest)
    if wrong.any():
        k = int(np.argmax(wrong))
        raise BarError(
            f"combination {grid.combinations[k]} orders a weight of {sums.largest[k]:g}; a "
            "weight is a fraction of equity, neither percent nor units. Divide it, or give "
            "max_gross of at least that where so much leverage is meant."
        )
