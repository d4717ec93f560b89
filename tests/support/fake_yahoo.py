"""Yahoo's chart answers, made of prices as they traded.

The answers come in where yfinance asks its session (`YfData.get`), so that its own code makes the
frames.
"""

import json
import zoneinfo
from datetime import date, datetime, time, timedelta

import yfinance.data

NEW_YORK = "America/New_York"


class Answer:
    url, status_code = "https://query2.finance.yahoo.com", 200

    def __init__(self, answer):
        self.answer, self.text = answer, json.dumps(answer)

    def json(self):
        return json.loads(self.text)

    def raise_for_status(self):
        pass


def refused(text):
    return {"chart": {"result": None, "error": {"code": "Not Found", "description": text}}}


class Listing:
    """A symbol as it traded: its bars `(open, high, low, close, volume)` by day.

    splits: shares after one before, by ex-date. dividends: per share of the ex-date.
    """

    def __init__(self, bars, splits=None, dividends=None, zone=NEW_YORK, opens=time(9, 30)):
        self.bars, self.splits, self.dividends = bars, splits or {}, dividends or {}
        self.zone, self.opens = zoneinfo.ZoneInfo(zone), opens

    def stamp(self, day):
        day = day if isinstance(day, datetime) else datetime.combine(day, self.opens)
        return int(day.replace(tzinfo=self.zone).timestamp())

    def later(self, day, known):
        """The product of the splits after a day that have happened by now."""
        ratio = 1.0
        for ex, split in self.splits.items():
            ratio *= split if day < ex <= known else 1.0
        return ratio

    def chart(self, symbol, params, known):
        start, end = params.get("period1", 0), params.get("period2", 2**40)
        days = [d for d in sorted(self.bars) if start <= self.stamp(d) < end]
        of = (lambda d: d.date()) if days and isinstance(days[0], datetime) else (lambda d: d)
        days = [d for d in days if of(d) <= known]
        meta = {"currency": "USD", "symbol": symbol, "instrumentType": "EQUITY", "priceHint": 2,
                "exchangeTimezoneName": str(self.zone), "validRanges": ["1d", "max"],
                "dataGranularity": params["interval"]}  # fmt: skip
        if params["interval"] != "1d":
            spans = [(self.stamp(datetime.combine(d, self.opens)), d) for d in {*map(of, days)}]
            meta["tradingPeriods"] = [
                [{"timezone": "", "gmtoffset": 0, "start": s, "end": s + 23_400}]
                for s, _ in sorted(spans)
            ]
        if "range" in params:
            days = days[-1:]
        if not days:
            return refused("Data doesn't exist for startDate = 1, endDate = 2")
        ratio = [self.later(of(d), known) for d in days]
        values = [[v / r for v in self.bars[d][:4]] for d, r in zip(days, ratio, strict=True)]
        volume = [int(self.bars[d][4] * r) for d, r in zip(days, ratio, strict=True)]
        adjusted = []
        for day, row in zip(days, values, strict=True):
            factor = 1.0
            for ex, cash in self.dividends.items():
                if of(day) < ex <= known:
                    before = max(d for d in self.bars if of(d) < ex)
                    factor *= 1.0 - cash / self.bars[before][3] * self.splits.get(ex, 1.0)
            adjusted.append(row[3] * factor)
        inside = [ex for ex in {*map(of, days)} if ex <= known]
        dividends = {
            str(self.stamp(ex)): {"amount": self.dividends[ex] / self.later(ex, known),
                                  "date": self.stamp(ex)}
            for ex in inside if ex in self.dividends
        }  # fmt: skip
        splits = {
            str(self.stamp(ex)): {"date": self.stamp(ex), "numerator": self.splits[ex],
                                  "denominator": 1.0, "splitRatio": f"{self.splits[ex]}:1"}
            for ex in inside if ex in self.splits
        }  # fmt: skip
        quote = dict(zip(("open", "high", "low", "close"), zip(*values, strict=True), strict=True))
        result = {
            "meta": meta, "timestamp": [*map(self.stamp, days)],
            "events": {"dividends": dividends, "splits": splits},
            "indicators": {"quote": [quote | {"volume": volume}],
                           "adjclose": [{"adjclose": adjusted}]},
        }  # fmt: skip
        return {"chart": {"result": [result], "error": None}}


class FakeYahoo:
    """Stands for Yahoo's host: `listings` by symbol, as they are known on the day `known`."""

    def __init__(self, monkeypatch, tmp_path, **listings):
        self.listings, self.known, self.calls, self.broken = listings, date(2100, 1, 1), [], None
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        for name in ("get", "cache_get"):
            monkeypatch.setattr(
                yfinance.data.YfData, name, lambda _, *args, **kwargs: self.get(*args, **kwargs)
            )
        yfinance.set_tz_cache_location(str(tmp_path / "zones"))

    def get(self, url, params=None, timeout=30):
        if self.broken is not None:
            raise self.broken
        symbol = url.rpartition("/")[2]
        if "/chart/" not in url:
            return Answer({"quoteSummary": {"result": None, "error": {"code": "Not Found"}}})
        if symbol not in self.listings:
            return Answer(refused("No data found, symbol may be delisted"))
        if "range" not in params:
            self.calls.append((symbol, params["period1"], params["period2"]))
        return Answer(self.listings[symbol].chart(symbol, params, self.known))


def days_from(first, count):
    """Weekdays from an ISO date on."""
    day, found = date.fromisoformat(first), []
    while len(found) < count:
        found += [day] if day.weekday() < 5 else []
        day += timedelta(days=1)
    return found
