"""No look-ahead, as a law: bars that agree up to t give the same up to t, bit for bit.

Everything an environment shows and does, what policies and rules decide, and what accounts earn is
computed on two sequences of bars that agree up to a drawn row t and differ after it: values of any
column and asset changed, bars left out, bars added. Whatever is dated t or before must be the same
bytes.
"""

import collections
import dataclasses
import functools
import itertools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import EVERY_COST, random_bars
from hypothesis import strategies as st
from windowed import decide_on_window

from nca_trader import EnvConfig, backtest, load_agent, load_env, make_policy, rules
from nca_trader.agents.base import env_on_base
from nca_trader.agents.heads import distribution
from nca_trader.config.agent import KINDS_WITH
from nca_trader.config.extensions import split_frame
from nca_trader.config.ranges import switch
from nca_trader.config.toml import preset_names
from nca_trader.data.feature_sets import feature_set
from nca_trader.data.features import FEATURES
from nca_trader.envs.trading import TradingEnv, keep_mask, reset, step, window
from nca_trader.evaluate import simulate
from nca_trader.evaluate.simulate import encode
from nca_trader.markets import Task, task_of
from nca_trader.strategies.targets import strategy_targets

WARMUP = 74  # bars, the longest of `DEFAULT_FEATURES`
SHORT, LONG = WARMUP + 30, WARMUP + 46  # rows: few lengths to compile
FAST = {"xla_backend_optimization_level": 0}  # compiled for few runs of few bars
SMALL = {"channels": 4, "hidden": 8, "steps": 2, "dilations": (1, 2), "head_hidden": 8, "window": 5}
COLUMNS_OF_TASK = ("states", "returns")

# Beside the presets: what no preset may ask for yet, so that every rule and cost is under the law.
SIZED = EnvConfig(
    features=("return_1",), actions="weights", max_gross=None, borrow=True, sizing="volatility",
    volatility_span=20, size_cap=2.0,
)  # fmt: skip
EXTRA = {
    "everything": EnvConfig(
        features=("return_1", "rsi", "volume", "range", "day_of_week_sin"),
        order="rebalance",
        actions="weights",
        reward="differential_sharpe",
        max_gross=2.0,
        max_net=1.5,
        borrow=True,
        maintenance_margin=0.3,
        capital=1e5,
        lot=1.0,
        tick=0.01,
        min_notional=10.0,
        max_participation=0.01,
        delist_after=2,
        delist_haircut=0.3,
        random_costs=(0.5, 2.0),
        feature_dropout=0.1,
        costs=EVERY_COST,
    ),
    "sizes of volatility": dataclasses.replace(SIZED, dead_band=0.01),
    "sizes of covariance": dataclasses.replace(SIZED, sizing="covariance", correlation_span=20),
    "slower bars": EnvConfig(features=("return_1", "2h:rsi", "4h:rsi")),  # of bars of an hour
    "filled at the close": EnvConfig(
        features=tuple(FEATURES), fill="close", actions="orders", reward="drawdown"
    ),
}
CONFIGS = {name: load_env(name) for name in preset_names("envs")} | EXTRA
CASES = max(10, math.ceil(210 / len(CONFIGS)))  # of each; 200 and more in all
TWO_LENGTHS = ("index_daily", "equity_daily")
# All rules are in test_leakcheck.py; these are what accounts trade here.
TRIED = {
    "always_flat": rules.always_flat(),
    "buy_and_hold": rules.buy_and_hold(),
    "sma_cross": rules.sma_cross(2, 5),
    "momentum": rules.momentum(3),
    "mean_reversion": rules.mean_reversion(4),
}
STOPPED = rules.sma_cross(2, 5).with_stop(0.01).with_volatility(0.2, span=5.0)


def rows_of(config):
    """`(short, long)` numbers of rows: `SHORT` and `LONG`, more where the warm-up is longer."""
    more = max(0, feature_set(config.features, 3600).warmup - WARMUP)
    return SHORT + more, LONG + more


