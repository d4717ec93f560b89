"""vectorbt: crosses of two moving averages with costs, filled at the next open."""

from importlib.util import find_spec

import numpy as np
import pandas as pd
import vectorbt

from benchmarks.peers.clock import row, run, steps_per_second, walk


def main(seconds: float = 3.0, bars: int = 100_000) -> dict[str, object]:
    """Bar evaluations a second of 900 pairs, from prices to the total return of each."""
    prices = walk(bars)
    close, open_ = pd.Series(prices["close"]), pd.Series(prices["open"])
    fast, slow = np.arange(5, 35), np.arange(40, 190, 5)
    returns = []

    def call() -> None:
        quick = vectorbt.MA.run(close, window=fast).ma.to_numpy()
        steady = vectorbt.MA.run(close, window=slow).ma.to_numpy()
        above = np.repeat(quick, len(slow), axis=1) > np.tile(steady, (1, len(fast)))
        # Decided at the close, filled at the next open.
        long = np.vstack([np.zeros((1, above.shape[1]), bool), above[:-1]])
        portfolio = vectorbt.Portfolio.from_signals(
            close,
            entries=long,
            exits=~long,
            price=open_,
            fees=5e-4,
            slippage=2e-4,
            init_cash=1.0,
            freq="1h",
        )
        returns[:] = [portfolio.total_return().to_numpy()]

    rate = steps_per_second(call, bars * len(fast) * len(slow), seconds)
    # It takes its engine in Rust where that is installed, else Numba's.
    name = "vectorbt (Rust)" if find_spec("vectorbt_rust") else "vectorbt"
    return row(name, "vectorbt", 1, rate, equity=(1.0 + returns[0]).tolist())


if __name__ == "__main__":
    run(main)
