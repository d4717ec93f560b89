"""Binance's public bars over REST, on loopback, written from its documentation."""

import time

from fake_venue import FakeVenue

STEPS = {"1s": 1, "1m": 60, "1h": 3600, "1d": 86_400}  # seconds


class FakeExchange(FakeVenue):
    def __init__(self, clock=time.time):
        self.clock = clock
        self.symbols = ("BTCUSDT", "ETHUSDT", "ETHBTC")
        self.klines = {}  # symbol: {milliseconds of the open: (o, h, l, c, v)}
        self.kline_limit = 1000
        self.late = None  # seconds after its end at which a bar is listed; None: as it opens
        super().__init__()

    def answer(self, method, path, query, body):
        self.now = int(1000 * self.clock())
        name = path.rpartition("/api/v3/")[2]
        if name == "exchangeInfo":
            return 200, {"symbols": [self._market(symbol) for symbol in self.symbols]}
        if name == "klines":
            return 200, self._klines(query)
        return 404, {"code": -1, "msg": f"no endpoint {path}"}

    def _market(self, symbol):
        filters = [
            {"filterType": "PRICE_FILTER", "minPrice": "0.01", "maxPrice": "1000000",
             "tickSize": "0.01"},
            {"filterType": "LOT_SIZE", "minQty": "0.001", "maxQty": "9000", "stepSize": "0.001"},
            {"filterType": "NOTIONAL", "minNotional": "5", "applyMinToMarket": True},
        ]  # fmt: skip
        return {
            "symbol": symbol, "status": "TRADING", "baseAsset": symbol[:3],
            "quoteAsset": symbol[3:],
            "baseAssetPrecision": 8, "quotePrecision": 8,
            "orderTypes": ["LIMIT", "MARKET", "STOP_LOSS"],
            "isSpotTradingAllowed": True, "permissions": ["SPOT"], "filters": filters,
        }  # fmt: skip

    def _klines(self, query):
        first, last = int(query.get("startTime", 0)), int(query.get("endTime", 2**60))
        rows = sorted(self.klines.get(query["symbol"], {}).items())
        shown = self.now
        if self.late is not None:
            shown -= 1000 * (STEPS[query["interval"]] + self.late)
        rows = [(t, v) for t, v in rows if first <= t <= last and t <= shown]
        size = min(int(query.get("limit", 500)), self.kline_limit)
        rows = rows[:size] if "startTime" in query else rows[-size:]
        return [[t, *map(str, v), t + 1, "0", 1, "0", "0", "0"] for t, v in rows]
