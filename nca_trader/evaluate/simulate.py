"""One account over real bars in float64, ordered by targets or by a trained agent.

The account's step is `envs.account`, scanned; an agent reads features from the same scan that
trained it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.agents.base import base_of
from nca_trader.config import AccountConfig
from nca_trader.envs.account import exits
from nca_trader.envs.account.effects import LIQUIDATED, NONE, Effects, Flows
from nca_trader.envs.account.exits import Book, Order
from nca_trader.envs.account.risk import apply_size, sizes
from nca_trader.envs.account.state import Account, BarReturns, legs_of, open_account
from nca_trader.envs.account.step import on_bar, place
from nca_trader.envs.market import features_of, observed_states
from nca_trader.envs.rewards import begin_account, remember, up_to_first
from nca_trader.errors import BarError
from nca_trader.markets import Task
from nca_trader.numerics import (
    LEAST_BARS,
    MOST_ASSETS,
    arrays,
    as_one_kernel,
    float64_on_cpu,
    row_sums,
)
from nca_trader.progress import track
from nca_trader.runs.manifest import Run
from nca_trader.strategies.strategy import Strategy
from nca_trader.strategies.targets import strategy_faults
from nca_trader.types import Bar, Bars, Tensor

if TYPE_CHECKING:
    # Flax is not imported for a rule.
    from nca_trader.agents.policy import Params, Policy

CHUNK = 2048  # bars encoded at once: bounds memory for a history of any length
NEAR = 0.01  # of the range of weights: continuous orders that are at most this far apart agree


class Trace(NamedTuple):
    """The account at each bar, `[N]` or `[N, A]` float64, as of the close of the bar.

    Attributes:
      log_equity: high part plus low part.
      weight: high part plus low part.
      target: the weights ordered; NaN means no order.
      effects: what it did in the bar.
      limited: `[N, A]` int8, the risk limit that cut or denied each order, a place in
        `account.risk.CODES`; None without limits.
      halted: `[N]` int8, the limit that stopped trading, likewise.
    """

    log_equity: Tensor
    weight: Tensor
    target: Tensor
    effects: Effects
    limited: Tensor | None = None
    halted: Tensor | None = None

    @property
    def kept(self) -> Trace:
        """The entry of a bar without what only a sweep reads."""
        effects = self.effects._replace(overnight=None, intraday=None, growth=None)
        return self._replace(effects=effects)

    @property
    def flows(self) -> Flows:
        """Where equity went."""
        return self.effects.flows

    @property
    def turnover(self) -> Tensor:
        """`[N]` sum of absolute traded notional, as a fraction of equity."""
        return np.sum([row_sums(np.abs(fill.traded)) for fill in self.effects.fills], axis=0)

    @property
    def cost(self) -> Tensor:
        """`[N]` cost of trading, as a fraction of equity."""
        return np.sum([row_sums(fill.cost) for fill in self.effects.fills], axis=0)

    @property
    def small(self) -> int:
        """The number of orders that were not sent, see `AccountFill`."""
        return int(sum(np.sum(x.small) for x in self.effects.fills if x.small is not None))

    @property
    def left(self) -> Tensor | None:
        """`[N, A]` uint32, why a position was closed inside the bar, and at which level; 0: not.

        None where no position can be.
        """
        inside = self.effects.inside
        if inside is None:
            return None
        xp = arrays(inside.reason)
        by_level = (inside.reason != NONE) & (inside.reason != LIQUIDATED)
        # In float32, in which a sweep may have its account.
        price = xp.where(by_level, inside.price, 0.0).astype(np.float32)
        bits = price.view(np.uint32)
        return bits + inside.reason.astype(np.uint32)


def _kept(x: Array) -> np.ndarray:
    """Return an array of numpy; one of zeros, e.g. of what is not charged, takes no memory."""
    found = np.asarray(x)
    return found if found.any() else np.broadcast_to(np.zeros((), found.dtype), found.shape)


def legs_between(bars: Bars, rules: AccountConfig, first: int, last: int) -> BarReturns:
    """Return the parts of bars first .. last - 1; the account opens at the first close."""
    legs = jax.tree.map(lambda leg: leg[first:last], legs_of(bars, rules))
    if legs.years is not None:
        # Time before the first close earns no interest. The overnight return before it has no
        # effect, because the account is flat.
        years = legs.years.copy()
        years[0] = 0.0
        legs = legs._replace(years=years)
    return legs


def step_of(
    account: Account, legs: BarReturns, decide: Callable, rules: AccountConfig
) -> tuple[Account, Trace, Any]:
    """Run one bar of a backtest: the bar moves the account, which then orders at its close.

    Args:
      account: at the close of the bar before.
      legs: of the bar.
      decide: `(account) -> (account, target [A], seen)` at the close.
      rules: of the account.

    Returns:
      The account at the close, the bar's entry, and what `decide` has seen.
    """
    account, effects = on_bar(account, legs, rules)
    moved, target, seen = decide(account)
    account, fill = place(moved, target, legs.at_close, rules)
    row = _row(account, target, effects.closed(moved, account, fill), legs, rules)
    return account, row, seen


def _row(
    account: Account, target: Array, effects: Effects, legs: BarReturns, rules: AccountConfig
) -> Trace:
    """Return the entry of a bar at whose close `target` was ordered."""
    return Trace(
        # The pair is summed here, in float64; the account keeps it apart for float32 in training.
        log_equity=account.log_equity + account.log_equity_low,
        weight=account.held,
        target=apply_size(target, legs.size, rules.size_cap),  # as `place` does
        effects=effects,
        limited=account.guard.limited if account.guard else None,
        halted=account.guard.halted if account.guard else None,
    )


def exit_step(
    carry: tuple[Account, Book],
    legs: BarReturns,
    bar: Bar,
    decide: Callable,
    rules: AccountConfig,
) -> tuple[tuple[Account, Book], Trace, Any]:
    """Run one bar of a backtest as `step_of`, of an account that is left inside bars at levels.

    Args:
      carry: the account at the close of the bar before, and its book.
      legs: of the bar.
      bar: `[A]` fields.
      decide: `(account, book) -> (account, order, seen)` at the close.
      rules: of the account.
    """
    account, book, effects = exits.on_bar(*carry, bar, legs, rules)
    moved, order, seen = decide(account, book)
    account, book, fill, weights = exits.place_order(moved, book, order, bar, legs, rules)
    row = _row(account, weights, effects.closed(moved, account, fill), legs, rules)
    return (account, book), row, seen


@jax.jit
def _scan_orders(legs: BarReturns, bars: Bar, orders: Order, rules: AccountConfig) -> Trace:
    """Scan an account that gives orders `[N, A]` over bars, with levels of its own or theirs."""

    def step(carry, xs):
        legs_t, bar, order = xs
        carry, row, _ = exit_step(carry, legs_t, bar, lambda a, _: (a, order, ()), rules)
        return carry, row.kept

    num_assets = orders.target.shape[1]
    account = open_account(jnp.zeros(num_assets, orders.target.dtype), rules)
    book = exits.open_book(num_assets, bars.close.dtype)
    return jax.lax.scan(step, (account, book), (legs, bars, orders))[1]


@jax.jit
def scan_targets(legs: BarReturns, targets: Array, rules: AccountConfig) -> Trace:
    """Scan an account over bars of the parts `legs`, which orders `targets` `[N, A]`."""

    def step(account, xs):
        legs_t, target = xs
        account, row, _ = step_of(account, legs_t, lambda a: (a, target, ()), rules)
        return account, row.kept

    def scan(account, xs):
        return jax.lax.scan(step, account, xs)[1]

    account = open_account(jnp.zeros(targets.shape[1], targets.dtype), rules)
    run = as_one_kernel(scan) if _is_tested(legs, rules) else scan
    return run(account, (legs, targets))


def _is_tested(legs: BarReturns, rules: AccountConfig) -> bool:
    """Whether an account is one of those that are tested as one kernel.

    XLA aborts the process on some programs of a single kernel, e.g. of one bar, and an abort cannot
    be caught. So only these few are compiled so: without limits and holding charges.
    """
    fields = {name for name, x in legs._asdict().items() if x is not None}
    num_bars, num_assets = legs.overnight.shape
    return (
        rules.plain
        and fields == {"overnight", "intraday", "present"}
        and num_bars >= LEAST_BARS
        and num_assets <= MOST_ASSETS
    )


def simulate_targets(
    bars: Bars, targets: Tensor | Order, rules: AccountConfig, first: int, last: int
) -> Trace:
    """Run an account over rows first .. last - 1 that orders `targets` `[N, A]`.

    Those of an `Order` have levels or sizes of their own, `[N, A]` each; its size is not None.
    """
    # The targets are late already; another delay would compile another program.
    prompt, during = dataclasses.replace(rules, delay=0), slice(first, last)
    with float64_on_cpu():
        legs = legs_between(bars, rules, first, last)
        if isinstance(targets, Order) or rules.has_exits:
            orders = targets if isinstance(targets, Order) else Order(targets)
            orders = orders._replace(size=np.broadcast_to(orders.size, orders.target.shape))
            now, orders = jax.tree.map(lambda x: x[during], (bars.as_bar(), orders))
            trace = _scan_orders(legs, now, orders, prompt)
        else:
            trace = scan_targets(legs, targets[during], prompt)
        return jax.tree.map(_kept, trace)


def strategy_step(
    carry: tuple[Account, Book, Any],
    legs: BarReturns,
    bar: Bar,
    strategy: Strategy,
    rules: AccountConfig,
    held_over: Array | None = None,
    order: Order | None = None,
) -> tuple[tuple[Account, Book, Any], Trace]:
    """Run one bar of a strategy that sees its account, or whose orders have exits.

    Args:
      carry: the account, its book, and the strategy's state.
      legs: of the bar.
      bar: `[A]` fields.
      strategy: decides at the bar's close.
      rules: of the account.
      held_over: `[A]` targets that are ordered where the strategy gives none; NaN for none.
      order: that was decided before; None decides here.

    Returns:
      The next carry, and the bar's entry.
    """
    account, book, state = carry

    def at_close(account: Account, book: Book) -> tuple[Account, Order, Any]:
        after, asked = state, order
        if asked is None:
            after, asked = strategy.decide(state, bar, exits.portfolio(account, book))
        if held_over is not None:
            target = jnp.where(jnp.isnan(asked.target), held_over, asked.target)
            asked = asked._replace(target=target)
        return account, asked, after

    now, row, state = exit_step((account, book), legs, bar, at_close, rules)
    return (*now, state), row


@functools.partial(jax.jit, static_argnums=3)
def _scan_strategy(
    legs: BarReturns, bars: Bar, before: Bar, strategy: Strategy, rules: AccountConfig
) -> Trace:
    """Scan a strategy: bars `before` the account opens warm it up, then it trades `bars`."""
    num_assets = bars.close.shape[1]
    account = open_account(jnp.zeros(num_assets, legs.intraday.dtype), rules)
    book = exits.open_book(num_assets, bars.close.dtype)
    flat = exits.portfolio(account, book, trading=False)

    def warm(carry, bar):
        state, last = carry
        state, order = strategy.decide(state, bar, flat)
        return (state, jnp.where(jnp.isnan(order.target), last, order.target)), None

    never = jnp.full(num_assets, jnp.nan, bars.close.dtype)
    (state, last), _ = jax.lax.scan(warm, (strategy.init(num_assets), never), before)

    def step(carry, xs):
        trading, held_over = carry
        after, row = strategy_step(trading, xs[0], xs[1], strategy, rules, held_over)
        # The order in force before the first bar is repeated there, and nowhere else.
        return (after, never), row.kept

    start = ((account, book, state), last)
    return jax.lax.scan(step, start, (legs, bars))[1]


def simulate_strategy(
    bars: Bars, strategy: Strategy, rules: AccountConfig, first: int, last: int
) -> Trace:
    """Run an account over rows first .. last - 1 that a strategy orders, which may see it.

    Raises:
      ConfigError: the strategy raises, or branches on a traced value; see `strategy_targets`.
    """
    with float64_on_cpu():
        legs = legs_between(bars, rules, first, last)
        bar = bars.as_bar()
        before, during = (
            jax.tree.map(lambda x, rows=rows: jnp.asarray(x[rows]), bar)
            for rows in (slice(0, first), slice(first, last))
        )
        with strategy_faults(bars[:last], strategy):
            trace = _scan_strategy(legs, during, before, strategy, rules)
            return jax.tree.map(_kept, trace)


def encode(
    policy: Policy, params: Any, features: np.ndarray, present: np.ndarray, start: int = 0
) -> np.ndarray:
    """Encode the bars from row `start` on, in chunks with the halo that they need.

    Returns:
      Cells `[N - start, A, C]` float32, bit for bit the same whatever `start` is.
    """
    halo = policy.receptive_field - 1
    function = jax.jit(policy.encode)
    pieces, begins = [], range(start // CHUNK * CHUNK, len(features), CHUNK)
    for begin in track(begins, "encode bars", "chunks"):
        first, end = max(begin - halo, 0), min(begin + CHUNK, len(features))
        # One shape for all chunks, so one compilation. A bar has one place in its chunk, however
        # many bars follow it, because a matrix product may round its rows by their place.
        pad = ((halo - (begin - first), begin + CHUNK - end), (0, 0))
        x = np.pad(features[first:end], (*pad, (0, 0)))
        m = np.pad(present[first:end], pad)
        cells = function(params, x[None], m[None])[0, halo : halo + end - begin]
        pieces.append(np.asarray(cells))
    return np.concatenate(pieces)[start - begins.start :]


def simulate_agent(
    source: Bars | Task,
    run: Run,
    params: tuple[Params, ...],
    rules: AccountConfig,
    first: int,
    last: int,
) -> tuple[Trace, tuple[np.ndarray, ...], np.ndarray]:
    """Run an account over rows first .. last - 1 that a run's agent orders greedily.

    Args:
      source: bars, or the synthetic task that they come from.
      run: gives the policy and the environment.
      params: the first set decides. The others see the same account, and give logits only.
      rules: of the account.
      first: the first row to trade; bars before it are history.
      last: the row after the last.

    Returns:
      The trace; the logits `[last - first, A, n]` of each set of parameters, NaN where the agent
      does not decide yet; and `[last - first, A]` its targets before they were sized.

    Raises:
      BarError: bars of symbols that the run does not trade, or too few for it to decide.
    """
    policy, legs, cells = _shown(source, run, params, rules, first, last)
    # Before its features and receptive field are full the agent holds what it has.
    ready = np.arange(first, last) >= policy.first_decision
    bars = source.bars if isinstance(source, Task) else source
    with float64_on_cpu():
        prompt = dataclasses.replace(rules, delay=0)
        during = bars[first:last].as_bar() if rules.has_exits else None
        found = _scan_agent(params, legs, cells, ready, policy, prompt, bars=during)
        return jax.tree.map(_kept, found)


def _shown(
    source: Bars | Task,
    run: Run,
    params: tuple[Params, ...],
    rules: AccountConfig,
    first: int,
    last: int,
) -> tuple[Policy, BarReturns, tuple[np.ndarray, ...]]:
    """Return a run's policy, and what it sees in rows first .. last - 1, see `simulate_agent`."""
    bars = source.bars if isinstance(source, Task) else source
    run = run.on(bars)
    policy = run.policy
    refuse_short(bars, policy, last)
    states = observed_states(source, run.env_config, run.spec.states)
    features = features_of(bars[:last], run.env_config, states[:last], policy.spec.bar_seconds)
    # Before float64 is on: training and the live loop encode in float32 too.
    cells = tuple(encode(policy, p, features, bars.present[:last], first) for p in params)
    with float64_on_cpu():
        legs = legs_between(bars, rules, first, last)
        if rules.covariance is not None:
            legs = legs._replace(size=sizes(bars[:last], rules.covariance, first))
        if (base := base_of(policy.spec)) is not None:
            legs = legs._replace(base=base.column(bars[:last])[first:])
    return policy, legs, cells


