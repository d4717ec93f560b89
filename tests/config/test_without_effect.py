"""What changes nothing is refused, and what is refused changes nothing: by the traced programs.

A config holds the value past its own check; what a field changes is read from the program that is
traced with it, or from the schedule that it makes.
"""

import copy
import dataclasses
import functools
import hashlib
import json
import re
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from drawn import random_bars
from flax import nnx
from untrained import untrained_run

import nca_trader as nca
from nca_trader import AgentConfig, EnvConfig, TradingEnv, load_agent, load_env, make_policy
from nca_trader.agents.encoder import GRU, MLP
from nca_trader.agents.heads import PolicyHead
from nca_trader.agents.nca import NCA, Fire
from nca_trader.config import (
    CurriculumConfig,
    LearnerConfig,
    OptimizerConfig,
    PolicyConfig,
    PopulationConfig,
)
from nca_trader.config.agent import RANGED
from nca_trader.config.env import REWARDS
from nca_trader.config.ranges import switch
from nca_trader.config.records import open_record, seal_record
from nca_trader.config.toml import from_toml_text, preset_names, to_toml
from nca_trader.envs.actions import tilt_price, to_target
from nca_trader.envs.market import Dynamics, spec_of
from nca_trader.envs.trading import transition
from nca_trader.errors import ConfigError
from nca_trader.learner.learner import make_learner
from nca_trader.learner.optimizer import learning_rate
from nca_trader.learner.train import steps_done
from nca_trader.learner.update import cost_scale, volatility_scale, whole_after
from nca_trader.runs.manifest import Run
from nca_trader.types import EnvSpec

BARS = random_bars(np.random.default_rng(0), 120, 3)


def unchecked(config, **changes):
    """A copy of `config` with values that it may refuse."""
    config = copy.copy(config)
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    return config


def refused(config, name, value):
    """Whether the config says that this value of a field has no effect."""
    try:
        dataclasses.replace(config, **{name: value})
    except ConfigError as error:
        (line,) = str(error).splitlines()
        assert line.startswith(f"{name}={value!r} has no effect without ")
        assert "; leave it out (its default is " in line and ", or give " in line
        return True
    return False


@functools.cache
def env_of(reward="log_return", actions="direction"):
    return TradingEnv(BARS, dataclasses.replace(tiny.ENV, reward=reward, actions=actions))


def policy_program(config):
    spec = env_of(actions="weights").spec
    policy = make_policy(unchecked(AgentConfig(), policy=config), spec)
    params = jax.eval_shape(policy.init, jax.random.key(0))
    x, present = jnp.zeros((1, 9, 3, 2)), jnp.ones((1, 9, 3), bool)
    words = jnp.zeros(1, jnp.uint32), jnp.zeros(1, jnp.int32)
    fire = None if policy.fire_rate == 1.0 else Fire(*words)
    program = jax.make_jaxpr(lambda p: policy.encode(p, x, present, fire))(params)
    ones, spec = jnp.ones(3), policy.spec
    orders = jax.make_jaxpr(lambda x: (to_target(spec, x, x, x), tilt_price(spec, x)))(ones)
    return f"{policy.receptive_field} {params} {program} {orders}"


