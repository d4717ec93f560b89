"""Several agents on one account: each decides on books of its own, and their net order is sent.

A sleeve has a share of the capital, its own cash and positions, and its own limits. What one
sleeve buys and another sells at the same close never leaves the account: it crosses at the price
at which a backtest would fill it, at no cost. The rest of all sleeves is one order for each symbol.
`paper.sleeve_books` shares its fills among them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nca_trader.config.env import Limits
from nca_trader.config.ranges import between, expect, one_of, refuse, strict
from nca_trader.config.records import plain
from nca_trader.envs.account.state import Rules
from nca_trader.errors import ConfigError
from nca_trader.paper.core import Agent
from nca_trader.paper.drift import Usual

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")
SUM = 1e-9  # how far shares may be from 1: 0.1 + 0.2 + 0.7 is not 1 in floats
NET = 1e-9  # of what sleeves buy and sell: a smaller difference is rounding, and not an order
# Rules that sleeves of one account may have each their own of; the others are the venue's.
OF_SLEEVE = frozenset(
    "order max_gross max_net dead_band risk floor capital sizing volatility_target "
    "volatility_span volatility_floor size_cap".split()
)


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sleeve:
    """One agent of an account that several share; see `paper_trade`.

    >>> import nca_trader as nca
    >>> rule = nca.rules.sma_cross(5, 20)
    >>> trend = Sleeve(name="trend", share=0.6, run=rule, limits=nca.Limits(max_drawdown=0.1))
    >>> trend.on_halt
    'hold'

    Attributes:
      name: lower-case letters, digits and `._-`.
      share: of the capital at the start, as a fraction. Those of an account sum to 1.
      run: what trades: a run folder, an exported file, a `Strategy` or a function of bars.
      symbols: what it trades, of the feed's; None is all of them, or those that a run is tied to.
      limits: on what it orders, as fractions of its own equity; a loss halts this sleeve alone.
      on_halt: what a halt does with its positions: "hold", or "flatten", which sells them.
      order: "on_change" or "rebalance"; None is the run's own.
      seed: number of the run's agent that trades; None is the mean of all.
    """

    name: str
    share: float
    run: Any
    symbols: tuple[str, ...] | None = None
    limits: Limits | None = None
    on_halt: str = "hold"
    order: str | None = None
    seed: int | None = None

    def __post_init__(self):
        bad = [] if NAME.fullmatch(self.name) else [f"name {self.name!r}: use a-z, 0-9, . _ and -."]
        if self.symbols is not None:
            # A text is a sequence too, of letters that are texts themselves.
            named = [symbol for symbol in self.symbols if isinstance(symbol, str) and symbol]
            if not named or len(set(named)) < len(self.symbols):
                said = ", ".join(map(str, self.symbols)) or "none"
                bad.append(f"symbols: {said}; name each symbol of the sleeve once.")
        refuse(bad, between(self, "(0, 1]", "share"), one_of(self, "on_halt", ("hold", "flatten")))


def check_sleeves(sleeves: Sequence[Sleeve]) -> None:
    """Refuse sleeves that do not make one account.

    Raises:
      ConfigError: none, a name twice, or shares that do not sum to 1.
    """
    for sleeve in sleeves:
        expect("sleeves", sleeve, Sleeve, "a list of nca.Sleeve")
    names = [sleeve.name for sleeve in sleeves]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"sleeves: {', '.join(names) or 'none'}; give each another name.")
    total = math.fsum(sleeve.share for sleeve in sleeves)
    if abs(total - 1.0) > SUM:
        raise ConfigError(
            f"sleeves: the shares of {', '.join(names)} sum to {total:.10g}; let them sum to 1."
        )


class Member(NamedTuple):
    """A sleeve as a session runs it.

    at: `[A_k]` places of its symbols among the account's. flattens: whether a halt sells.
    """

    name: str
    share: float
    agent: Agent
    at: np.ndarray
    flattens: bool

    def of(self, values: Any) -> Any:
        """Return the sleeve's own of the account's values `[A]`."""
        return np.asarray(values)[self.at]


def members_of(
    sleeves: Sequence[Sleeve],
    agents: Sequence[Agent],
    symbols: Sequence[str],
    limits: Limits | None = None,
    capital: float | None = None,
) -> tuple[list[Member], Agent]:
    """Return the sleeves' `Member`s, and the `Agent` that stands for all of them.

    Args:
      sleeves: as they were given.
      agents: of each.
      symbols: of the account.
      limits: of the account.
      capital: of the account, where its rules have one.

    Raises:
      ConfigError: the sleeves trade under rules of the venue that differ.
    """
    # All begin to decide at one bar, so that shares are those of one moment.
    first = max(agent.first_decision for agent in agents)
    found, one = [], agents[0]
    for sleeve, agent in zip(sleeves, agents, strict=True):
        at = np.array([list(symbols).index(symbol) for symbol in agent.symbols])
        agent = agent._replace(first_decision=first)
        if len(agents) > 1:  # the margin is the account's
            agent = agent._replace(rules=agent.rules._replace(maintenance_margin=None))
        found.append(Member(sleeve.name, sleeve.share, agent, at, sleeve.on_halt == "flatten"))
    for sleeve, agent in zip(sleeves, agents, strict=True):
        for name in Rules._fields:
            left, right = getattr(one.rules, name), getattr(agent.rules, name)
            if name not in OF_SLEEVE and left != right:
                raise ConfigError(
                    f"sleeves: {sleeves[0].name} has {name} = {left} and {sleeve.name} {right}; "
                    f"an account has one, so give {name}."
                )
        if one.costs != agent.costs:
            raise ConfigError(
                f"sleeves: {sleeves[0].name} and {sleeve.name} were trained with other costs; an "
                "account has one set, so give costs."
            )
    said_of = {
        sleeve.name: {
            "share": float(sleeve.share),
            "on_halt": sleeve.on_halt,
            "symbols": list(agent.symbols),
            "order": agent.rules.order,
            "limits": None if agent.rules.risk is None else plain(agent.rules.risk),
            **agent.identity,
        }
        for sleeve, agent in zip(sleeves, agents, strict=True)
    }
    # What drifts is the sleeves' own to say.
    whole = one._replace(symbols=tuple(symbols), first_decision=first, begin=lambda: None)
    whole = whole._replace(identity={"sleeves": said_of}, features=(), usual=Usual())
    return found, whole._replace(rules=rules_of_account(one.rules, limits, capital))


def rules_of_account(rules: Rules, limits: Limits | None, capital: float | None) -> Rules:
    """Return the rules of an account whose sleeves have `rules`: the venue's, and its limits."""
    own = {name: Rules._field_defaults[name] for name in OF_SLEEVE - {"floor"}}
    return rules._replace(**own | {"order": "rebalance", "risk": limits, "capital": capital})
