"""Costs of trading of your own: functions that say how much worse than the bar's price a fill is.

`Costs.own` names them. The account, the simulated broker and the table of trades call them through
`nca_trader.envs.account.state.worsening`, as they do for slippage, spread and impact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nca_trader.config.extensions import Registry, own_code
from nca_trader.config.ranges import described
from nca_trader.envs.own import examined
from nca_trader.errors import ConfigError
from nca_trader.numerics import arrays, float64_on_cpu
from nca_trader.types import Bars, Costs, Tensor

SIZES = (1e-3, 0.1, 1.0)  # of trades that are tried on every bar, as fractions of equity


class Trade(NamedTuple):
    """The trades of one moment, as the account knows them when they fill; `[A]` each.

    traded: signed notional at the bar's price, as a fraction of equity before the trades. Where
    cash then cuts a buy, it is the size before the cut, as for `Costs.impact`.
    price: of the bar, at the moment of the fill. volume: of the bar in which it fills, in the
    bars' own unit, 0 where it is unknown. half_spread: that the bar quotes, a fraction of price;
    0 without quotes. money: `[]` equity in money; None without `capital`.
    """

    traded: Any
    price: Any
    volume: Any
    half_spread: Any
    money: Any = None

    @property
    def notional(self) -> Any:
        """`[A]` signed notional in money; needs `capital`."""
        if self.money is None:
            raise ValueError("money and units need capital, e.g. capital = 100000")
        return self.traded * self.money

    @property
    def units(self) -> Any:
        """`[A]` signed size in units; needs `capital`."""
        return self.notional / self.price


class Cost(NamedTuple):
    """A cost of trading of your own.

    Attributes:
      rate: `(trade) -> [A]` or `[]`, the fraction of the price by which each fill is worse. A pure
        function in `jax.numpy`. What it returns where nothing is traded does not matter.
      rebate: whether a rate may be below 0, which pays the account.
    """

    rate: Callable[[Trade], Any]
    rebate: bool = False


def own_cost(value: Any, name: str) -> Cost:
    """Return the cost that your own code gives: a `Cost`, or the function of its rate.

    Raises:
      ConfigError: it is neither.
    """
    if isinstance(value, Cost):
        return value
    if not callable(value) or isinstance(value, type):
        raise ConfigError(f"{name}: is {described(value)}; give a function of a trade, or a Cost.")
    return Cost(value)


# No cost is built in here: those of `Costs` have fields of their own.
COSTS: Registry[Cost] = Registry("costs", {}, own_cost)


def own_rates(trade: Trade, costs: Costs) -> tuple[Tensor, ...]:
    """Return for each cost of `costs.own` the rates `[A]`, in the type of `trade.traded`.

    A rate below 0 is NaN unless it is a rebate: it must not pass for money.
    """
    if not costs.own:
        return ()
    xp = arrays(trade.traded)
    if xp is np:  # the simulated broker, whose books are in float64
        with float64_on_cpu():
            return tuple(np.asarray(rate) for rate in _rates(trade, costs, np))
    return _rates(trade, costs, xp)


def _rates(trade: Trade, costs: Costs, xp: Any) -> tuple[Any, ...]:
    found = []
    for name in costs.own or ():
        cost = COSTS[name]
        rate = xp.asarray(cost.rate(trade), trade.traded.dtype)
        if not cost.rebate:
            rate = xp.where(rate < 0.0, xp.nan, rate)
        if costs.own_scale is not None:
            rate = costs.own_scale * rate
        found.append(xp.where(trade.traded != 0.0, rate, 0.0))
    return tuple(found)


def check_costs(bars: Bars, costs: Costs, trade: Trade) -> None:
    """Compute your own costs of trades of some sizes in every bar.

    Args:
      bars: N bars.
      costs: to check.
      trade: with `[N, A]` arrays, but for `traded`; `money` is the capital.

    Raises:
      ConfigError: one raises, is not pure, has another shape or type, is not finite, or is below 0
        and no rebate; in one line, with the bar.
    """
    for name in costs.own or ():
        where, cost, num = f"cost {name}", COSTS[name], bars.num_assets
        row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x)[1:], jnp.float32), trade)
        given = examined(where, cost.rate, row, rows=len(bars))
        fits = hasattr(given, "shape") and given.shape in ((), (num,))
        if not fits or not jnp.issubdtype(given.dtype, jnp.floating):
            what = f"{given.dtype}{given.shape}" if hasattr(given, "shape") else described(given)
            raise ConfigError(f"{where}: returns {what}; return one fraction, or one per asset.")
        there = bars.present & np.isfinite(bars.close)
        with float64_on_cpu(), own_code(where):
            for size in (*SIZES, *(-size for size in SIZES)):
                tried = trade._replace(traded=np.full(there.shape, size))
                rate = np.broadcast_to(_each_bar(cost.rate, tried), there.shape)
                wrong = there & ~(np.isfinite(rate) & (cost.rebate | (rate >= 0.0)))
                if wrong.any():
                    _refuse(where, bars, wrong, rate, size)


def has_slope(trade: Trade, costs: Costs) -> bool:
    """Return whether the costs of orders of nothing and of some have finite derivatives."""

    def paid(traded: Any) -> Any:
        return sum(
            (abs(traded) * rate).sum() for rate in own_rates(trade._replace(traded=traded), costs)
        )

    sizes = (0.0, *SIZES, *(-size for size in SIZES))
    slopes = [jax.grad(paid)(jnp.full(np.shape(trade.price), size)) for size in sizes]
    return bool(jnp.isfinite(jnp.stack(slopes)).all())


def _each_bar(rate: Callable[[Trade], Any], trade: Trade) -> np.ndarray:
    """Return `[N, A]` or `[N, 1]` the rates of each bar."""
    found = np.asarray(jax.vmap(lambda one: jnp.asarray(rate(one)))(trade))
    return found.reshape(len(trade.price), -1)


def _refuse(where: str, bars: Bars, wrong: np.ndarray, rate: np.ndarray, size: float) -> None:
    row, column = np.argwhere(wrong)[0]
    side = "a purchase" if size > 0.0 else "a sale"
    remedy = "return a finite fraction"
    if np.isfinite(rate[row, column]):
        remedy = "return at least 0, or give Cost(rate, rebate=True)"
    raise ConfigError(
        f"{where}: is {rate[row, column]:g} of {side} of {abs(size):g} of equity in "
        f"{bars.symbols[column]} at {bars.time[row]}; {remedy}."
    )
