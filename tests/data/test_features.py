"""Features against independent pandas derivations, and the laws that every feature must keep."""

import dataclasses
import functools

import jax
import numpy as np
import pandas as pd
import pytest

from nca_trader.data.bars import sample_bars
from nca_trader.data.feature_sets import feature_set
from nca_trader.data.features import FEATURES
from nca_trader.errors import ConfigError
from nca_trader.types import PRICES, Bars

ALL = tuple(FEATURES)
CALENDAR = tuple(name for name in ALL if "_of_" in name)
MARKET = tuple(name for name in ALL if "_of_" not in name)
N = 400


def random_bars(seed=0, num_bars=N, num_assets=2, missing=0.0):
    """Random-walk bars with gaps, wicks and log-normal volume, at irregular daily times."""
    rng = np.random.default_rng(seed)
    shape = (num_bars, num_assets)
    close = 100 * np.exp(np.cumsum(0.01 * rng.standard_t(4, shape), axis=0))
    open_ = np.concatenate([close[:1], close[:-1]]) * np.exp(0.003 * rng.normal(size=shape))
    days = np.cumsum(rng.choice([1, 1, 1, 3], num_bars)) * np.timedelta64(86_400, "s")
    return Bars(
        time=np.datetime64("2001-01-01T14:30", "s") + days,
        symbols=tuple("ABCDEFGH"[:num_assets]),
        open=open_,
        high=np.maximum(open_, close) * np.exp(np.abs(0.004 * rng.normal(size=shape))),
        low=np.minimum(open_, close) * np.exp(-np.abs(0.004 * rng.normal(size=shape))),
        close=close,
        volume=np.exp(rng.normal(15, 1, shape)),
        present=rng.random(shape) >= missing,
        half_spread=rng.uniform(0, 1e-3, shape),
    )


@jax.jit
def _scan64(state, bars):
    def body(state, bar):
        pairs = {name: jax.vmap(FEATURES[name].update)(state[name], bar) for name in ALL}
        return {k: v[0] for k, v in pairs.items()}, {k: v[1] for k, v in pairs.items()}

    return jax.lax.scan(body, state, bars)[1]


def values64(bars):
    """`{name: [N, A] float64}`, before the cast that `batch` ends with."""
    with jax.enable_x64(True):
        init = {
            name: jax.tree.map(lambda x: np.stack([x] * bars.num_assets), FEATURES[name].init())
            for name in ALL
        }
        values = _scan64(init, bars.as_bar())
        return {name: np.asarray(value) for name, value in values.items()}


def expected(name, frame):
    """A feature of one asset by pandas alone; NaN where it is not defined."""
    h, low, c, v = (frame[k] for k in ("high", "low", "close", "volume"))
    r = np.log(c / c.shift())
    sigma = np.sqrt((r**2).ewm(span=60).mean())
    past = sigma.shift()

    def z_score(x, span=60):
        ewm = x.ewm(span=span)
        return (x - ewm.mean().shift()) / ewm.std(bias=True).shift()

    def wilder(x, first):
        """Wilder's average: the plain mean of the first 14 from row `first`, then 13/14, 1/14."""
        out = pd.Series(np.nan, x.index)
        out.iloc[first + 13] = x.iloc[first : first + 14].mean()
        for i in range(first + 14, len(x)):
            out.iloc[i] = (13 * out.iloc[i - 1] + x.iloc[i]) / 14
        return out

    kind, _, horizon = name.rpartition("_")
    if kind.startswith("trend"):
        n = int(horizon)
        line = c.ewm(alpha=3 / n).mean() - c.ewm(alpha=1 / n).mean()
        y = (line / c.ewm(span=63).std(bias=True)).iloc[63:]
        return (y / y.ewm(span=252).std(bias=True).shift()).reindex(c.index)
    if name == "volatility_ratio_252":
        variance = [(r**2).ewm(span=span).mean() for span in (21, 252)]
        return np.log(variance[0] / variance[1]) / 2
    if name == "cost_in_vol":
        return np.log((1e-4 + frame.half_spread) / (0.01 * past))
    if horizon == "level":
        levels = {"price": np.log(c), "volume": np.log(v), "return": r}
        return z_score(levels[kind], span=4096)
    if kind == "return":
        return np.log(c / c.shift(int(horizon))) / (past * np.sqrt(int(horizon)))
    if name == "volatility_ratio":
        return np.log(np.sqrt((r**2).ewm(span=10).mean()) / sigma)
    if name == "rsi":
        d = c.diff()
        rs = wilder(d.clip(lower=0), 1) / wilder((-d).clip(lower=0), 1)
        return (100 - 100 / (1 + rs)) / 50 - 1
    if name == "macd":
        return (c.ewm(span=12).mean() - c.ewm(span=26).mean()) / c / past
    if name == "atr":
        ranges = pd.concat([h - low, (h - c.shift()).abs(), (low - c.shift()).abs()], axis=1)
        x = wilder(ranges.max(axis=1), 0) / c
        x.iloc[13] = np.nan  # the first 14 true ranges only start the average
        return z_score(x)
    if name == "bollinger":
        return (c - c.rolling(20).mean()) / (2 * c.rolling(20).std(ddof=0))
    if name == "volume":
        return z_score(np.log(v))
    if name == "range":
        x = (h - low) / c
        return x / x.ewm(span=60).mean().shift() - 1
    if name == "drawdown":
        return np.log(c / c.rolling(60).max()) / (past * np.sqrt(60))
    phase = {
        "day_of_week": c.index.day_of_week / 7,
        "day_of_year": (c.index - pd.Timestamp(0)) / pd.Timedelta(days=365.2425) % 1.0,
        "time_of_day": (c.index - c.index.normalize()) / pd.Timedelta(days=1),
    }[kind]
    return pd.Series(getattr(np, horizon)(2 * np.pi * phase), c.index)


