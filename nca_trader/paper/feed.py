"""Sources of closed bars, one at a time, and the check that each bar must pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from nca_trader.config.reading import replayed
from nca_trader.data.bars import read_bars
from nca_trader.types import PRICES, Bar, Bars

NANOSECONDS = 1_000_000_000


class Notice(NamedTuple):
    """What a live feed says between two bars.

    code: "stale", "reconnected", "correction", "late" or "gap". detail: in words. Nothing is
    traded from "stale" until the next bar.
    """

    code: str
    detail: str = ""


class Feed(Protocol):
    """Closed bars of `A` assets in the order of time.

    symbols: `A` names. now: nanoseconds since 1970 UTC, the clock of this feed.
    """

    symbols: tuple[str, ...]

    def __iter__(self) -> Iterator[Bar]: ...

    def now(self) -> int:
        """Return the feed's clock."""
        ...


class LiveFeed(Protocol):
    """A feed whose bars close while it is read.

    symbols: `A` names. period: of a bar, in seconds. Iteration waits for the bars that close after
    the last call of `history`, and gives notices between them.
    """

    symbols: tuple[str, ...]
    period: int

    def history(self, count: int) -> Bars:
        """Return the last `count` closed bars, or as many as there are."""
        ...

    def __iter__(self) -> Iterator[Bar | Notice]: ...

    def now(self) -> int:
        """Return nanoseconds since 1970 UTC."""
        ...

    def close(self) -> None:
        """End connections and threads."""
        ...


class ReplayFeed:
    """Replays the bars of a file: each bar is a copy, so no later row is within reach.

    Its clock is the open of the bar last given, so that two replays write the same journal.
    """

    def __init__(self, bars: Bars):
        self.symbols, self.source = bars.symbols, bars.source
        self.bars = bars
        self._now = 0

    def __len__(self) -> int:
        """Return the number of bars in the file."""
        return len(self.bars)

    @property
    def last(self) -> int:
        """Seconds since 1970 UTC of the open of the file's last bar."""
        return int(self.bars.time[-1].astype("datetime64[s]").astype(np.int64))

    def now(self) -> int:
        """Return the nanoseconds since 1970 UTC of the bar last given; 0 before the first."""
        return self._now

    def __iter__(self) -> Iterator[Bar]:
        """Yield every bar from the first, fields `[A]`."""
        rows = self.bars.as_bar()
        for row in range(len(self.bars)):
            bar = jax.tree.map(lambda field, row=row: np.array(field[row]), rows)
            # Before the bar is given: the session stamps its events with this time.
            self._now = int(bar.time[0]) * NANOSECONDS
            yield bar


def parse_feed(
    text: str,
    symbols: tuple[str, ...] | None = None,
    reading: Mapping[str, Any] | None = None,
) -> ReplayFeed:
    """Return the feed that `text` names, with `symbols` in that order (None: all of them).

    `reading` are options of `read_bars`, e.g. {"timezone": "UTC", "repair": "sort"}.

    Raises:
      ConfigError: this version does not have the feed. BarError: the file cannot be used.
    """
    bars = read_bars(replayed(text), **(reading or {}))
    if symbols is not None and bars.symbols != symbols:
        bars = bars.select(*symbols)
    return ReplayFeed(bars)


def rejection(bar: Bar, last: int | None) -> str | None:
    """Return why `bar` must not be used, as a stable code; None if it is usable.

    Args:
      bar: fields `[A]`.
      last: seconds of the last good bar's open; None before the first.
    """
    if (np.asarray(bar.time) != bar.time[0]).any():
        return "time-differs-between-assets"
    if last is not None and int(bar.time[0]) <= last:
        return "duplicate-time" if int(bar.time[0]) == last else "time-goes-back"
    # Prices of absent assets are copies of older ones, or NaN, so only those present are checked.
    present = np.asarray(bar.present)
    if not present.any():
        return "no-asset-present"
    prices = {name: np.asarray(getattr(bar, name))[present] for name in PRICES}
    stacked = np.stack(list(prices.values()))
    if not np.isfinite(stacked).all():
        return "price-not-finite"
    if (stacked <= 0.0).any():
        return "price-not-above-0"
    if (prices["high"] < stacked).any() or (prices["low"] > stacked).any():
        return "high-low-do-not-enclose"
    volume = np.asarray(bar.volume)[present]
    if np.isinf(volume).any() or (volume < 0.0).any():  # NaN is a volume that nobody reported
        return "volume-not-usable"
    return None
