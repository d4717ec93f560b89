"""One bar of a paper session as a pure function: bar in, decision and orders out.

No file, no venue, no clock: the same state, bar and view of the account give the same outcome, in
a session and when it is repeated from its journal.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from nca_trader.config import AccountConfig
from nca_trader.envs.account import exits
from nca_trader.envs.account import step as accounting
from nca_trader.envs.account.effects import AccountFill
from nca_trader.envs.account.exits import Book
from nca_trader.envs.account.fills import cap
from nca_trader.envs.account.risk import (
    alone_of,
    apply_next_size,
    before_sizes,
    is_denied,
    next_size,
)
from nca_trader.envs.account.state import (
    FILLED,
    REST,
    WHOLE,
    Account,
    BarReturns,
    Quote,
    next_legs,
)
from nca_trader.numerics import float64_on_cpu
from nca_trader.paper.venue import Fill, TargetOrder, client_id
from nca_trader.runs.reference import Reference
from nca_trader.types import Bar

_entered = jax.jit(exits.book_fill)
_aged = jax.jit(exits.close_bar)


class Programs(NamedTuple):
    """Compiled functions of one account.

    on_bar: `(account, legs) -> account` at the close of a bar. of_book: the same of an account and
    its book, `(account, book, bar, legs) -> account, book`. place: `(account, target, quote) ->
    account, [A]` weights ordered within the caps; orders without filling, also where orders fill at
    the close, as the broker is sent the orders. trade: `(account, quote) -> account, fill`.
    """

    on_bar: Callable[..., Account]
    of_book: Callable[..., tuple[Account, Book]]
    place: Callable[..., tuple[Account, Array]]
    trade: Callable[..., tuple[Account, AccountFill]]


@functools.lru_cache(maxsize=64)
def programs(rules: AccountConfig) -> Programs:
    """Compile the functions of an account. What its costs and rules leave out is not compiled."""

    # What a caller does not need is not returned: the effects of a fill are 15 arrays.
    def on_bar(account: Account, legs: BarReturns) -> Account:
        return accounting.on_bar(account, legs, rules)[0]

    def of_book(account: Account, book: Book, bar: Bar, legs: BarReturns) -> tuple[Account, Book]:
        # Without levels in the book nothing leaves inside the bar.
        return exits.on_bar(account, book, bar, legs, rules)[:2]

    def place(account: Account, target: Array, quote: Quote) -> tuple[Account, Array]:
        unfilled = dataclasses.replace(rules, fill="next_open")
        placed, _ = accounting.place(account, target, quote, unfilled)
        return placed, cap(placed.ordered, unfilled)

    def trade(account: Account, quote: Quote) -> tuple[Account, AccountFill]:
        account, fill = accounting.trade(account, quote, rules)
        effects: Any = (fill.traded, fill.cost, None)
        return account, AccountFill(*effects)

    return Programs(*map(jax.jit, (on_bar, of_book, place, trade)))


class Decision(NamedTuple):
    """What an agent decides at a close.

    target: `[A]` weights; NaN for no order. logits: `[A, n]` and action: `[A]`, of a policy alone.
    usable: whether the numbers were finite, so that they may be acted upon. features: `[A, F]`
    that a policy saw in this bar; not in the journal. parts: `[A]` what each part of a blend
    ordered, by name; NaN for nothing, and infinite where it could not decide.
    """

    target: np.ndarray
    logits: np.ndarray | None = None
    action: np.ndarray | None = None
    usable: bool = True
    features: np.ndarray | None = None
    parts: Mapping[str, np.ndarray] | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The arrays by name, for the journal."""
        arrays = {"target": self.target, "logits": self.logits, "action": self.action}
        found: dict[str, Any] = {name: x for name, x in arrays.items() if x is not None}
        if self.parts is not None:
            found["parts"] = dict(self.parts)
        return found

    @property
    def fault(self) -> dict[str, Any]:
        """The body of the event of a decision that is not a number; names the blend's parts."""
        unfit = [name for name, row in (self.parts or {}).items() if np.isinf(row).any()]
        return {"code": "policy-not-finite"} | ({"parts": unfit} if unfit else {})


