"""Action schemes: from what a policy outputs for each asset to target weights.

An action is one of n choices, drawn from a categorical distribution, or a number, drawn from a
squashed Gaussian. Probabilities, entropies and ratios are those of the action as it was drawn. So a
scheme may map actions to targets in any way, and a learner needs nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.config.extensions import uncalled
from nca_trader.config.ranges import describe
from nca_trader.config.registry import Registry
from nca_trader.envs.account.costs import examine
from nca_trader.errors import ConfigError
from nca_trader.types import EnvSpec, Tensor

POINTS = 9  # of a continuous action's range that are tried
ROUNDING = 1e-6  # of a target at its bound


class ActionScheme(NamedTuple):
    """What the actions of an environment mean.

    Attributes:
      target: `(spec, action [A], ordered [A]) -> [A]` the target weights of an action, within
        `spec.bounds`. `ordered` are the last ordered weights. A pure function in `jax.numpy`.
      choices: of each asset; an action is int32 from 0 to `choices - 1`. 0: an action is a number.
      low, high: bounds of such a number.

    >>> from nca_trader.envs.actions import ActionScheme
    >>> halves = ActionScheme(lambda spec, action, ordered: 0.5 * spec.size * action, choices=3)
    """

    target: Callable[[EnvSpec, Any, Array], Any]
    choices: int = 0
    low: float = -1.0
    high: float = 1.0


def direction(spec: EnvSpec, action: Tensor, ordered: Array) -> Array:
    """Return the weight of the list `spec.targets` that each action numbers."""
    # Selected, not looked up: a table of three is read one account at a time.
    *rest, target = (jnp.asarray(weight, ordered.dtype) for weight in spec.targets)
    for number, weight in reversed(list(enumerate(rest))):
        target = jnp.where(action == number, weight, target)
    return jnp.broadcast_to(target, jnp.shape(action))


def orders(spec: EnvSpec, action: Tensor, ordered: Array) -> Array:
    """Return the last ordered weights, moved by one step where the action is 0 or 2."""
    low, high = spec.bounds
    # One step is a full position: from short, one buy leads to flat and the next to long.
    step = jnp.asarray(action - 1, ordered.dtype) * high
    return jnp.clip(ordered + step, low, high)


def weights(spec: EnvSpec, action: Tensor, ordered: Array) -> Array:
    """Return the action, which is the target itself, clipped to `spec.bounds`."""
    return jnp.clip(jnp.asarray(action, ordered.dtype), *spec.bounds)


def own_scheme(value: Any, name: str) -> ActionScheme:
    """Return the scheme that your own code gives.

    Raises:
      ConfigError: it is none, or its numbers make no space of actions.
    """
    if not isinstance(value, ActionScheme):
        raise ConfigError(
            f"{name}: is {describe(value)}; give an ActionScheme(target, choices=n) of "
            f"nca_trader.envs.actions{uncalled(value)}."
        )
    count, low, high = value.choices, value.low, value.high
    if type(count) is not int or count < 0 or count == 1:
        raise ConfigError(f"{name}: choices={count!r}; give 2 or more, or 0 for a number.")
    if not (np.isfinite([low, high]).all() and low < high):
        raise ConfigError(f"{name}: low={low}, high={high} isn't a range; give low below high.")
    return value


# By the names that `EnvConfig.actions` takes.
SCHEMES: Registry[ActionScheme] = Registry(
    "actions",
    {name.__name__: ActionScheme(name) for name in (direction, orders, weights)},
    own_scheme,
)


def tilted(spec: EnvSpec, tilt: Tensor, base: Array) -> Array:
    """Return `base` moved by `tilt` times `tilt_limit` full positions, clipped to `spec.bounds`.

    A base beyond the bounds is not clipped, but where the environment does not short it is at
    least 0. So a tilt of 0 is exactly the base.
    """
    low, high = spec.bounds
    tilt = jnp.clip(jnp.asarray(tilt, base.dtype), *spec.action_bounds)
    target = base + spec.tilt_limit * spec.size * tilt
    return jnp.clip(target, jnp.minimum(low, base) if low < 0.0 else 0.0, jnp.maximum(high, base))


def tilt_price(spec: EnvSpec, action: Tensor) -> Any:
    """Return `[...]` the price of tilts `[..., A]` in a bar, see `PolicyConfig.tilt_penalty`."""
    if not spec.tilt_penalty:
        return 0.0
    tilt = jnp.clip(jnp.asarray(action), *spec.action_bounds)
    return spec.tilt_penalty * spec.size * (tilt**2).sum(-1)


def to_target(spec: EnvSpec, action: Tensor, ordered: Array, base: Any = ()) -> Array:
    """Return the target weights `[A]` that `action` orders.

    Args:
      spec: of the environment.
      action: `[A]` int32; where they are numbers (`spec.num_actions` is 0) floating, and clipped to
        `spec.action_bounds`.
      ordered: `[A]` last ordered targets.
      base: `[A]` target of the base rule, where `spec` has one.
    """
    if spec.base != "none":
        return tilted(spec, action, base)
    scheme = SCHEMES[spec.actions]
    if spec.actions in SCHEMES.builtin:
        return scheme.target(spec, action, ordered)
    if spec.num_actions == 0:
        action = jnp.clip(jnp.asarray(action, ordered.dtype), *spec.action_bounds)
    return jnp.asarray(scheme.target(spec, action, ordered), ordered.dtype)


def every_action(spec: EnvSpec) -> Array:
    """Return `[n]` the choices of an asset, or some numbers over their whole range."""
    if spec.num_actions:
        return jnp.arange(spec.num_actions, dtype=jnp.int32)
    return jnp.linspace(*spec.action_bounds, POINTS)


def check_own(spec: EnvSpec, rows: int) -> None:
    """Compute the targets of an action scheme of your own: for each action, the same in all assets.

    Args:
      spec: of the environment.
      rows: bars of the data, see `examine`.

    Raises:
      ConfigError: it raises, is not pure, has another shape or type, or orders what is not finite
        or beyond `spec.bounds`.
    """
    if spec.actions in SCHEMES.builtin:
        return
    where, shape = f"actions {spec.actions}", (spec.num_assets,)
    actions = every_action(spec)

    def target(action: Array, ordered: Array) -> Any:
        return SCHEMES[spec.actions].target(spec, action, ordered)

    one = jax.ShapeDtypeStruct(shape, actions.dtype)
    like, said = jax.ShapeDtypeStruct(shape, jnp.float32), f"one weight per asset, float32{shape}"
    examine(where, target, one, like, shapes=(shape,), returns=said, rows=rows)
    low, high = spec.bounds
    for start in sorted({low, 0.0, high}):
        for action in actions:
            ordered = jnp.full(shape, start, jnp.float32)
            found = np.asarray(target(jnp.full(shape, action), ordered))
            inside = (found >= low - ROUNDING) & (found <= high + ROUNDING)
            if not inside.all():  # NaN too, which would be no order
                wrong = found[~inside][0]
                raise ConfigError(
                    f"{where}: action {action:g} after an order of {start:g} is the target "
                    f"{wrong:g}, not in {low:g} to {high:g}; use spec.bounds, or change size or "
                    "short."
                )
