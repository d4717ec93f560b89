"""Parameters split over a mesh learn as whole ones do; what is left out of a mean is noticed."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nca_trader import ConfigError, make_mesh
from nca_trader.config import LearnerConfig, OptimizerConfig
from nca_trader.learner import learner as learners
from nca_trader.learner.layout import Split, make_layout
from nca_trader.learner.optimizer import make_optimizer
from nca_trader.learner.ppo import AgentSetup, Loss
from nca_trader.learner.update import Parts, learn
from nca_trader.parallel.mesh import BATCH, FSDP, MODEL

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIG = LearnerConfig(num_segments=32, logical_shards=8, num_epochs=2, num_minibatches=2)
# A clip that bites, rates by what a layer sums over, weight decay, an average.
OPTIMIZER = OptimizerConfig(
    learning_rate=0.05, max_grad_norm=0.1, base_width=2, warmup_updates=1, ema_decay=0.5
)
WIDE = {"into": 1, "bias": 0, "out": 0}
ITEMS = np.random.default_rng(0).normal(size=(32, 6))
ONE = (1, 1, 1)
MESHES = [(2, 2, 2), (8, 1, 1), (4, 2, 1), (1, 2, 4)]


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


def learnt(axes, deterministic=False, dtype="f8", config=CONFIG):
    """Parameters, optimiser's state and metrics after an update."""
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
        return jax.device_get((*state, metrics))


def apart(got, want):
    """The largest relative difference of two leaves."""
    return max(
        np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-3)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )


@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.few(1)
def test_split_parameters_learn_as_whole_ones_do(axes):
    want, got = learnt(ONE), learnt(axes)
    assert apart(got, want) < 1e-12
    assert want[2]["grad_norm"] > 0.1  # the clip bites
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), want[0], init(None))
    assert min(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.heavy
@pytest.mark.parametrize("num_minibatches", [2, 1])  # of one, a micro-batch is a logical shard
def test_a_deterministic_mesh_ends_in_the_same_bits(num_minibatches, without_quick_compile):
    config = dataclasses.replace(CONFIG, num_minibatches=num_minibatches)
    want, *others = (learnt((n, 1, 1), True, "f4", config) for n in (1, 2, 4, 8))
    for got in others:
        jax.tree.map(np.testing.assert_array_equal, got, want)
    # And it is the same run as without, to rounding.
    assert apart(want[0], learnt(ONE, config=config)[0]) < 1e-4


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


def test_a_deterministic_mesh_has_the_data_axis_alone():
    with pytest.raises(ConfigError, match=r"of the data axis alone, .* fsdp = 2 and model = 1"):
        make_layout(POLICY, make_mesh(2, 2), deterministic=True)