POLICIES = {
    "nca": PolicyConfig(channels=4, hidden=6),
    "nearest": PolicyConfig(channels=4, hidden=6, neighbours="nearest"),
    "mlp": PolicyConfig(kind="mlp", channels=4, hidden=6, window=4),
    "gru": PolicyConfig(kind="gru", channels=4, window=4),
    "tilt": PolicyConfig(channels=4, hidden=6, base="equal_weight"),
}
OTHER = {
    "channels": 5, "hidden": 7, "window": 5, "steps": 4, "dilations": (1, 3),
    "neighbours": "ring", "num_neighbours": 1, "leak": 0.3, "fire_rate": 0.5, "remat": "step",
    "feature_clip": 2.0, "head_hidden": 9,
    "base": "half_and_half", "tilt_limit": 0.3, "tilt_penalty": 0.1,
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("kind", POLICIES)
def test_a_policy_refuses_what_does_not_change_its_program_and_nothing_else(kind):
    config = POLICIES[kind]
    assert {*OTHER, "kind"} == {field.name for field in dataclasses.fields(config)}
    plain = policy_program(config)
    for name, value in OTHER.items():
        if (kind, name) == ("tilt", "base"):
            continue  # another rule is another column of the market, and the same program
        same = policy_program(unchecked(config, **{name: value})) == plain
        assert refused(config, name, value) == same, name


@pytest.mark.parametrize("reward", REWARDS)
def test_a_reward_refuses_the_parameters_that_are_not_its_own(reward):
    env = env_of(reward)
    episode = env.begin(jax.random.key(0))
    action, row = jnp.ones(3, jnp.int32), jnp.uint32(50)

    def program(config):
        spec = dataclasses.replace(env.spec, decay=spec_of(config, env.spec.symbols).decay)
        step = functools.partial(transition, Dynamics(config, spec, env.rules))
        legs = env.market.legs_at(row), env.market.legs_at(row + 1)
        return str(jax.make_jaxpr(lambda e: step(e, action, *legs))(episode))

    plain = program(env.config)
    others = dict(
        pnl_returns="simple", risk_aversion=0.7, quadratic_cost=0.3, drawdown_penalty=0.2,
        sharpe_decay=0.3,
    )  # fmt: skip
    for name, value in others.items():
        same = program(unchecked(env.config, **{name: value})) == plain
        assert refused(env.config, name, value) == same, name


@pytest.mark.heavy
@pytest.mark.parametrize(
    "estimator",
    ["gae", "pathwise", *(pytest.param(x, marks=pytest.mark.slow) for x in ("group", "exact"))],
)
@pytest.mark.few(1)
def test_an_estimator_refuses_what_does_not_change_its_update(estimator):
    learn = dataclasses.replace(tiny.AGENT.learner, envs_per_segment=2, advantages=estimator)
    agent = dataclasses.replace(tiny.AGENT, learner=learn)
    env = env_of("pnl", actions="weights" if estimator == "pathwise" else "direction")
    policy = make_policy(agent, env.spec)

    def program(config):
        learner = make_learner(env, policy, unchecked(agent, learner=config))
        state = jax.eval_shape(learner.init, jax.random.key(0))
        return str(jax.make_jaxpr(learner.bounded.traced)(state, learner.market, learner.course))

    plain = program(learn)
    others = dict.fromkeys(("value_coef", "clip_epsilon", "entropy_coef"), 0.1)
    others |= {"gae_lambda": 0.5, "discount": 0.9, "objective": "sharpe"}
    for name, value in others.items():
        same = program(unchecked(learn, **{name: value})) == plain
        assert refused(learn, name, value) == same, name


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "sgdr"])
def test_a_schedule_refuses_the_period_that_it_does_not_have(schedule):
    config = OptimizerConfig(schedule=schedule)
    rates = [
        [float(learning_rate(c, 100)(step)) for step in range(0, 100, 7)]
        for c in (config, unchecked(config, first_period=3))
    ]
    assert refused(config, "first_period", 3) == (rates[0] == rates[1])


@pytest.mark.parametrize(("name", "of"), [("costs", cost_scale), ("volatility", volatility_scale)])
@pytest.mark.parametrize("start", [0.5, 1.0])
def test_a_curriculum_that_is_off_takes_no_share(name, of, start):
    config = CurriculumConfig(**{f"{name}_from": start})
    course = [
        [
            of(c, jnp.int32(update), whole_after(getattr(c, f"{name}_share"), 8))
            for update in range(8)
        ]
        for c in (config, unchecked(config, **{f"{name}_share": 0.9}))
    ]
    assert refused(config, f"{name}_share", 0.9) == (course[0] == course[1]) == (start == 1.0)


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (EnvConfig(), "delist_haircut", 0.1),
        (EnvConfig(), "market_bars", 500),
    ],
)
def test_a_part_that_is_off_takes_no_settings(config, name, value):
    assert refused(config, name, value)


