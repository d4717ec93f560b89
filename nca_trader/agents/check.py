"""Checks that hold for every policy: `nca.check_policy(policy)`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.agents.heads import account_features
from nca_trader.agents.policy import Policy
from nca_trader.config.ranges import expect
from nca_trader.envs.account.state import open_account
from nca_trader.envs.check import (
    CLOSE,
    Check,
    CheckReport,
    count_traces,
    difference,
    impure,
    report_of,
    retraced,
    retyped,
)
from nca_trader.envs.rewards import begin_account

AFTER = 4  # bars that are encoded beyond the first whole receptive field
BATCH = 2


def check_policy(policy: Policy, seed: int = 0, only: Collection[str] | None = None) -> CheckReport:
    """Check a policy on random bars, a fifth of them missing.

    The drawn parameters are perturbed, because an untrained policy may return its input and so
    hide a fault.

    Args:
      policy: from `nca.make_policy`, or your own with the same fields.
      seed: of parameters and bars.
      only: names of the checks to run; None is all.

    Returns:
      A `CheckReport`; `report.raise_if_failed()` raises `CheckFailed`.

    Raises:
      ConfigError: `policy` is not a `Policy`.

    Example:
      >>> import nca_trader as nca
      >>> env = nca.TradingEnv(nca.sample_bars("sp500"))
      >>> policy = nca.make_policy("nano", env.spec)
      >>> nca.check_policy(policy, only={"a key decides the parameters"}).passed
      True
    """
    expect("policy", policy, Policy, "a Policy, e.g. of nca.make_policy")
    return report_of(CHECKS, _Run(policy, seed), only)


class _Run:
    """A policy, its parameters and bars, and its results, each computed once."""

    def __init__(self, policy: Policy, seed: int):
        self.policy = policy
        self.keys = jax.random.split(jax.random.key(seed), 4)
        self.length = policy.receptive_field + AFTER
        shape = (BATCH, self.length, policy.spec.num_assets)
        size = (*shape, policy.spec.num_features)
        # Wide enough that some features reach the clip.
        self.x = np.asarray(3.0 * jax.random.normal(self.keys[1], size))
        self.present = np.asarray(jax.random.uniform(self.keys[2], shape) > 0.2)
        self.encode, self.encoded = count_traces(policy.encode)
        self.stream, self.stepped = count_traces(policy.stream)

    @functools.cached_property
    def params(self) -> Any:
        drawn = self.policy.init(self.keys[0])
        leaves, tree = jax.tree.flatten(drawn)
        keys = jax.random.split(self.keys[3], len(leaves))
        moved = [
            leaf + 0.3 * jax.random.normal(key, leaf.shape)
            for key, leaf in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(tree, moved)

    def cells(self, x: np.ndarray, present: np.ndarray) -> np.ndarray:
        return np.asarray(self.encode(self.params, x, present))

    @functools.cached_property
    def lattice(self) -> np.ndarray:
        """`[B, T, A, C]`."""
        return self.cells(self.x, self.present)

    @functools.cached_property
    def streamed(self) -> np.ndarray:
        """`[T, A, C]` of the first row of the batch."""

        def run(params: Any, x: Array, present: Array) -> Array:
            def step(state: Any, bar: tuple[Array, Array]) -> tuple[Any, Array]:
                return self.policy.stream(params, state, *bar)

            return jax.lax.scan(step, self.policy.begin(), (x, present))[1]

        return np.asarray(jax.jit(run)(self.params, self.x[0], self.present[0]))


def parameters_are_plain_dicts_of_float32(run: _Run) -> str:
    """Check that parameters can be saved, sharded and updated as they are."""

    def fault(tree: Any, path: str) -> str:
        if type(tree) is dict:
            return next(filter(None, (fault(v, f"{path}[{k!r}]") for k, v in tree.items())), "")
        if not isinstance(tree, jax.Array):
            return f"params{path} is a {type(tree).__name__}"
        return "" if tree.dtype == jnp.float32 else f"params{path} is {tree.dtype}"

    drawn = run.policy.init(run.keys[0])
    return fault(drawn, "") if type(drawn) is dict else f"params is a {type(drawn).__name__}"


def a_key_decides_the_parameters(run: _Run) -> str:
    """Check that equal keys draw equal parameters, and different keys different ones."""
    draw = run.policy.init
    if fault := difference(draw(run.keys[0]), draw(run.keys[0])):
        return f"the same key draws twice: {fault}"
    return "" if difference(draw(run.keys[0]), draw(run.keys[1])) else "two keys draw the same"


def shapes_and_types_are_as_documented(run: _Run) -> str:
    """Check the cells, the logits and the value."""
    policy, spec = run.policy, run.policy.spec
    assets, shape = spec.num_assets, run.present.shape
    account = begin_account(spec, open_account(jnp.zeros(assets)))
    seen = account_features(spec, account)
    seen = jnp.broadcast_to(seen, (*shape, seen.shape[-1]))
    # Shapes and types need no computation.
    logits, value = jax.eval_shape(policy.act, run.params, run.lattice, seen)
    outputs = policy.distribution.outputs(spec)
    for name, array, expected in (
        ("cells", run.lattice, (*shape, run.lattice.shape[-1])),
        ("logits", logits, (*shape, outputs)),
        ("value", value, shape[:-1]),
    ):
        if array.shape != expected or array.dtype != jnp.float32:
            return f"{name} is {array.dtype}{array.shape}, not float32{expected}"
    return ""


def the_same_call_gives_the_same_result(run: _Run) -> str:
    """Check that `encode` is pure."""
    x, present = run.x[:, : AFTER + 1], run.present[:, : AFTER + 1]
    return impure(run.policy.encode, run.params, x, present)


def a_stream_keeps_its_shapes_and_types(run: _Run) -> str:
    """Check that a stream's state can be the carry of a scan."""
    before = run.policy.begin()
    bar = (run.x[0, 0], run.present[0, 0])
    after, cells = jax.eval_shape(run.policy.stream, run.params, before, *bar)
    expected = run.lattice.shape[2:]
    fault = "" if cells.shape == expected else f"cells are {cells.shape}, not {expected}"
    return retyped(before, after) or fault


