"""What an account is given, in one record, `AccountConfig`: costs, how orders fill, limits.

The state of an account is `nca_trader.envs.account.state.Account`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple

from nca_trader.config.extensions import check_known
from nca_trader.config.ranges import (
    between,
    expect,
    nearest,
    one_of,
    refuse,
    take_settings,
    whole,
    without_effect,
)
from nca_trader.config.strict import strict
from nca_trader.errors import ConfigError, argument

# At and above these it is percent that was written for a fraction: no venue charges a tenth.
IMPLAUSIBLE = {"commission": 0.1, "slippage": 0.1, "interest_lend": 2.0, "interest_borrow": 2.0}
# Fractions of a price or of notional; amounts without an upper end. Other costs are rates per year.
FRACTIONS = ("commission", "slippage", "half_spread", "liquidation_fee")
AMOUNTS = ("impact", "fixed_fee")
# The last fields of `Costs`. None is left out of a record: one without them is as it was.
OPTIONAL = ("own", "own_scale", "quote_scale")


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What trading and holding cost; a pytree, so that a compiled backtest takes any costs.

    >>> Costs(commission=5e-4).scaled(2.0).commission
    0.001

    A fill's price is worse than the bar's by slippage + half_spread + the bars' own half_spread +
    impact. Rates per year are charged for the time that positions were held, before they change: at
    each open where orders fill at the next open, at each close where they fill at the close.

    Attributes:
      commission: fraction of traded notional, e.g. 5e-4 for 5 bp.
      slippage: fraction of price by which a fill is worse than the bar's price, e.g. 2e-4.
      half_spread: half the bid-ask spread as a fraction of price, in addition to
        what the bars quote.
      impact: square-root impact: the price worsens by `impact * sqrt(units / volume of the bar)`,
        a fraction of price; more than the volume counts as all of it. Needs `capital`.
      fixed_fee: money per fill, whatever its size; needs `capital`.
      borrow_fee: per year, fraction of the value that is sold short.
      interest_lend, interest_borrow: per year, on cash that is held, and on cash that is owed.
      funding: per year, fraction of the position's value that a long pays and a short receives.
      liquidation_fee: fraction of notional that a forced liquidation pays on top.
      own: costs of your own, as "module:name" or as functions; each worsens the price by the
        fraction that it returns, see docs/guides/extend.md. own_scale: the factor on them that
        `scaled` sets; None is 1.
      quote_scale: the factor on the half-spreads that the bars quote; None is 1.
    """

    OWN: ClassVar = {"own": "costs"}  # may name your own code

    commission: float = 0.0
    slippage: float = 0.0
    half_spread: float = 0.0
    impact: float = 0.0
    fixed_fee: float = 0.0
    borrow_fee: float = 0.0
    interest_lend: float = 0.0
    interest_borrow: float = 0.0
    funding: float = 0.0
    liquidation_fee: float = 0.0
    own: tuple[str, ...] | None = None
    own_scale: float | None = None
    quote_scale: float | None = None

    def __post_init__(self):
        problems = self._own_problems()
        for name in ("own_scale", "quote_scale"):
            scale = getattr(self, name)
            wrong = isinstance(scale, bool | str | list | tuple | dict)
            if wrong or (isinstance(scale, Real) and not 0.0 <= float(scale) < float("inf")):
                problems.append(f"costs.{name} = {scale!r} is not a number in [0, inf).")
        for field in dataclasses.fields(self)[: -len(OPTIONAL)]:
            name, given = f"costs.{field.name}", getattr(self, field.name)
            # Types that a file or a caller may hold by mistake; a traced array must pass.
            if given is None or isinstance(given, str | list | tuple | dict):
                problems.append(f"{name} = {given!r} is not a number; give one, e.g. 5e-4.")
            if not isinstance(given, Real):
                continue  # under a trace the fields are arrays, of values that were checked before
            value = float(given)
            if field.name in FRACTIONS and not 0.0 <= value < 1.0:
                problems.append(f"{name} = {value} is not a fraction in [0, 1); 5 bp is 5e-4.")
            elif field.name in FRACTIONS and value >= IMPLAUSIBLE.get(field.name, 1.0):
                problems.append(
                    f"{name} = {value} is {value:.0%} of what is traded; give a fraction and not "
                    f"percent: {value}% is {value / 100:g}."
                )
            elif field.name in AMOUNTS and not 0.0 <= value < float("inf"):
                problems.append(f"{name} = {value} is not a number in [0, inf).")
            elif field.name not in FRACTIONS + AMOUNTS:
                # Rates may be below 0: interest on cash has been, and funding changes its sign.
                most = IMPLAUSIBLE.get(field.name, 10.0)
                if not abs(value) < most:
                    problems.append(
                        f"{name} = {value} is not a rate per year within {most:g}; give a fraction "
                        "and not percent: 3% per year is 0.03."
                    )
        refuse(problems)
        if self.own is not None:  # a list, as JSON has it, cannot decide what is compiled
            object.__setattr__(self, "own", tuple(self.own))

    def _own_problems(self) -> list[str]:
        own, scale = self.own, self.own_scale
        if own is None:
            return [] if scale is None else ["costs.own_scale has no effect without costs.own."]
        if not own:
            return ["costs.own = () names no cost; leave it out, or give ['mine:fee']."]
        problems = [f"costs.{problem}" for problem in check_known(self, "own", "costs", ())]
        if len(set(own)) < len(own):
            problems.append(f"costs.own = {list(own)} names a cost twice; name each once.")
        return problems

    @property
    def carries(self) -> bool:
        """Whether holding costs or earns anything at a rate per year."""
        # An account without them compiles a step that knows no time, which is shorter.
        rates = (self.borrow_fee, self.interest_lend, self.interest_borrow, self.funding)
        return any(rate != 0.0 for rate in rates)

    def scaled(self, factor: Any, quotes: bool = False) -> Costs:
        """Return the costs of trading and borrowing times `factor`; income and funding stay.

        Args:
          factor: on each cost.
          quotes: whether the bars quote spreads, which it is on as well.
        """
        kept = ("interest_lend", "funding", *OPTIONAL)
        # In the order of the fields, so that every process compiles the same program.
        names = [field.name for field in dataclasses.fields(self) if field.name not in kept]
        changed = {name: factor * getattr(self, name) for name in names}
        if self.own:
            changed["own_scale"] = factor * (1.0 if self.own_scale is None else self.own_scale)
        if quotes:
            changed["quote_scale"] = factor * (
                1.0 if self.quote_scale is None else self.quote_scale
            )
        return dataclasses.replace(self, **changed)


