"""Presets: every shipped file, the round trip, and what a wrong file is told."""

import dataclasses
import functools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nca_trader.agents import load_agent
from nca_trader.config import (
    AgentConfig,
    CheckpointConfig,
    EnvConfig,
    LearnerConfig,
    MeshConfig,
    OptimizerConfig,
    PolicyConfig,
)
from nca_trader.config.account import Limits
from nca_trader.config.toml import from_toml_text, preset_folder, preset_names, to_toml
from nca_trader.envs import load_env
from nca_trader.errors import ConfigError
from nca_trader.types import Costs

SIZES = {"nano": (16, 64), "small": (32, 128), "base": (128, 128), "wide": (128, 256)}
SIZES["large"] = (256, 512)
THIRDS = (
    "1/3 * equal_weight + 1/3 * time_series_momentum(lookback=252) + 1/3 * "
    'cross_sectional_momentum(lookback=252, weights="ranks")'
)
SIZES["panel_nca"] = (16, 32)
OTHER_KINDS = {
    "mlp": "mlp",
    "gru": "gru",
    "panel": "mlp",
}  # the kind of each preset
# Modes whose fields have an effect.
NEAREST = functools.partial(PolicyConfig, neighbours="nearest")
MLP = functools.partial(PolicyConfig, kind="mlp")
SGDR = functools.partial(OptimizerConfig, schedule="sgdr")


def complaint(cls, text, *overrides):
    with pytest.raises(ConfigError) as caught:
        from_toml_text(cls, text, "my.toml", overrides)
    return str(caught.value).splitlines()


def test_every_agent_and_environment_of_the_readme_is_there(root):
    assert set(preset_names("agents")) == set(SIZES) | set(OTHER_KINDS)
    assert {"index_daily", "equity_daily"} <= set(preset_names("envs"))
    for folder in ("agents", "envs"):
        readme = (root / folder / "README.md").read_text()
        assert set(re.findall(r"`(\w+)\.toml`", readme)) == set(preset_names(folder))


@pytest.mark.parametrize("name", SIZES)
def test_an_agent_has_its_size_and_the_receptive_field_its_file_states(name):
    policy = load_agent(name).policy
    assert (policy.channels, policy.hidden) == SIZES[name]
    # A second derivation: the oldest bar that a walk of K steps, two taps back each, can reach.
    oldest = 0
    for step in range(policy.steps):
        oldest += 2 * policy.dilations[step % len(policy.dilations)]
    text = (preset_folder("agents") / f"{name}.toml").read_text()
    assert re.findall(r"^# receptive field: (\d+) bars$", text, re.M) == [str(oldest + 1)]
    said = re.findall(r"^# K = (\d+) steps, dilations ([\d, ]+)$", text, re.M)
    assert said == [(str(policy.steps), ", ".join(map(str, policy.dilations)))]


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_a_policy_of_another_kind_states_its_window(name):
    policy = load_agent(name).policy
    assert policy.kind == OTHER_KINDS[name]
    text = (preset_folder("agents") / f"{name}.toml").read_text()
    assert re.findall(r"^# receptive field: (\d+) bars?$", text, re.M) == [str(policy.window)]


def test_a_panel_trains_path_wise_at_the_full_inflated_costs():
    agent, env = load_agent("panel"), load_env("panel_daily")
    assert agent.curriculum.costs_from == 1.0 and agent.learner.advantages == "pathwise"
    # It begins as a rule and learns a bounded tilt, by the Sharpe ratio of the whole panel.
    for one in (agent, load_agent("panel_nca")):
        assert (one.policy.base, one.policy.tilt_limit) == (THIRDS, 0.5)
        assert one.learner.objective == "sharpe" and one.learner == agent.learner
    # Growth alone has no best size where nothing is paid for.
    assert env.reward == "mean_variance" and env.risk_aversion > 0.0
    assert env.random_costs is not None and min(env.random_costs) >= 5.0
    # A full book of N assets has a gross of N times the largest weight of one of them.
    assert env.sizing == "volatility" and env.size is None and env.max_gross is None
    assert env.borrow and not env.costs.carries


