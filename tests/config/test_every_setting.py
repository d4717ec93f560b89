"""Every key of an environment, an agent and of limits changes a number or a program.

The table has a row for each key, and a key for each row. A row has a config in which the key
matters, another value, and a probe: what it computes must differ. A key that takes one value alone
has the line that refuses the others.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import pathlib
import tempfile
import types
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from drawn import random_bars, rich_bars
from untrained import untrained_run

import nca_trader.learner.train
from nca_trader import EnvConfig, TradingEnv, make_policy
from nca_trader.agents.base import env_on_base
from nca_trader.agents.nca import Fire
from nca_trader.cli import main
from nca_trader.config.account import Limits
from nca_trader.data.bars import write_bars
from nca_trader.data.shards import write_shards
from nca_trader.envs.account.state import open_account
from nca_trader.errors import ConfigError, StateError
from nca_trader.learner.learner import draw_hyper, make_learner, shard_updates
from nca_trader.learner.optimizer import make_optimizer
from nca_trader.learner.stopping import Stopping
from nca_trader.learner.train import Health, Intervals, planned_steps, train
from nca_trader.learner.update import cost_scale, volatility_scale, whole_after

pytestmark = pytest.mark.usefixtures("quick_compile")

BARS = random_bars(np.random.default_rng(0), 120, 2, spread=0.02)
WILD = random_bars(np.random.default_rng(1), 120, 2, spread=0.08)
GOING = rich_bars(np.random.default_rng(2), 120, 2)
QUOTED = dataclasses.replace(BARS, half_spread=np.full(BARS.close.shape, 1e-3))
HOURS = random_bars(np.random.default_rng(3), 24 * 70, 1, unit="h")
ENV = EnvConfig(features=("return_1",), random_start=False)
AGENT = dataclasses.replace(
    tiny.AGENT,
    learner=dataclasses.replace(
        tiny.AGENT.learner, num_segments=16, num_minibatches=2, envs_per_segment=2
    ),
)


def changed(config, **values):
    """A copy of a config with values by path, a table and its key joined by two underscores."""
    tables = {}
    for name, value in values.items():
        table, _, key = name.rpartition("__")
        tables.setdefault(table, {})[key] = value
    own = tables.pop("", {})
    inner = {name: dataclasses.replace(getattr(config, name), **v) for name, v in tables.items()}
    return dataclasses.replace(config, **own, **inner)


def digest(tree):
    """The digest of all numbers of a tree."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()


def stepped(env, length=55):
    """What an account earns by actions that are drawn once, and where its episode ends."""
    rng, shape = np.random.default_rng(4), (length, env.spec.num_assets)
    kinds = env.spec.num_actions
    actions = rng.integers(0, kinds, shape) if kinds else 2.0 * rng.normal(size=shape)

    def move(state, action):
        state, timestep = env.step(state, action)
        weight = state.episode.account.weight
        return state, (timestep.reward, timestep.discount, timestep.truncated, weight)

    def episode(key):
        return jax.lax.scan(move, env.reset(key)[0], jnp.asarray(actions))[1]

    return digest(jax.jit(episode)(jax.random.key(0)))


def traded(config, bars=BARS):
    return stepped(TradingEnv(bars, config))


def quoted(config):
    return traded(config, QUOTED)


def features_of(config, bars=BARS):
    return digest(TradingEnv(bars, config).features)


def hidden(config):
    env = TradingEnv(BARS, config)
    seen = env.reset(jax.random.key(0))[0].observation
    return digest(env.window(seen._replace(index=seen.index + 40), 20))


def drawn_market(config):
    env = TradingEnv(None, config)
    return digest((env.bars.close, env.features))


def fee(trade):
    return 1e-3


@functools.cache
def written():
    """A file of bars, for the command that takes limits."""
    folder = pathlib.Path(tempfile.mkdtemp())
    write_bars(BARS, folder / "bars.csv")
    return folder


def backtested(limits):
    """The metrics of a rule under limits, by the command."""
    words = ["backtest", "--strategy=random", f"--data={written() / 'bars.csv'}", "--json"]
    words += [f"--trials={written()}", "--commission=1e-4"]
    given = {f.name: getattr(limits, f.name) for f in dataclasses.fields(limits)}
    words += [f"--limit={name}={value}" for name, value in given.items() if value is not None]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(words) == 0
    found = json.loads(said.getvalue().splitlines()[-1])
    return {name: found[name] for name in ("total_return", "fills", "turnover")}