MOST_ORDERS = 10_000  # per minute: each is remembered


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What trading may never exceed, the same in a backtest and on paper; None sets no limit.

    Limits are on what is ordered: a position that the market moved above its limit is not cut. A
    target that is too large is cut. An order that is denied is not tried again by itself. A loss
    halts: orders are withdrawn and nothing is ordered any more; positions stay as they are.

    >>> Limits(max_drawdown=0.2).max_order is None
    True

    Attributes:
      max_position: of |weight| in one asset, as a fraction of equity.
      max_gross: of the sum of |weight|.
      max_order: of |target - weight held| of one order. It wins over `max_position` and
        `max_gross`: a position above them comes down in several orders.
      max_orders_per_minute: new orders in 60 s of bars' time. Those that make a position smaller
        come first.
      price_collar: no order in an asset whose close is further from the close before, as a
        fraction of it.
      max_daily_loss: halts where equity is lower, by more than this fraction, than at the last
        close of the day before, UTC.
      max_drawdown: halts where equity is lower, by more than this fraction, than its highest close.
    """

    max_position: float | None = None
    max_gross: float | None = None
    max_order: float | None = None
    max_orders_per_minute: int | None = None
    price_collar: float | None = None
    max_daily_loss: float | None = None
    max_drawdown: float | None = None

    def __post_init__(self):
        sizes = ("max_position", "max_gross", "max_order", "price_collar")
        refuse(
            between(self, "(0, inf)", *sizes),
            between(self, "(0, 1)", "max_daily_loss", "max_drawdown"),
            whole(self, 1, "max_orders_per_minute", most=MOST_ORDERS),
        )


WORDS = {
    "fill": ("next_open", "close"),
    "order": ("on_change", "rebalance"),
    "sizing": ("fixed", "volatility", "covariance"),
}
SIZES = ("volatility_target", "volatility_span", "volatility_floor", "size_cap")
CORRELATIONS = ("correlation_span", "shrinkage")  # of sizes by covariance, next to SIZES
# What sets no limit, in a field where None is "not given"; a TOML file and JSON write it as none.
OFF = {
    "max_gross": math.inf,
    "max_net": math.inf,
    "maintenance_margin": 0.0,
    "capital": 0.0,
    "max_participation": math.inf,
    "delist_after": math.inf,
    "stop_loss": math.inf,
    "take_profit": math.inf,
    "trailing_stop": math.inf,
}
# The levels at which a position is closed, and the fraction of a price that each is below.
EXITS = {"stop_loss": 1.0, "take_profit": 10.0, "trailing_stop": 1.0}
BEYOND = ("risk", "delay", *EXITS)  # what no environment has


def usually(value: Any) -> Any:
    """Declare a field whose default is `value`; None in it means that it was not given."""
    return dataclasses.field(default=None, metadata={"usual": value})


class Sizing(NamedTuple):
    """How sizes follow volatility: `min(cap, target / max(volatility, floor))`.

    target, floor: volatility per year. span: of the estimate, in bars. cap: the largest size.
    """

    target: Any = 0.15
    span: Any = 60
    floor: Any = 0.01
    cap: Any = 1.0


class CovarianceSizing(NamedTuple):
    """How sizes follow volatilities and correlations, see `account.risk.correlations_of`.

    alone: by volatility. span: of the correlations, in bars. shrinkage: of them towards 0.
    delist_after: bars missing in a row after which an asset is held no more.
    """

    alone: Sizing
    span: int
    shrinkage: float
    delist_after: float

    @property
    def may_shrink(self) -> bool:
        """Whether correlations may have no inverse: their least eigenvalue is the shrinkage."""
        return self.shrinkage < 1e-3


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class AccountConfig:
    """What an account is given; one record for backtests, sweeps, walk-forwards and paper trading.

    A field that is None was not given. It is then what the run, the environment or the strategy
    has, and else what `DEFAULTS` says; see docs/concepts/account.md. Every function that takes
    `account=` also takes its fields as keywords. A keyword None sets no limit where the field has
    a value for that, such as infinity.

    Attributes:
      costs: what trading and holding cost; of a run those that it trained with, else none.
      fill: "next_open" (default) fills at the open after the decision; "close" at the close that
        the decision saw, which is idealised.
      order: "on_change" trades when the ordered target changes, the default of strategies and runs;
        "rebalance" at each number, the default of weights and functions of bars.
      max_gross, max_net: caps on sum |target| and |sum target|; the whole target is scaled to them.
        Infinity sets none, the default; an environment has a `max_gross` of 1.
      borrow: False (default) cuts all buys by one factor where cash does not pay for them.
      floor: equity, as a fraction of the start's, at or below which the account is bankrupt: 1e-9,
        or the environment's `ruin_floor`.
      maintenance_margin: equity below this fraction of the gross position closes every position; 0
        (default) never calls.
      capital: money that an equity of 1 stands for; 0 (default) where no size in money matters. On
        paper it is the money at the start.
      lot, tick, min_notional: units and prices of fills are multiples, against the trader; orders
        are worth at least so much money. 0 (default) is off.
      max_participation: share of a bar's volume that a fill may take; infinity (default) is any.
      delist_after: bars missing in a row after which an asset is gone; infinity (default) is never.
      delist_haircut: fraction of its last price that is then lost, 0 by default.
      sizing: "fixed" (default); "volatility" multiplies each target by `min(size_cap,
        volatility_target / volatility)` of its asset, see `account.risk`; "covariance" also by what
        the inverse of the assets' shrunk correlation makes of it, see `account.risk.sized_jointly`.
      volatility_target, volatility_floor: per year, 0.15 and 0.01 by default.
      volatility_span: of the estimate, 60 bars by default.
      size_cap: the largest factor, 1 by default.
      correlation_span: of the correlations, 252 bars by default.
      shrinkage: of the correlations towards 0, from 0 to 1 (which is "volatility"); 0.8 by default.
      dead_band: a target is ordered only if it differs by more than this from the last one ordered,
        or with "rebalance" from the weight held; 0 by default. A target of 0 always closes.
      risk: `nca.Limits` on what is ordered, and losses that halt; none by default.
      delay: bars by which every order is late, 0 by default. A run decides as if it were not.
      stop_loss, take_profit: fraction of its entry price by which a position falls or gains until
        it is closed inside the bar; infinity (default) is never. The asset then stays flat until
        its target changes. A level that an order has of its own comes first.
      trailing_stop: likewise, a fall from the best price of earlier bars. Baselines have no level.

    `risk`, `delay` and the three levels are not part of an environment.

    Raises:
      ConfigError: a field is unknown, of another type or out of its range.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[-500:]
      >>> account = nca.AccountConfig(costs=nca.Costs(commission=5e-4), max_gross=0.5, delay=1)
      >>> nca.backtest(bars, nca.rules.buy_and_hold(), account=account).rules.delay
      1
    """

    OFF: ClassVar = OFF

    # Targets alone have no caps, which is parity with vectorbt.
    costs: Costs = usually(Costs())
    fill: str = usually("next_open")
    order: str = usually("rebalance")
    max_gross: float = usually(math.inf)
    max_net: float = usually(math.inf)
    borrow: bool = usually(False)
    floor: float = usually(1e-9)
    maintenance_margin: float = usually(0.0)
    capital: float = usually(0.0)
    lot: float = usually(0.0)
    tick: float = usually(0.0)
    min_notional: float = usually(0.0)
    max_participation: float = usually(math.inf)
    delist_after: float = usually(math.inf)
    delist_haircut: float = usually(0.0)
    sizing: str = usually("fixed")
    volatility_target: float = usually(0.15)
    volatility_span: int = usually(60)
    volatility_floor: float = usually(0.01)
    size_cap: float = usually(1.0)
    correlation_span: int = usually(252)
    shrinkage: float = usually(0.8)
    dead_band: float = usually(0.0)
    risk: Limits = usually(None)
    delay: int = usually(0)
    stop_loss: float = usually(math.inf)
    take_profit: float = usually(math.inf)
    trailing_stop: float = usually(math.inf)

    def __post_init__(self):
        expect("costs", self.costs, Costs | None, "nca.Costs, e.g. nca.Costs(commission=5e-4)")
        expect("capital", self.capital, Real | None, "a number, e.g. 100000.0")
        expect("risk", self.risk, Limits | None, "nca.Limits, e.g. nca.Limits(max_drawdown=0.2)")
        refuse(
            between(self, "(0, 1)", "floor"),
            between(self, "[0, 1]", "shrinkage"),
            *(between(self, f"(0, {below:g})", name) for name, below in EXITS.items()),
            limit_problems(self),
        )
        if self.delay is not None:
            refuse_delay(self.delay)

    @property
    def scale(self) -> Sizing | None:
        """The sizes by volatility; None for others."""
        return self._alone if self.sizing == "volatility" else None

    @property
    def covariance(self) -> CovarianceSizing | None:
        """The sizes by covariance; None for others."""
        if self.sizing != "covariance":
            return None
        return CovarianceSizing(
            self._alone, self.correlation_span, self.shrinkage, self.delist_after
        )

    @property
    def sizes(self) -> Sizing | CovarianceSizing | None:
        """The sizes that an account multiplies targets by; None where it does not."""
        return self.scale or self.covariance

    @property
    def _alone(self) -> Sizing:
        return Sizing(*(getattr(self, name) for name in SIZES))

    @property
    def sized(self) -> bool:
        """Whether a venue refuses or cuts some sizes."""
        return bool(self.lot or self.min_notional or self.max_participation < math.inf)

    @property
    def has_exits(self) -> bool:
        """Whether a position may be closed inside a bar by a level of the account."""
        return any(getattr(self, name) < math.inf for name in EXITS)

    @property
    def without_levels(self) -> AccountConfig:
        """The account of a baseline: the levels belong to what is compared with it."""
        return dataclasses.replace(self, **{name: OFF[name] for name in EXITS})

    @property
    def plain(self) -> bool:
        """Whether no limit, size or floor differs from the defaults; costs, fill and order may."""
        free = ("costs", "fill", "order")
        return all(getattr(self, name) == x for name, x in DEFAULTS.items() if name not in free)

    @property
    def unsized(self) -> AccountConfig:
        """The account of weights that are sized already."""
        return dataclasses.replace(self, sizing="fixed", **dict.fromkeys((*SIZES, *CORRELATIONS)))

    @property
    def in_training(self) -> AccountConfig:
        """What is given of the fields that an environment has."""
        return dataclasses.replace(self, **dict.fromkeys(BEYOND))

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are not None, by name."""
        every = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value for name, value in every if value is not None}

    @property
    def stored(self) -> dict[str, Any]:
        """The fields that are not None, but for costs, as files have them: None where one is off.

        A delay of 0 is left out, and so are what is of sizes by covariance and levels without
        effect: older files have none.
        """
        later = {"costs"} if self.delay else {"costs", "delay"}
        later |= {name for name in EXITS if getattr(self, name) == OFF[name]}
        later |= set() if self.sizing == "covariance" else {*CORRELATIONS}
        kept = {name: x for name, x in self.given.items() if name not in later}
        return {name: None if OFF.get(name) == x else x for name, x in kept.items()}

    @staticmethod
    def idle(given: Any) -> Iterator[tuple[str, str]]:
        """Yield each field without effect given the values `given`, and what it needs."""
        if given.delist_after in (None, math.inf):
            yield "delist_haircut", "delist_after"
        if given.sizing == "fixed":
            for name in SIZES:
                yield name, "sizing='volatility'"
        if given.sizing != "covariance":
            for name in CORRELATIONS:
                yield name, "sizing='covariance'"