def test_all_that_has_no_effect_in_a_file_is_said_at_once():
    text = (
        "[policy]\nkind = 'gru'\nhidden = 8\nsteps = 9\nwindow = 0\n[optimizer]\nfirst_period = 9"
    )
    with pytest.raises(ConfigError) as caught:
        from_toml_text(AgentConfig, text, "my.toml")
    lines = str(caught.value).splitlines()
    assert [line.split("=")[0] for line in lines] == [
        "my.toml: [policy] window",
        "my.toml: [policy] hidden",
        "my.toml: [policy] steps",
        "my.toml: [optimizer] first_period",
    ]
    assert "steps=9 has no effect without kind='nca'; leave it out (its default is 5)" in lines[2]
    # A kind that is not known says nothing of what it has.
    with pytest.raises(ConfigError, match=r"\Akind='lstm' is not known[^\n]*\Z"):
        PolicyConfig(kind="lstm", window=7)


UNUSED = {
    "gae": (),
    "group": ("gae_lambda",),
    "exact": (),
    "pathwise": ("entropy_coef", "clip_epsilon", "gae_lambda"),
}


@pytest.mark.parametrize("estimator", UNUSED)
def test_a_range_that_an_estimator_does_not_learn_with_is_refused(estimator):
    learn = LearnerConfig(advantages=estimator)
    for name in RANGED:
        drawn, found = PopulationConfig(**{name: (0.5, 0.9)}), None
        try:
            AgentConfig(num_seeds=2, learner=learn, population=drawn)
        except ConfigError as error:
            found = str(error)
        start = f"population.{name}=(0.5, 0.9) has no effect without learner.advantages='gae'"
        assert found.startswith(start) if name in UNUSED[estimator] else found is None
        with pytest.raises(ConfigError, match=rf"population\.{name}=.* num_seeds of 2 or more"):
            AgentConfig(learner=learn, population=drawn)


# What one agent without replay may hold, as files of earlier versions did.
IDLE = {"ensemble": "agreement", "optimizer.ema_decay": 0.9, "population.discount": [0.5, 0.9]}


@pytest.mark.parametrize("key", IDLE)
def test_what_another_table_switches_off_is_refused_and_an_option_is_named(key):
    text = f"{key}={json.dumps(IDLE[key])}"
    with pytest.raises(ConfigError, match=rf"\Aoverrides: {key}=.* has no effect[^\n]*\Z"):
        load_agent("nano", [text])
    with pytest.raises(ConfigError, match=rf"\Amy.toml: {key}=.* has no effect[^\n]*\Z"):
        from_toml_text(AgentConfig, text, "my.toml")


