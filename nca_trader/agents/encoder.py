"""The encoders that `policy.kind` names: the NCA, the MLP, the GRU, and modules of your own.

An encoder is a Flax nnx module that turns bars into cells. It needs a constructor, which takes any
of `spec`, `config`, `precision` and `rngs` by name, and `__call__(x, present) -> cells`:

    x `[B, T, A, F]` features, present `[B, T, A]` -> cells `[B, T, A, C]`, C = `config.channels`

A cell at bar t may depend on the `receptive_field(config)` bars up to t and on no other; by default
that is `config.window`. Everything else has a default here, and may be defined for speed:

    stream(state, x [A, F], present [A]) -> state, cells [A, C], from `begin(spec, config)`
    __call__(x, present, fire, halo): leave out the first `halo` bars; `fire` as in `NCA`
    HIDDEN: by parameter, the axis that is the width of a hidden layer; a mesh may split it
    HEAD: a class in the place of `heads.PolicyHead`, with its arguments

A setting of [policy] that none of these reads is refused where it is given, see `examine`.
`check_policy` tells whether a module keeps to that. `agents.cell_rule` makes such a module of the
rule of one cell.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Mapping
from numbers import Integral
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from nca_trader.agents.heads import distribution, num_account_features
from nca_trader.agents.lattice import ROWS, delay, enter, rows_dense, store
from nca_trader.agents.nca import NCA, Fire
from nca_trader.config import PolicyConfig, PrecisionConfig
from nca_trader.config.agent import KINDS
from nca_trader.config.extensions import own_code, uncalled
from nca_trader.config.ranges import defaults_of, describe, refuse
from nca_trader.config.registry import Registry
from nca_trader.envs.account.costs import expect_shapes
from nca_trader.errors import ConfigError
from nca_trader.numerics import wide
from nca_trader.types import EnvSpec


class MLP(nnx.Module):
    """Two layers over the last W bars of an asset, shared by all bars and assets.

    With `z_t = [clip(x_t) m_t, m_t]`, 0 before the first bar:

        h = tanh(sum_j z[t - j] W1_j + b1)    j = 0 .. W - 1
        s = tanh(h W2 + b2)

    Where `hidden` is 0 there is one layer, `s = h`, and with the head's two in all. Sums are
    float32; the operands of matrix products have `precision.matmul`.
    """

    HIDDEN: ClassVar = {"window": 1, "hidden_bias": 0, "cell": 0}

    def __init__(
        self, spec: EnvSpec, config: PolicyConfig, precision: PrecisionConfig, rngs: nnx.Rngs
    ):
        """Draw the parameters; every draw takes its own key from `rngs`."""
        self.config, self.precision = config, precision
        self.matmul_dtype = precision.matmul
        normal = jax.nn.initializers.lecun_normal()
        # One more per bar: whether it is present.
        inputs = config.window * (spec.num_features + 1)
        first = config.hidden or config.channels
        self.window = nnx.Param(normal(rngs.params(), (inputs, first)))
        self.hidden_bias = nnx.Param(jnp.zeros(first))
        if not config.hidden:
            return
        self.cell = nnx.Param(normal(rngs.params(), (config.hidden, config.channels)))
        self.cell_bias = nnx.Param(jnp.zeros(config.channels))

    def __call__(self, x: Array, present: Array, fire: Fire | None = None, halo: int = 0) -> Array:
        """`[B, T - halo, A, C]` cells; `x` `[B, T, A, F]`, `present` `[B, T, A]`."""
        seen = enter(ROWS, self.config.feature_clip, x, present)
        # Newest first, as in `stream`, which uses the same weights.
        bars = [delay(seen, j, halo) for j in range(self.config.window)]
        return ROWS.leave(self._cells(jnp.concatenate(bars)))

    @staticmethod
    def begin(spec: EnvSpec, config: PolicyConfig) -> Array:
        """Return the stream's state before the first bar: the last W - 1 inputs, newest first."""
        shape = (config.window - 1, spec.num_features + 1, 1, 1, spec.num_assets)
        return jnp.zeros(shape, jnp.float32)

    def stream(self, past: Array, x: Array, present: Array) -> tuple[Array, Array]:
        """Encode one new bar, `x` `[A, F]` and `present` `[A]`; return cells `[A, C]`."""
        seen = enter(ROWS, self.config.feature_clip, x[None, None], present[None, None])
        bars = jnp.concatenate([seen[None], past])
        cells = self._cells(bars.reshape(-1, *seen.shape[1:]))
        return bars[:-1], ROWS.leave(cells)[0, 0]

    def _cells(self, seen: Array) -> Array:
        dtype = self.matmul_dtype
        hidden = rows_dense(self.window[...], seen, dtype) + ROWS.column(self.hidden_bias[...])
        if not self.config.hidden:
            return jnp.tanh(hidden)
        hidden = store(jnp.tanh(hidden), self.precision)
        cells = rows_dense(self.cell[...], hidden, dtype)
        return jnp.tanh(cells + ROWS.column(self.cell_bias[...]))


