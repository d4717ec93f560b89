"""Drawn accounts: the backtest, the sweep, the environments and paper trading equal the judge.

The judge is `ledger.run`. A setting is a set of costs and rules, which is one compiled program of
each use; its accounts differ in bars, targets and levels. Four settings run by default, 48
accounts; `slow` has 22 more. `JUDGE_SEED` draws others.
"""

import dataclasses
import functools
import os
from contextlib import nullcontext

import gymnasium
import jax
import jax.numpy as jnp
import ledger
import numpy as np
import pytest
from made_up import rules_of

import nca_trader as nca
from nca_trader.envs import trading
from nca_trader.envs.account.state import equity
from nca_trader.errors import HaltError
from nca_trader.evaluate.sweep.sweep import run_combinations
from nca_trader.paper.feeds.feed import ReplayFeed
from nca_trader.paper.journal.journal import Journal, read_events
from nca_trader.paper.session.agents import strategy_agent
from nca_trader.paper.session.trade import open_session
from nca_trader.paper.venues.exchange import Exchange

SEED = int(os.environ.get("JUDGE_SEED", "0"))
NUM_BARS, NUM_ASSETS, MARKETS, TABLES = 60, 3, 4, 3  # each market is traded by some tables
SHAPE = (NUM_BARS, NUM_ASSETS)
DAY = np.timedelta64(86_400, "s")
APART = 400  # days between the bars of one account and those of the next, whose times name it
# Settings by default, and how many with the slow ones: without a margin, with margin and levels at
# an open, with all that needs money as well, and at a close.
QUICK, MANY = (0, 1, 4, 10), 26


@dataclasses.dataclass(frozen=True)
class Setting:
    """One set of costs and rules, and its accounts: bars, targets and levels of each."""

    number: int
    costs: dict
    rules: dict
    accounts: list

    @property
    def has_levels(self):
        return bool(self.accounts[0][2])

    @property
    def limits(self):
        return {name: x for name, x in self.rules.items() if name not in ("fill", "order")}

    @property
    def in_float32(self):
        """Whether it takes no decision on an amount, which float32 may take otherwise."""
        return not self.has_levels and not {"lot", "min_notional", "dead_band"} & self.rules.keys()


def drawn_bars(rng, extras):
    """Bars with fat tails, gaps, missing bars, an asset that comes late and one that goes."""
    gap, body, wick = rng.standard_t(2.5, (3, *SHAPE)) * rng.uniform(0.003, 0.03)
    gap, body = np.clip(gap, -0.6, 0.6), np.clip(body, -0.6, 0.6)
    present = rng.random(SHAPE) > rng.choice([0.0, 0.1, 0.3])
    if rng.random() < 0.5:
        present[rng.integers(20, 50) :, 1] = False
    late = rng.integers(2, 30) if rng.random() < 0.3 else 0
    present[0], present[:late, 2] = True, False
    present[~present.any(axis=1), 0] = True
    prices = {name: np.full(SHAPE, np.nan) for name in ("open", "high", "low", "close")}
    last = rng.uniform(5.0, 200.0, NUM_ASSETS)
    for t in range(NUM_BARS):
        here = present[t]
        opened = last * np.exp(gap[t]) if t else last
        closed = opened * np.exp(body[t])
        reach = np.exp(np.abs(np.clip(wick[t], -0.5, 0.5)))
        rows = {
            "open": opened, "close": closed, "high": np.maximum(opened, closed) * reach,
            "low": np.minimum(opened, closed) / reach,
        }  # fmt: skip
        seen = np.isfinite(prices["close"][t - 1]) if t else np.zeros(NUM_ASSETS, bool)
        for name, row in rows.items():
            carried = np.where(seen, last, np.nan)
            prices[name][t] = np.where(here, row, carried)
        last = np.where(here, closed, last)
    days = np.cumsum(rng.choice([1, 1, 1, 3], NUM_BARS))
    volume = rng.lognormal(8.0, 1.5, SHAPE) * (rng.random(SHAPE) > 0.05)
    values = {
        "half_spread": rng.uniform(0.0, 2e-3, SHAPE),
        "dividend": np.where(rng.random(SHAPE) < 0.05, rng.uniform(0.0, 3.0, SHAPE), 0.0),
        "funding": rng.normal(0.0, 5e-4, SHAPE),
    }
    return nca.Bars(
        time=np.datetime64("2000-01-03", "s") + days * DAY,
        symbols=tuple("ABC"),
        volume=np.where(present, volume, 0.0),
        present=present,
        **prices,
        **{name: np.where(present, values[name], 0.0) for name in extras},
    )