def source_of(config):
    """Bars for an environment: its own market's where it names one, else random ones."""
    _, rows = rows_of(config)
    if config.market:
        return task_of(dataclasses.replace(config, market_bars=rows))
    rng = np.random.default_rng(0)
    slower = any(split_frame(name)[0] for name in config.features)
    bars = random_bars(rng, rows, 3, missing=0.1, unit="h" if slower else "D")
    shape = bars.close.shape
    wick = np.exp(np.abs(rng.normal(0, 0.01, (2, *shape))))
    return dataclasses.replace(
        bars,
        high=bars.high * wick[0],
        low=bars.low / wick[1],
        volume=np.where(bars.present, np.exp(rng.normal(8, 1, shape)), 0.0),
        half_spread=rng.uniform(0, 1e-3, shape),
        dividend=np.where(rng.random(shape) < 0.1, 1.0, 0.0),
        funding=rng.normal(0, 1e-3, shape),
    )


def columns_of(source):
    """`{name: [N, ...]}` every array of a source but its times."""
    bars = source.bars if isinstance(source, Task) else source
    own = {name: getattr(source, name) for name in COLUMNS_OF_TASK if isinstance(source, Task)}
    return {name: getattr(bars, name) for name in bars.fields} | own


def rebuilt(source, time, arrays):
    """The source with other times and arrays."""
    task = isinstance(source, Task)
    own = {name: arrays.pop(name) for name in COLUMNS_OF_TASK if task}
    bars = dataclasses.replace(source.bars if task else source, time=time, **arrays)
    return dataclasses.replace(source, bars=bars, **own) if task else bars


def first_rows(source, length):
    time = (source.bars if isinstance(source, Task) else source).time
    return rebuilt(source, time[:length], {k: v[:length] for k, v in columns_of(source).items()})


@dataclasses.dataclass(frozen=True)
class Change:
    """Bars of `length` rows that agree with others up to row `t`: those after `skip` rows are
    used up and begin again, and of `columns` and `assets` the values are changed too."""

    t: int
    length: int
    skip: int
    columns: frozenset
    assets: frozenset
    size: float
    seed: int

    def apply(self, source):
        rng = np.random.default_rng(self.seed)
        old = columns_of(source)
        rows = len(old["close"])
        tail = self.length - self.t - 1
        order = np.r_[: self.t + 1, (self.t + 1 + self.skip + np.arange(tail)) % rows]
        new = {name: values[order].copy() for name, values in old.items()}
        for name in sorted(self.columns):  # a set's own order differs from run to run
            if isinstance(source, Task) and name == "present":
                continue  # no market of ours misses a bar, and reward='pnl' refuses such bars
            values = new[name]
            width = values.shape[1]  # of a market's states, which may be none
            columns = sorted({i % width for i in self.assets}) if width else []
            after = values[self.t + 1 :, columns]
            if values.dtype == bool:
                after = after ^ (rng.random(after.shape) < 0.5)
            else:
                after = after * np.exp(self.size * rng.normal(size=after.shape))
            values[self.t + 1 :, columns] = after
        time = (source.bars if isinstance(source, Task) else source).time
        # Most are as long as a bar, or the bars would be of another length.
        steps = rng.choice(np.diff(time), tail) * rng.choice((1, 1, 1, 2, 3), tail)
        return rebuilt(source, np.r_[time[: self.t + 1], time[self.t] + np.cumsum(steps)], new)


def lengths_of(name):
    """Numbers of bars to try; one alone, with bars left out and others added, compiles once."""
    both = rows_of(CONFIGS[name])
    return both if name in TWO_LENGTHS else both[1:]


def later(name, lengths, cases):
    """Tries `cases` futures of a config's bars, and surely every column of every asset."""
    source = witness(name).source
    arrays = columns_of(source)
    assets = frozenset(range(arrays["close"].shape[1]))

    @hypothesis.settings(max_examples=cases, database=None)
    @hypothesis.given(data=st.data(), base=st.sampled_from(lengths))
    def law(data, base):
        change = data.draw(changes(source, base, lengths))
        assert disagreements(name, base, change) == []

    law()
    for base, length, skip in itertools.product(lengths, lengths, (0, 3)):
        everything = Change(min(lengths) - 24, length, skip, frozenset(arrays), assets, 0.1, 0)
        assert disagreements(name, base, everything) == []