def test_a_stored_run_loads_without_what_has_no_effect(tmp_path):
    run = untrained_run(tmp_path / "run", BARS, tiny.ENV, tiny.AGENT)
    file, about = run.path / "agent.toml", run.path / "run.json"
    text = file.read_text()
    for old, new in (('"mean"', '"agreement"'), ("ema_decay = 0.0", "ema_decay = 0.9")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    file.write_text(text)
    manifest, _ = open_record(about.read_bytes(), "run.json")
    manifest["config"]["agent.toml"] = hashlib.sha256(text.encode()).hexdigest()
    about.write_text(seal_record(manifest))
    assert Run(run.path).agent_config == tiny.AGENT
    with pytest.raises(ConfigError, match="ensemble='agreement' has no effect"):
        load_agent(file)


class Mine(NCA):
    """An encoder of one's own that makes steps."""


class Fixed(Mine):
    """One that makes always two."""

    def __init__(self, spec, config, precision, rngs):
        super().__init__(spec, dataclasses.replace(config, steps=2), precision, rngs)

    @staticmethod
    def receptive_field(config):
        return NCA.receptive_field(dataclasses.replace(config, steps=2))

    @staticmethod
    def begin(spec, config):
        return NCA.begin(spec, dataclasses.replace(config, steps=2))


class Grown(Mine):
    """One that learns something of each step."""

    def __init__(self, spec, config, precision, rngs):
        super().__init__(spec, config, precision, rngs)
        self.each = nnx.Param(jnp.zeros(config.steps))


def test_steps_of_an_own_encoder_are_used_or_refused(tmp_path):
    def run(kind, steps):
        policy = PolicyConfig(kind=kind, channels=4, hidden=6, steps=2, dilations=(1, 2))
        agent = dataclasses.replace(tiny.AGENT, policy=policy)
        if not (path := tmp_path / kind.__name__).exists():
            untrained_run(path, BARS, tiny.ENV, agent)
        return Run(path, steps=steps, allow_code=True)

    longer = run(Mine, 3)
    assert longer.policy.receptive_field == 1 + 2 * (1 + 2 + 1)
    assert longer.policy.init is not run(Mine, None).policy.init
    assert run(Fixed, 2).params() is not None
    with pytest.raises(ConfigError, match="Fixed' does not read it; leave it out"):
        run(Fixed, 3).params()
    with pytest.raises(ConfigError, match="Grown' has other parameters with it"):
        run(Grown, 3).params()


@nca.cell_rule
class Rule(nnx.Module):
    """A rule that reads nothing of its config."""

    def __init__(self, channels, rngs, x=1):
        self.layer = nnx.Linear(channels, channels, rngs=rngs)

    def __call__(self, cell, neighbours, bar):
        return cell + jnp.tanh(self.layer(bar))


class Cell(nnx.Module):
    """An encoder that reads what `reading` reads of its config, and its head."""

    HEAD = PolicyHead

    def __init__(self, spec, config, rngs):
        self.config, self.layer = config, nnx.Linear(2, config.channels, rngs=rngs)
        self.reading(config, spec)

    @staticmethod
    def receptive_field(config):
        return 1

    def reading(self, config, spec):
        """Nothing."""

    def __call__(self, x, present):
        return self.layer(x)


class InCall(Cell):
    """One that reads when it is called."""

    def __call__(self, x, present):
        return jnp.clip(self.layer(x), -self.config.feature_clip, self.config.leak)


class InStream(Cell):
    """One whose stream reads alone."""

    @staticmethod
    def begin(spec, config):
        return jnp.zeros(config.steps)

    def __call__(self, x, present):
        return self.layer(x)

    def stream(self, state, x, present):
        return state, self.layer(x) * self.config.leak


class Windowed(Cell):
    """One whose receptive field is the default's, `window`."""

    receptive_field = staticmethod(lambda config: config.window)


class Whole(Cell):
    """One that reads all fields but `steps`."""

    def reading(self, config, spec):
        self.config = dataclasses.replace(config, steps=2)
        assert self.config.steps == 2 and self.config.leak == config.leak


class Listed(Cell):
    """One that reads all fields."""

    def reading(self, config, spec):
        self.known = tuple(sorted(vars(config))), len(dataclasses.asdict(config))


class Ranked(Cell):
    """One that reads the ranking of assets."""

    def reading(self, config, spec):
        self.near = spec.nearest


class Linear(nnx.Module):
    """A head without a hidden layer."""

    def __init__(self, spec, channels, hidden, rngs):
        self.layer = nnx.Linear(channels, len(spec.targets) + 1, rngs=rngs)

    def __call__(self, cells, features):
        out = self.layer(cells)
        return out[..., 1:], out[..., 0].mean(-1)


class OwnHead(Cell):
    """One with a head that does not read its width."""

    HEAD = Linear


class Windows(MLP):
    """An MLP of one's own."""


class Gates(GRU):
    """A GRU of one's own."""


GIVEN = {
    "hidden": 6, "window": 3, "steps": 2, "dilations": (1, 2), "neighbours": "ring",
    "num_neighbours": 1, "leak": 0.5, "fire_rate": 0.5, "remat": "step", "feature_clip": 2.0,
    "head_hidden": 7, "channels": 5,
}  # fmt: skip
READ = {
    Cell: {"head_hidden", "channels"},
    InCall: {"head_hidden", "channels", "leak", "feature_clip"},
    InStream: {"head_hidden", "channels", "leak", "steps"},
    Windowed: {"head_hidden", "channels", "window"},
    Whole: {*GIVEN} - {"steps"},
    Listed: {*GIVEN},
    Ranked: {"head_hidden", "channels", "neighbours"},
    OwnHead: {"channels"},
    Rule: {*GIVEN} - {"hidden", "window", "leak", "num_neighbours"},
    Mine: {*GIVEN} - {"window", "num_neighbours"},
    Windows: {"head_hidden", "channels", "hidden", "window", "feature_clip"},
    Gates: {"head_hidden", "channels", "window", "feature_clip"},
}


@pytest.mark.parametrize("kind", READ, ids=lambda kind: kind.__name__)
def test_what_an_own_encoder_does_not_read_is_refused_by_name(kind):
    targets = (-0.3, 0.0, 0.3)
    spec = EnvSpec(symbols=("A", "B", "C"), features=("a", "b"), targets=targets, warmup=0)
    base = dict(kind=kind, channels=4)
    make_policy(AgentConfig(policy=PolicyConfig(**base)), spec)
    with pytest.raises(ConfigError) if {*GIVEN} - READ[kind] else nullcontext() as refused:
        make_policy(AgentConfig(policy=PolicyConfig(**base | GIVEN)), spec)
    said = rf"policy\.(\w+)=.* is not read by policy\.kind='.*{kind.__name__}'; leave it out"
    lines = str(refused.value).splitlines() if refused else []
    assert {re.match(said, line)[1] for line in lines} == {*GIVEN} - READ[kind]
    # A count of neighbours is read where "nearest" asks for it.
    near = dataclasses.replace(spec, nearest=((2, 1), (2, 0), (0, 1)))
    if kind in (Rule, Mine):
        asked = PolicyConfig(**base, neighbours="nearest", num_neighbours=1)
        make_policy(AgentConfig(policy=asked), near)


@pytest.mark.parametrize("kind", ["nca", "mlp", Mine, Windows, OwnHead])
def test_parameters_are_float32_where_the_caller_computes_in_float64(kind):
    """A rule that is swept is called so, and may name a run."""
    spec = EnvSpec(symbols=("A",), features=("a", "b"), targets=(0.0, 0.5), warmup=7)
    with jax.enable_x64(True):
        policy = make_policy(AgentConfig(policy=PolicyConfig(kind=kind, channels=3)), spec)
        leaves = jax.tree.leaves(jax.eval_shape(policy.init, jax.random.key(0)))
    assert {leaf.dtype for leaf in leaves} == {np.dtype("float32")}


@pytest.mark.usefixtures("quick_compile")
def test_a_run_with_a_setting_that_its_encoder_does_not_read_goes_on(tmp_path, monkeypatch):
    policy = PolicyConfig(
        kind=f"{PolicyConfig(kind=Rule).kind}(x=2)", channels=4, window=3, steps=2
    )
    env, agent = env_of(), dataclasses.replace(tiny.AGENT, policy=policy)
    with pytest.raises(ConfigError, match=r"policy\.window=3 is not read"):
        nca.train(env, agent, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with monkeypatch.context() as before:
        before.setattr("nca_trader.agents.encoder.refuse_unread", lambda config, unread: None)
        nca.train(env, agent, tmp_path / "old", steps=128)
    assert nca.backtest(BARS, Run(tmp_path / "old", allow_code=True)).equity.notna().all()
    assert steps_done(nca.train(env, agent, tmp_path / "old", steps=128)) == 128


@pytest.mark.parametrize(("folder", "load"), [("agents", load_agent), ("envs", load_env)])
def test_every_preset_has_nothing_without_effect(folder, load):
    for name in preset_names(folder):
        config = load(name)
        assert from_toml_text(type(config), to_toml(config), name) == config


def test_a_copy_of_another_mode_leaves_out_what_it_does_not_have():
    nano = dataclasses.replace(load_agent("nano").policy, steps=3, leak=0.2)
    with pytest.raises(ConfigError, match="steps=3"):
        dataclasses.replace(nano, kind="mlp")
    expected = PolicyConfig(kind="mlp", channels=16, hidden=64, window=9)
    assert switch(nano, kind="mlp", window=9) == expected
    learn = LearnerConfig(value_coef=0.1, gae_lambda=0.9)
    assert switch(learn, advantages="exact") == LearnerConfig(advantages="exact", gae_lambda=0.9)
