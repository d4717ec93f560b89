"""How many bars a rule remembers: its target in force on so many bars is that on all of them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from drawn import bars_of, random_bars

import nca_trader as nca
from nca_trader import ConfigError
from nca_trader.agents.base import RULES, base_named, history_of
from nca_trader.strategies import rolling
from nca_trader.strategies.targets import strategy_targets

# Every shipped rule, and the number of bars that it remembers; None for all of them.
MEMORIES = {
    "always_flat": 1,
    "buy_and_hold": 0,
    "equal_weight": 1,
    "volatility_hold(span=1)": 1 + 2 - 1,
    "volatility_hold(span=9.0, cap=5.0)": 1 + 162,
    "half_and_half": 253,
    "half_and_half(lookback=20)": 21,
    "sma_cross": 30,
    "sma_cross(slow=150)": 150,
    "sma_cross(fast=1, slow=2)": 2,
    "momentum": 51,
    "momentum(lookback=1)": 2,
    "time_series_momentum(lookback=70)": 71,
    "cross_sectional_momentum(lookback=40, share=0.5)": 41,
    "mean_reversion(entry=3.0)": None,
    "breakout": None,
    "tuned_sma": None,
    "tuned_sma(pairs=[[5,20],[20,80]], every=20)": None,
    "forecaster": None,
    "random": None,
}


def monday(bars=5):
    """Long after a rise, decided on Mondays alone: up to seven bars of every day ago."""
    past = rolling.past(bars)

    def act(state, bar):
        state, before = past.update(state, bar.close, bar.present)
        decides = (bar.time // 86_400 + 3) % 7 == 0
        return state, jnp.where(decides, jnp.where(bar.close > before, 0.5, 0.0), jnp.nan)

    return nca.Strategy(past.init, act, "mondays", memory=bars + 7)


# One of each kind of memory; the others differ by a number alone.
RUN = [
    ("always_flat", 0.0),
    ("buy_and_hold", 0.0),
    ("equal_weight", 0.0),
    ("volatility_hold(span=9.0, cap=5.0)", 0.25),
    ("half_and_half(lookback=20)", 0.0),
    ("sma_cross(fast=1, slow=2)", 0.25),
    ("momentum(lookback=1)", 0.0),
    ("time_series_momentum(lookback=70)", 0.0),
    ("cross_sectional_momentum(lookback=40, share=0.5)", 0.25),
]
CROSS, HOLD = nca.rules.sma_cross(3, 12), nca.rules.buy_and_hold()
WRAPPED = [
    (CROSS.with_delay(np.int64(7)).with_delay(1), 20, 0.0),
    (CROSS.with_volatility(0.15, span=9.0), 12 + 162, 0.25),
    (nca.blend({"a": (CROSS.with_delay(9), 0.5), "hold": (HOLD, 1.0)}).with_delay(1), 22, 0.0),
    # Stated alone.
    (CROSS.with_delay(0), 12, None),
    (CROSS.with_delay(7), 19, None),
    (CROSS.with_volatility(0.15, span=1.0).with_delay(2), 12 + 1 + 2, None),
    (dataclasses.replace(CROSS, name="another"), 12, None),
    (nca.blend({"a": (CROSS, 0.5), "b": (nca.rules.momentum(20), -1.0)}), 21, None),
    # The size of an order that is given once is as old as the order.
    (HOLD.with_volatility(0.15, span=9.0), None, None),
    (HOLD.with_delay(2), None, None),
    (nca.blend({"a": (CROSS, 0.5), "b": (nca.rules.mean_reversion(5), 1.0)}), None, None),
]


def targets_of(bars, strategy):
    """`[N, A]` the targets in force at each bar; 0 before an asset's first."""
    return pd.DataFrame(strategy_targets(bars, strategy)).ffill().fillna(0.0).to_numpy()


def last_of_each(bars, count):
    """The bars from the last row on from which each asset has `count` of its own."""
    rows = [np.flatnonzero(there)[-count] for there in bars.present.T]
    return bars[min(rows) :]


