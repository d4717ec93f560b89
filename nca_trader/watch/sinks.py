"""Sinks of alerts: the log, a webhook, an e-mail, or a function of the user's.

Each sink has its own thread and a bounded queue, so its errors and delays do not affect the watcher
or other sinks. An address may be a secret, so the log names only a sink's kind and host.
"""

from __future__ import annotations

import email.message
import json
import logging
import os
import smtplib
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from nca_trader.config.extensions import load
from nca_trader.config.ranges import described
from nca_trader.errors import ConfigError, printable
from nca_trader.machine import Worker
from nca_trader.watch.alerts import FIRING, Notice

TIMEOUT = 5.0  # seconds that one read from a server may take
WAITS = (1.0, 5.0, 15.0)  # seconds before each new try
CLOSING = 20.0  # seconds that the end waits for what is under way
SUBMISSION = 587  # the port of mail submission, RFC 6409
LOOPBACK = ("localhost", "127.0.0.1", "::1")
log = logging.getLogger(__name__)
Sink = Callable[[Notice], object]  # what it returns is ignored


def sink_of(text: str) -> Sink:
    """Return the function that an entry of a rule's `sinks` names.

    Raises:
      ConfigError: a variable is not set, a module cannot be imported or has no such function.
    """
    kind, _, target = text.partition(":")
    if kind == "log":
        return lambda notice: log.log(
            logging.WARNING if notice.status == FIRING else logging.INFO, "%s", notice
        )
    if kind == "webhook":
        # A variable of the environment keeps a secret address out of the file.
        url = os.environ.get(target[1:].strip("{}"), "").strip() if target[0] == "$" else target
        parts = urllib.parse.urlsplit(url) if url.isascii() and url.isprintable() else None
        # Checked now, and not by the first alert; the URL itself is not repeated.
        if (
            parts is None
            or " " in url
            or parts.scheme not in ("http", "https")
            or not parts.hostname
        ):
            named = target if target.startswith("$") else kind
            raise ConfigError(
                f"sink {named}: set the variable to a URL, http(s)://..., without spaces."
            )
        return Webhook(url, WAITS)
    if kind == "email":
        return Email(target, Server.of_environment(), WAITS)
    try:
        # Loaded now: a name that is wrong must not be found out by the first alert.
        found = load("sinks", target)
    except ConfigError as error:
        raise ConfigError(f"sink {text}: {error}") from None
    if not callable(found):
        raise ConfigError(f"sink {text}: {described(found)} is not a function; name one.")
    return found


def named(text: str) -> str:
    """Return what the log may say of a sink: its kind, and the host of a webhook.

    >>> named("webhook:https://user:password@example.org/secret?token=secret")
    'webhook:example.org'
    """
    kind, _, target = text.partition(":")
    if kind != "webhook" or target.startswith("$"):
        return text
    return f"webhook:{urllib.parse.urlsplit(target).hostname}"


def persist(attempt: Callable[[], object], waits: Iterable[float]) -> None:
    """Call `attempt` until it returns, waiting before each new try.

    Raises:
      OSError: the last try failed too, or one failed for good.
    """
    for wait in (*waits, None):
        try:
            attempt()
            return
        except Refused:
            raise
        except OSError:
            if wait is None:
                raise
        time.sleep(wait)


class Refused(OSError):
    """A server has read a notice and refuses it: it will refuse it again."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Takes a redirect for the failure that it is.

    Followed, 301, 302 and 303 turn a POST into a GET without its body, sent to any host.
    """

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class Webhook:
    """Posts a notice as JSON, and tries again if the network or the server (5xx, 429) fails."""

    def __init__(self, url: str, waits: Iterable[float]):
        """Set the address, http or https. waits: seconds before each new try."""
        self._url, self._waits = url, tuple(waits)
        self._opener = urllib.request.build_opener(_NoRedirects)

    def __call__(self, notice: Notice) -> None:
        """Post the notice.

        Raises:
          OSError: the last try failed too, or the server refused or redirected it. The text has
            neither the address nor what the server said.
        """
        persist(lambda: self._post(json.dumps(notice.as_json()).encode()), self._waits)

    def _post(self, data: bytes) -> None:
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, data, head, method="POST")
        try:
            with self._opener.open(request, timeout=TIMEOUT):
                return
        except urllib.error.HTTPError as error:
            # Its connection would stay open until the object is collected.
            error.close()
            code = error.code
        except Exception as error:  # an error of http.client is not an OSError, and quotes the URL
            reason = getattr(error, "reason", error)
            said = getattr(reason, "strerror", None) or type(reason).__name__
            raise OSError(f"no answer: {said}") from None
        if 300 <= code < 400:
            raise Refused(f"HTTP {code}: it redirects, and a notice is sent to no other address")
        raise (OSError if code >= 500 or code == 429 else Refused)(f"HTTP {code}")


