"""Which column of a table is what: long and wide tables become one row per asset and time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import pandas as pd

from nca_trader.config.reading import FIELDS, INCOME, SPREADS
from nca_trader.data.reading.faults import Code, Fault, refusal
from nca_trader.errors import argument
from nca_trader.types import PRICES

# "spread" alone is not an alias: vendors give it in points, in pips or in the price's unit.
ALIASES = {
    **dict.fromkeys(("time", "date", "datetime", "timestamp", "date_time", "open_time"), "time"),
    **dict.fromkeys(("symbol", "ticker", "asset", "instrument"), "symbol"),
    **dict.fromkeys(("volume", "vol"), "volume"),
    **{name: name for name in (*PRICES, "present", "half_spread")},
    **dict.fromkeys(("dividend", "dividends", "cash_dividend", "dividend_amount"), "cash_dividend"),
    **dict.fromkeys(("funding", "funding_rate"), "funding"),
    **dict.fromkeys(("bid", "bid_close"), "bid"),
    **dict.fromkeys(("ask", "ask_close"), "ask"),
}
NONE = "-"  # in place of a column: the table has none in this role
WIDE = re.compile(
    r"(?P<symbol>.+?)[ _.:/|-](?P<field>open|high|low|close|volume|vol|half_spread|bid|ask"
    r"|dividends?|cash_dividend|funding|funding_rate)"
    r"|(?P<field2>open|high|low|close|volume|vol)[ _.:/|-](?P<symbol2>.+)",
    re.IGNORECASE,
)
# bid_close and adj_close are not the closes of assets called "bid" and "adj".
NO_ASSETS = {"bid", "ask", "mid", "spread", "adj", "adjusted", "unadjusted", "prev", "previous"}


class Chunk(NamedTuple):
    """Some rows of a file or a frame, as they were found.

    Attributes:
      frame: its index is what a reader counts: lines from 1 (the header's) or rows from 0.
      name: the file.
      unit: "line" or "row".
      decimal: the sign of texts that are numbers.
      short: lines that end early.
    """

    frame: pd.DataFrame
    name: str
    unit: str
    decimal: str = "."
    short: tuple[int, ...] = ()


class Arranged(NamedTuple):
    """A chunk under the canonical names, one row per asset and time.

    Attributes:
      frame: time, open, high, low, close, volume, present, and what else of `ROLES` there is.
      others: the other columns of the same rows.
      faults: what is wrong with the columns.
      symbols: of a wide table, in the order of its columns; None of a long one.
    """

    frame: pd.DataFrame
    others: pd.DataFrame
    faults: list[Fault]
    symbols: tuple[str, ...] | None


def canonical(column: object) -> str:
    """Returns which of the columns of bars a name means, or "".

    >>> canonical("Open Time"), canonical("<VOL>"), canonical("comment")
    ('time', 'volume', '')
    """
    return ALIASES.get(str(column).strip().strip("<>").lower().replace(" ", "_"), "")


def holds_numbers(column: pd.Series) -> bool:
    """Returns whether a column's type is real numbers; booleans and complex numbers are not."""
    kinds = pd.api.types
    other = kinds.is_bool_dtype(column.dtype) or kinds.is_complex_dtype(column.dtype)
    return kinds.is_numeric_dtype(column.dtype) and not other


def arrange(chunk: Chunk, given: Mapping[str, str]) -> Arranged:
    """Puts a chunk under the canonical names.

    Columns that are missing get stand-ins, so that the rows are checked all the same.

    Args:
      chunk: rows of the table.
      given: column by role, as the user named them.

    Raises:
      BarError: a column that was asked for is not there.
    """
    arranged = _wide(chunk, given) or _long(chunk, given)
    frame, faults = arranged.frame, arranged.faults
    names = ", ".join(map(str, chunk.frame.columns))
    lacking = [name for name in ("time", *FIELDS) if name not in frame]
    for name in lacking:
        code = {"time": Code.D004, "close": Code.D003}.get(name, Code.D005)
        stand_in = {"time": (), "close": (), "volume": ("no-volume",)}.get(name, ("close-only",))
        remedy = f"Say which it is by {argument('columns', name + '=COLUMN')}"
        if name == "close":
            remedy += _wide_closes(arranged, given)
        say = f"no {name} column; the columns are {names}"
        faults.append(Fault(code, say, None, remedy, stand_in))
    # The stand-ins are what the repairs close-only and no-volume would take.
    if not {"time", "close"} & set(lacking):
        for name in lacking:
            frame[name] = 0.0 if name == "volume" else frame["close"]
    if "present" in frame and frame["present"].dtype != bool:
        say = "column present holds other values than True and False"
        faults.append(Fault(Code.D005, say, None, "Correct or rename the column"))
        frame["present"] = True
    elif "present" not in frame:
        frame["present"] = True
    return arranged


def _long(chunk: Chunk, given: Mapping[str, str]) -> Arranged:
    """Arranges a table with one row per asset and time."""
    raw, found, used, faults = chunk.frame, {}, set(), []
    for role, text in given.items():
        if text != NONE:
            found[role] = _expression(chunk, role, text, used)
    for at, column in enumerate(raw.columns):
        role = canonical(column)
        # A dividend that the user named as a factor is not cash.
        if not role or role in given or (role == "cash_dividend" and at in used):
            continue
        if role in found:
            say = f"columns {found[role].name!r} and {column!r} both mean {role}"
            remedy = f"Rename or remove one, or say which by {argument('columns')}"
            faults.append(Fault(Code.D005, say, None, remedy, about=role))
        else:
            found[role] = raw.iloc[:, at]  # by place, as names may be there twice
            used.add(at)
    frame = pd.DataFrame(found, index=raw.index, copy=False)
    others = raw.iloc[:, [i for i in range(raw.shape[1]) if i not in used]]
    return Arranged(frame, others, faults, None)


def _wide_closes(arranged: Arranged, given: Mapping[str, str]) -> str:
    """Adds to the remedy of D003 how columns of numbers alone are read as closes."""
    others = arranged.others
    known = {"symbol", *FIELDS} & set(arranged.frame)
    if known or others.shape[1] < 2 or not all(map(pd.api.types.is_numeric_dtype, others.dtypes)):
        return ""
    columns = ",".join(f"{role}={text}" for role, text in ({**given, "close": "*"}).items())
    options = f"{argument('columns', columns)} {argument('repair', 'close-only,no-volume')}"
    return f"; where each column is the close of an asset, pass {options}"


def _position(chunk: Chunk, text: str) -> int:
    """Returns which column is meant by its name, else by its number from 1.

    Raises:
      BarError: none is, or more than one.
    """
    names = [str(column).strip() for column in chunk.frame.columns]
    same = [i for i, name in enumerate(names) if name == text]
    same = same or [i for i, name in enumerate(names) if name.lower() == text.lower()]
    if not same and text.isdigit() and 1 <= int(text) <= len(names):
        same = [int(text) - 1]
    if len(same) == 1:
        return same[0]
    what = f"{len(same)} columns are called {text!r}" if same else f"no column {text!r}"
    say = f"{what}; the columns are {', '.join(names)}"
    raise refusal(chunk.name, Code.D005, say, "Name one of them, or its number from 1")


def _expression(chunk: Chunk, role: str, text: str, used: set[int]) -> pd.Series:
    """Returns the column that `text` names: itself, A+B joined as time, A/B or 1/B divided.

    Adds to `used` the columns that this uses up.
    """
    names = {str(column).strip().lower() for column in chunk.frame.columns}
    sign = {"time": "+", "split": "/", "dividend": "/"}.get(role)
    if sign is None or sign not in text or text.lower() in names:
        used.add(at := _position(chunk, text))
        return chunk.frame.iloc[:, at]
    first, _, second = (part.strip() for part in text.partition(sign))
    used.add(at := _position(chunk, second))
    right = chunk.frame.iloc[:, at]
    if sign == "/":
        below = pd.to_numeric(right, errors="coerce")
        if first == "1":
            return 1.0 / below
        # The numerator is not used up: a dividend's may be the close itself.
        above = chunk.frame.iloc[:, _position(chunk, first)]
        return pd.to_numeric(above, errors="coerce") / below
    used.add(at := _position(chunk, first))
    left = chunk.frame.iloc[:, at]
    if pd.api.types.is_numeric_dtype(right.dtype):  # 90100 is 09:01:00
        right = right.astype("Int64").astype("str").str.zfill(6)
    return left.astype("str").str.strip() + " " + right.astype("str").str.strip()


def _wide(chunk: Chunk, given: Mapping[str, str]) -> Arranged | None:
    """Arranges a table with a column for each symbol and field; None if the table is long."""
    raw, all_closes = chunk.frame, given.get("close") == "*"
    roles = given.keys() | {canonical(column) for column in raw.columns}
    if "symbol" in roles or ("close" in roles and not all_closes):
        return None
    clock = given.get("time")
    # A frame's time may be named at either level of its header.
    levels = [column if isinstance(column, tuple) else (column,) for column in raw.columns]
    times = [i for i, level in enumerate(levels) if "time" in map(canonical, level)]
    at = _position(chunk, clock) if clock else (times or [None])[0]
    if all_closes:
        names = {i: (str(c), "close") for i, c in enumerate(raw.columns) if i != at}
    else:
        names = {i: pair for i, c in enumerate(raw.columns) if (pair := _pair(c)) and i != at}
    if at is None or "close" not in {field for _, field in names.values()}:
        return None
    faults, parts, positions = [], [], {}
    for i, (symbol, field) in names.items():
        fields = positions.setdefault(symbol, {})
        if field in fields:
            say = f"columns {raw.columns[fields[field]]!r} and {raw.columns[i]!r} both mean "
            faults.append(Fault(Code.D005, f"{say}{field} of {symbol}"))
        fields[field] = i
    for symbol, fields in positions.items():
        part = pd.DataFrame({field: raw.iloc[:, i] for field, i in fields.items()})
        # An empty row is not a bar; one that holds nothing but income is kept, to be refused.
        paid = part[[name for name in INCOME if name in part]].fillna(0.0).ne(0.0).any(axis=1)
        part = part[part[[name for name in FIELDS if name in part]].notna().any(axis=1) | paid]
        part.insert(0, "symbol", symbol)
        part.insert(0, "time", raw.iloc[:, at][part.index])
        parts.append(part)
    frame = pd.concat(parts)
    return Arranged(frame, pd.DataFrame(index=frame.index), faults, tuple(positions))


def _pair(column: Any) -> tuple[str, str] | None:
    """Returns symbol and field of a wide table's column, such as AAPL_close or close_AAPL."""
    if isinstance(column, tuple) and len(column) == 2:
        parts = [str(part).strip() for part in column]
        known = (*FIELDS, *INCOME, *SPREADS)
        fields = [part if part in known else "" for part in map(canonical, parts)]
        if bool(fields[0]) == bool(fields[1]):
            return None
        return (parts[1], fields[0]) if fields[0] else (parts[0], fields[1])
    match = WIDE.fullmatch(str(column).strip())
    if match is None:
        return None
    symbol, field = match["symbol"] or match["symbol2"], match["field"] or match["field2"]
    return None if symbol.lower() in NO_ASSETS else (symbol, canonical(field))