def drawn(seed, missing):
    return random_bars(np.random.default_rng(seed), 600, 3, missing)


def refuse_other_target(strategy, memory, missing):
    bars = drawn(7, missing)
    whole = targets_of(bars, strategy)
    # Each length of bars is compiled; without holes all have one.
    for end in range(600, 599 if missing else 580, -1):
        part = last_of_each(bars[:end], max(memory, 1))
        # A decaying average keeps a rounding error; all else is the same number.
        error = 1e-12 if "volatility" in strategy.name else 0.0
        np.testing.assert_allclose(targets_of(part, strategy)[-1], whole[end - 1], rtol=error)
    return whole


def differs(rule, bars, count):
    """Whether a rule's target differs between the last `count` bars and all of them."""
    whole, ends = targets_of(bars, rule), range(500, len(bars), 53)
    return any(
        not np.allclose(targets_of(bars[end - count : end], rule)[-1], whole[end - 1])
        for end in ends
    )


@pytest.mark.parametrize(("name", "missing"), RUN)
def test_a_rules_target_is_that_of_its_last_bars(name, missing):
    refuse_other_target(base_named(name, True).strategy, MEMORIES[name], missing)


@pytest.mark.parametrize(("strategy", "memory", "missing"), WRAPPED)
def test_what_is_around_a_strategy_adds_to_its_memory(strategy, memory, missing):
    assert strategy.memory == memory
    if missing is not None:
        refuse_other_target(strategy, memory, missing)


@pytest.mark.parametrize(
    "strategy", [monday(), monday().with_delay(3), monday(2).with_volatility(0.15, span=9.0)]
)
def test_an_order_that_stands_counts_from_the_bar_that_gave_it(strategy):
    found = refuse_other_target(strategy, strategy.memory, 0.0)
    assert len(np.unique(found)) > 1


def test_every_rule_states_its_memory_and_no_more_than_it_needs():
    assert {name.partition("(")[0] for name in MEMORIES} == set(RULES)
    for name, memory in MEMORIES.items():
        for short in (False, True):
            assert base_named(name, short).strategy.memory == memory
        assert memory is None or history_of(name) == memory
    for name in ("half_and_half(lookback=20)", "time_series_momentum(lookback=70)"):
        assert differs(base_named(name, True).strategy, drawn(3, 0.0), history_of(name) - 1)


@pytest.mark.parametrize(
    "name",
    [name for name, memory in MEMORIES.items() if memory is None and name != "tuned_sma"],
)
def test_a_rule_that_states_none_has_none(name):
    """Older bars than the last 333 move its target, and a live session is refused it as a base."""
    rule, bars = base_named(name, True).strategy, nca.sample_bars("sp500")[:2000]
    if name.startswith(("mean_reversion", "breakout")):
        # A fall, or a rise, that is answered, and then what ends no position.
        move, after = (0.8, 0.9999) if name.startswith("mean") else (1.2, 1.0)
        bars = bars_of(100.0 * np.cumprod([*[1.0] * 60, move, *[after] * 1000])[:, None])
    # A base has no stop; without one the rule is followed by its targets alone.
    assert differs(nca.rules.breakout(stop=None) if name == "breakout" else rule, bars, 333)
    with pytest.raises(ConfigError, match=r"does not end its memory .*; train on a rule that does"):
        history_of(name)


@pytest.mark.parametrize("memory", [-1, 2.0, True, "all"])
def test_a_memory_is_a_number_of_bars(memory):
    with pytest.raises(ConfigError, match=r"Strategy: memory="):
        dataclasses.replace(CROSS, memory=memory)


def test_a_sweeps_parameter_may_be_a_memory():
    def rule(lookback=5):
        before = nca.rules.momentum(lookback)
        return dataclasses.replace(before, memory=lookback + 1).with_delay(1)

    bars = drawn(1, 0.0)
    assert rule().memory == 7
    table = nca.sweep(bars, rule, {"lookback": [3, 5]})
    assert len(table) == 2