# The agent's probes.


@functools.cache
def env_of(actions="direction", reward="log_return"):
    return TradingEnv(random_bars(np.random.default_rng(0), 120, 3), changed(
        tiny.ENV, actions=actions, reward=reward
    ))  # fmt: skip


def encoded(agent):
    """The program that encodes bars and acts on them, forward and back."""
    policy = make_policy(agent, env_of().spec)
    params = jax.eval_shape(policy.init, jax.random.key(0))
    x, present = jnp.zeros((1, 9, 3, 2)), jnp.ones((1, 9, 3), bool)
    words = jnp.zeros(1, jnp.uint32), jnp.zeros(1, jnp.int32)
    fire = None if policy.fire_rate == 1.0 else Fire(*words)

    def loss(params):
        cells = policy.encode(params, x, present, fire)
        seen = policy.act(params, cells, jnp.zeros((1, 9, 3, 3)))
        return sum(part.sum() for part in jax.tree.leaves(seen))

    return jax.jit(jax.grad(loss)).lower(params).as_text()


def tilted(agent):
    return stepped(env_on_base(env_of("weights"), agent.policy))


def learner_of(agent):
    pathwise = agent.learner.advantages == "pathwise"
    reward = "pnl" if agent.learner.advantages == "exact" else "log_return"
    env = env_of("weights" if pathwise else "direction", reward)
    return make_learner(env, make_policy(agent, env.spec), agent)


def updated(agent):
    """The program of an update, and how long a run is."""
    learner = learner_of(agent)
    state = jax.eval_shape(learner.init, jax.random.key(0))
    program = learner.bounded.program.lower(state, learner.market, learner.course)
    return f"{program.as_text()} {jax.device_get(learner.course)}"


def device_limit(agent):
    return learner_of(agent).bounded.limit


def mesh_of(agent):
    return dict(learner_of(agent).mesh.shape)


@functools.cache
def sharded():
    return write_shards(BARS, tempfile.mkdtemp(), rows=40)


def turn(agent):
    return shard_updates(sharded(), agent.learner)


def moved(agent):
    """Parameters after twelve steps along gradients that are drawn once."""
    rng = np.random.default_rng(5)
    params = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}
    optimizer = make_optimizer(agent.optimizer, 40)
    state = optimizer.init(params)
    for _ in range(12):
        drawn = {name: jnp.asarray(rng.normal(size=x.shape)) for name, x in params.items()}
        updates, state = optimizer.update(drawn, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return digest(params)


def eased(agent):
    of = agent.curriculum
    costs, volatility = (whole_after(x, 8) for x in (of.costs_share, of.volatility_share))
    updates = map(jnp.int32, range(8))
    return [(cost_scale(of, u, costs), volatility_scale(of, u, volatility)) for u in updates]


def drawn(agent):
    return [float(value) for value in draw_hyper(agent, jax.random.key(0))]


def acted(agent):
    """What the agents of a run order together by outputs that are drawn once."""
    path = pathlib.Path(tempfile.mkdtemp()) / "run"
    run = untrained_run(path, BARS, ENV, agent)
    logits = np.random.default_rng(6).normal(size=(2, 3 * run.num_acting))
    account = open_account(jnp.zeros(2), TradingEnv(BARS, ENV).rules)
    return digest(run.policy.target(jnp.asarray(logits), account))


RUN = types.SimpleNamespace(path="runs/a", metrics=lambda: [], selection=None)


def saved(agent):
    clock = [0.0]
    intervals = Intervals(agent.checkpoint, lambda: clock[0])
    found = []
    for update in range(1, 9):
        clock[0] += 1.0
        found.append(intervals.due(update))
    return found


def kept(agent):
    """How many checkpoints `train` keeps."""

    class Asked(Exception):
        pass

    def checkpoints(path, keep):
        raise Asked(keep)

    path = pathlib.Path(tempfile.mkdtemp()) / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Asked) as asked:
        patch.setattr(nca_trader.learner.train, "Checkpoints", checkpoints)
        train(env_of(), agent, path)
    return asked.value.args


