"""One small market, agent and learner for all tests of the learner, so that few compile."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_bars, random_params
from recording import recording_optimizer

from nca_trader import AgentConfig, Costs, EnvConfig, TradingEnv, make_mesh, make_policy
from nca_trader.config import LearnerConfig, OptimizerConfig, PolicyConfig
from nca_trader.learner import learner as learners
from nca_trader.learner import rollout, update
from nca_trader.learner.ppo import setup_of

ENV = EnvConfig(
    features=("bollinger", "rsi"),  # 19 bars of warm-up
    costs=Costs(commission=5e-4, slippage=2e-4),
    episode_bars=16,  # two segments
    ruin_floor=0.05,
)
AGENT = AgentConfig(
    policy=PolicyConfig(channels=4, hidden=8, steps=2, dilations=(1, 2), head_hidden=8),
    learner=LearnerConfig(
        num_segments=16,
        segment_length=8,
        envs_per_segment=2,
        num_epochs=2,
        num_minibatches=2,
    ),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_updates=2),
)


@dataclasses.dataclass(frozen=True)
class Stage:
    """The pieces, for tests to reach."""

    env: TradingEnv
    ruinous: TradingEnv
    agent: AgentConfig

    @functools.cached_property
    def policy(self):
        return make_policy(self.agent, self.env.spec)

    @functools.cached_property
    def pnl(self):
        """The same prices, none missing, where positions have constant size."""
        bars = dataclasses.replace(self.env.bars, present=np.ones_like(self.env.bars.present))
        return TradingEnv(bars, dataclasses.replace(self.env.config, reward="pnl"))

    @functools.cached_property
    def params(self):
        return random_params(self.policy)

    @functools.cache  # noqa: B019  (lives as long as the tests)
    def learner(self, devices):
        """A learner on so many devices, whose optimiser records gradients."""
        return self.recorded(self.env, self.agent, devices)

    def recorded(self, env, agent, devices):
        """A learner in another environment, or of another agent, that records gradients too."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(update, "make_optimizer", recording_optimizer)
            policy = make_policy(agent, env.spec)
            return learners.make_learner(env, policy, agent, make_mesh(devices))

    @functools.cached_property
    def begin(self):
        """`(segments, keys) -> (segments, fresh)`, compiled."""
        setup, market = self.setup, self.env.market
        return jax.jit(lambda segments, keys: rollout.begin_segments(setup, market, segments, keys))

    @property
    def setup(self):
        """Of the agent's own hyper-parameters."""
        return setup_of(self.policy, self.agent)

    @functools.cached_property
    def collect(self):
        """`(market, segments, fresh, keys, cost_scale=None) -> (segments, rollout)`, compiled."""

        setup, params = self.setup, self.params

        def collect(market, segments, fresh, keys, cost_scale=None):
            draw = rollout.Draw(keys, fresh, cost_scale)
            return rollout.roll_out(setup, params, market, segments, draw)

        return jax.jit(collect)

    def empty_segments(self):
        """Segments as a learner's `init` makes them: no episode has begun."""
        none = jnp.zeros(16, jnp.int32)
        episode = jax.vmap(jax.vmap(self.env.begin))(jax.random.split(jax.random.key(0), (16, 2)))
        return rollout.Segments(none, none, None, episode)


def ruinous_bars(bars):
    """Prices alternate with six times themselves: a short that is not hedged is bankrupt."""
    factor = np.where(np.arange(len(bars)) % 2, 6.0, 1.0)[:, None]
    close = factor * bars.close
    open_ = np.vstack([close[:1], close[:-1]])  # so that the body moves
    return dataclasses.replace(
        bars,
        open=open_,
        close=close,
        high=np.maximum(open_, close),
        low=np.minimum(open_, close),
        present=np.ones_like(bars.present),
    )


@pytest.fixture(scope="session")
def stage():
    bars = random_bars(np.random.default_rng(0), 200, 2, missing=0.05)
    return Stage(TradingEnv(bars, ENV), TradingEnv(ruinous_bars(bars), ENV), AGENT)


@pytest.fixture
def without_quick_compile(quick_compile):
    """The compiler as it is used: what it joins, it joins."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