def drawn_targets(rng, gaps):
    """Targets that last for some bars; with gaps some are no order."""
    size = rng.choice([0.3, 0.6, 1.2, 3.0])
    steps = rng.random() < 0.5
    drawn = size * (rng.integers(-1, 2, SHAPE) if steps else rng.uniform(-1.0, 1.0, SHAPE))
    if rng.random() < 0.3:
        drawn = np.abs(drawn)
    keep = rng.random(SHAPE) < rng.choice([0.0, 0.5, 0.9])
    for t in range(1, NUM_BARS):
        drawn[t] = np.where(keep[t], drawn[t - 1], drawn[t])
    # Numbers that float32 has, as an environment's actions are.
    drawn = drawn.astype(np.float32).astype(float)
    return np.where(rng.random(SHAPE) < rng.choice([0.0, 0.3]), np.nan, drawn) if gaps else drawn


def drawn_levels(rng, bars):
    near, none = rng.uniform(0.005, rng.choice([0.1, 0.5])), rng.choice([0.3, 0.9])
    drawn = {}
    for name in ledger.LEVELS:
        level = rng.uniform(0.2, 2.0, SHAPE) * near
        if name in ("stop_price", "limit_price"):  # on either side, as positions are
            level = bars.close * (1.0 + level * rng.choice([-1.0, 1.0], SHAPE))
        drawn[name] = np.where(rng.random(SHAPE) < none, np.nan, level)
    return drawn


