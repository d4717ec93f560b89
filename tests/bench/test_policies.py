"""The comparison of policies compares what it says: equal sizes, and windows of their own."""

import jax
import numpy as np
import pytest

from benchmarks.policies import KINDS, compare, of_equal_size, short_sighted, sizes
from nca_trader.config import AgentConfig, LearnerConfig, PolicyConfig
from nca_trader.evaluate.simulate import encode
from nca_trader.types import EnvSpec

SPEC = EnvSpec(symbols=("A",), features=("return_1", "price_level"), targets=(0.0, 1.0), warmup=2)
TINY = AgentConfig(
    policy=PolicyConfig(channels=8, hidden=16, steps=2, dilations=(1, 2), neighbours="ring"),
    learner=LearnerConfig(num_segments=16, segment_length=32, num_minibatches=2, num_epochs=1),
)


@pytest.mark.parametrize("equal", ["parameters", "operations"])
@pytest.mark.parametrize("kind", KINDS)
def test_policies_are_as_near_in_size_as_a_width_can_bring_them(kind, equal):
    which = ("parameters", "operations").index(equal)
    target = sizes("nca", TINY, of_equal_size("nca", TINY, SPEC, equal))[which]
    assert sizes(kind, TINY, of_equal_size(kind, TINY, SPEC, equal))[which] == pytest.approx(
        target, rel=0.2
    )


@pytest.mark.slow
def test_windows_of_the_whole_receptive_field_are_the_lattice():
    policy = of_equal_size("nca", TINY, SPEC, "parameters")
    params = policy.init(jax.random.key(0))
    # A rule that moves its state far, so that time matters.
    params["nca"]["update"] = jax.random.normal(jax.random.key(1), params["nca"]["update"].shape)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 1, 2)).astype(np.float32)
    present = rng.random((40, 1)) > 0.2
    whole = np.asarray(encode(policy, params, x, present))
    field = policy.receptive_field
    seen = short_sighted(policy, params, x, present, field)
    np.testing.assert_allclose(seen[field:], whole[field:], atol=1e-5)
    assert np.abs(short_sighted(policy, params, x, present, 2) - whole)[field:].max() > 1e-2


@pytest.mark.slow
def test_the_comparison_runs():
    kinds = ("nca", "tcn")
    rows = list(
        compare("hidden", TINY, "parameters", 4_096, 1, learnt=0.2, unseen=9_000, kinds=kinds)
    )
    assert [row["kind"] for row in rows] == ["nca", "tcn"]
    assert all(np.isfinite(row["dropped 0%"]) for row in rows)
