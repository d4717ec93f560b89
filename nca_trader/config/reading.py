"""Options of `read_bars`: repairs, roles of columns, time zones, the length of a bar; and feeds.

They are checked here and not in `data`, so that a command refuses a wrong one before it imports
jax.
"""

from __future__ import annotations

import datetime
import difflib
import re
import zoneinfo
from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from numbers import Real
from typing import Any

import numpy as np

from nca_trader.config.extensions import origin_of
from nca_trader.config.ranges import expect
from nca_trader.errors import BarError, ConfigError, argument

REPAIRS = {
    "sort": "put rows in order of time",
    "keep-first": "of rows with the same time and symbol, keep the first",
    "keep-last": "of rows with the same time and symbol, keep the last",
    "drop-nan": "drop rows in which a value is missing",
    "drop-bad": "drop rows whose time or values are impossible",
    "widen": "widen high and low until they take in open and close",
    "absolute": "take a negative price as its size: CRSP marks the mean of bid and ask so",
    "close-only": "take a missing open, high or low column from the close",
    "no-volume": "take missing volume as 0",
    "keep-case": "take symbols that differ in case alone as different assets",
    "part-reuse": "of a symbol with half a year without bars, make each span an asset of its own",
    "keep-gaps": "take half a year without bars as a gap of one asset, or a third of the hours",
    "keep-jumps": "take jumps of the price as real",
    "unadjusted": "take prices as they stand where the file holds an adjustment as well",
}
# Pairs of repairs of one fault in two ways.
EXCLUSIVE = (("keep-first", "keep-last"), ("part-reuse", "keep-gaps"))
FIELDS = ("open", "high", "low", "close", "volume")
SAMPLE = "sample:"  # before a sample's name, where a file may be given
NO_COLUMN = "-"  # in place of a column: no column has this role
SPREADS = ("half_spread", "bid", "ask", "spread")  # what says how wide the market is
INCOME = ("cash_dividend", "funding")
ROLES = ("time", "symbol", *FIELDS, "present", "split", "dividend", *INCOME, *SPREADS)
# Names that count where a file has no plainer one; prc, openprc, askhi and bidlo are CRSP's.
SECOND = {
    **{name: role for role in FIELDS for name in (f"{role}_price", f"price_{role}", f"px_{role}")},
    **dict.fromkeys(("closing_price", "px_last", "prc"), "close"),
    **{"opening_price": "open", "openprc": "open", "askhi": "high", "bidlo": "low"},
    **dict.fromkeys(("total_volume", "trading_volume", "px_volume"), "volume"),
    **dict.fromkeys(("exchange_date", "trade_date", "trading_date"), "time"),
}
# Dividends by the names of vendors, some of whom give them next to prices that are adjusted.
VENDOR_DIVIDENDS = ("dividends", "dividend_amount", "ex_dividend", "divcash", "div_cash")
# Columns of vendors that hold adjusted prices or factors for them; EVENTS hold the ratio of a split
# on its day alone.
EVENTS = {"split_coefficient", "splitfactor", "stock_splits"}
ADJUSTMENTS = EVENTS | {
    "split_factor", "price_factor", "adj_close", "adjclose", "adjusted_close", "ajexdi",
    "factor", "adj_factor", "adjustment_factor",
}  # fmt: skip
# "spread" alone is not an alias: vendors give it in points, in pips or in the price's unit.
ALIASES = {
    **dict.fromkeys(("time", "date", "datetime", "timestamp", "date_time", "open_time"), "time"),
    "observation_date": "time",
    **dict.fromkeys(("date/time", "gmt_time", "local_time"), "time"),
    **dict.fromkeys(("symbol", "ticker", "asset", "instrument"), "symbol"),
    **dict.fromkeys(("volume", "vol", "real_volume"), "volume"),
    **dict.fromkeys(("tickvol", "tick_volume"), "ticks"),
    **{name: name for name in ("open", "high", "low", "close", "present", "half_spread")},
    "close/last": "close",
    **SECOND,
    **dict.fromkeys(("dividend", "cash_dividend", *VENDOR_DIVIDENDS), "cash_dividend"),
    **dict.fromkeys(("funding", "funding_rate"), "funding"),
    **dict.fromkeys(("bid", "bid_close"), "bid"),
    **dict.fromkeys(("ask", "ask_close"), "ask"),
}
WIDE = re.compile(
    r"(?P<symbol>.+?)[ _.:/|-](?P<field>open|high|low|close|volume|vol|half_spread|bid|ask"
    r"|dividends?|cash_dividend|funding|funding_rate)"
    r"|(?P<field2>open|high|low|close|volume|vol)[ _.:/|-](?P<symbol2>.+)",
    re.IGNORECASE,
)
# bid_close and adj_close are not the closes of assets called "bid" and "adj".
NO_ASSETS = {
    "bid", "ask", "mid", "spread", "adj", "adjusted", "unadjusted", "prev", "previous", "price",
    "prices", "px", "total",
}  # fmt: skip
MEMORY_GB = 2.0  # of memory that reading takes in addition to the program, by default
DATES = {"dmy": "31.12.2018", "mdy": "12/31/2018"}


