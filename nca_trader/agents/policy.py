"""Policies as pure functions over plain dicts of arrays: the border between flax and the rest."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import Array

from nca_trader.agents.heads import Distribution, Head, account_features, distribution
from nca_trader.agents.nca import NCA, receptive_field
from nca_trader.envs.account import Account
from nca_trader.errors import ConfigError
from nca_trader.presets import AgentConfig
from nca_trader.types import EnvSpec

Params = dict[str, Any]


class Policy(NamedTuple):
    """A policy split into functions; `params` is a nested dict of float32 arrays.

    init: `(key) -> params`.
    encode: `(params, x [B, T, A, F], present [B, T, A]) -> cells [B, T, A, C]`.
    act: `(params, cells [..., A, C], account_features [..., A, 3]) -> (logits [..., A, n],
      value [...])`.
    receptive_field: bars that a decision sees, its own included.
    spec: the environment that it was made for.
    """

    init: Callable[[Array], Params]
    encode: Callable[[Params, Array, Array], Array]
    act: Callable[[Params, Array, Array], tuple[Array, Array]]
    receptive_field: int
    spec: EnvSpec

    @property
    def distribution(self) -> Distribution:
        """What the logits mean."""
        return distribution(self.spec)

    @property
    def first_decision(self) -> int:
        """Row of the first bar at which every feature of the whole receptive field is defined."""
        return self.spec.warmup + self.receptive_field - 1


@functools.lru_cache(maxsize=64)
def make_policy(agent: AgentConfig, spec: EnvSpec) -> Policy:
    """Builds the policy of `agent` for environments that look like `spec`.

    The same arguments give the same object, so that what was compiled for it is found again.
    """
    config, dtype = agent.policy, agent.precision.matmul
    if config.kind != "nca":
        raise ConfigError(f"policy.kind = {config.kind!r} is not a policy; there is 'nca'.")

    def build(rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        return {
            "nca": NCA(spec, config, dtype, rngs),
            "head": Head(spec, config.channels, config.head_hidden, rngs),
        }

    abstract = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    graphs = {name: nnx.graphdef(module) for name, module in abstract.items()}

    def init(key: Array) -> Params:
        modules = build(nnx.Rngs(params=key))
        return {name: nnx.to_pure_dict(nnx.state(module)) for name, module in modules.items()}

    def module(name: str, params: Params) -> Any:
        return nnx.merge(graphs[name], params[name])

    return Policy(
        init=init,
        encode=lambda params, x, present: module("nca", params)(x, present),
        act=lambda params, cells, seen: module("head", params)(cells, seen),
        receptive_field=receptive_field(config),
        spec=spec,
    )


def decide(
    policy: Policy, params: Params, window: Array, present: Array, account: Account
) -> Array:
    """Logits `[A, n]` of one decision from the last RF bars; what paper trading runs per bar.

    Args:
      window: `[RF, A, F]` features, the last row is the bar whose close was just seen.
      present: `[RF, A]` bool.
      account: the account as it stands at that close.
    """
    cells = policy.encode(params, window[None], present[None])[0, -1]
    logits, _ = policy.act(params, cells, account_features(policy.spec, account))
    return logits


def num_parameters(policy: Policy) -> int:
    """Parameters of the policy, counted without drawing them."""
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
