"""What a walk-forward says of noise and of a planted signal, and what it costs next to training.

    python benchmarks/walkforward.py noise     100 shuffled series
    python benchmarks/walkforward.py signal    10 series with a signal
    python benchmarks/walkforward.py speed     10 folds x 3 seeds of nano

Each writes benchmarks/results/walkforward-NAME.json.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

import nca_trader as nca
from nca_trader.evaluate.walkforward import refit
from nca_trader.runs.manifest import commit, versions
from nca_trader.types import Bars

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
NUM_BARS = 2500
SPANS: dict[str, Any] = {"train": 500, "test": 250, "check": False}
GRID = {"fast": (3, 5, 10, 20)}


def bars_of(returns: np.ndarray) -> Bars:
    """Daily bars of one asset with these simple returns; each opens at the last close."""
    close = 100.0 * np.cumprod(1.0 + returns)[:, None]
    before = np.concatenate([[[100.0]], close[:-1]])
    return Bars(
        time=np.datetime64("2000-01-01") + np.arange(len(close)) * np.timedelta64(1, "D"),
        symbols=("X",),
        open=before,
        high=np.maximum(before, close),
        low=np.minimum(before, close),
        close=close,
        volume=np.ones_like(close),
        present=np.ones(close.shape, bool),
    )


def cross(bars: Bars, fast: int = 5) -> np.ndarray:
    """Long while the mean of `fast` closes is above that of 30; flat until there are 30."""
    sums = np.cumsum(np.concatenate([[0.0], bars.close[:, 0]]))

    def mean(length: int) -> np.ndarray:
        return (sums[length:] - sums[:-length]) / length

    found = np.zeros(len(bars))
    if len(bars) >= 30:
        found[29:] = mean(fast)[30 - fast :] > mean(30)
    return found


def shuffled(returns: np.ndarray, seed: int) -> Bars:
    """Returns less their mean, in an order that `seed` draws."""
    return bars_of(np.random.default_rng(seed).permutation(returns - returns.mean()))


def planted(returns: np.ndarray, seed: int) -> Bars:
    """The same returns, each with the sign of the one before with probability 0.6."""
    rng = np.random.default_rng(seed)
    size = np.abs(rng.permutation(returns))
    return bars_of(size * np.cumprod(np.where(rng.random(len(size)) < 0.6, 1.0, -1.0)))


def follow(bars: Bars, side: int = 1) -> np.ndarray:
    """Hold `side` times the sign of the last return."""
    close = bars.close[:, 0]
    return side * np.sign(np.diff(close, prepend=close[0]))


def index_returns() -> np.ndarray:
    """Daily returns of the S&P 500, to 2018."""
    close = nca.sample_bars("sp500").close[-NUM_BARS - 1 :, 0]
    return np.diff(close) / close[:-1]


def verdicts(drawn: Iterable[Bars], rule: Any, grid: dict[str, Any]) -> dict[str, Any]:
    """Count the verdicts on some series."""
    rows, words = [], ("not distinguishable", "earned more", "earned less")
    for seed, bars in enumerate(drawn):
        walk = nca.walk_forward(bars, rule, grid=grid, **SPANS)
        word = next(word for word in words if word in walk.verdict)
        interval = [round(x, 5) for x in walk.interval[:2]]
        rows.append({"seed": seed, "verdict": word, "interval": interval})
    counts = dict(collections.Counter(row["verdict"] for row in rows))
    print(counts, flush=True)
    return {"counts": counts, "series": rows}


def noise() -> dict[str, Any]:
    """Count verdicts on 100 shuffled series."""
    returns = index_returns()
    return verdicts((shuffled(returns, seed) for seed in range(100)), cross, GRID)


def signal() -> dict[str, Any]:
    """Count verdicts on 10 series with a signal."""
    returns = index_returns()
    return verdicts((planted(returns, seed) for seed in range(10)), follow, {"side": (-1, 1)})


def speed(steps: int = 500_000) -> dict[str, Any]:
    """Time 10 folds x 3 seeds of nano, and inside of it the training alone."""
    bars, trained = nca.sample_bars("sp500").select("SP500")[-3500:], []
    real = refit.train

    def timed(*args: Any, **more: Any) -> Any:
        began = time.perf_counter()
        run = real(*args, **more)
        trained.append(time.perf_counter() - began)
        return run

    refit.train = timed
    try:
        began = time.perf_counter()
        walk = nca.walk_forward(
            bars, "nano", env="index_daily", train=1000, test=250, steps=steps, seeds=3
        )
        whole = time.perf_counter() - began
    finally:
        refit.train = real
    ratio = whole / sum(trained)
    print(f"{len(walk.folds)} folds: {whole:.0f} s, training {sum(trained):.0f} s, {ratio:.3f}")
    return {"steps": steps, "trainings": len(trained), "seconds": whole, "ratio": ratio}


def main() -> None:
    """Run one benchmark, and write its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("noise", "signal", "speed"))
    what = parser.parse_args().what
    result = {"noise": noise, "signal": signal, "speed": speed}[what]()
    made = {"versions": versions(), "commit": commit()}
    text = json.dumps(result | made, indent=1) + "\n"
    (RESULTS / f"walkforward-{what}.json").write_text(text)


if __name__ == "__main__":
    main()
