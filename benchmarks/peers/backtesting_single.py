"""backtesting.py: one cross of two moving averages, with its trades and its metrics."""

import pandas as pd
from backtesting import Backtest, Strategy
from backtesting.lib import crossover

from benchmarks.peers.clock import row, run, steps_per_second, walk


def mean(values, length):
    """Return the rolling mean."""
    return pd.Series(values).rolling(length).mean()


class Cross(Strategy):
    """Long while the mean of 10 closes is above that of 30."""

    def init(self):
        self.fast = self.I(mean, self.data.Close, 10)
        self.slow = self.I(mean, self.data.Close, 30)

    def next(self):
        if crossover(self.fast, self.slow):
            self.buy()
        elif crossover(self.slow, self.fast):
            self.position.close()


def main(seconds: float = 3.0, bars: int = 100_000) -> dict[str, object]:
    """Bars a second of one backtest."""
    prices = walk(bars)
    index = pd.date_range("2000-01-01", periods=bars, freq="h")
    frame = pd.DataFrame({k.capitalize(): v for k, v in prices.items()}, index)
    test = Backtest(frame, Cross, cash=1e9, commission=5e-4, spread=2e-4)
    return row("backtesting.py", "backtesting", 1, steps_per_second(test.run, bars, seconds))


if __name__ == "__main__":
    run(main)