def refuse_short(bars: Bars, policy: Policy, last: int) -> None:
    """Raise BarError where the `last` first bars are too few for a decision."""
    if last <= policy.first_decision:
        raise BarError(
            f"{bars.source or 'bars'}: {last} bars, but the agent decides from bar "
            f"{policy.first_decision + 1} on ({policy.spec.warmup} of feature warm-up and a "
            f"receptive field of {policy.receptive_field}); give more bars before the span."
        )


MOVING = (
    "overnight",
    "intraday",
    "dividend",
    "funding",
    "years",
    "delisted",
    "moved",
    "low",
    "high",
)


def decide_last(
    bars: Bars, run: Run, params: Params, weight: np.ndarray, ordered: np.ndarray
) -> np.ndarray:
    """Return the target `[A]` at the last close of an account, bit for bit that of a backtest.

    Args:
      bars: N bars of A assets; all are history of the last.
      run: an agent's, whose reward has no memory.
      params: of `run.policy`.
      weight: `[A]` held at that close, before the decision.
      ordered: `[A]` the last target weights that were ordered.

    Raises:
      BarError: bars of symbols that the run does not trade, or too few for it to decide.
      ConfigError: the agent observes the state of a synthetic market.
    """
    rules, last = run.account, len(bars)
    policy, legs, cells = _shown(bars, run, (params,), rules, last - 1, last)
    with float64_on_cpu():
        # The account is as it stands at the close: this bar must not move it again.
        moving = {name: getattr(legs, name) for name in MOVING}
        still = {name: np.zeros_like(x) for name, x in moving.items() if x is not None}
        # Twice, since a loop of one turn is compiled as no loop, which may round otherwise.
        both = jax.tree.map(lambda x: np.repeat(x, 2, axis=0), (legs._replace(**still), cells))
        ready, held = np.ones(2, bool), (weight, ordered)
        found = _scan_agent((params,), *both, ready, policy, rules, held)
        return np.asarray(found[0].target[0])


