"""Tiny markets that show which part of a learner is broken.

The next move of their bars is known, so the earnings of every rule have a closed form. A learner
that fails one of them, and none before it, has the fault that `Probe.tells` names.

After "Debugging RL, without the agonizing pain" (A. Jones, 2021), in terms of bars and orders.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.config import EnvConfig
from nca_trader.envs.trading import TradingEnv
from nca_trader.types import SECONDS_PER_YEAR, Bars, Costs

MOVE = 0.01  # g, what a market that moves earns in a bar
BAR = np.timedelta64(2, "D")  # long enough for a rate per year that `Costs` takes
FEATURES = ("return_1",)  # positive after a rise, negative after a fall, 0 after neither

Rule = Callable[[Array, Array], Array]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """A market that repeats itself, and the best rule in it.

    Attributes:
      name: as `make` knows it. tells: what is broken in a learner that fails here.
      bars, config: what a `TradingEnv` takes.
      rewards: `[P]` of the best rule once it holds what it wants; entry k is that of a step from
        a row t with t mod P = k.
      random: mean reward of a step under uniformly random actions.
      rule, mirror: `rule(features [A, F], ordered [A]) -> [A]` the best action and its opposite,
        given the newest bar's features and the last ordered weights; None where none matters.
      least_discount: the discount above which `rule` is best, where that is not 0.
    """

    name: str
    tells: str
    bars: Bars
    config: EnvConfig
    rewards: tuple[float, ...]
    random: float
    rule: Rule | None = None
    mirror: Rule | None = None
    least_discount: float = 0.0

    @property
    def optimum(self) -> float:
        """The best mean reward of a step."""
        return math.fsum(self.rewards) / len(self.rewards)

    def value(self, discount: float) -> np.ndarray:
        """Return `[P]` the discounted sum of all later rewards of the best rule, by phase.

        `V_k = sum_{j < P} discount^j r_{(k + j) mod P} / (1 - discount^P)`.
        """
        rewards, period = np.array(self.rewards), len(self.rewards)
        powers = discount ** np.arange(period)
        ahead = np.stack([np.roll(rewards, -k) for k in range(period)])
        return ahead @ powers / (1.0 - discount**period)

    def env(self) -> TradingEnv:
        """Return the environment of this probe."""
        return TradingEnv(self.bars, self.config)


def make(name: str, num_bars: int = 512) -> Probe:
    """Return the probe called `name`, one of `PROBES`; each needs all that earlier ones need."""
    return PROBES[name](num_bars)


def constant(num_bars: int) -> Probe:
    """Make a market in which cash lends at what the asset earns: each step pays log(1 + g).

    Orders fill at the close: at the next open, cash would earn its interest first, and the
    position it buys would earn the bar's return on top.
    """
    # The rate per year that pays g in one bar.
    lend = MOVE * SECONDS_PER_YEAR / (BAR / np.timedelta64(1, "s"))
    return Probe(
        name="constant",
        tells="the value: its target, its loss or its learning rate",
        bars=_bars("CONSTANT", [[math.log1p(MOVE)]], num_bars),
        config=_config(short=False, fill="close", costs=Costs(interest_lend=lend)),
        rewards=(math.log1p(MOVE),),
        random=math.log1p(MOVE),
    )


def illiquid(num_bars: int) -> Probe:
    """Make a market in which nothing trades: an episode keeps its first weight, 0 or 1.

    The price rises and falls in turn. `rewards` and `value` are of weight 1; those of 0 are 0.
    """
    rise = math.log1p(MOVE)
    bars = _bars("ILLIQUID", [[-rise], [rise]], num_bars)
    return Probe(
        name="illiquid",
        tells="how the value reads an observation: the features, or the account's weight",
        # A share of no volume is nothing: orders wait without end, and actions have no effect.
        bars=dataclasses.replace(bars, volume=np.zeros_like(bars.volume)),
        config=_config(short=False, random_start=True, capital=1e6, max_participation=1.0),
        rewards=(rise, -rise),
        random=0.0,
    )


def delayed(num_bars: int) -> Probe:
    """Make a market that rises by g in one bar of three, where a trade costs 1.5 g.

    Entering just before a rise is worth `g / (1 - discount^3) - 1.5 g`, which is above 0 where the
    discount is above `(1/3)^(1/3)`; a learner that bootstraps too little never enters.
    """
    cost = 1.5 * MOVE
    return Probe(
        name="delayed",
        tells="the discount: how value is passed back through time",
        bars=_bars("DELAYED", [[0.0], [0.0], [MOVE]], num_bars),
        config=_config(short=False, reward="pnl", costs=Costs(commission=cost)),
        rewards=(0.0, MOVE, 0.0),
        # Long half of the time in one bar of three; the order changes in half of the steps.
        random=MOVE / 6.0 - cost / 2.0,
        rule=lambda features, ordered: jnp.ones(1, jnp.int32),
        mirror=lambda features, ordered: jnp.int32(ordered == 0.0),
        least_discount=(1.0 / 3.0) ** (1.0 / 3.0),
    )


def rising(num_bars: int) -> Probe:
    """Make a market that rises by g in every bar: long is best, whatever is seen."""
    rise, fall = math.log1p(MOVE), math.log1p(-MOVE)
    return Probe(
        name="rising",
        tells="the policy's gradient: its sign, or the advantages",
        bars=_bars("RISING", [[rise]], num_bars),
        config=_config(),
        rewards=(rise,),
        random=(rise + fall) / 3.0,  # long, short and flat are drawn equally often
        rule=lambda features, ordered: jnp.full(1, 2, jnp.int32),
        mirror=lambda features, ordered: jnp.zeros(1, jnp.int32),
    )


def alternating(num_bars: int) -> Probe:
    """Make a market that rises by g and falls back: short after a rise and long after a fall."""
    fall = MOVE / (1.0 + MOVE)  # the simple return that undoes a rise by g
    rise = math.log1p(MOVE)
    shorts = math.log1p(-MOVE) + math.log1p(fall)
    return Probe(
        name="alternating",
        tells="how the policy reads an observation, or which step an advantage belongs to",
        bars=_bars("ALTERNATING", [[-rise], [rise]], num_bars),
        config=_config(),
        rewards=(math.log1p(MOVE), math.log1p(fall)),
        random=(rise - rise + shorts) / 6.0,
        rule=_against,
        mirror=lambda features, ordered: 2 - _against(features, ordered),
    )


def costly(num_bars: int) -> Probe:
    """Make a market that swings by g at a cost of g per trade, so that no swing pays."""
    return Probe(
        name="costly",
        tells="the costs: that they are charged, or that the policy can stop exploring",
        bars=_bars("COSTLY", [[-MOVE], [MOVE]], num_bars),
        config=_config(reward="pnl", costs=Costs(commission=MOVE)),
        rewards=(0.0, 0.0),
        # Two draws of -1, 0, 1 are 8/9 apart on average, and all of that is traded at a cost of g.
        random=-MOVE * 8.0 / 9.0,
        rule=lambda features, ordered: jnp.ones(1, jnp.int32),
        mirror=_against,
    )


def one_moves(num_bars: int) -> Probe:
    """Make a market in which one asset of two swings by g; a trade costs g / 10.

    Half of equity is held in each. A change from long to short costs g / 10 and earns g / 2.
    """
    cost = MOVE / 10.0
    still = jnp.array([0, 1], jnp.int32)

    def rule(features: Array, ordered: Array) -> Array:
        return jnp.where(still == 1, 1, _against(features, ordered))

    return Probe(
        name="one_moves",
        tells="credit by asset: one asset's advantage reaches the other's action",
        bars=_bars("ONE", [[-MOVE, 0.0], [MOVE, 0.0]], num_bars),
        config=_config(reward="pnl", costs=Costs(commission=cost)),
        rewards=(MOVE / 2.0 - cost,) * 2,
        random=-2.0 * cost * 0.5 * 8.0 / 9.0,
        rule=rule,
        mirror=lambda features, ordered: 2 - rule(features, ordered),
    )


PROBES: dict[str, Callable[[int], Probe]] = {
    build.__name__: build
    for build in (constant, illiquid, delayed, rising, alternating, costly, one_moves)
}


def _against(features: Array, ordered: Array) -> Array:
    """Short after a rise, long after a fall, flat after neither."""
    return 1 - jnp.sign(features[:, 0]).astype(jnp.int32)


def _config(**changes: object) -> EnvConfig:
    """Return a config that rebalances every bar: a reward depends on this order and the last."""
    given = {"features": FEATURES, "order": "rebalance", "random_start": False, **changes}
    return EnvConfig(**given)  # pyright: ignore[reportArgumentType]


def _bars(name: str, cycle: list[list[float]], num_bars: int) -> Bars:
    """Return bars with the log-returns `cycle` `[P, A]` over and over; an open is the close before.

    The return of row t is entry t mod P. A step from row t earns the entry after that.
    """
    moves = np.array(cycle)[np.arange(num_bars) % len(cycle)]
    level = np.concatenate([np.zeros((1, moves.shape[1])), np.cumsum(moves, axis=0)])
    price = 100.0 * np.exp(level)
    before, after = price[:-1], price[1:]
    return Bars(
        time=np.datetime64("2000-01-01", "ns") + np.arange(num_bars) * BAR,
        symbols=tuple(f"{name}{i}" for i in range(moves.shape[1]))
        if len(cycle[0]) > 1
        else (name,),
        open=before,
        high=np.maximum(before, after),
        low=np.minimum(before, after),
        close=after,
        volume=np.ones_like(after),
        present=np.ones(after.shape, bool),
        source=f"probe {name.lower()}",
        note="A market made to test learners.",
    )
