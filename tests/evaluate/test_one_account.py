"""What an account is given has its effect wherever it is given: each field for each of its users.

A field that is added needs a value here, and a user that refuses one is listed by name.
"""

import dataclasses

import gymnasium
import ledger
import numpy as np
import pytest
from drawn import random_bars

import nca_trader as nca
from nca_trader.config.account import BEYOND, DEFAULTS, EXITS, complete_account
from nca_trader.envs.account.risk import sizes
from nca_trader.errors import ConfigError, HaltError
from nca_trader.evaluate import tune as tuning
from nca_trader.evaluate.result import PLAUSIBLE
from nca_trader.evaluate.walkforward.walk import walk_forward
from nca_trader.optimum.prove import known_market
from nca_trader.strategies.strategy import weights_by_covariance, weights_until_sized

NUM_BARS, NUM_ASSETS, FIRST = 120, 2, 60
MONEY = {"capital": 1e4}
LEVERED = {"borrow": True, "max_gross": 4.0}
SIZED = {"sizing": "volatility", "volatility_span": 5}
JOINT = SIZED | {"sizing": "covariance", "shrinkage": 0.2, "correlation_span": 20}
# A value of each field that is not the default, and what it needs to be one.
VALUES = {
    "costs": {"costs": nca.Costs(commission=2e-3, slippage=1e-3, borrow_fee=0.1)},
    "fill": {"fill": "close"},
    "order": {"order": "rebalance"},
    "max_gross": {"max_gross": 0.7},
    "max_net": {"max_net": 0.3},
    "borrow": {"borrow": True},
    "floor": {"floor": 0.9},
    "maintenance_margin": LEVERED | {"maintenance_margin": 0.6},
    "capital": {"capital": 1e3, "lot": 1.0},
    "lot": MONEY | {"lot": 7.0},
    "tick": MONEY | {"tick": 2.0},
    "min_notional": MONEY | {"min_notional": 4e3},
    "max_participation": MONEY | {"max_participation": 0.01},
    "delist_after": {"delist_after": 2},
    "delist_haircut": {"delist_after": 2, "delist_haircut": 0.5},
    "sizing": SIZED,
    "volatility_target": SIZED | {"volatility_target": 0.6},
    "volatility_span": SIZED | {"volatility_span": 9},
    "volatility_floor": SIZED | {"volatility_floor": 2.0},
    "size_cap": SIZED | {"size_cap": 0.1},
    "correlation_span": JOINT | {"correlation_span": 5},
    "shrinkage": JOINT | {"shrinkage": 0.9},
    "dead_band": {"dead_band": 0.45},
    "risk": {"risk": nca.Limits(max_position=0.2, max_order=0.15)},
    "delay": {"delay": 3},
    "stop_loss": {"stop_loss": 0.06},
    "take_profit": {"take_profit": 0.08},
    "trailing_stop": {"trailing_stop": 0.07},
}
NEEDS = {
    "maintenance_margin": LEVERED,
    "capital": MONEY | {"lot": 1.0},
    "delist_haircut": {"delist_after": 2},
    **{name: SIZED for name in ("volatility_target", "volatility_span")},
    **{name: SIZED for name in ("volatility_floor", "size_cap")},
    **{name: JOINT for name in ("correlation_span", "shrinkage")},
}
# Who refuses which field, in one line that names it.
REFUSED = {
    "paper": {"delay": "a venue is as late as it is"} | dict.fromkeys(EXITS, "no broker"),
    "gymnasium": dict.fromkeys(BEYOND, "no environment has it"),
    "blend": dict.fromkeys(("delay", *EXITS), "give it to nca.backtest"),
}
RNG = np.random.default_rng(11)
TABLE = RNG.choice([-0.8, 0.0, 0.5, 0.9, 1.3], (NUM_BARS, NUM_ASSETS))
TABLE = np.where(RNG.random(TABLE.shape) < 0.6, np.nan, TABLE)
TABLE[0] = 0.5
TABLE[78], TABLE[79:90, 1] = 0.9, np.nan  # held while its bars are missing


def made_bars():
    """Bars of large moves and small volumes, in which an asset misses bars."""
    bars = random_bars(RNG, NUM_BARS, NUM_ASSETS)
    present = bars.present.copy()
    present[80:84, 1] = False
    fields = {name: getattr(bars, name).copy() for name in ("open", "high", "low", "close")}
    for values in fields.values():
        values[80:84, 1] = fields["close"][79, 1]
    # Powers keep the order of a bar's prices, and make its moves larger.
    fields = {name: 50.0 * (x / 50.0) ** 4 for name, x in fields.items()}
    volume = np.where(present, 300.0, 0.0)
    return dataclasses.replace(bars, present=present, volume=volume, **fields)