def plain(column: object) -> str:
    """Return a column's name without the marks, blanks and case that vendors write differently.

    >>> plain("<VOL>"), plain("Adj. Close**"), plain("Vol."), plain("Ex-Dividend")
    ('vol', 'adj_close', 'vol', 'ex_dividend')
    """
    return re.sub(r"[ ._-]+", "_", str(column).strip("<>*._ ").lower())


def role_of(column: object) -> str:
    """Return which of the columns of bars a name means, or "".

    >>> role_of("Open Time"), role_of("<VOL>"), role_of("comment")
    ('time', 'volume', '')
    """
    return ALIASES.get(plain(column), "")


def named_pair(column: object) -> tuple[str, str] | None:
    """Return symbol and field of a wide table's column, such as AAPL_close or close_AAPL."""
    if isinstance(column, tuple) and len(column) == 2:
        parts = [str(part).strip() for part in column]
        known = (*FIELDS, *INCOME, *SPREADS)
        fields = [part if part in known else "" for part in map(role_of, parts)]
        if bool(fields[0]) == bool(fields[1]):
            return None
        return (parts[1], fields[0]) if fields[0] else (parts[0], fields[1])
    match = WIDE.fullmatch(str(column).strip())
    if match is None:
        return None
    symbol, field = match["symbol"] or match["symbol2"], match["field"] or match["field2"]
    return None if symbol.lower() in NO_ASSETS else (symbol, role_of(field))


def parse_repair(repair: str | Iterable[str] | None) -> frozenset[str]:
    """Return the repairs of "sort,drop-nan" or of a sequence.

    Raises:
      BarError: a repair is unknown, or two exclude each other.
    """
    expect("repair", repair, str | Iterable | None, 'a text, e.g. "sort,drop-nan"')
    given = repair.split(",") if isinstance(repair, str) else repair or ()
    names = frozenset(name.strip() for name in given) - {""}
    for name in sorted(names):
        _refuse_unknown("repair", name, REPAIRS)
    for one, other in EXCLUSIVE:
        if names >= {one, other}:
            raise BarError(f"repairs {one} and {other} exclude each other; give one.")
    return names


def parse_columns(columns: str | Mapping[str, str | int] | None) -> dict[str, str]:
    """Return the column of each role, from "time=Date,close=Last" or a mapping.

    Raises:
      BarError: a role is unknown, named twice, or has no column.
    """
    expect("columns", columns, str | Mapping | None, 'a text or a dict, e.g. "close=Last"')
    if isinstance(columns, str):
        pairs = [part.partition("=") for part in columns.split(",") if part.strip()]
        bad = next((role for role, sign, name in pairs if not sign or not name.strip()), None)
        if bad is not None:
            raise BarError(f"columns {bad.strip()!r} has no column; write e.g. time=Date,close=5.")
        given = {role.strip(): name.strip() for role, _, name in pairs}
        # A dict would keep the last of two columns in silence.
        if len(given) < len(pairs):
            raise BarError(f"columns {columns!r} names a role twice; name it once.")
    else:
        given = {role: str(name) for role, name in (columns or {}).items()}
    for role in given:
        _refuse_unknown("column role", role, ROLES)
    return given


def parse_splits(split: str | Iterable[str] | None) -> tuple[tuple[str, str, float], ...]:
    """Return symbol, date and ratio of each of "AAPL:2020-08-31:4,TSLA:2022-08-25:3".

    Raises:
      BarError: one is not SYMBOL:DATE:RATIO.

    >>> parse_splits("X:2021-01-04:3/2")
    (('X', '2021-01-04', 1.5),)
    """
    expect("split", split, str | Iterable | None, 'a text, e.g. "AAPL:2020-08-31:4"')
    found = []
    for text in split.split(",") if isinstance(split, str) else split or ():
        symbol, day, ratio = [*text.rsplit(":", 2), "", ""][:3]
        try:
            found.append(
                (symbol.strip(), str(datetime.date.fromisoformat(day)), float(Fraction(ratio)))
            )
        except (ValueError, ZeroDivisionError, OverflowError):
            found.append(("", day, 0.0))
        if not found[-1][0] or not found[-1][2] > 0.0:
            raise BarError(f"split {text!r} is not SYMBOL:DATE:RATIO; give e.g. AAPL:2020-08-31:4.")
    return tuple(found)


