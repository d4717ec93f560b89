"""Schema of an environment: its observations and actions, the costs of trading, risk limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from nca_trader.config.account import (
    BEYOND,
    DEFAULTS,
    OFF,
    AccountConfig,
    Costs,
    capital_problems,
    limit_problems,
)
from nca_trader.config.extensions import check_known, split_frame
from nca_trader.config.ranges import (
    between,
    one_of,
    refuse,
    switch,
    whole,
    without_effect,
)
from nca_trader.config.strict import strict

MOST_DRAWN = 10_000_000  # bars of a synthetic market, under 2 GiB

# No calendar: on daily bars an agent would memorise single days by it.
DEFAULT_FEATURES = (
    "return_1",
    "return_5",
    "return_20",
    "return_60",
    "volatility_ratio",
    "rsi",
    "macd",
    "atr",
    "bollinger",
    "volume",
    "range",
    "drawdown",
)
ACTIONS = ("direction", "orders", "weights")
SESSIONS = ("every_day", "fx_week", "new_york")
REWARDS = ("log_return", "pnl", "differential_sharpe", "drawdown", "mean_variance", "crra")
# The fields that only some rewards have.
REWARDS_WITH = {
    "pnl_returns": ("pnl",),
    "risk_aversion": ("pnl", "mean_variance", "crra"),
    "quadratic_cost": ("pnl",),
    "drawdown_penalty": ("drawdown",),
    "sharpe_decay": ("differential_sharpe",),
}


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """One trading environment: its observations, its actions, and the costs of trading.

    Attributes:
      features: names from `nca_trader.data.features.FEATURES`, in order; or of your own, as
        "module:name" or as a Python object, see docs/guides/extend.md; "1h:rsi" is the feature of
        bars of an hour, see docs/concepts/features.md.
      sessions: from which bars of a slower time frame count: "every_day", from midnight UTC;
        "new_york"; "fx_week"; or your own `nca.Sessions`, as "module:name" or as an object.
      fill: "next_open" fills at the open of the bar after the decision; "close" at the close
        that the decision saw. No real order can be filled there, and reports say so.
      order: "on_change" trades when the ordered target changes; "rebalance" every bar.
      short: True gives the actions short, flat, long; False gives flat, long.
      size: the weight that long means in each asset; None is 1 / number of assets.
      actions: "direction" orders short, flat or long; "orders" sells, holds or buys, which moves
        the last ordered target one step; "weights" orders any weight up to `size`; or your own,
        as "module:name" or as an object, see `nca_trader.envs.actions`.
      reward: of a step: "log_return" of equity; "pnl", `a r - c |da| - q/2 da^2 - k/2 a^2` of
        positions a of constant size, where c is commission + slippage + half_spread; it refuses
        everything else that moves an account; "differential_sharpe"; "drawdown"; "mean_variance";
        "crra"; or your own, as "module:name" or as a function. See `nca_trader.envs.rewards`.
      pnl_returns: r of "pnl", "log" or "simple".
      risk_aversion: k of "pnl" and "mean_variance", the relative risk aversion of "crra".
      quadratic_cost: q of "pnl".
      drawdown_penalty: of "drawdown", per bar, times how far the log of equity is below its peak.
      sharpe_decay: of "differential_sharpe", the weight of a new bar in its moving moments.
      max_gross, max_net: caps on the sum of absolute target weights and on the absolute sum of
        them; the whole target is scaled to them; None sets no cap.
      borrow: True lets buys exceed cash; False cuts them.
      maintenance_margin: equity below this fraction of the gross position closes all positions;
        None never calls.
      costs: what trading and holding cost.
      capital: money at the start; None where no size in money matters.
      lot, tick, min_notional: units and prices are multiples, orders are worth at least; 0 is off.
      max_participation: share of a bar's volume that a fill may take; None sets no limit.
      delist_after: bars missing in a row after which an asset is gone, and its position closed
        at the last price less `delist_haircut`; None is never.
      episode_bars: bars of an episode, a multiple of the learner's segment; None is one segment.
      sizing: "fixed" orders targets as they are; "volatility" multiplies each by `min(size_cap,
        volatility_target / volatility)` of its asset. So every asset bears about the same risk.
      volatility_target, volatility_floor: per year; the estimate is at least the floor.
      volatility_span: of the estimate, an exponentially weighted mean, in bars.
      size_cap: the largest factor; `max_gross` has to leave room for it.
      dead_band: a target is ordered only if it moved by more than this weight since the last
        order, or is 0; with order "rebalance" it is compared with the weight held.
      random_start: draw the account's first weight from the actions; False starts flat.
      random_costs: (low, high) factor by which an episode's costs are drawn, evenly in its log;
        None trades at `costs`.
      feature_dropout: chance that an episode hides an asset's features of a bar from the policy.
        Orders fill in that bar, and the features of later bars are computed with it.
      ruin_floor: equity, as a fraction of the start's, at or below which an account is bankrupt.
      market: a synthetic market, drawn if no bars are given, by name and parameters,
        e.g. "ou(phi=0.95, cost=0.005)"; or of your own, as "module:name" or as a function, see
        docs/guides/extend.md; "" for real bars. Its state is observed with the features unless
        `market_state` is False. market_bars: how many bars are drawn.

    Example:
      >>> import nca_trader as nca
      >>> config = nca.EnvConfig(short=False, costs=nca.Costs(commission=5e-4, slippage=2e-4))
      >>> nca.EnvConfig(fill="at_close")
      Traceback (most recent call last):
      nca_trader.errors.ConfigError: ...
    """

    RENAMED: ClassVar = {"drop_bars": "feature_dropout"}  # old keys of files, read with a warning
    # These may name your own code.
    OWN: ClassVar = {
        "features": "features",
        "sessions": "sessions",
        "reward": "rewards",
        "actions": "actions",
        "market": "markets",
    }

    features: tuple[str, ...] = DEFAULT_FEATURES
    sessions: str = "every_day"
    fill: str = "next_open"
    order: str = "on_change"
    short: bool = True
    size: float | None = None
    actions: str = "direction"
    reward: str = "log_return"
    pnl_returns: str = "log"
    risk_aversion: float = 0.0
    quadratic_cost: float = 0.0
    drawdown_penalty: float = 0.01
    sharpe_decay: float = 0.01
    max_gross: float | None = 1.0
    max_net: float | None = None
    borrow: bool = False
    maintenance_margin: float | None = None
    costs: Costs = Costs()
    capital: float | None = None
    lot: float = 0.0
    tick: float = 0.0
    min_notional: float = 0.0
    max_participation: float | None = None
    delist_after: int | None = None
    delist_haircut: float = 0.0
    sizing: str = "fixed"
    volatility_target: float = 0.15
    volatility_span: int = 60
    volatility_floor: float = 0.01
    size_cap: float = 1.0
    correlation_span: int = 252
    shrinkage: float = 0.8
    dead_band: float = 0.0
    episode_bars: int | None = None
    random_start: bool = True
    random_costs: tuple[float, float] | None = None
    feature_dropout: float = 0.0
    ruin_floor: float = 1e-3
    market: str = ""
    market_state: bool = True
    market_bars: int = 100_000

    def __post_init__(self):
        problems = [
            *check_known(self, "sessions", "sessions", SESSIONS),
            *check_known(self, "actions", "actions", ACTIONS),
            *check_known(self, "reward", "rewards", REWARDS),
            *one_of(self, "pnl_returns", ("log", "simple")),
            *between(self, "(0, 1)", "ruin_floor", "sharpe_decay"),
            *between(self, "[0, 1)", "feature_dropout"),
            *between(self, "[0, inf)", "risk_aversion", "quadratic_cost", "drawdown_penalty"),
            *between(self, "(0, inf)", "size"),
            # In float32 a matrix that is nearly singular has no inverse.
            *between(self, "[0.01, 1]", "shrinkage"),
            *whole(self, 2, "episode_bars"),
            # As for files: a run from elsewhere must not fill the memory.
            *whole(self, 2, "market_bars", most=MOST_DRAWN),
            *limit_problems(self),
            *capital_problems(self),
        ]
        # Refused and not ignored: such an agent would be trained on costs other than those it pays.
        if self.reward == "pnl":  # a sum of returns and trading costs: no equity, no margin
            paid = ("commission", "slippage", "half_spread")
            costs = [field.name for field in dataclasses.fields(Costs) if field.name not in paid]
            given = [f"costs.{name}" for name in costs if getattr(self.costs, name)]
            limits = ("maintenance_margin", "lot", "tick", "min_notional", "max_participation")
            given += [name for name in (*limits, "delist_after") if getattr(self, name)]
            if given:
                problems.append(
                    f"reward='pnl' does not pay for {', '.join(given)}; leave them out, or choose "
                    "reward='log_return'."
                )
        if self.random_costs is not None:
            # Above 0, because factors are drawn evenly in their log.
            low, high = self.random_costs
            if not 0.0 < low <= high < float("inf"):
                problems.append(
                    f"random_costs={self.random_costs} is not a range of factors above 0; give "
                    "(low, high), e.g. (0.5, 2.0)."
                )
        if self.sizing != "fixed":
            if self.actions not in ("direction", "weights"):
                problems.append(
                    f"sizing={self.sizing!r} with actions={self.actions!r}, which may move the "
                    "last order by a step; take 'direction' or 'weights'."
                )
            if self.reward == "pnl":
                problems.append(
                    f"sizing={self.sizing!r} with reward='pnl', of positions of constant size; "
                    "take reward='log_return'."
                )
        # Twice the same column would only make the network larger.
        repeated = sorted({name for name in self.features if self.features.count(name) > 1})
        if repeated:
            problems.append(f"features={repeated} are named twice; name each feature once.")
        if not self.features and not (self.market and self.market_state):
            problems.append('features=() is empty; name at least one, e.g. "return_1".')
        refuse(problems, without_effect(self))
        # Only now: the comparison needs numbers, which the checks above have made sure of.
        if self.size is not None and self.max_gross is not None and self.size > self.max_gross:
            refuse(f"size={self.size} is above max_gross={self.max_gross}; raise max_gross.")

    @property
    def account(self) -> AccountConfig:
        """What an account is given in this environment, complete; see `complete_account`."""
        names = {field.name for field in dataclasses.fields(AccountConfig)} & vars(self).keys()
        # None sets no limit here, and is "not given" there.
        given: dict[str, Any] = {n: getattr(self, n) for n in names}
        given = {n: OFF.get(n) if x is None else x for n, x in given.items()}
        given |= {name: DEFAULTS[name] for name in BEYOND}
        return AccountConfig(floor=self.ruin_floor, **given)

    def with_account(self, given: AccountConfig) -> EnvConfig:
        """Return this environment with what an account is given in the place of its own.

        Raises:
          ConfigError: a delay, limits of risk or levels, which environments do not have; another
            field that does not fit the environment.
        """
        values = {name: None if OFF.get(name) == x else x for name, x in given.given.items()}
        refuse(
            f"{name} is of backtests and paper trading, and no environment has it; leave it out."
            for name in BEYOND
            if values.pop(name, None) not in (None, DEFAULTS[name])
        )
        if "floor" in values:
            values["ruin_floor"] = values.pop("floor")
        return switch(self, **values)

    @staticmethod
    def idle(given: Any) -> Iterator[tuple[str, str]]:
        """Yield each field without effect given the values `given`, and what it needs."""
        for name, rewards in REWARDS_WITH.items():
            if given.reward in REWARDS and given.reward not in rewards:
                yield name, f"reward={' or '.join(map(repr, rewards))}"
        yield from AccountConfig.idle(given)
        if not given.market:
            yield "market_bars", "a market"
        if not any(split_frame(name)[0] for name in given.features):
            yield "sessions", 'a feature of a slower time frame, e.g. "1h:rsi"'