def drawn_setting(number):
    rng = np.random.default_rng([SEED, number])

    def some(chance, **values):
        return {name: x for name, x in values.items() if rng.random() < chance}

    # By turns, so that a few settings have each of them on and off, alone and together.
    money, levels, fill = number % 2 == 0, number % 3 == 1, ("next_open", "close")[number // 2 % 2]
    amounts = money and number % 4 == 0
    costs = some(
        0.6, commission=rng.uniform(0, 3e-3), slippage=rng.uniform(0, 3e-3),
        half_spread=rng.uniform(0, 2e-3), borrow_fee=rng.uniform(0, 0.2),
        interest_lend=rng.uniform(-0.02, 0.1), interest_borrow=rng.uniform(0, 0.2),
        funding=rng.uniform(-0.1, 0.2), liquidation_fee=rng.uniform(0, 0.02),
    )  # fmt: skip
    rules = some(
        0.5, max_gross=rng.uniform(0.5, 2.5), max_net=rng.uniform(0.3, 1.5), borrow=True,
        delist_after=int(rng.integers(2, 8)),
    )  # fmt: skip
    if number % 8 in (1, 2, 4, 5):  # what may be ordered is more than the margin carries
        margin = {"maintenance_margin": rng.uniform(0.2, 0.6), "borrow": True}
        rules.pop("max_net", None)
        rules |= margin | {"max_gross": rng.choice([3.0, 8.0])}
    rules |= some(0.3, dead_band=rng.uniform(0.0, 0.1))
    rules |= {"fill": fill, "order": ("on_change", "rebalance")[number // 4 % 2]}
    rules["floor"] = rng.choice([1e-3, 0.3])
    if "delist_after" in rules:
        rules["delist_haircut"] = rng.uniform(0.0, 0.6)
    if money:
        costs |= some(0.6, impact=rng.uniform(0, 0.1), fixed_fee=rng.uniform(0, 20.0))
        rules |= some(0.6, max_participation=rng.uniform(0.02, 0.3))
        rules["capital"] = 1e5
    if amounts:
        rules |= some(
            0.7, lot=rng.choice([0.1, 1.0, 7.0]), tick=rng.choice([0.01, 0.25]),
            min_notional=rng.uniform(0, 2e3),
        )  # fmt: skip
    # Plain numbers, as a file or a user gives them: one of numpy would widen float32.
    rules = {name: x.item() if isinstance(x, np.generic) else x for name, x in rules.items()}
    extras = [name for name in ("half_spread", "dividend", "funding") if rng.random() < 0.5]
    if "half_spread" in extras and number % 3:
        costs["quote_scale"] = 1.0 + number % 3
    accounts = []
    for _ in range(MARKETS):
        bars = drawn_bars(rng, extras)
        for _ in range(TABLES):
            # The time names the account: its strategy is then one program.
            own = dataclasses.replace(bars, time=bars.time + len(accounts) * APART * DAY)
            targets = drawn_targets(rng, gaps=levels or amounts)
            accounts.append((own, targets, drawn_levels(rng, bars) if levels else {}))
    return Setting(number, costs, rules, accounts)


@functools.lru_cache(maxsize=len(QUICK))  # of all tests
def judged(number):
    """A setting, the judge's outcome of each account, and the strategy that orders its tables."""
    setting = drawn_setting(number)
    outcomes = [
        ledger.run(bars, targets, setting.costs, setting.rules, levels)
        for bars, targets, levels in setting.accounts
    ]
    return setting, outcomes, strategy_of(setting)


def strategy_of(setting):
    """A strategy that finds the account's row by the time of the bar: one program for all."""
    time = np.concatenate([bars.time for bars, *_ in setting.accounts])
    seconds = time.astype("datetime64[s]").astype(np.int64)
    with jax.enable_x64(True):
        table = jnp.asarray(np.concatenate([targets for _, targets, _ in setting.accounts]))
        levels = {
            name: jnp.asarray(np.concatenate([own[name] for *_, own in setting.accounts]))
            for name in setting.accounts[0][2]
        }

    def act(state, bar):
        row = jnp.searchsorted(jnp.asarray(seconds), bar.time[0])
        return state, nca.Order(table[row], **{name: x[row] for name, x in levels.items()})

    return nca.Strategy(lambda num_assets: (), act, "drawn", setting.rules["order"])


SETTINGS = pytest.mark.parametrize(
    "number",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in range(MANY)],
    ids=lambda n: f"seed {SEED} setting {n}",
)


@SETTINGS
def test_a_backtest_is_the_judges_account(number):
    setting, outcomes, strategy = judged(number)
    for (bars, targets, levels), outcome in zip(setting.accounts, outcomes, strict=True):
        given = setting.rules | setting.limits | {"costs": nca.Costs(**setting.costs)}
        given = {name: given[name] for name in ("costs", "fill", "order", *setting.limits)}
        result = nca.backtest(
            bars, strategy if setting.has_levels else targets, look=False, **given
        )
        if setting.has_levels:  # as a strategy gives them, or known beforehand
            known = nca.backtest(bars, nca.Order(targets, **levels), look=False, **given)
            assert known.equity.equals(result.equity)
        np.testing.assert_allclose(result.equity, outcome.equity, rtol=1e-9)
        np.testing.assert_allclose(result.weights, outcome.weights, atol=1e-8)
        for item, amounts in outcome.went.items():
            found = result.flows[item].to_numpy()
            np.testing.assert_allclose(found, amounts, rtol=1e-8, atol=1e-10, err_msg=item)
        assert result.cut.small == outcome.small
        compare_orders(result, real(outcome, setting), bars)
        compare_trades(result, outcome, real(outcome, setting), bars)


# Targets of five times equity: what opens them costs half of it, and what closes them the rest.
BROKE = {
    "a stop": (0.01, [0, 5, 5, 5, 5, 5]),
    "an order that closes": (None, [0, 5, 5, 0, 0, 5]),
    "an order that opens": (None, [0, 9, 9, 9, 9, 9]),
    "an order that turns": (None, [0, 4, 4, -4, -4, 0]),
}


@pytest.mark.parametrize("fill", ["next_open", "close"])
@pytest.mark.parametrize("kind", BROKE)
def test_an_account_that_its_own_orders_bankrupt(kind, fill):
    """Its last fill is an order like any other, and what that leaves ends without one."""
    price = np.array([100.0, 100.0, 100.0, 100.0, 99.0, 98.0])[:, None]
    stop, weights = BROKE[kind]
    costs = {"commission": 0.05, "slippage": 0.05}
    rules = {"fill": fill, "order": "on_change", "borrow": True, "floor": 0.25}
    levels = {"stop_loss": np.full((6, 1), stop)} if stop else {}
    setting = Setting(0, costs, rules, [])
    for side in (1.0, -1.0):
        bars = nca.Bars(
            time=np.datetime64("2024-01-01") + (np.arange(6) + APART * (side < 0)) * DAY,
            symbols=("A",), open=price, high=1.1 * price, low=0.9 * price, close=price,
            volume=price, present=price > 0,
        )  # fmt: skip
        setting.accounts.append((bars, side * np.array(weights, float)[:, None], levels))
    both = strategy_of(setting)
    for bars, targets, _ in setting.accounts:
        outcome = ledger.run(bars, targets, costs, rules, levels)
        assert outcome.equity[-1] == 0.25
        at = [fill.at for fill in outcome.fills]
        opens, turns = kind.endswith("opens"), kind.endswith("turns")
        assert len(at) == 1 + (not opens) + (opens or turns)
        assert (at[-1] == "after") == (opens or turns)
        result = nca.backtest(
            bars, both if stop else targets, nca.Costs(**costs), fill, "on_change", look=False,
            **setting.limits,
        )  # fmt: skip
        np.testing.assert_allclose(result.equity, outcome.equity, rtol=1e-9)
        compare_orders(result, outcome.fills, bars)
        compare_trades(result, outcome, outcome.fills, bars)


def real(outcome, setting):
    """The fills of a size: what cash of a rounding error buys is no position."""
    least = 1e-9 * setting.rules.get("capital", 1.0)
    return [f for f in outcome.fills if abs(f.units * f.price) > least]


def compare_orders(result, fills, bars):
    """Every fill: its bar, moment, asset, side, reason, size, price and cost."""
    moments = ("open", "inside", "close")
    ours = [f for f in fills if f.at in moments]
    expected = sorted(ours, key=lambda f: (f.row, moments.index(f.at), f.asset))
    table = result.orders
    table = table[table["notional"] > 1e-9]
    rows = np.searchsorted(bars.index, table["time"])
    columns = (table[x] for x in ("symbol", "at", "side", "reason"))
    assert list(zip(rows, *columns, strict=True)) == [
        (f.row, bars.symbols[f.asset], f.at, "buy" if f.units > 0 else "sell", f.reason)
        for f in expected
    ]
    np.testing.assert_allclose(table["size"], [abs(f.units) for f in expected], rtol=1e-6)
    np.testing.assert_allclose(table["price"], [f.price for f in expected], rtol=1e-9)
    np.testing.assert_allclose(table["cost"], [f.cost for f in expected], rtol=1e-6, atol=1e-12)


def compare_trades(result, outcome, fills, bars):
    """Every round trip, and that their profits add up to what the ledger earned."""
    start = result.rules.capital or 1.0
    trips, table = ledger.trips(fills, bars.close[-1], start), result.trades
    entry, left = (np.searchsorted(bars.index, table[x]) for x in ("entry", "exit"))
    left = np.where(table["exit"].isna(), -1, left)
    assert list(zip(entry, table["symbol"], left, table["reason"], strict=True)) == [
        (trip.entry, bars.symbols[trip.asset], -1 if trip.exit is None else trip.exit, trip.reason)
        for trip in trips
    ]
    for name in ("size", "entry_price", "exit_price"):
        wanted = [getattr(trip, name) for trip in trips]
        np.testing.assert_allclose(table[name], wanted, rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(table["pnl"], [trip.pnl for trip in trips], rtol=1e-6, atol=1e-9)
    paid = ("commission", "fixed_fee", "slippage", "spread", "impact", "liquidation")
    cost = -sum(outcome.went[name].sum() for name in paid)
    made = [trip.pnl / trip.most for trip in trips]
    np.testing.assert_allclose(table["return"], made, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(table["cost"].sum(), cost, rtol=1e-8, atol=1e-10)
    held = ("dividends", "interest", "borrow_fee", "funding", "ruin")
    rest = sum(outcome.went[name].sum() for name in held)
    earned = outcome.equity[-1] - 1.0
    np.testing.assert_allclose(table["pnl"].sum() + rest, earned, rtol=1e-8, atol=1e-8)


@SETTINGS
@pytest.mark.few(1)
def test_a_sweep_is_the_judges_account(number):
    """Final equity in float64 and float32, and the metrics of trades."""
    setting, outcomes, _ = judged(number)
    with jax.enable_x64(True):
        tables = jnp.asarray(np.stack([targets for _, targets, _ in setting.accounts]))
        levels = {
            name: jnp.asarray(np.stack([own[name] for *_, own in setting.accounts]))
            for name in (ledger.LEVELS if setting.has_levels else ())
        }

    def rule(k=0):
        def act(row, bar):
            own = {name: x[k, row] for name, x in levels.items()}
            return row + 1, nca.Order(tables[k, row], **own)

        return nca.Strategy(lambda num_assets: 0, act, "drawn", setting.rules["order"])

    for precision, rtol in [("f64", 1e-9)] + [("f32", 1e-6)] * setting.in_float32:
        # The program of another market is the same; float32 is compared on one.
        for first in range(0, 2 * TABLES if precision == "f64" else 1, TABLES):
            bars, chosen = setting.accounts[first][0], range(first, first + TABLES)
            table = run_combinations(
                bars, rule, [{"k": k} for k in chosen],
                nca.AccountConfig(costs=nca.Costs(**setting.costs), **setting.rules), precision,
            ).table  # fmt: skip
            wanted = [outcomes[k].equity[-1] for k in chosen]
            clear = [precision == "f64" or not pays_for_dust(outcomes[k], setting) for k in chosen]
            np.testing.assert_allclose(table["equity"][clear], np.array(wanted)[clear], rtol=rtol)
            if precision == "f64":
                for k, row in zip(chosen, table.itertuples(), strict=True):
                    compare_counts(row, real(outcomes[k], setting), bars, setting.rules)


def pays_for_dust(outcome, setting):
    """Whether a fixed fee is charged for a trade that float32 cannot tell from none."""
    least = 1e-6 * setting.rules.get("capital", 1.0)
    tiny = any(0.0 < abs(f.units * f.price) < least for f in outcome.fills)
    return "fixed_fee" in setting.costs and tiny


def compare_counts(row, fills, bars, rules):
    """What a sweep counts of round trips, which it does not keep."""
    trips = ledger.trips(fills, bars.close[-1], rules.get("capital", 1.0))
    pnl = np.array([trip.pnl for trip in trips if trip.exit is not None])
    assert row.trades == len(trips)
    if not pnl.size:
        assert np.isnan([row.win_rate, row.profit_factor, row.expectancy]).all()
        return
    gains, losses = pnl[pnl > 0.0].sum(), -pnl[pnl < 0.0].sum()
    factor = gains / losses if losses else np.nan
    wanted = (pnl > 0.0).mean(), factor, pnl.mean()
    found = row.win_rate, row.profit_factor, row.expectancy
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-9)


IN_FLOAT32 = 2e-5  # of equity, over 60 bars of leveraged accounts


@SETTINGS
def test_training_and_gymnasium_are_the_judges_account(number):
    setting, outcomes, _ = judged(number)
    if not setting.in_float32 or setting.rules.get("max_gross", 3.0) < 3.0:
        pytest.skip(
            "float32 decides otherwise on amounts, or no action has the size of the targets"
        )
    config = nca.EnvConfig(
        features=("day_of_week_sin",), actions="weights", size=3.0, random_start=False,
        costs=nca.Costs(**setting.costs), ruin_floor=setting.rules["floor"],
        **{"max_gross": None} | {k: x for k, x in setting.rules.items() if k != "floor"},
    )  # fmt: skip
    env = nca.TradingEnv(setting.accounts[0][0], config)
    run = jax.jit(lambda market, state, actions: jax.lax.scan(
        functools.partial(trading.step, market), state, actions))  # fmt: skip
    for (bars, targets, _), outcome in zip(setting.accounts, outcomes, strict=True):
        # Which assets are alike differs from bars to bars, and would be another program.
        market = nca.TradingEnv(bars, config).market
        market = dataclasses.replace(market, dynamics=env.dynamics)
        state, _ = trading.reset(market, jax.random.key(0))
        _, steps = run(market, state, jnp.asarray(targets[:-1], jnp.float32))
        found = equity(steps.observation.account)
        np.testing.assert_allclose(found, outcome.seen[1:], rtol=IN_FLOAT32)
    targets, outcome = setting.accounts[0][1], outcomes[0]
    gym = gymnasium.make("nca_trader/Trading-v0", env=env, bars=None, config=None)
    gym.reset(seed=0)
    for t in range(NUM_BARS - 1):
        _, _, over, _, info = gym.step(targets[t].astype(np.float32))
        assert info["equity"] == pytest.approx(outcome.seen[t + 1], rel=IN_FLOAT32)
        if over:
            break


@SETTINGS
@pytest.mark.few(3)
def test_the_simulated_broker_is_the_judges_account(number, tmp_path, monkeypatch):
    """A replay keeps cash and units at the broker; it halts where they differ from the account."""
    monkeypatch.setattr("nca_trader.paper.journal.journal.SYNCHRONOUS", "OFF")
    monkeypatch.setattr("os.fdatasync", lambda descriptor: None)
    setting, outcomes, strategy = judged(number)
    if setting.has_levels:
        pytest.skip("no broker rests levels")
    costs, capital = nca.Costs(**setting.costs), setting.rules.get("capital", 1e5)
    rules = rules_of(costs, **setting.rules)
    for k in range(0, len(outcomes), TABLES):
        bars, outcome = setting.accounts[k][0], outcomes[k]
        agent = strategy_agent(strategy, bars, rules)
        exchange = Exchange(None, capital, bars.symbols, rules)
        feed = ReplayFeed(bars)
        halts = (
            pytest.raises(HaltError, match="ruined") if bankrupt(outcome, rules) else nullcontext()
        )
        with halts, Journal(tmp_path / f"{k}.db", feed.now) as journal:
            open_session(agent, feed, exchange, journal, capital).trade()
        events = read_events(tmp_path / f"{k}.db", "snapshot")
        found = [event.body["equity"] for event in events]
        assert len(found) == (bankrupt(outcome, rules) or NUM_BARS)
        np.testing.assert_allclose(found, outcome.equity[: len(found)], rtol=1e-9)


def bankrupt(outcome, rules):
    """The number of bars up to bankruptcy; None without one."""
    broke = np.flatnonzero(outcome.equity <= rules.floor * (1.0 + 1e-9))
    return int(broke[0]) + 1 if broke.size else None
