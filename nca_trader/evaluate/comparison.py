"""Several results side by side: `nca.compare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from nca_trader.config.ranges import expect
from nca_trader.errors import ConfigError
from nca_trader.evaluate.report.figures import result_figure
from nca_trader.evaluate.report.summary import comparison_html, comparison_lines
from nca_trader.evaluate.result import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Comparison:
    """Several results side by side, made by `compare`.

    Attributes:
      results: in the order given.
      table: one row per result, with its first and last bar, and a column per metric.
    """

    def __init__(self, results: Sequence[Result]):
        """Build the table."""
        self.results = tuple(results)
        rows = {
            result.name: {
                "start": result.equity.index[0],
                "stop": result.equity.index[-1],
                "in_sample": result.in_sample,
                **result.metrics,
            }
            for result in self.results
        }
        self.table = pd.DataFrame.from_dict(rows, orient="index")
        self.table.index.name = "name"

    def __repr__(self) -> str:
        return "\n".join(comparison_lines(self.results))

    def _repr_html_(self) -> str:
        return comparison_html(self.results)

    def plot(self) -> Figure:
        """Draw equity and drawdown of every result on one time axis."""
        return result_figure(self.results)


def compare(results: Sequence[Result]) -> Comparison:
    """Put several results side by side, in a table and a plot.

    Args:
      results: at least one, each of another name; they may be of other bars and costs, which the
        table shows.

    Returns:
      A `Comparison`, whose `table` has one row per result.

    Raises:
      ConfigError: no result, something else, or two of one name.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[-500:]
      >>> strategies = nca.rules.sma_cross(), nca.rules.momentum()
      >>> nca.compare([nca.backtest(bars, each) for each in strategies]).table.index.tolist()
      ['SMA cross 10/30', 'momentum 50']
    """
    # A single result is taken as a list of one.
    if isinstance(results, Result):
        results = [results]
    expect("results", results, Sequence, "a sequence of Results, e.g. of nca.backtest")
    for result in results:
        expect("results", result, Result, "a sequence of Results, e.g. of nca.backtest")
    if not results:
        raise ConfigError("compare was given no result; give at least one.")
    names = [result.name for result in results]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"results has {name!r} more than once; name them apart, e.g. with "
                "nca.backtest(..., name=...)."
            )
    return Comparison(results)
