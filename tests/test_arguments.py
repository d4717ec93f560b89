"""A mistake in a call ends in one error of ours: the argument, and what is accepted."""

import dataclasses
import functools
import inspect

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import nca_trader as nca
from nca_trader.envs.gym.vector import GymVectorEnv
from nca_trader.errors import options_named
from nca_trader.paper.session.trade import paper_trade
from nca_trader.strategies.targets import LARGEST

ENV = nca.load_env("index_daily")
SPEC = nca.EnvSpec(symbols=("A",), features=("return_1",), targets=(0.0, 1.0), warmup=1)


@pytest.fixture(scope="module")
def bars():
    return nca.sample_bars("sp500")[:300].select("SP500")


@pytest.fixture(scope="module")
def env(bars):
    return nca.TradingEnv(bars, nca.EnvConfig(features=("return_1",)))


def refusal(call, *says):
    """The message of the one error of ours that `call` raises; it says all of `says`."""
    with pytest.raises(nca.NcaTraderError) as caught:
        call()
    said = str(caught.value)
    assert "\n" not in said and said.endswith("."), said
    for text in says:
        assert text in said, said
    return said


def test_no_public_function_takes_more_than_twelve_arguments():
    """What belongs together is one object, whose fields may be given by name as well."""
    counts = {}
    for name in nca.__all__:
        if callable(value := getattr(nca, name)) and not isinstance(value, type):
            kinds = [p.kind for p in inspect.signature(value).parameters.values()]
            counts[name] = len(kinds) - kinds.count(inspect.Parameter.VAR_KEYWORD)
    assert counts["walk_forward"] == 12  # of those below it has most
    assert {name: count for name, count in counts.items() if count > 12} == {}


def test_a_misspelt_field_names_the_nearest_one():
    refusal(lambda: nca.Costs(commision=1e-3), "Costs has no field commision", "'commission'?")
    refusal(lambda: nca.EnvConfig(comission=1e-3), "EnvConfig has no", "'costs.commission'?")
    refusal(lambda: nca.AgentConfig(num_epochs=3), "did you mean 'learner.num_epochs'?")
    replace = dataclasses.replace
    refusal(lambda: replace(nca.Costs(), slipage=1e-3), "no field slipage; did you mean 'slippage'")
    refusal(lambda: nca.Costs(1e-3), "Costs(0.001): give each value with its name")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: nca.EnvConfig(costs=0.001), "costs is the number 0.001; give a Costs"),
        (lambda: nca.AgentConfig(policy="nca"), "policy is the text 'nca'; give a PolicyConfig"),
        (
            lambda: nca.Costs(commission="0.1%"),
            "costs.commission = '0.1%' is not a number; give one",
        ),
        (lambda: nca.Costs(commission=0.5), "not percent: 0.5% is 0.005"),
        (lambda: nca.Costs(slippage=np.float32(0.25)), "costs.slippage = 0.25 is 25%"),
        (lambda: nca.Costs(commission=5), "costs.commission = 5.0 is not a fraction in [0, 1)"),
        (lambda: nca.Costs(commission=None), "costs.commission = None is not a number"),
        (lambda: nca.Costs(slippage=[1e-4]), "costs.slippage = [0.0001] is not a number"),
        (
            lambda: nca.EnvConfig(features="return_1"),
            "features='return_1' is the text 'return_1'; give a list",
        ),
        (lambda: nca.load_env("ou_mid", "fill=close"), "overrides is the text 'fill=close'"),
        (lambda: nca.Costs(interest_lend=3.0), "3% per year is 0.03"),
        (lambda: nca.rules.sma_cross(10.5, 30), "sma_cross: fast=10.5 is not a whole number"),
        (lambda: nca.rules.sma_cross(10, 30.0), "sma_cross: slow=30.0 is not a whole number"),
        (lambda: nca.rules.sma_cross(30, 10), "fast = 30 is not below slow = 10"),
        (lambda: nca.rules.momentum(0), "momentum: lookback=0 is below its least value"),
        (lambda: nca.load_agent(3), "agent is the number 3; give an AgentConfig, a preset's name"),
        (lambda: nca.load_env(nca.load_agent("nano")), "env is an AgentConfig; give an EnvConfig"),
    ],
)
def test_a_value_of_another_kind_says_what_is_accepted(call, says):
    refusal(call, says)


