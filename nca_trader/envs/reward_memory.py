"""What a reward remembers of an account, and what a policy is shown of that.

Two rewards pay a step by what came before it: "drawdown" by how far equity was below its peak,
"differential_sharpe" by moving moments of its returns. A policy that is not shown these cannot
know what an action will be paid. The account carries them, so training, backtests and paper
trading keep one memory with one function, `remembered`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from nca_trader.envs.account.state import Account
from nca_trader.types import EnvSpec, Tensor

VARIANCE_FLOOR = 0.1  # of the training span's variance
LEAST_VARIANCE = 1e-10  # of prices that stand still


class Below(NamedTuple):
    """Of "drawdown". depth: `[]` log of the peak of equity over equity."""

    depth: Tensor

    def after(self, spec: EnvSpec, log_return: Tensor) -> Below:
        """The same after a step whose log-return is `log_return` `[]`."""
        return Below(jnp.maximum(self.depth - log_return, 0.0))


class Moments(NamedTuple):
    """Of "differential_sharpe": moving means of the log-return and of its square, `[]` each."""

    mean: Tensor
    square: Tensor

    def after(self, spec: EnvSpec, log_return: Tensor) -> Moments:
        """The same after a step whose log-return is `log_return` `[]`."""
        return Moments(
            self.mean + spec.decay * (log_return - self.mean),
            self.square + spec.decay * (log_return**2 - self.square),
        )

    def variance(self, spec: EnvSpec) -> Array:
        """`[]` of the log-return, at least `VARIANCE_FLOOR` of the usual one."""
        return jnp.maximum(self.square - self.mean**2, VARIANCE_FLOOR * usual_variance(spec))


class Memory(NamedTuple):
    """What an account's reward remembers at the close of a bar.

    log_equity, log_equity_low: `[]` pair, of the account at that close. kept: what the reward
    made of the returns up to it.
    """

    log_equity: Tensor
    log_equity_low: Tensor
    kept: Below | Moments


def usual_variance(spec: EnvSpec) -> float:
    """`spec.variance`, or what takes its place where prices stand still."""
    return max(spec.variance, LEAST_VARIANCE)


def begun(spec: EnvSpec, account: Account) -> Account:
    """The account with the memory of an episode that begins at this close."""
    if not spec.memory:
        return account
    zero = jnp.zeros_like(account.log_equity)
    kept = {
        "drawdown": Below(zero),
        "differential_sharpe": Moments(zero, zero + usual_variance(spec)),
    }[spec.memory]
    return account._replace(memory=Memory(account.log_equity, account.log_equity_low, kept))


def remembered(spec: EnvSpec, account: Account, first: ArrayLike = False) -> Account:
    """The account with its memory brought up to this close; call it once a bar.

    The return that is added is the one since the last call, what a fill at that close cost
    included.

    Args:
      first: `[]` bool, True up to the first close that is decided at: the memory begins there.
    """
    if not spec.memory:
        return account
    before = account.memory
    grown = account.log_equity - before.log_equity
    grown = grown + (account.log_equity_low - before.log_equity_low)
    kept = before.kept.after(spec, grown)
    now = account._replace(memory=Memory(account.log_equity, account.log_equity_low, kept))
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), begun(spec, account), now)


def up_to_first(ready: Array) -> Array:
    """`[N]` bool, the bars up to the first that is `ready` `[N]` bool, which is one of them."""
    return jnp.cumsum(ready) <= ready


def num_shown(spec: EnvSpec) -> int:
    """M, how many numbers a policy is shown of the memory."""
    return {"": 0, "drawdown": 1, "differential_sharpe": 2}[spec.memory]


def shown(spec: EnvSpec, account: Account) -> tuple[Array, ...]:
    """M numbers `[]` of order one, of which the memory follows.

    Of "drawdown", `log(1 + depth)` with the depth in deviations of a bar's return. Of
    "differential_sharpe", the moving mean in moving deviations, over what that of pure noise
    would be; and half the log of the moving variance over the usual one.
    """
    if not spec.memory:
        return ()
    kept = account.memory.kept
    if isinstance(kept, Below):
        return (jnp.log1p(kept.depth / math.sqrt(usual_variance(spec))),)
    variance = kept.variance(spec)
    noise = math.sqrt(0.5 * spec.decay)
    return kept.mean / jnp.sqrt(variance) / noise, 0.5 * jnp.log(variance / usual_variance(spec))
