"""How far two sets of parameters of one agent decide alike: bar by bar, and in what is earned."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.agents.heads import account_features, best_target
from nca_trader.agents.policy import Params, Policy
from nca_trader.data.synthetic import Task
from nca_trader.envs.account.state import Account, Legs, Rules, legs_of, open_account, rules_of
from nca_trader.envs.account.step import on_bar, place
from nca_trader.envs.market import features_of, observed_states
from nca_trader.envs.rewards import begun, remembered, up_to_first
from nca_trader.errors import BarError
from nca_trader.evaluate.backtest import check_symbols, encode
from nca_trader.numerics import float64_on_cpu
from nca_trader.runs.manifest import Run
from nca_trader.types import Bars, Costs

NEAR = 0.01  # of the range of weights: continuous orders that are no further apart agree


class Agreement(NamedTuple):
    """share: of `decisions` (bars times assets) that agree. equity: at the end, of 1 at the start.

    A decision agrees if the most probable action is the same, both being shown the account of the
    first agent. equity: what each of the two earns with an account of its own.
    """

    share: float
    decisions: int
    equity: tuple[float, float]

    @property
    def difference(self) -> float:
        """The second agent's final equity, relative to the first's."""
        return self.equity[1] / self.equity[0] - 1.0


def agreement(source: Bars | Task, run: Run, params: Params, other: Params) -> Agreement:
    """Runs the agent of `run` over all bars with `params` and with `other`, at the run's costs.

    Raises:
      BarError: bars of other symbols, or too few for a decision.
    """
    bars = source.bars if isinstance(source, Task) else source
    check_symbols(run, bars)
    policy, rules = run.policy, rules_of(run.env_config)
    if len(bars) <= policy.first_decision:
        raise BarError(
            f"{bars.source or 'bars'}: {len(bars)} bars, but the agent decides from bar "
            f"{policy.first_decision + 1} on; give more."
        )
    features = features_of(bars, run.env_config, observed_states(source, run.env_config)[1])
    cells = [encode(policy, p, features, bars.present) for p in (params, other)]
    ready = np.arange(len(bars)) >= policy.first_decision
    with float64_on_cpu():
        legs = legs_of(bars, run.env_config.costs, rules)
        common = (policy, run.env_config.costs, rules, legs, ready)
        same, one = _scan(*common, (params, other), tuple(cells))
        _, two = _scan(*common, (other, params), tuple(reversed(cells)))
        same = np.asarray(same)[ready]
        return Agreement(float(same.mean()), same.size, (float(one), float(two)))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _scan(
    policy: Policy,
    costs: Costs,
    rules: Rules,
    legs: Legs,
    ready: Array,
    params: tuple[Params, Params],
    cells: tuple[Array, Array],
) -> tuple[Array, Array]:
    """`[N, A]` whether the two agree, and the final equity of the first, which acts."""
    spec, chosen = policy.spec, policy.distribution

    def order(logits: Array) -> Array:
        return chosen.order(spec, chosen.mode(logits))

    def step(account: Account, xs: tuple[Legs, Array, Array, tuple[Array, Array]]):
        legs_t, ready_t, first_t, cells_t = xs
        account, _ = on_bar(account, legs_t, costs, rules)
        account = remembered(spec, account, first_t)
        seen = account_features(spec, account)
        own, others = (policy.act(p, c, seen)[0] for p, c in zip(params, cells_t, strict=True))
        target = jnp.where(ready_t, best_target(spec, own, account.ordered), jnp.nan)
        account, _ = place(account, target, legs_t.at_close, costs, rules)
        apart = jnp.abs(order(own) - order(others))
        low, high = spec.bounds
        limit = NEAR * (high - low) if spec.actions == "weights" else 0.5
        return account, apart <= limit

    account = begun(spec, open_account(jnp.zeros(spec.num_assets, jnp.float64)))
    account, same = jax.lax.scan(step, account, (legs, ready, up_to_first(ready), cells))
    return same, jnp.exp(account.log_equity + account.log_equity_low)
