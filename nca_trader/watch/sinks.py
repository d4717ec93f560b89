"""Where alerts go: the log, a webhook, a function of the user's; none may stop the watching."""

from __future__ import annotations

import importlib
import json
import logging
import os
import queue
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable

from nca_trader.errors import ConfigError
from nca_trader.watch.alerts import FIRING, Notice

TIMEOUT = 5.0  # seconds that one POST may take
WAITS = (1.0, 5.0, 15.0)  # seconds before each new try
WAITING = 1000  # notices that may wait for a slow sink; later ones are dropped
CLOSING = 20.0  # seconds that the end waits for what is under way
log = logging.getLogger(__name__)
Sink = Callable[[Notice], object]  # what it returns is of no interest


def sink_of(text: str) -> Sink:
    """The function that a rule's `sinks` entry means.

    Raises:
      ConfigError: a variable is not set, a module can't be imported or has no such function.
    """
    kind, _, target = text.partition(":")
    if kind == "webhook":
        return Webhook(_expanded(target), WAITS)
    return _function(target) if kind == "call" else _to_log


def _to_log(notice: Notice) -> None:
    log.log(logging.WARNING if notice.status == FIRING else logging.INFO, "%s", notice)


def _expanded(url: str) -> str:
    """The URL, or that of the environment's variable that it names: so no secret is in a file."""
    if not url.startswith("$"):
        return url
    found = os.environ.get(url[1:].strip("{}"), "")
    if not found.startswith(("http://", "https://")):
        raise ConfigError(f"sink webhook:{url}: set the variable to a URL, http(s)://...")
    return found


def _function(target: str) -> Sink:
    module, _, name = target.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` does: the user's own module lies there
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"sink call:{target}: {error}; give call:package.module:function that Python finds "
            "from here."
        ) from None
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise ConfigError(f"sink call:{target}: {name} is no function.")
    return found


class Webhook:
    """Posts a notice as JSON; tries again where the network or the server (5xx, 429) fails."""

    def __init__(self, url: str, waits: Iterable[float]):
        """url: http or https. waits: seconds before each new try."""
        self._url, self._waits = url, tuple(waits)

    def __call__(self, notice: Notice) -> None:
        """Posts it.

        Raises:
          OSError: also the last try failed, or the server refused it.
        """
        data = json.dumps(notice.as_json()).encode()
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, data, head, method="POST")
        for wait in (*self._waits, None):
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT):
                    return
            except urllib.error.HTTPError as error:
                error.close()
                # The server has read it and says no: it will again.
                if wait is None or (error.code < 500 and error.code != 429):
                    raise
            except OSError:
                if wait is None:
                    raise
            time.sleep(wait)


class Worker:
    """One sink with a thread of its own, so that a slow one holds up nobody."""

    def __init__(self, name: str, sink: Sink):
        """Starts the thread. name: for the log, without what follows the scheme of a URL."""
        self._name, self._sink = name, sink
        self._waiting: queue.Queue[Notice | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._thread.start()

    def tell(self, notice: Notice) -> None:
        """Hands it over; never blocks and never raises."""
        try:
            self._waiting.put_nowait(notice)
        except queue.Full:
            log.error("sink %s: too slow; dropped %s", self._name, notice)

    def close(self, seconds: float = CLOSING) -> None:
        """Waits for what was handed over, so long."""
        try:
            self._waiting.put(None, timeout=seconds)
        except queue.Full:
            pass
        else:
            self._thread.join(seconds)
        if self._thread.is_alive():
            log.error("sink %s: not done in %g s; what waited is lost", self._name, seconds)

    def _work(self) -> None:
        while (notice := self._waiting.get()) is not None:
            try:
                self._sink(notice)
            except Exception as error:  # whatever a user's function raises
                log.error("sink %s: failed (%s); lost: %s", self._name, error, notice)


class Sinks:
    """A worker for each sink that the rules name."""

    def __init__(self, names: Iterable[str]):
        """Opens them.

        Raises:
          ConfigError: see `sink_of`; before any thread is started.
        """
        opened = {name: sink_of(name) for name in dict.fromkeys(names)}
        # A webhook's path is often its secret.
        self._workers = {n: Worker("/".join(n.split("/")[:3]), s) for n, s in opened.items()}

    def tell(self, notices: Iterable[Notice]) -> None:
        """Hands each notice to its rule's sinks; returns at once."""
        for notice in notices:
            for name in notice.rule.sinks:
                self._workers[name].tell(notice)

    def close(self) -> None:
        """Waits a while for what is under way."""
        for worker in self._workers.values():
            worker.close()
