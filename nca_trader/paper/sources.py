"""Live feeds and venues by the names that `--feed` and `--broker` take."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from nca_trader.config.extensions import called, load
from nca_trader.config.reading import parse_step, source_of
from nca_trader.envs.account.state import Rules
from nca_trader.errors import ConfigError, argument
from nca_trader.paper.exchange import parse_faults
from nca_trader.paper.exchange_process import start_exchange
from nca_trader.paper.feed import LiveFeed
from nca_trader.paper.venue import Venue
from nca_trader.types import Costs


def open_feed(text: str, every: str | None) -> LiveFeed:
    """Return the live feed that `--feed` names.

    Args:
      text: "alpaca:SYM,..", "ccxt:EXCHANGE:SYM" or "module:name", a callable that returns a feed.
      every: length of a bar; your own feed knows its own.

    Raises:
      ConfigError: it cannot be opened.
    """
    kind, rest = source_of(text, "feed")
    if kind == "module":
        return _made(text, "feed", ("symbols", "period", "history", "now", "close"))
    if parse_step(every) is None:
        raise ConfigError(f"{argument('every')} is missing; give the length of a bar, e.g. 1min.")
    if kind == "alpaca":
        return _adapter(kind, "alpaca_feed").open_feed(_symbols(rest), every)
    exchange, _, symbols = rest.partition(":")
    return _adapter(kind, "ccxt_feed").open_feed(exchange, _symbols(symbols), every)


def open_venue(
    text: str,
    feed: LiveFeed,
    journal: Path,
    fresh: bool,
    capital: float,
    costs: Costs,
    rules: Rules,
) -> Venue:
    """Return the venue that `--broker` names.

    Args:
      text: "simulated", with faults as in "simulated:seed=7,mute=0.1"; "alpaca"; "ccxt:EXCHANGE";
        or "module:name", a callable that returns a venue.
      feed: whose symbols it must trade.
      journal: next to which a simulated exchange keeps its books.
      fresh: whether the journal is new.
      capital: of a simulated exchange.
      costs: likewise.
      rules: likewise.

    Raises:
      ConfigError: it cannot be opened.
    """
    kind, rest = source_of(text, "broker")
    if kind == "simulated":
        faults = parse_faults(rest)
        return start_exchange(
            journal, capital, costs, feed.symbols, rules, faults=faults, fresh=fresh
        )
    if kind == "module":
        methods = ("submit", "cancel", "look_up", "working", "activity", "holdings", "now")
        return _made(text, "broker", ("name", "instrument", *methods, "close"))
    if kind == "alpaca":
        return _adapter(kind, "alpaca").open_venue(feed.symbols)
    if not rest:
        raise ConfigError(f"{argument('broker', text)}: names no exchange; give ccxt:EXCHANGE.")
    return _adapter(kind, "ccxt_venue").open_venue(rest, feed.symbols)


def _symbols(text: str) -> tuple[str, ...]:
    found = tuple(symbol.strip() for symbol in text.split(",") if symbol.strip())
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"{argument('feed')}: {text!r} names no symbol, or one twice.")
    return found


def _adapter(kind: str, module: str) -> Any:
    try:
        return importlib.import_module(f"nca_trader.paper.{module}")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{kind} needs the package {error.name}; run: pip install 'nca-trader[{kind}]'"
        ) from None


def _made(text: str, what: str, needed: tuple[str, ...]) -> Any:
    """Return what the user's callable returns, if it has every name that the seam needs."""
    where = argument(what, text)
    try:
        found = load(f"{what}s", text)
        if not text.endswith(")"):
            found = called(found, text)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    missing = [name for name in needed if not hasattr(found, name)]
    if missing:
        raise ConfigError(f"{where}: what it returns has no {', '.join(missing)}; see its guide.")
    return found
