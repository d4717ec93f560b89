"""A long session against an exchange that breaks: its memory stays, and its books stay exact.

`make soak` runs it over `SOAK_BARS` bars; without the variable it is short.
"""

import os
import resource

import numpy as np
import pytest
from brokenexchange import Broken, Faults
from livedesk import Still, Tape

from nca_trader.paper.journal.journal import Journal, verify
from nca_trader.paper.session.trade import open_session
from nca_trader.types import Costs

BARS = int(os.environ.get("SOAK_BARS", "1500"))
BEGIN = 10
FAULTS = dict(seed=1, reject=0.02, busy=0.02, mute=0.02, reset=0.02, lost=0.02, partial=0.05)


def peak():
    """The most memory that this process ever had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_a_long_session_ends_with_the_books_of_its_exchange(stage, tmp_path):
    agent = stage.agent(costs=Costs())  # what a session reads of a venue has no charges to book
    bars = stage.bars(num_bars=BARS, missing=0.02, start="1971-01-01")
    venue = Broken(
        tmp_path / "books", 1e5, agent.symbols, agent.rules,
        faults=Faults(**FAULTS, repeat=0.1),
    )  # fmt: skip
    film, path, memory = Tape(bars, tmp_path / "tape", BEGIN), tmp_path / "live.db", []
    for part in (1, 2, 3):  # each but the first resumes what the one before wrote
        last = int(bars.seconds[BARS * part // 3 - 1])
        with Journal(path, film.now) as journal:
            session = open_session(agent, film, venue, journal, 1e5, warmup=BEGIN, clock=Still())
            result = session.trade(lambda: (session._state.last or 0) >= last)  # noqa: B023
        memory.append(peak())
    assert result["bars"] == BARS
    assert result["orders"] > BARS // 10
    held, ledger = venue.holdings(), session._account.router.ledger
    assert ledger.cash == pytest.approx(held.cash, rel=1e-9)
    for symbol in agent.symbols:
        assert ledger.units.get(symbol, 0.0) == pytest.approx(held.units.get(symbol, 0.0), abs=1e-9)
    sent = [name for (name,) in venue._file._db.execute("SELECT client_id FROM orders")]
    assert len(sent) == len(set(sent)) > 0
    assert verify(path).seq == result["events"]
    # After the first third the memory grows by at most 100 bytes for each bar.
    assert memory[-1] - memory[0] < 20 + 1e-4 * BARS
    assert np.isfinite(result["equity"])