def frame_of(bars, asset):
    fields = {k: getattr(bars, k)[:, asset] for k in (*PRICES, "volume", "half_spread")}
    return pd.DataFrame(fields, index=pd.DatetimeIndex(bars.time))


@functools.cache
def plain():
    return random_bars(), values64(random_bars())


@pytest.mark.parametrize("name", ALL)
def test_a_feature_equals_its_definition_in_pandas(name):
    bars, values = plain()
    warmup = FEATURES[name].warmup
    for asset in range(bars.num_assets):
        want = expected(name, frame_of(bars, asset)).to_numpy()
        assert np.isfinite(want[warmup:]).all()
        np.testing.assert_allclose(
            values[name][warmup:, asset], want[warmup:], rtol=1e-8, atol=1e-9
        )


def test_cost_in_vol_needs_no_quotes_and_adds_those_there_are():
    bars, values = plain()
    name, quoted = "cost_in_vol", bars.half_spread.copy()
    without = values64(dataclasses.replace(bars, half_spread=None))[name]
    sigma = values["return_1"][60:] / np.diff(np.log(bars.close), axis=0)[59:]  # its inverse
    np.testing.assert_allclose(without[60:], np.log(0.01 * sigma), rtol=1e-9)
    more = np.log((1e-4 + quoted[60:]) / 1e-4)
    np.testing.assert_allclose(values[name][60:], without[60:] + more, rtol=1e-9)
    quoted[100] = np.nan
    holes = values64(dataclasses.replace(bars, half_spread=quoted))[name]
    np.testing.assert_array_equal(holes[100], without[100])
    np.testing.assert_array_equal(np.delete(holes, 100, 0), np.delete(values[name], 100, 0))


def row_of(columns, row):
    return jax.tree.map(lambda field: field[row], columns)


def test_batch_is_the_update_called_bar_by_bar_bit_for_bit():
    bars = sample_bars("sp500")[:320]
    present = np.random.default_rng(1).random(bars.close.shape) >= 0.1
    present[:270] = True
    bars = dataclasses.replace(bars, present=present)
    features = feature_set(ALL)
    with jax.enable_x64(True):
        final, _ = features.jitted[1](features.init(2), bars.as_bar())
    state, values, columns = features.init(2), [], bars.as_bar()
    for row in range(len(bars)):
        state, value = features.step(state, row_of(columns, row))
        values.append(value)
    np.testing.assert_array_equal(features.batch(bars), np.stack(values))
    for a, b in zip(jax.tree.leaves(final), jax.tree.leaves(state), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)  # float64, where no rounding to float32 can hide it


@pytest.mark.parametrize("unit", [1e3, 1e-14])  # of the second all prices are below `LEAST`
def test_units_of_price_and_volume_do_not_matter(unit):
    bars, values = plain()
    units = {name: unit * getattr(bars, name) for name in PRICES}
    scaled = values64(dataclasses.replace(bars, volume=bars.volume * 1e-6, **units))
    for name in ALL:
        np.testing.assert_allclose(scaled[name], values[name], rtol=1e-9, atol=1e-9, err_msg=name)