def test_whole_periods_of_numpy_are_whole(bars):
    name = nca.rules.sma_cross(np.int64(2), np.int32(5)).name
    assert name == "SMA cross 2/5"
    assert nca.Costs(commission=0.0999).commission == 0.0999


class Model:
    """What stable-baselines3's models look like from here."""

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        return np.zeros(1), state


def two_arguments(bars, window):
    return np.zeros(len(bars))


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (two_arguments, "targets is a function (two_arguments); a function of bars takes one"),
        (nca.rules.sma_cross, "targets is a function (sma_cross); a function of bars takes one"),
        (Model(), "; give nca_trader.envs.sb3.targets_of(model, env), the weights that it chooses"),
        ("runs/mine", "targets is the text 'runs/mine'; give weights"),
        (nca.make_policy("nano", SPEC), "targets is a Policy; give weights"),
        (None, "targets is a NoneType; give weights"),
        (0.5, "targets is the number 0.5; give weights"),
    ],
)
def test_targets_that_decide_nothing_are_refused(bars, targets, says):
    refusal(lambda: nca.backtest(bars, targets), says, "a Strategy", "or a Run")


def test_swapped_arguments_are_named(bars, env):
    weights, agent = np.zeros(len(bars)), nca.load_agent("nano")
    policy = nca.make_policy(agent, env.spec)
    refusal(lambda: nca.backtest(weights, bars), "bars and targets look swapped")
    refusal(lambda: nca.backtest(bars, bars), "targets is a Bars")
    refusal(lambda: nca.backtest(pd.DataFrame({"close": [1.0]}), weights), "bars is a DataFrame")
    refusal(lambda: nca.backtest(bars, weights, 0.001), "costs is the number 0.001", "commission=")
    refusal(lambda: nca.backtest(bars, weights, "close"), "costs is the text 'close'")
    refusal(lambda: nca.TradingEnv(ENV, bars), "bars and config look swapped")
    refusal(lambda: nca.make_policy(env.spec, agent), "spec and agent look swapped")
    refusal(lambda: nca.make_learner(policy, env, agent), "env and policy look swapped")
    refusal(lambda: nca.make_learner(env, agent, policy), "policy and config look swapped")
    refusal(lambda: nca.train("nano", env, "runs/x"), "env and agent look swapped")
    refusal(lambda: nca.train(env, "runs/x", "nano"), "runs/x: cannot be read")
    refusal(lambda: nca.leakcheck(bars, two_arguments), "bars and subject look swapped")
    refusal(lambda: nca.write_bars("x.csv", bars), "bars and path look swapped")
    refusal(lambda: nca.resample("1d", bars), "bars and every look swapped")
    refusal(lambda: nca.check_policy(env), "policy is a TradingEnv")
    refusal(lambda: nca.check_env(bars), "env is a Bars")