def parse_step(every: str | None) -> np.timedelta64 | None:
    """Return the length of a bar, e.g. of "1min", "4h", "1d".

    Raises:
      BarError: it is not a length of time, or does not divide a day evenly.
    """
    expect("every", every, str | None, 'a text, e.g. "1h"')
    if every is None:
        return None
    step, day = length_of(every), np.timedelta64(1, "D")
    # Bars of a day's divisor start at the same times every day; those of 7 hours would not.
    if not np.timedelta64(0, "ns") < step <= day or day % step:
        raise BarError(f"every={every!r} must divide a day evenly, e.g. 1min, 1h.")
    return step


def length_of(value: Any) -> np.timedelta64:
    """Return a length of time in nanoseconds, e.g. of "12h" or "1d"; NaT of what is none."""
    import pandas as pd  # slow to import, and not needed where nothing is given

    try:
        # pandas deprecates "d" for a day and "w" for a week.
        short = isinstance(value, str)
        value = re.sub(r"[dw]$", lambda unit: unit[0].upper(), value) if short else value
        found = pd.Timedelta(value)
    except (ValueError, TypeError):
        found = pd.NaT
    known = isinstance(found, pd.Timedelta)
    nothing = np.timedelta64("NaT", "ns")
    return (found.to_timedelta64() if known else nothing).astype("timedelta64[ns]")


def parse_memory(memory_gb: float | None) -> float:
    """Return the GiB of memory that reading may take.

    Raises:
      BarError: it is not a number above 0.
    """
    expect("memory_gb", memory_gb, Real | None, "a number, e.g. 4")
    if memory_gb is not None and not memory_gb > 0.0:
        raise BarError(f"{argument('memory_gb', memory_gb)} must be above 0, e.g. 4.")
    return MEMORY_GB if memory_gb is None else float(memory_gb)


def parse_header(header: int | None) -> int | None:
    """Return the line of the columns' names.

    Raises:
      BarError: it is not a whole number above 0.
    """
    expect("header", header, int | None, "a line, e.g. 4")
    if header is not None and not header > 0:
        raise BarError(f"{argument('header', header)}: lines count from 1; give e.g. 4.")
    return header


def refuse_forms(timezone: str | None, dates: str | None, decimal: str | None) -> None:
    """Check a time zone, the order of day and month, and the decimal sign.

    Raises:
      BarError: one of them is unknown.
    """
    expect("timezone", timezone, str | None, 'a text, e.g. "America/New_York"')
    if timezone is not None and not re.fullmatch(r"[+-]\d\d:\d\d", timezone):
        _refuse_unknown("time zone", timezone, zoneinfo.available_timezones())
    if dates is not None and dates not in DATES:
        known = " or ".join(f"{name} ({example})" for name, example in DATES.items())
        raise BarError(f"unknown order of dates {dates!r}; give {known}.")
    if decimal not in (None, ".", ","):
        raise BarError(f"unknown decimal sign {decimal!r}; give '.' or ','.")


def _refuse_unknown(what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        # A cutoff of 0 always finds one, so the message has a name that exists.
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise BarError(f"unknown {what} {name!r}; did you mean {near!r}?")


def replayed_file(feed: str, broker: str = "simulated") -> str | None:
    """Return the bar file that a feed replays; None of a live feed.

    Raises:
      ConfigError: there is no such feed or broker, or they do not go together.
    """
    expect("feed", feed, str, FEEDS)
    kind, rest = source_of(feed, "feed")
    at, _ = source_of(broker, "broker")
    if kind != "replay":
        return None
    if at != "simulated":
        raise ConfigError(
            f"{argument('broker', broker)}: a replay's orders go to the simulated exchange; give "
            f"{argument('broker', 'simulated')}, or a live feed."
        )
    return rest


FEEDS = "replay:FILE, alpaca:SYM,.., ccxt:EXCHANGE:SYM or module:name"
BROKERS = "simulated, alpaca or module:name"


def source_of(text: str, what: str) -> tuple[str, str]:
    """Split a feed's or a broker's name into its kind and the rest.

    Raises:
      ConfigError: it is not one.

    >>> source_of("ccxt:binance:BTC/USDT", "feed")
    ('ccxt', 'binance:BTC/USDT')
    """
    kinds = ("replay", "alpaca", "ccxt") if what == "feed" else ("simulated", "alpaca")
    expect(what, text, str, f"a text: {FEEDS if what == 'feed' else BROKERS}")
    kind, colon, rest = text.partition(":")  # at the first colon: a file may be a URL
    # Of a feed what it reads; a broker of ours has no options.
    if kind in kinds and (bool(rest) if what == "feed" else not colon):
        return kind, rest
    if kind == "ccxt" and what == "broker":
        raise ConfigError(
            f"{argument(what, text)}: ccxt gives bars and takes no orders; give simulated, which "
            "fills at them, or a venue of your own, module:name."
        )
    if kind not in kinds and origin_of(f"{what}s", text) is not None:
        return "module", text
    raise ConfigError(
        f"{argument(what, text)} is not a {what}; give {FEEDS if what == 'feed' else BROKERS}."
    )