def some_or_all(things):
    return st.just(frozenset(things)) | st.frozensets(st.sampled_from(things), min_size=1)


def changes(source, length, lengths):
    """Draws a `Change` of the first `length` bars of a source."""
    arrays = columns_of(source)
    assets = range(arrays["close"].shape[1])
    # As often from the rows after the warm-up as from all.
    return (st.integers(0, length - 1) | st.integers(length - 40, length - 1)).flatmap(
        lambda t: st.builds(
            Change,
            t=st.just(t),
            length=st.sampled_from([n for n in lengths if n > t]),
            skip=st.sampled_from([0, 0, 1, 7]),
            columns=some_or_all(sorted(arrays)),
            assets=some_or_all(assets),
            size=st.sampled_from([1e-3, 0.1, 1.0]),
            seed=st.integers(0, 2**32 - 1),
        )
    )


def agents():
    """`{kind: [agents]}` the policy kinds of the agent presets, shrunk, in their variants."""
    found = collections.defaultdict(dict)
    for preset in preset_names("agents"):
        agent = load_agent(preset)
        kinds = ("none", "ring", "nearest", "all") if agent.policy.kind == "nca" else ("none",)
        for neighbours in kinds:
            kind = agent.policy.kind
            small = {n: v for n, v in SMALL.items() if kind in KINDS_WITH.get(n, (kind,))}
            policy = dataclasses.replace(agent.policy, **small, neighbours=neighbours)
            key = (neighbours, agent.precision.matmul)
            found[policy.kind][key] = dataclasses.replace(agent, policy=policy)
    return {kind: list(variants.values()) for kind, variants in found.items()}


AGENTS = agents()


