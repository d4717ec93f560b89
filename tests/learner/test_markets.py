"""Training over shards: each padded to one shape, in turn, and resumed at the shard it left."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_bars
from tiny import AGENT, ENV, STEPS_PER_UPDATE
from untrained import leaves

from nca_trader import Run, TradingEnv, machine, make_learner, make_mesh, make_policy
from nca_trader.cli import main
from nca_trader.config.records import open_record, seal_record
from nca_trader.config.toml import to_toml
from nca_trader.data.shards import open_shards, write_shards
from nca_trader.errors import BarError, ConfigError, RunError, StateError
from nca_trader.learner.learner import check_shards, end_with_shard, shard_updates
from nca_trader.learner.rollout import Segments
from nca_trader.learner.train import Markets, train
from nca_trader.runs.opening import open_run

pytestmark = pytest.mark.usefixtures("quick_compile")

TURN = dataclasses.replace(
    AGENT, learner=dataclasses.replace(AGENT.learner, steps=6 * STEPS_PER_UPDATE, shard_updates=2)
)
LENGTHS = (100, 120, 100)


@pytest.fixture(scope="module")
def bars():
    return random_bars(np.random.default_rng(0), sum(LENGTHS), 2)


def write(bars, folder):
    ends = np.cumsum(LENGTHS)
    return write_shards((bars[end - n : end] for n, end in zip(LENGTHS, ends, strict=True)), folder)


@pytest.fixture(scope="module")
def place(bars, tmp_path_factory):
    """A folder with shards and the files of the experiment."""
    folder = tmp_path_factory.mktemp("sharded")
    write(bars, folder / "shards")
    (folder / "env.toml").write_text(to_toml(ENV))
    (folder / "agent.toml").write_text(to_toml(TURN))
    return folder


def command(folder, run, data="shards/shards.json"):
    named = {"env": "env.toml", "agent": "agent.toml", "data": data, "run": run}
    return ["train", *(f"--{name}={folder / file}" for name, file in named.items())]


@pytest.mark.heavy
def test_training_over_shards_goes_on_at_its_shard_to_the_same_parameters(place):
    assert main(command(place, "straight")) == 0
    run = Run(place / "straight")
    assert [row["shard"] for row in run.metrics()] == [0, 0, 1, 1, 2, 2]
    seen = []
    env = TradingEnv(open_shards(place / "shards"), ENV)
    for stop in (3, 99):  # in the midst of the second shard
        stopped = lambda stop=stop: len(seen) == stop  # noqa: E731
        again = train(env, TURN, place / "stopped", report=seen.append, stop=stopped)
    assert [row["shard"] for row in seen] == [0, 0, 1, 1, 2, 2]
    (step, got), (last, expected) = leaves(again), leaves(run)
    assert step == last == 6 and got.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_array_equal(got[name], leaf, err_msg=name)
    data = run.manifest.data
    assert (data.rows, data.symbols) == (sum(LENGTHS), list(env.spec.symbols))


@pytest.fixture(scope="module")
def sharded(place):
    env = TradingEnv(open_shards(place / "shards"), ENV)
    return env, make_learner(env, make_policy(TURN, env.spec), TURN)


def nan_from(leaf, rows):
    """A leaf of a market with NaN, or what its type makes of it, from a row on."""
    spoilt = np.array(leaf)
    if spoilt.ndim:
        spoilt[rows:] = np.array(np.nan).astype(leaf.dtype)
    return jax.device_put(spoilt, leaf.sharding)


@pytest.mark.heavy
def test_shards_of_several_lengths_share_one_program_that_never_reads_their_padding(
    sharded, caplog
):
    env, learner = sharded
    state, nan = learner.init(jax.random.key(1)), learner.init(jax.random.key(1))
    with Markets(env, TURN.learner, learner.mesh) as markets:
        learner.step(learner.init(jax.random.key(2)), markets.of(0))  # has compiled
        for update in range(8):  # all shards, and the first again
            market = markets.of(update)
            rows = int(market.rows)
            assert rows == (*LENGTHS, LENGTHS[0])[update // 2] and len(market.features) == 120
            poisoned = jax.tree.map(lambda leaf, rows=rows: nan_from(leaf, rows), market)
            with caplog.at_level("WARNING"), jax.log_compiles():
                state, metrics = learner.step(state, market)
                nan, _ = learner.step(nan, poisoned)
            assert np.isfinite(float(metrics["loss"]))
            assert (state.segments.index <= rows - 1).all()
    assert "XLA compilation" not in caplog.text
    jax.tree.map(np.testing.assert_array_equal, state.params, nan.params)


def test_segments_begin_anew_on_another_shard_and_go_on_on_the_same():
    left = jnp.full(3, 16)
    segments = Segments(jnp.zeros(3, jnp.int32), left, None, None)
    ends = [bool((end_with_shard(3, jnp.asarray(u), segments).left == 0).all()) for u in range(7)]
    assert ends == [True, False, False, True, False, False, True]
    assert (end_with_shard(3, jnp.asarray(1), segments).left == left).all()


@pytest.mark.heavy
def test_a_shard_stays_until_its_bars_were_drawn_once(sharded):
    env, _ = sharded
    auto = dataclasses.replace(TURN.learner, shard_updates=None, num_segments=8, segment_length=4)
    assert shard_updates(env.shards, auto) == 4  # 4 x 32 bars of 120
    assert shard_updates(env.shards, dataclasses.replace(auto, segment_length=16)) == 1
    with pytest.raises(ConfigError, match="shard_updates"):
        dataclasses.replace(auto, shard_updates=0)


def test_the_shards_that_wait_on_the_device_are_taken_from_its_memory(sharded, monkeypatch):
    env, _ = sharded
    agent = dataclasses.replace(TURN, learner=dataclasses.replace(TURN.learner, memory_gb=0.01))
    bounded = make_learner(env, make_policy(agent, env.spec), agent)
    rows, assets = 120, 2
    # Two features, two returns and a presence of each asset and row, and the count of rows.
    market = rows * assets * (2 * 4 + 2 * 4 + 1) + 4
    assert bounded.bounded.limit == pytest.approx(1e7 - 2 * market)

    auto = dataclasses.replace(TURN, learner=dataclasses.replace(TURN.learner, memory_gb=None))
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(10**12, 10**7))
    free = make_learner(env, make_policy(auto, env.spec), auto, make_mesh(1))
    assert free.bounded.limit == pytest.approx(1e7 - market)


@pytest.mark.heavy
def test_a_missing_or_changed_shard_is_named_when_its_turn_comes(bars, tmp_path, capsys):
    for name, how in (("missing", BarError), ("changed", StateError)):
        shards = write(bars, tmp_path / name)
        path = tmp_path / name / shards[1].path
        path.unlink() if name == "missing" else path.write_bytes(
            path.read_bytes()[:-9] + b"123456789"
        )
        run = tmp_path / f"run-{name}"
        with pytest.raises(how, match=r"000001\.parquet"):
            train(TradingEnv(shards, ENV), TURN, run)
        assert [row["shard"] for row in Run(run).metrics()] == [0, 0]
    (tmp_path / "env.toml").write_text(to_toml(ENV))
    (tmp_path / "agent.toml").write_text(to_toml(TURN))
    capsys.readouterr()
    assert main(command(tmp_path, "run-missing", "missing")) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "000001.parquet: a shard of" in said and "copy it again" in said


def test_a_run_of_several_universes_trades_each_of_them(bars, tmp_path):
    each = write_shards((bars.select(symbol) for symbol in bars.symbols), tmp_path / "each")
    policy = dataclasses.replace(TURN.policy, neighbours="all")
    turn = dataclasses.replace(TURN, policy=policy)
    run = open_run(TradingEnv(each, ENV), turn, tmp_path / "run", seed=0)
    for symbol in bars.symbols:
        assert run.on(bars.select(symbol)).spec.symbols == (symbol,)
    # Trained on one asset at a time, it has no weights for others.
    with pytest.raises(BarError, match=r"run run trades any one symbol; select those, or train"):
        run.on(bars)


def test_a_run_of_other_shards_is_refused(place, bars):
    open_run(TradingEnv(open_shards(place / "shards"), ENV), TURN, place / "opened", seed=0)
    shards = write(bars[: sum(LENGTHS)], place / "others")
    file = place / "others" / "shards.json"
    manifest = open_record(file.read_bytes(), file.name)[0]
    manifest["shards"].reverse()
    file.write_text(seal_record(manifest))
    with pytest.raises(RunError, match="data sha256 was"):
        train(TradingEnv(open_shards(place / "others"), ENV), TURN, place / "opened")
    assert len(shards) == 3


def test_what_cannot_be_learnt_from_shards_is_refused_in_one_line(place, bars, sharded, tmp_path):
    env, _ = sharded
    policy = make_policy(TURN, env.spec)

    def refused(says, env=env, **changes):
        agent = dataclasses.replace(TURN, learner=dataclasses.replace(TURN.learner, **changes))
        with pytest.raises((ConfigError, BarError), match=says) as error:
            check_shards(env, policy, agent)
        assert "\n" not in str(error.value)

    averaged = dataclasses.replace(TURN.optimizer, ema_decay=0.9)
    replaying = dataclasses.replace(TURN.learner, replay_slots=2)
    with pytest.raises(ConfigError, match="an old rollout is of a shard"):
        check_shards(env, policy, dataclasses.replace(TURN, learner=replaying, optimizer=averaged))
    refused("take reward = 'pnl'", advantages="exact")
    refused(r"000000\.parquet: 100 bars, but training needs", segment_length=40)
    each = write_shards((bars.select(symbol) for symbol in bars.symbols), tmp_path / "each")
    nearest = dataclasses.replace(
        TURN, policy=dataclasses.replace(TURN.policy, neighbours="nearest")
    )
    with pytest.raises(ConfigError, match="ranks the assets of one universe"):
        check_shards(TradingEnv(each, ENV), policy, nearest)
    uneven = write_shards([bars, bars.select(bars.symbols[0])], tmp_path / "uneven")
    with pytest.raises(
        BarError, match=r"000001\.parquet: has 1 symbols, and 000000\.parquet has 2"
    ):
        TradingEnv(uneven, ENV)
    assert main([*command(place, "cut"), "--until=2020-02-01"]) == 2