BARS = made_bars()
SECONDS = np.asarray(BARS.as_bar().time)[:, 0]


def rule(scale=1.0):
    """A rule that orders the rows of a table, found by the time of the bar."""
    import jax.numpy as jnp

    def act(state, bar):
        row = jnp.searchsorted(jnp.asarray(SECONDS), bar.time[0])
        return state, scale * jnp.asarray(TABLE)[row]

    return nca.Strategy(lambda num_assets: jnp.zeros(()), act, "table")


RULE = rule()


def looks():
    """The same as a strategy that is asked for its account, and doubles no decision by it."""
    import jax.numpy as jnp

    def act(state, bar, portfolio):
        row = jnp.searchsorted(jnp.asarray(SECONDS), bar.time[0])
        held = jnp.where(portfolio.bars_held > 3, 0.0, jnp.asarray(TABLE)[row])
        return state, held

    return nca.Strategy(lambda num_assets: jnp.zeros(()), act, "looks")


LOOKS = looks()


def of(field):
    return nca.AccountConfig(**VALUES[field])


def backtest(subject=RULE, **given):
    return nca.backtest(BARS, subject, look=False, **given)


def of_each(user):
    """Run a test for each field; those that the user refuses are refused by name."""
    refused = REFUSED.get(user, {})

    def decorate(test):
        def run(field, *args, **more):
            if field not in refused:
                return test(field, *args, **more)
            with pytest.raises(ConfigError, match=refused[field]) as caught:
                test(field, *args, **more)
            assert field in str(caught.value)

        run.__name__ = test.__name__
        run.pytestmark = getattr(test, "pytestmark", [])
        run.__signature__ = __import__("inspect").signature(test)
        return pytest.mark.parametrize("field", VALUES)(run)

    return decorate


def test_every_field_has_a_value_here_and_a_default_in_the_table():
    fields = [field.name for field in dataclasses.fields(nca.AccountConfig)]
    assert list(VALUES) == fields
    assert list(DEFAULTS) == fields


@of_each("ledger")
@pytest.mark.drawn(6)
def test_a_backtest_is_what_the_judge_says(field):
    """Sizes and delays are applied to the targets by hand; a limit of risk is none of the judge's.

    The same by keywords, and another one than without the value.
    """
    account = of(field)
    found = backtest(account=account)
    assert found.equity.equals(backtest(**VALUES[field]).equity)
    without = backtest(**NEEDS.get(field, {}))
    assert not np.allclose(found.equity, without.equity, rtol=1e-6)
    if field == "risk":
        return
    rules = complete_account(account, RULE)
    targets = TABLE
    if rules.scale is not None:
        size = sizes(BARS, rules.scale)
        targets = weights_until_sized(targets, BARS.present, rules.scale) * size
    if rules.covariance is not None:
        targets = weights_by_covariance(BARS, targets, rules.covariance)
    targets = np.vstack([np.full((rules.delay, NUM_ASSETS), np.nan), targets])[:NUM_BARS]
    known = {name: x for name, x in rules.stored.items() if name in ledger.RULES}
    costs = {name: getattr(rules.costs, name) for name in ledger.COSTS}
    known = {name: x for name, x in known.items() if name not in EXITS}
    levels = {name: np.full(TABLE.shape, VALUES[field][name]) for name in EXITS if name == field}
    judged = ledger.run(BARS, targets, costs, known, levels)
    np.testing.assert_allclose(found.equity, judged.equity, rtol=1e-9)


@of_each("reruns")
@pytest.mark.drawn(1)
def test_every_rerun_passes_it_on_whole(field):
    """The stress, the uncharged sentence, a page's baselines and buy and hold."""
    result, account = backtest(account=of(field)), of(field)
    stress = result.stress(factors=(1.0,), delays=(account.delay or 0,), capitals=())
    own = [result.account_metrics[name] for name in stress.costs.columns]
    np.testing.assert_array_equal(stress.costs.to_numpy()[0], own)
    np.testing.assert_array_equal(stress.delays.to_numpy()[0], own)
    plausible = backtest(account=dataclasses.replace(account, costs=PLAUSIBLE)).account_metrics
    if field != "costs":
        assert f"total return {plausible['total_return']:.1%}, " in result.uncharged
    hold, account = nca.rules.buy_and_hold(), account.without_levels
    same = backtest(hold, account=dataclasses.replace(account, order=result.order))
    assert result.again(hold).equity.equals(same.equity)
    held = backtest(hold, account=account) if field != "order" else same
    np.testing.assert_allclose(result.hold.equity, held.equity, rtol=1e-12)
    assert nca.backtest(BARS, RULE, account=result.rules).equity.equals(result.equity)


