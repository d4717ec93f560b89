"""The check that each bar of a feed must pass before anything sees it.

A bar's values are checked by the code that checks a bar file, `data.reading.detect`, and have its
codes (D006 to D012, D030 to D033). Between bars: time that stands still (D021) or goes back (D020),
and of a live feed also a price that is far from the last (D026), and bars that are not closed yet.
A live feed may also repeat bars and correct them: a bar that passed is dropped where it is equal,
whatever its age, and is a correction where it is not.

A price that is far from the last is quarantined: nothing sees the bar until the next one. If that
one continues from the new price, the bar is released as it is; if not, its far assets are taken as
missing. Either way nothing is decided at a bar that comes late.

The gate of a file does not look for far prices: `read_bars` has looked at all of them already, and
`repair="keep-jumps"` says that they are true. So a replay trades what its backtest trades.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from nca_trader.data.reading.detect import is_far, row_faults
from nca_trader.data.reading.faults import Fault, Kind, Table
from nca_trader.paper.journal.bars import INCOME, bar_body
from nca_trader.types import PRICES, Bar, fields_of

MOVES = 250  # bars: the median move of so many is a usual one
OUTSIDE, OUTSIDE_MOVES = 0.05, 10  # of a fill, as a logarithm, and in usual moves of the symbol
SKEW = 2.0  # seconds by which two clocks may differ


class Refusal(NamedTuple):
    """Why a bar is not used now.

    code: stable. say: the same with numbers. held: whether the bar waits for the next one. bad:
    whether it counts among the bad bars that halt; an old bar may be sent again at any time.
    """

    code: str
    say: str
    held: bool = False
    bad: bool = True


class Passed(NamedTuple):
    """A bar to process.

    late: it was held until the bar after it, so nothing may be decided at it. risks: the bodies of
    `risk` events, of a late bar whether the next one continues from its price; else its far assets
    were taken out.
    """

    bar: Bar
    late: bool = False
    risks: Sequence[dict[str, Any]] = ()


class Gate:
    """Passes usable bars, in order. Its memory is of the bars alone, so the same bars repeat it.

    Args:
      symbols: `A` names.
      live: whether bars are quarantined where a price is far from the last.
      seconds: length of a bar.
      clock: nanoseconds since 1970 UTC; None does not ask whether a bar is closed.
      passed: returns the body of the bar that passed at a time, in seconds, or None.

    Attributes:
      in_a_row: bars that were refused or held since the last good one.
    """

    def __init__(
        self,
        symbols: tuple[str, ...],
        live: bool = False,
        seconds: int = 0,
        clock: Callable[[], int] | None = None,
        passed: Callable[[int], dict[str, Any] | None] = lambda seconds: None,
    ):
        self._symbols, self._live, self._seconds, self._clock = symbols, live, seconds, clock
        self._passed = passed
        self._revised: dict[int, dict[str, Any]] = {}  # the newest version of corrected bars
        self._last: Bar | None = None  # that was passed or held
        self._held: tuple[Bar, np.ndarray, np.ndarray] | None = None  # bar, far assets, and prices
        self._close = np.full(len(symbols), np.nan)  # of the last bar that was passed
        self._moves: deque[np.ndarray] = deque(maxlen=MOVES)
        self.in_a_row = 0

    def admit(self, bar: Bar) -> tuple[list[Passed], Refusal | None]:
        """Check one bar, fields `[A]`.

        Returns:
          The bars to process now, in order, and why `bar` is not one of them. A bar that repeats
          the last one exactly gives neither: feeds send it again after a reconnection.
        """
        if self._last is not None and _same(bar, self._last):
            return [], None
        last = None if self._last is None else int(self._last.time[0])
        if self._live and last is not None and int(bar.time[0]) <= last:
            return [], self._old(bar, last)
        refusal = self._refused(bar)
        if refusal is not None:
            self.in_a_row += 1
            return [], refusal
        self._last = bar
        # This bar is what the held one waited for.
        passed = self._release(bar) if self._held is not None else []
        if self._live and (refusal := self._quarantine(bar)) is not None:
            self.in_a_row += 1
            return passed, refusal
        self.in_a_row = 0
        self._see(bar)
        return [*passed, Passed(bar)], None

    def is_outside(self, asset: int, price: float, bar: Bar) -> bool:
        """Return whether a fill between the last bar and `bar` is far from the prices of both."""
        lasts = np.array([self._close[asset], bar.low[asset], bar.high[asset]])
        with np.errstate(all="ignore"):
            away = max(np.log(price / np.nanmax(lasts)), np.log(np.nanmin(lasts) / price))
        usual = np.broadcast_to(self._typical(), self._close.shape)[asset]
        # Written with `not`, so that a price that is none is far.
        return not away <= max(OUTSIDE, OUTSIDE_MOVES * usual)

    def learn(self, bar: Bar) -> None:
        """Take a bar that passed before, of a journal: the next ones are compared with it."""
        self._last, self.in_a_row = bar, 0
        self._see(bar)

    def _old(self, bar: Bar, last: int) -> Refusal | None:
        """Return what a bar that is not newer than the last one of a live feed is, if anything."""
        seconds = int(bar.time[0])
        before = self._revised.get(seconds) or self._passed(seconds)
        if before is None:
            code = Kind.D021 if seconds == last else Kind.D020
            return Refusal(code.name, code.text, bad=False)
        body = bar_body(bar, self._symbols)
        if body == before:
            return None
        self._revised[seconds] = body
        changed = [
            f"{symbol} {before.get(symbol)} is now {body[symbol]}"
            for symbol in self._symbols
            if body[symbol] != before.get(symbol)
        ]
        say = f"{np.datetime64(seconds, 's')}: {'; '.join(changed)}"
        return Refusal("correction", say, bad=False)

    def _refused(self, bar: Bar) -> Refusal | None:
        """Return what is wrong with the bar by itself, or with its time."""
        seconds = int(bar.time[0])
        # A feed of your own may join bars of several streams.
        if (np.asarray(bar.time) != bar.time[0]).any():
            return Refusal("bar-times", "the assets of the bar have different times")
        if self._last is not None and seconds <= (last := int(self._last.time[0])):
            # The fault table's: the same bar again is dropped, another one of its time is not used.
            code = Kind.D021 if seconds == last else Kind.D020
            return Refusal(code.name, code.text)
        if self._clock is not None:
            ahead = seconds - self._clock() / 1e9
            if ahead > SKEW:
                return Refusal("bar-future", "the bar opens later than now")
            if ahead + self._seconds > SKEW:
                return Refusal("bar-unfinished", "the bar closes later than now")
        # A replay gives its agent every row that the backtest has, also one of no asset.
        if self._live and not np.asarray(bar.present).any():
            return Refusal("bar-empty", "no asset is present")
        # Prices of absent assets are copies of older ones, or NaN, so only those present count.
        faults = self._faults(bar)
        if not faults:
            return None
        first = faults[0]
        mask = np.ones(len(self._symbols), bool) if first.mask is None else first.mask
        return Refusal(first.code.name, f"{self._symbols[int(np.argmax(mask))]} {first.say}")

    def _faults(self, bar: Bar) -> list[Fault]:
        """Return what a bar file's check finds in the bar, in its order."""
        if _is_plain(bar):
            return []
        fields = {name: np.asarray(getattr(bar, name)) for name in (*PRICES, "present")}
        # NaN is a missing volume, which bars may hold.
        fields["volume"] = np.where(np.isnan(bar.volume), 0.0, bar.volume)
        given = {column: getattr(bar, name) for name, column in INCOME.items()}
        fields |= {k: np.nan_to_num(v, posinf=np.inf) for k, v in given.items() if v is not None}
        table = Table(fields, list(self._symbols))
        return row_faults(table)

    def _quarantine(self, bar: Bar) -> Refusal | None:
        """Hold the bar if a price of it is far from the last close."""
        with np.errstate(invalid="ignore", divide="ignore"):
            # Both from the last close, since a wild open may be back by the close.
            moves = np.log(np.stack([bar.close, bar.open]) / self._close)
        moves = np.where(np.isfinite(moves) & bar.present, moves, 0.0)
        if not is_far(moves, 0.0).any():  # so that the median is rarely needed
            return None
        far = np.atleast_2d(is_far(moves, self._typical()))
        if not far.any():
            return None
        # The open alone may be far; then that is the price which the next bar has to confirm.
        price = np.where(far[0], bar.close, bar.open)
        wild = np.asarray(far.any(axis=0))
        self._held = (bar, wild, price)
        i = int(np.argmax(wild))
        times = price[i] / self._close[i]
        say = f"{self._symbols[i]} at {price[i]:.6g} is {times:.4g} times the last close"
        return Refusal(Kind.D026.name, say, held=True)

    def _release(self, bar: Bar) -> list[Passed]:
        """Return the held bar, as it is or without its far assets, now that `bar` follows it."""
        assert self._held is not None
        held, far, price = self._held
        self._held = None
        with np.errstate(invalid="ignore", divide="ignore"):
            back, on = (np.abs(np.log(bar.open / x)) for x in (self._close, price))
        # The next open is near the wild price, and nearer to it than to the one before.
        confirmed = far & np.asarray(bar.present) & ~is_far(on, self._typical()) & (on < back)
        gone = far & ~confirmed
        if gone.any():
            present = np.asarray(held.present) & ~gone
            # As in bars: a missing one has the last close as its prices, and no volume.
            prices = {name: np.where(gone, self._close, getattr(held, name)) for name in PRICES}
            held = held._replace(present=present, volume=np.where(gone, 0.0, held.volume), **prices)
            for name in INCOME:
                if (value := getattr(held, name)) is not None:
                    held = held._replace(**{name: np.where(gone, 0.0, value)})
        if not np.asarray(held.present).any():
            return []
        self._see(held)
        code = "bar-not-confirmed" if gone.any() else "bar-confirmed"
        symbols = [self._symbols[i] for i in np.flatnonzero(far).tolist()]
        return [Passed(held, True, [{"code": code, "symbols": symbols}])]

    def _see(self, bar: Bar) -> None:
        close = np.where(bar.present, bar.close, self._close)
        if self._live:
            # Of present bars alone, as in a file; NaN before a first close.
            moved = np.where(bar.present, np.abs(np.log(close / self._close)), np.nan)
            self._moves.append(moved)
        self._close = close

    def _typical(self) -> np.ndarray | float:
        """Return `[A]` the median move from close to close; 0 where nothing moved yet."""
        if not self._moves:
            return 0.0
        moves = np.ma.masked_invalid(np.stack(self._moves))
        # Of each asset by itself, and of the bars that it had.
        return np.ma.median(moves, axis=0).filled(0.0)


def _is_plain(bar: Bar) -> bool:
    """Return whether a bar is prices and volumes alone, and each asset's are in order.

    The whole check takes a tenth of the time of a bar, and nearly all bars are plain.
    """
    if any(getattr(bar, name) is not None for name in INCOME):
        return False
    rows = (np.asarray(getattr(bar, name)).tolist() for name in (*PRICES, "volume"))
    # False where a number is NaN.
    return all(
        0.0 < low <= o <= h < np.inf and low <= c <= h and 0.0 <= volume < np.inf
        for o, h, low, c, volume in zip(*rows, strict=True)
    )


def _same(bar: Bar, other: Bar) -> bool:
    """Return whether two bars are equal, NaN being equal to NaN."""
    ours, theirs = fields_of(bar), fields_of(other)
    return ours.keys() == theirs.keys() and all(
        np.array_equal(x, theirs[name], equal_nan=True) for name, x in ours.items()
    )
