"""A session's connection to the simulated exchange that is a process of its own."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from typing import Any

from nca_trader.errors import StateError
from nca_trader.paper.venue import (
    Activity,
    Answer,
    CashFlow,
    Fill,
    Holdings,
    Instrument,
    OrderState,
    Outcome,
    Ticket,
    Unreachable,
)

TIMEOUT = 5.0  # seconds for an answer
ENDING = 5.0  # seconds for a process to end when it is asked to
LONGEST = 1 << 22  # bytes of a line


class RemoteExchange:
    """A `SimulatedVenue` over a socket.

    Args:
      address: of the socket.
      timeout: seconds for each answer.
    """

    name = "simulated"

    def __init__(self, address: str, timeout: float = TIMEOUT):
        self._address, self._timeout = address, timeout
        self._socket: socket.socket | None = None
        self._left = b""
        self.process: subprocess.Popen[bytes] | None = None  # where this session started it

    def instrument(self, symbol: str) -> Instrument:
        """Return how `symbol` trades."""
        return Instrument(*self._ask("instrument", symbol))

    def submit(self, ticket: Ticket) -> Answer:
        """Send an order."""
        return self._answered("submit", list(ticket))

    def cancel(self, client_id: str) -> Answer:
        """Withdraw an order."""
        return self._answered("cancel", client_id)

    def look_up(self, client_id: str) -> OrderState | None:
        """Return an order, or None."""
        found = self._ask("look_up", client_id)
        return None if found is None else OrderState(*found)

    def working(self) -> list[OrderState]:
        """Return every open order."""
        return [OrderState(*row) for row in self._ask("working")]

    def activity(self, since: int) -> Activity:
        """Return fills and payments at or after `since`."""
        fills, flows = self._ask("activity", since)
        return Activity([Fill(*row) for row in fills], [CashFlow(*row) for row in flows])

    def holdings(self) -> Holdings:
        """Return cash and units."""
        return Holdings(*self._ask("holdings"))

    def now(self) -> int:
        """Return the time of the last quote."""
        return self._ask("now")

    def quote(self, time: int, now: int, rows: dict[str, list[float | None] | None]) -> None:
        """Tell a bar."""
        self._ask("quote", time, now, rows)

    def greet(self) -> dict[str, Any]:
        """Return the process's `pid`, the `digest` of its settings, and whether it has orders."""
        return self._ask("greet")

    def stop(self) -> None:
        """Ask the process to end; its books stay."""
        with contextlib.suppress(Unreachable):
            self._ask("stop")
        self.disconnect()

    def close(self) -> None:
        """End the process: it serves one session."""
        self.stop()
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(ENDING)

    def _answered(self, method: str, *args: Any) -> Answer:
        try:
            outcome, reason, wait = self._ask(method, *args)
        except Unreachable as error:
            return Answer(Outcome.AMBIGUOUS, error.reason)
        return Answer(Outcome(outcome), reason, wait)

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            if self._socket is None:
                self._socket, self._left = socket.socket(socket.AF_UNIX), b""
                self._socket.settimeout(self._timeout)
                self._socket.connect(self._address)
            self._socket.sendall(json.dumps([method, *args]).encode() + b"\n")
            line = self._line(self._socket)
        except TimeoutError:
            self.disconnect()  # a late answer must not be taken for that of the next request
            raise Unreachable("timeout", f"no answer in {self._timeout:g} s") from None
        except OSError as error:
            self.disconnect()
            raise Unreachable("connection", str(error)) from None
        if "error" in line:
            raise StateError(line["error"])
        return line["result"]

    def _line(self, connection: socket.socket) -> dict[str, Any]:
        while b"\n" not in self._left:
            more = connection.recv(1 << 16)
            if not more or len(self._left) > LONGEST:
                raise ConnectionResetError("the exchange closed the connection")
            self._left += more
        line, _, self._left = self._left.partition(b"\n")
        try:
            return json.loads(line)
        except ValueError:
            raise ConnectionResetError("the exchange's answer is not JSON") from None

    def disconnect(self) -> None:
        """Close the connection; the next request opens another."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
