"""The encoders that `policy.kind` names: the NCA, the MLP, the GRU, and modules of your own.

An encoder is a Flax nnx module that turns bars into cells. It needs a constructor, which takes any
of `spec`, `config`, `precision` and `rngs` by name, and `__call__(x, present) -> cells`:

    x `[B, T, A, F]` features, present `[B, T, A]` -> cells `[B, T, A, C]`, C = `config.channels`

A cell at bar t may depend on the `receptive_field(config)` bars up to t and on no other; by default
that is `config.window`. Everything else has a default here, and may be defined for speed:

    stream(state, x [A, F], present [A]) -> state, cells [A, C], from `begin(spec, config)`
    __call__(x, present, fire, halo): leave out the first `halo` bars; `fire` as in `NCA`
    HIDDEN: by parameter, the axis that is the width of a hidden layer; a mesh may split it
    HEAD: a class in the place of `heads.Head`, with its arguments

`check_policy` tells whether a module keeps to that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from nca_trader.agents.heads import Head
from nca_trader.agents.nca import NCA, Fire
from nca_trader.agents.windowed import GRU, MLP
from nca_trader.config import PolicyConfig, PrecisionConfig
from nca_trader.config.extensions import Registry
from nca_trader.config.ranges import described
from nca_trader.errors import ConfigError
from nca_trader.types import EnvSpec

GIVEN = ("spec", "config", "precision", "rngs")
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Encoder(NamedTuple):
    """An encoder's parts, with defaults where its class has none.

    Attributes:
      name: of its parameters in a run.
      build: `(spec, config, precision, rngs) -> module`.
      receptive_field: `(config) ->` bars that a cell depends on, its own included.
      encode: `(module, x, present, fire, halo) -> cells`.
      begin: `(spec, config) -> state` of a stream.
      stream: `(module, state, x, present) -> (state, cells)`.
      hidden: parameter to axis, see `Policy.hidden_axis`.
      head: the class of the policy head.
    """

    name: str
    build: Callable[[EnvSpec, PolicyConfig, PrecisionConfig, nnx.Rngs], nnx.Module]
    receptive_field: Callable[[PolicyConfig], int]
    encode: Callable[[Any, Array, Array, Fire | None, int], Array]
    begin: Callable[[EnvSpec, PolicyConfig], Any]
    stream: Callable[[Any, Any, Array, Array], tuple[Any, Array]]
    hidden: dict[str, int]
    head: Any


def encoder_of(cls: Any, name: str) -> Encoder:
    """Return the parts of an encoder's class.

    Args:
      cls: the class of an nnx module.
      name: of its kind, for messages.

    Raises:
      ConfigError: it is not such a class, or lacks `__call__`, or has `stream` without `begin`.
    """
    if not (isinstance(cls, type) and issubclass(cls, nnx.Module) and callable(cls)):
        raise ConfigError(f"{name}: is {described(cls)}; give the class of a Flax nnx module.")
    if "__call__" not in dir(cls):
        raise ConfigError(f"{name}: has no __call__; define __call__(self, x, present) -> cells.")
    if hasattr(cls, "stream") != hasattr(cls, "begin"):
        raise ConfigError(f"{name}: has one of stream and begin; define both, or neither.")
    # Of Python's own constructor the signature says "anything", and it takes nothing.
    own = cls.__init__ is not object.__init__
    taken = inspect.signature(cls.__init__).parameters if own else {}
    every = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    unknown = [
        p.name
        for p in [*taken.values()][1:]
        if p.name not in GIVEN and p.default is p.empty and p.kind not in VARIADIC
    ]
    if unknown:
        raise ConfigError(
            f"{name}: its constructor asks for {', '.join(unknown)}; it is given "
            f"{', '.join(GIVEN)}, so give the others defaults."
        )

    def build(*given: Any) -> nnx.Module:
        named = zip(GIVEN, given, strict=True)
        return cls(**{key: value for key, value in named if every or key in taken})

    whole = {"fire", "halo"} <= set(inspect.signature(cls.__call__).parameters)

    def encode(module: Any, x: Array, present: Array, fire: Fire | None, halo: int) -> Array:
        return module(x, present, fire, halo) if whole else module(x, present)[:, halo:]

    receptive_field = getattr(cls, "receptive_field", lambda config: config.window)

    def begin(spec: EnvSpec, config: PolicyConfig) -> Any:
        shape = (receptive_field(config), spec.num_assets)
        return jnp.zeros((*shape, spec.num_features), jnp.float32), jnp.zeros(shape, bool)

    def stream(module: Any, state: Any, x: Array, present: Array) -> tuple[Any, Array]:
        # The whole receptive field again for each bar: slow, and right for any encoder.
        bars = jnp.concatenate([state[0][1:], x[None].astype(jnp.float32)])
        there = jnp.concatenate([state[1][1:], present[None]])
        return (bars, there), encode(module, bars[None], there[None], None, len(bars) - 1)[0, 0]

    if hasattr(cls, "stream"):
        begin, stream = getattr(cls, "begin"), getattr(cls, "stream")  # noqa: B009 (unknown to types)
    hidden, head = getattr(cls, "HIDDEN", {}), getattr(cls, "HEAD", Head)
    return Encoder("encoder", build, receptive_field, encode, begin, stream, hidden, head)


def check_parameters(name: str, module: Any) -> None:
    """Refuse a module with another state than parameters of float32.

    Args:
      name: of its kind, for messages.
      module: as `nnx.eval_shape` gives it.

    Raises:
      ConfigError: e.g. for dropout, whose random state would change from call to call.
    """
    for path, leaf in nnx.to_flat_state(nnx.state(module)):
        where = ".".join(map(str, path))
        if not isinstance(leaf, nnx.Param):
            kind = type(leaf).__name__
            raise ConfigError(f"{name}: {where} is a {kind}; a policy may hold nnx.Param only.")
        dtype = leaf.get_value().dtype
        if dtype != jnp.float32:
            raise ConfigError(f"{name}: {where} is {dtype}; parameters are float32.")


def check_cells(
    name: str, cells: Callable[..., Array], params: Any, spec: EnvSpec, channels: int, rows: int
) -> None:
    """Refuse an encoder whose cells have another shape or type.

    Args:
      name: of its kind, for messages.
      cells: `(params, x, present) -> cells`.
      params: their shapes.
      spec: of the environment.
      channels: C.
      rows: bars, at least the receptive field.

    Raises:
      ConfigError: with the shape that it has.
    """
    bars = (1, rows, spec.num_assets)
    x = jax.ShapeDtypeStruct((*bars, spec.num_features), jnp.float32)
    found = jax.eval_shape(cells, params, x, jax.ShapeDtypeStruct(bars, bool))
    if found.shape != (*bars, channels) or found.dtype != jnp.float32:
        raise ConfigError(
            f"{name}: cells of x {x.shape} are {found.dtype}{found.shape}; return float32"
            f"{(*bars, channels)}, where {channels} is policy.channels."
        )


# By the names that `PolicyConfig.kind` takes.
ENCODERS: Registry[Encoder] = Registry(
    "policies",
    {
        name: encoder_of(cls, name)._replace(name=name)
        for name, cls in (("nca", NCA), ("mlp", MLP), ("gru", GRU))
    },
    encoder_of,
)
