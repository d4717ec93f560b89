"""History of Yahoo Finance through yfinance, without keys.

Yahoo divides the prices and dividends before a split by its ratio. Its close is not adjusted for
dividends; its adjusted close is, and is not used, since dividends are paid in cash here. A fund's
capital gains are in its dividends.
"""

from __future__ import annotations

import datetime
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nca_trader.errors import ConfigError, argument, extra
from nca_trader.paper.feeds.venue_feed import DAY_SECONDS, Grid, Row, seconds_of
from nca_trader.paper.venue import Unreachable

with extra("yfinance is not installed; pip install yfinance."):
    import yfinance
    from yfinance.exceptions import YFRateLimitError, YFTickerMissingError

# Yahoo's names of lengths in seconds, and for how many days it has bars of them.
LENGTHS: dict[int, tuple[str, float]] = {
    60: ("1m", 30),
    120: ("2m", 60),
    300: ("5m", 60),
    900: ("15m", 60),
    1800: ("30m", 60),
    3600: ("1h", 730),
    5400: ("90m", 60),
    DAY_SECONDS: ("1d", float("inf")),
}
COLUMNS = ["Open", "High", "Low", "Close", "Volume", "Dividends"]
LOG = logging.getLogger("yfinance")


class _AsGiven(Grid):
    """Opens as Yahoo gives them: an hour of New York begins at half past."""

    def opens(self, time: np.ndarray) -> np.ndarray:
        return time


def grid_of(every: str) -> Grid:
    """Return the opens of bars of a length."""
    return _AsGiven(seconds_of(every))


class YahooSource:
    """A `Source` of Yahoo's closed bars, one symbol after the other.

    Args:
      symbols: Yahoo's names, e.g. "SPY", "^GSPC", "EURUSD=X", "BTC-USD".
      every: length of a bar.

    Raises:
      ConfigError: Yahoo has no bars of this length.
    """

    delay = settle = 0.0

    def __init__(self, symbols: Sequence[str], every: str):
        self.symbols, self.step = tuple(symbols), seconds_of(every)
        if self.step not in LENGTHS:
            known = ", ".join(name for name, _ in LENGTHS.values())
            raise ConfigError(f"bars of {every}: Yahoo has {known}; give one, and use resample.")

    def fetch(self, start: int, stop: int) -> list[Row]:
        """Return the bars that open at or after `start` and end by `stop`.

        Raises:
          ConfigError: Yahoo has bars of this length for a later span alone.
        """
        name, days = LENGTHS[self.step]
        if start < time.time() - days * DAY_SECONDS:
            raise ConfigError(
                f"Yahoo has bars of {name} for the last {days} days; give a later "
                f"{argument('start')}, or days."
            )
        return [row for symbol in self.symbols for row in self._rows(symbol, name, start, stop)]

    def _rows(self, symbol: str, name: str, start: int, stop: int) -> list[Row]:
        begin, end = (datetime.datetime.fromtimestamp(t, datetime.UTC) for t in (start, stop))
        daily = self.step == DAY_SECONDS
        # A day is asked for by its date, which begins at the exchange's midnight.
        span: dict[str, Any] = {"start": begin, "end": end}
        span = {key: str(t.date()) for key, t in span.items()} if daily else span
        options, debug = {"auto_adjust": False, "actions": True}, yfinance.config.debug
        hidden, debug.hide_exceptions = debug.hide_exceptions, False
        # It logs what it raises, and each attempt in between.
        level, _ = LOG.level, LOG.setLevel(logging.CRITICAL)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of pandas, about what yfinance does
                ticker = yfinance.Ticker(symbol)
                frame = ticker.history(interval=name, **span, **options)
        except YFTickerMissingError:
            return []  # of an unknown symbol, and of a span without bars
        except YFRateLimitError:
            raise Unreachable("rate-limit", f"yahoo: {symbol}") from None
        except Exception as error:
            # Of its clients and parsers; what they raise is not documented.
            if getattr(getattr(error, "response", None), "status_code", None) == 404:
                return []
            raise Unreachable("no-answer", f"yahoo: {symbol}: {type(error).__name__}") from None
        finally:
            debug.hide_exceptions = hidden
            LOG.setLevel(level)
        frame = frame.dropna(subset=COLUMNS[:4])  # a row without prices is not a bar
        index: Any = frame.index
        # Days by the exchange's date, other bars by UTC.
        times = index.tz_localize(None) if daily else index.tz_convert("UTC")
        seconds = times.to_numpy("datetime64[s]").astype(np.int64)
        rows = (
            Row(symbol, int(at), *map(float, values))
            for at, values in zip(seconds, frame[COLUMNS].to_numpy(), strict=True)
        )
        # The newest row may still be open.
        return [row for row in rows if start <= row.time <= stop - self.step]

    def stream(self, post: Callable[[Row], None]) -> None:
        """Do nothing: there are no live bars."""

    def close(self) -> None:
        """Do nothing: yfinance keeps its session."""


open_source = YahooSource
