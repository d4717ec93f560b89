"""The simulated exchange in a process of its own.

The process listens on a socket of the local machine that only its user can open. It outlives a
session that is killed, and the next one finds it by `JOURNAL.exchange`; its books are in
`JOURNAL.books`. One request and one answer are one line of JSON each.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nca_trader.config.records import loads, plain
from nca_trader.envs.account.state import Rules
from nca_trader.errors import ConfigError, NcaTraderError, StateError
from nca_trader.machine import HeldError, take_lock, write_atomically
from nca_trader.paper.clock import Clock
from nca_trader.paper.exchange import NO_FAULTS, Exchange, Faults
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
from nca_trader.types import Costs

STARTING = 60.0  # seconds for the process to answer first: it imports jax
TIMEOUT = 5.0  # seconds for an answer
ENDING = 5.0  # seconds for a process to end when it is asked to
LONGEST = 1 << 22  # bytes of a line
IDLE = 900.0  # seconds without a connection, after which it ends by itself
METHODS = ("instrument", "submit", "cancel", "look_up", "working", "activity", "holdings", "now")


class Server:
    """Answers requests one after the other, of any number of connections.

    Args:
      exchange: the venue.
      listener: a listening socket.
      about: what `greet` returns.
      idle: seconds without a connection, after which `serve` returns.
      clock: for latency.
    """

    def __init__(
        self,
        exchange: Exchange,
        listener: socket.socket,
        about: dict[str, Any],
        idle: float = IDLE,
        clock: Clock | None = None,
    ):
        self._exchange, self._about, self._idle = exchange, about, idle
        self._clock, self._open = clock or Clock(), True
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        # By connection, what came after its last whole line.
        self._listener, self._left = listener, {}

    def serve(self) -> None:
        """Answer until asked to stop, or until no client was connected for a while."""
        while self._open:
            # With a client it waits without end; without one no process is to be left over.
            ready = self._selector.select(None if self._left else self._idle)
            if not ready:
                return
            for key, _ in ready:
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._left[connection] = b""
                    self._selector.register(connection, selectors.EVENT_READ)
                else:
                    self._read(key.fileobj)

    def _read(self, connection: Any) -> None:
        try:
            more = connection.recv(1 << 16)
        except OSError:
            more = b""
        # A line without an end must not fill the memory.
        if not more or len(self._left[connection]) > LONGEST:
            return self._drop(connection)
        *lines, self._left[connection] = (self._left[connection] + more).split(b"\n")
        for line in lines:
            # An earlier line of the same packet may have closed it.
            if connection in self._left:
                self._serve_one(connection, line)

    def _serve_one(self, connection: socket.socket, line: bytes) -> None:
        self._clock.sleep(self._exchange.faults.latency)
        try:
            method, *args = loads(line)
            answer = {"result": self._result(method, args)}
        except (NcaTraderError, ValueError, TypeError, KeyError) as error:
            answer = {"error": f"the exchange refused {line[:200]!r}: {error}"}
        result = answer.get("result")
        if isinstance(result, Answer) and result.outcome is Outcome.AMBIGUOUS:
            # It has been done or not, and the client does not hear which: that is the fault.
            if result.reason != "mute":
                self._drop(connection)
            return
        try:
            connection.sendall(json.dumps(answer).encode() + b"\n")
        except OSError:
            self._drop(connection)

    def _result(self, method: str, args: list[Any]) -> Any:
        if method == "greet":
            return self._about | {"used": self._exchange.used}
        if method == "stop":
            self._open = False
            return None
        # A name of a request reaches these methods and no other.
        if method not in (*METHODS, "quote"):
            raise ValueError(f"there is no request {method!r}")
        args = [Ticket(*args[0])] if method == "submit" else args
        return getattr(self._exchange, method)(*args)

    def _drop(self, connection: Any) -> None:
        self._selector.unregister(connection)
        del self._left[connection]
        connection.close()


def start_exchange(
    journal: str | Path,
    capital: float,
    costs: Costs,
    symbols: Sequence[str],
    rules: Rules = Rules(),
    faults: Faults = NO_FAULTS,
    timeout: float = TIMEOUT,
    fresh: bool = False,
) -> RemoteExchange:
    """Return the exchange of a journal: the one that runs already, or a new process.

    A process that a killed session left is used again if it has the same settings, and replaced
    if it has others or does not answer.

    Args:
      journal: its books are `JOURNAL.books`.
      capital: cash at the start.
      costs: what trading and holding cost.
      symbols: `A` names.
      rules: of the account.
      faults: what goes wrong.
      timeout: seconds for each answer.
      fresh: whether the journal is new, so that books with orders cannot be its.

    Raises:
      ConfigError: the books are those of another session.
      StateError: the process does not start.
    """
    settings = {
        "books": str(Path(f"{journal}.books").resolve()),
        "capital": float(capital),
        "costs": plain(costs),
        "symbols": list(symbols),
        "rules": rules._replace(risk=None)._asdict(),  # limits are the session's
        "faults": faults._asdict(),
    }
    # So that a process of other settings is not taken for this one.
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    settings |= {"digest": digest, "address": f"{journal}.exchange"}
    found = _running(Path(settings["address"]), digest, timeout)
    if found is None:
        _replace(Path(settings["address"]), Path(settings["books"] + ".lock"))
        found = _spawn(settings, timeout)
    if fresh and found.greet()["used"]:
        found.stop()
        raise ConfigError(
            f"{settings['books']}: holds orders of an earlier session whose journal is gone; "
            "remove it, or name another journal."
        )
    return found


def _running(address: Path, digest: str, timeout: float) -> RemoteExchange | None:
    """Return the process that answers at an address, if it has these settings."""
    with contextlib.suppress(OSError, ValueError, KeyError, Unreachable):
        found = RemoteExchange(loads(address.read_text())["socket"], timeout)
        if found.greet()["digest"] == digest:
            return found
        found.stop()
    return None


def _replace(address: Path, lock: Path) -> None:
    """End the process that holds the books, if there is one."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError, ValueError, KeyError):
            if number is not None:
                about = loads(address.read_text())
                # The lock says who holds it: another process may have that number by now.
                if f"process {about['pid']} on " in lock.read_text():
                    os.kill(about["pid"], number)
        if _within(ENDING, lambda: _is_free(lock)):
            return
    raise StateError(f"{lock}: another process keeps these books; end it, or name another journal.")


