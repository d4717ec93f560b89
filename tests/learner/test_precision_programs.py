"""The program of an update, read: gradients cross devices, and products sum, in float32."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from nca_trader import make_learner, make_mesh, make_policy
from nca_trader.config import PrecisionConfig
from nca_trader.learner import exact

PRODUCT = re.compile(
    r"stablehlo\.(?:dot_general|convolution)([^\n]*): \((tensor<[^>]*>), (tensor<[^>]*>)\) -> "
    r"(tensor<[^>]*>)"
)
COLLECTIVE = re.compile(
    r'"stablehlo\.(?:all_reduce|reduce_scatter|all_gather)".*?: \((tensor<[^>]*>)[^\n]*\) -> ',
    re.DOTALL,
)
SUM = re.compile(r"stablehlo\.reduce\([^\n]*applies stablehlo\.add[^\n]*: \((tensor<[^>]*>)")
PRESETS = {
    "f32": PrecisionConfig(),
    "bf16": PrecisionConfig(matmul="bfloat16"),
    "compute": PrecisionConfig(matmul="bfloat16", compute="bfloat16"),
}


def dtype(tensor):
    return re.search(r"(\w+)>$", tensor.replace("x", " "))[1]


def as_they_are(product):
    """Whether an accelerator multiplies these operands without rounding them first."""
    options, left, right, _ = product
    return dtype(left) == dtype(right) == "bf16" or options.count("HIGHEST") == 2


def size(tensor):
    return math.prod(int(n) for n in re.findall(r"(\d+)x", tensor))


def program(stage, preset, platform="cpu"):
    """The text of `learner.step` on eight devices, as it is handed to the compiler.

    Returns it, the number of parameters, and the types of all that an update leaves.
    """
    learn = dataclasses.replace(stage.agent.learner, num_epochs=1, num_minibatches=1)
    agent = dataclasses.replace(stage.agent, learner=learn, precision=PRESETS[preset])
    learner = make_learner(stage.env, make_policy(agent, stage.env.spec), agent, make_mesh(8))
    state = jax.eval_shape(learner.init, jax.random.key(0))
    traced = jax.jit(learner.step).trace(state)
    leaves = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    left = {leaf.dtype.name for leaf in jax.tree.leaves(traced.out_info)}
    return traced.lower(lowering_platforms=(platform,)).as_text(), leaves, left


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("preset", "platform"),
    # On a TPU taps are convolutions.
    [("f32", "tpu"), ("bf16", "tpu"), ("compute", "tpu"), ("bf16", "cpu"), ("compute", "cpu")],
)
@pytest.mark.few(2)
def test_gradients_cross_devices_products_sum_and_all_state_is_in_float32(stage, preset, platform):
    text, parameters, left = program(stage, preset, platform)
    # Parameters, moments, accounts and metrics: none is rounded, whatever computes.
    assert {name for name in left if "float" in name} == {"float32"}
    crossing = COLLECTIVE.findall(text)
    assert {dtype(tensor) for tensor in crossing} <= {"f32", "i32", "ui32", "i1"}
    assert sum(size(tensor) for tensor in crossing if dtype(tensor) == "f32") >= parameters
    products = PRODUCT.findall(text)
    assert len(products) > 10 and {dtype(out) for *_, out in products} == {"f32"}
    # With bfloat16 a gradient that comes back is an operand, and rounded like the others.
    assert all(as_they_are(product) for product in products) == (preset == "f32")
    rounded = [row for row in products if dtype(row[1]) == dtype(row[2]) == "bf16"]
    assert bool(rounded) == (preset != "f32")
    assert ("bf16" in text) == (preset != "f32")
    sums = SUM.findall(text)
    assert sums and "bf16" not in {dtype(tensor) for tensor in sums}
    # Cells that are kept in bfloat16 are delayed as such; else it is a product's operand alone.
    delayed = re.search(r"stablehlo\.pad [^\n]*bf16", text)
    if platform == "cpu":
        assert bool(delayed) == (preset == "compute")


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_readout_is_of_float32_whatever_its_encoder_is_of(stage, platform):
    agent = dataclasses.replace(stage.agent, precision=PRESETS["compute"])
    policy = make_policy(agent, stage.env.spec)
    params = jax.eval_shape(policy.init, jax.random.key(0))
    assets = stage.env.spec.num_assets
    cells, seen = jnp.ones((4, 1, assets, agent.policy.channels)), jnp.ones((4, 3, assets, 3))

    def gradient(params):
        return jax.grad(lambda params: sum(x.sum() for x in policy.act(params, cells, seen)))(
            params
        )

    text = jax.jit(gradient).trace(params).lower(lowering_platforms=(platform,)).as_text()
    products = PRODUCT.findall(text)
    assert len(products) > 4 and all(as_they_are(product) for product in products)


@pytest.mark.parametrize("recursion", [exact.action_values, exact.occupancies])
def test_values_and_occupancies_of_states_are_not_rounded_on_an_accelerator(recursion):
    """Each is multiplied once a bar: what bfloat16 loses, it would lose over and over."""
    pi, leads = jnp.ones((2, 8, 1, 3, 3)), jnp.ones((3, 3, 3))
    asked = (pi, pi, leads) if recursion is exact.action_values else (pi[:, 0, ..., 0], pi, leads)
    constants = {"discount": 0.9} if recursion is exact.action_values else {}
    lowered = jax.jit(functools.partial(recursion, **constants)).lower(*asked)
    products = PRODUCT.findall(lowered.as_text())
    assert products and all(as_they_are(product) for product in products)
