"""Costs of trading of your own: functions that say how much worse than the bar's price a fill is.

`Costs.own` names them. The account, the simulated exchange and the table of trades call them
through `nca_trader.envs.account.state.worsening`, as they do for slippage, spread and impact.

A cost, a reward or an action scheme of your own runs inside the training program, so it must be a
pure function of its arguments. `examine` traces it, twice and without data, and refuses what is
not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nca_trader.config.extensions import own_code, uncalled
from nca_trader.config.ranges import describe
from nca_trader.config.registry import Registry
from nca_trader.errors import ConfigError
from nca_trader.numerics import arrays, float64_on_cpu
from nca_trader.types import Bars, Costs, Tensor

LEAST_TABLE = 64  # numbers; smaller constants are parameters, such as the steps of a fee schedule
ADDRESS = re.compile(r"0x[0-9a-f]+")  # of a function, other in each trace
SIZES = (1e-3, 0.1, 1.0)  # of trades that are tried on every bar, as fractions of equity


def examine(
    where: str,
    function: Callable,
    *args: Any,
    shapes: Collection[tuple[int, ...]],
    returns: str,
    rows: int | None = None,
) -> None:
    """Trace a function of your own, and check what it returns, that it is pure, and holds no bars.

    Args:
      where: what it is called in messages, e.g. "reward mine:paid".
      function: of `args`.
      args: pytrees of arrays or of `jax.ShapeDtypeStruct`.
      shapes: that its floats may have.
      returns: them, in words.
      rows: bars of the data. A constant of as many numbers may hold the future; None allows any.

    Raises:
      ConfigError: it raises, returns something else, keeps state, leaves the compiled program, or
        holds such a constant.
    """

    def check_result(found: Any) -> Any:
        shape, kind = getattr(found, "shape", None), getattr(found, "dtype", bool)
        # Python's numbers are arrays to jax, but for whole ones and truth values.
        number = isinstance(found, float) and () in shapes
        if not number and not (shape in shapes and jnp.issubdtype(kind, jnp.floating)):
            what = describe(found) if shape is None else f"{kind}{shape}"
            raise ConfigError(f"{where}: returns {what}; return {returns}{uncalled(found)}.")
        return found

    with own_code(where):
        # A lambda each time: jax remembers the trace of a function, and would not call it again.
        program, other = (
            jax.make_jaxpr(lambda *xs: check_result(function(*xs)))(*args) for _ in range(2)
        )
    tables = (
        [np.asarray(x) for _, constants in _parts(traced) for x in constants]
        for traced in (program, other)
    )
    # Programs of different length are unequal texts, see below.
    same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(*tables, strict=False))
    if not same or ADDRESS.sub("", str(program)) != ADDRESS.sub("", str(other)):
        raise ConfigError(
            f"{where}: is another function at each call, so it keeps state or draws numbers; let "
            "it depend on its arguments alone."
        )
    for name, constants in _parts(program):
        if name in ("pure_callback", "io_callback"):
            raise ConfigError(
                f"{where}: calls Python from inside the compiled program ({name}); write it in "
                "jax.numpy."
            )
        largest = max((np.size(x) for x in constants), default=0)
        if rows is not None and largest >= max(rows, LEAST_TABLE):
            raise ConfigError(
                f"{where}: holds a table of {largest:,} numbers for {rows:,} bars, in which later "
                "bars may be; let it depend on its arguments alone."
            )


def expect_shapes(what: str, found: Any, wanted: Any, more: str = "") -> None:
    """Refuse what is returned where it has other parts, shapes or types than `wanted`."""

    def shape(x: Any) -> str:
        return f"{x.dtype}{x.shape}" if hasattr(x, "dtype") else describe(x)

    def shapes(tree: Any) -> str:
        return str(jax.tree.map(shape, tree, is_leaf=lambda x: x is None)).replace("'", "")

    if shapes(found) != shapes(wanted):
        raise ConfigError(f"{what}: returns {shapes(found)}; return {shapes(wanted)}{more}.")


def _parts(program: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield each operation's name and its constants, of inner programs as well."""
    yield "", list(getattr(program, "consts", []))
    for equation in getattr(program, "jaxpr", program).eqns:
        literals = [x.val for x in equation.invars if hasattr(x, "val")]
        yield equation.primitive.name, literals
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(inner, "eqns"):
                yield from _parts(inner)


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
        more = uncalled(value)
        raise ConfigError(
            f"{name}: is {describe(value)}; give a function of a trade, or a Cost{more}."
        )
    return Cost(value)


# The registry has no built-in costs, because those of `Costs` have fields of their own.
COSTS: Registry[Cost] = Registry("costs", {}, own_cost)


def own_rates(trade: Trade, costs: Costs) -> tuple[Tensor, ...]:
    """Return for each cost of `costs.own` the rates `[A]`, in the type of `trade.traded`.

    A rate below 0 is NaN unless it is a rebate: it must not pass for money.
    """
    if not costs.own:
        return ()
    xp = arrays(trade.traded)
    if xp is np:  # the simulated exchange, whose books are in float64
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
        said = "one fraction, or one per asset"
        examine(where, cost.rate, row, shapes=((), (num,)), returns=said, rows=len(bars))
        there = bars.present & np.isfinite(bars.close)
        with float64_on_cpu(), own_code(where):
            for size in (*SIZES, *(-size for size in SIZES)):
                tried = trade._replace(traded=np.full(there.shape, size))
                found = jax.vmap(lambda one, rate=cost.rate: jnp.asarray(rate(one)))(tried)
                # One rate per bar, or one per bar and asset.
                rate = np.broadcast_to(np.asarray(found).reshape(len(there), -1), there.shape)
                wrong = there & ~(np.isfinite(rate) & (cost.rebate | (rate >= 0.0)))
                if wrong.any():
                    _refuse(where, bars, wrong, rate, size)


def has_slope(trade: Trade, costs: Costs) -> bool:
    """Return whether own costs have finite derivatives, at orders of zero and of other sizes."""

    def paid(traded: Any) -> Any:
        return sum(
            (abs(traded) * rate).sum() for rate in own_rates(trade._replace(traded=traded), costs)
        )

    sizes = (0.0, *SIZES, *(-size for size in SIZES))
    slopes = [jax.grad(paid)(jnp.full(np.shape(trade.price), size)) for size in sizes]
    return bool(jnp.isfinite(jnp.stack(slopes)).all())


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
