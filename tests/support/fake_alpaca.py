"""Alpaca's trading and market data over REST and its stream of bars, on loopback.

Written from Alpaca's documentation, and not from the adapter: ids are refused a second time for
ever, an unknown order is 404 with code 40410000, times have nanoseconds.
"""

import asyncio
import contextlib
import datetime
import json
import threading
import uuid

import msgpack
import websockets.asyncio.server
from fake_venue import FakeVenue


def iso(seconds):
    stamp = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return stamp.strftime("%Y-%m-%dT%H:%M:%S.%f") + "000Z"


class FakeAlpaca(FakeVenue):
    """Books of one paper account; market orders fill at once unless `resting`."""

    def __init__(self, cash=100_000.0, prices=None, clock=1_750_000_000.0):
        self.cash, self.units, self.prices = cash, {}, prices or {"SPY": 500.0, "QQQ": 400.0}
        self.orders, self.activities, self.resting, self.clock = {}, [], False, clock
        self.parts, self.pages, self.refuse = 1, 1000, ""
        self.bars = {}  # symbol: {seconds of the open: (o, h, l, c, v)}, of minutes
        self.days = {}  # the same, of days
        self.skew, self.deaf = 0.0, False
        self.late = None  # seconds after its end at which a bar is listed; None: at any time
        super().__init__()

    # --- orders ---

    def answer(self, method, path, query, body):
        self.clock += 0.001
        parts = path.strip("/").split("/")
        if parts[:2] == ["v2", "stocks"]:
            return self._bars(query)
        if method == "POST" and path == "/v2/orders":
            return self._submit(json.loads(body))
        if path == "/v2/orders:by_client_order_id":
            order = self.orders.get(query["client_order_id"])
            return (200, order) if order else self._missing()
        if path == "/v2/orders":
            # `after` is exclusive, and of the time of submission.
            found = [
                o
                for o in self.orders.values()
                if o["status"] in ("new", "partially_filled") and o["submitted_at"] > query["after"]
            ]
            found.sort(key=lambda order: order["submitted_at"])
            return 200, found[: min(int(query["limit"]), self.pages)]
        if parts[:2] == ["v2", "orders"]:
            order = next((o for o in self.orders.values() if o["id"] in parts[2:]), None)
            if order is None:
                return self._missing()
            if method == "DELETE":
                if order["status"] not in ("new", "partially_filled"):
                    return 422, {"code": 42210000, "message": "order is not cancelable"}
                order["status"] = "canceled"
                return 204, None
            return 200, order
        if path == "/v2/account":
            return 200, {"cash": str(self.cash), "status": "ACTIVE"}
        if path == "/v2/positions":
            held = {name: units for name, units in self.units.items() if units}
            return 200, [{"symbol": name, "qty": str(units)} for name, units in held.items()]
        if path == "/v2/clock":
            return 200, {"timestamp": iso(self.clock + self.skew), "is_open": True}
        if parts[:2] == ["v2", "assets"]:
            known = parts[2] in self.prices
            asset = {"symbol": parts[2], "tradable": True, "fractionable": True, "shortable": True}
            return (200, asset) if known else self._missing()
        if path == "/v2/account/activities":
            rows = sorted(self.activities, key=lambda a: a["id"])
            if "page_token" in query:
                rows = [row for row in rows if row["id"] > query["page_token"]]
            return 200, rows[: int(query["page_size"])]
        return 404, {"code": 40410000, "message": "endpoint not found"}

    def _missing(self):
        return 404, {"code": 40410000, "message": "order not found"}

    def _submit(self, data):
        name = data.get("client_order_id") or str(uuid.uuid4())
        if self.refuse:
            return 403, {"code": 40310000, "message": self.refuse}
        if data["symbol"] not in self.prices:
            return 422, {"code": 42210000, "message": f"asset {data['symbol']!r} not found"}
        if name in self.orders:
            return 422, {"code": 40010001, "message": "client_order_id must be unique"}
        self.orders[name] = {
            "id": str(uuid.uuid4()),
            "client_order_id": name,
            "symbol": data["symbol"],
            "qty": str(data["qty"]),
            "filled_qty": "0",
            "side": data["side"],
            "type": data["type"],
            "time_in_force": data.get("time_in_force", "day"),
            "status": "new",
            "submitted_at": iso(self.clock),
            "a_field_of_next_year": {"odd": 1},
        }
        if not self.resting and data["type"] == "market":
            for i in range(self.parts):
                self.fill(name, float(data["qty"]) / self.parts, last=i == self.parts - 1)
        return 200, self.orders[name]

    def fill(self, name, qty, last=True):
        order = self.orders[name]
        sign = 1.0 if order["side"] == "buy" else -1.0
        price = self.prices[order["symbol"]]
        self.units[order["symbol"]] = self.units.get(order["symbol"], 0.0) + sign * qty
        self.cash -= sign * qty * price
        order["filled_qty"] = str(float(order["filled_qty"]) + qty)
        order["status"] = "filled" if last else "partially_filled"
        self.activities.append(
            {
                "id": f"{int(self.clock)}{len(self.activities):06d}::{uuid.uuid4()}",
                "activity_type": "FILL",
                "type": "fill" if last else "partial_fill",
                "transaction_time": iso(self.clock),
                "price": str(price),
                "qty": str(qty),
                "side": order["side"],
                "symbol": order["symbol"],
                "order_id": order["id"],
            }
        )

    def pay(self, kind, amount, symbol="", date="2025-06-15"):
        self.cash += amount
        self.activities.append(
            {
                "id": f"{int(self.clock)}{len(self.activities):06d}::{uuid.uuid4()}",
                "activity_type": kind,
                "date": date,
                "net_amount": str(amount),
                "symbol": symbol,
            }
        )

    # --- market data ---

    def _bars(self, query):
        start, end = (
            datetime.datetime.fromisoformat(query[name].replace("Z", "+00:00")) for name in
            ("start", "end")
        )  # fmt: skip
        low, high = (t.replace(tzinfo=datetime.UTC).timestamp() for t in (start, end))
        source = self.days if query["timeframe"].endswith("Day") else self.bars
        rows = [
            (symbol, t, values)
            for symbol in sorted(query["symbols"].split(","))
            for t, values in sorted(source.get(symbol, {}).items())
            if self.deaf or low <= t <= high
        ]
        if self.late is not None:
            # A day is listed after its date in UTC.
            step = 86_400 if source is self.days else 60
            rows = [row for row in rows if row[1] // step * step + step + self.late <= self.clock]
        first = int(query.get("page_token") or 0)
        size = min(int(query["limit"]), self.pages)
        found = {}
        for symbol, t, (o, h, low_, c, v) in rows[first : first + size]:
            bar = {"t": iso(t)[:19] + "Z", "o": o, "h": h, "l": low_, "c": c, "v": v, "n": 1}
            found.setdefault(symbol, []).append({**bar, "vw": c})
        token = str(first + size) if first + size < len(rows) else None
        return 200, {"bars": found, "next_page_token": token}


class FakeStream:
    """Alpaca's stream of minute bars: msgpack, a greeting, authentication, subscription."""

    def __init__(self):
        self.clients, self.messages, self.ready = set(), [], threading.Event()
        self.subscribed, self.connections = threading.Event(), 0
        self.redirect = None
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self.ready.wait(5)

    def _run(self):
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._serve())
        # A client that leaves while the server stops has a task that nobody waits for.
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.loop.close()

    async def _serve(self):
        self.stopped = asyncio.Event()

        def elsewhere(connection, _):
            if self.redirect:
                response = connection.respond(307, "")
                response.headers["Location"] = self.redirect
                return response
            return None

        serve = websockets.asyncio.server.serve
        async with serve(self._talk, "127.0.0.1", 0, process_request=elsewhere) as server:
            self.url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/v2/iex"
            self.ready.set()
            await self.stopped.wait()

    async def _talk(self, socket):
        self.connections += 1
        await socket.send(msgpack.packb([{"T": "success", "msg": "connected"}]))
        with contextlib.suppress(websockets.exceptions.ConnectionClosed):
            self.messages.append(msgpack.unpackb(await socket.recv()))
            await socket.send(msgpack.packb([{"T": "success", "msg": "authenticated"}]))
            self.messages.append(msgpack.unpackb(await socket.recv()))
            self.clients.add(socket)
            self.subscribed.set()
            await socket.wait_closed()
        self.clients.discard(socket)

    def send(self, kind, symbol, seconds, values):
        o, h, low, c, v = values
        bar = {"T": kind, "S": symbol, "o": o, "h": h, "l": low, "c": c, "v": v, "n": 1, "vw": c}
        bar["t"] = msgpack.Timestamp(int(seconds), 0)
        self._do(self._send(msgpack.packb([bar])))

    async def _send(self, data):
        for client in list(self.clients):
            await client.send(data)

    def drop(self):
        async def close():
            self.subscribed.clear()
            for client in list(self.clients):
                await client.close(1011)

        self._do(close())

    def _do(self, coroutine):
        asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(5)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.stopped.set)
        self.thread.join(5)
