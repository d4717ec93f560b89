"""The verdict of a search: whether the best of many combinations is more than luck."""

from __future__ import annotations

import hashlib
import math
import os
from typing import Any

import numpy as np
import pandas as pd

from nca_trader.cloud import place
from nca_trader.evaluate.multiple import Superiority, overfit_probability, superior_to_each
from nca_trader.evaluate.statistics import Moments, deflated_sharpe
from nca_trader.evaluate.verdict import DEFLATED_ENOUGH
from nca_trader.runs import trials
from nca_trader.runs.manifest import now
from nca_trader.types import Bars

SIGNIFICANT = 0.05  # p-value below which a search has found something
NUMBERS_OF_SPLITS = 2_000_000  # splits times combinations: bounds the time and memory of PBO


def counted(
    folder: str | os.PathLike[str] | None,
    name: str,
    bars: Bars,
    combinations: list[Any],
    kind: str = "sweep",
) -> int:
    """Count the combinations in the trial log; return the trials on this market so far.

    The same list of combinations on the same bars is not new, and is counted once. Lists that
    overlap are both counted, so the count can be too high and never too low.

    Args:
      folder: the project folder; None counts nothing and returns the number of combinations.
      name: of the rule.
      bars: that were searched.
      combinations: all of them.
      kind: of search, for the log.
    """
    if folder is None:
        return len(combinations)
    root, data = place(folder, "trials"), trials.data_record(bars)
    # Of the whole list: lists that overlap have two digests, and both are counted.
    digest = hashlib.sha256(repr(combinations).encode()).hexdigest()[:12]
    run = f"{kind} {name} {digest}"
    known = any(e.run == run and e.data == data.sha256 for e in trials.entries(root))
    if not known:
        more = {"trials": len(combinations), "time": now()}
        trials.record(root, trials.entry_of("train", run, data, **more))
    return max(trials.count(root, "train", data), len(combinations))


def judge(
    table: pd.DataFrame,
    parameters: list[str],
    blocks: np.ndarray,
    benchmark: np.ndarray,
    benchmark_sharpe: float,
    num_bars: int,
    bars_per_year: float,
    num_trials: int,
) -> dict[str, Any]:
    """Judge the best combination by Sharpe ratio.

    Args:
      table: one row per combination, with its parameters, `sharpe`, `skewness` and `kurtosis`.
      parameters: their names.
      blocks: `[T, M]` returns summed over blocks of bars.
      benchmark: `[T]` of buy and hold, likewise.
      benchmark_sharpe: of buy and hold, annualised.
      num_bars: of the sweep.
      bars_per_year: of the bars.
      num_trials: counted so far, with these.

    Returns:
      `{"verdict": text, "search": numbers}`.
    """
    sharpes = table["sharpe"].to_numpy(np.float64)
    of = f"{len(table):,} combination{'s' if len(table) > 1 else ''}"
    if not np.isfinite(sharpes).any():
        return {"verdict": f"None of {of} ever traded.", "search": {}}
    row = table.iloc[int(np.nanargmax(sharpes))]
    per_bar = sharpes[np.isfinite(sharpes)] / math.sqrt(bars_per_year)
    moments = Moments(
        row["sharpe"] / math.sqrt(bars_per_year), num_bars, row["skewness"], row["kurtosis"]
    )
    # The search's own spread of ratios, which is small where combinations are alike.
    variance = float(np.var(per_bar, ddof=1)) if len(per_bar) > 1 else None
    deflated = deflated_sharpe(moments, num_trials, variance)
    over = _overfit(blocks)
    against = Superiority(math.nan, math.nan, math.nan)
    cash = against
    # Below that a resample has too few blocks to differ from the sample.
    if len(blocks) >= 20:
        against, cash = superior_to_each(blocks, [benchmark, np.zeros(len(blocks))])
    near = sharpes[neighbours(table, parameters, int(np.nanargmax(sharpes)))]
    near = near[np.isfinite(near)]
    search = {
        "combination": {name: row[name] for name in parameters},
        "sharpe": float(row["sharpe"]),
        "benchmark_sharpe": benchmark_sharpe,
        "deflated_sharpe": deflated,
        "trials": num_trials,
        "pbo": over,
        "spa_benchmark": against.consistent,
        "spa_cash": cash.consistent,
        "neighbours": len(near),
        "neighbours_mean": float(near.mean()) if len(near) else math.nan,
        "neighbours_worst": float(near.min()) if len(near) else math.nan,
    }
    chosen = ", ".join(f"{name} = {_text(row[name])}" for name in parameters)
    # Written with `not`, so that a NaN counts as luck.
    lucky = not deflated >= DEFLATED_ENOUGH or not cash.consistent < SIGNIFICANT or over >= 0.5
    if lucky:
        conclusion = "luck in the search explains it"
    elif against.consistent < SIGNIFICANT:
        conclusion = "better than cash and than buy and hold, also allowing for the search"
    else:
        conclusion = "better than cash, but not shown to be better than buy and hold"
    around = ""
    if len(near):
        around = (
            f" The {len(near)} combinations next to it have {near.mean():.2f} on average and "
            f"{near.min():.2f} at worst."
            if len(near) > 1
            else f" The one combination next to it has {near[0]:.2f}."
        )
    verdict = (
        f"The best of {of} by Sharpe ratio is {chosen}, with "
        f"{row['sharpe']:.2f}; buy and hold has {benchmark_sharpe:.2f}.{around} Deflated Sharpe "
        f"ratio {deflated:.2f} with {num_trials:,} trials counted, probability of overfitting "
        f"(PBO) {_text(over)}, SPA "
        f"p-value {_text(against.consistent)} against buy and hold and {_text(cash.consistent)} "
        f"against cash: {conclusion}."
    )
    return {"verdict": verdict, "search": search}


