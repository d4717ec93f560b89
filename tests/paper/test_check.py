"""The conformance suites pass what is right, and each fault fails its own check in one line."""

import dataclasses

import numpy as np
import pytest
from documents import ROOT, blocks
from livedesk import SECOND, Still, Tape, bar_at
from made_up import rules_of

import nca_trader as nca
from nca_trader.errors import CheckFailed
from nca_trader.paper.feeds.feed import Notice
from nca_trader.paper.venue import Activity, Answer, Holdings, OrderState, Outcome
from nca_trader.paper.venues.exchange import Exchange
from nca_trader.types import Costs

COSTS = Costs(commission=5e-4, slippage=2e-4, interest_lend=0.02)


class Right:
    """An exchange whose market moves a bar when it is asked to."""

    costs = COSTS

    def __init__(self, path):
        self.inner, self.day = Exchange(path, 1e5, ("A", "B"), rules_of(self.costs)), 0
        self.advance()

    def advance(self):
        self.day += 1
        price = 50.0 + self.day % 3
        bar = bar_at(self.day * 86_400, *2 * [[price] * 4 + [1e6]])
        self.inner.quote(bar, (self.day + 1) * 86_400 * SECOND)

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Invents(Right):
    def look_up(self, client_id):
        return self.inner.look_up(client_id) or OrderState(client_id, "A", 1.0, 0.0, "rejected")


class Forgets(Right):
    def look_up(self, client_id):
        return None


class Doubles(Right):
    """A resend under the same id is another order."""

    def submit(self, ticket):
        if self.inner.look_up(ticket.client_id) is not None:
            self.twice = True
        return self.inner.submit(ticket)

    def working(self):
        found = self.inner.working()
        return found + found if getattr(self, "twice", False) else found


class Unsigned(Right):
    def activity(self, since):
        found = self.inner.activity(since)
        return found._replace(fills=[f._replace(units=abs(f.units) / 2) for f in found.fills])


class Renames(Right):
    """Every look gives the fills other ids."""

    looks = 0

    def activity(self, since):
        self.looks += 1
        found = self.inner.activity(since)
        fills = [f._replace(execution_id=f"{f.execution_id}-{self.looks}") for f in found.fills]
        return found._replace(fills=fills)


class Everything(Right):
    def activity(self, since):
        return self.inner.activity(0)


class Pockets(Right):
    """A fee that no payment tells of."""

    def holdings(self):
        cash, units = self.inner.holdings()
        return Holdings(cash - 5.0 * self.day, units)


class Hides(Right):
    def activity(self, since):
        return Activity(self.inner.activity(since).fills, [])

    def holdings(self):
        cash, units = self.inner.holdings()
        return Holdings(cash, {name: n + 1.0 for name, n in units.items()})


class Lists(Right):
    """Orders that have ended are listed as working."""

    def working(self):
        return self.inner._orders("1 = ?", 1)


class Agrees(Right):
    """It accepts whatever it is sent."""

    def submit(self, ticket):
        answer = self.inner.submit(ticket)
        return answer if answer.reason != "unknown-symbol" else Answer(Outcome.ACCEPTED)


class Turns(Right):
    calls = 0

    def now(self):
        self.calls += 1
        return self.inner.now() - self.calls * 10 * 86_400 * SECOND


class Raises(Right):
    def cancel(self, client_id):
        raise OSError("socket closed\nand more")


class Coins(Right):
    """The fee of a buy is taken from the coins; the commission tells of it."""

    costs, told = Costs(), True

    def activity(self, since):
        found = self.inner.activity(since)
        fills = [
            f._replace(
                units=0.999 * f.units,
                commission=f.commission + (0.001 * f.units * f.price if self.told else 0.0),
            )
            if f.units > 0.0
            else f
            for f in found.fills
        ]
        return found._replace(fills=fills)

    def look_up(self, client_id):
        found = self.inner.look_up(client_id)
        if found is None or found.filled <= 0.0:
            return found
        return found._replace(filled=0.999 * found.filled)

    def holdings(self):
        bought = sum(f.units for f in self.inner.activity(0).fills if f.units > 0.0)
        cash, units = self.inner.holdings()
        return Holdings(cash, {"A": units.get("A", 0.0) - 0.001 * bought})


class Untold(Coins):
    told = False


def checked(kind, path):
    venue = kind(path)
    report = nca.check_broker(venue, "A", 3.0, venue.advance, Still())
    venue.close()
    return report