@of_each("sweep")
@pytest.mark.drawn(1)
def test_a_sweep_is_the_backtest(field):
    given = {"precision": "f64", "trials": None}
    table = nca.sweep(BARS, rule, {"scale": [1.0, 0.5]}, account=of(field), **given)
    equity = backtest(account=of(field)).equity.iloc[-1]
    assert table["equity"].iloc[0] == pytest.approx(equity, rel=1e-9)
    again = nca.sweep(BARS, rule, {"scale": [1.0, 0.5]}, **given, **VALUES[field])
    assert table.equals(again)


@pytest.mark.heavy
@of_each("walk")
@pytest.mark.drawn(1)
def test_a_walk_forward_is_the_backtest(field):
    """One that refits nothing, so that its folds are one strategy."""
    walk = walk_forward(BARS, RULE, train=FIRST, test=30, account=of(field))
    start = str(BARS.index[FIRST])
    if field == "order" or "sizing" in VALUES[field]:  # a fold repeats the order in force
        table = TABLE.copy()
        for row in (60, 90):
            known = np.where(np.isnan(table[: row + 1]), -np.inf, np.arange(row + 1)[:, None])
            table[row] = np.take_along_axis(table, known.argmax(0)[None], 0)[0]
        # The default order of a table is "rebalance", that of a strategy "on_change".
        want = backtest(table, start=start, **{"order": "on_change"} | VALUES[field])
    else:
        want = backtest(start=start, **VALUES[field])
    np.testing.assert_allclose(walk.result.equity, want.equity, rtol=1e-12)
    hold = backtest(nca.rules.buy_and_hold(), start=start, account=of(field).without_levels)
    assert walk.baselines["buy and hold"].equity.equals(hold.equity)


@of_each("paper")
@pytest.mark.drawn(1)
def test_a_replay_on_paper_is_the_backtest(field, tmp_path):
    nca.write_bars(BARS, tmp_path / "bars.parquet")
    given = (RULE, f"replay:{tmp_path}/bars.parquet", tmp_path / "paper.db")
    if field == "floor":  # a session of a bankrupt account halts
        with pytest.raises(HaltError, match=r"ruined \(equity 0.9,"):
            nca.paper_trade(*given, account=of(field))
        return
    done = nca.paper_trade(*given, account=of(field))
    want = backtest(account=of(field))
    assert done["equity"] == pytest.approx(want.equity.iloc[-1], rel=1e-9)


@of_each("gymnasium")
@pytest.mark.drawn(1)
def test_an_environment_is_the_backtest(field):
    config = nca.EnvConfig(
        features=("return_1",), actions="weights", size=0.6, max_gross=None, random_start=False,
        ruin_floor=1e-9,
    )  # fmt: skip
    env = gymnasium.make(
        "nca_trader/Trading-v0", bars=BARS, config=config, account=of(field)
    ).unwrapped
    rules = env.trading.rules
    assert rules == complete_account(of(field), config)
    start = env.trading.spec.warmup
    _, info = env.reset(options={"start": start})
    found, targets, ended = [], np.full(TABLE.shape, np.nan), False
    while not ended:
        row = info["row"]
        # An environment orders at every bar, where a strategy may order nothing.
        targets[row] = np.clip(np.nan_to_num(TABLE[row], nan=0.5), -0.6, 0.6).astype(np.float32)
        _, _, over, cut, info = env.step(targets[row].astype(np.float32))
        found.append(info["equity"])
        ended = over or cut
    if "lot" in VALUES[field]:  # float32 may decide otherwise whether one more lot is bought
        return
    want = backtest(targets, account=rules, start=str(BARS.index[start])).equity.to_numpy()
    np.testing.assert_allclose(found, want[1 : len(found) + 1], rtol=2e-5)


