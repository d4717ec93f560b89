"""Which column of a table is what: long and wide tables become one row an asset and time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import pandas as pd

from nca_trader.config.reading import FIELDS, INCOME, SPREADS
from nca_trader.data.reading.faults import Fault
from nca_trader.data.reading.tables import Table, canonical
from nca_trader.errors import BarError, argument

NONE = "-"  # in place of a column: of this role take none
WIDE = re.compile(
    r"(?P<symbol>.+?)[ _.:/|-](?P<field>open|high|low|close|volume|vol|half_spread|bid|ask"
    r"|dividends?|cash_dividend|funding|funding_rate)"
    r"|(?P<field2>open|high|low|close|volume|vol)[ _.:/|-](?P<symbol2>.+)",
    re.IGNORECASE,
)
NO_ASSETS = {"bid", "ask", "mid", "spread", "adj", "adjusted", "unadjusted", "prev", "previous"}
# Columns from which vendors compute adjusted prices, or what they computed.
ADJUSTMENTS = {
    "split_factor", "price_factor", "adj_close", "adjclose", "adjusted_close", "ajexdi",
    "factor", "adj_factor", "adjustment_factor",
}  # fmt: skip


class Rows(NamedTuple):
    """A table under the canonical names, one row an asset and time.

    `frame`: time, open, high, low, close, volume, present; the others of `ROLES` where the table
    has them. `others`: its other columns, of the same rows. `wide`: from a wide table.
    """

    frame: pd.DataFrame
    others: pd.DataFrame
    faults: list[Fault]
    wide: bool
    symbols: tuple[str, ...] = ()


def arrange(table: Table, given: Mapping[str, str], repairs: frozenset[str]) -> Rows:
    """The table's rows under the canonical names, and what is wrong with its columns.

    Raises:
      BarError: a column that was asked for isn't there; there is no time or no close.
    """
    wide = None if "close" in given and given["close"] != "*" else _wide(table, given)
    if wide is not None:
        frame, others, faults, symbols = wide
        rows = _complete(table, frame, others, faults, repairs=repairs, wide=True)
        return rows._replace(symbols=symbols)
    raw, found, used, faults = table.frame, {}, set(), []
    for role, text in given.items():
        if text == NONE:
            continue
        found[role] = _expression(table, role, text, used)
    for at, column in enumerate(raw.columns):
        role = canonical(column)
        # A dividend that is named as a factor is no cash.
        factor = role == "cash_dividend" and at in used
        if not role or role in given or factor:
            continue
        if role in found:
            say = f"columns {found[role].name!r} and {column!r} both mean {role}"
            remedy = f"Rename or remove one, or say which by {argument('columns')}"
            faults.append(Fault("D005", say, remedy, about=role))
        else:
            found[role] = raw.iloc[:, at]
            used.add(at)
    frame = pd.DataFrame(found, index=raw.index, copy=False)
    others = raw.iloc[:, [i for i in range(raw.shape[1]) if i not in used]]
    rows = _complete(table, frame, others, faults, repairs=repairs, wide=False)
    if not {"symbol", *FIELDS} & set(found) and others.shape[1] > 1:
        _name_wide_closes(rows, given)
    return rows


def _name_wide_closes(rows: Rows, given: Mapping[str, str]) -> None:
    """Adds to the remedy of D003 how columns of numbers alone are read as closes, in place."""
    if not all(map(pd.api.types.is_numeric_dtype, rows.others.dtypes)):
        return
    columns = ",".join(f"{role}={text}" for role, text in ({**given, "close": "*"}).items())
    options = f"{argument('columns', columns)} {argument('repair', 'close-only,no-volume')}"
    for at, fault in enumerate(rows.faults):
        if fault.code == "D003":
            remedy = f"{fault.remedy}; where each column is the close of an asset, pass {options}"
            rows.faults[at] = fault._replace(remedy=remedy)


def _position(table: Table, text: str) -> int:
    """Which column is meant by its name, else by its number from 1.

    Raises:
      BarError: none, or more than one.
    """
    names = [str(column).strip() for column in table.frame.columns]
    same = [i for i, name in enumerate(names) if name == text]
    same = same or [i for i, name in enumerate(names) if name.lower() == text.lower()]
    if not same and text.isdigit() and 1 <= int(text) <= len(names):
        same = [int(text) - 1]
    if len(same) == 1:
        return same[0]
    what = f"{len(same)} columns are called {text!r}" if same else f"no column {text!r}"
    raise BarError(
        f"{table.name}: D005 {what}; the columns are {', '.join(names)}. "
        "Name one of them, or its number from 1."
    )


def _expression(table: Table, role: str, text: str, used: set[int]) -> pd.Series:
    """The column that `text` names: itself, A+B joined as time, A/B or 1/B divided."""
    names = {str(column).strip().lower() for column in table.frame.columns}
    sign = {"time": "+", "split": "/", "dividend": "/"}.get(role)
    if sign is None or sign not in text or text.lower() in names:
        used.add(at := _position(table, text))
        return table.frame.iloc[:, at]
    first, _, second = (part.strip() for part in text.partition(sign))
    right = table.frame.iloc[:, at := _position(table, second)]
    used.add(at)
    if sign == "/":
        below = pd.to_numeric(right, errors="coerce")
        if first == "1":
            return 1.0 / below
        # The upper one alone is used up: the lower may be the close.
        return pd.to_numeric(table.frame.iloc[:, _position(table, first)], errors="coerce") / below
    left = table.frame.iloc[:, at := _position(table, first)]
    used.add(at)
    if pd.api.types.is_numeric_dtype(right.dtype):  # 90100 is 09:01:00
        right = right.astype("Int64").astype("str").str.zfill(6)
    return left.astype("str").str.strip() + " " + right.astype("str").str.strip()


def _wide(
    table: Table, given: Mapping[str, str]
) -> tuple[pd.DataFrame, pd.DataFrame, list[Fault], tuple[str, ...]] | None:
    """The long form of a table with a column for each symbol and field; None if it is none."""
    raw = table.frame
    roles = given.keys() | {canonical(column) for column in raw.columns}
    if "symbol" in roles or ("close" in roles and given.get("close") != "*"):
        return None
    clock = given.get("time")
    times = [i for i, column in enumerate(raw.columns) if canonical(_first(column)) == "time"]
    at = _position(table, clock) if clock else (times or [None])[0]
    if given.get("close") == "*":
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
            faults.append(Fault("D005", f"{say}{field} of {symbol}", "Rename or remove one"))
        fields[field] = i
    for symbol, fields in positions.items():
        part = pd.DataFrame({field: raw.iloc[:, i] for field, i in fields.items()})
        # Else the asset has no bar there; what is paid to its holders is told even so.
        paid = part[[name for name in INCOME if name in part]].fillna(0.0).ne(0.0).any(axis=1)
        part = part[part[[name for name in FIELDS if name in part]].notna().any(axis=1) | paid]
        part.insert(0, "symbol", symbol)
        part.insert(0, "time", raw.iloc[:, at][part.index])
        parts.append(part)
    frame = pd.concat(parts)
    return frame, pd.DataFrame(index=frame.index), faults, tuple(positions)


def _first(column: Any) -> Any:
    """A frame's time may be named at either level of its header."""
    if isinstance(column, tuple):
        return next((part for part in column if canonical(part) == "time"), column)
    return column


