"""An NCA whose update is your own: a module of a cell and its neighbours."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from nca_trader.agents.encoder import build
from nca_trader.agents.lattice import ROWS, TAPS, Form, delay, store
from nca_trader.agents.nca import NCA, Fire
from nca_trader.config import PolicyConfig, PrecisionConfig
from nca_trader.config.agent import num_slots
from nca_trader.config.ranges import describe
from nca_trader.errors import ConfigError
from nca_trader.numerics import wide
from nca_trader.types import EnvSpec


def cell_rule(rule: Any) -> Any:
    """Return the kind of policy whose cells all follow one rule; a decorator.

    All cells follow the rule at each of `config.steps` steps: those of every bar and asset. The
    lattice, the stream, the receptive field, the mask of cell updates and rematerialisation are
    those of `kind = "nca"`, with the same settings.

    Args:
      rule: the class of a Flax nnx module. Its constructor takes any of `channels` (C),
        `neighbours` (M), `config` and `rngs`, and values of its own with defaults.
        `__call__(cell [C], neighbours [M, C], bar [C])` returns the cell's next state `[C]`:
        `neighbours` are the states that the cell had one and two dilations ago, then those of other
        assets, see `config.neighbours`; `bar` is its own embedded bar. Before the first bar a state
        is 0. All are float32.

    Raises:
      ConfigError: it is not such a class.

    Example:
      >>> import jax.numpy as jnp, nca_trader as nca
      >>> from flax import nnx
      >>> @nca.cell_rule
      ... class Mean(nnx.Module):
      ...     def __init__(self, channels, rngs):
      ...         self.mix = nnx.Linear(3 * channels, channels, rngs=rngs)
      ...     def __call__(self, cell, neighbours, bar):
      ...         return jnp.tanh(self.mix(jnp.concatenate([cell, neighbours.mean(0), bar])))
      >>> issubclass(Mean, nnx.Module)
      True
    """
    if not (isinstance(rule, type) and issubclass(rule, nnx.Module) and "__call__" in dir(rule)):
        raise ConfigError(
            f"cell_rule: {describe(rule)} is not a rule; give the class of a Flax nnx module with "
            "__call__(self, cell, neighbours, bar)."
        )
    named = {name: getattr(rule, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(rule.__name__, (_CellRule,), {"RULE": rule, **named})


class _CellRule(NCA):
    """The lattice and the stream of an NCA around a rule of your own."""

    RULE: ClassVar[Any] = None
    GIVEN: ClassVar[tuple[str, ...]] = ("channels", "neighbours", "config", "rngs")
    HIDDEN: ClassVar = {}

    def __init__(
        self,
        spec: EnvSpec,
        config: PolicyConfig,
        precision: PrecisionConfig,
        rngs: nnx.Rngs,
        **values: Any,
    ):
        self.config, self.spec = config, spec
        self.precision, self.matmul_dtype = precision, precision.matmul
        width, count = config.channels, TAPS - 1 + num_slots(spec.num_assets, config)
        normal = jax.nn.initializers.lecun_normal()
        self.embed = nnx.Param(normal(rngs.params(), (spec.num_features + 1, width)))
        given = dict(zip(self.GIVEN, (width, count, config, rngs), strict=True))
        self.rule = build(self.RULE, given, values)

    def __init_subclass__(cls, **more: Any):
        super().__init_subclass__(**more)
        if "__call__" in vars(cls):
            raise ConfigError(
                f"{cls.__name__}: is a subclass of a decorated rule; let it be one of the module "
                "without the decorator, and decorate it."
            )

    def __call__(self, x: Array, present: Array, fire: Fire | None = None, halo: int = 0) -> Array:
        """`[B, T - halo, A, C]` cells; `x` `[B, T, A, F]`, `present` `[B, T, A]`."""
        return self.encode(ROWS, x, present, fire, halo)

    stream = NCA.stream  # of this rule, so that it is taken, see `encoder.stream`

    def _rule(self) -> None:
        """Its parameters are its module's."""

    def _injected(self, form: Form, embedded: Array) -> Array:
        return embedded

    def _step(
        self,
        form: Form,
        rule: Any,
        dilation: int,
        first: int,
        state: Array,
        mask: Array,
        injected: Array,
        fire: Array | None,
    ) -> Array:
        past = [delay(state, j * dilation, first) for j in range(TAPS)]
        return self._next(rule, past, self._beside(form, past[0], mask), injected, fire)

    def _next(
        self,
        rule: Any,
        past: list[Array],
        beside: list[Array],
        injected: Array,
        fire: Array | None = None,
    ) -> Array:
        state, *neighbours = wide(jnp.stack(past + beside))
        # One cell at a time: the channels are the first axis of cells, and each row is a bar's.
        each: Any = self.rule
        for _ in range(3):
            each = jax.vmap(each, (-1, -1, -1), -1)
        after = each(state, jnp.stack(neighbours), injected)
        if getattr(after, "shape", None) != state.shape or after.dtype != jnp.float32:
            # The other axes are those of bars, of the batch and of assets.
            found = (
                f"{after.dtype}{after.shape[:-3]}" if hasattr(after, "shape") else describe(after)
            )
            raise ConfigError(
                f"{type(self.rule).__name__}: returns {found} for a cell; return float32"
                f"{state.shape[:1]}."
            )
        after = after if fire is None else state + (after - state) * fire
        return store(after, self.precision).astype(past[0].dtype)