def test_an_argument_of_another_kind_is_named_by_every_entry_point(bars, env, tmp_path):
    weights, run = np.zeros(len(bars)), tmp_path / "run"
    make = functools.partial(gymnasium.make, "nca_trader/Trading-v0")
    refusal(lambda: make(bars="index_daily", config=bars), "config is a Bars; give an EnvConfig")
    refusal(lambda: make(bars=pd.DataFrame({"close": [1.0]})), "bars is a DataFrame; give Bars")
    refusal(lambda: make(bars=weights), "bars is a ndarray")
    refusal(lambda: make(bars=bars, window=2.5), "window is the number 2.5; give a whole")
    refusal(lambda: make(bars=env), "bars is a TradingEnv")
    refusal(lambda: make(env="index_daily"), "env is the text 'index_daily'; give a TradingEnv")
    refusal(lambda: make(bars=bars).reset(options="start"), "options is the text 'start'")
    refusal(lambda: GymVectorEnv(bars, 64), "num_envs is a Bars; num_envs and bars look swapped")
    refusal(lambda: GymVectorEnv(2, env=ENV), "env is an EnvConfig")
    refusal(lambda: nca.train(env, "nano", None), "run_dir is a NoneType; give a path")
    refusal(lambda: nca.train(env, "nano", run, steps="5"), "steps is the text '5'")
    refusal(lambda: nca.train(env, "nano", run, steps=1e5), "steps is the number 100000.0")
    refusal(lambda: nca.train(env, "nano", run, seed="a"), "seed is the text 'a'")
    assert not run.exists()
    for path in (3, None, bars):
        refusal(lambda path=path: nca.Run(path), "path is", "give a path")
        refusal(lambda path=path: paper_trade(path, "replay:x", "j"), "run is")
        refusal(lambda path=path: paper_trade("run", path, "j"), "feed is", "give replay:FILE")
        refusal(lambda path=path: nca.read_bars(path), "source is", "a path or a frame")
        refusal(lambda path=path: nca.write_bars(bars, path), "path is", "give a path")
        refusal(lambda path=path: nca.backtest(bars, weights).save(path), "path is")
    refusal(lambda: paper_trade("run", "replay:x", "j", capital="1e5"), "capital is the text")
    for name, value in (("repair", 3), ("columns", 3), ("every", 5), ("timezone", 3)):
        refusal(lambda name=name, value=value: nca.read_bars("x", **{name: value}), f"{name} is")
    refusal(lambda: nca.resample(bars, 5), "every is the number 5")
    refusal(lambda: bars.select(["SP500"]), "no symbol ['SP500']; there are SP500")
    refusal(lambda: nca.leakcheck(two_arguments, bars, cases="a"), "cases is the text 'a'")
    refusal(lambda: nca.make_mesh("x"), "data is the text 'x'")
    refusal(lambda: nca.backtest(bars, weights, commission=1e-3), "costs=nca.Costs(commission=...)")
    unknown = nca.EnvConfig(features=("return1",))
    with pytest.raises(
        nca.ConfigError, match=r"^EnvConfig: features: unknown feature 'return1'; did"
    ):
        nca.TradingEnv(bars, unknown)


class Pathlike:
    def __init__(self, path):
        self.path = str(path)

    def __fspath__(self):
        return self.path


def test_a_path_may_be_any_path_like(bars, tmp_path):
    env, agent, file = (tmp_path / name for name in ("an env.toml", "an agent.toml", "b.csv"))
    env.write_text('features = ["return_1"]\n')
    agent.write_text('[policy]\nkind = "mlp"\n')
    env, agent, file = map(Pathlike, (env, agent, file))
    nca.write_bars(bars, file)
    assert nca.read_bars(file).digest() == bars.digest()
    made = nca.TradingEnv(bars, env)
    assert made.config == nca.load_env(env) and made.config.features == ("return_1",)
    assert nca.make_policy(agent, made.spec) is nca.make_policy(agent.path, made.spec)
    assert gymnasium.make("nca_trader/Trading-v0", bars=file, config=env).unwrapped.trading
    assert nca.backtest(bars, np.zeros(300)).save(Pathlike(tmp_path / "r.csv")).exists()


