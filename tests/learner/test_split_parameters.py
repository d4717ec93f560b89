"""Parameters split over a mesh learn as whole ones do; what is left out of a mean is noticed."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nca_trader import ConfigError, make_mesh
from nca_trader.config import LearnerConfig, OptimizerConfig
from nca_trader.learner import layout as layouts
from nca_trader.learner import learner as learners
from nca_trader.learner.layout import Layout, Split, make_layout
from nca_trader.learner.optimizer import averaged, make_optimizer
from nca_trader.learner.ppo import AgentSetup, Loss
from nca_trader.learner.update import Parts, learn
from nca_trader.parallel.mesh import BATCH, FSDP, MODEL

CONFIG = LearnerConfig(num_segments=32, logical_shards=8, num_epochs=2, num_minibatches=2)
# A clip that bites, rates by what a layer sums over, weight decay, an average.
OPTIMIZER = OptimizerConfig(
    learning_rate=0.05, max_grad_norm=0.1, base_width=2, warmup_updates=1, ema_decay=0.5
)
WIDE = {"into": 1, "bias": 0, "out": 0}
ITEMS = np.random.default_rng(0).normal(size=(32, 6))
ONE = (1, 1, 1)
SLOW = pytest.mark.slow
MESHES = [
    (8, 1, 1),
    pytest.param((4, 2, 1), marks=SLOW),
    (2, 2, 2),
    pytest.param((1, 2, 4), marks=SLOW),
]


def init(key):
    """Two layers of hidden width 8; `gain` and `odd` no axis of a mesh divides."""
    del key
    rng = np.random.default_rng(1)
    shapes = {"into": (6, 8), "bias": (8,), "out": (8, 4), "odd": (3,), "gain": ()}
    draw = {name: jnp.asarray(0.7 * rng.normal(size=shape)) for name, shape in shapes.items()}
    return {"net": draw}


POLICY = types.SimpleNamespace(init=init, hidden_axis=lambda module, name: WIDE.get(name))


def lose(params, items):
    net = params["net"]
    hidden = jnp.tanh(items @ net["into"] + net["bias"][None])
    out = (hidden @ net["out"]) * net["gain"] + net["odd"].sum()
    loss = ((out - items[:, :4]) ** 2).mean()
    zero = jnp.zeros_like(loss)
    return Loss(loss, loss, zero, zero, zero, zero)


@pytest.fixture(autouse=True)
def quickly(request):
    """Half the time to compile, for all but what must agree to the bit."""
    quick = "deterministic" not in request.node.name
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def learnt(axes, deterministic=False, dtype="f8", config=CONFIG):
    """Parameters, optimiser's state and metrics after an update, and where the two lie."""
    with jax.enable_x64(dtype == "f8"):
        mesh = make_mesh(*axes)
        layout = make_layout(POLICY, mesh, deterministic)
        optimizer = make_optimizer(OPTIMIZER, 8, layout)
        of = types.SimpleNamespace(learner=config)
        setup = AgentSetup(POLICY, config, None)
        parts = Parts(None, layout, None, of, None, optimizer, setup, None)
        by_hand, placed = (learners._spec(parts, *names)[:2] for names in ((FSDP,), (FSDP, MODEL)))

        def once(params, state, items, key):
            args = (config, optimizer, params, state, items, key, layout)
            params, state, metrics = learn(lose, *args)
            return (params, state), metrics

        mapped = jax.shard_map(
            once, mesh=mesh, in_specs=(*by_hand, P(BATCH), P()), out_specs=(by_hand, P()),
            axis_names=layout.by_hand,
        )  # fmt: skip
        placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), placed)
        begin = jax.jit(lambda: (init(None), optimizer.init(init(None))), out_shardings=placed)
        step = jax.jit(mapped, out_shardings=(placed, None))
        state, metrics = step(*begin(), ITEMS.astype(dtype), jax.random.key(0))
        return state, jax.device_get((*state, metrics))


learnt_once = functools.cache(learnt)


def apart(got, want):
    """The largest relative difference of two leaves."""
    return max(
        np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-3)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )


