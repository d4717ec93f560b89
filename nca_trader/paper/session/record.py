"""What a session writes into its journal about bars and decisions, and under which keys.

A session that repeats its bars finds its events by these keys, and writes none of them twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from nca_trader.paper.clock import NANOSECONDS
from nca_trader.paper.journal.bars import bar_body, in_json
from nca_trader.paper.journal.journal import Journal, canonical
from nca_trader.paper.session.core import Decision
from nca_trader.paper.session.gate import Refusal
from nca_trader.types import Bar


class Record:
    """The events of one session.

    Times are those of bars, in nanoseconds since 1970 UTC.

    Args:
      journal: an open one.
      run: the session's hash.
      symbols: `A` names, the order of a bar's arrays.
      started: the body of the session's first event.
      watched: what the drift watch watches.

    Attributes:
      counts: bars, refused bars and decisions so far.
    """

    def __init__(
        self,
        journal: Journal,
        run: str,
        symbols: tuple[str, ...],
        started: Mapping[str, Any],
        watched: Mapping[str, str],
    ):
        self._journal, self._run, self._symbols = journal, run, symbols
        self._started, self._watched = dict(started), dict(watched)
        self._said = False  # whether this process has said what is watched
        self.counts = {"bars": 0, "rejected": 0, "decisions": 0}

    def event(self, kind: str, key: str, body: dict[str, Any], ts: int) -> None:
        """Record an event."""
        self._journal.record(self._run, kind, key, body, ts)

    def bar(self, bar: Bar, ts: int) -> None:
        """Record a bar, and what the session is at its first one."""
        if self.counts["bars"] == 0:
            self.event("run_started", "", self._started, ts)
        if not self._said:
            self._said = True
            before = list(self._journal.events("watched"))
            # Again only where it changed, e.g. after somebody saved a backtest in the run folder.
            if not before or before[-1].body != self._watched:
                self.event("watched", f"{ts // NANOSECONDS}:{len(before)}", self._watched, ts)
        self.counts["bars"] += 1
        self.event("bar", str(ts // NANOSECONDS), bar_body(bar, self._symbols), ts)

    def rejected(self, bar: Bar, refusal: Refusal, ts: int) -> str:
        """Record a bar that the gate refused; return the key."""
        self.counts["rejected"] += 1
        body = {
            "reason": refusal.code,
            "say": refusal.say,
            "held": refusal.held,
            "bar": bar_body(bar, self._symbols),
        }
        # A feed may send several bad bars of one time; the digest keeps their keys apart.
        key = f"{ts // NANOSECONDS}:{digest(canonical(body))}"
        self.event("bar_rejected", key, body, ts)
        return key

    def decision(self, decision: Decision, ts: int) -> None:
        """Record a decision."""
        self.counts["decisions"] += 1
        body = {name: in_json(value) for name, value in decision.body.items()}
        self.event("decision", str(ts // NANOSECONDS), body, ts)

    def risks(self, found: Sequence[dict[str, Any]], ts: int) -> None:
        """Record what the gate, the limits or the drift watch say of a bar, one event each."""
        for body in found:
            parts = (body["code"], body.get("feature"))
            key = ":".join([str(ts // NANOSECONDS), *(part for part in parts if part)])
            self.event("risk", key, body, ts)


def digest(text: str) -> str:
    """Return eight hexadecimal digits of a text's hash, for a key."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]