class GRU(nnx.Module):
    """A gated recurrent unit that starts from state 0, W bars before each decision.

    A state that is carried without end would depend on where a segment begins. Over a window a
    cell is a function of its bars, so lattice, window and stream agree. Each costs W updates per
    bar. With `z_t = [clip(x_t) m_t, m_t]`:

        r = sigma(z U_r + s R_r + b_r),  u = sigma(z U_u + s R_u + b_u)
        n = tanh(z U_n + b_n + r (s R_n)),  s' = (1 - u) n + u s

    Bars before the first leave the state at 0. Sums are float32; the operands of matrix products
    have `precision.matmul`, the states `precision.compute`. Source: Cho et al., Learning phrase
    representations (2014), with the reset gate after the product.
    """

    HIDDEN: ClassVar = {"inputs": 1, "recurrent": 1, "bias": 0}

    def __init__(
        self, spec: EnvSpec, config: PolicyConfig, precision: PrecisionConfig, rngs: nnx.Rngs
    ):
        """Draw the parameters; every draw takes its own key from `rngs`."""
        self.config, self.precision = config, precision
        self.matmul_dtype = precision.matmul
        normal, width = jax.nn.initializers.lecun_normal(), config.channels
        self.inputs = nnx.Param(normal(rngs.params(), (spec.num_features + 1, 3 * width)))
        self.recurrent = nnx.Param(normal(rngs.params(), (width, 3 * width)))
        self.bias = nnx.Param(jnp.zeros(3 * width))

    def __call__(self, x: Array, present: Array, fire: Fire | None = None, halo: int = 0) -> Array:
        """`[B, T - halo, A, C]` cells; `x` `[B, T, A, F]`, `present` `[B, T, A]`."""
        added, window = self._added(x, present), self.config.window
        # A unit for each bar that is returned; all of them take their windows at the same time.
        length = added.shape[1] - halo
        # Each bar's window begins W - 1 bars before it, also that of the first.
        padded = jnp.pad(added, ((0, 0), (window - 1, 0), (0, 0), (0, 0)))

        def step(state: Array, late: Array) -> tuple[Array, None]:
            """All windows take their bar number `late`: of bar t it is t - W + 1 + late."""
            bar = jax.lax.dynamic_slice_in_dim(padded, halo + late, length, axis=1)
            # Bars before the first are padding, and leave the state at 0.
            there = jnp.arange(halo, halo + length) + late >= window - 1
            return jnp.where(there.reshape(1, -1, 1, 1), self._next(state, bar), state), None

        # It begins from the data, so that it has their sharding type under shard_map.
        state = store(jnp.zeros_like(added[: self.config.channels, halo:]), self.precision)
        state = jax.lax.scan(step, state, jnp.arange(window))[0]
        return wide(ROWS.leave(state))

    @staticmethod
    def begin(spec: EnvSpec, config: PolicyConfig) -> Array:
        """Return a stream's first state, `[C, W, 1, A]`: one unit for each open window."""
        return jnp.zeros((config.channels, config.window, 1, spec.num_assets), jnp.float32)

    def stream(self, states: Array, x: Array, present: Array) -> tuple[Array, Array]:
        """Encode one new bar, `x` `[A, F]` and `present` `[A]`; return cells `[A, C]`.

        The units are of the windows that are open, oldest first; the bar closes the oldest, and
        opens one that ends W bars later.
        """
        added = self._added(x[None, None], present[None, None])
        states = self._next(states, jnp.broadcast_to(added, (len(added), *states.shape[1:])))
        fresh = jnp.zeros_like(states[:, :1])
        return jnp.concatenate([states[:, 1:], fresh], axis=1), states[:, 0, 0].T

    def _added(self, x: Array, present: Array) -> Array:
        """Return the `[3 C, T, B, A]` inputs of each bar to the gates."""
        seen = enter(ROWS, self.config.feature_clip, x, present)
        # Computed once per bar, though W windows read it.
        added = rows_dense(self.inputs[...], seen, self.matmul_dtype)
        return added + ROWS.column(self.bias[...])

    def _next(self, state: Array, added: Array) -> Array:
        reset, update, new = jnp.split(added, 3)
        reset_s, update_s, new_s = jnp.split(
            rows_dense(self.recurrent[...], state, self.matmul_dtype), 3
        )
        # Gates are computed in float32; only the new state is stored in `precision.compute`.
        keep = jax.nn.sigmoid(update + update_s)
        new = jnp.tanh(new + jax.nn.sigmoid(reset + reset_s) * new_s)
        return store((1.0 - keep) * new + keep * state, self.precision).astype(state.dtype)