def agent_of(name):
    """The agent that a config is tried with: the automaton every other time, others in turn."""
    turn = list(CONFIGS).index(name)
    first, *others = sorted(AGENTS, key=lambda kind: kind != "nca")
    kind = others[turn // 2 % len(others)] if turn % 2 else first
    return AGENTS[kind][turn // 2 % len(AGENTS[kind])]


def random_params(policy):
    """Parameters with no zero among them: an untrained policy hands its input on unchanged."""
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda s: rng.normal(0, 0.5, s.shape).astype(s.dtype), shapes)


@jax.jit
def _rule_targets(states, bar):
    """Targets of every rule: the scan that `strategy_targets` is, compiled once for all."""

    def body(state, bar):
        both = {name: TRIED[name].decide(state[name], bar, None) for name in TRIED}
        return {k: v[0] for k, v in both.items()}, {k: v[1].target for k, v in both.items()}

    return jax.lax.scan(body, states, bar)[1]


def rule_targets(bars):
    """`{rule: [N, A]}` float64."""
    with jax.enable_x64(True):
        states = {name: rule.init(bars.num_assets) for name, rule in TRIED.items()}
        return jax.tree.map(np.asarray, _rule_targets(states, bars.as_bar()))


class Witness:
    """Sees all that one environment shows and does; compiled once for each number of bars."""

    def __init__(self, name):
        # An episode of all bars begins after the warm-up and not at a row drawn from their number.
        self.config = dataclasses.replace(CONFIGS[name], episode_bars=None)
        self.source = source_of(self.config)
        # An account with stops costs a program of its own for each environment.
        self.stopped = name in TWO_LENGTHS
        # A base looks back over few bars here, and is of weights alone.
        agent = agent_of(name)
        tilts = agent.policy.base != "none" and self.config.actions == "weights"
        base = "half_and_half(lookback=5)" if tilts else "none"
        self.agent = dataclasses.replace(agent, policy=switch(agent.policy, base=base))
        env = self.env(self.source)
        # What an agent was trained with stays, whatever bars it is shown: neighbours and variances
        # are measured once, on the bars of training.
        self.dynamics = env.dynamics
        self.policies = [make_policy(self.agent, env.spec)]
        self.params = [random_params(policy) for policy in self.policies]
        self.programs = {}

    def env(self, source):
        return env_on_base(TradingEnv(source, self.config), self.agent.policy)

    def live(self, market, policy, params):
        """What an agent sees, decides and earns at every row, in a traced function."""
        spec, length = market.dynamics.spec, policy.receptive_field
        start = spec.warmup
        rows = rows_of(self.config)[1]
        shape = (rows, spec.num_assets, distribution(spec).outputs(spec))
        noise = distribution(spec).noise(jax.random.key(7), shape)

        def advance(state, noise_t):
            seen = state.observation
            shown = window(market, seen, length)
            rows = seen.index - length + 1 + jnp.arange(length)
            legs = market.legs_at(jnp.maximum(rows, 0))
            present = legs.present & (rows >= 0)[:, None]
            if seen.drop is not None:
                rate = self.config.feature_dropout
                present &= keep_mask(rate, seen.drop, rows, spec.num_assets)
            logits = decide_on_window(policy, params, shown, present, seen.account)
            action = policy.distribution.sample(logits, noise_t)
            order = policy.distribution.order(spec, action)
            after, result = step(market, state, order)
            return after, ((seen, shown, logits, order), result)

        state, _ = reset(market, jax.random.key(3))
        return jax.lax.scan(advance, state, noise[start : market.num_bars - 1])[1]

    def rollouts(self, env):
        if len(env) not in self.programs:

            def run(market):
                pairs = zip(self.policies, self.params, strict=True)
                return [self.live(market, policy, params) for policy, params in pairs]

            self.programs[len(env)] = jax.jit(run, compiler_options=FAST)
        market = dataclasses.replace(env.market, dynamics=self.dynamics)
        return jax.tree.map(np.asarray, self.programs[len(env)](market))

    def see(self, source, traded=(*TRIED, "drawn")):
        """`{name: [rows, ...]}` by the row of the bars at which each fact is known.

        Args:
          traded: whose targets an account trades.
        """
        env = self.env(source)
        facts = {"features": env.features}
        for i, (decided, result) in enumerate(self.rollouts(env)):
            start = env.spec.warmup
            facts |= _by_row(f"decision {i}", decided, start)
            facts |= _by_row(f"result {i}", result._replace(truncated=()), start + 1)
        for i, (policy, params) in enumerate(zip(self.policies, self.params, strict=True)):
            facts[f"cells {i}"] = encode(policy, params, env.features, env.bars.present)
        targets = rule_targets(env.bars)
        facts |= {f"targets {name}": values for name, values in targets.items()}
        shape = (rows_of(self.config)[1], env.bars.num_assets)
        drawn = np.random.default_rng(5).choice([-0.5, 0.0, 0.4, np.nan], shape)
        targets["drawn"] = drawn[: len(env)]
        if self.stopped:
            traded = (*traded, "stopped")
            targets["stopped"] = STOPPED
        for name in traded:
            result = backtest(env.bars, targets[name], account=self.config.account)
            for part in ("equity", "log_equity", "weights", "turnover", "cost", "flows"):
                facts[f"{part} {name}"] = np.asarray(getattr(result, part))
        return facts


def _by_row(name, tree, start):
    """The leaves of a scan's output, set back by the row of the first."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        f"{name}{jax.tree_util.keystr(path)}": np.concatenate(
            [np.zeros((start, *leaf.shape[1:]), leaf.dtype), leaf]
        )
        for path, leaf in leaves
    }


@functools.cache
def witness(name):
    return Witness(name)


@functools.cache
def facts_of(name, length):
    """What the unchanged bars give; each length is a base, so that bars are added as well."""
    return witness(name).see(first_rows(witness(name).source, length))


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    """Seams between chunks within these few bars."""
    monkeypatch.setattr(simulate, "CHUNK", 64)


def disagreements(name, base, change):
    """Names of what differs at or before `change.t` between `base` bars and their other future."""
    source = first_rows(witness(name).source, base)
    before = facts_of(name, base)
    # One rule after the other: what an account does with targets does not depend on whose they are.
    traded = ("drawn", list(TRIED)[change.seed % len(TRIED)])
    after = witness(name).see(change.apply(source), traded)
    assert set(after) <= set(before) and {f"targets {name}" for name in TRIED} <= set(after)
    return [
        name
        for name, values in after.items()
        if not _agree(before[name], values, min(change.t + 1, known(name, base)))
    ]


def known(name, length):
    """How many rows of a fact there are in `length` bars: the last bar is never decided on."""
    return length - 1 if name.startswith("decision") else length


def _agree(before, after, rows):
    """Whether two arrays, each of `rows` rows or more, agree in the first `rows`, bit for bit.

    But for the sign of a zero: a column in which nothing is ever charged is kept without one.
    """
    assert len(before) >= rows and len(after) >= rows
    pair = [x[:rows] + 0.0 if x.dtype.kind == "f" else x[:rows] for x in (before, after)]
    return pair[0].tobytes() == pair[1].tobytes()


@pytest.mark.hypothesis  # within it
@pytest.mark.parametrize("name", [*CONFIGS][::-1])  # first the one of all features
@pytest.mark.few(1)
def test_no_later_bar_changes_what_was_seen_decided_or_earned(name):
    later(name, lengths_of(name), CASES)


@pytest.mark.hypothesis
@pytest.mark.slow  # a second number of bars compiles everything again
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in TWO_LENGTHS])
def test_bars_that_end_sooner_or_go_on_longer_change_nothing_before(name):
    later(name, rows_of(CONFIGS[name]), 4)


def test_the_law_is_tried_in_two_hundred_cases():
    assert len(CONFIGS) * CASES >= 200 and len(TRIED) >= 4
    tried = [agent_of(name).policy for name in CONFIGS]
    assert {policy.kind for policy in tried} == {"nca", "mlp", "gru"}
    assert {policy.neighbours for policy in tried} == {"none", "ring", "nearest", "all"}


def test_the_scan_of_the_rules_is_the_one_that_a_backtest_runs():
    bars = source_of(EnvConfig())
    targets = rule_targets(bars)
    for name, rule in TRIED.items():
        np.testing.assert_array_equal(targets[name], strategy_targets(bars, rule), err_msg=name)
    for name in ("sma_cross", "momentum"):  # and they do decide something
        assert len(np.unique(targets[name])) == 2


def moved(t=90):
    """A change of every column of every asset after t."""
    columns = frozenset(columns_of(witness("index_daily").source)) - {"present"}
    return Change(t, LONG, 0, columns, frozenset((0, 1, 2)), 0.1, 0)


@pytest.mark.heavy
def test_what_later_bars_do_change():
    after = witness("index_daily").see(moved().apply(witness("index_daily").source))
    before = facts_of("index_daily", LONG)
    changed = {k for k in before if before[k][91:].tobytes() != after[k][91:].tobytes()}
    parts = ("equity", "log_equity", "weights", "turnover", "cost", "flows")
    assert changed >= {
        "features",
        "cells 0",
        "targets sma_cross",
        "targets momentum",
        "result 0.reward",
        "result 0.observation.account.weight",
        "decision 0[1]",  # window
        "decision 0[2]",  # logits
        "decision 0[3]",  # order
        *(f"{part} {name}" for part in parts for name in ("drawn", "sma_cross", "momentum")),
    }


@pytest.mark.heavy
@pytest.mark.few(1)
@pytest.mark.parametrize("name", TWO_LENGTHS)
def test_bars_added_after_the_last_one_change_nothing(name):
    """The last bar of the shorter history has no decision: only what both know is compared."""
    columns = frozenset(columns_of(witness(name).source))
    assert (
        disagreements(name, SHORT, Change(SHORT - 1, LONG, 0, columns, frozenset(), 0.1, 0)) == []
    )


@pytest.mark.heavy
def test_every_fact_has_a_row_for_every_bar_that_it_is_known_at():
    for length in (SHORT, LONG):
        facts = facts_of("equity_daily", length)
        assert {name: len(values) for name, values in facts.items()} == {
            name: known(name, length) for name in facts
        }
