"""The lattice against a loop over cells written from the formula, and what it promises."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import SPEC, random_input, random_params
from flax import nnx

from nca_trader.agents import nca
from nca_trader.agents.lattice import CHANNELS_LAST, ROWS, relu_once
from nca_trader.agents.nca import NCA, Fire
from nca_trader.agents.policy import make_policy, with_steps
from nca_trader.config import AgentConfig, PolicyConfig, PrecisionConfig
from nca_trader.errors import ConfigError
from nca_trader.numerics import hash_uniform

SMALL = PolicyConfig(channels=4, hidden=6, steps=3, dilations=(1, 2), head_hidden=5)


def policy_of(spec=SPEC, matmul="float32", **changes):
    config = dataclasses.replace(SMALL, **changes)
    return make_policy(AgentConfig(policy=config, precision=PrecisionConfig(matmul=matmul)), spec)


@functools.cache
def compiled(function):
    return jax.jit(function)


def encode(policy, params, x, present):
    return compiled(policy.encode)(params, x, present)


def others_of(config, asset, assets):
    """The assets that have a slot of weights beside `asset`, in order."""
    if config.neighbours == "nearest":
        return SPEC.nearest[asset][: config.num_neighbours]
    around = {"ring": [(asset - 1) % assets, (asset + 1) % assets]}.get(config.neighbours, [])
    return [b for i, b in enumerate(around) if b != asset and b not in around[:i]]


def cell_by_cell(params, config, x, present, fires=lambda t, a, k: 1.0):
    """The states of one sequence `[T, A, C]` in float64, one cell at a time.

    Args:
      fires: what an update is multiplied with.
    """
    p = {name: np.asarray(value, np.float64) for name, value in params["nca"].items()}
    length, assets = present.shape
    width = config.channels
    tap = [p["taps"][j * width : (j + 1) * width] for j in range(3)]
    slots = [p["taps"][j * width : (j + 1) * width] for j in range(3, len(p["taps"]) // width)]
    e = {}
    for t in range(length):
        for a in range(assets):
            m = float(present[t, a])
            clipped = np.clip(x[t, a].astype(np.float64), -config.feature_clip, config.feature_clip)
            e[t, a] = np.append(clipped * m, m) @ p["embed"]
    state = dict(e)
    for k in range(config.steps):
        d = config.dilations[k % len(config.dilations)]
        new = {}
        for t, a in state:
            total = e[t, a] @ p["inject"] + p["hidden_bias"]
            for j in range(3):
                if t - j * d >= 0:
                    total = total + state[t - j * d, a] @ tap[j]
            others = [b for b in range(assets) if b != a and present[t, b]]
            if config.neighbours == "all" and others:
                total = total + sum(state[t, b] for b in others) / len(others) @ slots[0]
            if config.neighbours in ("ring", "nearest"):
                for slot, b in zip(slots, others_of(config, a, assets), strict=True):
                    if present[t, b]:
                        total = total + state[t, b] @ slot
            change = np.tanh(np.maximum(total, 0.0) @ p["update"] + p["update_bias"])
            new[t, a] = (1.0 - config.leak) * state[t, a] + change * fires(t, a, k)
        state = new
    return np.array([[state[t, a] for a in range(assets)] for t in range(length)])


@pytest.mark.parametrize(
    ("neighbours", "steps", "dilations"),
    # Three steps repeat a cycle of two; a dilation of 15 reaches before the first of 10 bars.
    [("none", 3, (1, 2)), ("ring", 2, (2, 15)), ("nearest", 3, (1, 2)), ("all", 2, (2, 15))],
)
def test_lattice_equals_a_loop_over_cells(neighbours, steps, dilations):
    config = dataclasses.replace(SMALL, neighbours=neighbours, steps=steps, dilations=dilations)
    policy = policy_of(neighbours=neighbours, steps=steps, dilations=dilations)
    params, (x, present) = random_params(policy), random_input(10)
    cells = encode(policy, params, x, present)
    assert cells.dtype == jnp.float32
    for row in range(2):
        expected = cell_by_cell(params, config, x[row], present[row])
        np.testing.assert_allclose(cells[row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("steps", "dilations"), [(1, (1,)), (4, (3, 1, 2))])
def test_receptive_field_is_exact(steps, dilations):
    policy = policy_of(steps=steps, dilations=dilations)
    field = 1 + 2 * sum(dilations[k % len(dilations)] for k in range(steps))
    assert policy.receptive_field == field
    params, (x, _) = random_params(policy), random_input(field + 3, batch=1)

    def last_cell(changed=None):
        there = np.ones((1, field + 3, 3), bool)
        other = x.copy()
        if changed is not None:
            other[:, changed] += 1.0
        return np.asarray(encode(policy, params, other, there))[0, -1]

    oldest = len(x[0]) - field
    assert np.abs(last_cell(oldest) - last_cell()).max() > 1e-6
    np.testing.assert_array_equal(last_cell(oldest - 1), last_cell())


@pytest.mark.parametrize("leak", [0.25, 1.0])
def test_states_stay_within_their_bound_whatever_the_weights(leak):
    policy = policy_of(steps=10, dilations=(1,), leak=leak, neighbours="ring")
    params, (x, present) = random_params(policy, scale=1000.0), random_input(6)
    states = np.abs(encode(policy, params, x, present))
    mask = present[..., None].astype(np.float32)
    e = np.concatenate([np.clip(x, -5, 5) * mask, mask], -1) @ np.asarray(params["nca"]["embed"])
    assert (states <= np.maximum(np.abs(e), 1.0 / leak) * (1 + 1e-5)).all()
    assert states.max() > 0.9 / leak  # and the bound is no loose one


@pytest.mark.heavy
def test_an_untrained_rule_hears_of_assets_as_many_places_away_as_it_has_steps():
    """And from an update of zero it would not: no gradient would ever lead there."""
    symbols = tuple("ABCDEFGH")
    spec = dataclasses.replace(SPEC, symbols=symbols, nearest=())
    policy = policy_of(spec, neighbours="ring", channels=8, hidden=64)
    params, x = policy.init(jax.random.key(0)), 0.1 * random_input(5, 1, assets=8)[0]
    present = np.ones(x.shape[:-1], bool)

    def heard(params):
        cells = lambda x: policy.encode(params, x, present)[0, -1, 0].sum()  # noqa: E731
        return np.abs(jax.jit(jax.grad(cells))(x))[0].sum((0, 2))

    found = heard(params)
    assert SMALL.steps == 3 and (found[[0, 1, 2, 3, 5, 6, 7]] > 1e-6).all()
    assert found[4] == 0.0  # four places either way
    params["nca"]["update"] = jnp.zeros_like(params["nca"]["update"])
    assert (heard(params)[1:] == 0.0).all()


def test_bfloat16_touches_operands_only():
    policies = [policy_of(matmul=name, steps=1) for name in ("float32", "bfloat16")]
    params, (x, present) = random_params(policies[0]), random_input(12)
    exact, rounded = (encode(policy, params, x, present) for policy in policies)
    assert rounded.dtype == jnp.float32
    assert 1e-4 < np.abs(rounded - exact).max() < 0.1
    gradient = jax.jit(jax.grad(lambda p: policies[1].encode(p, x, present).sum()))(params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradient)} == {"float32"}
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_sums_of_bfloat16_products_are_float32():
    # A rule that hands on its input leaves one product of matrices, rounded nowhere but before.
    policy = policy_of(matmul="bfloat16", steps=1)
    params, (x, present) = random_params(policy), random_input(12)
    still = {name: 0.0 * params["nca"][name] for name in ("update", "update_bias")}
    params = params | {"nca": params["nca"] | still}
    mask = present[..., None].astype(np.float32)
    seen = np.concatenate([np.clip(x, -5, 5) * mask, mask], -1)
    a, b = (np.asarray(jnp.asarray(y, jnp.bfloat16), "f8") for y in (seen, params["nca"]["embed"]))
    expected = 0.9 * (a @ b)
    # Op by op: compiled whole, XLA may drop a rounding to bfloat16 that should not be there.
    got = policy.encode(params, x, present)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def spec_of(assets):
    return dataclasses.replace(SPEC, symbols=tuple("ABCDE"[:assets]), nearest=())


@pytest.mark.parametrize(("assets", "neighbours"), [(1, "ring"), (2, "ring"), (1, "all")])
def test_few_assets_have_no_more_slots_than_others(assets, neighbours):
    # In a ring of two the one before is the one after; one asset is no neighbour of itself.
    spec, config = spec_of(assets), dataclasses.replace(SMALL, neighbours=neighbours, steps=1)
    policy = policy_of(spec, neighbours=neighbours, steps=1)
    params, (x, present) = random_params(policy), random_input(9, 1, assets=assets)
    slots = min(assets - 1, 2 if neighbours == "ring" else 1)
    assert params["nca"]["taps"].shape == ((3 + slots) * 4, 6)
    expected = cell_by_cell(params, config, x[0], present[0])
    np.testing.assert_allclose(
        encode(policy, params, x, present)[0], expected, rtol=1e-4, atol=1e-5
    )


def test_nearest_neighbours_follow_the_ranking_and_need_one():
    one, other = (dataclasses.replace(SPEC, nearest=n) for n in (SPEC.nearest, ((1, 2),) * 3))
    policies = [
        policy_of(spec, neighbours="nearest", num_neighbours=1, steps=1) for spec in (one, other)
    ]
    params, (x, present) = random_params(policies[0]), random_input(9)
    assert params["nca"]["taps"].shape == ((3 + 1) * 4, 6)
    a, b = (encode(policy, params, x, present) for policy in policies)
    assert np.abs(a - b).max() > 1e-3
    # Whoever sees none takes the policy that was made for another ranking.
    assert policy_of(one) is policy_of(other)
    with pytest.raises(ConfigError, match="ranks no assets"):
        policy_of(spec_of(3), neighbours="nearest")


FIRES = {"neighbours": "ring", "fire_rate": 0.6, "steps": 3}


def fire_at(seed, row, rate=0.6):
    """What the update of asset a at absolute row `row + t` and step k is multiplied with."""
    return lambda t, a, k: float(hash_uniform(seed, row + t, a, k) < rate) / rate


@pytest.mark.heavy
def test_fire_masks_updates_by_seed_row_asset_and_step():
    policy, config = policy_of(**FIRES), dataclasses.replace(SMALL, **FIRES)
    params, (x, present) = random_params(policy), random_input(8)
    fire = Fire(jnp.array([7, 2**32 - 1], jnp.uint32), jnp.array([100, 3], jnp.int32))
    cells = compiled(policy.encode)(params, x, present, fire)
    for b, (seed, row) in enumerate(((7, 100), (2**32 - 1, 3))):
        with jax.disable_jit():
            chances = fire_at(np.uint32(seed), row)
            expected = cell_by_cell(params, config, x[b], present[b], chances)
        np.testing.assert_allclose(cells[b], expected, rtol=1e-4, atol=1e-5)
    # Evaluation makes every update, and a rate of 1 draws nothing.
    quiet = encode(policy, params, x, present)
    everywhere = cell_by_cell(params, config, x[0], present[0])
    np.testing.assert_allclose(quiet[0], everywhere, rtol=1e-4, atol=1e-5)
    assert np.abs(quiet - cells).max() > 0.1
    always = policy_of(**FIRES | {"fire_rate": 1.0})
    np.testing.assert_array_equal(compiled(always.encode)(params, x, present, fire), quiet)


@pytest.mark.heavy
def test_what_each_remat_keeps_of_a_cell_until_its_gradient_is_due():
    length, batch, features = 20, 2, len(SPEC.features)
    c, h, k = SMALL.channels, SMALL.hidden, 6

    def kept(remat):
        changes = {"steps": k, "remat": remat}
        policy = policy_of(**changes)
        params, (x, present) = random_params(policy), random_input(length, batch)

        def residuals(params, x, present):
            def encode(params):
                return module_of(changes, params).encode(CHANNELS_LAST, x, present, None)

            return jax.tree.leaves(jax.vjp(encode, params)[1])

        program = jax.make_jaxpr(residuals)(params, x, present).jaxpr
        sizes = {v: v.aval.size for v in program.outvars if not hasattr(v, "val")}.values()
        return sum(size for size in sizes if size >= present.size) / present.size

    inputs = features + 1 + h  # what the embedded cell is made of, and what it adds to every step
    assert kept("step") == inputs + k * c
    assert kept("every:2") == inputs + k / 2 * c
    assert kept("every:4") == inputs + 2 * c  # of 4 steps, and of the 2 that are left
    assert kept("dots") == inputs + c + k * (h + c)
    assert kept("none") > 2 * k * (h + c)


def module_of(policy_changes, params):
    """The encoder itself, to call in a form of one's choice."""
    config = dataclasses.replace(SMALL, **policy_changes)
    module = nnx.eval_shape(lambda: NCA(SPEC, config, PrecisionConfig(), nnx.Rngs(0)))
    return nnx.merge(nnx.graphdef(module), params["nca"])


