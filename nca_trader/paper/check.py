"""Checks of a user's own venue or feed: `nca.check_broker(venue)` and `nca.check_feed(feed)`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from nca_trader.envs.check import CheckReport, report_of
from nca_trader.errors import CheckFailed
from nca_trader.paper.clock import NANOSECONDS, Clock
from nca_trader.paper.feeds.feed import NOTICES, LiveFeed, Notice
from nca_trader.paper.session.gate import Gate
from nca_trader.paper.session.router import in_lots
from nca_trader.paper.venue import MAX_CLIENT_ID, Outcome, Ticket, Venue
from nca_trader.types import Bar

FILLING = 30.0  # seconds for a market order to fill
STATES = ("working", "filled", "cancelled", "rejected", "expired")
NEAR = 1e-9  # relative


def check_broker(
    venue: Venue,
    symbol: str,
    units: float,
    advance: Callable[[], None] = lambda: None,
    clock: Clock | None = None,
) -> CheckReport:
    """Send a few small market orders to a venue, and check what a session relies on.

    Use a paper or test account: the orders are real ones there. What was bought is sold again, but
    for less than a lot where a fee was taken in the traded coin.

    Args:
      venue: an open one, whose account holds no open order of `symbol`.
      symbol: to buy and sell.
      units: size of an order, a multiple of the lot and above the least order; at least two lots
        where a fee is taken in the traded coin.
      advance: makes the market move on, for a simulation; called while an order waits for its fill.
      clock: for waits.

    Returns:
      A `CheckReport`; `report.raise_if_failed()` raises `CheckFailed`.

    Example:
      >>> import pathlib, tempfile
      >>> import nca_trader as nca
      >>> import numpy as np
      >>> from nca_trader.paper.venues.exchange import Exchange
      >>> books = pathlib.Path(tempfile.mkdtemp()) / "books"
      >>> venue = Exchange(books, 1000.0, ["X"])
      >>> days = iter(range(1, 100))
      >>> def advance():
      ...     day, price = next(days), np.array([10.0])
      ...     bar = nca.Bar(np.array([day]), *[price] * 5, present=np.array([True]))
      ...     venue.quote(bar, (day + 1) * 10**9)
      >>> advance()
      >>> print(nca.check_broker(venue, "X", 2.0, advance))
      ok       an order that was never sent is not found
      ok       an order is found by its id
      ok       the same id twice is one order
      ok       a fill has the id sign and size of its order
      ok       fills are listed again with the same ids
      ok       nothing is listed from the future
      ok       positions and cash are what fills and payments say
      ok       an order that ended does not work
      ok       a cancelled order keeps what it filled
      ok       a wrong order is refused and not kept
      ok       the clock does not go back
    """
    orders = _Orders(venue, symbol, units, advance, clock or Clock())
    return report_of(_checks_of(_Orders), orders, None)


def _checks_of(suite: type) -> list[Callable[[Any], Any]]:
    """Return the checks of a suite: its public methods, whose names say what holds."""
    return [check for name, check in vars(suite).items() if not name.startswith("_")]


class _Orders:
    """The checks of a venue; each builds on those before it."""

    def __init__(
        self, venue: Venue, symbol: str, units: float, advance: Callable[[], None], clock: Clock
    ):
        self.venue, self.symbol, self.units = venue, symbol, units
        self.advance, self.clock = advance, clock
        self.begun = venue.now()
        # The venue's clock makes the ids of two runs of this check different.
        self.names = (f"nca-check-{self.begun % 10**15}-{i}" for i in itertools.count())
        self.name = ""
        self.before = venue.holdings()
        self.received = units  # of the order that is sold again

    def an_order_that_was_never_sent_is_not_found(self) -> None:
        name = next(self.names)
        _same("look_up of an id that was never sent", self.venue.look_up(name), None)

    def an_order_is_found_by_its_id(self) -> None:
        self.name = next(self.names)
        _true(len(self.name) <= MAX_CLIENT_ID, "the check's own id is too long")
        answer = self.venue.submit(Ticket(self.name, self.symbol, self.units))
        _same("the answer to a market order", answer.outcome, Outcome.ACCEPTED)
        state = self.venue.look_up(self.name)
        if state is None:
            raise CheckFailed("look_up does not find an order that was accepted")
        _same("its client_id", state.client_id, self.name)
        _same("its symbol", state.symbol, self.symbol)
        _near("its units", state.units, self.units)
        _true(
            state.status in STATES, f"its status is {state.status!r}, none of {', '.join(STATES)}"
        )

    def the_same_id_twice_is_one_order(self) -> None:
        answer = self.venue.submit(Ticket(self.name, self.symbol, self.units))
        # Either answer will do, as long as there is one order.
        allowed = (Outcome.ACCEPTED, Outcome.REJECTED)
        _true(answer.outcome in allowed, f"a resend is answered {answer.outcome}")
        same = [state for state in self.venue.working() if state.client_id == self.name]
        _true(len(same) <= 1, f"{len(same)} orders work under one id")

    def _wait(self) -> list[Any]:
        """Return the fills of the last order, once it has ended."""
        # Longer and longer pauses, as venues count requests.
        end, pause = self.clock.monotonic() + FILLING, 0.05
        while True:
            state = self.venue.look_up(self.name)
            fills = self._fills()
            got = sum(fill.units for fill in fills)
            if state is not None and state.status != "working" and _is_near(got, state.filled):
                return fills
            if self.clock.monotonic() > end:
                raise CheckFailed(
                    f"after {FILLING:g} s the order is {state.status if state else 'gone'} and its "
                    f"fills add up to {got:g} of {self.units:g}"
                )
            self.advance()
            self.clock.sleep(pause)
            pause = min(2.0 * pause, 2.0)

    def _fills(self) -> list[Any]:
        """Return the fills of the last order, each id once."""
        found = {}
        for fill in self.venue.activity(self.begun).fills:
            known = found.setdefault(fill.execution_id, fill)
            _true(known == fill, f"execution {fill.execution_id} is listed with two contents")
        return [fill for fill in found.values() if fill.client_id == self.name]

    def a_fill_has_the_id_sign_and_size_of_its_order(self) -> None:
        fills = self._wait()
        got = sum(fill.units for fill in fills)
        # A fee in the traded coin: fewer arrive, and the commission is the price of those missing.
        kept = sum(fill.commission / fill.price for fill in fills if fill.price > 0.0)
        if not _is_near(got + np.sign(self.units) * kept, self.units):
            _near("the sum of its fills", got, self.units)
        self.received = in_lots(got, self.venue.instrument(self.symbol).lot)
        _true(
            self.received != 0.0,
            f"after the fee {got:g} is less than a lot and cannot be sold; give more units",
        )
        for fill in fills:
            _same("a fill's symbol", fill.symbol, self.symbol)
            _true(fill.units * self.units > 0.0, f"a fill has {fill.units:g} units")
            _true(fill.price > 0.0, f"a fill's price is {fill.price:g}")
            _true(np.isfinite(fill.commission), f"a fill's commission is {fill.commission}")
            _true(fill.ts >= self.begun, "a fill is dated before its order")

    def fills_are_listed_again_with_the_same_ids(self) -> None:
        _same("a second look at the fills", sorted(self._fills()), sorted(self._fills()))

    def nothing_is_listed_from_the_future(self) -> None:
        found = self.venue.activity(self.venue.now() + 3600 * NANOSECONDS)
        _same("the fills of an hour from now on", found.fills, [])
        _same("the payments of an hour from now on", found.flows, [])

    def positions_and_cash_are_what_fills_and_payments_say(self) -> None:
        activity, now = self.venue.activity(self.begun), self.venue.holdings()
        fills = {fill.execution_id: fill for fill in activity.fills}.values()
        flows = {flow.id: flow for flow in activity.flows}.values()
        here = self.before.units.get(self.symbol, 0.0)
        here += sum(fill.units for fill in fills if fill.symbol == self.symbol)
        _near("the position", now.units.get(self.symbol, 0.0), here)
        cash = self.before.cash + sum(flow.amount for flow in flows)
        cash -= sum(fill.units * fill.price + fill.commission for fill in fills)
        # Two cents, because venues round each payment to cents.
        off = abs(now.cash - cash)
        _true(off <= 0.02 + 1e-6 * abs(cash), f"cash is {now.cash}, and fills say {cash}")

    def an_order_that_ended_does_not_work(self) -> None:
        working = [state.client_id for state in self.venue.working()]
        _true(self.name not in working, "an order that is filled is listed as working")

    def a_cancelled_order_keeps_what_it_filled(self) -> None:
        self.name = next(self.names)
        self.venue.submit(Ticket(self.name, self.symbol, -self.received))
        # It may fill first: then the cancellation is too late, which is allowed.
        self.venue.cancel(self.name)
        got = sum(fill.units for fill in self._wait())
        state = self.venue.look_up(self.name)
        if state is None:
            raise CheckFailed("look_up does not find an order that was cancelled")
        _near("its filled units", got, state.filled)
        rest = -self.received - state.filled
        if abs(rest) > NEAR * abs(self.units):
            # What was bought is sold again.
            self.name = next(self.names)
            self.venue.submit(Ticket(self.name, self.symbol, rest))
            self._wait()

    def a_wrong_order_is_refused_and_not_kept(self) -> None:
        name = next(self.names)
        answer = self.venue.submit(Ticket(name, "NO-SUCH-SYMBOL", self.units))
        _same("the answer to an unknown symbol", answer.outcome, Outcome.REJECTED)
        state = self.venue.look_up(name)
        # A venue may list an order that it has refused, as long as it says so.
        kept = state is not None and state.status != "rejected"
        _true(not kept, "an order that was refused is kept")

    def the_clock_does_not_go_back(self) -> None:
        _true(self.venue.now() >= self.begun, "now() went back")


def check_feed(feed: LiveFeed, count: int = 3, history: int = 50) -> CheckReport:
    """Read a live feed's history and its next bars, and check what a session relies on.

    It waits for `count` bars to close, so take a feed of short bars.

    Args:
      feed: an open one; it is closed at the end.
      count: bars to wait for.
      history: bars to ask for.

    Returns:
      A `CheckReport`; `report.raise_if_failed()` raises `CheckFailed`.

    Example:
      >>> import nca_trader as nca
      >>> from nca_trader.paper.feeds.ccxt_feed import open_feed
      >>> nca.check_feed(open_feed("binance", ["BTC/USDT"], "1min")).passed  # doctest: +SKIP
      True
    """
    return report_of(_checks_of(_Bars), _Bars(feed, count, history), None)


class _Bars:
    """The checks of a feed."""

    def __init__(self, feed: LiveFeed, count: int, history: int):
        self.feed, self.count, self.wanted = feed, count, history
        self.last: int | None = None
        self.gate = Gate(tuple(feed.symbols))
        self.first = feed.now()

    def it_has_symbols_and_a_period(self) -> None:
        symbols = self.feed.symbols
        _true(bool(symbols) and len(set(symbols)) == len(symbols), f"symbols are {symbols}")
        _true(
            isinstance(self.feed.period, int) and self.feed.period > 0,
            "period is not a whole number of seconds",
        )

    def history_gives_closed_bars_in_order(self) -> None:
        bars = self.feed.history(self.wanted)
        _same("history's symbols", tuple(bars.symbols), tuple(self.feed.symbols))
        _true(0 < len(bars) <= self.wanted, f"history({self.wanted}) gave {len(bars)} bars")
        close = (int(bars.seconds[-1]) + self.feed.period) * NANOSECONDS
        # Two seconds, as the clocks of a venue and of its data differ.
        _true(close <= self.feed.now() + 2 * NANOSECONDS, "history's last bar is not closed yet")
        for bar in bars.each():
            self._take(bar)
        few = self.feed.history(1)
        _same("the bars of history(1)", len(few), 1)

    def _take(self, bar: Bar) -> None:
        passed, refusal = self.gate.admit(bar)
        when = np.datetime64(int(np.asarray(bar.time).flat[0]), "s")
        reason = "it repeats the bar before" if refusal is None else refusal.say
        _true(bool(passed), f"the bar of {when} is refused: {reason}")
        self.last = int(bar.time[0])

    def live_bars_are_closed_in_order_and_of_the_symbols(self) -> None:
        before, seen = self.last, []
        for item in self.feed:
            if isinstance(item, Notice):
                _true(
                    item.code in NOTICES,
                    f"a notice has the code {item.code!r}, not one of {', '.join(NOTICES)}",
                )
                continue
            _same("the number of assets of a bar", len(item.close), len(self.feed.symbols))
            self._take(item)
            now, seen = self.feed.now(), [*seen, self.last]
            close = (seen[-1] + self.feed.period) * NANOSECONDS
            _true(now >= close - 2 * NANOSECONDS, "a bar was given before it was closed")
            _true(before is None or seen[-1] > before, "a live bar was in history already")
            if len(seen) == self.count:
                return
        _true(len(seen) == self.count, f"it ended after {len(seen)} of {self.count} bars")

    def bars_are_on_one_grid_with_history(self) -> None:
        bars = self.feed.history(self.wanted)
        steps = np.diff(bars.seconds)
        _true(
            bool((steps >= self.feed.period).all()), "bars are nearer to each other than the period"
        )
        _true(self.last in bars.seconds, "the last live bar is not in the history that follows")

    def the_clock_does_not_go_back(self) -> None:
        _true(self.feed.now() >= self.first, "now() went back")

    def it_can_be_closed_twice(self) -> None:
        self.feed.close()
        self.feed.close()


def _true(holds: bool, fault: str) -> None:
    if not holds:
        raise CheckFailed(fault)


def _same(what: str, found: object, expected: object) -> None:
    _true(found == expected, f"{what} is {found!r} and not {expected!r}")


def _is_near(found: float, expected: float) -> bool:
    return abs(found - expected) <= NEAR * max(1.0, abs(expected))


def _near(what: str, found: float, expected: float) -> None:
    _true(_is_near(found, expected), f"{what} is {found:g} and not {expected:g}")
