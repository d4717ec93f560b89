"""The data of the price chart and of the table of trades, as numbers for their scripts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from nca_trader.errors import ConfigError
from nca_trader.evaluate.result import Result
from nca_trader.evaluate.trades import OPEN
from nca_trader.types import Bars

TABLE = Path(__file__).parent / "table.js"
CHART = Path(__file__).parent / "chart.js"
CANDLES = 12_000  # of all assets at most; more bars are joined into longer candles
ASSETS = 8
TRADES = 30_000  # the last ones; more of them would make the page too large to mail


def price_chart(
    result: Result, indicators: Mapping[str, ArrayLike] | None = None
) -> dict[str, Any]:
    """Collect the price chart and the trades of a result.

    Args:
      result: of a backtest.
      indicators: lines on the chart by name, `[N]` or `[N, A]` for all bars that the backtest was
        given; None takes those of the strategy.

    Returns:
      times: of each traded bar, in seconds; the first, then differences. assets: of each its name,
      candles (`open`, `high`, `low`, `close`) and indicators, at the last bar of a candle. equity:
      of the account and of holding, likewise. per_candle: bars in one candle. seen: candles that an
      agent was trained or selected on. intraday: whether times of day matter. entry, exit, symbol
      and so on: a list per column of the trades; an entry and an exit are numbers of bars, a symbol
      and a reason are numbers of `symbols` and `reasons`. assets_left_out, trades_left_out: numbers
      of those not shown.

    Raises:
      ConfigError: an indicator of another shape.
    """
    bars = result.traded_bars
    shown = bars.symbols[:ASSETS]
    per_candle = -(-len(bars) * len(shown) // CANDLES)
    starts = np.arange(0, len(bars), per_candle)
    lines = _indicators(result, indicators)
    seconds = bars.time.astype("datetime64[s]").astype(np.int64)
    trades = _trades(result, bars)
    return {
        "times": np.diff(seconds, prepend=0).tolist(),
        "assets": [_candles(bars, number, starts, lines) for number in range(len(shown))],
        "per_candle": per_candle,
        "equity": {
            name: _short(each.equity.to_numpy()[np.append(starts[1:], len(bars)) - 1], 5)
            for name, each in (("equity", result), ("equity of buy and hold", result.hold))
        },
        "seen": 0 if not result.in_sample else -(-result.in_sample // per_candle),
        "intraday": bool((seconds[starts] % 86_400 != 0).any()),
        "assets_left_out": len(bars.symbols) - len(shown),
        "trades_left_out": len(result.trades) - len(trades["entry"]),
        "symbols": list(bars.symbols),
        **trades,
    }


def _indicators(result: Result, given: Mapping[str, ArrayLike] | None) -> dict[str, np.ndarray]:
    """Return the indicators at the traded bars, `[N, A]` each."""
    if given is None:
        given = result.indicators(result.bars) if result.indicators else {}
    shape, found = result.bars.close.shape, {}
    first = result.bars.row(result.equity.index[0])
    for name, values in given.items():
        array = np.asarray(values, np.float64)
        array = array[:, None] if array.ndim == 1 else array
        if array.ndim != 2 or array.shape[0] != shape[0] or array.shape[1] not in (1, shape[1]):
            raise ConfigError(
                f"indicator {name!r} has shape {np.shape(values)}; give a value for each of the "
                f"{shape[0]:,} bars, or an array {shape}."
            )
        found[name] = np.broadcast_to(array, shape)[first : first + len(result.equity)]
    return found


def _trades(result: Result, bars: Bars) -> dict[str, Any]:
    """Return the last trades, a list per column."""
    table = result.trades[-TRADES:]
    entry, exit_ = (
        np.searchsorted(bars.time, table[name].to_numpy("datetime64[ns]"))
        for name in ("entry", "exit")
    )
    reasons = list(dict.fromkeys(table["reason"]))
    numbers = {symbol: number for number, symbol in enumerate(bars.symbols)}
    return {
        "entry": entry.tolist(),
        # A trade that is open, whose exit is NaT, is drawn until the last bar.
        "exit": np.minimum(exit_, len(bars) - 1).tolist(),
        "symbol": [numbers[symbol] for symbol in table["symbol"]],
        "side": np.sign(table["size"].to_numpy(float)).astype(int).tolist(),
        "bars": table["bars"].tolist(),
        "reason": [reasons.index(reason) for reason in table["reason"]],
        "reasons": reasons,
        "open": (table["reason"] == OPEN).astype(int).tolist(),
        "entry_price": _short(table["entry_price"]),
        "exit_price": _short(table["exit_price"]),
        "pnl": _short(table["pnl"], 5),
        "return": _short(table["return"], 5),
    }


def _candles(
    bars: Bars, asset: int, starts: np.ndarray, lines: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Join the bars from each start to the next into one candle."""
    ends = np.append(starts[1:], len(bars)) - 1
    return {
        "name": bars.symbols[asset],
        "open": _short(bars.open[starts, asset]),
        "high": _short(np.fmax.reduceat(bars.high[:, asset], starts)),
        "low": _short(np.fmin.reduceat(bars.low[:, asset], starts)),
        "close": _short(bars.close[ends, asset]),
        "indicators": {name: _short(line[ends, asset], 6) for name, line in lines.items()},
    }


def _short(values: ArrayLike, digits: int = 7) -> list[float | None]:
    """Round to the significant digits that a reader can see; None where there is no number."""
    x = np.asarray(values, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        places = digits - 1 - np.floor(np.log10(np.abs(x)))
        places = np.where(np.isfinite(places), places, 0.0)
        # Powers of ten are exact, and so is one rounding of a quotient: the shortest text.
        scale = 10.0 ** np.abs(places)
        x = np.where(places >= 0, np.round(x * scale) / scale, np.round(x / scale) * scale)
    return [float(value) if known else None for value, known in zip(x, np.isfinite(x), strict=True)]