@functools.partial(jax.jit, static_argnums=4)
def _scan_agent(
    params: tuple[Params, ...],
    legs: BarReturns,
    cells: tuple[Array, ...],
    ready: Array,
    policy: Policy,
    rules: AccountConfig,
    held: tuple[Array, Array] | None = None,
    bars: Bar | None = None,
) -> tuple[Trace, tuple[Array, ...], Array]:
    """Decide greedily at every `ready` `[N]` bar, from `cells` `[N, A, C]` and the account.

    The account begins flat, or with what is `held` and what was last ordered, `[A]` each. `bars`
    are those of an account that has levels.
    """
    from nca_trader.agents.policy import decide  # imports Flax, 0.3 s

    spec = policy.spec

    def step(carry: tuple[Account, Any], xs):
        legs_t, cells_t, ready_t, first_t, bar = xs

        def at_close(account: Account) -> tuple[Account, Array, Any]:
            account = remember(spec, account, first_t)
            several = zip(params, cells_t, strict=True)
            logits = [decide(policy, p, c, account).logits for p, c in several]
            target = jnp.where(ready_t, policy.target(logits[0], account), jnp.nan)
            seen = tuple(jnp.where(ready_t, x, jnp.nan) for x in logits)
            return account, target, (seen, target)

        def ordered_at_close(account: Account, book: Book) -> tuple[Account, Order, Any]:
            account, target, seen = at_close(account)
            return account, Order(target), seen

        account, book = carry
        if bars is None:
            account, row, (logits, target) = step_of(account, legs_t, at_close, rules)
        else:
            (account, book), row, (logits, target) = exit_step(
                (account, book), legs_t, bar, ordered_at_close, rules
            )
        return (account, book), (row.kept, logits, target)

    flat = jnp.zeros(spec.num_assets, jnp.float64)
    weight, ordered = (flat, flat) if held is None else held
    account = begin_account(spec, open_account(weight, rules)._replace(ordered=ordered))
    book = None if bars is None else exits.open_book(spec.num_assets, bars.close.dtype)
    xs = (legs, cells, ready, up_to_first(ready), bars)
    return jax.lax.scan(step, (account, book), xs)[1]


