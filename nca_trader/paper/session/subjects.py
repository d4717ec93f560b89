"""What trades an account: the agent of a run or of a strategy, and the identity of its session."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from nca_trader.cloud import CloudPath
from nca_trader.config import AccountConfig
from nca_trader.config.account import CORRELATIONS, DEFAULTS, EXITS, OFF, SIZES, complete_account
from nca_trader.config.ranges import expect
from nca_trader.config.records import plain
from nca_trader.envs.account.risk import warn_shrunk
from nca_trader.errors import ConfigError, argument
from nca_trader.paper.feeds.feed import ReplayFeed
from nca_trader.paper.journal.journal import Journal, canonical
from nca_trader.paper.session.agents import function_agent, run_agent, strategy_agent
from nca_trader.paper.session.core import Agent
from nca_trader.runs.consent import codes_of
from nca_trader.runs.exported import read_run
from nca_trader.runs.manifest import Run
from nca_trader.strategies.strategy import Opened, Strategy, covariance_once, sized_once
from nca_trader.strategies.targets import refuse_no_targets
from nca_trader.types import Bars


def is_own(run: Any) -> bool:
    """Whether `run` is a strategy or a function of bars, and not the path of a run."""
    return isinstance(run, Strategy | functools.partial) or inspect.isroutine(run)


def refuse_subject(run: Any) -> None:
    """Raise ConfigError where `run` is nothing that can trade."""
    if not (is_own(run) or isinstance(run, Opened)):
        accepted = "a path, what nca.load opened, a Strategy or a function of bars"
        expect("run", run, str | os.PathLike | CloudPath, accepted)


def agent_of(
    run: Any, opened_run: Run | None, bars: Bars, capital: float, given: AccountConfig
) -> Agent:
    """Return the agent of what trades, for the symbols of `bars`.

    Raises:
      ConfigError: an account that is not valid; a strategy that raises or has stops.
    """
    if given.delay:
        raise ConfigError(
            f"{argument('delay', given.delay)}: is of a backtest; a venue is as late as it is, so "
            "leave it out."
        )
    for name in EXITS:
        if (level := getattr(given, name)) not in (None, OFF[name]):
            raise ConfigError(
                f"{argument(name, level)}: is of a backtest; no broker of this version can rest "
                "it, so leave it out."
            )
    if opened_run is None:
        refuse_no_targets(run)
    rules = complete_account(given, run if opened_run is None else opened_run, capital)
    if rules.capital:  # lots and fees are those of the money that is traded
        rules = dataclasses.replace(rules, capital=float(capital))
    warn_shrunk(bars, rules)
    if opened_run is not None and opened_run.replacement is None:
        return run_agent(opened_run.on(bars), rules)
    rule: Any = run if opened_run is None else opened_run.replacement
    if isinstance(rule, Strategy):
        sized = covariance_once(sized_once(rule, rules.scale), rules.covariance)
        return strategy_agent(sized, bars, rules)
    if rules.covariance:
        raise ConfigError(
            f"{argument('sizing', rules.sizing)}: on paper it is of strategies alone; give a "
            "nca.Strategy in the place of a function of bars."
        )
    return function_agent(rule, bars, rules)


class Subject(NamedTuple):
    """What trades an account.

    agent: what decides. runs: those that were read, of a blend several. run: the one that trades
    alone; None of a strategy.
    """

    agent: Agent
    runs: Sequence[Run] = ()
    run: Run | None = None


def subject_on(
    run: Any,
    feed_of: Callable[[tuple[str, ...] | None], ReplayFeed],
    capital: float,
    given: AccountConfig,
    seed: int | None = None,
    force_agent: bool = False,
    allow_code: bool = False,
) -> tuple[Subject, ReplayFeed]:
    """Return what trades, and the bars for which it was made.

    Args:
      run: as in `paper_trade`.
      feed_of: `symbols -> bars`; None are all symbols.
      capital: money at the start.
      given: of the account.
      seed: as in `paper_trade`.
      force_agent: as in `paper_trade`.
      allow_code: as in `paper_trade`.

    Raises:
      ConfigError: an account that is not valid; a strategy that cannot trade.
    """
    one = None
    if isinstance(run, Opened):
        for name, x in (("seed", seed), ("force_agent", force_agent), ("allow_code", allow_code)):
            if x is not None and x is not False:
                raise ConfigError(f"{argument(name, x)}: the run is open; give it to nca.load.")
        one = run.run
    elif not is_own(run):
        one = read_run(run, seed=seed, force_agent=force_agent, allow_code=allow_code)
    # As a backtest of the same file: every symbol of it, where the policy can trade others.
    source = feed_of(None if one is None or one.tie is None else one.spec.symbols)
    agent = agent_of(run, one, source.bars, capital, given)
    runs = run.runs if isinstance(run, Strategy) else [] if one is None else [one]
    return Subject(agent, runs, one), source


# Rules that earlier journals do not name. Where one is off it is left out of a session's identity,
# which stays that of those journals.
LATER = (*SIZES, *CORRELATIONS, "sizing", "dead_band")


def started_body(
    agent: Agent, capital: float, start: int | None, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the body of `run_started`, whose hash is the session's.

    Args:
      agent: what trades.
      capital: money at the start.
      start: seconds since 1970 UTC before which nothing is decided.
      more: what else makes a live session this one.
    """
    rules, limits = agent.rules, agent.rules.risk
    own = codes_of(dict.fromkeys(rules.costs.own or (), "costs"))
    return {
        "symbols": list(agent.symbols),
        "first_decision": agent.first_decision,
        "costs": plain(rules.costs),
        "rules": {
            name: rule
            for name, rule in rules.stored.items()
            if name != "risk" and (name not in LATER or rule != DEFAULTS[name])
        },
        "capital": float(capital),
        "start": start,
        **({} if limits is None else {"limits": plain(limits)}),
        # Of costs given to the session; what a run names is checked with the run.
        **({} if own is None else {"cost_code": plain(own)}),
        **agent.identity,
        **more,
    }


def refuse_other_session(journal: Journal, started: Mapping[str, Any]) -> None:
    """Raise ConfigError where a journal is of another session than `started`; name what differs."""
    # Through JSON once, so that both sides have its types.
    mine = json.loads(canonical(started))
    for event in journal.events("run_started"):
        there, here = _flat(event.body), _flat(mine)
        names = [n for n in sorted({*there, *here}) if there.get(n) != here.get(n)]
        differs = "; ".join(f"{n} {there.get(n)} there, {here.get(n)} here" for n in names)
        if differs:
            raise ConfigError(
                f"{journal.path}: is the journal of another session ({differs}); name another "
                "journal, or give that session's own options."
            )


def _flat(body: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted names, so that a message has only those that differ."""
    found: dict[str, Any] = {}
    for name, value in body.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found
