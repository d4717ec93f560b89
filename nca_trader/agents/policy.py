"""Policies as pure functions over plain dicts of arrays."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from nca_trader.agents import encoder, load_agent
from nca_trader.agents.base import spec_on_base
from nca_trader.agents.heads import (
    Distribution,
    PolicyHead,
    account_features,
    best_target,
    distribution,
)
from nca_trader.agents.nca import Fire
from nca_trader.config import AgentConfig, PolicyConfig, PrecisionConfig
from nca_trader.config.extensions import FORGET, own_code
from nca_trader.config.ranges import expect
from nca_trader.envs.account.state import Account
from nca_trader.errors import ConfigError
from nca_trader.types import EnvSpec

Params = dict[str, Any]


class Policy(NamedTuple):
    """A policy split into functions; `params` is a nested dict of float32 arrays.

    Attributes:
      init: `(key) -> params`.
      encode: `(params, x [B, T, A, F], present [B, T, A], fire=None, halo=0) -> cells
        [B, T - halo, A, C]`, all bars of a segment at once. The first `halo` bars are seen, but
        get no cells; `fire`, a `Fire`, is for training only.
      act: `(params, cells [..., A, C], account_features [..., A, 3 + M]) -> (logits [..., A, n],
        value [...])`.
      begin: `() -> state` of a stream before its first bar.
      stream: `(params, state, x [A, F], present [A]) -> (state, cells [A, C])`, one new bar; the
        cells are those of `encode` over the same bars, to rounding.
      receptive_field: bars that a decision sees, its own included.
      spec: the environment that it was made for.
      fire_rate: share of cell updates that take place in training; 1 needs no `fire`.
      hidden_axis: `(module, name) ->` the parameter's axis that is the width of a hidden layer,
        which a mesh may split; None if there is none.
      ensemble: of several agents, how their orders become one, see `heads.mean_order`.
      unread: `() ->` the settings of [policy] that an encoder of your own does not read; it checks
        the encoder first, see `encoder.examine`.
    """

    init: Callable[[Array], Params]
    encode: Callable[..., Array]
    act: Callable[[Params, Array, Array], tuple[Array, Array]]
    begin: Callable[[], Any]
    stream: Callable[[Params, Any, Array, Array], tuple[Any, Array]]
    receptive_field: int
    spec: EnvSpec
    fire_rate: float
    hidden_axis: Callable[[str, str], int | None]
    ensemble: str = "mean"
    unread: Callable[[], frozenset[str]] = frozenset

    @property
    def distribution(self) -> Distribution:
        """The distribution of actions that the logits parametrise."""
        return distribution(self.spec)

    @property
    def first_decision(self) -> int:
        """Row of the first bar at which every feature of the whole receptive field is defined."""
        return self.spec.warmup + self.receptive_field - 1

    def target(self, logits: Array, account: Account) -> Array:
        """Return the `[A]` target weights of the most probable action, see `best_target`."""
        return best_target(self.spec, logits, account, self.ensemble)


class Readout(NamedTuple):
    """What a policy makes of a bar's cells and an account.

    Attributes:
      seen: `[..., A, 3 + M]` account features.
      logits: `[..., A, n]` of the actions.
      value: `[...]`.
    """

    seen: Array
    logits: Array
    value: Array


def make_policy(agent: AgentConfig | str | pathlib.Path, spec: EnvSpec) -> Policy:
    """Build the policy of an agent.

    The same arguments return the same object, so that compiled programs are found again.

    Args:
      agent: a config, the name of a preset, or the path of a TOML file.
      spec: of the environment, e.g. `env.spec`.

    Returns:
      The policy.

    Raises:
      ConfigError: `agent` cannot be loaded, it needs each asset's nearest ones and `spec` does not
        rank them, it stands on a base rule in an environment whose actions are not weights, or an
        encoder of your own does not read a setting.

    Example:
      >>> import nca_trader as nca
      >>> env = nca.TradingEnv(nca.sample_bars("sp500"))
      >>> nca.make_policy("nano", env.spec).receptive_field
      63
    """
    expect("spec", spec, EnvSpec, "an EnvSpec, e.g. `env.spec` of a TradingEnv", agent=agent)
    agent = load_agent(agent)
    return build_policy(agent, spec_on_base(spec, agent.policy))


def build_policy(agent: AgentConfig, spec: EnvSpec, stored: bool = False) -> Policy:
    """Build the policy of a config whose base `spec` has already, see `make_policy`.

    That of a stored run may have settings that its encoder does not read.
    """
    if agent.policy.neighbours != "nearest":
        spec = dataclasses.replace(spec, nearest=())  # they describe bars, not the policy
    elif spec.num_assets > 1 and len(spec.nearest) != spec.num_assets:
        raise ConfigError(
            "policy.neighbours = 'nearest', and the environment's spec ranks no assets; take the "
            "spec of a TradingEnv."
        )
    # The key has only what the functions depend on, so agents that differ in their learner share a
    # policy.
    policy = _make_policy(agent.policy, agent.precision, spec)
    if not stored:
        encoder.refuse_unread(agent.policy, policy.unread())
    return policy


@functools.lru_cache(maxsize=64)
def _make_policy(config: PolicyConfig, precision: PrecisionConfig, spec: EnvSpec) -> Policy:
    cls, own = encoder.ENCODERS[config.kind], config.kind not in encoder.ENCODERS.builtin
    # Of its parameters in a run.
    kind, head = "encoder" if own else config.kind, getattr(cls, "HEAD", PolicyHead)

    def build(rngs: nnx.Rngs) -> dict[str, nnx.Module]:
        given = (spec, config, precision, rngs)
        return {
            kind: encoder.build(cls, dict(zip(encoder.GIVEN, given, strict=True))),
            "head": head(spec, config.channels, config.head_hidden, rngs),
        }

    # Shapes alone are traced: the graph is known without drawing parameters. They are float32 also
    # where a rule that is called in float64 names a run.
    with own_code(f"policy.kind = {config.kind!r}"), jax.enable_x64(False):
        abstract = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
        field = encoder.receptive_field(cls, config)
    hidden = {name: getattr(part, "HIDDEN", {}) for name, part in ((kind, cls), ("head", head))}
    graphs = {name: nnx.graphdef(module) for name, module in abstract.items()}
    pure = {name: nnx.to_pure_dict(nnx.state(module)) for name, module in abstract.items()}
    paths = {name: dict(_paths(tree)) for name, tree in pure.items()}

    def init(key: Array) -> Params:
        # `to_pure_dict` leaves plain dicts of arrays, which need no Flax to read, save or map over.
        with jax.enable_x64(False):
            modules = build(nnx.Rngs(params=key))
        trees = {k: nnx.to_pure_dict(nnx.state(module)) for k, module in modules.items()}
        return {
            module: {
                name: functools.reduce(operator.getitem, path, trees[module])
                for name, path in known.items()
            }
            for module, known in paths.items()
        }

    def module(name: str, params: Params) -> Any:
        # A module is put together for each call, so parameters are arguments and not state.
        tree: dict[Any, Any] = {}
        for key, (*above, last) in paths[name].items():
            below = tree
            for part in above:
                below = below.setdefault(part, {})
            below[last] = params[name][key]
        return nnx.merge(graphs[name], tree)

    def encode(
        params: Params, x: Array, present: Array, fire: Fire | None = None, halo: int = 0
    ) -> Array:
        return encoder.encode(module(kind, params), x, present, fire, halo)

    def stream(params: Params, state: Any, x: Array, present: Array) -> tuple[Any, Array]:
        return encoder.stream(module(kind, params), state, x, present)

    if own:
        for name, part in abstract.items():
            encoder.check_parameters(f"policy.kind = {config.kind!r}: {name}", part)
    return Policy(
        init=init,
        encode=encode,
        act=lambda params, cells, seen: module("head", params)(cells, seen),
        begin=lambda: encoder.begin(cls, spec, config),
        stream=stream,
        receptive_field=field,
        spec=spec,
        fire_rate=config.fire_rate,
        hidden_axis=lambda name, parameter: hidden[name].get(parameter),
        unread=functools.cache(lambda: encoder.examine(cls, spec, config, precision)),
    )


def _paths(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the joined name and the path of each leaf: a run's parameters are two levels deep."""
    for key, value in tree.items():
        path = (*above, key)
        if isinstance(value, dict):
            yield from _paths(value, path)
        else:
            yield "/".join(map(str, path)), path


