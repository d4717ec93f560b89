"""The rule of one cell as a policy, against the NCA, whose rule is one of these."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import SPEC, random_input, random_params
from flax import nnx

import nca_trader as nca
from nca_trader.agents.cell_rule import cell_rule
from nca_trader.agents.check import CHECKS
from nca_trader.agents.nca import Fire
from nca_trader.agents.policy import make_policy
from nca_trader.config import AgentConfig, PolicyConfig, PrecisionConfig
from nca_trader.config.extensions import FORGET
from nca_trader.envs.check import name_of
from nca_trader.errors import ConfigError

SMALL = PolicyConfig(channels=4, steps=1, dilations=(2,), head_hidden=5)


@cell_rule
class Known(nnx.Module):
    """The rule of `kind = "nca"`, written for one cell from the formula in its docstring."""

    def __init__(self, channels, neighbours, config, rngs):
        self.leak = config.leak
        shapes = {
            "taps": ((1 + neighbours) * channels, config.hidden),
            "inject": (channels, config.hidden),
            "hidden_bias": (config.hidden,),
            "update": (config.hidden, channels),
            "update_bias": (channels,),
        }
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(jax.random.normal(rngs.params(), shape)))

    def __call__(self, cell, neighbours, bar):
        seen = jnp.concatenate([cell, neighbours.ravel()])
        h = nnx.relu(seen @ self.taps[...] + bar @ self.inject[...] + self.hidden_bias[...])
        change = jnp.tanh(h @ self.update[...] + self.update_bias[...])
        return (1.0 - self.leak) * cell + change


@cell_rule
class Gated(nnx.Module):
    """A cell moves to what its neighbours propose, as far as a gate lets it."""

    def __init__(self, channels, neighbours, rngs, sharp=1.0):
        self.sharp = sharp
        inputs = (2 + neighbours) * channels
        self.proposal = nnx.Linear(inputs, channels, rngs=rngs)
        self.gate = nnx.Linear(inputs, channels, rngs=rngs)

    def __call__(self, cell, neighbours, bar):
        seen = jnp.concatenate([cell, neighbours.ravel(), bar])
        gate = nnx.sigmoid(self.sharp * self.gate(seen))
        return (1.0 - gate) * cell + gate * jnp.tanh(self.proposal(seen))


def policy_of(kind, dtype="float32", **changes):
    config = dataclasses.replace(SMALL, kind=kind, **changes)
    precision = PrecisionConfig(compute=dtype, matmul=dtype)
    return make_policy(AgentConfig(policy=config, precision=precision), SPEC)


@pytest.mark.parametrize("neighbours", ["ring", "none", "nearest", "all"])
@pytest.mark.few(1)
def test_the_rule_of_the_nca_makes_the_cells_of_the_nca(neighbours):
    given = {"neighbours": neighbours, "hidden": 6, "steps": 2, "dilations": (1, 2)}
    own, built_in = (policy_of(kind, **given) for kind in (Known, "nca"))
    assert own.receptive_field == built_in.receptive_field == 1 + 2 * (1 + 2)
    theirs = random_params(built_in)
    ours = {k if k == "embed" else f"rule/{k}": value for k, value in theirs["nca"].items()}
    assert ours.keys() == random_params(own)["encoder"].keys()
    x, present = random_input(24)
    parameters = {"encoder": ours, "head": theirs["head"]}
    found = jax.jit(own.encode, static_argnums=4)(parameters, x, present, None, 3)
    expected = jax.jit(built_in.encode, static_argnums=4)(theirs, x, present, None, 3)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert np.ptp(expected) > 0.5


def test_a_mask_leaves_a_cell_or_moves_it_by_as_much_more():
    whole, part = (policy_of(Known, fire_rate=rate) for rate in (1.0, 0.25))
    params, (x, present) = random_params(whole), random_input(24)
    fire = Fire(jnp.array([3, 4], jnp.uint32), jnp.array([0, 50]))
    mask = present[..., None]
    clipped = np.concatenate([np.clip(x, -5.0, 5.0) * mask, mask], axis=-1)
    before = clipped @ np.asarray(params["encoder"]["embed"])
    step = jax.jit(whole.encode)(params, x, present) - before
    times = (jax.jit(part.encode)(params, x, present, fire) - before) / step
    # A channel that the rule hardly moves says nothing of the mask.
    times = np.median(times, axis=-1)
    near = np.minimum(np.abs(times), np.abs(times - 4.0))
    assert near.max() < 1e-2 and 0.1 < (times > 2.0).mean() < 0.45


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"neighbours": "all", "fire_rate": 0.5, "remat": "step"},
        {"neighbours": "ring", "dtype": "bfloat16"},
    ],
)
@pytest.mark.few(1)
def test_a_rule_of_your_own_is_a_policy(changes):
    checks = ("a stream gives", "a window gives", "a halo is", "later bars", "shapes and types")
    only = {name for name in map(name_of, CHECKS) if name.startswith(checks)}
    assert len(only) == len(checks)
    nca.check_policy(policy_of(Gated, **changes), only=only).raise_if_failed()


def test_the_gradient_does_not_depend_on_what_is_computed_again():
    x, present = random_input(12)

    def gradient(remat):
        policy = policy_of(Gated, neighbours="all", remat=remat, steps=3)
        of = jax.grad(lambda p: (policy.encode(p, x, present) ** 2).sum())
        return jax.jit(of)(random_params(policy))["encoder"]

    again = gradient("every:2")
    for name, value in gradient("none").items():
        np.testing.assert_allclose(value, again[name], rtol=2e-4, atol=1e-5)
        assert np.abs(value).max() > 0, name


def test_values_in_a_name_go_to_the_rule():
    name = PolicyConfig(kind=Gated).kind
    soft, sharp = (policy_of(f"{name}(sharp={value})") for value in (0.5, 8.0))
    x, present = random_input(9)
    params = random_params(soft)
    found = [jax.jit(p.encode)(params, x, present) for p in (policy_of(name), soft, sharp)]
    assert all(np.ptp(a - b) > 0.01 for a, b in itertools.pairwise(found))
    with pytest.raises(ConfigError, match=r"Gated\(blunt=1\).*'blunt'; it takes sharp"):
        policy_of(f"{name}(blunt=1)")


def test_what_is_no_rule_is_refused():
    for value in (len, 3, type("Plain", (), {})):
        with pytest.raises(ConfigError, match=r"not a rule; give the class of a Flax nnx module"):
            cell_rule(value)


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        (lambda cell, bar: jnp.concatenate([cell, bar]), r"float32\(8,\)"),
        (lambda cell, bar: cell.sum(), r"float32\(\)"),
        (lambda cell, bar: cell > 0, r"bool\(4,\)"),
        (lambda cell, bar: (cell, bar), "a tuple"),
    ],
)
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.few(3)
def test_a_rule_that_returns_another_shape_is_refused(rule, found, steps, monkeypatch):
    monkeypatch.setattr(Wrong.RULE, "__call__", lambda self, cell, others, bar: rule(cell, bar))
    forget_all()
    said = rf"Wrong: returns {found}.* return float32\(4,\)\."
    with pytest.raises(ConfigError, match=said) as refused:
        policy_of(Wrong, steps=steps)
    assert len(str(refused.value).splitlines()) == 1
    forget_all()


def forget_all():
    for forget in FORGET:
        forget()


@cell_rule
class Wrong(nnx.Module):
    """A rule that is replaced."""

    def __call__(self, cell, neighbours, bar):
        return cell


class Undecorated(nnx.Module):
    """It lacks the decorator."""

    def __init__(self, channels):
        pass

    def __call__(self, cell, neighbours, bar):
        return cell


@cell_rule
class Asking(nnx.Module):
    """It asks for what it is not given."""

    def __init__(self, channels, depth):
        pass

    def __call__(self, cell, neighbours, bar):
        return cell


def test_a_constructor_that_cannot_be_called_is_refused_before_it_is():
    with pytest.raises(
        ConfigError, match=r"asks for channels; .*decorate it with nca_trader\.cell"
    ):
        policy_of(Undecorated)
    with pytest.raises(ConfigError, match=r"asks for depth; it is given channels, neighbours"):
        policy_of(Asking)
    with pytest.raises(ConfigError, match=r"is a subclass of a decorated rule"):
        type("Below", (Gated,), {"__call__": lambda self, cell, neighbours, bar: cell})