GIVEN = ("spec", "config", "precision", "rngs")
# The settings of [policy] that work for every encoder: the head or the environment reads them.
READ_ELSEWHERE = {"kind", "channels", "base", "tilt_limit", "tilt_penalty"}
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def encoder_of(given: Any, name: str) -> Any:
    """Return an encoder's class.

    Args:
      given: the class of an nnx module, or a partial call of one with values of its constructor,
        which its `receptive_field` and `begin` may take by name, too.
      name: of its kind, for messages.

    Raises:
      ConfigError: it is not such a class, or lacks `__call__`, or has `stream` without `begin`.
    """
    partial = isinstance(given, functools.partial)
    cls, values = (given.func, given.keywords) if partial else (given, {})
    if not (isinstance(cls, type) and issubclass(cls, nnx.Module) and callable(cls)):
        more = "" if isinstance(cls, type) else uncalled(cls)
        raise ConfigError(f"{name}: is {describe(cls)}; give the class of a Flax nnx module{more}.")
    if "__call__" not in dir(cls):
        raise ConfigError(f"{name}: has no __call__; define __call__(self, x, present) -> cells.")
    if hasattr(cls, "stream") != hasattr(cls, "begin"):
        raise ConfigError(f"{name}: has one of stream and begin; define both, or neither.")
    # Of a rule of one cell the rule's own, see `agents.cell_rule`.
    asked, names = getattr(cls, "RULE", cls), getattr(cls, "GIVEN", GIVEN)
    parameters = [*_taken(asked).values()][1:]
    unknown = [
        p.name
        for p in parameters
        if p.name not in (*names, *values) and p.default is p.empty and p.kind not in VARIADIC
    ]
    if unknown:
        remedy = "so give the others defaults, or values in parentheses"
        remedy = "decorate it with nca_trader.cell_rule" if "channels" in unknown else remedy
        raise ConfigError(
            f"{name}: its constructor asks for {', '.join(unknown)}; it is given "
            f"{', '.join(names)}, {remedy}."
        )
    own = [p.name for p in parameters if p.name not in names and p.kind not in VARIADIC]
    every = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if wrong := [key for key in values if key in names or not (every or key in own)]:
        raise ConfigError(
            f"{name}: its constructor takes no value {wrong[0]!r}; it takes "
            f"{', '.join(own) or 'none of its own'}."
        )
    if not values:
        return cls
    # A class of its own, so that its parameters and its receptive field follow the values.
    bound: dict[str, Any] = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    bound["__init__"] = functools.partialmethod(cls.__init__, **values)
    for member in ("receptive_field", "begin"):
        if known := _bound(getattr(cls, member, None), values):
            bound[member] = staticmethod(known)
    return type(cls.__name__, (cls,), bound)