def test_the_resolved_text_leaves_nothing_to_defaults():
    text = to_toml(AgentConfig())
    for table in (PolicyConfig, LearnerConfig, OptimizerConfig):
        for field in dataclasses.fields(table):
            assert re.search(rf"^{field.name} = ", text, re.M)


def test_none_is_a_value_where_the_default_is_not_none():
    assert EnvConfig().max_gross == 1.0
    config = from_toml_text(EnvConfig, 'max_gross = "none"', "my.toml")
    assert config.max_gross is None


def test_an_unknown_key_names_file_table_and_the_nearest_key():
    (line,) = complaint(AgentConfig, "[optimizer]\nlearning_rat = 1e-3")
    assert line.startswith("my.toml: [optimizer] learning_rat is not a known key; ")
    assert "did you mean 'learning_rate'?" in line


def test_a_key_that_was_renamed_is_read_with_one_warning():
    text = "drop_bars = 0.25\n"
    with pytest.warns(FutureWarning, match="my.toml: drop_bars is now called feature_dropout") as w:
        assert from_toml_text(EnvConfig, text, "my.toml").feature_dropout == 0.25
    assert len(w) == 1
    with pytest.warns(FutureWarning, match="max_kl is now called target_kl"):
        agent = from_toml_text(AgentConfig, "[learner]\nmax_kl = 0.02\n", "my.toml")
    assert agent.learner.target_kl == 0.02
    assert complaint(EnvConfig, text + "feature_dropout = 0.5\n") == [
        line
        for line in complaint(EnvConfig, text + "feature_dropout = 0.5\n")
        if "drop_bars" in line
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_grad_norm = 1.0", "did you mean 'optimizer.max_grad_norm'?"),
        ("steps = 3", "did you mean 'policy.steps' or 'learner.steps'?"),
        ("[learner]\nleak = 0.1", "did you mean 'policy.leak'?"),
    ],
)
def test_a_key_of_another_table_names_that_table(text, says):
    (line,) = complaint(AgentConfig, text)
    assert says in line


def test_an_unknown_preset_names_the_nearest_and_lists_all():
    with pytest.raises(ConfigError, match="did you mean 'nano'") as caught:
        load_agent("nanno")
    assert all(name in str(caught.value) for name in SIZES)


def test_all_that_is_wrong_is_said_at_once_and_each_once():
    lines = complaint(
        AgentConfig,
        "num_seeds = 0\nspeed = 3\n"
        "[policy]\nhidden = 2.5\ndilations = [1, 'a']\nkind = 7\n"
        "[learner]\ndiscount = 1.5\nclip_epsilon = nan\n"
        "[optimizer]\nschedule = 'cosin'",
        "checkpoint.keep=0",
        "mesh.devises=2",
    )
    starts = [
        "my.toml: [learner] clip_epsilon=nan is outside its range; give a number in (0, 1)",
        "my.toml: [learner] discount=1.5 is outside its range; give a number in (0, 1]",
        "my.toml: [optimizer] schedule='cosin' is not known; did you mean 'cosine'?",
        'my.toml: [policy] dilations[1] = "a" where a whole number is expected',
        "my.toml: [policy] hidden = 2.5 where a whole number is expected",
        "my.toml: [policy] kind = 7 where a string is expected",
        "my.toml: speed is not a known key",
        "overrides: [checkpoint] keep=0 is below",
        "overrides: [mesh] devises is not a known key; did you mean 'devices'?",
    ]
    assert len(lines) == len(starts)
    for line, start in zip(sorted(lines), starts, strict=True):
        assert line.startswith(start)


def test_a_faulty_key_does_not_draw_a_second_complaint_through_its_default():
    # num_minibatches = 7 would not divide the default 64 / 8, but would the 56 that was meant.
    (line,) = complaint(AgentConfig, "[learner]\nnum_segmets = 56\nnum_minibatches = 7")
    assert "did you mean 'num_segments'?" in line


@pytest.mark.parametrize("text", ["short = 1", "short = 'yes'", "fill = true", "size = false"])
def test_a_value_of_another_type_is_refused_and_not_converted(text):
    (line,) = complaint(EnvConfig, text)
    assert " is expected." in line


