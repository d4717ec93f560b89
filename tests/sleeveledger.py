"""The books of an account and of its sleeves, read from a journal's tables with sqlite3.

The ledger imports nothing of the package; the makers of sleeves are at the end.
"""

import json
import sqlite3

import pytest

CAPITAL = 1e5


def told(path):
    """(kind, key, body, seconds) of every event, in order."""
    query = (
        "SELECT kind, key, body, ts_event FROM event JOIN series ON series.id = event.series "
        "ORDER BY seq"
    )
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        rows = db.execute(query).fetchall()
    return [(kind, key, json.loads(body), ts) for kind, key, body, ts in rows]


class Ledger:
    """The account's and the sleeves' books, by plain sums over a journal's events."""

    def __init__(self, path):
        self.cash, self.units, self.close = CAPITAL, {}, {}
        self.own_cash, self.own_units, self.crossed = {}, {}, []
        self.gaps, self.bars = [], 0
        for kind, key, body, _ in told(path):
            getattr(self, f"on_{kind}", lambda key, body: None)(key, body)

    def on_run_started(self, key, body):
        self.own_cash = {n: CAPITAL * s["share"] for n, s in body["sleeves"].items()}
        self.own_units = {n: {} for n in self.own_cash}
        self.names = {n: s["symbols"] for n, s in body["sleeves"].items()}

    def on_recon(self, key, body):
        if "cash" in body:  # a venue's books are taken over
            assert body["cash"] == CAPITAL and not body["units"]

    def on_fill(self, key, body):
        self.cash -= body["units"] * body["price"] + body["commission"]
        self.units[body["symbol"]] = self.units.get(body["symbol"], 0.0) + body["units"]

    def on_cash(self, key, body):
        self.cash += body["amount"]

    def on_allocation(self, key, body):
        for name, amount in body.get("amount", {}).items():
            self.own_cash[name] += amount
        fees = body.get("commission", {})
        for name, units in body.get("units", {}).items():
            self.own_cash[name] -= units * body["price"] + fees.get(name, 0.0)
            own = self.own_units[name]
            own[body["symbol"]] = own.get(body["symbol"], 0.0) + units
        if key.startswith("cross-"):
            self.crossed.append((key, body))
            assert sum(body["units"].values()) == pytest.approx(0.0, abs=1e-9) and not fees

    def on_bar(self, key, body):
        self.close |= {symbol: row[3] for symbol, row in body.items() if row}

    def on_snapshot(self, key, body):
        self.bars += 1
        value = self.cash + sum(n * self.close[s] for s, n in self.units.items() if n)
        assert body["value"] == pytest.approx(value, rel=1e-9)
        sums = [sum(self.own_cash.values()) - self.cash]
        for symbol in self.close:
            mine = sum(own.get(symbol, 0.0) for own in self.own_units.values())
            sums.append((mine - self.units.get(symbol, 0.0)) * self.close[symbol])
        self.gaps.append(sum(map(abs, sums)) / value)
        for name, said in body["sleeves"].items():
            own = self.own_units[name]
            worth = self.own_cash[name] + sum(n * self.close[s] for s, n in own.items() if n)
            assert said["value"] == pytest.approx(worth, rel=1e-9)
            assert said["cash"] == pytest.approx(self.own_cash[name], rel=1e-9, abs=1e-6)
            here = [own.get(symbol, 0.0) for symbol in self.names[name]]
            assert said["units"] == pytest.approx(here, rel=1e-9, abs=1e-9)

    @property
    def worst(self):
        return max(self.gaps)


def alternating(first, second, every=4):
    """A strategy that holds one weight, then another, in turns."""

    def act(n, bar):
        import jax.numpy as jnp

        return n + 1, jnp.where((n // every) % 2 == 0, first, second) * jnp.ones_like(bar.close)

    import nca_trader as nca

    return nca.Strategy(lambda num_assets: 0, act, "alternating")


def sleeve(name, share, run, **more):
    """A sleeve of an account."""
    import nca_trader as nca

    return nca.Sleeve(name=name, share=share, run=run, **more)