def test_the_exchange_passes_and_ends_flat(tmp_path):
    venue = Right(tmp_path / "books")
    report = nca.check_broker(venue, "A", 3.0, venue.advance, Still())
    assert report.passed and len(report.checks) == 11
    assert venue.holdings().units.get("A", 0.0) == 0.0
    venue.close()


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (Invents, "an order that was never sent is not found"),
        (Forgets, "an order is found by its id"),
        (Doubles, "the same id twice is one order"),
        (Unsigned, "a fill has the id sign and size of its order"),
        (Untold, "a fill has the id sign and size of its order"),
        (Renames, "fills are listed again with the same ids"),
        (Everything, "nothing is listed from the future"),
        (Pockets, "positions and cash are what fills and payments say"),
        (Hides, "positions and cash are what fills and payments say"),
        (Lists, "an order that ended does not work"),
        (Raises, "a cancelled order keeps what it filled"),
        (Agrees, "a wrong order is refused and not kept"),
        (Turns, "the clock does not go back"),
    ],
)
def test_each_fault_fails_its_check_in_one_line(tmp_path, kind, check):
    report = checked(kind, tmp_path / "books")
    assert check in report.faults
    (fault,) = (found.fault for found in report.checks if found.name == check)
    assert fault and "\n" not in fault
    with pytest.raises(CheckFailed, match=check):
        report.raise_if_failed()


def test_a_fee_that_is_taken_in_coins_is_no_fault(tmp_path):
    assert checked(Coins, tmp_path / "books").passed


def tape(stage, folder, kind=Tape, **more):
    return kind(stage.bars(num_bars=60), folder / "tape", begin=30, **more)


def test_a_feed_that_is_right_passes(stage, tmp_path):
    notices = {31: [Notice("stale", "a bar is late")]}
    report = nca.check_feed(tape(stage, tmp_path, notices=notices), history=10)
    assert report.passed and len(report.checks) == 6, str(report)


class Empty(Tape):
    def history(self, count):
        return super().history(0)


class Early(Tape):
    def now(self):
        return super().now() - 40 * SECOND * 3600


class Hasty(Tape):
    early = 3  # seconds before the bar was closed

    def __iter__(self):
        self.live = True
        yield from super().__iter__()

    def now(self):
        return super().now() - getattr(self, "live", False) * self.early * SECOND


class Again(Tape):
    def __iter__(self):
        self.path.write_text(str(self.place - 1))
        yield from super().__iter__()


class Other(Tape):
    def __iter__(self):
        for bar in super().__iter__():
            yield bar._replace(high=bar.low * 0.5)


class Babbles(Tape):
    def __iter__(self):
        yield Notice("hello")


class Shifts(Tape):
    def history(self, count):
        bars = super().history(count)
        return bars if self.place <= 30 else dataclasses.replace(
            bars, time=bars.time + np.timedelta64(3, "h")
        )  # fmt: skip


class Once(Tape):
    def close(self):
        if getattr(self, "gone", False):
            raise OSError("closed already")
        self.gone = True


class Names(Tape):
    symbols = ()

    def __setattr__(self, name, value):
        super().__setattr__(name, ("A", "A") if name == "symbols" else value)


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (Names, "it has symbols and a period"),
        (Empty, "history gives closed bars in order"),
        (Early, "history gives closed bars in order"),
        (Hasty, "live bars are closed in order and of the symbols"),
        (Again, "live bars are closed in order and of the symbols"),
        (Other, "live bars are closed in order and of the symbols"),
        (Babbles, "live bars are closed in order and of the symbols"),
        (Shifts, "bars are on one grid with history"),
        (Once, "it can be closed twice"),
    ],
)
def test_each_fault_of_a_feed_fails_its_check_in_one_line(stage, tmp_path, kind, check):
    report = nca.check_feed(tape(stage, tmp_path, kind), history=10)
    assert check in report.faults
    assert all("\n" not in found.fault for found in report.checks)


def test_a_clock_may_be_a_second_early(stage, tmp_path, monkeypatch):
    monkeypatch.setattr(Hasty, "early", 1)
    assert not nca.check_feed(tape(stage, tmp_path, Hasty), history=10).faults


def test_the_feed_of_the_guide_passes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = next(
        b for b in blocks((ROOT / "docs/guides/paper.md").read_text(), "python") if "mydesk.py" in b
    )
    (tmp_path / "data").mkdir()
    nca.write_bars(nca.sample_bars("sp500")[:1010], "data/mine.csv")
    space = {}
    exec(compile(text, "paper.md", "exec"), space)
    nca.check_feed(space["feed"](), count=2, history=10).raise_if_failed()
