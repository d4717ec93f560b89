"""Sources of closed bars, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from nca_trader.paper.clock import NANOSECONDS, Caller
from nca_trader.types import Bar, Bars

# Codes of `Notice`, in docs/guides/live.md.
NOTICES = ("stale", "reconnected", "correction", "late", "gap", "unreachable", "unfinished")


class Notice(NamedTuple):
    """What a live feed says between two bars.

    code: one of `NOTICES`. detail: in words. Nothing is traded from "stale" until the next bar.
    """

    code: str
    detail: str = ""


class LiveFeed(Protocol):
    """Closed bars of `A` assets in the order of time, which close while it is read.

    symbols: `A` names. period: of a bar, in seconds. Iteration waits for the bars that close after
    the last call of `history`, and gives notices between them. A feed may have `due(open)`, seconds
    since 1970 UTC at which it can give the bar after the one that opens at `open`, e.g. after a
    weekend; else that bar follows at once and is given when it closes. Until then that one is the
    newest, and is traded on.

    A bar is a `Bar` of numpy arrays, `[A]` each in the order of `symbols`, its `time` as well. A
    bar that is not newer than the last one of `history` is not given.
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
    """Replays the bars of a file.

    Its clock is the open of the bar last given, so that two replays write the same journal.

    Args:
      bars: of the file.
      symbols: that are replayed, in this order; None are all.
    """

    def __init__(self, bars: Bars, symbols: tuple[str, ...] | None = None):
        self.bars = bars = bars if symbols is None else bars.select(*symbols)
        self.symbols, self.source = bars.symbols, bars.source
        self._now = int(bars.seconds[0]) * NANOSECONDS if len(bars) else 0

    def __len__(self) -> int:
        """Return the number of bars in the file."""
        return len(self.bars)

    @property
    def last(self) -> int:
        """Seconds since 1970 UTC of the open of the file's last bar."""
        return int(self.bars.seconds[-1])

    def now(self) -> int:
        """Return the nanoseconds since 1970 UTC of the bar last given; of the first, before it."""
        return self._now

    def __iter__(self) -> Iterator[Bar]:
        """Yield every bar from the first, fields `[A]`."""
        for bar in self.bars.each():
            # Before the bar is given: the session stamps its events with this time.
            self._now = int(bar.time[0]) * NANOSECONDS
            yield bar


class Pump:
    """Reads a feed one item at a time, and only when asked for one.

    It waits in a thread of its own, so that the session's is never stuck.

    Args:
      feed: what it reads.
    """

    END = object()

    def __init__(self, feed: LiveFeed):
        self._feed, self._items = feed, None
        self._caller = Caller("feed")

    def get(self, seconds: float) -> Any:
        """Return the next item, `END` after the last, or None if `seconds` pass without one.

        Raises:
          Exception: what the feed raised.
        """
        # Only when asked: a feed that is read ahead would give bars before they are wanted.
        if not self._caller.busy:
            self._caller.start(self._next)
        return self._caller.result() if self._caller.done(seconds) else None

    def close(self) -> None:
        """End the thread, once the feed has ended or given its item."""
        self._caller.close()

    def _next(self) -> Any:
        if self._items is None:
            self._items = iter(self._feed)
        return next(self._items, self.END)