def failed(agent):
    """How many dropped updates are a fault, and how many returns it takes to give up."""
    health = Health(agent.checkpoint, RUN)
    row = {"update": 1, "skipped": 1, "param_norm": 1.0, "steps": 1}
    row |= dict.fromkeys(("loss", "grad_norm", "gradients"), 1.0)
    faults = [bool(health.fault(row)) for _ in range(8)]
    state, count = types.SimpleNamespace(key=jax.random.key(0)), 0
    state._replace = lambda key: state
    with contextlib.suppress(StateError):
        while count < 9:
            health.roll_back("a fault", state, 1)
            count += 1
    return faults, count


def scored(agent):
    stopping = Stopping(RUN, types.SimpleNamespace(data=None), agent.selection, 40)
    stopping._since = 4
    return [stopping.due(update) for update in range(1, 41)], stopping.ended


class Row(NamedTuple):
    """How a key is seen to matter.

    probe: of a config; or the line that refuses the value. value: another one. base: what the
    config has in which the key matters, where it is not the table's own.
    """

    probe: Callable[[Any], Any] | str
    value: Any
    base: dict[str, Any] = MappingProxyType({})


LEVERED = dict(actions="weights", size=1.5, max_gross=3.0, borrow=True)
MONEY = dict(actions="weights", capital=1000.0)
SIZED = dict(sizing="volatility", volatility_target=0.3)
JOINT = dict(SIZED, sizing="covariance")
wild = functools.partial(traded, bars=WILD)
going = functools.partial(traded, bars=GOING)
ENVS = {
    "features": Row(features_of, ("return_5",)),
    "sessions": Row(
        functools.partial(features_of, bars=HOURS), "new_york", dict(features=("1d:return_1",))
    ),
    "fill": Row(traded, "close"),
    "order": Row(traded, "rebalance"),
    "short": Row(traded, False),
    "size": Row(traded, 0.2),
    "actions": Row(traded, "orders"),
    "reward": Row(traded, "differential_sharpe"),
    "pnl_returns": Row(traded, "simple", dict(reward="pnl", fill="close")),
    "risk_aversion": Row(traded, 3.0, dict(reward="mean_variance")),
    "quadratic_cost": Row(traded, 0.1, dict(reward="pnl", fill="close")),
    "drawdown_penalty": Row(traded, 0.5, dict(reward="drawdown")),
    "sharpe_decay": Row(traded, 0.2, dict(reward="differential_sharpe")),
    "max_gross": Row(traded, 0.6),
    "max_net": Row(traded, 0.2),
    "borrow": Row(traded, True, LEVERED | dict(borrow=False)),
    "maintenance_margin": Row(traded, 0.5, LEVERED),
    "capital": Row(traded, 3000.0, MONEY | dict(lot=1.0)),
    "lot": Row(traded, 2.0, MONEY),
    "tick": Row(traded, 5.0, MONEY),
    "min_notional": Row(traded, 300.0, MONEY),
    "max_participation": Row(traded, 0.1, dict(actions="weights", capital=1e9)),
    "delist_after": Row(going, 2),
    "delist_haircut": Row(going, 0.5, dict(delist_after=2)),
    "sizing": Row(traded, "volatility"),
    "volatility_target": Row(traded, 0.1, SIZED),
    "volatility_span": Row(traded, 5, SIZED),
    "volatility_floor": Row(traded, 5.0, SIZED),
    "size_cap": Row(traded, 0.5, SIZED),
    "correlation_span": Row(traded, 5, JOINT),
    "shrinkage": Row(traded, 0.3, JOINT),
    "dead_band": Row(traded, 0.3, dict(actions="weights")),
    "episode_bars": Row(traded, 10),
    "random_start": Row(traded, True),
    "random_costs": Row(traded, (2.0, 4.0), dict(costs__commission=1e-3)),
    "feature_dropout": Row(hidden, 0.5),
    "ruin_floor": Row(wild, 0.9),
    "market": Row(drawn_market, "ou(phi=0.5)", dict(market="ou(phi=0.9)", market_bars=100)),
    "market_state": Row(drawn_market, False, dict(market="ou(phi=0.9)", market_bars=100)),
    "market_bars": Row(drawn_market, 120, dict(market="ou(phi=0.9)", market_bars=100)),
    "costs.commission": Row(traded, 1e-3),
    "costs.slippage": Row(traded, 1e-3),
    "costs.half_spread": Row(traded, 1e-3),
    "costs.impact": Row(traded, 0.1, dict(capital=1e6)),
    "costs.fixed_fee": Row(traded, 1.0, dict(capital=1e4)),
    "costs.borrow_fee": Row(traded, 0.1),
    "costs.interest_lend": Row(traded, 0.1),
    "costs.interest_borrow": Row(traded, 0.1, LEVERED),
    "costs.funding": Row(traded, 0.1),
    "costs.liquidation_fee": Row(traded, 0.05, LEVERED | dict(maintenance_margin=0.5)),
    "costs.own": Row(traded, (fee,)),
    "costs.quote_scale": Row(quoted, 2.0),
    "costs.own_scale": Row(traded, 2.0, dict(costs__own=(fee,))),
}
LIMITS = {
    "max_position": Row(backtested, 0.2),
    "max_gross": Row(backtested, 0.3),
    "max_order": Row(backtested, 0.1),
    "max_orders_per_minute": Row(backtested, 1),
    "price_collar": Row(backtested, 0.001),
    "max_daily_loss": Row(backtested, 0.005),
    "max_drawdown": Row(backtested, 0.02),
}
ON = dict(policy__base="equal_weight")
RING = dict(learner__replay_slots=2, optimizer__ema_decay=0.9)
SEVERAL = dict(num_seeds=2)
AGENTS = {
    "num_seeds": Row(lambda agent: planned_steps(agent), 2),
    "ensemble": Row(acted, "agreement", SEVERAL),
    "policy.kind": Row(encoded, "gru", dict(policy=dataclasses.replace(
        tiny.AGENT.policy, kind="mlp", steps=5, dilations=(1, 2, 4, 8, 16), hidden=64,
    ))),
    "policy.channels": Row(encoded, 5),
    "policy.hidden": Row(encoded, 7),
    "policy.window": Row(encoded, 5, dict(policy=dataclasses.replace(
        tiny.AGENT.policy, kind="mlp", steps=5, dilations=(1, 2, 4, 8, 16), window=3,
    ))),
    "policy.steps": Row(encoded, 3),
    "policy.dilations": Row(encoded, (1, 3)),
    "policy.neighbours": Row(encoded, "ring"),
    "policy.num_neighbours": Row(encoded, 1, dict(policy__neighbours="nearest")),
    "policy.leak": Row(encoded, 0.3),
    "policy.fire_rate": Row(encoded, 0.5),
    "policy.remat": Row(encoded, "step"),
    "policy.feature_clip": Row(encoded, 2.0),
    "policy.head_hidden": Row(encoded, 9),
    "policy.base": Row(tilted, "half_and_half(lookback=5)", ON),
    "policy.tilt_limit": Row(tilted, 0.2, ON),
    "policy.tilt_penalty": Row(tilted, 0.1, ON),
    "learner.steps": Row(planned_steps, 2048),
    "learner.num_segments": Row(updated, 32),
    "learner.segment_length": Row(updated, 8),
    "learner.envs_per_segment": Row(updated, 1),
    "learner.logical_shards": Row(updated, 4),
    "learner.advantages": Row(updated, "group"),
    "learner.objective": Row(updated, "sharpe", dict(
        learner__advantages="pathwise", learner__num_minibatches=1,
    )),
    "learner.shard_updates": Row(turn, 7),
    "learner.replay_slots": Row(updated, 3, RING),
    "learner.num_epochs": Row(updated, 2),
    "learner.num_minibatches": Row(updated, 1),
    "learner.micro_batches": Row(updated, 2, dict(mesh__devices=1)),
    "learner.memory_gb": Row(device_limit, 3.0),
    "learner.target_kl": Row(updated, 0.01),
    "learner.discount": Row(updated, 0.9),
    "learner.gae_lambda": Row(updated, 0.5),
    "learner.clip_epsilon": Row(updated, 0.1),
    "learner.value_coef": Row(updated, 0.1),
    "learner.entropy_coef": Row(updated, 0.1),
    "optimizer.learning_rate": Row(moved, 1e-2),
    "optimizer.schedule": Row(moved, "cosine", dict(optimizer__warmup_updates=2)),
    "optimizer.first_period": Row(
        moved, 3, dict(optimizer__schedule="sgdr", optimizer__warmup_updates=2)
    ),
    "optimizer.warmup_updates": Row(moved, 2),
    "optimizer.b1": Row(moved, 0.5),
    "optimizer.b2": Row(moved, 0.9),
    "optimizer.eps": Row(moved, 1e-1),
    "optimizer.weight_decay": Row(moved, 0.1),
    # Far below each gradient, the clip is a factor that Adam divides by: so is its eps here.
    "optimizer.max_grad_norm": Row(moved, 5.0, dict(optimizer__eps=1e-1)),
    "optimizer.base_width": Row(moved, 2),
    "optimizer.ema_decay": Row(updated, 0.5, RING),
    "curriculum.costs_from": Row(eased, 0.5),
    "curriculum.costs_share": Row(eased, 0.9, dict(curriculum__costs_from=0.5)),
    "curriculum.volatility_from": Row(eased, 0.5),
    "curriculum.volatility_share": Row(eased, 0.9, dict(curriculum__volatility_from=0.5)),
    **{
        f"population.{name}": Row(drawn, (0.3, 0.4), SEVERAL | {f"population__{name}": (0.1, 0.2)})
        for name in ("learning_rate", "entropy_coef", "clip_epsilon", "gae_lambda", "discount")
    },
    "precision.matmul": Row(encoded, "bfloat16"),
    "precision.compute": Row(encoded, "bfloat16", dict(precision__matmul="bfloat16")),
    "precision.params": Row("would lose updates below 1/256 of a weight", "bfloat16"),
    "mesh.devices": Row(mesh_of, 2),
    "mesh.data": Row(mesh_of, 2),
    "mesh.fsdp": Row(mesh_of, 2),
    "mesh.model": Row(mesh_of, 2),
    "mesh.deterministic": Row(updated, True),
    "checkpoint.every": Row(saved, 3),
    "checkpoint.every_seconds": Row(saved, 2.5, dict(checkpoint__every=0)),
    "checkpoint.keep": Row(kept, 5),
    "checkpoint.max_skips": Row(failed, 3),
    "checkpoint.max_rollbacks": Row(failed, 2),
    "selection.scores": Row(scored, 4),
    "selection.patience": Row(scored, 3),
}  # fmt: skip