class Server(NamedTuple):
    """A mail server. password: "" where it asks for none. sender: the address of From."""

    host: str
    port: int
    user: str
    password: str
    sender: str

    @classmethod
    def of_environment(cls) -> Server:
        """Return the server of NCA_TRADER_SMTP, `[USER@]HOST[:PORT]`.

        The password is in NCA_TRADER_SMTP_PASSWORD, the sender in NCA_TRADER_SMTP_FROM; without it
        the user is the sender.

        Raises:
          ConfigError: there is none, or no address to send from.
        """
        text = os.environ.get("NCA_TRADER_SMTP", "").strip()
        user, _, address = text.rpartition("@")
        host, _, port = address.rpartition(":") if ":" in address else (address, "", SUBMISSION)
        sender = os.environ.get("NCA_TRADER_SMTP_FROM", "").strip() or user
        if not host or not str(port).isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(
                "sink email: set NCA_TRADER_SMTP to [USER@]HOST[:PORT] of the server."
            )
        if "@" not in sender or not sender.isprintable():
            raise ConfigError("sink email: set NCA_TRADER_SMTP_FROM to the address of the sender.")
        password = os.environ.get("NCA_TRADER_SMTP_PASSWORD", "")
        return cls(host, int(port), user, password, sender)


class Email:
    """Mails a notice through a server, over TLS (STARTTLS) but for one of this machine."""

    def __init__(self, address: str, server: Server, waits: Iterable[float]):
        """Set whom it goes to, and through which server. waits: seconds before each new try."""
        self._address, self._server, self._waits = address, server, tuple(waits)

    def __call__(self, notice: Notice) -> None:
        """Mail the notice.

        Raises:
          OSError: the last try failed too, or the server refuses it. The text has no address and
            no password.
        """
        message = email.message.EmailMessage()
        message["From"], message["To"] = self._server.sender, self._address
        # A name in a rule may hold line breaks, which would add headers.
        message["Subject"] = printable(f"[nca_trader] {notice.name} {notice.status}")
        # A mail shows what is known; a webhook gets every key, so that its schema is fixed.
        body = {key: value for key, value in notice.as_json().items() if value is not None}
        message.set_content(
            f"{printable(notice)}\n\n" + "".join(f"{k}: {printable(v)}\n" for k, v in body.items())
        )
        persist(lambda: self._send(message), self._waits)

    def _send(self, message: email.message.EmailMessage) -> None:
        host, port, user, password, _ = self._server
        try:
            with smtplib.SMTP(host, port, timeout=TIMEOUT) as smtp:
                smtp.ehlo()
                # Without TLS neither a password nor a notice leaves this machine.
                if password or host not in LOOPBACK or smtp.has_extn("starttls"):
                    smtp.starttls(context=ssl.create_default_context())
                if password:
                    smtp.login(user, password)
                smtp.send_message(message)
        except smtplib.SMTPNotSupportedError:
            raise Refused("the mail server does not offer STARTTLS") from None
        except smtplib.SMTPResponseException as error:
            kind = OSError if error.smtp_code < 500 else Refused
            raise kind(f"the mail server answered {error.smtp_code}") from None
        except smtplib.SMTPRecipientsRefused:
            raise Refused("the mail server refused the recipient") from None
        except ssl.SSLError as error:
            raise Refused(f"the mail server's certificate or TLS failed ({error.reason})") from None
        except (smtplib.SMTPException, OSError) as error:
            said = getattr(error, "strerror", None) or type(error).__name__
            raise OSError(f"no answer: {said}") from None


class Sinks:
    """A worker for each sink that the rules name."""

    def __init__(self, names: Iterable[str]):
        """Open them.

        Raises:
          ConfigError: see `sink_of`; before any thread is started.
        """
        # Each sink once, in order: several rules may share it.
        opened = {name: sink_of(name) for name in dict.fromkeys(names)}
        self._workers = {
            name: Worker(f"sink {named(name)}", sink, _loss(named(name)))
            for name, sink in opened.items()
        }

    def tell(self, notices: Iterable[Notice]) -> None:
        """Hand each notice to the sinks of its rule, and return at once."""
        for notice in notices:
            for name in notice.rule.sinks:
                self._workers[name].put(notice)

    def close(self) -> None:
        """Wait a while for the notices under way."""
        for name, worker in self._workers.items():
            if not worker.close(CLOSING):
                log.error("sink %s: not done in %g s; what waited is lost", named(name), CLOSING)


def _loss(name: str) -> Callable[[Notice, object], None]:
    return lambda notice, why: log.error("sink %s: failed (%s); lost: %s", name, why, notice)