def _is_free(lock: Path) -> bool:
    try:
        os.close(take_lock(lock))
    except HeldError:
        return False
    return True


def _spawn(settings: dict[str, Any], timeout: float) -> RemoteExchange:
    address, log = Path(settings["address"]), Path(settings["address"] + ".log")
    address.unlink(missing_ok=True)
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "nca_trader.paper.exchange_process"],
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
            start_new_session=True,  # a Ctrl-C for the session is not for the exchange
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as given:
        # On stdin, as arguments are listed for every user of the machine.
        given.write(json.dumps(settings).encode())
    found: list[RemoteExchange] = []

    def answers() -> bool:
        found.extend(filter(None, [_running(address, settings["digest"], timeout)]))
        return bool(found) or process.poll() is not None

    if not _within(STARTING, answers) or not found:
        process.kill()
        lines = log.read_text(errors="replace").strip().splitlines() or ["no reason given"]
        # The exit code says whose fault it is, and the last line what it is.
        kind = ConfigError if process.wait() == ConfigError.exit_code else StateError
        raise kind(f"the simulated exchange did not start: {lines[-1]}")
    found[0].process = process
    return found[0]


def _within(seconds: float, done: Callable[[], bool], clock: Clock | None = None) -> bool:
    clock = clock or Clock()
    begun = clock.monotonic()
    while not done():
        if clock.monotonic() - begun > seconds:
            return False
        clock.sleep(0.02)
    return True


def main() -> int:
    """Serve the exchange that the settings on stdin describe."""
    settings = loads(sys.stdin.read())
    books = Path(settings["books"])
    folder = tempfile.mkdtemp(prefix="nca-exchange.")  # 0700, and short enough for a socket's name
    try:
        lock = take_lock(Path(f"{books}.lock"))
        exchange = Exchange(
            books,
            settings["capital"],
            Costs(**settings["costs"]),
            settings["symbols"],
            Rules(**settings["rules"]),
            Faults(**settings["faults"]),
        )
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/socket")
            listener.listen()
            about = {"socket": f"{folder}/socket", "pid": os.getpid()}
            # Only now, so that an address that is found is listened at.
            write_atomically(Path(settings["address"]), json.dumps(about))
            Server(exchange, listener, {**about, "digest": settings["digest"]}).serve()
        exchange.close()
        os.close(lock)
    except (NcaTraderError, HeldError) as error:
        print(error, file=sys.stderr)
        return getattr(error, "exit_code", StateError.exit_code)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


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
            return loads(line)
        except ValueError:
            raise ConnectionResetError("the exchange's answer is not JSON") from None

    def disconnect(self) -> None:
        """Close the connection; the next request opens another."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    sys.exit(main())