def limit_problems(rules: Any) -> Iterator[str]:
    """Yield the problems of the limits of an `EnvConfig` or an `AccountConfig`."""
    for name, words in WORDS.items():
        if getattr(rules, name) is not None:
            yield from one_of(rules, name, words)
    yield from between(rules, "(0, inf)", "max_gross", "max_net", "capital")
    yield from between(rules, "(0, 1]", "maintenance_margin", "max_participation")
    yield from between(rules, "[0, inf)", "lot", "tick", "min_notional", "dead_band")
    yield from between(rules, "(0, inf)", "volatility_target", "volatility_floor", "size_cap")
    yield from between(rules, "[0, 1]", "delist_haircut")
    yield from whole(rules, 1, "delist_after")
    yield from whole(rules, 2, "volatility_span", "correlation_span")


def capital_problems(rules: Any) -> Iterator[str]:
    """Yield one problem if there is no `capital`, and a limit or cost is an amount of money."""
    if rules.capital:
        return
    # Units and prices in money: without a capital an account has neither.
    names = [name for name in ("lot", "tick", "min_notional") if getattr(rules, name)]
    names += ["max_participation"] * (rules.max_participation not in (None, math.inf))
    names += [f"costs.{name}" for name in AMOUNTS if getattr(rules.costs, name)]
    if names:
        yield f"capital=None, but {', '.join(names)} need money; give capital, e.g. 100000."