FORGET.append(_make_policy.cache_clear)


@functools.lru_cache(maxsize=64)
def mean_policy(policy: Policy, num_agents: int, ensemble: str = "mean") -> Policy:
    """Return the policy of S agents that trade the mean of their orders, for decisions alone.

    Its parameters are those of all agents, with a leading axis `[S]` as training stacks them. Cells
    are `[..., A, S C]` and logits `[..., A, S n]`, one agent after the other; `best_target` takes
    the mean of the orders. The agents see one account.

    Args:
      policy: of each agent.
      num_agents: S.
      ensemble: how their orders become one, see `heads.mean_order`.
    """

    def split(cells: Array) -> Array:
        return jnp.moveaxis(cells.reshape(*cells.shape[:-1], num_agents, -1), -2, 0)

    def joined(values: Array) -> Array:
        return jnp.concatenate(list(values), axis=-1)

    def encode(
        params: Params, x: Array, present: Array, fire: Fire | None = None, halo: int = 0
    ) -> Array:
        # One agent after the other, so that the memory is that of one agent.
        return joined(jax.lax.map(lambda p: policy.encode(p, x, present, fire, halo), params))

    def act(params: Params, cells: Array, seen: Array) -> tuple[Array, Array]:
        logits, value = jax.vmap(policy.act, (0, 0, None))(params, split(cells), seen)
        return joined(logits), value.mean(0)

    def stream(params: Params, state: Any, x: Array, present: Array) -> tuple[Any, Array]:
        state, cells = jax.vmap(policy.stream, (0, 0, None, None))(params, state, x, present)
        return state, joined(cells)

    return policy._replace(
        init=lambda key: stack([policy.init(one) for one in jax.random.split(key, num_agents)]),
        encode=encode,
        act=act,
        # In jax: a blend begins inside a compiled scan.
        begin=lambda: jax.tree.map(lambda x: jnp.stack([x] * num_agents), policy.begin()),
        stream=stream,
        ensemble=ensemble,
    )


