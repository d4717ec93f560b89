"""Metrics of many accounts, accumulated while they run: no array of bars and accounts exists.

`AccountSums` are updated once per bar inside a scan, and batched with `jax.vmap`. The formulas are
those of `metrics.summary` and `trades.trade_metrics`, from sums in float64.

XLA's CPU backend computes a quotient once for all its readers, but repeats sums and products for
each. So what several fields read ends in a division here, by 1 or by infinity.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.envs.account.effects import AccountFill
from nca_trader.evaluate import metrics
from nca_trader.evaluate.metrics import NO_WEIGHT

# A weight that a closed position leaves by rounding.
DUST = {"float32": 1e-6, "float64": NO_WEIGHT}
# A return that rounding leaves of two that cancel, overnight and intraday.
NO_RETURN = {"float32": 1e-8, "float64": metrics.NO_RETURN}


class AccountSums(NamedTuple):
    """Sums over the bars of one account; `[]` float64 unless said otherwise.

    equity: at the close, a fraction of the start's. total, squares, cubes, fourths: of returns in
    excess of interest, to their powers. downside: squares of the negative ones. earned: sum of
    interest received, as fractions of equity. peak, drawdown: of the logarithm of equity.
    turnover: absolute traded notional, fractions of equity. won, moved, held: int32, bars with a
    gain, with a return, and with a position. side: `[A]` -1, 0 or 1, the position. pnl: `[A]` of
    the open trade, as a fraction of the capital. gains, losses: of the trades that ended. trades,
    winners: int32, trades begun and those that ended with a gain. largest: absolute weight ordered.
    low, high: uint32, the halves of `trials.digest_of_targets`.
    """

    equity: Any
    total: Any
    squares: Any
    cubes: Any
    fourths: Any
    downside: Any
    earned: Any
    plain_squares: Any
    plain_total: Any
    peak: Any
    drawdown: Any
    turnover: Any
    won: Any
    moved: Any
    held: Any
    side: Any
    pnl: Any
    gains: Any
    losses: Any
    trades: Any
    winners: Any
    largest: Any
    low: Any
    high: Any


def open_sums(num_assets: int, dtype: Any) -> AccountSums:
    """Return the sums before the first bar; positions are in `dtype`, the account's."""
    zero, none = jnp.zeros((), jnp.float64), jnp.zeros((), jnp.int32)
    every = jnp.zeros(num_assets, dtype)
    started = {"equity": zero + 1.0, "side": every, "pnl": every}
    counts = dict.fromkeys(("won", "moved", "held", "trades", "winners"), none)
    halves = dict.fromkeys(("low", "high"), jnp.zeros((), jnp.uint32))
    return AccountSums(**{name: zero for name in AccountSums._fields} | started | counts | halves)


def add_return(
    sums: AccountSums, log_return: Array, log_equity: Array, interest: Any, active: Any
) -> AccountSums:
    """Count the return of a bar.

    Args:
      sums: before the bar.
      log_return: `[]` of the bar, in the account's dtype.
      log_equity: `[]` at its close, float64.
      interest: `[]` received on cash as a fraction of equity before the bar; None for none.
      active: `[]` bool, a position was held in the bar. Without one, what a closed position left by
        rounding still moves the account, by nothing that counts.
    """
    simple = jnp.expm1(log_return).astype(jnp.float64)
    excess, more = simple, {}
    if interest is not None:
        earned = jnp.maximum(interest, 0.0).astype(jnp.float64)
        excess = simple - earned
        more = {
            "earned": sums.earned + sums.equity * earned,
            "plain_total": sums.plain_total + simple,
            "plain_squares": sums.plain_squares + simple * simple,
        }
    square, loss = excess * excess, jnp.minimum(excess, 0.0)
    # In logarithms a drawdown is a difference, and needs one exponential at the end.
    peak = jnp.maximum(sums.peak, log_equity)
    none = NO_RETURN[log_return.dtype.name]
    return sums._replace(
        equity=sums.equity + sums.equity * simple,
        total=sums.total + excess,
        squares=sums.squares + square,
        cubes=sums.cubes + square * excess,
        fourths=sums.fourths + square * square,
        downside=sums.downside + loss * loss,
        peak=peak,
        drawdown=jnp.minimum(sums.drawdown, log_equity - peak),
        won=sums.won + (active & (excess > none)),
        moved=sums.moved + (active & (jnp.abs(excess) > none)),
        **more,
    )