def refuse_delay(bars: Any) -> None:
    """Refuse a delay that is not a whole number of at least 0.

    Raises:
      ConfigError: it is something else.
    """
    if isinstance(bars, bool) or not isinstance(bars, Integral) or bars < 0:
        raise ConfigError(f"{argument('delay', bars)}: give a whole number of bars, 0 or more.")


# Defaults of fields for targets and strategies; an environment has those of `EnvConfig`.
DEFAULTS = {f.name: f.metadata["usual"] for f in dataclasses.fields(AccountConfig) if f.metadata}


def gather_account(
    account: AccountConfig | Costs | None, settings: Mapping[str, Any], others: Iterable[str] = ()
) -> AccountConfig:
    """Return what a caller gives an account, as one record or by the names of its fields.

    Args:
      account: the record, or only its costs; None where it is not given.
      settings: keywords of the call. None sets no limit where a field has a value for that.
      others: what else the caller takes by name, for the message about an unknown name.

    Raises:
      ConfigError: a name is unknown, a value is not valid, or a record is given with keywords.
    """
    fields = [field.name for field in dataclasses.fields(AccountConfig)]
    for name in settings.keys() - set(fields):
        if name in Costs.__dataclass_fields__:
            raise ConfigError(f"{name} is one of the costs; give costs=nca.Costs({name}=...).")
        known = (*others, *fields)
        raise ConfigError(
            f"unknown {'setting' if others else 'limit'} {name!r}; {nearest(name, known)}There are "
            f"{', '.join(known)}."
        )
    given = {name: OFF.get(name) if x is None else x for name, x in settings.items()}
    given = {name: x for name, x in given.items() if x is not None}
    if isinstance(account, Costs):
        costs, account = account, AccountConfig(costs=account) if "costs" in given else None
        given["costs"] = costs
    return take_settings("account", AccountConfig, account, given)


