"""Rewards: the account's log-return, or another quantity to train an agent on.

Every reward is a pure function of one step. Two of them also depend on earlier steps: for these
the account keeps a `RewardMemory`, which the policy observes (`memory_features`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from nca_trader.config import AccountConfig, EnvConfig
from nca_trader.config.extensions import uncalled
from nca_trader.config.ranges import describe
from nca_trader.config.registry import Registry
from nca_trader.envs.account.costs import examine, expect_shapes
from nca_trader.envs.account.state import Account, BarReturns, open_account
from nca_trader.errors import ConfigError
from nca_trader.types import EXTRAS, Bars, Costs, EnvSpec, Tensor

# A fraction of the training span's variance. Without this floor, the first returns of an account
# that was flat would outweigh all others.
VARIANCE_FLOOR = 0.1
LEAST_VARIANCE = 1e-10  # where prices do not move, so that nothing is divided by 0


class Below(NamedTuple):
    """Memory of "drawdown". depth: `[]` log of the peak of equity over equity."""

    depth: Tensor

    @classmethod
    def begin(cls, spec: EnvSpec, zero: Tensor) -> Below:
        """Return the memory of an episode that begins; `zero` is `[]`."""
        return cls(zero)

    def shown(self, spec: EnvSpec) -> tuple[Array, ...]:
        """Return `log(1 + depth)` with the depth in standard deviations of a bar's return."""
        return (jnp.log1p(self.depth / math.sqrt(usual_variance(spec))),)

    def after(self, spec: EnvSpec, log_return: Tensor) -> Below:
        """Return the memory after a step of log-return `log_return` `[]`."""
        # Equity above its peak is a new peak, and the depth is then 0.
        return self._replace(depth=jnp.maximum(self.depth - log_return, 0.0))


class SharpeMemory(NamedTuple):
    """Memory of "differential_sharpe": moving means of log-return and its square, `[]` each."""

    mean: Tensor
    square: Tensor

    @classmethod
    def begin(cls, spec: EnvSpec, zero: Tensor) -> SharpeMemory:
        """Return the memory of an episode that begins; `zero` is `[]`."""
        return cls(zero, zero + usual_variance(spec))

    def shown(self, spec: EnvSpec) -> tuple[Array, ...]:
        """Return the moving mean over the moving deviation, and half the log of the variance.

        The first is relative to that of pure noise, the second to the usual variance.
        """
        variance = self.variance(spec)
        noise = math.sqrt(0.5 * spec.decay)
        relative = 0.5 * jnp.log(variance / usual_variance(spec))
        return jnp.asarray(self.mean) / jnp.sqrt(variance) / noise, relative

    def after(self, spec: EnvSpec, log_return: Tensor) -> SharpeMemory:
        """Return the memory after a step of log-return `log_return` `[]`."""
        return self._replace(
            mean=self.mean + spec.decay * (log_return - self.mean),
            square=self.square + spec.decay * (log_return**2 - self.square),
        )

    def variance(self, spec: EnvSpec) -> Array:
        """Return `[]` variance of the log-return, at least `VARIANCE_FLOOR` of the usual one."""
        # The floor also holds where rounding makes the difference of the moments negative.
        return jnp.maximum(self.square - self.mean**2, VARIANCE_FLOOR * usual_variance(spec))


class RewardMemory(NamedTuple):
    """The memory of an account's reward at the close of a bar.

    log_equity, log_equity_low: `[]` pair, of the account at that close. kept: statistics of the
    returns up to it.
    """

    log_equity: Tensor
    log_equity_low: Tensor
    kept: Any


def usual_variance(spec: EnvSpec) -> float:
    """Return `spec.variance`, at least `LEAST_VARIANCE`."""
    return max(spec.variance, LEAST_VARIANCE)


def begin_account(spec: EnvSpec, account: Account) -> Account:
    """Return the account as of an episode that begins at this close: its reward's memory begins.

    With a base rule its target is 0 until the account sees a bar.
    """
    if spec.base != "none":
        account = account._replace(base=jnp.zeros_like(account.weight))
    return _remembering(spec, account) if spec.memory else account


def _remembering(spec: EnvSpec, account: Account) -> Account:
    zero = jnp.zeros_like(account.log_equity)
    kept = _memory(spec).begin(spec, zero)
    return account._replace(memory=RewardMemory(account.log_equity, account.log_equity_low, kept))


def remember(spec: EnvSpec, account: Account, first: ArrayLike = False) -> Account:
    """Return the account with its memory updated to this close; call it once per bar.

    It adds the return since the last call, including the cost of a fill at that close.

    Args:
      spec: of the environment.
      account: at this close, with the memory of the last call.
      first: `[]` bool, True up to the first close with a decision: the memory begins there.
    """
    if not spec.memory:
        return account
    before = account.memory
    grown = account.log_equity - before.log_equity
    # The low parts hold the digits that the high parts round away, as in `log_return` of accounts.
    grown = grown + (account.log_equity_low - before.log_equity_low)
    kept = before.kept.after(spec, grown)
    now = account._replace(memory=RewardMemory(account.log_equity, account.log_equity_low, kept))
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), _remembering(spec, account), now)