@pytest.mark.parametrize("neighbours", ["nearest", "all"])
def test_the_form_for_a_tpu_equals_the_form_for_a_cpu(neighbours):
    changes = {"neighbours": neighbours, "fire_rate": 0.6, "dilations": (2, 1), "steps": 2}
    policy = policy_of(**changes)
    params, (x, present) = random_params(policy), random_input(12)
    fire = Fire(jnp.array([1, 2], jnp.uint32), jnp.array([0, 9], jnp.int32))

    @jax.jit
    def both(params):
        def lose(params, form):
            cells = module_of(changes, params).encode(form, x, present, fire)
            return (cells**2).mean(), cells

        return [jax.grad(lose, has_aux=True)(params, form) for form in (ROWS, CHANNELS_LAST)]

    rows, last = (jax.tree.leaves(tree) for tree in both(params))
    for a, b in zip(rows, last, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", [ROWS, CHANNELS_LAST], ids=["for a cpu", "for a tpu"])
def test_cells_behind_a_halo_are_those_of_the_whole_lattice(form):
    changes = {"neighbours": "nearest", "fire_rate": 0.6, "dilations": (4, 2), "steps": 2}
    policy = policy_of(**changes)
    params, (x, present) = random_params(policy), random_input(20)
    fire = Fire(jnp.array([1, 2], jnp.uint32), jnp.array([0, 9], jnp.int32))
    module = module_of(changes, params)
    halos = (0, 3, policy.receptive_field + 2)  # 12 bars are seen

    @jax.jit
    def run(x):
        return [module.encode(form, x, present, fire, halo) for halo in halos]

    whole, *others = run(x)
    for halo, cells in zip(halos[1:], others, strict=True):
        np.testing.assert_allclose(cells, whole[:, halo:], rtol=1e-5, atol=1e-6)


def test_no_state_is_computed_that_no_decision_sees():
    # Dilations 1, 2, 4 reach 2, 4, 8 bars back. Of the last states bar 10 on is asked for, so of
    # those before bar 2 on, of those before that bar 0 on (bars -2 and -1 are not there).
    assert nca.first_bars((1, 2, 4), 10) == [0, 0, 2, 10]
    assert nca.first_bars((1, 2, 4), 14) == [0, 2, 6, 14]
    assert nca.first_bars((1, 2, 4), 20) == [6, 8, 12, 20]
    assert nca.first_bars((1, 2, 4), 0) == [0, 0, 0, 0]


def test_a_batch_encoded_in_parts_is_the_batch(monkeypatch):
    changes = {"neighbours": "all", "fire_rate": 0.6, "steps": 1}
    policy = policy_of(**changes)
    params, (x, present) = random_params(policy), random_input(12, 32)
    fire = Fire(jnp.arange(32, dtype=jnp.uint32), jnp.arange(32, dtype=jnp.int32))

    def lose(params, parts):
        monkeypatch.setattr(nca, "CHUNK_BYTES", 2**23 if parts == 1 else whole // parts)
        assert nca.num_chunks(x.shape[:3], SMALL.hidden) == parts
        module = module_of(changes, params)
        cells = module.encode_chunks(x, present, fire)
        return (cells**2).mean(), cells

    whole = 4 * SMALL.hidden * x[..., 0].size
    run = jax.jit(jax.grad(lose, has_aux=True), static_argnums=1)
    for a, b in zip(*(jax.tree.leaves(run(params, parts)) for parts in (1, 4)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize(
    ("cells", "width", "parts"),
    [
        ((1024, 60, 1), 128, 4),  # 2^23 bytes are 16,384 cells of 128 channels: 273 rows of 60
        ((1000, 60, 1), 128, 4),
        ((273, 60, 1), 128, 1),
        ((274, 60, 1), 128, 2),
        ((1023, 60, 1), 128, 11),  # 3 * 11 * 31: of its divisors 93 is the largest below 273
        ((1021, 60, 1), 128, 1),  # a prime: parts of one row would leave a tile empty
        ((64, 384, 2), 128, 4),
        ((4, 100_000, 1), 128, 1),
    ],
)
def test_parts_of_a_batch_fit_the_chip_and_are_no_thinner_than_a_tile(cells, width, parts):
    assert nca.num_chunks(cells, width) == parts
    if parts > 1:
        assert 4 * width * np.prod(cells) / parts <= nca.CHUNK_BYTES and cells[0] / parts >= 8


@pytest.mark.heavy
def test_a_cpu_runs_no_convolution_and_a_tpu_does():
    policy = policy_of()
    params, (x, present) = random_params(policy), random_input(12)
    lose = jax.grad(lambda p: (policy.encode(p, x, present) ** 2).mean())
    traced = jax.jit(lose).trace(params)
    text = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda", "tpu")}
    assert {p for p in text if "stablehlo.convolution" in text[p]} == {"tpu"}


@pytest.mark.heavy
def test_on_a_cpu_a_gradient_that_several_read_is_computed_once():
    """Else the sum over steps of what `e` adds computes the gradients of all steps anew."""
    config = PolicyConfig(channels=4, hidden=8, steps=3, dilations=(1, 2))
    policy = make_policy(AgentConfig(policy=config), SPEC)
    params = jax.eval_shape(policy.init, jax.random.key(0))
    x = jax.ShapeDtypeStruct((2, 24, 3, 2), jnp.float32)
    present = jax.ShapeDtypeStruct((2, 24, 3), jnp.bool_)

    def total(params, x, present):
        return (policy.encode(params, x, present) ** 2).sum()

    text = jax.jit(jax.grad(total)).lower(params, x, present).compile().as_text()
    relus = [
        computation.count("direction=GT") for computation in text.split("\n}\n")
        if "fused_computation" in computation
    ]  # fmt: skip
    # Forward a step's relu is a maximum; backward it compares.
    assert max(relus) == 1 and sum(relus) == config.steps


def test_a_relu_whose_gradient_is_computed_once_is_a_relu():
    """The zeros it masks are zeros whatever comes back, as those of a relu are."""
    x = jnp.array([1.5, -0.1, 0.0, 3e38, 1e-37, -2.0, jnp.nan], jnp.float32)
    back = jnp.array([0.3, 0.2, 0.1, -3e38, 1e-37, jnp.inf, jnp.nan], jnp.float32)
    for relu in (relu_once, jax.jit(relu_once)):
        for derivative in (jax.jvp(relu, (x,), (back,)), (relu(x), *jax.vjp(relu, x)[1](back))):
            want = jax.jvp(jax.nn.relu, (x,), (back,))
            jax.tree.map(np.testing.assert_array_equal, derivative, want)


def test_another_number_of_steps_goes_on_with_the_cycle_and_takes_the_same_parameters():
    agent = AgentConfig(policy=SMALL)  # three steps: 1, 2, 1
    params = random_params(policy_of())
    longer = make_policy(with_steps(agent, 4), SPEC)
    assert longer.receptive_field == 1 + 2 * (1 + 2 + 1 + 2)
    x, present = random_input(14, 1)
    expected = cell_by_cell(params, dataclasses.replace(SMALL, steps=4), x[0], present[0])
    np.testing.assert_allclose(
        encode(longer, params, x, present)[0], expected, rtol=1e-4, atol=1e-5
    )
    with pytest.raises(ConfigError, match="steps=0"):
        with_steps(agent, 0)
    with pytest.raises(ConfigError, match="'mlp' makes no steps"):
        with_steps(AgentConfig(policy=PolicyConfig(kind="mlp")), 3)


@functools.cache
def loss_and_gradient(policy):
    def lose(params, x, present, fire):
        return (policy.encode(params, x, present, fire)[:, 4:] ** 2).mean()

    return jax.jit(jax.value_and_grad(lose))


@pytest.mark.heavy
@pytest.mark.parametrize("remat", ["step", "every:2", "dots"])
def test_remat_changes_neither_value_nor_gradient(remat):
    plain, again = policy_of(**FIRES), policy_of(**FIRES, remat=remat)
    params, (x, present) = random_params(plain), random_input(10)
    fire = Fire(jnp.array([1, 2], jnp.uint32), jnp.array([0, 9], jnp.int32))
    expected = loss_and_gradient(plain)(params, x, present, fire)
    got = loss_and_gradient(again)(params, x, present, fire)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