def test_a_preset_is_taken_wherever_a_config_is(bars, tmp_path):
    by_name = nca.TradingEnv(bars, "index_daily")
    assert by_name.config == ENV == nca.load_env(ENV)
    file = tmp_path / "mine.toml"
    file.write_text('features = ["return_1"]\n')
    assert nca.TradingEnv(bars, file).config.features == ("return_1",)
    nano = nca.load_agent("nano")
    assert nca.make_policy("nano", by_name.spec) is nca.make_policy(nano, by_name.spec)
    assert nca.load_agent(nano, ["num_seeds=2"]) == dataclasses.replace(nano, num_seeds=2)
    for function, name in ((nca.make_learner, "config"), (nca.train, "agent")):
        assert "str" in inspect.signature(function).parameters[name].annotation


def branching(state, bar):
    if bar.close[0] > 2.0:  # a branch on a traced value
        return state, jnp.ones_like(bar.close)
    return state, jnp.zeros_like(bar.close)


def failing(state, bar):
    return state, bar.close * {"up": 1.0}["down"]


def counting(state, bar):
    def host(count):
        if count == 7:
            raise KeyError("the eighth bar")
        return np.asarray(count)

    seen = jax.pure_callback(host, jax.ShapeDtypeStruct((), state.dtype), state)
    return seen + 1, jnp.zeros_like(bar.close)


def widening(state, bar):
    return jnp.concatenate([state, state]), jnp.zeros_like(bar.close)


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


@pytest.mark.parametrize(
    ("update", "state", "text", "says"),
    [
        (branching, (), "if bar.close", ["`if bar.close[0] > 2.0:", "write jnp.where(condition"]),
        (failing, (), "bar.close *", ["raises KeyError at bar 0 (", "(`return state, bar.close"]),
        (counting, jnp.zeros((), int), "pure_callback", [" at bar 7 (", "the eighth bar"]),
        (widening, jnp.zeros(1), None, ["a state of the types and shapes that it received"]),
    ],
)
def test_a_strategy_that_fails_names_its_line_and_the_bar(bars, update, state, text, says):
    strategy = nca.Strategy(lambda num_assets: state, update, "mine")
    said = refusal(lambda: nca.backtest(bars, strategy), "strategy 'mine': ", *says)
    if text is not None:
        assert f"test_arguments.py line {line_of(update, text)}" in said
    if " at bar " in said:
        row = int(said.partition(" at bar ")[2].partition(" ")[0])
        assert f"({bars.index[row]})" in said


def test_a_date_that_may_mean_two_days_is_refused_everywhere(bars):
    for date in ("05/06/2006", "5.6.2006", "05-06-2006", "06/05/06"):
        refusal(lambda date=date: bars.between(date), f'start="{date}" may mean two days')
    for date in ("May 6, 2006", "20060506", 2006, None, ["2006"], "2006-13-01", "2006-02-30"):
        refusal(lambda date=date: bars.row(date), "is not a date; give one such as 2013-01-02")
    refusal(lambda: nca.backtest(bars, np.zeros(300), stop="05/06/1999"), 'stop="05/06/1999" may')
    noon = pd.Timestamp("1999-06-05 12:00", tz="UTC")
    for same in ("1999-06-05T12:00", "1999-06-05 12:00:00Z", "1999-06-05T14:00+02:00", noon):
        assert bars.row(same) == np.searchsorted(bars.time, np.datetime64("1999-06-05T12:00"))
    assert bars.row("1999-06") == bars.row("1999-06-01") == bars.row(np.datetime64("1999-06"))


def test_weights_above_the_limit_are_cut_and_counted(bars, caplog):
    asked = np.full(300, 0.5)
    asked[[10, 20, 30]] = [3.0, 1.5, -1.2]
    result = nca.backtest(bars, asked)
    assert "targets: CUT: on 2 bars the order was for more" in caplog.text
    caplog.clear()
    assert result.cut == (2, 3.0, 0)  # cash bounds longs alone: a short brings cash in
    np.testing.assert_allclose(result.weights.to_numpy()[11, 0], 1.0, atol=0.1)
    assert nca.backtest(bars, asked, max_gross=1.0).cut == (3, 3.0, 0)
    assert nca.backtest(bars, asked, borrow=True).cut == (0, 0.0, 0)
    assert nca.backtest(bars, np.minimum(asked, 1.0)).cut == (0, 0.0, 0)
    assert nca.backtest(bars, nca.rules.buy_and_hold()).cut == (0, 0.0, 0)
    assert caplog.text.count("CUT") == 1  # of max_gross=1.0
    with options_named():  # a command prints it beside the figures
        assert nca.backtest(bars, asked).cut == (2, 3.0, 0)
    assert caplog.text.count("CUT") == 1


