"""Downloads a venue's history into a cache, which resumes, grows, and never mixes two scales."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from typing import Any

import numpy as np

from nca_trader.cloud import cache_folder
from nca_trader.config.ranges import expect, moment
from nca_trader.config.records import loads
from nca_trader.data.bars import frame_of, read_bars, write_bars
from nca_trader.errors import BarError, ConfigError, StateError, argument, logger
from nca_trader.machine import refuse_link
from nca_trader.paper.clock import NANOSECONDS, Clock
from nca_trader.paper.feeds.venue_feed import (
    DAY_SECONDS,
    Grid,
    Row,
    Source,
    VenueFeed,
    bars_of,
    pause_after,
)
from nca_trader.paper.venue import Unreachable
from nca_trader.progress import Progress
from nca_trader.types import PRICES, Bars

CHUNK = 10_000  # rows of a chunk, about
ATTEMPTS = 8  # of a chunk
OVERLAP = 5  # of a symbol's rows that are asked for again, and compared
SAME = 1e-5  # relative difference of prices that were not rewritten, at most
DONE = "done"  # the line after a chunk
VENUES = "yahoo, alpaca or ccxt:EXCHANGE"
log = logger(__name__)


def fetch_bars(
    source: str,
    start: str,
    stop: str | None = None,
    every: str = "1d",
    *,
    repair: str | Iterable[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Bars:
    """Download the history of symbols from a venue, and return its closed bars.

    "yahoo:SPY,QQQ" (extra `yahoo`, no keys): prices adjusted for splits up to today, and dividends
    as cash (`Bars.dividend`), for which prices are thus not adjusted. Days have their exchange's
    dates. "alpaca:SPY" (its keys): adjusted for splits, without dividends. "ccxt:binance:BTC/USDT":
    spot markets, without keys.

    What comes is kept by symbol. A later call asks for what is missing alone, and needs no network
    where nothing is. It asks for the last bars again: if the venue changed their prices, as after a
    split, all of them are downloaded again, and a warning says so.

    Args:
      source: a venue and its symbols.
      start: the first date, e.g. "2010-01-01".
      stop: bars close by then; None: now.
      every: length of a bar, e.g. "1d", "1h", "1min".
      repair: as in `read_bars`, whose checks the bars pass.
      cache: the folder to keep them in; None: `nca_trader/bars` in the user's cache folder.
      options: of the venue, e.g. `feed="sip"` of Alpaca.

    Returns:
      Bars `[N, A]`; where a symbol has no bar at a time of another, its bar is missing.

    Raises:
      ConfigError: an argument is wrong, or a package is missing. BarError: a symbol has no bar in
      the span, or the bars have a fault. Unreachable: the venue does not answer. StateError: the
      cache cannot be written.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.fetch_bars("yahoo:SPY,QQQ", "2010-01-01")  # doctest: +SKIP
    """
    expect("source", source, str, 'a text, e.g. "yahoo:SPY,QQQ"')
    kind, _, rest = source.partition(":")
    exchange, _, rest = rest.partition(":") if kind == "ccxt" else ("", "", rest)
    venue, symbols = f"{kind}:{exchange}".rstrip(":"), symbols_of(rest, source)
    module, first = _module(venue)
    begin, end = (
        None if text is None else int(moment(text, name).timestamp())
        for text, name in ((start, "start"), (stop, "stop"))
    )
    assert begin is not None
    about = {"venue": venue, "every": every, **options}
    folder = pathlib.Path(cache or cache_folder() / "bars") / re.sub(r"\W", "_", venue)
    opened = functools.partial(module.open_source, *first, symbols, every, **options)
    bars = download(symbols, module.grid_of(every), opened, begin, end, folder, about)
    try:
        # A venue may err as any file may, and a frame has the checks and remedies of one.
        checked = read_bars(frame_of(bars), symbols, repair=repair)
    except BarError as error:
        raise BarError(*(line.replace("DataFrame", source, 1) for line in error.args)) from None
    object.__setattr__(checked, "source", source)
    return checked


def download(
    symbols: Sequence[str],
    grid: Grid,
    opened: Callable[[], Source],
    start: int,
    stop: int | None,
    folder: pathlib.Path,
    about: dict[str, Any],
    clock: Clock | None = None,
) -> Bars:
    """Return closed bars from the cache, completed by what the venue has.

    Args:
      symbols: of the bars.
      grid: the bars' opens.
      opened: opens the venue; called if the cache lacks something.
      start: seconds since 1970 UTC of the first open.
      stop: seconds by which the last bar has closed; None: now.
      folder: of the cache.
      about: what decides the rows of a symbol; a part of its file's name.
      clock: of this machine, and of the waits between attempts.
    """
    clock = clock or Clock()
    now = clock.now() // NANOSECONDS
    end = now if stop is None else min(stop, now)
    if grid.period == DAY_SECONDS:
        end -= end % DAY_SECONDS  # a day is over at midnight, so nothing is new before
    if end <= start:
        names = argument("start"), argument("stop")
        raise ConfigError("{} is not before {} or now; give an earlier one.".format(*names))
    once = functools.cache(functools.partial(_open, opened, about["venue"]))
    key = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:8]
    ask = functools.partial(_patient, clock.sleep)
    rows: list[Row] = []
    try:
        for symbol in symbols:
            path = folder / f"{re.sub(r'[^A-Za-z0-9.-]', '_', symbol)}-{about['every']}-{key}.jsonl"
            with _held(path):
                rows += _complete(symbol, once, start, end, path, ask)
    finally:
        if once.cache_info().currsize:
            once().close()
    bars = bars_of(rows, grid, symbols, about["venue"])
    bars = bars[
        int(np.searchsorted(bars.seconds, start)) : int((bars.seconds + grid.period <= end).sum())
    ]
    absent = [symbol for i, symbol in enumerate(symbols) if not bars.present[:, i].any()]
    if absent:
        raise BarError(
            f"{about['venue']}: no bar of {', '.join(absent)} in that span: unknown, delisted or "
            "not listed yet; check the name, or leave it out."
        )
    return bars


@contextlib.contextmanager
def _held(path: pathlib.Path) -> Iterator[None]:
    """Hold a symbol's file while the block runs: another process resumes where this one ended.

    Raises:
      StateError: it cannot be written.
    """
    refuse_link(path.with_suffix(""), ".jsonl", ".lock", ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("a") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise StateError(f"{path}: can't be written ({error.strerror or error}).") from error


def _complete(
    symbol: str,
    opened: Callable[[], Source],
    start: int,
    end: int,
    path: pathlib.Path,
    ask: Callable[..., list[Row]],
) -> list[Row]:
    """Return a symbol's rows from `start` or before until `end` or after; complete its file."""
    head, rows, reached = _kept(path)
    if head and head["start"] <= start and end <= reached:
        return rows
    until = time.strftime("%Y-%m-%d", time.gmtime(reached)) if rows else ""
    try:
        source = copy(opened())
        source.symbols = (symbol,)
        if head and head["start"] <= start <= reached and head["step"] == source.step:
            what = _extend(path, source, rows, start, reached, end, ask)
            if not what:
                return rows
            log.warning("%s: the past was rewritten (%s); it is downloaded again.", symbol, what)
        # Next to the old file, which stays if this download can't be completed.
        new = path.with_suffix(".new")
        for attempt in range(2):
            head, rows, reached = _kept(new)
            if attempt or (head.get("start"), head.get("step")) != (start, source.step):
                rows, reached = [], start
                new.write_text("")
                _append(new, [json.dumps({"symbol": symbol, "start": start, "step": source.step})])
            if not _extend(new, source, rows, start, reached, end, ask):
                break
    except Unreachable as error:
        if not until:
            raise
        raise error.with_remedy(f"the cache holds all until {argument('stop', until)}") from None
    os.replace(new, path) if rows else new.unlink()
    return rows


