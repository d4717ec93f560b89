"""HTTP for the clients of venues: allowed hosts, a deadline for each call, no redirects, and keys.

Both clients send through one `GuardedSession`. It checks the URL that is really called, so that
neither an option nor an answer of a server leads an order to another host.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import logging
import math
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import LocationParseError
from urllib3.util import Url, parse_url

from nca_trader.config.records import loads
from nca_trader.errors import ConfigError, NcaTraderError, system_errors
from nca_trader.machine import read_private
from nca_trader.paper.clock import Caller

TIMEOUT = 10.0  # seconds of a call, from its first byte out to its last byte in
REFUSED = (400, 401, 403, 422)  # answers that refuse a request, if a look-up agrees
LIMITED = (418, 429)  # answers that ask to wait; Binance bans an address with the first
# For clients that log whole requests or answers at level DEBUG.
SILENT = logging.getLogger("nca_trader.paper.silent")
SILENT.disabled = True
KEY_FILE = "NCA_TRADER_KEYS"  # the environment variable that names a file of keys


class HostError(NcaTraderError):
    """A host or a method that is not allowed: never taken for a fault of the network."""


class Keys:
    """An API key and its secret. They print as stars, and `redact` removes them from a text."""

    def __init__(self, key: str, secret: str):
        self.key, self.secret = key, secret

    def __repr__(self) -> str:
        return "Keys(***)"

    def redact(self, text: object) -> str:
        """Return `text` without the keys, at most 200 characters of it."""
        line = str(text)
        # The secret first: a key inside it would break it up, and leave parts of it.
        for word in (self.secret, self.key):
            line = line.replace(word, "***") if word else line
        return line[:200]


def read_keys(key: str, secret: str) -> Keys:
    """Return the keys of two environment variables, or of the file that NCA_TRADER_KEYS names.

    Args:
      key: the variable of the API key, e.g. "APCA_API_KEY_ID".
      secret: that of its secret.

    Raises:
      ConfigError: one is missing; the file can be read by others, or has no such line.
    """
    found = {name: os.environ.get(name, "") for name in (key, secret)}
    path = os.environ.get(KEY_FILE)
    # Variables come first, so that one run can have other keys than the file.
    if path and not all(found.values()):
        found = _of_file(pathlib.Path(path).expanduser(), (key, secret))
    missing = [name for name, value in found.items() if not value]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)}: not set; set the variables of the environment, or let "
            f"{KEY_FILE} name a file of mode 0600 with lines {key}=... and {secret}=...."
        )
    return Keys(found[key], found[secret])


def _of_file(path: pathlib.Path, names: Iterable[str]) -> dict[str, str]:
    with system_errors(ConfigError, f"{path}: can't be read", f"see {KEY_FILE}"):
        lines = read_private(path, "your keys").splitlines()
    values: dict[str, str] = {}
    for line in lines:
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            # Quotes are a habit of shell files, and no part of a key.
            values[name.strip()] = value.strip().strip("\"'")
    return {name: values.get(name, "") for name in names}


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def check_url(url: str, hosts: Iterable[str], schemes: tuple[str, str] = ("https", "http")) -> None:
    """Check that a URL is of an allowed host with TLS, or of this machine.

    Args:
      url: as it is called.
      hosts: that are allowed.
      schemes: with TLS and without.

    Raises:
      HostError: it is neither.
    """
    try:
        # The parser that connects: two parsers may see two hosts in one text.
        parts = parse_url(url)
    except LocationParseError:
        parts = Url()
    host = (parts.host or "").lower()
    safe = parts.scheme == schemes[0] and parts.port in (None, 443) and host in set(hosts)
    if not safe and not (parts.scheme in schemes and is_loopback(host)):
        raise HostError(
            f"{parts.scheme}://{host}: not called; only {', '.join(sorted(hosts))} by "
            f"{schemes[0]} and this machine are. Orders have paper hosts only."
        )


class GuardedSession(requests.Session):
    """Calls allowed hosts, each call within `timeout` seconds; does not follow redirects.

    One thread uses it. After a call `status` is the answer's, None where none came, and `fault`
    says what broke: "timeout", "connection", "redirected", "unreadable-body" or "".

    Args:
      hosts: that may be called; this machine always may.
      read_only: refuse all methods except GET.
      timeout: seconds of a whole call. A timeout of `requests` alone is of each read, so a server
        that sends a byte now and then would hold a call without end; and none is of the names of
        hosts. A call that takes longer is left to its thread.
    """

    def __init__(
        self,
        hosts: Iterable[str],
        read_only: bool = False,
        timeout: float = TIMEOUT,
    ):
        super().__init__()
        self.hosts, self.read_only, self.timeout = frozenset(hosts), read_only, timeout
        self.status: int | None = None
        self.fault, self.retry_after, self.body = "", 0.0, ""
        self._begin()

    def forget(self) -> None:
        """Forget the last answer."""
        self.status, self.fault, self.retry_after, self.body = None, "", 0.0, ""

    def reason(self) -> str:
        """Return the stable code of what was wrong with the last call."""
        if self.fault or self.status is None:
            return self.fault or "not-sent"
        return f"http-{self.status}" if self.status >= 400 else "unreadable-body"

    def close(self) -> None:
        """End the connections and the thread."""
        self._caller.close()
        super().close()

    def _begin(self) -> None:
        """Make the thread and the connections of the calls to come."""
        self._caller = Caller("request")
        for scheme in ("https://", "http://"):
            self.mount(scheme, HTTPAdapter(max_retries=0))

    def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
        """Send one request.

        Raises:
          HostError: the host or the method is not allowed.
          requests.RequestException: no answer, or a redirect.
        """
        self.forget()
        check_url(request.url or "", self.hosts)
        if self.read_only and request.method != "GET":
            raise HostError(f"{request.method} to a host of market data: only GET is sent.")
        # A redirect could lead to a host that is not on the list.
        kwargs |= {"timeout": self.timeout, "allow_redirects": False, "stream": False}
        self._caller.start(functools.partial(super().send, request, **kwargs))
        try:
            if not self._caller.done(self.timeout):
                # Its connection and its thread may be in use for long: the next call has others.
                self._caller.close()
                self._begin()
                raise requests.Timeout("the answer took too long")
            response = self._caller.result()
        except requests.Timeout:
            self.fault = "timeout"
            raise
        except requests.RequestException:
            self.fault = "connection"
            raise
        status = response.status_code
        self.status, self.body = status, response.text
        with contextlib.suppress(ValueError):
            asked = float(response.headers.get("Retry-After", 0.0))
            self.retry_after = asked if math.isfinite(asked) and asked > 0.0 else 0.0
        if 300 <= status < 400:
            self.fault = "redirected"
            raise requests.TooManyRedirects("a redirect is not followed")
        if status != 204 and not _is_json(self.body, status >= 300):
            # ccxt takes a page of HTML, or an empty one, for an account that holds nothing.
            self.fault = "unreadable-body"
            raise requests.exceptions.ContentDecodingError("the answer is not JSON")
        return response


def _is_json(text: str, page: bool) -> bool:
    """Return whether an answer is JSON; or a page, but never a nest that breaks a parser."""
    try:
        return isinstance(loads(text), dict | list) or page
    except json.JSONDecodeError:
        return page
    except ValueError:
        return False