@pytest.mark.heavy
@of_each("blend")
@pytest.mark.drawn(1)
def test_a_part_of_a_blend_decides_on_such_an_account(field):
    account = dataclasses.replace(of(field), risk=None)
    mix = nca.blend({"whole": (LOOKS, 1.0)}, account=account)
    # The sizes are in what the part orders.
    outer = account.unsized if account.sizing else account
    want = backtest(LOOKS, account=account)
    np.testing.assert_allclose(backtest(mix, account=outer).equity, want.equity, rtol=1e-9)


@pytest.mark.parametrize("field", VALUES)
@pytest.mark.few(6)
def test_a_search_trains_and_scores_with_it(field, tmp_path, monkeypatch):
    seen = {}

    def train(env, agent, *args, **more):
        seen["trained"] = env.rules
        return "run"

    class Scored:
        metrics = {"sharpe": 1.0}  # noqa: RUF012

    def score(bars, run, account, **more):
        seen["scored"] = account
        return Scored()

    monkeypatch.setattr(tuning, "train", train)
    monkeypatch.setattr(tuning, "backtest", score)
    space = {"optimizer.learning_rate": nca.config.spans.Range(low=1e-4, high=1e-3)}
    env = nca.EnvConfig(features=("return_1",), actions="weights", max_gross=None)
    nca.tune(BARS, "nano", space, tmp_path / "found", env=env, trials=1, workers=1, **VALUES[field])
    account = of(field)
    assert seen["scored"] == account
    own = dataclasses.replace(account, **dict.fromkeys(BEYOND))
    assert seen["trained"] == complete_account(own, env)


def test_a_market_of_known_optimum_refuses_what_it_does_not_pay():
    _, config = known_market("sine")
    own = config.account
    assert known_market("sine", dataclasses.replace(own, delay=None))[1] == config
    for values in VALUES.values():
        if all(getattr(own, name) == value for name, value in values.items()):
            continue
        with pytest.raises(ConfigError) as caught:
            known_market("sine", nca.AccountConfig(**values))
        assert any(name.replace("floor", "ruin_floor") in str(caught.value) for name in values)


def test_a_record_is_not_given_twice_and_nothing_is_given_without_effect():
    with pytest.raises(ConfigError, match="lot as well"):
        backtest(account=nca.AccountConfig(fill="close"), capital=1e5, lot=1.0)
    for user in (backtest, lambda **x: nca.sweep(BARS, rule, {"scale": [1.0]}, trials=None, **x)):
        with pytest.raises(ConfigError, match="has no effect without sizing='volatility'"):
            user(volatility_target=0.5)
        with pytest.raises(ConfigError, match=r"unknown .*'lots'; did you mean 'lot'"):
            user(lots=1.0)
        with pytest.raises(ConfigError, match="one of the costs"):
            user(commission=1e-3)


def test_another_cost_compiles_nothing_and_another_rule_does():
    import jax

    from nca_trader.evaluate.simulate import scan_targets

    weights = np.nan_to_num(TABLE)
    backtest(weights, costs=nca.Costs(commission=1e-3))
    before = scan_targets._cache_size()
    for costs in (nca.Costs(commission=2e-3), nca.Costs(slippage=1e-4, fixed_fee=0.0)):
        backtest(weights, costs=costs)
        backtest(weights, account=nca.AccountConfig(costs=costs), delay=None)
    backtest(weights, costs=nca.Costs(commission=2e-3), delay=2)
    assert scan_targets._cache_size() == before
    backtest(weights, costs=nca.Costs(commission=1e-3), dead_band=0.01)
    assert scan_targets._cache_size() == before + 1
    leaves = jax.tree.leaves(complete_account(nca.AccountConfig()))
    assert len(leaves) == 10  # the costs alone


def test_a_limit_can_be_taken_off_an_environment(tmp_path):
    """None, as a keyword, and infinity in the record."""
    given = [nca.AccountConfig(max_gross=np.inf, maintenance_margin=0.0, delist_after=np.inf)]
    from nca_trader.config.account import gather_account

    named = {"max_gross": None, "maintenance_margin": None, "delist_after": None}
    given.append(gather_account(None, named))
    env = nca.EnvConfig(maintenance_margin=0.3, delist_after=5)
    for one in given:
        rules = complete_account(one, env)
        assert (rules.max_gross, rules.maintenance_margin, rules.delist_after) == (
            np.inf,
            0.0,
            np.inf,
        )
        assert complete_account(rules, env) == rules
        assert env.with_account(one).max_gross is None
    assert complete_account(nca.AccountConfig(), env).max_gross == 1.0