def up_to_first(ready: Array) -> Array:
    """Return `[N]` bool, the bars up to and including the first that is `ready` `[N]` bool."""
    return jnp.cumsum(ready) <= ready


def num_shown(spec: EnvSpec) -> int:
    """Return M, the number of values of the memory that a policy observes."""
    return len(_memory(spec)._fields) if spec.memory else 0


def _memory(spec: EnvSpec) -> Any:
    """Return the class of the memory of the environment's reward."""
    return SCHEMES[spec.memory].memory


def memory_features(spec: EnvSpec, account: Account) -> tuple[Array, ...]:
    """Return the memory as M numbers `[]` of order one, which determine it."""
    return account.memory.kept.shown(spec) if spec.memory else ()


class Step(NamedTuple):
    """One step of one account.

    log_return: `[]` of its equity. before, after: `[A]` ordered weights before and after the
    action, scaled to `max_gross` and `max_net`. legs: the bar of the step. costs: of trading.
    cost_scale: the factor on them, which also applies to `quadratic_cost`. kept:
    `RewardMemory.kept` before the step; None without one.
    """

    log_return: Array
    before: Array
    after: Array
    legs: BarReturns
    costs: Costs
    cost_scale: Array | float = 1.0
    kept: Any = None


def variance_in(bars: Bars, size: float) -> float:
    """Return the variance of a bar's return of weights `size` in all assets, as if independent."""
    with np.errstate(invalid="ignore", divide="ignore"):
        returns = np.nan_to_num(bars.close[1:] / bars.close[:-1] - 1.0, posinf=0.0)
    return float(size**2 * returns.var(axis=0).sum())


def check_paid(config: EnvConfig, bars: Bars, size: float) -> None:
    """Refuse bars and sizes for which the reward "pnl" differs from what an account earns.

    Args:
      config: of the environment.
      bars: to trade.
      size: the largest weight that can be ordered in an asset.

    Raises:
      ConfigError: one line with all reasons.
    """
    if config.reward != "pnl":
        return
    given = [
        name for name in EXTRAS if getattr(bars, name) is not None and getattr(bars, name).any()
    ]
    problems = [f"it does not pay the bars' {', '.join(given)}"] if given else []
    if not bars.present.all():
        row, column = np.argwhere(~bars.present)[0]
        problems.append(
            f"orders do not fill in missing bars ({bars.symbols[column]} at {bars.time[row]})"
        )
    gross = size * bars.num_assets
    # In floats 3 * 0.1 is above 0.3; a size must not be refused for its last bit.
    if not config.borrow and min(gross, config.max_gross or gross) > 1 + 1e-9:
        problems.append(f"positions up to {gross:g} in all are cut by cash (borrow=False)")
    if problems:
        raise ConfigError(
            f"{bars.source or 'bars'}: reward='pnl' pays positions of constant size, but "
            f"{'; '.join(problems)}; change this, or choose reward='log_return'."
        )


def reward_of(config: EnvConfig, spec: EnvSpec, step: Step) -> Array:
    """Return the reward `[]` of a step."""
    return SCHEMES[config.reward].pay(config, spec, step)


def log_return(config: EnvConfig, spec: EnvSpec, step: Step) -> Array:
    """Return the log-return of equity."""
    return step.log_return


def pnl(config: EnvConfig, spec: EnvSpec, step: Step) -> Array:
    """`sum_i a_i r_i - c |da_i| - q/2 da_i^2 - k/2 a_i^2`, of positions a of constant size.

    The position before the fill earns the return up to it, the position after it the rest:
    `b overnight + a intraday` with fills at the next open; with fills at the close, a earns both.
    Equity does not compound. k and q are zero except in Garleanu-Pedersen markets. `check_paid`
    refuses bars, and `EnvConfig` settings, with which an account would earn something else.
    """
    legs, costs = step.legs, step.costs
    rise = jnp.log if config.pnl_returns == "log" else lambda gross: gross - 1.0
    overnight, intraday = 1.0 + legs.overnight, 1.0 + legs.intraday
    if config.fill == "close":
        earned = step.after * rise(overnight * intraday)
    else:
        earned = step.before * rise(overnight) + step.after * rise(intraday)
    traded = step.after - step.before
    rate = costs.commission + costs.slippage + costs.half_spread
    pay = earned - rate * jnp.abs(traded)
    # The other costs are scaled already; q is of the config and not of `Costs`.
    pay = pay - 0.5 * step.cost_scale * config.quadratic_cost * traded**2
    return (pay - 0.5 * config.risk_aversion * step.after**2).sum()


def differential_sharpe(config: EnvConfig, spec: EnvSpec, step: Step) -> Array:
    """Return the change of a moving Sharpe ratio by the step, to first order.

    `D = (B dA - A dB / 2) / (B - A^2)^(3/2)` with `dA = R - A`, `dB = R^2 - B` and moving moments
    A, B. They start at 0 and at the training span's variance, and `B - A^2` is at least
    `VARIANCE_FLOOR` of that.

    Source: Moody and Saffell, Learning to Trade via Direct
    Reinforcement (2001), equation 14, which starts both at 0 and has no floor.
    """
    mean, variance = step.kept.mean, step.kept.variance(spec)
    # B is that of the floored variance, so that numerator and denominator agree.
    square = variance + mean**2
    slope = square * (step.log_return - mean) - 0.5 * mean * (step.log_return**2 - square)
    return slope / variance**1.5


