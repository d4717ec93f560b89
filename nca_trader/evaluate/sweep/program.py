"""The program of a sweep: one scan over bars, batched over combinations of parameters.

What does not depend on a parameter is computed once per bar: prices, returns, and the state of
`agents.rolling`. Signals are decided in float64, as in a backtest, so that no crossing flips; the
account may be of float32 pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.config import AccountConfig
from nca_trader.envs.account import exits
from nca_trader.envs.account.state import Account, BarReturns, log_return, open_account
from nca_trader.evaluate.evidence.inference import block_length
from nca_trader.evaluate.simulate import legs_between, step_of, strategy_step
from nca_trader.evaluate.sweep.sums import (
    AccountSums,
    add_fill,
    add_gain,
    add_return,
    ended,
    is_position,
    open_sums,
)
from nca_trader.numerics import as_one_kernel
from nca_trader.runs.trials import ordered_terms, places
from nca_trader.strategies import rolling
from nca_trader.strategies import rules as rule_module
from nca_trader.strategies.strategy import Strategy, sized_by_covariance, until_sized
from nca_trader.types import Bar, Bars

WIDEST = 1024  # combinations of one program: their state stays in a core's cache
# Combinations times assets of one kernel: XLA cannot compile larger arrays in it.
LARGEST = 4096


class Blocks(NamedTuple):
    """Bars `[blocks, length, ...]` as the program scans them; the last block is filled up.

    real: `[blocks, length]` bool, False for bars that fill up. They are not present, so that
    nothing trades or moves in them. place: `[blocks, length, A]` uint32, see `trials.places`.
    """

    bar: Bar
    legs: BarReturns
    real: np.ndarray
    place: np.ndarray


class SweepOutput(NamedTuple):
    """What a program returns for each combination `[M]`.

    log_equity: at the last close, float64. sums: over bars. blocks: `[blocks, M]` float32,
    simple returns summed over the bars of each block.
    """

    log_equity: Any
    sums: Any
    blocks: Any


def in_blocks(bars: Bars, rules: AccountConfig, dtype: Any, most: int) -> Blocks:
    """Cut bars into at most `most` blocks of equal length; returns are cast to `dtype`."""
    length = block_length(len(bars), most)
    # How many bars the last block lacks.
    short = -len(bars) % length

    def cut(x: Any, fill: Any = None) -> np.ndarray:
        x = np.asarray(x)
        if short:
            last = x[-1:] if fill is None else np.full_like(x[-1:], fill)
            x = np.concatenate([x, np.repeat(last, short, axis=0)])
        return x.reshape(-1, length, *x.shape[1:])

    bar = bars.as_bar()
    fields = {k: jax.tree.map(cut, x) for k, x in bar._asdict().items() if x is not None}
    fields["present"] = cut(bar.present, False)
    legs = legs_between(bars, rules, 0, len(bars))
    narrow = jax.tree.map(lambda x: x.astype(dtype) if x.dtype == np.float64 else x, legs)
    # A price of 1 and returns of 0 in the bars that fill up; none of them is used.
    padded = {
        name: cut(x, 1 if name in ("open", "close") else 0)
        for name, x in narrow._asdict().items()
        if x is not None
    }
    real, place = np.ones(len(bars), bool), places(len(bars), bars.num_assets)
    return Blocks(Bar(**fields), BarReturns(**padded), cut(real, False), cut(place, 0))


class Given(NamedTuple):
    """What a program is compiled for.

    rule: returns the strategy of a combination. traced: names of the parameters that are values of
    the program. fixed: names and values of the others. sees_account: the strategy sees its
    portfolio, or orders exits. rules: of the account. dtype: of the account, "float32" or
    "float64". longest: the longest period of an indicator, see `rolling.longest`. width: the
    combinations of a program.
    """

    rule: Callable[..., Strategy]
    traced: tuple[str, ...]
    fixed: tuple[tuple[str, Any], ...]
    sees_account: bool
    rules: AccountConfig
    dtype: str
    longest: int
    width: int


_COMPILED: dict[Any, Any] = {}  # programs by what they were compiled for, the oldest first
KEPT = 16


def compile_program(
    make: Callable[[Given], Any], given: Given, values: dict[str, Array], blocks: Blocks
) -> Any:
    """Return the compiled program of `make` for arguments of these shapes."""
    leaves = jax.tree.leaves((values, blocks))
    key = (make, given, *((x.shape, x.dtype.name) for x in leaves))
    if key not in _COMPILED:
        # Compiled ahead: jit would hold each program for as long as the process lives.
        _COMPILED[key] = make(given).lower(values, blocks).compile()
        if len(_COMPILED) > KEPT:
            _COMPILED.pop(next(iter(_COMPILED)))
    return _COMPILED[key]


def _scan_of(given: Given, strategy: Strategy, step: Callable, num_assets: int) -> Callable:
    """Return the scan `(carry, block) -> carry` of one block, as few kernels as is safe.

    XLA's compiler aborts the whole process on some programs of a single kernel, which cannot be
    caught. Rules that ship, and accounts without limits and holding charges, are tested as one
    kernel. A user's decisions are scanned first, the ordinary way, and the account after them. An
    account that the strategy sees cannot wait for its decisions.
    """

    def whole(carry: Any, block: Blocks) -> Any:
        return jax.lax.scan(step, carry, (block, None))[0]

    def decided_first(carry: Any, block: Blocks) -> Any:
        account, book, state, sums = carry
        state, orders = jax.lax.scan(
            lambda state, bar: strategy.decide(state, bar, None), state, block.bar
        )
        account, book, _, sums = by_orders((account, book, (), sums), (block, orders))
        return account, book, state, sums

    @as_one_kernel
    def by_orders(carry: Any, xs: tuple[Blocks, exits.Order]) -> Any:
        return jax.lax.scan(step, carry, xs)[0]

    large = given.width * num_assets > LARGEST
    if large or not given.rules.plain or given.rules.costs.carries:
        return whole
    if getattr(given.rule, "__module__", "") == rule_module.__name__:
        return as_one_kernel(whole)
    return whole if strategy.sees_portfolio else decided_first


def _begun(
    given: Given, values: dict[str, Array], blocks: Blocks
) -> tuple[Strategy, Any, Callable]:
    """Return the strategy of one combination, what its scan begins with, and its step."""
    # Here the rule sees traced numbers, so one program serves every combination.
    strategy = given.rule(**{name: values[name] for name in given.traced}, **dict(given.fixed))
    strategy = until_sized(strategy, given.rules.scale).with_delay(given.rules.delay)
    strategy = sized_by_covariance(strategy, given.rules.covariance)
    num_assets, dtype = blocks.bar.close.shape[-1], given.dtype
    account = open_account(jnp.zeros(num_assets, dtype), given.rules)
    # Without a book of entries, prices and ages need no memory.
    book = exits.open_book(num_assets, blocks.bar.close.dtype) if given.sees_account else ()
    state = jax.tree.map(jnp.asarray, strategy.init(num_assets))
    step = functools.partial(_step, strategy=strategy, rules=given.rules)
    return strategy, (account, book, state, open_sums(num_assets, dtype)), step


def program(given: Given) -> Any:
    """Return the jitted program `(values by name [M], blocks) -> SweepOutput`."""

    def one(values: dict[str, Array], blocks: Blocks) -> SweepOutput:
        with rolling.periods_up_to(given.longest):
            strategy, carry, step = _begun(given, values, blocks)
            inner = _scan_of(given, strategy, step, blocks.place.shape[-1])

            def outer(carry: Any, block: Blocks) -> tuple[Any, Array]:
                before = carry[-1].total
                carry = inner(carry, block)
                return carry, (carry[-1].total - before).astype(jnp.float32)

            (account, _, _, sums), block_sums = jax.lax.scan(outer, carry, blocks)
            # The low half of the pair is below the digits of float32.
            high = account.log_equity.astype(jnp.float64)
            log_equity = high + account.log_equity_low
            return SweepOutput(log_equity, ended(sums, account.held), block_sums)

    return jax.jit(_mapped(one, given.width, SweepOutput(0, 0, 1)))


def _mapped(one: Callable, width: int, out_axes: Any) -> Callable:
    # The width is stated: where no parameter is a number, no value has that axis.
    return jax.vmap(one, in_axes=(0, None), out_axes=out_axes, axis_size=width)


def program_of_returns(given: Given) -> Any:
    """Return the jitted program `(values by name [M], blocks) -> [2, M, N]`, returns of each bar.

    The first are simple returns, the second those in excess of the interest on cash. Bars that fill
    up the last block come last.
    """

    def one(values: dict[str, Array], blocks: Blocks) -> Array:
        with rolling.periods_up_to(given.longest):
            _, carry, step = _begun(given, values, blocks)

            def scan(carry: Any, block: Blocks) -> Any:
                after, _ = step(carry, (block, None))
                plain = jnp.expm1(log_return(carry[0], after[0])).astype(jnp.float64)
                return after, jnp.stack([plain, after[-1].total - carry[-1].total])

            whole = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), blocks)
            return jax.lax.scan(scan, carry, whole)[1].T

    return jax.jit(_mapped(one, given.width, 1))


def _step(
    carry: tuple[Account, Any, Any, AccountSums],
    xs: tuple[Blocks, exits.Order | None],
    strategy: Strategy,
    rules: AccountConfig,
) -> tuple[tuple[Account, Any, Any, AccountSums], None]:
    """Run one bar of one combination, whose order is given or else decided here."""
    before, book, state, sums = carry
    (bar, legs, real, key), order = xs
    if book:
        carried = (before, book, state)
        (account, book, state), row = strategy_step(
            carried, legs, bar, strategy, rules, order=order
        )
    else:
        if order is None:
            state, order = strategy.decide(state, bar, None)
        # Decided in float64, and rounded once to the account's dtype.
        target = (order.target * order.size).astype(before.weight.dtype)
        account, row, _ = step_of(before, legs, lambda now: (now, target, ()), rules)
    effects, traded = row.effects, sums.turnover
    sums = add_gain(sums, effects.overnight)
    for fill in (effects.called_at_open, effects.at_open):
        sums = sums if fill is None else add_fill(sums, fill)
    sums = add_gain(sums, effects.intraday)
    for fill in (effects.inside, effects.called_at_close, effects.at_close):
        sums = sums if fill is None else add_fill(sums, fill)
    # A position may begin and end inside one bar.
    held = is_position(account.held).any()
    active = real & (is_position(before.held).any() | held | (sums.turnover > traded))
    interest = None
    if legs.years is not None and (rules.costs.interest_lend or rules.costs.interest_borrow):
        interest = effects.flows.interest / sums.equity.astype(before.weight.dtype)
    # The weight before its size is what has to be a valid weight.
    ordered = row.target if legs.size is None else row.target / legs.size
    ordered = jnp.where(jnp.isnan(ordered), 0.0, jnp.abs(ordered)).max()
    narrow = row.target.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(narrow, jnp.uint32)
    low, high = ordered_terms(narrow, bits, key, row.left)
    sums = sums._replace(
        low=sums.low + jnp.where(real, low, 0).sum(dtype=jnp.uint32),
        high=sums.high + jnp.where(real, high, 0).sum(dtype=jnp.uint32),
        held=sums.held + (real & held),
        largest=jnp.maximum(sums.largest, ordered.astype(jnp.float64)),
    )
    log_equity = account.log_equity.astype(jnp.float64) + account.log_equity_low
    sums = add_return(sums, log_return(before, account), log_equity, interest, active)
    return (account, book, state, sums), None
