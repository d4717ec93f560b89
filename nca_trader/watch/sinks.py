"""Sinks of alerts: the log, a service by way of Apprise, or a function of the user's.

Each sink has its own thread and a bounded queue, so its errors and delays do not affect the watcher
or other sinks. An address holds secrets, so the log names only a sink's kind and service.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping

from nca_trader.config.extensions import load
from nca_trader.config.ranges import describe, refuse
from nca_trader.errors import ConfigError, extra, logger, printable
from nca_trader.machine import Worker
from nca_trader.watch.alerts import FIRING, Notification

WAITS = (1.0, 5.0, 15.0)  # seconds before each new try
CLOSING = 20.0  # seconds that the end waits for what is under way
log = logger(__name__)
Sink = Callable[[Notification], object]  # what it returns is ignored


def sink_of(text: str) -> Sink:
    """Return the function that an entry of a rule's `sinks` names.

    Raises:
      ConfigError: a variable is not set, an address is none of Apprise's, Apprise is not installed,
        a module cannot be imported or has no such function.
    """
    kind, _, target = text.partition(":")
    if kind == "log":
        return lambda notice: log.log(
            logging.WARNING if notice.status == FIRING else logging.INFO, "%s", notice
        )
    if kind == "apprise":
        # A variable of the environment keeps a secret address out of the file.
        url = os.environ.get(target[1:].strip("{}"), "").strip() if target[:1] == "$" else target
        return Service(url, named(text))
    try:
        found = load("sinks", target)
    except ConfigError as error:
        raise ConfigError(f"sink {text}: {error}") from None
    if not callable(found):
        raise ConfigError(f"sink {text}: {describe(found)} is not a function; name one.")
    return found


def open_sinks(names: Iterable[str]) -> dict[str, Sink]:
    """Return the functions of sinks by name, each once; a wrong one is found before any alert.

    Raises:
      ConfigError: a line for each sink that `sink_of` refuses.
    """
    opened: dict[str, Sink] = {}
    problems: list[str] = []
    for name in dict.fromkeys(names):
        try:
            opened[name] = sink_of(name)
        except ConfigError as error:
            problems.append(str(error))
    refuse(problems)
    return opened


def named(text: str) -> str:
    """Return what the log may say of a sink: its kind, and the service of an address.

    >>> named("apprise:slack://TokenA/TokenB"), named("apprise:$ALERT_URL")
    ('apprise:slack', 'apprise:$ALERT_URL')
    """
    # Not the host: of many services it is a token.
    return text.partition("://")[0]


class Service:
    """Sends a notice to a service that Apprise knows, and tries again where that fails.

    Args:
      url: its address as Apprise writes it, e.g. "jsons://example.org/hook".
      name: for errors.

    Raises:
      ConfigError: Apprise is not installed, or does not know the address. It is not repeated.
    """

    def __init__(self, url: str, name: str):
        with warnings.catch_warnings():
            # It imports modules that Python will remove, and has replacements for them.
            warnings.simplefilter("ignore", DeprecationWarning)
            with extra(f"sink {name}: needs apprise; pip install apprise."):
                import apprise  # pyright: ignore[reportMissingImports]
            # What it logs has hosts, and at debug whole addresses.
            logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
            # A redirect would send the notice to any host.
            asset = apprise.AppriseAsset(app_id="nca_trader", http_redirects=False)
            self._service = apprise.Apprise(asset=asset)
            plain = url.isascii() and url.isprintable() and " " not in url
            if not (plain and self._service.add(url)):
                raise ConfigError(
                    f"sink {name}: give an address as Apprise writes it, e.g. jsons://HOST/PATH or "
                    "mailtos://USER:PASSWORD@HOST?to=ADDRESS, or set the variable to one."
                )

    def __call__(self, notice: Notification) -> None:
        """Send the notice.

        Raises:
          OSError: the last try failed too.
        """
        # A name in a rule may hold line breaks, which would add headers to a mail.
        title = printable(f"[nca_trader] {notice.name} {notice.status}")
        known = {key: value for key, value in notice.as_json().items() if value is not None}
        lines = [printable(notice), "", *(f"{k}: {printable(v)}" for k, v in known.items())]
        tone = "failure" if notice.status == FIRING else "success"
        for wait in (*WAITS, None):
            if self._service.notify("\n".join(lines), title, tone):
                return
            if wait is None:
                raise OSError("the service did not take it")
            time.sleep(wait)


class Sinks:
    """A worker for each sink.

    Args:
      opened: see `open_sinks`.
    """

    def __init__(self, opened: Mapping[str, Sink]):
        self._workers = {
            name: Worker(f"sink {named(name)}", sink, _loss(named(name)))
            for name, sink in opened.items()
        }

    def tell(self, notices: Iterable[Notification]) -> None:
        """Hand each notice to the sinks of its rule, and return at once."""
        for notice in notices:
            for name in notice.rule.sinks:
                self._workers[name].put(notice)

    def close(self) -> None:
        """Wait a while for the notices under way."""
        for name, worker in self._workers.items():
            if not worker.close(CLOSING):
                log.error("sink %s: not done in %g s; what waited is lost", named(name), CLOSING)


def _loss(name: str) -> Callable[[Notification, object], None]:
    return lambda notice, why: log.error("sink %s: failed (%s); lost: %s", name, why, notice)
