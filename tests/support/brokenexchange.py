"""The simulated exchange behind a connection whose faults are drawn from a seed and the ids."""

import hashlib
from typing import NamedTuple

from nca_trader.paper.venue import Activity, Answer, Outcome, Unreachable
from nca_trader.paper.venues.exchange import Exchange

BUSY_SECONDS = 0.05  # what a busy exchange asks a client to wait


class Faults(NamedTuple):
    """What goes wrong, as probabilities of each order.

    reject, busy: refused, for good or for now. mute, reset: accepted, and then no answer or a
    closed connection. lost: a closed connection, and not accepted. partial: half fills in a bar.
    repeat: fills are listed twice.
    """

    seed: int = 0
    reject: float = 0.0
    busy: float = 0.0
    mute: float = 0.0
    reset: float = 0.0
    lost: float = 0.0
    partial: float = 0.0
    repeat: float = 0.0


class Broken(Exchange):
    """`faults` and `down` may be set at any time; while it is down nothing gets through."""

    faults, down = Faults(), False

    def __init__(self, *args, faults=None, **more):
        super().__init__(*args, **more)
        self.faults, self.attempts = faults or Faults(), {}

    def chance(self, name, what):
        text = f"{self.faults.seed}:{what}:{name}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48

    def fault_of(self, client_id):
        attempt = self.attempts[client_id] = self.attempts.get(client_id, 0) + 1
        # The other faults are of one attempt; what is refused for good is refused again.
        if self.chance(client_id, "reject") < self.faults.reject:
            return "reject"
        # One draw for all of them: their probabilities add up, and exclude each other.
        drawn, upto = self.chance(f"{client_id}#{attempt}", "submit"), 0.0
        for fault in ("busy", "mute", "reset", "lost"):
            upto += getattr(self.faults, fault)
            if drawn < upto:
                return fault
        return ""

    def reach(self):
        if self.down:
            raise Unreachable("connection", "the exchange is gone")

    def submit(self, ticket):
        fault = self.fault_of(ticket.client_id)
        if self.down or fault == "lost":
            return Answer(Outcome.AMBIGUOUS, "connection")
        if fault == "busy":
            return Answer(Outcome.BUSY, "rate-limit", BUSY_SECONDS)
        if fault == "reject" and self.look_up(ticket.client_id) is None:
            return Answer(Outcome.REJECTED, "fault")
        answer = super().submit(ticket)
        if fault == "mute":
            return Answer(Outcome.AMBIGUOUS, "timeout")
        return Answer(Outcome.AMBIGUOUS, "connection") if fault == "reset" else answer

    def cancel(self, client_id):
        if self.down:
            return Answer(Outcome.AMBIGUOUS, "connection")
        return super().cancel(client_id)

    def look_up(self, client_id):
        if self.down:
            raise Unreachable("connection", "the exchange is gone")
        return super().look_up(client_id)

    def activity(self, since):
        self.reach()
        fills, flows = super().activity(since)
        # Drawn from the fill's own id, so that each look repeats the same ones.
        fills += [f for f in fills if self.chance(f.execution_id, "repeat") < self.faults.repeat]
        return Activity(fills, flows)

    def holdings(self):
        self.reach()
        return super().holdings()

    def quote(self, *args):
        self.reach()
        return super().quote(*args)

    def match(self, price, quote, ts):
        """Let only half of some orders meet the market at first."""
        halved = [
            order
            for order in self.working()
            if order.filled == 0.0
            and self.chance(f"{order.client_id}@{ts}", "partial") < self.faults.partial
        ]
        update = "UPDATE orders SET units = ?, status = ? WHERE client_id = ?"
        for order in halved:
            self._file._db.execute(update, (order.units / 2.0, "working", order.client_id))
        fills = super().match(price, quote, ts)
        for order in halved:
            now = self.look_up(order.client_id)
            status = "working" if now.status == "filled" else now.status
            self._file._db.execute(update, (order.units, status, order.client_id))
        return fills
