"""The bars of a demo, and the spans on which it trains, selects and tests."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

OFTEN_SEEN = (
    "The years 2013 to 2018 have been looked at dozens of times: they illustrate, and nothing is "
    "judged on them."
)
# Bars of a panel: half of them train, three tenths select and judge, the rest are the test.
TRAIN_SHARE, SELECT_SHARE = 0.5, 0.8
# A checkout may have real futures next to it; their file has closes alone.
FUTURES = "shared/data/futures_daily.parquet"
MOST_WARM = 300  # bars: the longest feature of `panel_daily` and some more
SIMULATED, PLANTED = "simulated", 2.0  # the Sharpe ratio of the best rule
REPAIR = "close-only,no-volume,keep-jumps"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoJob:
    """What a demo trains, selects and tests on.

    Attributes:
      bars: all of them.
      title: of the page.
      first: the first bar that counts of training, after the warm-up.
      train_until, select_until: train before the first date, decide what is deployed between the
        two, evaluate from the second on, once.
      note: what a reader has to know of the test span.
    """

    bars: Any
    title: str
    first: str
    train_until: str
    select_until: str
    note: str

    @property
    def spans(self) -> tuple[str, str]:
        """The years of selection, and those of the test."""
        index, test = self.bars.index, self.bars.row(self.select_until, "start")
        first = index[self.bars.row(self.train_until, "start")]
        return f"{first.year}-{index[test - 1].year}", f"{index[test].year}-{index[-1].year}"


def job_of(panel: str | None) -> DemoJob:
    """Return the job of a demo; `panel` is a file, "simulated", or "" for what is found.

    Raises:
      BarError: the file cannot be read, or has too few bars.
    """
    from nca_trader.data.bars import sample_bars

    if panel is None:
        bars = sample_bars("sp500")
        title = "NCA agents on the S&P 500 and NASDAQ indexes"
        dates = {"first": "2000-03-01", "train_until": "2011-01-01", "select_until": "2013-01-01"}
        return DemoJob(bars=bars, title=title, **dates, note=OFTEN_SEEN)
    from nca_trader.data.bars import read_bars
    from nca_trader.errors import BarError
    from nca_trader.markets.closed_form import trend_panel

    # An empty `panel` takes futures that lie next to a checkout; "simulated" asks for drawn bars.
    checkout = pathlib.Path(__file__).resolve().parents[2]
    known = [folder / FUTURES for folder in (pathlib.Path.cwd().parent, checkout.parent)]
    found = panel or next(filter(pathlib.Path.is_file, known), SIMULATED)
    if found != SIMULATED:
        bars = read_bars(found, repair=REPAIR)
        title = f"NCA agents on a panel: {pathlib.Path(found).stem}"
        note = (
            "Where the file has no opens, trades fill at the next close. The first look at the "
            "test span is a test; every later one, after a change, is training."
        )
    else:
        drawn = trend_panel(sharpe=PLANTED)
        bars, title = drawn.bars, "NCA agents on a simulated panel with a planted trend"
        note = (
            f"The panel is simulated: trends begin by chance and decay. The best rule has a Sharpe "
            f"ratio of {drawn.sharpe:.2f} before costs, which no agent can exceed but by luck."
        )
    if len(bars) < MOST_WARM * 4:
        raise BarError(
            f"{bars.source}: {len(bars)} bars; a demo of a panel needs {MOST_WARM * 4} daily bars."
        )
    # Shares of rows and not dates: a user's file has any years.
    rows = (MOST_WARM, int(TRAIN_SHARE * len(bars)), int(SELECT_SHARE * len(bars)))
    first, train, select = (str(bars.index[row])[:10] for row in rows)
    return DemoJob(
        bars=bars, title=title, first=first, train_until=train, select_until=select, note=note
    )
