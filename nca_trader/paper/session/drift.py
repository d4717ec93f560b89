"""Does the market still look as in training, and does trading cost what it was modelled to cost?

Each warning is a `risk` event of the journal, once when its limit is crossed and again only after
it came back. What is watched at all is a `watched` event at the start. Nothing here halts a
session, and all of it is a function of bars and fills.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nca_trader.config import AccountConfig
from nca_trader.envs.account.state import Quote, worsening
from nca_trader.paper.session.core import Seen, Usual
from nca_trader.runs.reference import BINS, WINDOW, psi, schema_of
from nca_trader.types import Bar

BACK = 0.8  # of a feature's limit: below it the warning is over
FILLS = 50  # the last ones, whose cost is compared
LEAST_FILLS = 20
EXCESS = 1e-4  # of price, at least: 1 bp more than modelled
ERRORS = 3.0  # standard errors, at least
UNKNOWN = "no training distribution; train on 1,000 bars or more, or export the run again"
FACTOR = 2.0  # turnover above the backtest's highest by this, or below its lowest


class DriftWatch:
    """Watches one agent.

    Args:
      usual: what it is used to.
      features: names of the F features that it computes.
      rules: of the account, with the costs as modelled.
    """

    def __init__(self, usual: Usual, features: Sequence[str], rules: AccountConfig):
        self._usual, self._rules = usual, rules
        self._names = tuple(features)
        self._rows: deque[np.ndarray] = deque()
        self._excess: deque[float] = deque(maxlen=FILLS)
        self._turnover: deque[float] = deque(maxlen=WINDOW)
        self._outside: set[str] = set()
        reference = usual.features
        if reference is not None:
            self._schema = schema_of(self._names) or reference.schema
            self._edges, self._share = np.array(reference.edges), np.array(reference.share)
            self._limits = np.array(reference.threshold)
            self._counts = np.zeros(self._share.shape)

    @property
    def status(self) -> dict[str, str]:
        """What is watched: of each kind "", or why it is not."""
        if not self._names:
            features = "a rule sees no features"
        elif self._usual.features is None:
            features = UNKNOWN
        else:
            features = "" if self._same else "the features are not those of training"
        turnover = "" if self._usual.turnover else "no saved backtest to compare with"
        schema = "" if self._usual.features is not None and self._names else features
        return {"features": features, "schema": schema, "slippage": "", "turnover": turnover}

    @property
    def _same(self) -> bool:
        reference: Any = self._usual.features
        return list(self._names) == reference.names and self._schema == reference.schema

    def passed(
        self, bar: Bar, quote: Quote, close: np.ndarray, seen: Seen, features: np.ndarray | None
    ) -> list[dict[str, Any]]:
        """Take a bar at which the agent decided.

        Args:
          bar: the bar.
          quote: of its open, at which the orders filled.
          close: `[A]` closes before it, the prices of assets that are not in it.
          seen: the account at its close.
          features: as in `decided`.

        Returns:
          The warnings that begin here.
        """
        found, present = [], np.asarray(bar.present)
        if seen.trades:
            found = self.traded(seen, quote._replace(price=np.where(present, bar.open, close)))
        found += self.decided(features, present)
        return found + self.turned(seen.moved / seen.value)

    def traded(self, seen: Seen, quote: Quote) -> list[dict[str, Any]]:
        """Take the account's own trades since the decision before, as in `filled`."""
        found = []
        for asset, units, price in seen.trades:
            found += self.filled(asset, units, price, quote, seen.value)
        return found

    def decided(self, features: np.ndarray | None, present: np.ndarray) -> list[dict[str, Any]]:
        """Take what a decision saw: features `[A, F]` of the assets that are `present` `[A]`.

        Returns:
          The warnings that begin here.
        """
        reference = self._usual.features
        if reference is None or features is None:
            return []
        if not self._same:
            there = reference.schema
            return self._crossed("drift-schema", True, there=there, here=self._schema)
        # `[F, 10]` of this bar; a value that is not finite is in no bin, and halts elsewhere.
        bins = (np.asarray(features)[:, :, None] >= self._edges).sum(-1)
        known = np.asarray(present)[:, None] & np.isfinite(features)
        row = ((bins[:, :, None] == np.arange(BINS)) & known[:, :, None]).sum(0)
        self._rows.append(row)
        self._counts += row
        if len(self._rows) > WINDOW:
            # Running counts: to sum the window at each bar is work that grows with its length.
            self._counts -= self._rows.popleft()
        if len(self._rows) < WINDOW:
            return []
        warnings, indices = [], psi(self._counts, self._share)
        # Most are far below their limit, and were so before.
        if not (self._outside or (indices > self._limits).any()):
            return []
        for name, index, limit in zip(
            self._names, indices.tolist(), reference.threshold, strict=True
        ):
            body = {"feature": name, "psi": index, "limit": limit}
            # An index that moves about its limit is one warning and not many.
            outside = index > (BACK if f"drift-feature:{name}" in self._outside else 1.0) * limit
            warnings += self._crossed("drift-feature", outside, name, **body)
        return warnings

    def filled(
        self, asset: int, units: float, price: float, quote: Quote, money: float
    ) -> list[dict[str, Any]]:
        """Take one execution of signed `units` at `price`, in a market of prices `quote` `[A]`.

        `money` is the account's equity at about that time, for costs that depend on it.

        Compared are the mean excess over the modelled price of the last 50 fills and its standard
        error: a t-test on one side.
        """
        market = np.asarray(quote.price, np.float64)
        sizes = np.where(np.arange(len(market)) == asset, units, 0.0)
        worth = np.asarray(money)
        worse = worsening(sizes, quote, self._rules, worth)[0]
        modelled = np.broadcast_to(np.asarray(worse, np.float64), market.shape)[asset]
        # Above 0 is worse, for buys and for sales.
        paid = np.sign(units) * (price / market[asset] - 1.0)
        self._excess.append(float(paid - modelled))
        if len(self._excess) < LEAST_FILLS:
            return []
        excess = np.array(self._excess)
        mean, error = excess.mean(), excess.std(ddof=1) / np.sqrt(len(excess))
        # Large enough to matter, and not by chance.
        high = bool(mean > EXCESS and mean > ERRORS * error)
        body = {"excess": float(mean), "error": float(error), "fills": len(excess)}
        return self._crossed("drift-slippage", high, **body)

    def turned(self, turnover: float) -> list[dict[str, Any]]:
        """Take the notional traded at a bar, as a fraction of equity."""
        if self._usual.turnover is None:
            return []
        self._turnover.append(turnover)
        if len(self._turnover) < WINDOW:
            return []
        low, high = self._usual.turnover
        mean = float(np.mean(self._turnover))
        outside = not low / FACTOR <= mean <= high * FACTOR
        # Without the backtest's own numbers: that one may be run again while a session goes on.
        return self._crossed("drift-turnover", outside, per_bar=mean)

    def _crossed(self, code: str, outside: bool, of: str = "", **body: Any) -> list[dict[str, Any]]:
        """Return the warning if its limit is crossed now."""
        name = f"{code}:{of}" if of else code
        before = name in self._outside
        (self._outside.add if outside else self._outside.discard)(name)
        return [{"code": code, **body}] if outside and not before else []


def usual_turnover(turnover: np.ndarray) -> tuple[float, float] | None:
    """Return the lowest and the highest mean of WINDOW bars of a backtest; None for fewer bars."""
    if len(turnover) < WINDOW:
        return None
    # Of as many bars as the watch means over: single bars spread far more.
    means = np.lib.stride_tricks.sliding_window_view(turnover, WINDOW).mean(-1)
    return float(means.min()), float(means.max())


def watched_sentence(body: Mapping[str, Any]) -> str:
    """Say what a `watched` event says.

    >>> watched_sentence({"features": "a rule sees no features", "slippage": ""})
    'drift watched: slippage; not features (a rule sees no features)'
    """
    kinds = {kind: why for kind, why in body.items() if isinstance(why, str)}
    seen = ", ".join(kind for kind, why in kinds.items() if not why) or "nothing"
    reasons = dict.fromkeys(why for why in kinds.values() if why)
    unseen = [f"{', '.join(k for k in kinds if kinds[k] == why)} ({why})" for why in reasons]
    return "; not ".join([f"drift watched: {seen}", *([", ".join(unseen)] if unseen else [])])