def _pair(column: Any) -> tuple[str, str] | None:
    """Symbol and field of a wide table's column, such as AAPL_close or AAPL_dividend."""
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


def _complete(
    table: Table,
    frame: pd.DataFrame,
    others: pd.DataFrame,
    faults: list[Fault],
    *,
    repairs: frozenset[str],
    wide: bool,
) -> Rows:
    """With a stand-in for each column that is missing, so that the rows are checked all the same.

    Raises:
      BarError: what is wrong with the columns, if they have no time or no close.
    """
    names = ", ".join(map(str, table.frame.columns))
    lacking = [name for name in ("time", *FIELDS) if name not in frame]
    for name in lacking:
        code = {"time": "D004", "close": "D003"}.get(name, "D005")
        option = {"time": (), "close": (), "volume": ("no-volume",)}.get(name, ("close-only",))
        say = f"no {name} column; the columns are {names}"
        remedy = f"Say which it is by {argument('columns', name + '=COLUMN')}"
        faults.append(Fault(code, say, remedy, None, option))
    if not {"time", "close"} & set(lacking):
        for name in lacking:
            frame[name] = 0.0 if name == "volume" else frame["close"]
    if "present" not in frame:
        frame["present"] = True
    elif frame["present"].dtype != bool:
        say = "column present holds other values than True and False"
        faults.append(Fault("D005", say, "Correct or rename the column"))
        frame["present"] = True
    return Rows(frame, others, faults, wide)
