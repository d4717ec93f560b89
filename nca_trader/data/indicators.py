"""Indicators, each from its definition."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.data.online import (
    LEAST,
    SPAN,
    Feature,
    add,
    advance,
    empty_average,
    empty_market,
    keep_unless,
    make_feature,
    ratio,
    shift,
    wilder,
    z_score,
)
from nca_trader.types import Bar, Tensor

DAY = 86_400  # seconds
YEAR = 365.2425 * DAY  # seconds, the mean Gregorian year
LEVEL_SPAN = 4096  # bars: span of the average that a level is measured from


def _log_return(horizon: int) -> Feature:
    """log(close_t / close_{t-h}) / (sigma_{t-1} sqrt(h)), h = `horizon` bars."""

    def update(market, bar, count):
        r = jnp.log(bar.close / market.closes[0])
        market, sigma = advance(market, bar, count)
        return market, ratio(r, sigma * np.sqrt(horizon))

    return make_feature(lambda: empty_market(horizon), update, warmup=max(SPAN, horizon))


def _volatility_ratio(fast: int = 10) -> Feature:
    """log(sigma_fast / sigma_slow), both up to t, with spans `fast` and SPAN."""

    def update(state, bar, count):
        close, *averages = state
        r = jnp.log(bar.close / close)
        added = [add(a, r * r, span) for a, span in zip(averages, (fast, SPAN), strict=True)]
        averages = keep_unless(count > 0, averages, added)
        short, long = (a.mean for a in averages)
        moved = (short > LEAST**2) & (long > LEAST**2)
        squared = jnp.where(moved, short, 1.0) / jnp.where(moved, long, 1.0)
        return (bar.close, *averages), 0.5 * jnp.log(squared)

    def init():
        return np.ones(()), empty_average(), empty_average()

    return make_feature(init, update, warmup=SPAN)


def _rsi(period: int = 14) -> Feature:
    """Wilder's RSI / 50 - 1 = (G - L) / (G + L), in [-1, 1]; 0 where the price did not move.

    G, L: Wilder averages of max(d, 0) and max(-d, 0), d = close_t - close_{t-1}.
    """

    def update(state, bar, count):
        close, gain, loss = state
        d = jnp.where(count > 0, bar.close - close, 0.0)
        n = jnp.maximum(count, 1)
        gain = wilder(gain, jnp.maximum(d, 0.0), n, period)
        loss = wilder(loss, jnp.maximum(-d, 0.0), n, period)
        return (bar.close, gain, loss), ratio(gain - loss, gain + loss, least=0.0)

    return make_feature(lambda: (np.ones(()), np.zeros(()), np.zeros(())), update, warmup=period)


def _macd(fast: int = 12, slow: int = 26) -> Feature:
    """MACD line over price and past volatility: (EMA_fast - EMA_slow) / (close_t sigma_{t-1}).

    Source: Appel, Technical Analysis (2005); EMAs of span 12 and 26, bias-corrected at the start.
    """

    def update(state, bar, count):
        market, *averages = state
        market, sigma = advance(market, bar, count)
        averages = [add(a, bar.close, s) for a, s in zip(averages, (fast, slow), strict=True)]
        line = averages[0].mean - averages[1].mean
        return (market, *averages), ratio(line / bar.close, sigma)

    def init():
        return empty_market(1), empty_average(), empty_average()

    return make_feature(init, update, warmup=SPAN)


def _atr(period: int = 14) -> Feature:
    """Wilder's ATR / close, z-scored by its own EW mean and deviation up to t-1.

    True range: max(high, close_{t-1}) - min(low, close_{t-1}).
    """

    def update(state, bar, count):
        close, atr, past = state
        close = jnp.where(count > 0, close, bar.close)
        true_range = jnp.maximum(bar.high, close) - jnp.minimum(bar.low, close)
        atr = wilder(atr, true_range, count + 1, period)
        x = atr / bar.close
        grown = keep_unless(count >= period, past, add(past, x))
        return (bar.close, atr, grown), z_score(past, x)

    def init():
        return np.ones(()), np.zeros(()), empty_average()

    return make_feature(init, update, warmup=period + SPAN)


def _bollinger(window: int = 20) -> Feature:
    """(close_t - mean) / (2 deviations) over the last `window` closes, t included.

    1 is the upper band, -1 the lower. Source: Bollinger, Bollinger on Bollinger Bands (2001).
    """

    def update(closes, bar, count):
        closes = shift(closes, bar.close)
        u = closes / bar.close  # relative, so that the test for "did not move" has no unit
        mean = jnp.mean(u)
        return closes, ratio(1.0 - mean, 2.0 * jnp.sqrt(jnp.mean((u - mean) ** 2)))

    return make_feature(lambda: np.ones(window), update, warmup=window - 1)


def _has_volume(bar: Bar) -> Tensor:
    """Returns whether a bar has a volume."""
    return bar.present & (bar.volume > 0)  # False for NaN


def _volume() -> Feature:
    """log(volume_t), z-scored by its own EW mean and deviation up to t-1.

    A bar with volume 0 or NaN is not counted, and its value is 0.
    """

    def update(past, bar, count):
        x = jnp.log(jnp.where(_has_volume(bar), bar.volume, 1.0))
        return add(past, x), z_score(past, x)

    return make_feature(empty_average, update, warmup=SPAN, counts=_has_volume)


def _level(value: Callable[[Bar], Tensor], counts: Callable[[Bar], Tensor]) -> Feature:
    """log(x_t), z-scored by the EW mean and deviation of its values up to t-1, of LEVEL_SPAN.

    It is for what returns to a level of its own: a spread, a rate, turnover. Most prices do not.
    Over all of a price's past a path has one or two excursions, which an agent would memorise; the
    span prevents that.
    """

    def update(past, bar, count):
        x = jnp.log(jnp.where(counts(bar), value(bar), 1.0))
        return add(past, x, span=LEVEL_SPAN), z_score(past, x)

    return make_feature(empty_average, update, warmup=SPAN, counts=counts)


def _range() -> Feature:
    """x_t over the EW mean of x up to t-1, less 1; x = (high - low) / close."""

    def update(past, bar, count):
        x = (bar.high - bar.low) / bar.close
        return add(past, x), ratio(x - past.mean, past.mean)

    return make_feature(empty_average, update, warmup=SPAN)


def _drawdown(window: int = SPAN) -> Feature:
    """log(close_t / highest close of the last `window` bars) / (sigma_{t-1} sqrt(window)), <= 0.

    The high is rolling, as a running one would show a peak of years ago.
    """

    def update(market, bar, count):
        market, sigma = advance(market, bar, count)
        depth = jnp.log(bar.close / jnp.max(market.closes))
        return market, ratio(depth, sigma * np.sqrt(window))

    return make_feature(lambda: empty_market(window), update, warmup=window)


def _calendar(phase: Callable[[Array], Array], wave: Callable[[Array], Array]) -> Feature:
    """wave(2 pi phase) of the bar's open in UTC; `phase` maps seconds since 1970 to [0, 1)."""

    def update(state, bar, count):
        return state, wave(2.0 * np.pi * phase(bar.time))

    return make_feature(lambda: (), update, warmup=0)


def _day_of_week(time: Array) -> Array:
    return (time // DAY + 3) % 7 / 7.0  # 1970-01-01 was a Thursday; Monday has phase 0


def _day_of_year(time: Array) -> Array:
    return (time % YEAR) / YEAR  # 1 January has phase 0, give or take a day or two


def _time_of_day(time: Array) -> Array:
    return (time % DAY) / float(DAY)


FEATURES: dict[str, Feature] = {
    **{f"return_{h}": _log_return(h) for h in (1, 5, 20, 60)},
    "volatility_ratio": _volatility_ratio(),
    "rsi": _rsi(),
    "macd": _macd(),
    "atr": _atr(),
    "bollinger": _bollinger(),
    "volume": _volume(),
    "price_level": _level(lambda bar: bar.close, lambda bar: bar.present),
    "volume_level": _level(lambda bar: bar.volume, _has_volume),
    "range": _range(),
    "drawdown": _drawdown(),
    **{
        f"{phase.__name__[1:]}_{wave.__name__}": _calendar(phase, wave)
        for phase in (_day_of_week, _day_of_year, _time_of_day)
        for wave in (jnp.sin, jnp.cos)
    },
}