def stack(trees: Sequence[Any]) -> Any:
    """Return trees of arrays as one, with a leading axis for the tree."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def unstack(params: Params, num_agents: int) -> list[Params]:
    """Return the parameters of each agent, see `mean_policy`."""
    return [jax.tree.map(lambda leaf, i=i: leaf[i], params) for i in range(num_agents)]


def with_steps(agent: AgentConfig, steps: int) -> AgentConfig:
    """Return the agent with another number K of updates per cell and the same parameters.

    The cycle of dilations continues, so the receptive field follows K. Whether an encoder of your
    own reads `steps` is seen where its policy is made, see `check_steps`.

    Raises:
      ConfigError: `steps` is not a positive whole number, or the policy makes no steps.
    """
    if "steps" in dict(agent.policy.idle(agent.policy)):
        raise ConfigError(f"steps = {steps}: policy.kind = {agent.policy.kind!r} makes no steps.")
    return dataclasses.replace(agent, policy=dataclasses.replace(agent.policy, steps=steps))


def check_steps(kind: str, policy: Policy, trained: Policy) -> None:
    """Refuse another number of steps of your own encoder, if it reads none or learns each of them.

    Args:
      kind: of the policies.
      policy: with the other number of steps.
      trained: with the number that it was trained with.

    Raises:
      ConfigError: it does not read it, or its parameters are others.
    """
    if "steps" in policy.unread():
        raise ConfigError(f"steps: policy.kind = {kind!r} does not read it; leave it out.")
    params = [jax.eval_shape(each.init, jax.random.key(0)) for each in (policy, trained)]
    if params[0] != params[1]:
        raise ConfigError(f"steps: policy.kind = {kind!r} has other parameters with it.")


def decide(policy: Policy, params: Params, cells: Array, account: Account) -> Readout:
    """Compute what follows the encoding: the decision of an account at the close of a bar.

    Backtests, live loops, exported agents, `prove` and the learners all decide by this function.

    Args:
      policy: the policy.
      params: its parameters.
      cells: `[..., A, C]` of the bar. Axes of size 1 broadcast: accounts that share a bar share
        its cells.
      account: with the same leading axes, as it stands at that close.
    """
    seen = account_features(policy.spec, account)
    return Readout(seen, *policy.act(params, cells, seen))


def decide_next(
    policy: Policy, params: Params, state: Any, x: Array, present: Array, account: Account
) -> tuple[Any, Array, Array]:
    """Encode one new bar of a stream, and decide at its close.

    Args:
      policy: the policy.
      params: its parameters.
      state: of the stream, from `policy.begin` or the last call.
      x: `[A, F]` features of the bar.
      present: `[A]` bool.
      account: as it stands at that close.

    Returns:
      The next state, the logits `[A, n]`, and the target weights `[A]`.
    """
    state, cells = policy.stream(params, state, x, present)
    logits = decide(policy, params, cells, account).logits
    return state, logits, policy.target(logits, account)


def num_parameters(policy: Policy) -> int:
    """Count the parameters of a policy without drawing them."""
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
