"""Each probe's closed form against its rule, its mirror and random actions, in `TradingEnv`."""

import jax
import jax.numpy as jnp
import numpy as np
import probes
import pytest

NUM_BARS, PERIOD = 182, 6  # a period of all probes; 182 - 60 rows of warm-up leave 120 steps and 1
NUM_STEPS = 120


@pytest.fixture(scope="module", params=list(probes.PROBES))
def probe(request):
    return probes.make(request.param, NUM_BARS)


@pytest.fixture(scope="module")
def runs(probe):
    """Rows and rewards `[100, steps]` and first weights `[100, A]` of rule, mirror and random."""
    env = probe.env()
    num, shape = env.spec.num_actions, (env.spec.num_assets,)
    nothing = lambda features, ordered: jnp.zeros(shape, jnp.int32)  # noqa: E731

    def step(which, carry, key):
        state, timestep = carry
        seen = env.window(timestep.observation, 1)[0], timestep.observation.account.ordered
        choices = [(rule or nothing)(*seen) for rule in (probe.rule, probe.mirror)]
        choices.append(jax.random.randint(key, shape, 0, num))
        after = env.step(state, jnp.stack(choices)[which])
        return after, (timestep.observation.index, after[1].reward)

    def episode(which, key):
        first, key = jax.random.split(key)
        carry = env.reset(first)
        weight = carry[1].observation.account.weight
        keys = jax.random.split(key, NUM_STEPS)
        _, (rows, rewards) = jax.lax.scan(lambda c, k: step(which, c, k), carry, keys)
        return rows, rewards, weight

    keys = jax.random.split(jax.random.key(0), 100)
    each = jax.vmap(jax.vmap(episode, (None, 0)), (0, None))
    rows, rewards, weights = jax.jit(each)(jnp.arange(3), keys)
    named = zip(("rule", "mirror", "random"), np.asarray(rewards, np.float64), strict=True)
    return dict(named) | {"rows": np.asarray(rows[0, 0]), "weights": np.asarray(weights[0])}


@pytest.mark.heavy
@pytest.mark.few(3)
def test_the_best_rule_earns_the_optimum_and_its_mirror_loses(probe, runs):
    if probe.rule is None:
        pytest.skip("no action matters here; another test holds that")
    rewards = runs["rule"][0, PERIOD:]  # the first steps enter the position
    expected = np.array(probe.rewards)[runs["rows"][PERIOD:] % len(probe.rewards)]
    np.testing.assert_allclose(rewards, expected, rtol=0, atol=1e-7)
    assert rewards.mean() == pytest.approx(probe.optimum, abs=1e-7)
    assert runs["mirror"][0, PERIOD:].mean() < min(probe.random, probe.optimum) - 1e-4


@pytest.mark.heavy
def test_random_actions_earn_what_the_closed_form_says(probe, runs):
    means = runs["random"].mean(1)
    error = means.std(ddof=1) / np.sqrt(len(means))
    assert means.mean() == pytest.approx(probe.random, abs=4 * error + 1e-6)
    assert error < 1e-3


@pytest.mark.heavy
def test_no_action_matters_where_it_should_not(probe, request):
    if probe.name != "illiquid":
        pytest.skip("actions matter here")
    runs = request.getfixturevalue("runs")
    assert probe.mirror is None
    # By the weight that an episode starts with: all that is drawn of it.
    cycle = np.array(probe.rewards)[runs["rows"] % len(probe.rewards)]
    np.testing.assert_allclose(runs["random"], runs["weights"] * cycle, rtol=0, atol=1e-7)
    assert set(runs["weights"].ravel()) == {0.0, 1.0}
