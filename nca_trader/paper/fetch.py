"""Downloads a venue's history into a bar file, and resumes where it was interrupted."""

from __future__ import annotations

import json
import os
import pathlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nca_trader.config.ranges import moment
from nca_trader.config.records import loads
from nca_trader.data.bars import write_bars
from nca_trader.errors import BarError, ConfigError, StateError, argument
from nca_trader.paper.clock import NANOSECONDS, Clock
from nca_trader.paper.venue import Unreachable
from nca_trader.paper.venue_feed import (
    DAY_SECONDS,
    Grid,
    Row,
    Source,
    VenueFeed,
    bars_of,
    pause_after,
)
from nca_trader.progress import Progress
from nca_trader.types import Bars

CHUNK = 10_000  # rows of a chunk, about
ATTEMPTS = 8  # of a chunk
DONE = "done"  # the line after a chunk


def fetch_bars(
    source: Source,
    grid: Grid,
    start: int,
    stop: int | None,
    out: str | os.PathLike[str],
    about: dict[str, Any],
    clock: Clock | None = None,
    sleep: Callable[[float], None] | None = None,
) -> Bars:
    """Download closed bars into a file, which appears once it is whole.

    What has come is kept next to it as FILE.partial. The same call after an interruption resumes
    there, and writes the same bytes.

    Args:
      source: the venue.
      grid: the bars' opens.
      start: seconds since 1970 UTC of the first open.
      stop: seconds by which the last bar has closed; None is now, or what it was at first.
      out: ends in .parquet, .feather or .csv.
      about: what is asked for; a partial file of something else is refused.
      clock: of this machine.
      sleep: waits between attempts.

    Raises:
      BarError: the venue has no bar there. Unreachable: it does not answer, after several attempts.
      ConfigError: the partial file is of another download, or the span is empty.
      StateError: the file cannot be written.
    """
    clock = clock or Clock()
    path = pathlib.Path(out)
    partial = path.with_name(path.name + ".partial")
    now = clock.now() // NANOSECONDS
    about = {**about, "start": start, "stop": stop, "step": source.step}
    kept, rows, reached = _resumed(partial, about)
    # As it was at first: a resumed download must not become a longer one.
    end = kept.get("end", min(now if stop is None else stop, now))
    if end <= start:
        raise ConfigError(
            f"{argument('from')} is not before {argument('to')} or now; give an earlier one."
        )
    # Seeded, as a draw from the system would make tests of the waits uncertain.
    jitter = random.Random(0)
    chunks = list(_chunks(max(reached, start), end, source))
    try:
        with (
            partial.open("a", encoding="utf-8") as file,
            Progress(len(chunks), "fetch", "chunks") as shown,
        ):
            if not kept:
                _append(file, [json.dumps(about | {"end": end}, sort_keys=True)])
            for low, high in chunks:
                found = _patient(source, low, high, sleep or clock.sleep, jitter)
                rows += found
                lines = [json.dumps(row) for row in found]
                _append(file, [*lines, json.dumps([DONE, high])])
                shown.update()
    except OSError as error:
        raise StateError(f"{partial}: can't be written ({error.strerror or error}).") from error
    bars = bars_of(rows, grid, source.symbols, str(path))
    # The last bar may still be open at the venue, and would change.
    bars = bars[: int((bars.seconds + grid.period <= end).sum())]
    if not len(bars):
        partial.unlink()
        raise BarError(f"{', '.join(source.symbols)}: no bar in that span; give another one.")
    _replace(bars, path)
    partial.unlink()
    return bars


def late_starts(bars: Bars, start: str) -> dict[str, str]:
    """Return the dates of the first bars that are a week or more after `start`, by symbol.

    A symbol may have been listed later. Some venues give their newest bars alone, whatever is asked
    for.
    """
    limit = moment(start, "from").timestamp() + 7 * DAY_SECONDS
    firsts = {s: int(bars.present[:, i].argmax()) for i, s in enumerate(bars.symbols)}
    return {s: str(bars.time[row])[:10] for s, row in firsts.items() if bars.seconds[row] >= limit}