class Agreement(NamedTuple):
    """How far two sets of parameters of one agent decide alike.

    Attributes:
      share: of decisions that agree: the most probable action is the same, both being shown the
        account of the first set.
      decisions: how many, bars times assets.
      equity: at the end, of 1 at the start, that each set earns with an account of its own.
    """

    share: float
    decisions: int
    equity: tuple[float, float]

    @property
    def difference(self) -> float:
        """The second set's final equity, relative to the first's."""
        return self.equity[1] / self.equity[0] - 1.0


def agreement(source: Bars | Task, run: Run, params: Params, other: Params) -> Agreement:
    """Run the agent of `run` over all bars with `params` and with `other`, at the run's costs.

    Raises:
      BarError: bars of symbols that the run does not trade, or too few for a decision.
    """
    bars = source.bars if isinstance(source, Task) else source
    run = run.on(bars)
    policy, spec, num_bars = run.policy, run.policy.spec, len(bars)
    common = (run.account, 0, num_bars)
    # Both decide on the account of the first. With separate accounts, one decision that differs
    # would make all later ones differ.
    trace, logits, _ = simulate_agent(source, run, (params, other), *common)
    alone, *_ = simulate_agent(source, run, (other,), *common)
    chosen = policy.distribution
    width = chosen.outputs(spec)
    num_agents = logits[0].shape[-1] // width
    shape = (-1, spec.num_assets, num_agents, width)
    own, others = (
        # The mean over the agents, where several act.
        np.asarray(chosen.order(spec, chosen.mode(jnp.asarray(x)))).mean(-1)
        for x in (x[policy.first_decision :].reshape(*shape) for x in logits)
    )
    low, high = spec.action_bounds
    near = 0.5 / num_agents if spec.num_actions else NEAR * (high - low)
    same = np.abs(own - others) <= near
    ours, theirs = (float(np.exp(np.asarray(t.log_equity)[-1])) for t in (trace, alone))
    return Agreement(float(same.mean()), same.size, (ours, theirs))