class Usual(NamedTuple):
    """What an agent is used to; None is not watched.

    features: of its training bars. turnover: the lowest and the highest mean turnover per bar of
    WINDOW bars of its backtest.
    """

    features: Reference | None = None
    turnover: tuple[float, float] | None = None


class Agent(NamedTuple):
    """What decides in a session; `subjects` makes it of a run, a strategy or a function of bars.

    symbols: the `A` assets, in order.
    begin: `() -> memory`, before the first bar.
    open: `() -> account`, flat, when trading begins.
    act: `(memory, bar, account, book, first) -> (memory, account, decision)`, one closed bar.
      `account` is as of this close, None before trading; then there is no decision. `first` is
      True at the first decision.
    first_decision: row of the first bar that may be decided at.
    sees_book: whether `act` needs a `Book`, the memory behind a `Portfolio`.
    rules: what the account is given. identity: what makes a session this one, e.g. hashes.
    features: names of what a policy sees. usual: what it is used to, see `paper.drift`. history:
    bars of each asset that a live session begins with at least. sized: whether targets have their
    sizes by covariance already.
    """

    symbols: tuple[str, ...]
    begin: Callable[[], Any]
    open: Callable[[], Account]
    act: Callable[
        [Any, Bar, Account | None, Book | None, bool], tuple[Any, Account | None, Decision | None]
    ]
    first_decision: int
    rules: AccountConfig
    identity: dict[str, Any]
    sees_book: bool = False
    features: tuple[str, ...] = ()
    usual: Usual = Usual()
    history: int = 0
    sized: bool = False

    @property
    def sizes(self) -> Any:
        """The sizes that the account multiplies targets by; None where it does not."""
        return self.rules.scale if self.sized else self.rules.sizes


class State(NamedTuple):
    """What one bar passes to the next.

    rows: bars seen. last: seconds of the last bar's open. close: `[A]` last closes, NaN before
    the first. missing: `[A]` bars missing in a row. memory: the agent's own. account: None before
    trading starts. book: of the account, where the agent sees it. working: the orders that wait,
    by symbol. sizes: the memory of sizes that follow the market.
    """

    rows: int
    last: int | None
    close: np.ndarray
    missing: np.ndarray
    memory: Any
    account: Account | None
    book: Book | None
    working: dict[str, TargetOrder]
    sizes: Any


class View(NamedTuple):
    """The account that an agent sees at a close; `Core.modelled` or `Core.reported` makes it.

    account: None where nothing is decided. book: of the account, where the agent sees it. owed:
    `[A]` earlier targets that are ordered where the agent gives none, NaN for none.
    """

    account: Account | None = None
    book: Book | None = None
    owed: np.ndarray | None = None


class Seen(NamedTuple):
    """An account at a bar's close, and what happened to it since the decision before.

    view: what the agent sees. value: in money. trades: `(asset, units, price)` of its own orders.
    moved: money traded. fills, cash: that the journal does not have yet. equity: as a fraction of
    the start's; None where the account says it.
    """

    view: View
    value: float
    trades: Sequence[tuple[int, float, float]] = ()
    moved: float = 0.0
    fills: Sequence[Fill] = ()
    cash: float = 0.0
    equity: float | None = None


class Observed(NamedTuple):
    """An account as its venue has it at a close.

    equity: as a fraction of the start's. weight: `[A]` held. waiting: `[A]` whether an order
    works. undone: `[A]` whether the last order ended without a try. traded: `[A]` since the last
    decision, as a fraction of equity. price: `[A]` mean price of that. value: in money. closed:
    `[A]` whether the venue itself closed the position since then, e.g. by a margin call.
    """

    equity: float
    weight: np.ndarray
    waiting: np.ndarray
    undone: np.ndarray
    traded: np.ndarray
    price: np.ndarray
    value: float
    closed: np.ndarray


class Response(NamedTuple):
    """What follows from a bar. decision: None before trading starts.

    working: every order that should be at the broker now. sent: those among them that are new.
    closed: `(client_id, reason)` of orders that no longer work.
    """

    decision: Decision | None = None
    working: tuple[TargetOrder, ...] = ()
    sent: tuple[TargetOrder, ...] = ()
    closed: tuple[tuple[str, str], ...] = ()