@pytest.mark.parametrize("weight", [50.0, -50.0, np.nextafter(LARGEST, 11.0)])
def test_weights_that_are_percent_are_refused(bars, weight):
    asked = np.full(300, 0.5)
    asked[17] = weight
    refusal(lambda: nca.backtest(bars, asked), f"targets row 17 is {weight:g} of SP500", "percent")
    assert nca.backtest(bars, asked, max_gross=50.0, borrow=True).cut == (0, 0.0, 0)
    asked[17] = np.copysign(LARGEST, weight)
    nca.backtest(bars, asked)


def test_targets_without_an_order_are_refused(bars):
    refusal(lambda: nca.backtest(bars, np.full(300, np.nan)), "no order: all are NaN")
    one = np.full(300, np.nan)
    one[5] = 0.0
    assert nca.backtest(bars, one).num_fills == 0


def test_a_result_that_was_never_filled_has_no_ratios(bars, caplog):
    """Zero volume and a cap on participation: interest alone once had a Sharpe ratio of 26."""
    dry = dataclasses.replace(bars, volume=np.zeros((300, 1)))
    costs = nca.Costs(interest_lend=0.04)
    limits = {"capital": 1e5, "max_participation": 0.1}
    result = nca.backtest(dry, np.full(300, 0.5), costs, **limits)
    assert result.num_fills == 0 and result.metrics["turnover"] == 0.0
    assert caplog.text.count("NO FILLS") == 1
    assert nca.backtest(bars, nca.rules.always_flat()).cautions and "flat" not in caplog.text
    assert result.metrics["total_return"] > 0.01  # the interest is real
    for name in ("sharpe", "sortino", "calmar", "hit_rate", "skewness", "kurtosis"):
        assert np.isnan(result.metrics[name]), name
    filled = nca.backtest(bars, np.full(300, 0.5), costs)
    assert filled.num_fills > 200 and filled.metrics["sharpe"] == filled.metrics["sharpe"]


def test_each_number_given_is_an_order_and_a_strategy_trades_on_change(bars):
    """Held weights against a hand ledger of units and cash, without costs, at the close."""
    asked = np.full(300, np.nan)
    asked[[5, 50, 120]] = 0.5  # the same weight three times: each is an order
    close = bars.close[:, 0]
    held, cash, units = np.zeros(300), 1.0, 0.0
    for t in range(300):
        equity = cash + units * close[t]
        if asked[t] == asked[t]:
            units, cash = asked[t] * equity / close[t], equity * (1.0 - asked[t])
        held[t] = units * close[t] / equity
    result = nca.backtest(bars, asked, fill="close")
    assert result.order == "rebalance" and result.num_fills == 3
    np.testing.assert_allclose(result.weights.to_numpy()[:, 0], held, atol=1e-12)
    frame = pd.DataFrame(asked, bars.index, ["SP500"])
    assert nca.backtest(bars, frame, fill="close").equity.equals(result.equity)
    once = nca.backtest(bars, asked, fill="close", order="on_change")
    assert once.num_fills == 1
    steady = nca.Strategy(lambda a: (), lambda s, bar: (s, 0.5 + 0.0 * bar.close), "half")
    assert nca.backtest(bars, steady).order == "on_change"
    assert nca.backtest(bars, steady).num_fills == 1
    assert nca.backtest(bars, steady, order="rebalance").num_fills > 200