def _bound(function: Any, values: Mapping[str, Any]) -> Any:
    """Return a function with those of the values that it takes; None if it takes none."""
    if function is None:
        return None
    taken = inspect.signature(function).parameters
    given = {key: value for key, value in values.items() if key in taken}
    return functools.partial(function, **given) if given else None


def _taken(cls: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class's constructor, with `self`."""
    # The signature of Python's own constructor is "anything", but it takes no arguments.
    return {} if cls.__init__ is object.__init__ else inspect.signature(cls.__init__).parameters


def build(cls: Any, given: Mapping[str, Any], values: Mapping[str, Any] | None = None) -> Any:
    """Build the module of a class with those of `given` that it takes, and all `values`."""
    taken = _taken(cls)
    every = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    return cls(**{key: x for key, x in given.items() if every or key in taken}, **(values or {}))


def receptive_field(cls: Any, config: PolicyConfig) -> int:
    """Return the bars that a cell depends on, its own included."""
    bars = getattr(cls, "receptive_field", lambda config: config.window)(config)
    if not isinstance(bars, Integral) or bars < 1:
        what = describe(bars)
        raise ConfigError(
            f"{cls.__name__}.receptive_field: returns {what}; return a number of bars, 1 or more."
        )
    return int(bars)


def encode(module: Any, x: Array, present: Array, fire: Fire | None, halo: int) -> Array:
    """Return the cells of a module, which need not know `fire` and `halo`."""
    whole = {"fire", "halo"} <= set(inspect.signature(type(module).__call__).parameters)
    if whole:
        return module(x, present, fire, halo)
    return module(x, present)[:, halo:] if halo else module(x, present)


def begin(cls: Any, spec: EnvSpec, config: PolicyConfig) -> Any:
    """Return the state of a stream before the first bar."""
    if _has_stream(cls):
        return cls.begin(spec, config)
    shape = (receptive_field(cls, config), spec.num_assets)
    return jnp.zeros((*shape, spec.num_features), jnp.float32), jnp.zeros(shape, bool)


def stream(module: Any, state: Any, x: Array, present: Array) -> tuple[Any, Array]:
    """Encode one new bar; return the next state and its cells."""
    if _has_stream(type(module)):
        return module.stream(state, x, present)
    # The whole receptive field again for each bar: slow, and right for any encoder.
    bars = jnp.concatenate([state[0][1:], x[None].astype(jnp.float32)])
    there = jnp.concatenate([state[1][1:], present[None]])
    return (bars, there), encode(module, bars[None], there[None], None, len(bars) - 1)[0, 0]


def _has_stream(cls: Any) -> bool:
    """Whether a class has a stream that makes the cells of its `__call__`."""

    def above(name: str) -> type:
        return next(base for base in cls.__mro__ if name in vars(base))

    # A stream of a class above the one with `__call__` makes the cells of another rule.
    return hasattr(cls, "stream") and issubclass(above("stream"), above("__call__"))


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


def examine(
    cls: Any, spec: EnvSpec, config: PolicyConfig, precision: PrecisionConfig
) -> frozenset[str]:
    """Encode, stream and decide in shapes alone; return the settings that an encoder does not read.

    Those that ship are known to be right, and their config refuses what has no effect.

    Args:
      cls: of the encoder.
      spec: of the environment.
      config: of the policy.
      precision: of its products.

    Raises:
      ConfigError: what it, its stream or its head returns has another shape or type.
    """
    if (name := config.kind) in KINDS:
        return frozenset()
    read, of_spec = set[str](), set[str]()
    seen, space = watch(config, read), watch(spec, of_spec)
    bars, head = (1, receptive_field(cls, seen) + 1, spec.num_assets), getattr(cls, "HEAD", None)
    width, batch = config.channels, bars[:2]

    with own_code(f"policy.kind = {name!r}"):
        heads = [head and _trace_head(head, spec, width, hidden) for hidden in (1, 2)]

    def trace(x: Array, present: Array, fire: Fire, features: Array) -> None:
        given = (space, seen, precision, nnx.Rngs(0))
        module = build(cls, dict(zip(GIVEN, given, strict=True)))
        cells = encode(module, x, present, fire, 0)
        wanted = jnp.zeros((*bars, width))
        expect_shapes(f"{name}: cells", cells, wanted, f", where {width} is policy.channels")
        if _has_stream(cls):
            state = cls.begin(space, seen)
            after = module.stream(state, x[0, 0], present[0, 0])
            expect_shapes(f"{name}: stream", after, (state, wanted[0, 0]), ", as of begin")
        if head is not None:
            made = head(spec, width, config.head_hidden, nnx.Rngs(0))
            outputs = distribution(spec).outputs(spec)
            wanted = jnp.zeros((*bars, outputs)), jnp.zeros(batch)
            expect_shapes(f"{name}: HEAD", made(cells, features), wanted, ", logits and a value")

    x, account = (
        jax.ShapeDtypeStruct((*bars, n), jnp.float32)
        for n in (spec.num_features, num_account_features(spec))
    )
    fire = Fire(jnp.zeros(1, jnp.uint32), jnp.zeros(1, jnp.int32))
    with own_code(f"policy.kind = {name!r}"), jax.enable_x64(False):
        jax.eval_shape(trace, x, jax.ShapeDtypeStruct(bars, bool), fire, account)
    if "nearest" in of_spec:  # the ranking of assets, which is there for `neighbours` alone
        read.add("neighbours")
    if head is None or heads[0] != heads[1]:
        read.add("head_hidden")
    return frozenset({*defaults_of(PolicyConfig)} - read - READ_ELSEWHERE)


def _trace_head(head: Any, spec: EnvSpec, channels: int, hidden: int) -> str:
    """Return how a head draws its parameters, and what else it holds."""
    drawn = jax.make_jaxpr(
        lambda: nnx.split(head(spec, channels, hidden, nnx.Rngs(0))), return_shape=True
    )
    return str(drawn())


def refuse_unread(config: PolicyConfig, unread: Collection[str]) -> None:
    """Refuse settings away from their defaults that an encoder does not read, see `examine`."""
    defaults = defaults_of(PolicyConfig)
    refuse(
        f"policy.{name}={value!r} is not read by policy.kind={config.kind!r}; leave it out (its "
        f"default is {default!r}), or read config.{name} there."
        for name, default in defaults.items()
        if name in unread and (value := getattr(config, name)) != default
    )


def watch(config: Any, read: set[str]) -> Any:
    """Return a stand-in for a dataclass that adds to `read` what is read from it.

    Of `dataclasses.replace` that is every field that it does not change, of `vars` every field.
    """
    fields = type(config).__dataclass_fields__

    def get(_: Any, name: str) -> Any:
        read.update(fields if name == "__dict__" else (name,))
        return getattr(config, name)

    members = {"__getattribute__": get, "__dataclass_fields__": fields}
    return type(type(config).__name__, (), members)()


# By the names that `PolicyConfig.kind` takes.
ENCODERS: Registry[Any] = Registry(
    "policies", dict(zip(KINDS, (NCA, MLP, GRU), strict=True)), encoder_of
)