class Core:
    """The step function of one session.

    Args:
      agent: what to trade with.
      run: the session's hash, which its client ids carry.
      start: seconds since 1970 UTC before which nothing is decided; None is as early as can be.
    """

    def __init__(self, agent: Agent, run: str, start: int | None = None):
        self.agent, self.run = agent, run
        self._programs = programs(agent.rules)
        self._start = -(2**62) if start is None else start  # before any time in seconds
        self._handed: tuple[Any, Any] = (None, None)  # an account, and the same as jax's arrays

    def begin(self) -> State:
        """Return the state before the first bar."""
        num_assets = len(self.agent.symbols)
        return State(
            rows=0,
            last=None,
            close=np.full(num_assets, np.nan),
            missing=np.zeros(num_assets, int),
            memory=self.agent.begin(),
            account=None,
            book=None,
            working={},
            sizes=before_sizes(num_assets, self.agent.sizes),
        )

    def legs(self, state: State, bar: Bar) -> BarReturns:
        """Return the returns and prices of `bar` for an account after `state`, in float64 numpy.

        A first bar has returns 0, since there is no close before it.
        """
        seconds = 0 if state.last is None else int(bar.time[0]) - state.last
        missing = self.missing(state, bar)
        _, size = self._sizes(state, bar)
        return next_legs(state.close, bar, seconds, missing, self.agent.rules, size)

    def _sizes(self, state: State, bar: Bar) -> tuple[Any, Any]:
        """Return the memory of sizes after `bar`, and its sizes; None where they are fixed."""
        sizing = self.agent.sizes
        return (state.sizes, None) if sizing is None else next_size(state.sizes, bar, sizing)

    def missing(self, state: State, bar: Bar) -> np.ndarray:
        """Return `[A]` bars missing in a row, `bar` included; 0 before an asset's first."""
        present = np.asarray(bar.present)
        if present.all():
            return np.zeros(len(present), int)
        # An asset that was never there is not missing, and is not delisted either.
        gone = ~present & np.isfinite(state.close)
        return np.where(gone, state.missing + 1, 0)

    def modelled(self, state: State, bar: Bar, legs: BarReturns) -> View:
        """Return the account at the close of `bar` by the arithmetic of a backtest."""
        account, book = state.account, state.book
        if account is None:
            # The agent sees the bars before `start` in any case, and decides at none of them.
            return self._opened() if self.ready(state, bar) else View()
        if book is None:
            return View(self._run_account(self._programs.on_bar, account, legs))
        found = self._run_account(self._programs.of_book, account, book, bar, legs)
        return View(*found)

    def reported(self, state: State, bar: Bar, legs: BarReturns, seen: Observed) -> View:
        """Return the account at the close of `bar` as a venue has it."""
        account, book, _ = (
            self._opened() if state.account is None else View(state.account, state.book)
        )
        assert account is not None
        # An order that was never tried is forgotten, so that the same target is sent again; also
        # where the agent has nothing new to say, as its target is owed until it is filled.
        owed = np.where(seen.undone, account.ordered, np.nan)
        ordered = np.where(seen.undone, seen.weight, account.ordered)
        # As in the modelled account: the same target is a new order after a margin call.
        ordered = np.where(seen.closed, 0.0, ordered)
        account = account._replace(
            log_equity=np.float64(np.log(max(seen.equity, self.agent.rules.floor))),
            log_equity_low=np.float64(0.0),
            weight=seen.weight,
            weight_low=np.zeros_like(seen.weight),
            ordered=ordered,
            pending=np.where(seen.waiting, WHOLE, FILLED).astype(np.int8),
            bankrupt=np.asarray(seen.equity <= self.agent.rules.floor),
        )
        if legs.size is not None:
            account = account._replace(size=np.asarray(alone_of(legs.size)))
        if book is not None:
            with float64_on_cpu():
                effects: Any = (seen.traded, np.float64(0.0), None)
                book = _entered(book, account.held, AccountFill(*effects), seen.price)
                book = _aged(book, account, bar, np.zeros(len(seen.weight), bool))
                book = jax.tree.map(np.asarray, book)
        return View(account, book, owed)

    def ready(self, state: State, bar: Bar) -> bool:
        """Whether `bar` may be decided at: the agent has seen enough, and `start` is reached."""
        return state.rows >= self.agent.first_decision and int(bar.time[0]) >= self._start

    def _opened(self) -> View:
        account, book = self.agent.open(), None
        if self.agent.sees_book:
            with float64_on_cpu():
                opened = exits.open_book(len(self.agent.symbols), np.float64)
                book = jax.tree.map(np.asarray, opened)
        return View(account, book)

    def step(self, state: State, bar: Bar, legs: BarReturns, view: View) -> tuple[State, Response]:
        """Let the agent see `bar` (fields `[A]`, usable), and decide at its close.

        Args:
          state: after the bar before.
          bar: the closed bar.
          legs: of this bar, from `self.legs(state, bar)`.
          view: the account at this close. Of an empty one the bar is learnt, and nothing decided.

        Returns:
          The state after the bar, and what follows from it.
        """
        account, book, owed = view
        first, unseen = state.account is None, account is None
        memory, account, decision = self.agent.act(state.memory, bar, account, book, first)
        after = state._replace(
            rows=state.rows + 1,
            last=int(bar.time[0]),
            close=np.where(bar.present, bar.close, state.close),
            missing=self.missing(state, bar),
            memory=memory,
            # A bar that is only learnt leaves the account of an earlier decision as it is.
            account=state.account if unseen else account,
            book=state.book if unseen else book,
            sizes=self._sizes(state, bar)[0],
        )
        if decision is None or account is None:
            return after, Response()
        quote = legs.at_close
        if quote.size is not None:  # multiplied here and not by `place`: the journal has weights
            target = apply_next_size(decision.target, quote.size, self.agent.rules.size_cap)
            decision = decision._replace(target=target)
        if owed is not None and decision.usable:
            target = np.where(np.isnan(decision.target), owed, decision.target)
            decision = decision._replace(target=target)
        return self._place(after, account, decision, quote._replace(size=None))

    def _place(
        self, state: State, account: Account, decision: Decision, quote: Quote
    ) -> tuple[State, Response]:
        """Order the decision, and fill it in the account where orders fill at this close."""
        rules = self.agent.rules
        # Ordered first and filled last, also where orders fill at this close: what is pending in
        # between is what the broker is sent.
        placed, weights = self._run_account(self._programs.place, account, decision.target, quote)
        whole = np.asarray(placed.pending) == WHOLE
        if rules.order == "on_change":
            new = whole & (np.asarray(placed.ordered) != np.asarray(account.ordered))
        else:
            # Every target that is given is a new order, which replaces the one before it.
            new = whole & ~np.isnan(decision.target) & ~np.asarray(is_denied(placed.guard))
        working = {}  # every order that the account has pending should be at the broker
        for i, symbol in enumerate(self.agent.symbols):
            if placed.pending[i] == FILLED:
                continue
            # The rest of an older order keeps its id: a broker must not take it for a new order.
            if new[i]:
                name = client_id(self.run, state.last or 0, symbol)
            else:
                name = state.working[symbol].client_id
            rest = bool(placed.pending[i] == REST)
            working[symbol] = TargetOrder(name, symbol, float(weights[i]), rest)
        sent = tuple(working[self.agent.symbols[i]] for i in np.flatnonzero(new))
        kept = {order.client_id for order in working.values()}
        closed = tuple(
            (order.client_id, "replaced" if symbol in working else "done")
            for symbol, order in state.working.items()
            if order.client_id not in kept
        )
        book = state.book
        if rules.fill == "close":
            placed, fill = self._run_account(self._programs.trade, placed, quote)
            if book is not None:
                with float64_on_cpu():
                    book = jax.tree.map(np.asarray, _entered(book, placed.held, fill, state.close))
        state = state._replace(account=placed, book=book, working=working)
        return state, Response(decision, tuple(working.values()), sent, closed)

    def _run_account(self, function: Callable, account: Account, *args) -> Any:
        """Call a compiled account function in float64 on the CPU; numpy arrays come back."""
        # What one function returns the next one takes: handed over as it is, it is not copied.
        known, there = self._handed
        with float64_on_cpu():
            given = there if account is known else account
            found = function(given, *args)
        leaves, tree = jax.tree.flatten(found)  # half the time of `jax.tree.map`
        read = tree.unflatten([np.asarray(leaf) for leaf in leaves])
        alone = isinstance(found, Account)
        self._handed = (read, found) if alone else (read[0], found[0])
        return read