def complete_account(
    given: AccountConfig, subject: Any = None, capital: float | None = None
) -> AccountConfig:
    """Return an account in which every field but `risk` has a value.

    Args:
      given: what the caller gives.
      subject: what trades: a run, a strategy, an environment's config, weights, a function of bars.
      capital: money, where lots and fees need it and none is given.

    Raises:
      ConfigError: fields that do not go together, a field without effect, sizes for a blend of
        runs that have their own, or runs of a blend that were trained with different costs and none
        are given.
    """
    # Asked of the class: a table of weights may have a column of that name.
    has = type(subject)
    own = subject.account.given if hasattr(has, "account") else {}
    runs = subject.runs if hasattr(has, "runs") and given.costs is None else ()
    costs = [run.env_config.costs for run in runs]
    if any(each != costs[0] for each in costs):
        raise ConfigError(
            f"{subject.name}: its runs were trained with other costs; an account has one set, so "
            "give costs."
        )
    own |= {"costs": costs[0]} if costs else {}
    found = AccountConfig(**DEFAULTS | own | given.given)
    # What the caller's own fields switch off is as if it had never been given.
    idle = (name for name, _ in found.idle(found) if getattr(given, name) is None)
    found = dataclasses.replace(found, **{name: DEFAULTS[name] for name in idle})
    if capital is not None and any(capital_problems(found)):
        found = dataclasses.replace(found, capital=float(capital))
    refuse(capital_problems(found), without_effect(found, given.given, DEFAULTS))
    sized = [run for run in getattr(subject, "runs", ()) if run.env_config.sizing != "fixed"]
    if found.sizing != "fixed" and sized and hasattr(has, "runs"):
        refuse(
            f"sizing={found.sizing!r}: the targets of {subject.name} have sizes already, those of "
            f"its run {sized[0].name}; leave it out, or blend agents of sizing='fixed'."
        )
    return found


PLAIN = complete_account(AccountConfig(order="on_change"))  # no costs, no limits
