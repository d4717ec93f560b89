"""The data of the price chart: candles, trades and in-sample bars, as numbers for its script."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nca_trader.evaluate.trades import OPEN
from nca_trader.types import Bars

if TYPE_CHECKING:
    from nca_trader.evaluate.result import Result

CHART = Path(__file__).parent / "chart.js"
CANDLES = 12_000  # of all assets at most; more bars are joined into longer candles
ASSETS = 8
MARKED = 1500  # trades of an asset at most, the last ones


def price_chart(result: Result) -> dict[str, Any] | None:
    """Collect the price chart of a result; None for one without bars and a trace.

    Returns:
      assets: of each its name, candles (`time` in seconds, `open`, `high`, `low`, `close`) and
      trades (candle of the entry and of the exit, side, prices, return, reason), and `count`, of
      all its trades. per_candle: bars in one candle. seen: candles that an agent was trained or
      selected on. intraday: whether times of day matter. left_out: assets and trades that are not
      shown.
    """
    if result.bars is None or result.trace is None:
        return None
    bars = result.traded_bars
    shown = bars.symbols[:ASSETS]
    per_candle = -(-len(bars) * len(shown) // CANDLES)
    starts = np.arange(0, len(bars), per_candle)
    trades, left_out = result.trades, 0
    assets = []
    for number, symbol in enumerate(shown):
        own = trades[trades["symbol"] == symbol]
        left_out += max(len(own) - MARKED, 0)
        marks = []
        for trade in own[-MARKED:].to_dict("records"):
            ended = trade["reason"] != OPEN
            marks.append(
                [
                    int(bars.index.searchsorted(trade["entry"])) // per_candle,
                    int(bars.index.searchsorted(trade["exit"])) // per_candle if ended else None,
                    1 if trade["size"] > 0 else -1,
                    _short(trade["entry_price"]),
                    _short(trade["exit_price"]),
                    round(100.0 * trade["return"], 3),
                    trade["reason"],
                ]
            )
        candles = _candles(bars, number, starts)
        assets.append({"name": symbol, **candles, "trades": marks, "count": len(own)})
    seconds = bars.time.astype("datetime64[s]").astype(np.int64)
    return {
        "assets": assets,
        "per_candle": per_candle,
        "seen": 0 if not result.in_sample else -(-result.in_sample // per_candle),
        "intraday": bool((seconds[starts] % 86_400 != 0).any()),
        "assets_left_out": len(bars.symbols) - len(shown),
        "trades_left_out": left_out,
    }


def _candles(bars: Bars, asset: int, starts: np.ndarray) -> dict[str, list[Any]]:
    """Join the bars from each start to the next into one candle."""
    seconds = bars.time.astype("datetime64[s]").astype(np.int64)
    ends = np.append(starts[1:], len(bars)) - 1
    columns = {
        "open": bars.open[starts, asset],
        "high": np.fmax.reduceat(bars.high[:, asset], starts),
        "low": np.fmin.reduceat(bars.low[:, asset], starts),
        "close": bars.close[ends, asset],
    }
    short = {name: [_short(x) for x in values] for name, values in columns.items()}
    return {"time": seconds[starts].tolist(), **short}


def _short(price: float) -> float | None:
    """Round to the digits that a chart can show; None before an asset's first bar."""
    return None if np.isnan(price) else float(f"{price:.7g}")