def neighbours(table: pd.DataFrame, parameters: list[str], row: int) -> np.ndarray:
    """Return the rows of the combinations next to one, to see whether an optimum is stable.

    Next to it are those whose every parameter is at most one of its values away; where a sample
    has fewer than three of them, the eight nearest by rank. A parameter that is not a number is
    the same.

    Args:
      table: one row per combination.
      parameters: their names.
      row: of the combination.
    """
    ranks, same = [], np.ones(len(table), bool)
    for name in parameters:
        column = table[name]
        if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column):
            ranks.append(np.unique(column.to_numpy(), return_inverse=True)[1])
        else:
            # None is missing to pandas, and equals another None here.
            same &= (column == column.iloc[row]).to_numpy() | column.isna().to_numpy()
    same[row] = False
    if not ranks or not same.any():
        return np.zeros(0, int)
    away = np.abs(np.stack(ranks, axis=1) - np.stack(ranks, axis=1)[row])
    near = np.flatnonzero(same & (away <= 1).all(1))
    if len(near) >= min(3, same.sum()):
        return near
    far = np.where(same, np.linalg.norm(away / np.maximum(away.max(0), 1), axis=1), np.inf)
    return np.argsort(far, kind="stable")[: min(8, int(same.sum()))]


def _overfit(blocks: np.ndarray) -> float:
    """Return the PBO of `[T, M]` with as many splits as time and memory allow; NaN for too few."""
    if blocks.shape[1] < 2:
        return math.nan
    for parts in (16, 14, 12, 10, 8):
        # Every half of the parts is a split, so their number grows very fast.
        enough = math.comb(parts, parts // 2) * blocks.shape[1] <= NUMBERS_OF_SPLITS
        if len(blocks) >= 4 * parts and (enough or parts == 8):
            return overfit_probability(blocks, parts).probability
    return math.nan


def _text(value: Any) -> str:
    if isinstance(value, float | np.floating):
        return "n/a" if math.isnan(value) else f"{value:.3g}" if abs(value) < 1e4 else f"{value:g}"
    return str(value)
