"""The border between flax and the rest: plain dicts, one object a description, known sizes."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from nca_trader import AgentConfig, ConfigError, load_agent, load_env, make_policy
from nca_trader.agents.policy import num_parameters
from nca_trader.config.toml import preset_names
from nca_trader.envs.market import spec_of
from nca_trader.types import EnvSpec

SPEC = EnvSpec(symbols=("A",), features=("rsi", "macd"), targets=(-1.0, 0.0, 0.5), warmup=30)


def test_parameters_are_plain_nested_dicts_of_float32_arrays():
    params = jax.jit(make_policy(AgentConfig(), SPEC).init)(jax.random.key(0))
    assert type(params) is dict and {type(part) for part in params.values()} == {dict}
    leaves = jax.tree.leaves(params)
    assert all(isinstance(leaf, jax.Array) and leaf.dtype == np.float32 for leaf in leaves)


def test_a_key_means_the_same_parameters_and_another_key_others():
    init = jax.jit(make_policy(AgentConfig(), SPEC).init)
    a, b, c = (init(jax.random.key(seed)) for seed in (5, 5, 6))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert not np.allclose(a["nca"]["taps"], c["nca"]["taps"])
    # No two matrices of one shape are the same draw.
    draws = [x for x in map(np.asarray, jax.tree.leaves(a)) if x.ndim == 2 and x.any()]
    firsts = [float(leaf[0, 0] / leaf.std()) for leaf in draws]
    assert len(set(firsts)) == len(firsts) > 4


def test_the_same_description_gives_the_same_policy():
    assert make_policy(AgentConfig(), SPEC) is make_policy(AgentConfig(), SPEC)
    other = dataclasses.replace(SPEC, targets=(0.0, 0.5))
    assert make_policy(AgentConfig(), other) is not make_policy(AgentConfig(), SPEC)


def test_size_and_first_decision_follow_from_the_environment():
    policy = make_policy(AgentConfig(), SPEC)
    assert policy.spec.size == 1.0
    assert policy.receptive_field == 63  # 1 + 2 (1 + 2 + 4 + 8 + 16)
    assert policy.first_decision == 30 + 62


@pytest.mark.parametrize("name", preset_names("agents"))
def test_each_preset_says_its_own_size(name, root):
    text = (root / "agents" / f"{name}.toml").read_text()
    said = re.search(r"^# parameters: ([\d,]+) \((\w+), two assets\)$", text, re.M)
    spec = spec_of(load_env(said[2]), ("SP500", "NASDAQ"))
    policy = make_policy(load_agent(name), dataclasses.replace(spec, nearest=((1,), (0,))))
    assert int(said[1].replace(",", "")) == num_parameters(policy)
    drawn = jax.eval_shape(policy.init, jax.random.key(0))
    assert num_parameters(policy) == sum(leaf.size for leaf in jax.tree.leaves(drawn))
    field = re.search(r"^# receptive field: (\d+) bars?$", text, re.M)
    assert field and int(field[1]) == policy.receptive_field


def test_parameters_of_nano_counted_by_hand():
    # 13 inputs, C = 16, H = 64, three taps and one neighbour, readout 32 wide, two actions,
    # three account features.
    rule = 13 * 16 + (3 + 1) * 16 * 64 + 16 * 64 + 64 + 64 * 16 + 16
    head = 16 * 32 + 3 * 32 + 32 + 32 * 2 + 32 + 1
    spec = spec_of(load_env("index_daily"), ("SP500", "NASDAQ"))
    spec = dataclasses.replace(spec, nearest=((1,), (0,)))
    assert num_parameters(make_policy(load_agent("nano"), spec)) == rule + head


def test_parameters_of_the_other_kinds_counted_by_hand():
    spec = spec_of(load_env("index_daily"), ("SP500", "NASDAQ"))
    head = lambda cells: cells * 32 + 3 * 32 + 32 + 32 * 2 + 32 + 1  # noqa: E731
    mlp = 63 * 13 * 64 + 64 + 64 * 64 + 64
    assert num_parameters(make_policy(load_agent("mlp"), spec)) == mlp + head(64)
    gru = 3 * (13 * 32 + 32 * 32 + 32)
    assert num_parameters(make_policy(load_agent("gru"), spec)) == gru + head(32)


def test_a_policy_of_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match="kind"):
        load_agent("nano", ["policy.kind=transformer"])