def keys_of(cls, above=""):
    """The path of each key of a config, its tables' keys included."""
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.default):
            yield from keys_of(type(field.default), f"{above}{field.name}.")
        else:
            yield above + field.name


TABLES = {"env": (ENV, ENVS), "limits": (Limits(), LIMITS), "agent": (AGENT, AGENTS)}
ROWS = [(table, key) for table, (_, rows) in TABLES.items() for key in rows]


@pytest.mark.parametrize("table", TABLES)
def test_the_table_has_a_row_for_each_key_and_a_key_for_each_row(table):
    base, rows = TABLES[table]
    assert sorted(rows) == sorted(keys_of(type(base)))


@functools.cache
def found_at(table, probe, base):
    """What a probe finds with the base of a row, which several rows share."""
    return probe(dict(BASES)[table, base])


BASES = {}


@pytest.mark.drawn(len(ROWS) // 20)
@pytest.mark.parametrize(("table", "key"), ROWS, ids=[".".join(row) for row in ROWS])
def test_a_key_changes_what_is_computed_or_is_refused(table, key):
    usual, rows = TABLES[table]
    row = rows[key]
    base = changed(usual, **row.base)
    path = key.replace(".", "__")
    if isinstance(row.probe, str):
        with pytest.raises(ConfigError, match=row.probe):
            changed(base, **{path: row.value})
        return
    other = changed(base, **{path: row.value})
    assert other != base
    BASES[table, repr(base)] = base
    same = found_at(table, row.probe, repr(base)) == row.probe(other)
    assert not same, f"{key} = {row.value!r} changes nothing"
