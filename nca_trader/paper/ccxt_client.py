"""A ccxt client of spot markets that sends through a guarded session, and what its faults mean."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from nca_trader.errors import ConfigError
from nca_trader.paper.venue import Unreachable

try:
    import ccxt
    from requests import RequestException

    from nca_trader.paper.net import TIMEOUT, GuardedSession, Keys, check_url, is_loopback
except ImportError:
    raise ConfigError('ccxt is not installed; pip install "nca-trader[ccxt]".') from None

URL = "NCA_TRADER_CCXT_URL"  # a server of this machine in place of the exchange
FAULTS = (ccxt.BaseError, RequestException, ValueError, KeyError, TypeError, AttributeError)
_SILENT = logging.getLogger("nca_trader.paper.silent")
_SILENT.disabled = True


def hosts_of(urls: Any, hostname: str | None) -> frozenset[str]:
    """Return the hosts among ccxt's URLs of an exchange: a text, or a dict of dicts."""
    if isinstance(urls, dict):
        return frozenset().union(*(hosts_of(value, hostname) for value in urls.values()))
    host = str(urls or "").replace("{hostname}", hostname or "").partition("://")[2]
    return frozenset({host.partition("/")[0].partition(":")[0]} - {""})


def open_client(
    exchange: str,
    *,
    url: str | None = None,
    keys: Keys | None = None,
    timeout: float = TIMEOUT,
) -> tuple[Any, GuardedSession]:
    """Return a ccxt client of spot markets, and the session that it sends through.

    Args:
      exchange: ccxt's name, e.g. "binance".
      url: a server of this machine in place of the exchange's.
      keys: of its test host, which is then the only host. Without keys the client reads the
        exchange's public market data, and nothing else.
      timeout: seconds of a call.

    Raises:
      ConfigError: no such exchange; it has no test host. HostError: `url` is another machine.
    """
    if exchange not in ccxt.exchanges:
        raise ConfigError(f"ccxt has no exchange {exchange!r}; give e.g. binance.")
    options = {"fetchMarkets": {"types": ["spot"]}, "maxRetriesOnFailure": 0}
    client = getattr(ccxt, exchange)(
        {
            "timeout": int(1000 * timeout),
            "options": options | {"defaultType": "spot", "fetchCurrencies": False},
        }
    )
    client.has["fetchCurrencies"] = False  # signed, and at production hosts only
    public = hosts_of(client.urls.get("api"), client.hostname)
    hosts = public
    if keys is not None:
        # A host that takes real orders stays out, even where ccxt lists it as a test host.
        hosts = hosts_of(client.urls.get("test"), client.hostname) - public
        if not hosts:
            raise ConfigError(f"{exchange} has no test host of its own; orders can't go there.")
        client.set_sandbox_mode(True)
        client.apiKey, client.secret = keys.key, keys.secret
    url = url or os.environ.get(URL)
    if url:
        check_url(url, ())
        client.urls["api"] = _replaced(client.urls["api"], url.rstrip("/"))
        client.enableRateLimit = not is_loopback(url.partition("://")[2].partition(":")[0])
    session = GuardedSession(() if url else hosts, read_only=keys is None, timeout=timeout)
    session.trust_env = False  # as ccxt sets its own
    client.session.close()
    client.session = session
    client.logger = _SILENT  # at level DEBUG it writes headers, and so the key
    return client, session


def _replaced(urls: Any, url: str) -> Any:
    if isinstance(urls, dict):
        return {name: _replaced(value, url) for name, value in urls.items()}
    return url + "/" + str(urls).partition("://")[2].partition("/")[2] if urls else urls


def loaded(
    call: Callable[[], Any],
    session: GuardedSession,
    keys: Keys | None = None,
    missing: bool = False,
) -> Any:
    """Return what a call of ccxt returns; with `missing`, None for an order that is not there.

    Raises:
      Unreachable: it fails; the message has no URL, which would hold a signature.
    """
    session.forget()
    try:
        answer = call()
    except FAULTS as error:
        if missing and isinstance(error, ccxt.OrderNotFound):
            return None
        raise Unreachable(reason_of(error, session), said(session, keys)) from None
    if answer is None:  # a field that is not there, e.g. of the clock
        raise Unreachable("unreadable-body")
    return answer


def reason_of(error: Exception, session: GuardedSession) -> str:
    """Return the stable code of a failed call."""
    if session.fault:
        return session.fault
    if isinstance(error, ccxt.InvalidNonce):
        return "clock-skew"
    if isinstance(error, ccxt.DDoSProtection | ccxt.RateLimitExceeded):
        return "rate-limit"
    return session.reason()


def said(session: GuardedSession, keys: Keys | None) -> str:
    """Return what the exchange says, where it says it as JSON."""
    text = session.body if session.body.lstrip()[:1] == "{" and session.status != 200 else ""
    return keys.redact(text) if keys else text[:200]
