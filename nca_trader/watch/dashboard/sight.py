"""What the agent of a session sees: its features and its cells, computed again from the bars.

The session knows nothing of this: it runs in the dashboard's process, with the run's own policy,
and is compared with the logits in the journal.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from nca_trader.agents.heads import account_features
from nca_trader.data.features import feature_set
from nca_trader.envs.account.risk import before_bars, next_size
from nca_trader.envs.account.state import Rules, open_account
from nca_trader.errors import RunError
from nca_trader.numerics import cpu, float64_on_cpu
from nca_trader.paper.agents import params_digest
from nca_trader.runs.exported import read_run
from nca_trader.runs.universe import run_on
from nca_trader.types import PRICES, Bar, Bars
from nca_trader.watch.dashboard.book import NANOSECONDS, Book
from nca_trader.watch.dashboard.parts import heat, moment, number, numbers, short

COLUMNS = 96  # bars of a heat map
ROWS = 48  # channels of a heat map
CHUNK = 1024  # bars of one scan, so that it is compiled once
CLOSE = 1e-3  # between logits: rounding is far below it, another agent far above


class Sight:
    """Features and cells of the last bars of a session; `add` takes its bars in order.

    Args:
      run: the run folder or exported file that trades.
      started: the body of the session's `run_started`.
      sleeve: the one of the account's that the run trades; "" is the whole account.

    Raises:
      RunError: the session trades with other parameters.
    """

    def __init__(self, run: str | os.PathLike[str], started: dict[str, Any], sleeve: str = ""):
        opened, self._sleeve = read_run(run, force_agent=True, allow_code=None), sleeve
        trader = started["sleeves"][sleeve] if sleeve else started
        symbols = tuple(map(str, trader.get("symbols", ())))
        params = opened.params()
        # Another agent of the same shape would draw maps that look as plausible.
        if trader.get("params") != params_digest(params):
            raise RunError(
                f"{run}: is not the agent of this session; give the run or the exported file "
                "that trades."
            )
        opened = run_on(opened, _no_bars(symbols))
        self.spec, self.policy = opened.spec, opened.policy
        self.kind = opened.agent_config.policy.kind
        self._agents = opened.num_acting
        self._params = jax.device_put(params, cpu())
        self._features = feature_set(opened.env_config.features)
        self._state = self._features.init(len(symbols))
        self._memory = self.policy.begin()
        self._stream = jax.jit(self.policy.stream)
        self._act = jax.jit(self.policy.act)
        self._close = np.full(len(symbols), np.nan)
        # A later version may have rules that this one does not know.
        known = {k: v for k, v in started.get("rules", {}).items() if k in Rules._fields}
        self._rules, self._sizes = Rules(**known), before_bars(len(symbols))
        self._size: np.ndarray | None = None
        self.times: deque[int] = deque(maxlen=COLUMNS)
        self.seen: deque[np.ndarray] = deque(maxlen=COLUMNS)
        self.cells: deque[np.ndarray] = deque(maxlen=COLUMNS)

    def add(self, events: Iterable[tuple[int, dict[str, Any]]]) -> None:
        """Take bars: (nanoseconds, body) as in the journal."""
        bars = [self._bar(*event) for event in events]
        if self._rules.scale is not None:
            for bar in bars:
                self._sizes, self._size = next_size(self._sizes, bar, self._rules.scale)
        # The stream remembers only the last bars: before them features alone are needed.
        needed = COLUMNS + self.policy.receptive_field
        while len(bars) > needed + CHUNK:
            part, bars = bars[:CHUNK], bars[CHUNK:]
            rows = jax.tree.map(lambda *x: np.stack(x), *part)
            with float64_on_cpu():
                self._state, _ = jax.tree.map(
                    np.asarray, self._features.jitted[1](self._state, rows)
                )
        for bar in bars:
            self._state, row = self._features.step(self._state, bar)
            with float64_on_cpu():
                self._memory, cells = self._stream(self._params, self._memory, row, bar.present)
            self.times.append(int(bar.time[0]) * NANOSECONDS)
            self.seen.append(np.asarray(row))
            self.cells.append(np.asarray(cells))

    def _bar(self, ts: int, body: dict[str, Any]) -> Bar:
        """Return a bar as the feed gave it: a missing asset carries its last close."""
        count = len(self.spec.symbols)
        fields = np.full((5, count), np.nan)
        present = np.zeros(count, bool)
        for i, symbol in enumerate(self.spec.symbols):
            values = numbers(body.get(symbol))
            if len(values) >= 5:
                fields[:, i], present[i] = values[:5], True
            else:
                fields[:4, i], fields[4, i] = self._close[i], 0.0
        # A copy, since the fields become the bar, which features may keep.
        self._close = fields[3].copy()
        priced = dict(zip((*PRICES, "volume"), fields, strict=True))
        return Bar(time=np.full(count, ts // NANOSECONDS), present=present, **priced)

    def view(self, book: Book, asset: str) -> dict[str, Any]:
        """Return the heat maps of one asset, the value of the last bar and a remark.

        Args:
          book: the session's, for what the account held at the last decision.
          asset: a symbol; another text is the first asset.
        """
        symbols = self.spec.symbols
        place = symbols.index(asset) if asset in symbols else 0
        columns = [moment(ts) for ts in self.times]
        seen = np.array([row[place] for row in self.seen]).T
        cells = np.array([row[place] for row in self.cells]).T
        if not columns:
            return {"maps": [], "assets": list(symbols), "asset": symbols[place], "note": ""}
        # Agents of a mean are stacked along the channels.
        size = len(cells) // self._agents
        names = [f"{i % size}" for i in range(len(cells))]
        if self._agents > 1:
            names = [f"agent {i // size}, {i % size}" for i in range(len(cells))]
        what = "Cells" if self.kind == "nca" else f"Hidden state ({self.kind})"
        own, of = (f"-{self._sleeve}", f" of {self._sleeve}") if self._sleeve else ("", "")
        shown = [
            ("features", "Features", self.spec.features, seen),
            ("cells", what, names[:ROWS], cells[:ROWS]),
        ]
        return {
            "maps": [
                {"key": f"{key}{own}", "label": f"{label}{of}", **_heat(rows, columns, values)}
                for key, label, rows, values in shown
            ],
            "assets": list(symbols),
            "asset": symbols[place],
            "note": self._value(book),
        }

    def _value(self, book: Book) -> str:
        """Say the value of the last decision, if the logits are those of the journal."""
        logits, weights = book.decision.get("logits"), numbers(book.snapshot.get("weight"))
        if not book.decision or self.spec.memory or not isinstance(logits, list) or not weights:
            return ""  # of a sleeve, too: the journal has no account of its own
        # The thread that computes may be some bars behind the journal.
        if book.bar_ts != self.times[-1]:
            return ""
        there = np.array([numbers(row) for row in logits])
        with float64_on_cpu():
            account = open_account(np.array(weights), self._rules)
            account = account._replace(ordered=np.array(book.ordered))
            if self._size is not None:
                account = account._replace(size=self._size)
            shown = account_features(self.spec, account)
            found, value = self._act(self._params, self.cells[-1], shown)
        here = np.asarray(found)
        if here.shape != there.shape or not float(np.abs(here - there).max()) < CLOSE:
            return (
                "The account's part of the input is not in the journal, so the value is left out."
            )
        difference = float(np.abs(here - there).max())
        agree = "are the journal's, bit for bit"
        if difference > 0.0:
            agree = f"differ from the journal's by {difference:.0e} at most"
        worth = short(float(value))
        return f"Value of the last decision {worth}. The logits, computed again, {agree}."


def _no_bars(symbols: tuple[str, ...]) -> Bars:
    none, time = np.zeros((0, len(symbols))), np.zeros(0, "datetime64[ns]")
    priced: dict[str, Any] = dict.fromkeys((*PRICES, "volume"), none)
    return Bars(time=time, symbols=symbols, present=none > 0, source="the journal", **priced)


def _heat(names: Any, columns: list[str], values: np.ndarray) -> dict[str, Any]:
    finite = np.abs(values[np.isfinite(values)])
    # The strongest colour is that of the 98th percentile: one outlier does not bleach the rest.
    scale = number(float(np.quantile(finite, 0.98))) if finite.size else 1.0
    scale = scale if math.isfinite(scale) and scale > 0.0 else 1.0
    return heat(list(names), columns, values.tolist(), round(scale, 3))
