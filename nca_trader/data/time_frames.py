"""Features of a slower time frame, e.g. "1h:rsi" on bars of a minute: closed slow bars alone.

Bars are added up to slow bars one after the other. A slow bar reaches its features at the bar whose
close is its end. Where that bar is missing, it does at the next one, whose time shows that it is
over. In between the features keep the values of the last slow bar. The slow bars are those of
`resample`, without a first one that began before the bars of an asset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nca_trader.config.reading import parse_step
from nca_trader.data.calendar import OUTSIDE, bar_length, bins, hours_of
from nca_trader.data.features import Feature, keep_unless
from nca_trader.errors import BarError, ConfigError
from nca_trader.types import EXTRAS, Bar, Bars

SECOND = 1_000_000_000  # nanoseconds
LEAST_BARS = 20  # that show their length


class OpenBar(NamedTuple):
    """A slow bar of one asset that is being added up; all `[]`.

    bar: so far; `present` while it is not over, `time` is its end in nanoseconds. whole: whether it
    is known from its begin. quotes: the number of bars in it.
    """

    bar: Bar
    whole: Any
    quotes: Any


class Slow(NamedTuple):
    """The memory of one asset in one time frame: a slow bar, and the features' states and values.

    values: `[n]` of the last slow bar that was over. known: `[n]` bool, see `Feature.known`.
    """

    growing: OpenBar
    states: tuple[Any, ...]
    values: Any
    known: Any


class TimeFrame:
    """Several features of one slower time frame.

    Args:
      name: e.g. "1h".
      features: of the slow bars.
      bar_seconds: length of the bars.
      sessions: a name of `SESSIONS`.

    Raises:
      ConfigError: the slow bars are not longer than the bars, or no multiple of them.
    """

    def __init__(self, name: str, features: Sequence[Feature], bar_seconds: int, sessions: str):
        try:
            width: Any = parse_step(name)
        except BarError as error:
            raise ConfigError(f"time frame {name!r}: {error}") from None
        self.features, self.width = tuple(features), int(width.astype(np.int64))
        self.length, self.hours = bar_seconds * SECOND, hours_of(sessions)
        if not self.length:
            raise ConfigError(
                f"features of the time frame {name!r} need the length of the bars in whole "
                "seconds; give bar_seconds."
            )
        if self.width <= self.length or self.width % self.length:
            raise ConfigError(
                f"time frame {name!r} is not a longer multiple of the bars' own length, "
                f"{bar_seconds} s; name one that is, or take other bars."
            )

    @property
    def warmup(self) -> int:
        """Most present bars, all within the sessions, before the last feature is meaningful."""
        return self._most_bars(max(feature.warmup for feature in self.features))

    @property
    def memory(self) -> int:
        """Most present bars, all within the sessions, on which a feature's value depends."""
        return self._most_bars(max(feature.memory for feature in self.features)) + 1

    def _most_bars(self, slow: int) -> int:
        """Return the most present bars before one more than `slow` slow bars are known."""
        longest, aligned = self.width, True
        if self.hours is not None:
            longest = min(int((self.hours.closed - self.hours.opened).max()), self.width)
            aligned = not (self.hours.opened % self.length).any()
        # Bars that are not aligned with the sessions may begin before one.
        most = -(-longest // self.length) if aligned else longest // self.length + 1
        # A first slow bar that lacks its first bar does not count, and one more gives the value.
        return (slow + 2) * most - 2

    def rows_to_warm(self, time: np.ndarray) -> int:
        """Return the most rows, from any row on, until the last feature is meaningful.

        They are more than `warmup` where bars lie outside the sessions.

        Args:
          time: `[N]` the bars' opens, in nanoseconds.
        """
        _, end = bins(time, self.length, self.width, self.hours)
        rows = np.flatnonzero(end > OUTSIDE)
        ends, first = np.unique(np.asarray(end)[rows], return_index=True)
        known = np.searchsorted(time + self.length, ends)
        slow = max(feature.warmup for feature in self.features) + 1
        begun, known = rows[first][:-slow] + 1, known[slow:]
        return int((known - begun)[known < len(time)].max(initial=0))

    def init(self) -> Slow:
        """Return the state before any bar."""
        zeros = dict.fromkeys(Bar._fields, np.zeros(()))
        first: Any = {"time": np.asarray(OUTSIDE), "present": np.zeros((), bool), "columns": None}
        bar = Bar(**zeros | first)
        states = tuple(feature.init() for feature in self.features)
        growing = OpenBar(bar, np.zeros((), bool), np.zeros((), np.int64))
        none = np.zeros(len(self.features))
        return Slow(growing, states, none, none > 0.0)

    def update(self, state: Slow, bar: Bar) -> tuple[Slow, Any]:
        """Update by one bar of one asset; return the values `[n]`, 0 where it is missing."""
        old, time = state.growing, bar.time * SECOND
        open_, over = old.bar.present, old.bar.time
        begin, end = bins(time, self.length, self.width, self.hours)
        now = time + self.length
        belongs = open_ & (over == end)
        # After a slow bar is over, a bar of an irregular time that lies in it comes too late.
        inside = bar.present & (end > OUTSIDE) & (belongs | (end > over))
        before = bar.present & open_ & ~belongs & (over <= now)
        after = inside & (end <= now)
        grown = _grown(old, bar, belongs, begin >= time)
        grown = grown._replace(bar=grown.bar._replace(time=end, present=~after))

        def feed(number: Any, fed: tuple[Any, ...]) -> tuple[Any, ...]:
            """Give the features the slow bar before (0), or that of this bar (1)."""
            closed = _closed(keep_unless(number > 0, old, grown), bar)
            pairs = [f.update(s, closed) for f, s in zip(self.features, fed[0], strict=True)]
            states = tuple(s for s, _ in pairs)
            known = [
                jnp.asarray(f.known is not None and f.known(s, closed))
                for f, s in zip(self.features, states, strict=True)
            ]
            return states, jnp.stack([value for _, value in pairs]), jnp.stack(known)

        # A scan has no branches, but a loop that ends at once costs next to nothing.
        first, stop = jnp.where(before, 0, 1), jnp.where(after, 2, 1)
        states, values, known = jax.lax.fori_loop(first, stop, feed, state[1:])
        kept = old._replace(bar=old.bar._replace(present=open_ & ~before))
        growing = keep_unless(inside, kept, grown)
        return Slow(growing, states, values, known), jnp.where(bar.present, values, 0.0)

    def known(self, state: Slow, bar: Bar) -> Any:
        """Return `[n]` bool, see `Feature.known`."""
        return bar.present & state.known


def _grown(old: OpenBar, bar: Bar, belongs: Any, begins: Any) -> OpenBar:
    """Return the slow bar with one more bar, or a new one that begins with it.

    Args:
      old: the slow bar so far.
      bar: the next bar.
      belongs: `[]` whether it belongs to that slow bar.
      begins: `[]` whether it opens with its own slow bar.
    """
    slow, total = old.bar, {}
    for name in ("volume", *EXTRAS):
        value = getattr(bar, name)
        before = jnp.where(belongs, getattr(slow, name), 0.0)
        total[name] = before if value is None else before + value
    slow = slow._replace(
        open=jnp.where(belongs, slow.open, bar.open),
        high=jnp.where(belongs, jnp.maximum(slow.high, bar.high), bar.high),
        low=jnp.where(belongs, jnp.minimum(slow.low, bar.low), bar.low),
        close=jnp.asarray(bar.close),
        **total,
    )
    # Only of the first slow bar it is not known whether the bars hold its begin.
    whole = jnp.where(belongs, old.whole, (slow.time > OUTSIDE) | begins)
    return OpenBar(slow, whole, jnp.where(belongs, old.quotes, 0) + 1)


def _closed(growing: OpenBar, bar: Bar) -> Bar:
    """Return a slow bar as the features see it, with the columns that the bars have."""
    slow, quotes = growing.bar, jnp.maximum(growing.quotes, 1)
    spread = jnp.asarray(slow.half_spread) / quotes
    closed = slow._replace(time=slow.time // SECOND, present=growing.whole, half_spread=spread)
    return closed._replace(**{name: None for name in EXTRAS if getattr(bar, name) is None})


def seconds_of_bars(bars: Bars) -> int:
    """Return the length of the bars in whole seconds; 0 where it is none, or is not known."""
    length = bar_length(bars.time)
    whole = not np.isnat(length) and not int(length.astype(np.int64)) % SECOND
    return int(length.astype(np.int64)) // SECOND if whole else 0


def refuse_other_length(bars: Bars, bar_seconds: int) -> None:
    """Refuse bars of another length than features of longer time frames were made for.

    Raises:
      BarError: in one line, both lengths.
    """
    length = seconds_of_bars(bars)
    if bar_seconds not in (0, length) and len(bars) >= LEAST_BARS:
        raise BarError(
            f"{bars.source or 'bars'}: are of {length} s, and the features of {bar_seconds} s; "
            "give bars of that length."
        )