def _extend(
    path: pathlib.Path,
    source: Source,
    rows: list[Row],
    start: int,
    reached: int,
    end: int,
    ask: Callable[..., list[Row]],
) -> str:
    """Add what a venue has from `reached` until `end` to rows and their file.

    Returns:
      "", or which of the last rows differs at the venue: then its bars are of another scale.
    """
    (symbol,) = source.symbols
    chunks = list(_chunks(reached, end, source))
    with Progress(len(chunks), f"fetch {symbol}", "chunks") as shown:
        for low, high in chunks:
            tail = {row.time: row for row in rows[-OVERLAP:]}
            # Without a row, what was open at `low` may be over by now.
            begin = min(tail, default=max(start, low - source.step))
            found = {row.time: row for row in ask(source, begin, high)}
            if tail and not found:
                say = f"{symbol}: none of the bars that it had is there any longer (delisted?)"
                raise Unreachable("no-bars", say)
            for at, old in tail.items():
                if what := _difference(old, found.get(at)):
                    return what
            fresh = [found[at] for at in sorted(found) if at > max(tail, default=-1)]
            rows += fresh
            _append(path, [*map(json.dumps, fresh), json.dumps([DONE, high])])
            shown.update()
    return ""


def _difference(old: Row, new: Row | None) -> str:
    """Return what a venue changed in a row that it gave before; "" for nothing.

    Volumes are corrected for days, which says nothing of the scale of prices.
    """
    day = time.strftime("%Y-%m-%d", time.gmtime(old.time))
    if new is None:
        return f"{day} is gone"
    for name in (*PRICES, "dividend"):
        was, now = getattr(old, name), getattr(new, name)
        if not (math.isclose(was, now, rel_tol=SAME) or (was != was and now != now)):
            return f"{name} of {day} was {was:g} and is {now:g}"
    return ""


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
    days = max(1, CHUNK * source.step // DAY_SECONDS)
    while start < end:
        # At midnight, so that no session of a stock market is cut in two.
        high = min((start // DAY_SECONDS + days) * DAY_SECONDS, end)
        yield start, high
        start = high


def _open(opened: Callable[[], Source], venue: str) -> Source:
    try:
        return opened()
    except Unreachable as error:  # a reason alone, such as "connection"
        more = f"{venue} did not answer what markets it has; try the same command later"
        raise error.with_remedy(more) from None


def _patient(sleep: Callable[[float], None], source: Source, low: int, high: int) -> list[Row]:
    """Ask for a span again while the venue does not answer."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return source.fetch(low, high)
        except Unreachable as error:
            if attempt == ATTEMPTS:
                raise error.with_remedy("the same command resumes where this one stopped") from None
            sleep(pause_after(attempt, source.symbols))
    return []


def _append(path: pathlib.Path, lines: list[str]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))
        # On disk before the next chunk is asked for, so that a crash costs one at most.
        file.flush()
        os.fsync(file.fileno())


def _kept(path: pathlib.Path) -> tuple[dict[str, Any], list[Row], int]:
    """Return what a symbol's file holds: its first line, its rows, and how far it reaches.

    Lines after the last whole chunk are cut off. Any other file is taken for an empty one.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return {}, [], 0
    head: dict[str, Any] = {}
    rows: list[Row] = []
    pending: list[Row] = []
    reached = size = at = 0
    for line in lines:
        at += len(line)
        try:
            item: Any = loads(line) if line.endswith(b"\n") else None
            if not head:
                reached = int(item["start"])
                head.update(item, start=reached, step=int(item["step"]))
            elif item[0] == DONE:
                rows.extend(pending)
                pending, reached = [], int(item[1])
            else:
                pending.append(Row(*item))
                continue
        except (ValueError, TypeError, IndexError, KeyError):
            break  # a crash may leave a torn line at the end
        size = at
    os.truncate(path, size)
    return head, rows, reached


def write_whole(bars: Bars, out: str | os.PathLike[str]) -> None:
    """Write a file at once, so that no reader sees a part of it."""
    path = pathlib.Path(out)
    suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    # In the same folder: a rename is atomic within one file system only.
    whole = path.with_name(f".{path.name}.{os.getpid()}{suffix}")
    try:
        write_bars(bars, whole)
        os.replace(whole, path)
    finally:
        whole.unlink(missing_ok=True)


def symbols_of(text: str, where: str) -> tuple[str, ...]:
    """Return the symbols of a list with commas; `where` begins the message of a fault."""
    found = tuple(symbol.strip() for symbol in text.split(",") if symbol.strip())
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"{where}: {text!r} names no symbol, or one twice; give e.g. SPY,QQQ.")
    return found


def _module(venue: str) -> tuple[Any, tuple[str, ...]]:
    """Return the module of a venue, and the first arguments of what opens it.

    Raises:
      ConfigError: there is no such venue, or its client is not installed.
    """
    # Here, as each needs a client that may not be installed.
    kind, _, exchange = venue.partition(":")
    if kind == "alpaca" and not exchange:
        from nca_trader.paper.feeds import alpaca_feed  # imports alpaca-py, an extra

        return alpaca_feed, ()
    if kind == "ccxt" and exchange:
        from nca_trader.paper.feeds import ccxt_feed  # imports ccxt, an extra

        return ccxt_feed, (exchange,)
    if kind == "yahoo" and not exchange:
        from nca_trader.paper.feeds import yahoo  # imports yfinance, an extra

        return yahoo, ()
    raise ConfigError(f"{venue!r} has no bars; give {VENUES}.")


def open_vendor(venue: str, symbols: Sequence[str], every: str) -> VenueFeed:
    """Return the live bars of a venue that this package knows.

    Args:
      venue: "alpaca", or "ccxt:EXCHANGE", e.g. "ccxt:binance".
      symbols: what it calls them.
      every: length of a bar, e.g. "1d", "1h", "1min".

    Raises:
      ConfigError: there is no such venue, or it cannot be opened.
    """
    module, first = _module(venue)
    return module.open_feed(*first, symbols, every)
