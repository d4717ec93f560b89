"""Sources of closed bars, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from nca_trader.config.reading import replayed
from nca_trader.data.bars import read_bars
from nca_trader.types import Bar, Bars

NANOSECONDS = 1_000_000_000


class Feed(Protocol):
    """Closed bars of `A` assets in the order of time.

    symbols: `A` names. now: nanoseconds since 1970 UTC, the clock of this feed.
    """

    symbols: tuple[str, ...]

    def __iter__(self) -> Iterator[Bar]: ...

    def now(self) -> int:
        """Return the feed's clock."""
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
