"""A bar's form in the journal: `bar_body` writes it, and `bar_of` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nca_trader.config.records import finite
from nca_trader.types import PRICES, Bar, Tensor

INCOME = {"half_spread": "half_spread", "dividend": "cash_dividend", "funding": "funding"}


def in_json(value: np.ndarray | Mapping[str, np.ndarray]) -> Any:
    """Return arrays in JSON's types; numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {name: in_json(item) for name, item in value.items()}
    known = value.dtype.kind != "f" or np.isfinite(value).all()
    return value.tolist() if known else finite(value.tolist())


def bar_body(bar: Bar, symbols: tuple[str, ...]) -> dict[str, Any]:
    """Return open, high, low, close, volume by symbol; None for an asset that has no bar.

    Where the feed has half-spreads, dividends or funding, the three follow; None if it lacks one.
    Columns of your own are under "", which is not a symbol: by name, each for all assets. There
    a bar of no asset has the number of fields, under "".
    """
    more = (bar.half_spread, bar.dividend, bar.funding)
    rows = [*(getattr(bar, name) for name in PRICES), bar.volume]
    rows += [] if all(x is None for x in more) else [np.nan if x is None else x for x in more]
    fields = np.empty((len(symbols), len(rows)))
    for column, row in enumerate(rows):
        fields[:, column] = row
    each = zip(symbols, in_json(fields), bar.present, strict=True)
    body = {symbol: row if there else None for symbol, row, there in each}
    own: dict[str, Any] = {
        name: in_json(np.asarray(x, float)) for name, x in (bar.columns or {}).items()
    }
    if not np.asarray(bar.present).any():
        own[""] = len(rows)
    return body | ({"": own} if own else {})


def bar_of(body: Mapping[str, Any], symbols: tuple[str, ...], seconds: int) -> Bar:
    """Return the bar of a body, as `bar_body` wrote it; NaN for an asset that has none."""
    rows = [body[symbol] for symbol in symbols]
    present = np.array([row is not None for row in rows])
    more = dict(body.get("", {}))
    none = [None] * (more.pop("", 0) or max(len(row) for row in rows if row is not None))
    fields = np.array([none if row is None else row for row in rows], float).T
    # After the volume: half-spread, dividend and funding, where the feed has them.
    named = dict(zip((*PRICES, "volume", *INCOME), fields, strict=False))
    own: Any = {name: np.array(x, float) for name, x in more.items()}
    return Bar(np.full(len(rows), seconds), present=present, columns=own or None, **named)


def complete(bar: Bar, close: Tensor) -> Bar:
    """Give assets without a bar their last close `[A]` and volume 0, as bar files do."""
    present = np.asarray(bar.present)
    prices = {name: np.where(present, getattr(bar, name), close) for name in PRICES}
    return bar._replace(volume=np.where(present, bar.volume, 0.0), **prices)
