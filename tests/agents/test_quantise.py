"""Weights in few bits: how far they move, what calibration sees, and rounding by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_params

from nca_trader import make_policy
from nca_trader.agents import quantise
from nca_trader.agents import quantise as codebook
from nca_trader.agents.lattice import CHANNELS_LAST, ROWS, Gauged
from nca_trader.agents.quantise import train_codebook
from nca_trader.config import AgentConfig, PolicyConfig
from nca_trader.errors import ConfigError
from nca_trader.types import EnvSpec

SPEC = EnvSpec(symbols=("A", "B"), features=("x", "y"), targets=(-1.0, 0.0, 1.0), warmup=0)


def policy_of(kind):
    given = {
        "nca": {"hidden": 4, "neighbours": "ring", "steps": 1, "dilations": (2,)},
        "mlp": {"hidden": 4, "window": 3},
        "gru": {"window": 2},
    }
    config = PolicyConfig(kind=kind, channels=3, head_hidden=4, **given[kind])
    policy = make_policy(AgentConfig(policy=config), SPEC)
    return policy, random_params(policy, 1, 1.0)


def drawn(rows=40):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(rows, 2, 2)).astype(np.float32)
    return x, np.ones((rows, 2), bool)


@pytest.mark.parametrize("bits", quantise.BITS)
def test_no_weight_moves_by_more_than_half_a_step_of_its_channel(bits):
    rng = np.random.default_rng(0)
    w = (rng.normal(size=(200, 5)) * 10.0 ** np.arange(-3, 2)).astype(np.float32)
    w[:, 2] = 0.0
    leaves = {"m.w": w, "m.b": rng.normal(size=7).astype(np.float32)}
    tensors = quantise.quantised(leaves, bits)
    back = quantise.widened(tensors, {k: v.shape for k, v in leaves.items()}, bits)
    most = np.abs(w.astype("f8")).max(0)
    half = most / (2**bits - 1)  # from the range, not from the step
    moved = np.abs(back["m.w"].astype("f8") - w).max(0)
    assert (moved <= half + 2e-7 * most).all()
    assert (moved >= 0.8 * half).all()
    assert not back["m.w"][:, 2].any()
    np.testing.assert_array_equal(back["m.b"], leaves["m.b"])
    assert tensors["m.w"].nbytes == 1000 * bits // 8


def test_sixteen_bits_are_as_good_as_exact():
    w = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    whole, step = quantise.on_grid(w, 16)
    assert np.abs(whole * step - w).max() < 2**-15 * np.abs(w).max()


def test_two_numbers_to_a_byte_come_back():
    every = np.array([[a, b] for a in range(-8, 8) for b in range(-8, 8)], np.int8)
    np.testing.assert_array_equal(quantise.unpack(quantise.pack(every), every.shape), every)
    odd = every.ravel()[:7]
    assert quantise.pack(odd).nbytes == 4
    np.testing.assert_array_equal(quantise.unpack(quantise.pack(odd), (7,)), odd)


@pytest.mark.parametrize("bits", quantise.BITS)
def test_the_layout_of_a_file_is_that_of_its_tensors(bits):
    leaves = {"m.w": np.ones((3, 5), np.float32), "m.b": np.ones(7, np.float32)}
    found = quantise.layout({name: leaf.shape for name, leaf in leaves.items()}, bits)
    tensors = quantise.quantised(leaves, bits)
    assert found == {name: (x.dtype, x.shape) for name, x in tensors.items()}
    assert all(type(size) is int for _, shape in found.values() for size in shape)


def test_parameters_are_flattened_and_put_back():
    params = policy_of("nca")[1]
    back = quantise.params_of(quantise.leaves_of(params))
    jax.tree.map(np.testing.assert_array_equal, back, params)


@pytest.mark.heavy
def test_calibration_of_a_perceptron_is_the_largest_of_each_layers_inputs():
    policy, params = policy_of("mlp")
    x, present = drawn()
    found = quantise.ranges(policy, params, 4.0 * x, present, chunk=16)
    first = np.abs(np.clip(4.0 * x, -5, 5)).max()
    assert found["mlp.window"] == pytest.approx(first, rel=1e-6)
    # By hand: three bars of an asset, newest first, features and presence, then the layer.
    seen = np.concatenate([np.clip(4.0 * x, -5, 5), np.ones((*x.shape[:2], 1))], axis=-1)
    bars = [np.pad(seen, ((j, 0), (0, 0), (0, 0)))[: len(seen)] for j in range(3)]
    p = jax.tree.map(lambda a: np.asarray(a, "f8"), params["mlp"])
    hidden = np.tanh(np.concatenate(bars, -1) @ p["window"] + p["hidden_bias"])
    assert found["mlp.cell"] == pytest.approx(np.abs(hidden).max(), rel=1e-5)
    assert set(found) == {"mlp.window", "mlp.cell"}  # the readout is not rounded


@pytest.mark.parametrize("kind", ["nca", "gru"])
def test_every_matrix_of_an_encoder_is_calibrated(kind):
    policy, params = policy_of(kind)
    x, present = drawn(12)
    found = quantise.ranges(policy, params, x, present)
    matrices = {f"{kind}.{name}" for name, leaf in params[kind].items() if leaf.ndim == 2}
    assert set(found) == matrices and all(value > 0 for value in found.values())


def test_a_gauged_weight_rounds_what_it_meets_in_both_forms():
    rng = np.random.default_rng(3)
    w = jnp.asarray(rng.normal(size=(5 * 3, 4)), jnp.float32)  # three taps, two neighbours
    x = rng.normal(size=(1, 9, 2, 3)).astype(np.float32)
    step = np.float32(0.25)
    grid = np.clip(np.round(x / step), -7, 7) * step
    assert np.abs(grid - x).max() > 0.05  # some beyond the grid's end, others between its points
    for form in (ROWS, CHANNELS_LAST):
        state = form.enter(jnp.asarray(x))
        exact = form.enter(jnp.asarray(grid))
        gauged = Gauged(w, jnp.float32(step), 4)
        got = form.taps(gauged, state, 2, [state, 2.0 * state], "float32", 0)
        doubled = form.enter(jnp.asarray(np.clip(np.round(2 * x / step), -7, 7) * step))
        want = form.taps(w, exact, 2, [exact, doubled], "float32", 0)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        got = form.dense(Gauged(w[:3], jnp.float32(step), 4), state, "float32")
        np.testing.assert_allclose(got, form.dense(w[:3], exact, "float32"), atol=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "kind", ["nca", *(pytest.param(k, marks=pytest.mark.slow) for k in ("gru", "mlp"))]
)
def test_rounded_activations_of_sixteen_bits_leave_lattice_and_stream_as_they_are(kind):
    policy, params = policy_of(kind)
    x, present = drawn(10)
    steps = quantise.steps_of(quantise.ranges(policy, params, x, present), 16)
    rounded = quantise.params_of(quantise.gauged(quantise.leaves_of(params), steps, 16))
    exact = np.asarray(policy.encode(params, x[None], present[None])[0])
    cells = np.asarray(jax.jit(policy.encode)(rounded, x[None], present[None])[0])
    assert 0 < np.abs(cells - exact).max() < 2e-3 * np.abs(exact).max()
    state, stream = policy.begin(), jax.jit(policy.stream)
    for row in range(len(x)):
        state, newest = stream(rounded, state, x[row], present[row])
    # A number between two points may round either way, where the forms differ in the last digit.
    np.testing.assert_allclose(newest, cells[-1], atol=2e-3 * np.abs(exact).max())


def points(seed=0, count=300, size=2):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(6, size)) * 5
    return (centres[rng.integers(6, size=count)] + rng.normal(size=(count, size))).astype("f4")


def test_k_means_plus_plus_spreads_its_beginnings_and_follows_its_seed():
    rng = np.random.default_rng(0)
    far = np.repeat(np.arange(8.0)[:, None] * 100, 50, axis=0) + rng.normal(size=(400, 1))
    begin = codebook.spread(far.astype("f4"), 8, np.random.default_rng(1))
    assert sorted(np.round(begin[:, 0] / 100)) == list(range(8))  # one in each clump
    one, two, other = (train_codebook(points(), "cosine", 5, seed=s) for s in (1, 1, 2))
    np.testing.assert_array_equal(one.entries, two.entries)
    assert not np.array_equal(np.sort(one.entries, 0), np.sort(other.entries, 0))


def test_directions_have_length_one_and_are_chosen_by_angle():
    groups = points(3, size=3)
    book = train_codebook(groups, "cosine", 16)
    np.testing.assert_allclose(np.linalg.norm(book.entries, axis=1), 1.0, rtol=1e-6)
    unit = groups / np.linalg.norm(groups, axis=1, keepdims=True)
    angle = np.arccos(np.clip(unit.astype("f8") @ book.entries.T.astype("f8"), -1, 1))
    chosen = angle[np.arange(len(groups)), book.nearest(groups)]
    np.testing.assert_allclose(chosen, angle.min(1), atol=1e-6)
    np.testing.assert_array_equal(book.nearest(groups), book.nearest(17 * groups))
    # A longer codebook leaves less of an angle.
    finer = train_codebook(groups, "cosine", 64)
    assert (unit * finer.entries[finer.nearest(groups)]).sum(1).mean() > np.cos(chosen).mean()


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_of_as_many_values_as_entries_come_back_exactly(bits):
    rng = np.random.default_rng(0)
    values = rng.normal(size=2**bits).astype("f4")
    values[0] = 1.0 + np.abs(values).max()
    w = values[rng.integers(len(values), size=(301, 3))]
    w[: len(values)] = values[:, None][: len(w)]  # each channel has all, so one scale fits all
    leaves = {"m.w": w, "m.b": np.ones(3, "f4")}
    tensors = codebook.coded({**leaves}, "euclidean", bits, 1, 0)
    with pytest.raises(ConfigError, match="saves nothing"):
        codebook.coded(leaves, "euclidean", 8, 64, 0)
    back = codebook.decoded(tensors, {k: v.shape for k, v in leaves.items()}, "euclidean", bits)
    np.testing.assert_array_equal(back["m.b"], leaves["m.b"])
    np.testing.assert_allclose(back["m.w"], w, rtol=2e-6)
    assert tensors["m.w"].nbytes == (903 if bits == 8 else 452)


def test_directions_and_gains_give_a_matrix_back_that_has_them():
    # Odd length: the last group of a channel is filled up with zeros.
    rng = np.random.default_rng(0)
    angles = 2 * np.pi * np.arange(16) / 16
    directions = np.stack([np.cos(angles), np.sin(angles)], -1)
    directions = directions[rng.integers(16, size=(40, 3))]
    gains = rng.integers(1, 256, size=(40, 3, 1))
    gains[0] = 255
    w = (gains * directions).transpose(0, 2, 1).reshape(80, 3).astype("f4") / 255
    shapes = {"m.w": w.shape}
    back = codebook.decoded(codebook.coded({"m.w": w}, "cosine", 4, 2, 3), shapes, "cosine", 4)
    np.testing.assert_allclose(back["m.w"], w, atol=0.5 / 255 * 1.01)
    odd = codebook.coded({"m.w": w[:79]}, "cosine", 4, 2, 3)
    back = codebook.decoded(odd, {"m.w": (79, 3)}, "cosine", 4)
    np.testing.assert_allclose(back["m.w"][:78], w[:78], atol=2.5 / 255)


def test_what_makes_no_codebook_is_refused():
    with pytest.raises(ConfigError, match="a single weight has no direction"):
        train_codebook(np.ones((9, 1)), "cosine", 2)
    with pytest.raises(ConfigError, match="16 entries for 1 different groups"):
        train_codebook(np.ones((99, 2)), "euclidean", 16)
    with pytest.raises(ConfigError, match="4 or 8 bits"):
        codebook.coded({}, "euclidean", 16, 1, 0)
