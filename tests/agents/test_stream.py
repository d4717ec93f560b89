"""Lattice, window and stream are one function of the last bars, whatever the schedule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_params

from nca_trader.agents.encoder import MLP
from nca_trader.agents.policy import make_policy
from nca_trader.config import AgentConfig, PolicyConfig
from nca_trader.types import EnvSpec

SMALL = PolicyConfig(channels=4, hidden=6, steps=2, dilations=(1, 2), head_hidden=5)


def spec_of(assets):
    nearest = tuple(tuple(b for b in range(assets) if b != a) for a in range(assets))
    return EnvSpec(
        symbols=tuple("ABCDE"[:assets]),
        features=("rsi", "macd"),
        targets=(-0.3, 0.3),
        warmup=0,
        nearest=nearest if assets > 1 else (),
    )


def drawn(policy, length, seed=0):
    """Parameters of which none is zero, and bars of which a fifth is missing."""
    params, rng = random_params(policy, seed), np.random.default_rng(seed)
    shape = (length, policy.spec.num_assets)
    x = (3.0 * rng.normal(size=(*shape, 2))).astype(np.float32)
    return params, x, rng.random(shape) > 0.2


def streamed(policy, params, x, present):
    """Cells `[T, A, C]` of a stream that begins before the first bar."""
    return jax.lax.scan(lambda s, bar: policy.stream(params, s, *bar), policy.begin(), (x, present))


def three_ways(policy, params, x, present):
    """Cells of the lattice and of the stream, and of a window at the last bar."""

    def run(params, x, present):
        lattice = policy.encode(params, x[None], present[None])[0]
        field = policy.receptive_field
        window = policy.encode(params, x[None, -field:], present[None, -field:])[0, -1]
        return lattice, streamed(policy, params, x, present)[1], window

    return jax.jit(run)(params, x, present)


@pytest.mark.parametrize(
    ("dilations", "steps", "assets", "neighbours"),
    [
        ((1, 3), 3, 3, "nearest"),
        ((2,), 1, 4, "ring"),
        ((3, 1), 2, 2, "all"),
        ((7, 4, 2), 4, 1, "none"),
        ((5, 1, 6), 4, 4, "all"),
        ((1, 2), 4, 4, "nearest"),
    ],
)
@pytest.mark.few(2)
def test_lattice_window_and_stream_are_equal(dilations, steps, assets, neighbours):
    config = dataclasses.replace(
        SMALL, dilations=dilations, steps=steps, neighbours=neighbours, num_neighbours=2
    )
    policy = make_policy(AgentConfig(policy=config), spec_of(assets))
    params, x, present = drawn(policy, policy.receptive_field + 3)
    lattice, stream, window = three_ways(policy, params, x, present)
    # From the very first bar on: what was not there is state 0 in all of them.
    np.testing.assert_allclose(stream, lattice, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(window, lattice[-1], rtol=1e-5, atol=1e-5)
    assert np.abs(lattice[-1]).max() > 0.1


def test_a_stream_forgets_when_it_began():
    # Bit for bit: its state after RF - 1 bars is theirs alone, so a restart replays so many.
    policy = make_policy(AgentConfig(policy=SMALL), spec_of(2))
    field = policy.receptive_field
    params, x, present = drawn(policy, field + 20)
    run = jax.jit(lambda x, present: streamed(policy, params, x, present))
    late = field - 1
    (whole, _), (short, cells) = run(x, present), run(x[-late:], present[-late:])
    for a, b in zip(whole, short, strict=True):
        np.testing.assert_array_equal(a, b)
    assert cells.shape == (late, 2, 4)
    missed, _ = run(x[1 - late :], present[1 - late :])
    assert any((a != b).any() for a, b in zip(whole, missed, strict=True))


def test_what_is_not_a_number_leaves_a_stream_with_its_bar():
    policy = make_policy(AgentConfig(policy=SMALL), spec_of(2))
    field = policy.receptive_field
    params, x, present = drawn(policy, field + 4)
    x[3] = np.nan
    _, cells = jax.jit(lambda x: streamed(policy, params, x, present))(x)
    finite = np.isfinite(cells).all((1, 2))
    assert finite[:3].all() and not finite[3] and finite[3 + field :].all()


@pytest.mark.parametrize("dilations", [(1,), (3, 1)])
def test_a_stream_keeps_two_rows_a_dilation_and_works_once_a_step(dilations):
    config = dataclasses.replace(SMALL, dilations=dilations, steps=4)
    policy = make_policy(AgentConfig(policy=config), spec_of(1))
    assert sum(rows.shape[1] for rows in policy.begin()) == policy.receptive_field - 1
    params, x, present = drawn(policy, 1)

    def flops(steps):
        other = make_policy(
            AgentConfig(policy=dataclasses.replace(config, steps=steps)), spec_of(1)
        )
        step = jax.jit(lambda s: other.stream(params, s, x[0], present[0]))
        text = step.lower(other.begin()).as_text()
        return text.count("dot_general")

    assert [flops(steps) for steps in (1, 2, 4)] == [4, 6, 10]  # two to enter, two a step


def test_streams_of_many_accounts_are_batched():
    policy = make_policy(AgentConfig(policy=SMALL), spec_of(2))
    params, x, present = drawn(policy, 6)
    batch = jnp.stack([x, x[::-1]])
    stream = lambda x: streamed(policy, params, x, present)[1]  # noqa: E731
    alone = jax.jit(stream)
    for row, one in zip(jax.jit(jax.vmap(stream))(batch), batch, strict=True):
        expected = alone(one)
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-6)


class Doubled(MLP):
    """Cells of its own, and the stream of the class above."""

    def __call__(self, x, present):
        return 2.0 * super().__call__(x, present)


@pytest.mark.parametrize("kind", [Doubled, "gru"])
def test_a_stream_of_the_class_above_is_not_used_with_cells_of_its_own(kind):
    own = {"hidden": 4} if kind is Doubled else {}
    config = PolicyConfig(kind=kind, window=3, channels=4, **own)
    policy = make_policy(AgentConfig(policy=config), spec_of(2))
    lattice, stream, window = three_ways(policy, *drawn(policy, 8))
    np.testing.assert_allclose(stream, lattice, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(window, lattice[-1], rtol=1e-5, atol=1e-5)