def test_a_value_in_place_of_a_table_and_the_reverse():
    (line,) = complaint(EnvConfig, "costs = 0.1")
    assert line == "my.toml: costs = 0.1 is not a table; write [costs]."
    (line,) = complaint(EnvConfig, "[fill]\na = 1")
    assert line.startswith('my.toml: fill = {"a": 1} where a string is expected')


def test_a_whole_number_does_for_a_float_and_becomes_one():
    rate = from_toml_text(AgentConfig, "[optimizer]\nlearning_rate = 1", "a").optimizer
    assert type(rate.learning_rate) is float


def test_overrides_replace_the_file_in_turn_and_take_bare_words():
    sets = ("optimizer.schedule=cosine", "policy.dilations=[1, 3]", "num_seeds=2", "num_seeds = 3")
    agent = load_agent("nano", sets)
    assert agent.optimizer.schedule == "cosine"
    assert agent.policy.dilations == (1, 3)
    assert agent.num_seeds == 3
    assert agent.policy.channels == load_agent("nano").policy.channels


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("policy.channels", "is not of the form table.key=value"),
        ("=3", "is not of the form table.key=value"),
        ("num_seeds.x=3", "where a whole number is expected"),
        ("policy.channels.x=3", "policy.channels is a value, not a table"),
        ("policy.dilations=[1, 2", "not a value as TOML writes it"),
        ("optimizer.schedule='linear", "not a value as TOML writes it"),
        ("num_seeds=1\nnum_seeds = 2", "not a value as TOML writes it"),
    ],
)
def test_an_override_that_makes_no_sense_is_refused(override, what):
    (line,) = complaint(AgentConfig, "[policy]\nchannels = 16", override)
    assert line.startswith("overrides: ")
    assert what in line


def test_a_file_that_is_absent_a_folder_not_text_or_not_toml_is_one_line(tmp_path):
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "broken.toml").write_text("[policy\nchannels = 1")
    (tmp_path / "folder.toml").mkdir()
    for name in ("absent.toml", "binary.toml", "broken.toml", "folder.toml"):
        with pytest.raises(ConfigError) as caught:
            load_agent(tmp_path / name)
        (line,) = str(caught.value).splitlines()
        assert name in line


def test_a_file_of_ones_own_is_read_by_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("\ufeffnum_seeds = 3\n", encoding="utf-8")
    assert load_agent(path) == load_agent(str(path)) == AgentConfig(num_seeds=3)


def test_minibatches_must_divide_the_segments_of_a_logical_shard():
    with pytest.raises(ConfigError) as caught:
        LearnerConfig(num_segments=64, logical_shards=8, num_minibatches=7)
    assert str(caught.value) == (
        "num_minibatches=7 does not divide num_segments / logical_shards=8; "
        "the nearest that does is 8."
    )


def test_segments_must_be_a_multiple_of_the_logical_shards():
    with pytest.raises(ConfigError, match=r"num_segments=60 .* logical_shards=8; .*: 64\.$"):
        LearnerConfig(num_segments=60)


def test_logical_shards_must_be_a_multiple_of_the_devices():
    with pytest.raises(ConfigError, match=r"logical_shards=8 .* mesh\.devices=3; .*: 9\.$"):
        AgentConfig(mesh=MeshConfig(devices=3))
    with pytest.raises(ConfigError, match=r"logical_shards=8 .* data \* fsdp=16; .*: 16\.$"):
        AgentConfig(mesh=MeshConfig(data=4, fsdp=4))


def test_a_mesh_is_given_by_all_its_devices_or_axis_by_axis():
    assert MeshConfig().axes == (1, 1, 1) and MeshConfig(devices=8).axes == (8, 1, 1)
    assert MeshConfig(fsdp=2, model=2).axes == (1, 2, 2)
    assert MeshConfig(devices=8, fsdp=2).axes == MeshConfig(data=4, fsdp=2).axes == (4, 2, 1)
    assert MeshConfig(devices=8, data=2, fsdp=4).axes == (2, 4, 1)
    with pytest.raises(ConfigError, match=r"devices=8, but data \* fsdp \* model = 4; give one"):
        MeshConfig(devices=8, data=4)
    with pytest.raises(ConfigError, match=r"devices=6 is not a multiple of fsdp \* model=4; .*: 8"):
        MeshConfig(devices=6, fsdp=2, model=2)
    with pytest.raises(ConfigError, match=r"deterministic=true is of the data axis .* fsdp=2"):
        MeshConfig(fsdp=2, deterministic=True)