def drawdown(config: EnvConfig, spec: EnvSpec, step: Step) -> Array:
    """Return the log-return less `drawdown_penalty` times the depth of log-equity below its peak.

    Its mean is the mean log-return less the penalty times the pain index in logs.
    """
    below = step.kept.after(spec, step.log_return).depth
    return step.log_return - config.drawdown_penalty * below


def mean_variance(config: EnvConfig, spec: EnvSpec, step: Step) -> Array:
    """`R - k/2 R^2` of the simple return R of equity.

    Source: Ritter, Machine Learning for Trading (2017), for a mean that is small per bar.
    """
    # In float32 `exp(x) - 1` would lose most digits of a bar's small return.
    simple = jnp.expm1(step.log_return)
    return simple - 0.5 * config.risk_aversion * simple**2


def crra(config: EnvConfig, spec: EnvSpec, step: Step) -> Array:
    """`(exp((1 - g) R) - 1) / (1 - g)` of the log-return R, which is R itself at g = 1.

    Its mean is maximal where the certainty equivalent under constant relative risk aversion g is.
    """
    power = 1.0 - config.risk_aversion  # static, so that g = 1 is another program
    return step.log_return if power == 0.0 else jnp.expm1(power * step.log_return) / power


class Reward(NamedTuple):
    """A reward of an environment.

    Attributes:
      pay: `(config, spec, step) -> []`, a pure function of one step; it reads the memory before
        that step as `step.kept`.
      memory: of the account, for a reward that depends on earlier steps: a NamedTuple of `[]`
        numbers with `begin(spec, zero)`, `after(spec, log_return)` and `shown(spec)`, as `Below`.
        The policy observes as many numbers as it has fields.
      unit: the size of a reward where that does not follow the bars' volatility; None where it is
        of the size of a bar's return. The learner scales rewards by it.

    Example:
      >>> import nca_trader as nca
      >>> double = nca.Reward(lambda config, spec, step: 2.0 * step.log_return)
      >>> double.memory is None
      True
    """

    pay: Callable[[EnvConfig, EnvSpec, Step], Array]
    memory: Any = None
    unit: float | None = None


def own_reward(value: Any, name: str) -> Reward:
    """Return the reward that your own code gives: a `Reward`, or the function that pays.

    Raises:
      ConfigError: it is neither, or its memory lacks a part.
    """
    if callable(value) and not isinstance(value, Reward | type):
        pay: Any = value
        return Reward(pay)
    if not isinstance(value, Reward):
        raise ConfigError(
            f"{name}: is {describe(value)}; give a function (config, spec, step), or a Reward"
            f"{uncalled(value)}."
        )
    parts = ("_fields", "begin", "after", "shown")
    lacks = [part for part in parts if not hasattr(value.memory, part)]
    if value.memory is not None and lacks:
        raise ConfigError(
            f"{name}: its memory has no {', '.join(lacks)}; give a NamedTuple with begin, after "
            "and shown."
        )
    return value


def check_own(config: EnvConfig, spec: EnvSpec, rules: AccountConfig, num_bars: int) -> None:
    """Compute your own reward of one step, in shapes alone.

    Raises:
      ConfigError: it raises, is not pure (see `examine`), or does not return one number.
    """
    if config.reward in SCHEMES.builtin:
        return

    def paid(weight: Array) -> Array:
        account = begin_account(spec, open_account(weight, rules))
        legs = BarReturns(weight, weight, jnp.ones(weight.shape, bool))
        kept: Any = account.memory.kept if spec.memory else None
        step = Step(weight.sum(), weight, weight, legs, rules.costs, 1.0, kept)
        if spec.memory:
            numbers = (weight.sum(),) * num_shown(spec)
            name, like = f"{where}: {_memory(spec).__name__}", _memory(spec)._make(numbers)
            expect_shapes(f"{name}.begin", kept, like)
            expect_shapes(f"{name}.after", kept.after(spec, numbers[0]), like)
            expect_shapes(f"{name}.shown", kept.shown(spec), numbers)
        return reward_of(config, spec, step)

    where, weight = f"reward {config.reward}", jax.ShapeDtypeStruct((spec.num_assets,), jnp.float32)
    examine(where, paid, weight, shapes=((),), returns="one number", rows=num_bars)


# By the names that `EnvConfig.reward` takes.
SCHEMES: Registry[Reward] = Registry(
    "rewards",
    {reward.__name__: Reward(reward) for reward in (log_return, pnl, mean_variance, crra)}
    | {
        "differential_sharpe": Reward(differential_sharpe, SharpeMemory, unit=1.0),
        "drawdown": Reward(drawdown, Below),
    },
    own_reward,
)
