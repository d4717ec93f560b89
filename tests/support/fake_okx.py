"""OKX's public REST interface on loopback, written from its documentation.

An answer covers the span between `before` and `after`, both left out, newest bar first, at most 300
bars. Days and half-days begin at midnight of Hong Kong unless `utc` is asked for.
"""

import time

from fake_venue import FakeVenue

MOST = 300
LENGTHS = {"m": 60, "H": 3600, "D": 86_400}


class FakeOkx(FakeVenue):
    def __init__(self, clock=time.time):
        self.clock, self.hours = clock, {}  # symbol: {seconds of the open: (o, h, l, c, v)}
        self.only_hong_kong = False
        super().__init__()

    def answer(self, method, path, query, body):
        name = path.rpartition("/")[2]
        if name == "instruments":
            return 200, {"code": "0", "msg": "", "data": [self._market(s) for s in self.hours]}
        if name in ("candles", "history-candles"):
            return 200, {"code": "0", "msg": "", "data": self._candles(query)}
        return 404, {"code": "50000", "msg": f"no endpoint {path}"}

    def _market(self, symbol):
        base, quote = symbol.split("-")
        return {
            "instId": symbol, "instType": "SPOT", "baseCcy": base, "quoteCcy": quote,
            "lotSz": "0.0001", "tickSz": "0.1", "minSz": "0.0001", "state": "live",
        }  # fmt: skip

    def _candles(self, query):
        bar, utc = query["bar"].removesuffix("utc"), query["bar"].endswith("utc")
        step = int(bar[:-1]) * LENGTHS[bar[-1]]
        from_hong_kong = step >= 6 * 3600 and (self.only_hong_kong or not utc)
        shift = 8 * 3600 if from_hong_kong else 0
        rows = {}
        for t, values in sorted(self.hours[query["instId"]].items()):
            if t > self.clock():
                break
            rows.setdefault((t + shift) // step * step - shift, []).append(values)
        low, high = int(query.get("before", -1)), int(query.get("after", 2**60))
        found = [
            [str(1000 * t), *map(str, _joined(v)), "0", "0", str(int(t + step <= self.clock()))]
            for t, v in rows.items()
            if low < 1000 * t < high
        ]
        return found[::-1][: min(int(query.get("limit", 100)), MOST)]


def _joined(bars):
    opens, highs, lows, closes, volumes = zip(*bars, strict=True)
    return opens[0], max(highs), min(lows), closes[-1], sum(volumes)