def nothing_is_traced_twice(run: _Run) -> str:
    """Check that arguments of the same shapes compile one program."""
    state = run.policy.begin()
    for t in range(3):
        state, _ = run.stream(run.params, state, run.x[0, t], run.present[0, t])
    run.cells(run.x, run.present)
    known = len(run.encoded)  # windows are other shapes
    run.cells(run.x[::-1], run.present[::-1])
    return retraced("stream", run.stepped) or retraced("encode", run.encoded, known)


def a_window_gives_the_cells_of_the_lattice(run: _Run) -> str:
    """Check that a cell depends on its receptive field alone."""
    field = run.policy.receptive_field
    window = run.cells(run.x[:, -field:], run.present[:, -field:])[:, -1]
    return difference(run.lattice[:, -1], window, CLOSE)


def a_halo_is_only_seen(run: _Run) -> str:
    """Check that bars of a halo get no cells and change none."""
    for halo in (1, run.policy.receptive_field - 1):
        encode = jax.jit(functools.partial(run.policy.encode, halo=halo))
        cells = np.asarray(encode(run.params, run.x, run.present))
        if fault := difference(run.lattice[:, halo:], cells, CLOSE):
            return f"behind a halo of {halo}: {fault}"
    return ""


def a_stream_gives_the_cells_of_the_lattice(run: _Run) -> str:
    """Check that paper trading decides as training did."""
    first = run.policy.receptive_field - 1
    return difference(run.lattice[0, first:], run.streamed[first:], CLOSE)


def later_bars_change_no_earlier_cell(run: _Run) -> str:
    """Check for look-ahead."""
    at = run.length - AFTER
    x, present = run.x.copy(), run.present.copy()
    # Features and presence both change, since either could leak.
    x[:, at:] += 1.0
    present[:, at:] = ~present[:, at:]
    changed = (run.cells(x, present) != run.lattice).any(axis=(0, 2, 3))
    if changed[:at].any():
        return f"bar {at} changes the cells of bar {np.argmax(changed)}"
    return "" if changed[at:].any() else f"bar {at} changes no cell at all"


def a_missing_bar_shows_no_features(run: _Run) -> str:
    """Check that the numbers of a missing bar are not read."""
    # A missing bar may carry any number; a large one shows if it is read.
    hidden = np.where(run.present[..., None], run.x, 1e3).astype(np.float32)
    return difference(run.lattice, run.cells(hidden, run.present))


def the_rows_of_a_batch_do_not_meet(run: _Run) -> str:
    """Check that a row of a batch depends on no other."""
    x, present = run.x.copy(), run.present.copy()
    # All other rows change completely; the first must not.
    x[1:], present[1:] = 7.0, False
    return difference(run.lattice[0], run.cells(x, present)[0], CLOSE)


CHECKS: tuple[Callable[[_Run], str | Check], ...] = (
    parameters_are_plain_dicts_of_float32,
    a_key_decides_the_parameters,
    shapes_and_types_are_as_documented,
    the_same_call_gives_the_same_result,
    a_stream_keeps_its_shapes_and_types,
    nothing_is_traced_twice,
    a_window_gives_the_cells_of_the_lattice,
    a_halo_is_only_seen,
    a_stream_gives_the_cells_of_the_lattice,
    later_bars_change_no_earlier_cell,
    a_missing_bar_shows_no_features,
    the_rows_of_a_batch_do_not_meet,
)