@pytest.mark.heavy
@pytest.mark.parametrize("axes", MESHES)
def test_split_parameters_learn_as_whole_ones_do(axes):
    _, want = learnt_once(ONE)
    _, got = learnt_once(axes)
    assert apart(got, want) < 1e-12
    assert want[2]["grad_norm"] > 0.1  # the clip bites
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), want[0], init(None))
    assert min(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.heavy
def test_parameters_moments_and_averages_are_in_parts_and_what_does_not_divide_is_whole():
    (params, state), _ = learnt_once((2, 2, 2))
    parts = {
        "into": (3, 4),  # 6 inputs over fsdp, 8 wide over model
        "bias": (4,),
        "out": (4, 2),
        "odd": (3,),
        "gain": (),
    }
    adam = state.inner[1][0]
    for tree in (params, adam.mu, adam.nu, averaged(state)):
        for name, shape in parts.items():
            shards = tree["net"][name].addressable_shards
            assert len(shards) == 8 and {s.data.shape for s in shards} == {shape}, name
    into = params["net"]["into"]
    assert len({str(s.index) for s in into.addressable_shards}) == 4
    only_data = learnt_once((8, 1, 1))[0]
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(only_data))


def test_a_layout_says_which_axis_is_split():
    layout = make_layout(POLICY, make_mesh(1, 2, 4))
    assert layout.splits["net"] == {
        "into": Split(0, 1), "bias": Split(None, 0), "out": Split(1, 0),
        "odd": Split(), "gain": Split(),
    }  # fmt: skip
    alone = make_layout(POLICY, make_mesh(4, 2, 1))
    assert alone.splits["net"]["into"] == Split(1) and not alone.by_model
    # 8 over 3, of 6 over 3 the inputs: what the width does not divide by stays whole.
    assert make_layout(POLICY, make_mesh(1, 1, 3)).splits["net"]["into"] == Split()


@pytest.mark.heavy
@pytest.mark.parametrize("devices", [pytest.param(2, marks=SLOW), pytest.param(4, marks=SLOW), 8])
def test_a_deterministic_mesh_ends_in_the_same_bits(devices):
    _, want = learnt_once(ONE, True, "f4")
    _, got = learnt_once((devices, 1, 1), True, "f4")
    jax.tree.map(np.testing.assert_array_equal, got, want)
    # And it is the same run as without, to rounding.
    assert apart(want[0], learnt_once(ONE)[1][0]) < 1e-4


def test_a_deterministic_mesh_has_the_data_axis_alone():
    with pytest.raises(ConfigError, match=r"of the data axis alone, .* fsdp = 2 and model = 1"):
        make_layout(POLICY, make_mesh(2, 2), deterministic=True)


def no_mean(self, gradient, terms):
    """Only the first device's gradient is learnt from."""
    first = jax.lax.axis_index(BATCH) == 0
    alone = jax.tree.map(lambda g: jnp.where(first, g, 0.0), gradient)
    return MEAN(self, alone, terms)


def summed_twice(self, params):
    """Parameters that are the same everywhere: their gradient is a sum already."""
    return self.gathered(params)


def local_norm(self, tree):
    """The norm of a part stands for that of the whole."""
    parts = [jnp.sum(leaf * leaf) for split, leaf in self.pairs(tree) if split.fsdp is not None]
    whole = [jnp.sum(leaf * leaf) for split, leaf in self.pairs(tree) if split.fsdp is None]
    return jnp.sqrt(sum(whole) + jax.lax.pmean(sum(parts), FSDP))


def local_fan_in(self, split, leaf):
    """A device's part of the inputs."""
    return leaf.shape[-2]


MEAN = Layout.mean


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "mutant", "axes"),
    [
        ("mean", no_mean, (8, 1, 1)),
        pytest.param("own", summed_twice, (8, 1, 1), marks=SLOW),
        ("norm", local_norm, (2, 2, 2)),
        pytest.param("fan_in", local_fan_in, (2, 2, 2), marks=SLOW),
    ],
)
def test_what_is_left_out_of_a_mean_or_a_norm_is_noticed(monkeypatch, name, mutant, axes):
    monkeypatch.setattr(layouts.Layout, name, mutant)
    # The metrics as well: a gradient that is N times too big is clipped to the same length.
    assert apart(learnt(axes)[1], learnt_once(ONE)[1]) > 1e-6


def test_a_key_that_two_devices_share_is_noticed(monkeypatch):
    _, want = learnt_once(ONE)
    index = jax.lax.axis_index
    monkeypatch.setattr(jax.lax, "axis_index", lambda name: 0 * index(name))
    assert apart(learnt((8, 1, 1))[1][0], want[0]) > 1e-6


@SLOW
def test_micro_batches_of_a_deterministic_mesh_are_of_one_logical_shard():
    config = dataclasses.replace(CONFIG, num_minibatches=1)
    _, want = learnt((2, 1, 1), True, "f4", config)
    _, got = learnt((8, 1, 1), True, "f4", config)
    jax.tree.map(np.testing.assert_array_equal, got, want)