def is_position(weight: Array) -> Array:
    """Return whether each weight is a position, and not what rounding leaves of a closed one."""
    return jnp.abs(weight) >= DUST[weight.dtype.name]


def add_fill(sums: AccountSums, fill: AccountFill) -> AccountSums:
    """Count what was traded at one moment of a bar; `sums` has `pnl` up to this moment.

    A trade is a round trip of one asset, from flat to flat or to the other side, as in `trades`.
    """
    traded, after = fill.traded, fill.left
    paid = sums.equity.astype(after.dtype) * (1.0 + fill.growth) * fill.cost
    # 1, -1, or 0 where flat, exactly.
    side = after / jnp.where(is_position(after), jnp.abs(after), jnp.inf)
    changed = side != sums.side
    flips, closes = sums.side * side < 0.0, changed & (sums.side != 0.0)
    # Of a fill that changes sides, the part that closes belongs to the trade before.
    part = jnp.where(flips, (traded - after) / jnp.where(flips, traded, jnp.inf), 1.0)
    won = (sums.pnl - paid * part) / jnp.where(closes, 1.0, jnp.inf)
    pnl = jnp.where(side != 0.0, sums.pnl - paid - won, 0.0)
    return sums._replace(
        side=side,
        pnl=pnl,
        gains=sums.gains + jnp.maximum(won, 0.0).sum().astype(jnp.float64),
        losses=sums.losses - jnp.minimum(won, 0.0).sum().astype(jnp.float64),
        trades=sums.trades + (changed & (side != 0.0)).sum(dtype=jnp.int32),
        winners=sums.winners + (won > 0.0).sum(dtype=jnp.int32),
        turnover=sums.turnover + jnp.abs(traded).sum().astype(jnp.float64),
    )


def ended(sums: AccountSums, held: Array) -> AccountSums:
    """End the trades of positions that went without a fill; `held` `[A]` weights are left."""
    nothing = jnp.zeros_like(held)
    return add_fill(sums, AccountFill(nothing, nothing, (), left=held))


def add_gain(sums: AccountSums, gain: Array) -> AccountSums:
    """Count the market's gain `[A]`, a fraction of equity at the close before."""
    return sums._replace(pnl=sums.pnl + sums.equity.astype(gain.dtype) * gain)


def summaries(
    sums: Any, log_equity: np.ndarray, num_bars: int, bars_per_year: float
) -> dict[str, np.ndarray]:
    """Compute the metrics of M accounts from their sums `[M]`, with the NaN rules of `metrics`.

    Args:
      sums: `AccountSums` after the last bar, of numpy `[M]` or `[M, A]`.
      log_equity: `[M]` at the last close.
      num_bars: T.
      bars_per_year: P.
    """
    t, n, filled = sums, float(num_bars), sums.turnover > 0.0
    mean, square, cube, fourth = (x / n for x in (t.total, t.squares, t.cubes, t.fourths))
    excess = metrics.Sums(
        bars=n,
        count=n,
        growth=np.exp(log_equity),
        depth=np.expm1(t.drawdown),
        mean=mean,
        variance=_variance(mean, square),
        third=cube - 3.0 * mean * square + 2.0 * mean**3,
        fourth=fourth - 4.0 * mean * cube + 6.0 * mean**2 * square - 3.0 * mean**4,
        downside=t.downside / n,
        won=t.won,
        moved=t.moved,
    )
    # Without interest both kinds of returns are the same, and were summed once.
    scatter = _variance(t.plain_total / n, t.plain_squares / n)
    plain = excess._replace(variance=np.where(t.earned != 0.0, scatter, excess.variance))
    # Without a fill the ratios would be those of interest alone: no bar counts for them.
    grown, ratios = (metrics.Sums(*(np.where(filled, x, 0.0) for x in r)) for r in (plain, excess))
    ended = t.trades - (t.side != 0.0).sum(-1)
    return {
        "equity": plain.growth,
        **metrics.of_sums(plain, grown, ratios, bars_per_year),
        "exposure": t.held / n,
        "turnover": t.turnover * bars_per_year / n,
        "trades": t.trades.astype(np.float64),
        **metrics.of_trades(ended, t.winners, t.gains, t.losses),
    }


def _variance(mean: np.ndarray, square: np.ndarray) -> np.ndarray:
    """Return the variance of returns from their means; what is left of rounding counts as 0."""
    central = square - mean**2
    return np.where(central > 1e-13 * square, central, 0.0)