@pytest.mark.parametrize(
    ("cls", "name", "good", "bad"),
    [
        (EnvConfig, "size", (1e-9, 1.0), (0.0, -0.5, float("nan"), float("inf"), 1.5, "1")),
        (EnvConfig, "max_gross", (0.5, 3.0), (0.0, float("inf"))),
        (EnvConfig, "ruin_floor", (1e-9, 0.5), (0.0, 1.0)),
        (EnvConfig, "episode_bars", (2, 5000), (1, 0, 2.0, True)),
        (EnvConfig, "features", (("rsi",),), ((), ("rsi", "rsi"))),
        (EnvConfig, "fill", ("close",), ("open", "", None)),
        (PolicyConfig, "dilations", ((1,), (3, 2)), ((), (0,), (1.5,))),
        (PolicyConfig, "leak", (0.1, 1.0), (0.0, 1.1)),
        (PolicyConfig, "channels", (1, 512, 1 << 16), (0, -1, 1.0, (1 << 16) + 1)),
        (PolicyConfig, "hidden", (1, 1 << 16), (0, (1 << 16) + 1)),
        (PolicyConfig, "steps", (1, 1024), (0, 1025)),
        (AgentConfig, "num_seeds", (1, 4096), (0, 4097)),
        (Limits, "max_orders_per_minute", (1, 10_000), (0, 10_001)),
        (PolicyConfig, "fire_rate", (0.1, 1.0), (0.0, 1.5)),
        (
            PolicyConfig,
            "remat",
            ("none", "step", "every:2", "dots"),
            ("every:", "every:0", "kernel", 3),
        ),
        (NEAREST, "num_neighbours", (1, 16), (0, 17)),
        (MLP, "window", (1, 63), (0, 2.0)),
        (LearnerConfig, "gae_lambda", (0.0, 1.0), (-0.1, 1.1)),
        (LearnerConfig, "discount", (0.5, 1.0), (0.0, 1.1)),
        (LearnerConfig, "replay_slots", (0,), (-1, 1, 2.0)),
        (CheckpointConfig, "max_skips", (1, 5), (0, 1.5)),
        (CheckpointConfig, "max_rollbacks", (0, 3), (-1, 1.5)),
        (OptimizerConfig, "b2", (0.0, 0.999), (1.0, -0.1)),
        (OptimizerConfig, "warmup_updates", (0, 10), (-1, 0.5)),
        (SGDR, "first_period", (1, 1000), (0, 1.5)),
        (OptimizerConfig, "base_width", (0, 64), (-1, 0.5)),
        (OptimizerConfig, "ema_decay", (0.0, 0.999), (1.0, -0.1)),
        (OptimizerConfig, "schedule", ("sgdr",), ("restarts", "")),
    ],
)
def test_the_ends_of_each_range(cls, name, good, bad):
    for value in good:
        assert getattr(cls(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(ConfigError, match=name):
            cls(**{name: value})


@pytest.mark.heavy
@given(
    commission=st.floats(0, 0.1, exclude_max=True),
    size=st.none() | st.floats(1e-300, 1.0),
    max_gross=st.none() | st.floats(1.0, 1e300),
    episode_bars=st.none() | st.integers(2, 2**62),
    features=st.lists(
        st.text(st.characters(codec="utf-8")), min_size=1, max_size=3, unique=True
    ).map(tuple),
    short=st.booleans(),
)
def test_any_config_reads_back_equal(commission, size, max_gross, episode_bars, features, short):
    config = EnvConfig(
        costs=Costs(commission=commission),
        size=size,
        max_gross=max_gross,
        episode_bars=episode_bars,
        features=features,
        short=short,
    )
    assert from_toml_text(EnvConfig, to_toml(config), "any") == config