def _chunks(start: int, end: int, source: Source) -> Iterator[tuple[int, int]]:
    """Yield spans of about CHUNK rows, of whole days."""
    days = max(1, CHUNK * source.step // max(1, len(source.symbols)) // DAY_SECONDS)
    while start < end:
        # At midnight, so that no session of a stock market is cut in two.
        high = min((start // DAY_SECONDS + days) * DAY_SECONDS, end)
        yield start, high
        start = high


def _patient(
    source: Source, low: int, high: int, sleep: Callable[[float], None], jitter: random.Random
) -> list[Row]:
    """Ask for a span again while the venue does not answer."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return source.fetch(low, high)
        except Unreachable as error:
            if attempt == ATTEMPTS:
                raise Unreachable(
                    error.reason, f"{error}; the same command resumes where this one stopped."
                ) from None
            sleep(pause_after(attempt, jitter))
    return []


def _append(file: Any, lines: list[str]) -> None:
    file.write("".join(f"{line}\n" for line in lines))
    # On disk before the next chunk is asked for, so that a crash costs one at most.
    file.flush()
    os.fsync(file.fileno())


def _resumed(partial: pathlib.Path, about: dict[str, Any]) -> tuple[dict[str, Any], list[Row], int]:
    """Return what a partial file holds: its first line, its rows, and how far it reaches.

    Lines after the last whole chunk are cut off.

    Raises:
      ConfigError: it is of another download.
    """
    try:
        lines = partial.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return {}, [], 0
    except OSError as error:
        raise StateError(f"{partial}: can't be read ({error.strerror}).") from None
    head: dict[str, Any] = {}
    rows: list[Row] = []
    pending: list[Row] = []
    reached = size = at = 0
    for line in lines:
        at += len(line)
        try:
            item: Any = loads(line) if line.endswith(b"\n") else None
            if not head:
                head.update(item)
            elif item[0] == DONE:
                rows.extend(pending)
                pending, reached = [], int(item[1])
            else:
                pending.append(Row(*item))
                continue
        except (ValueError, TypeError, IndexError, KeyError):
            break  # a crash may leave a torn line at the end
        size = at
    # Every option that decides what is fetched, and none of how.
    if head and any(head.get(name) != value for name, value in about.items()):
        other = argument("out")
        raise ConfigError(f"{partial}: is of another download; remove it, or give another {other}.")
    os.truncate(partial, size)
    return head, rows, reached


def _replace(bars: Bars, path: pathlib.Path) -> None:
    """Write the file at once, so that no reader sees a part of it."""
    suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    # In the same folder: a rename is atomic within one file system only.
    whole = path.with_name(f".{path.name}.{os.getpid()}{suffix}")
    try:
        write_bars(bars, whole)
        os.replace(whole, path)
    finally:
        whole.unlink(missing_ok=True)


def open_vendor(venue: str, symbols: Sequence[str], every: str, **options: Any) -> VenueFeed:
    """Return the live bars of a venue that this package knows.

    Args:
      venue: "alpaca", or "ccxt:EXCHANGE", e.g. "ccxt:binance".
      symbols: what it calls them.
      every: length of a bar, e.g. "1d", "1h", "1min".
      **options: of the venue's `open_feed`.

    Raises:
      ConfigError: there is no such venue, or it cannot be opened.
    """
    # Here, as each needs a client that may not be installed.
    kind, _, exchange = venue.partition(":")
    if kind == "alpaca":
        from nca_trader.paper import alpaca_feed  # imports alpaca-py, an extra

        return alpaca_feed.open_feed(symbols, every, **options)
    if kind == "ccxt" and exchange:
        from nca_trader.paper import ccxt_feed  # imports ccxt, an extra

        return ccxt_feed.open_feed(exchange, symbols, every, **options)
    raise ConfigError(f"{venue!r} has no bars; give alpaca or ccxt:EXCHANGE.")


def fetch(
    venue: str,
    symbols: list[str],
    start: str,
    stop: str | None,
    every: str,
    out: str | os.PathLike[str],
    **options: Any,
) -> Bars:
    """Download the history of symbols from a venue into a bar file, and return its bars.

    Args:
      venue: "alpaca", or "ccxt:EXCHANGE", e.g. "ccxt:binance".
      symbols: e.g. ["SPY"] or ["BTC/USDT"].
      start: the first date, e.g. "2020-01-01".
      stop: bars close by then; None: now.
      every: length of a bar, e.g. "1d", "1h", "1min".
      out: ends in .parquet, .feather or .csv.
      **options: of the venue's `open_feed`.

    Raises:
      ConfigError: an argument is wrong. Unreachable: the venue does not answer.
    """
    suffixes = (".parquet", ".feather", ".csv", ".csv.gz")
    if not str(out).endswith(suffixes):
        known = ", ".join(suffixes)
        raise ConfigError(f"{argument('out', str(out))}: bars are written as {known}.")
    feed = open_vendor(venue, symbols, every, **options)
    about = {"venue": venue, "symbols": list(symbols), "every": every}
    begin, end = (
        None if text is None else int(moment(text, name).timestamp())
        for text, name in ((start, "from"), (stop, "to"))
    )
    assert begin is not None
    try:
        return fetch_bars(feed.source, feed.grid, begin, end, out, about)
    finally:
        feed.close()
