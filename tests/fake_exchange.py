"""Binance's spot API over REST, on loopback, written from its documentation.

A client id is refused while its order is open, with -2010, the code of a lack of funds as well; it
is taken again once that order has ended. Trades have no client id, and are counted per symbol. The
fee of a buy is taken from the coins.
"""

import hashlib
import hmac
import time
import urllib.parse

from fake_venue import FakeVenue

WINDOW = 10_000  # milliseconds by which a signed request may be old


class FakeExchange(FakeVenue):
    def __init__(self, secret, clock=time.time):
        self.secret, self.clock, self.fee = secret, clock, 0.001
        self.balances = {"USDT": 10_000.0, "XYZ": 7.0}
        self.prices = {"BTCUSDT": 50_000.0, "ETHUSDT": 2_500.0, "ETHBTC": 0.05}
        self.orders, self.trades, self.resting, self.code = [], [], False, None
        self.skew = 0.0
        self.klines = {}  # symbol: {milliseconds of the open: (o, h, l, c, v)}
        self.kline_limit = 1000
        super().__init__()

    def answer(self, method, path, query, body):
        self.now = int(1000 * (self.clock() + self.skew))
        name = path.rpartition("/api/v3/")[2]
        if name == "time":
            return 200, {"serverTime": self.now}
        if name == "exchangeInfo":
            return 200, {"symbols": [self._market(symbol) for symbol in self.prices]}
        if name == "klines":
            return 200, self._klines(query)
        text = body.decode() or urllib.parse.urlencode(query)
        signed, _, signature = text.rpartition("&signature=")
        if hmac.new(self.secret.encode(), signed.encode(), hashlib.sha256).hexdigest() != signature:
            return 401, {"code": -1022, "msg": "Signature for this request is not valid."}
        data = query | dict(urllib.parse.parse_qsl(body.decode()))
        if abs(int(data["timestamp"]) - self.now) > WINDOW:
            return 400, {"code": -1021, "msg": "Timestamp is outside of the recvWindow."}
        if self.code is not None and name == "order" and method == "POST":
            return 400, self.code
        if name == "order":
            return {"POST": self._submit, "GET": self._query, "DELETE": self._cancel}[method](data)
        if name == "openOrders":
            return 200, [order for order in self.orders if order["status"] == "NEW"]
        if name == "myTrades":
            found = [t for t in self.trades if t["symbol"] == data["symbol"]]
            found = [
                t for t in found if str(t["orderId"]) == data.get("orderId", str(t["orderId"]))
            ]
            found = [t for t in found if t["time"] >= int(data.get("startTime", 0))]
            return 200, found[: int(data.get("limit", 500))]
        if name == "account":
            rows = [{"asset": a, "free": str(v), "locked": "0"} for a, v in self.balances.items()]
            return 200, {"balances": rows, "updateTime": self.now}
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

    def _submit(self, data):
        name = data["newClientOrderId"]
        refused = 400, {"code": -2010, "msg": "Duplicate order sent."}
        if any(o["clientOrderId"] == name and o["status"] == "NEW" for o in self.orders):
            return refused
        size, price = float(data["quantity"]), self.prices[data["symbol"]]
        if data["side"] == "BUY" and size * price > self.balances["USDT"]:
            return 400, {
                "code": -2010,
                "msg": "Account has insufficient balance for requested action.",
            }
        order = {
            "symbol": data["symbol"], "orderId": len(self.orders) + 1, "clientOrderId": name,
            "price": "0", "origQty": data["quantity"], "executedQty": "0", "status": "NEW",
            "cummulativeQuoteQty": "0", "type": data["type"], "side": data["side"],
            "time": self.now, "updateTime": self.now, "transactTime": self.now,
            "timeInForce": "GTC", "isWorking": True, "stopPrice": data.get("stopPrice", "0"),
        }  # fmt: skip
        self.orders.append(order)
        if not self.resting and data["type"] == "MARKET":
            self.fill(order, size)
        return 200, order

    def fill(self, order, size, last=True):
        price, coin = self.prices[order["symbol"]], order["symbol"][:3]
        bought = order["side"] == "BUY"
        sign = 1.0 if bought else -1.0
        self.balances[coin] = self.balances.get(coin, 0.0) + sign * size
        self.balances["USDT"] -= sign * size * price
        paid, asset = (size * self.fee, coin) if bought else (size * price * self.fee, "USDT")
        self.balances[asset] -= paid
        order["executedQty"] = str(float(order["executedQty"]) + size)
        order["status"] = "FILLED" if last else "PARTIALLY_FILLED"
        count = sum(t["symbol"] == order["symbol"] for t in self.trades) + 1
        self.trades.append(
            {"symbol": order["symbol"], "id": count, "orderId": order["orderId"],
             "price": str(price), "qty": str(size), "quoteQty": str(size * price),
             "commission": str(paid), "commissionAsset": asset, "time": self.now,
             "isBuyer": bought, "isMaker": False}
        )  # fmt: skip

    def _query(self, data):
        for order in reversed(self.orders):  # the newest of an id that was taken twice
            same = str(order["orderId"]) == data.get("orderId")
            same = same or order["clientOrderId"] == data.get("origClientOrderId")
            if same and order["symbol"] == data["symbol"]:
                return 200, order
        return 400, {"code": -2013, "msg": "Order does not exist."}

    def _cancel(self, data):
        status, order = self._query(data)
        if status == 200 and order["status"] in ("NEW", "PARTIALLY_FILLED"):
            order["status"] = "CANCELED"
            return 200, order
        return 400, {"code": -2011, "msg": "Unknown order sent."}

    def _klines(self, query):
        first, last = int(query.get("startTime", 0)), int(query.get("endTime", 2**60))
        rows = sorted(self.klines.get(query["symbol"], {}).items())
        rows = [(t, v) for t, v in rows if first <= t <= last and t <= self.now]
        size = min(int(query.get("limit", 500)), self.kline_limit)
        rows = rows[:size] if "startTime" in query else rows[-size:]
        return [[t, *map(str, v), t + 1, "0", 1, "0", "0", "0"] for t, v in rows]