def test_a_missing_bar_changes_nothing_and_has_value_zero():
    bars = random_bars(missing=0.2)
    here = bars.present[:, 0]
    bars = dataclasses.replace(bars, present=np.stack([here, here], 1))
    holes = {name: np.where(bars.present, getattr(bars, name), np.nan) for name in PRICES}
    values = values64(dataclasses.replace(bars, **holes))
    fields = (*PRICES, "volume", "present", "half_spread")
    # The bars that are there come first, so that the others only keep the shape of the program.
    order, later = np.argsort(~here, kind="stable"), np.arange(1, 1 + (~here).sum())
    rest = {name: getattr(bars, name)[order] for name in fields}
    time = np.append(bars.time[here], bars.time[-1] + later * np.timedelta64(86_400, "s"))
    alone = values64(dataclasses.replace(bars, time=time, **rest))
    for name in ALL:
        assert (values[name][~here] == 0).all(), name
        np.testing.assert_array_equal(values[name][here], alone[name][: here.sum()], err_msg=name)


def test_values_are_zero_before_the_warm_up_and_not_after_it():
    _, values = plain()
    for name in MARKET:
        warmup = FEATURES[name].warmup
        assert (values[name][:warmup] == 0).all(), name
        assert (values[name][warmup:] != 0).mean() > 0.8, name
    assert feature_set(ALL).warmup == max(FEATURES[name].warmup for name in ALL) == 252
    assert feature_set(CALENDAR).warmup == 0


@pytest.mark.parametrize("volume", [0.0, np.nan, 1e18])
def test_values_are_finite_where_nothing_moves_and_where_everything_does(volume):
    bars = random_bars()
    calm = np.full((N, 2), 7.0)
    step = np.where(np.arange(N)[:, None] < 200, calm, 9.0)
    jumps = np.where(np.arange(N)[:, None] % 100 == 99, 1e6 * bars.close, bars.close)
    volumes = np.full((N, 2), volume)
    for close in (calm, step, jumps):
        wild = dataclasses.replace(bars, volume=volumes, **dict.fromkeys(PRICES, close))
        assert all(np.isfinite(value).all() for value in values64(wild).values())
    still = values64(dataclasses.replace(bars, **dict.fromkeys(PRICES, calm)))
    for name in set(MARKET) - {"volume", "volume_level"}:
        assert (still[name] == 0).all(), name


def test_bars_without_volume_are_left_out_of_the_volume_score():
    bars, values = plain()
    volume = bars.volume.copy()
    volume[100:105] = [[0, np.nan]] * 5
    score = values64(dataclasses.replace(bars, volume=volume))["volume"]
    assert (score[100:105] == 0).all()
    np.testing.assert_array_equal(score[:100], values["volume"][:100])
    kept = pd.DataFrame(np.log(np.delete(bars.volume, slice(100, 105), axis=0)))
    want = (kept - kept.ewm(span=60).mean().shift()) / kept.ewm(span=60).std(bias=True).shift()
    np.testing.assert_allclose(score[105:], want.to_numpy()[100:], rtol=1e-9)


def test_calendar_features_repeat_with_their_period_and_know_monday():
    bars, values = plain()

    def moved(seconds):
        return values64(dataclasses.replace(bars, time=bars.time + np.timedelta64(seconds, "s")))

    week, year = moved(7 * 86_400), moved(31_556_952)  # 365.2425 days
    for wave in ("sin", "cos"):
        np.testing.assert_array_equal(week[f"day_of_week_{wave}"], values[f"day_of_week_{wave}"])
        np.testing.assert_array_equal(week[f"time_of_day_{wave}"], values[f"time_of_day_{wave}"])
        name = f"day_of_year_{wave}"
        np.testing.assert_allclose(year[name], values[name], atol=1e-9)
        assert (week[name] != values[name]).all()
    monday = bars.index.day_of_week == 0
    assert (values["day_of_week_sin"][monday] == 0).all()
    assert (values["day_of_week_cos"][~monday] != 1).all()


def test_an_unknown_or_repeated_feature_is_refused_by_name():
    with pytest.raises(ConfigError, match="'volatilty_ratio'; did you mean 'volatility_ratio'"):
        feature_set(("rsi", "volatilty_ratio"))
    with pytest.raises(ConfigError, match="'rsi' is listed twice"):
        feature_set(("rsi", "macd", "rsi"))


@pytest.mark.parametrize("fast", [8, 16, 32])
def test_a_trend_follows_the_published_one_of_rolling_windows(fast):
    """Exponential deviations stand for rolling ones; the published quotient includes its bar."""
    bars = sample_bars("sp500")
    values = feature_set((f"trend_{fast}_{3 * fast}",)).batch(bars)[..., 0]
    for asset in range(2):
        c = pd.Series(bars.close[:, asset])
        fast_ema, slow_ema = (c.ewm(alpha=1 / n, adjust=False).mean() for n in (fast, 3 * fast))
        y = (fast_ema - slow_ema) / c.rolling(63).std()
        z = y / y.rolling(252).std()
        assert np.corrcoef(z[400:], values[400:, asset])[0, 1] > 0.9
