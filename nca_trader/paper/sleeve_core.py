"""One bar of an account that sleeves share: bar in, decisions of all and one order for each symbol.

It stands in for `paper.core.Core` in a session: every sleeve has a core of its own, and the account
is the sum of theirs.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from nca_trader.envs.account.risk import COLLAR, ORDER, RATE, denied
from nca_trader.envs.account.state import FILLED, Account, Legs, open_account
from nca_trader.numerics import float64_on_cpu
from nca_trader.paper.broker import Order, client_id
from nca_trader.paper.core import Agent, Core, Decision, Observed, Outcome, State, place
from nca_trader.paper.risk import after_resume, broken, said
from nca_trader.paper.sleeves import NET, Member
from nca_trader.types import Bar, Costs

MAX_IN_A_ROW = 3  # decisions that are not usable, before a sleeve halts
# Limits of the account that a sleeve's order meets only for now: the next bar decides again.
RETRIED = (ORDER, RATE, COLLAR)


class Cut(NamedTuple):
    """What the account's limits left of a sleeve's orders, `[A_k]` bool each.

    less: it is smaller than asked. retried: the sleeve may ask again at the next bar.
    """

    less: np.ndarray
    retried: np.ndarray


class Memory(NamedTuple):
    """What one bar passes to the next, by sleeve.

    states: of the cores. staged: the orders that work. cuts: what limits took from them. halted:
    the code of the sleeves that halted. since: the bar of that. failures: decisions in a row that
    were not usable. fresh: symbols whose orders are not those of the bar before.
    """

    states: tuple[State, ...]
    staged: tuple[tuple[Order, ...], ...]
    cuts: tuple[Cut | None, ...]
    halted: dict[str, str]
    since: dict[str, int]
    failures: dict[str, int]
    fresh: frozenset[str]


class SleevedCore:
    """The step function of a session with sleeves; it has the methods of `Core`.

    Args:
      account: of the agent that stands for all.
      members: the sleeves.
      correct: `(k, account, close [A], cut) -> account`, sleeve k's as its broker has it.
    """

    def __init__(
        self,
        account: Core,
        members: Sequence[Member],
        correct: Callable[..., Account] = lambda k, account, close, cut: account,
    ):
        self._agent, self.members, self._run = account.agent, tuple(members), account.run
        self._account, self._correct = account, correct
        self._muted: set[str] = set()
        run, start = account.run, account.start
        # A run of its own for each, so that two sleeves' orders in one asset have two ids.
        self._runs = [hashlib.sha256(f"{run}{m.name}".encode()).hexdigest() for m in members]
        self._cores = [
            # One sleeve has the account's own ids.
            Core(self._mutable(m), run if len(members) == 1 else name, start)
            for m, name in zip(members, self._runs, strict=True)
        ]

    def begin(self) -> State:
        """Return the state before the first bar."""
        many = len(self.members)
        memory = Memory(
            tuple(core.begin() for core in self._cores), ((),) * many, (None,) * many,
            {}, {}, {m.name: 0 for m in self.members}, frozenset(),
        )  # fmt: skip
        return self._account.begin()._replace(memory=memory)

    def legs(self, state: State, bar: Bar) -> Legs:
        """As `Core.legs`."""
        return self._account.legs(state, bar)

    def ready(self, state: State, bar: Bar) -> bool:
        """As `Core.ready`."""
        return self._account.ready(state, bar)

    def step(self, state: State, bar: Bar, legs: Legs) -> tuple[State, Outcome]:
        """As `Core.step`: the account is the sum of the sleeves'."""
        close = np.where(bar.present, bar.close, state.close)

        def move(k: int, own: State, seen: Bar) -> tuple[State, Outcome]:
            cut = state.memory.cuts[k]
            correct = functools.partial(self._correct, k, close=close, cut=cut)
            return self._cores[k].step(own, seen, self._cores[k].legs(own, seen), correct)

        return self._joined(state, bar, legs, move, None)

    def follow(
        self, state: State, bar: Bar, legs: Legs, seen: Observed | None
    ) -> tuple[State, Outcome]:
        """As `Core.follow`."""

        def move(k: int, before: State, bar_k: Bar) -> tuple[State, Outcome]:
            core = self._cores[k]
            there = None if seen is None else seen.sleeves[k]
            return core.follow(before, bar_k, core.legs(before, bar_k), there)

        return self._joined(state, bar, legs, move, seen)

    def corrected(self, state: State) -> State:
        """Return the state after orders filled at its close."""
        memory: Memory = state.memory
        states = tuple(
            own
            if own.account is None
            else own._replace(account=self._correct(k, own.account, state.close, memory.cuts[k]))
            for k, own in enumerate(memory.states)
        )
        memory = memory._replace(states=states)
        account = self._sum(states, state.account)
        return state._replace(memory=memory, account=account)

    def lift(self, state: State, name: str) -> State:
        """Return the state after a person let a halted sleeve go on: losses count from here."""
        memory: Memory = state.memory
        k = [m.name for m in self.members].index(name)
        own = memory.states[k]
        if own.account is not None:
            own = own._replace(account=after_resume(own.account))
        states = (*memory.states[:k], own, *memory.states[k + 1 :])
        halted = {n: code for n, code in memory.halted.items() if n != name}
        failures = memory.failures | {name: 0}
        return state._replace(
            memory=memory._replace(states=states, halted=halted, failures=failures)
        )

    def _mutable(self, member: Member) -> Agent:
        """Return the agent, which orders nothing while its sleeve is muted."""

        def act(*args: Any) -> tuple[Any, Account | None, Decision | None]:
            memory, account, decision = member.agent.act(*args)
            if account is None or decision is None or member.name not in self._muted:
                return memory, account, decision
            waits = np.asarray(account.pending) != FILLED
            account = account._replace(
                ordered=np.where(waits, account.held, account.ordered),
                pending=np.full_like(account.pending, FILLED),
            )
            return memory, account, decision._replace(target=np.full_like(decision.target, np.nan))

        return member.agent._replace(act=act)

    def _joined(
        self,
        state: State,
        bar: Bar,
        legs: Legs,
        move: Callable[[int, State, Bar], tuple[State, Outcome]],
        seen: Observed | None,
    ) -> tuple[State, Outcome]:
        """Move every sleeve, and order for all of them."""
        memory: Memory = state.memory
        # Before the cores move, as they look at it while they decide.
        self._muted = set(memory.halted)
        moved = []
        for k, member in enumerate(self.members):
            own = bar._replace(
                **{name: member.of(x) for name, x in bar._asdict().items() if x is not None}
            )
            moved.append(move(k, memory.states[k], own))
        states = tuple(own for own, _ in moved)
        after = state._replace(
            rows=state.rows + 1,
            last=int(bar.time[0]),
            close=np.where(bar.present, bar.close, state.close),
            missing=self._account.missing(state, bar),
        )
        quiet = memory._replace(states=states, fresh=frozenset())
        # A sleeve that still warms up holds all back: the account trades once every one can.
        if any(outcome.decision is None for _, outcome in moved):
            return after._replace(memory=quiet), Outcome()
        memory, news = self._judged(quiet, [outcome for _, outcome in moved], after.last or 0)
        orders = [self._orders(k, memory, outcome) for k, (_, outcome) in enumerate(moved)]
        account = self._sum(states, state.account, seen)
        held = np.asarray(account.held)
        target, alone = self._targets(states, account, orders)
        # Each sleeve has sized its own targets.
        quote = legs.at_close._replace(size=None)
        account, given = self._limited(account, target, quote)
        orders, cuts = self._cut(account, orders, target, given, held, states)
        for k, member in enumerate(self.members):
            # A halted sleeve's account does not know of the orders that sell what it holds.
            if orders[k] and member.name in memory.halted and cuts[k] is None:
                none = np.zeros(len(member.at), bool)
                cuts[k] = Cut(none, none)
        fresh = _changed(memory.staged, orders)
        sends = {
            symbol: float(given[i])
            for i, symbol in enumerate(self._agent.symbols)
            if alone[i] or not _nets(self._changes(i, orders, states, account))
        }
        working = self._working(state, after.last or 0, orders, sends, fresh)
        known = {order.client_id for order in state.working.values()}
        kept = {order.client_id for order in working.values()}
        closed = tuple(
            (order.client_id, "replaced" if symbol in working else "done")
            for symbol, order in state.working.items()
            if order.client_id not in kept
        )
        memory = memory._replace(staged=tuple(orders), cuts=tuple(cuts), fresh=fresh)
        decisions = {
            m.name: outcome.decision
            for m, (_, outcome) in zip(self.members, moved, strict=True)
            if outcome.decision is not None
        }
        decision = Decision(target, sleeves=decisions)
        after = after._replace(memory=memory, account=account, working=working)
        sent = tuple(order for order in working.values() if order.client_id not in known)
        return after, Outcome(decision, tuple(working.values()), sent, closed, news)

    def _working(
        self,
        state: State,
        now: int,
        orders: Sequence[Sequence[Order]],
        sends: Mapping[str, float],
        fresh: frozenset[str],
    ) -> dict[str, Order]:
        """Return the account's orders by symbol; `sends` are its weights where anything is sent.

        An order keeps its id while none of the sleeves' orders behind it changes.
        """
        working = {}
        for symbol, weight in sends.items():
            mine = [order for own in orders for order in own if order.symbol == symbol]
            if not mine:
                continue
            name = client_id(self._run, now, symbol)
            if symbol not in fresh and symbol in state.working:
                name = state.working[symbol].client_id
            # A sum of one term may differ in its last bit, and one sleeve alone trades as its
            # agent.
            weight = mine[0].weight if len(self.members) == 1 else weight
            rest = all(order.buy_only for order in mine)
            working[symbol] = Order(name, symbol, weight, rest)
        return working

    def _judged(
        self, memory: Memory, outcomes: Sequence[Outcome], now: int
    ) -> tuple[Memory, tuple[dict[str, Any], ...]]:
        """Note which sleeves a limit or failing decisions halt at this bar, and what limits say."""
        halted, since = dict(memory.halted), dict(memory.since)
        failures, news = dict(memory.failures), []
        for member, own, outcome in zip(self.members, memory.states, outcomes, strict=True):
            name, decision = member.name, outcome.decision
            if name in halted or decision is None or own.account is None:
                continue
            failures[name] = 0 if decision.usable else failures[name] + 1
            if not decision.usable:
                news.append({"code": "policy-not-finite", "sleeve": name})
            loss = broken(own.account)
            if loss is None and failures[name] >= MAX_IN_A_ROW:
                loss = ("policy-not-finite", {"in_a_row": failures[name]})
            if loss is None:
                found = said(own.account, decision.target, member.agent.symbols)
                news += [{**body, "sleeve": name} for body in found]
                continue
            halted[name], since[name] = loss[0], now
            how = "flatten" if member.flattens else "hold"
            body = {"code": "sleeve-halted", "sleeve": name, "limit": loss[0]}
            news.append({**body, "on_halt": how, **loss[1]})
        return memory._replace(halted=halted, since=since, failures=failures), tuple(news)

    def _orders(self, k: int, memory: Memory, outcome: Outcome) -> tuple[Order, ...]:
        """Return what sleeve k wants at the venue: its orders, or after a halt what sells all."""
        member = self.members[k]
        if member.name not in memory.halted:
            return outcome.working
        own = memory.states[k].account
        if not member.flattens or own is None:
            return ()
        since, run = memory.since[member.name], self._runs[k]
        return tuple(
            Order(client_id(run, since, symbol, leg=1), symbol, 0.0)
            for symbol, weight in zip(member.agent.symbols, np.asarray(own.held), strict=True)
            if weight != 0.0
        )

    def _sum(
        self, states: Sequence[State], before: Account | None, seen: Observed | None = None
    ) -> Account:
        """Return the account that the sleeves' accounts are parts of, or that a venue has."""
        num_assets = len(self._agent.symbols)
        with float64_on_cpu():
            none = open_account(np.zeros(num_assets), self._agent.rules)
            none = jax.tree.map(np.asarray, none)
        base = none if before is None else before
        if seen is not None:
            equity, held = seen.equity, seen.weight
        else:
            accounts: list[Any] = [own.account for own in states]
            if len(accounts) == 1 and len(self.members[0].at) == num_assets:
                return accounts[0]._replace(guard=base.guard, size=())
            worth = [
                m.share * float(np.exp(one.log_equity + one.log_equity_low))
                for m, one in zip(self.members, accounts, strict=True)
            ]
            # Exact, so that it does not depend on the order of the sleeves.
            equity, held = math.fsum(worth), np.zeros(num_assets)
            for member, one, value in zip(self.members, accounts, worth, strict=True):
                held[member.at] += value / equity * np.asarray(one.held)
        ruined = any(bool(own.account and own.account.ruined) for own in states)
        floor = self._agent.rules.floor
        return base._replace(
            log_equity=np.float64(np.log(max(equity, floor))),
            log_equity_low=np.float64(0.0),
            weight=held,
            weight_low=np.zeros(num_assets),
            pending=np.full(num_assets, FILLED, np.int8),
            ruined=np.asarray(ruined or equity <= floor),
        )

    def _worth(self, k: int, states: Sequence[State], account: Account) -> float:
        """Return sleeve k's equity as a fraction of the account's."""
        own: Any = states[k].account
        logs = own.log_equity + own.log_equity_low - account.log_equity - account.log_equity_low
        return self.members[k].share * float(np.exp(logs))

    def _targets(
        self, states: Sequence[State], account: Account, orders: Sequence[Sequence[Order]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return `[A]` the account's weights once all orders filled, NaN where none works.

        And `[A]` whether one sleeve alone has an order.
        """
        num_assets = len(self._agent.symbols)
        target, alone = np.full(num_assets, np.nan), np.zeros(num_assets, bool)
        for i in range(num_assets):
            changes = self._changes(i, orders, states, account)
            if len(changes):
                target[i] = float(account.held[i]) + float(np.sum(changes))
                alone[i] = len(changes) == 1
        return target, alone

    def _changes(
        self,
        i: int,
        orders: Sequence[Sequence[Order]],
        states: Sequence[State],
        account: Account,
    ) -> np.ndarray:
        """Return how much each order in symbol i changes its weight in the account."""
        found = []
        for k, member in enumerate(self.members):
            for order in orders[k]:
                if order.symbol != self._agent.symbols[i]:
                    continue
                own: Any = states[k].account
                held = float(own.held[list(member.agent.symbols).index(order.symbol)])
                # The rest of a buy never sells, even if its price has risen since.
                weight = max(order.weight, held) if order.buy_only else order.weight
                found.append(self._worth(k, states, account) * (weight - held))
        return np.array(found)

    def _limited(
        self, account: Account, target: np.ndarray, quote: Any
    ) -> tuple[Account, np.ndarray]:
        """Return the account after its limits judged `target` `[A]`, and what they allow."""
        rules = self._agent.rules
        if rules.risk is None:
            ordered = np.where(np.isnan(target), account.ordered, target)
            return account._replace(ordered=ordered), target
        with float64_on_cpu():
            placed, _ = place(account, target, quote, Costs(), rules._replace(sizing="fixed"))
        guard = jax.tree.map(np.asarray, placed.guard)
        given = np.where(np.isnan(target), np.nan, np.asarray(placed.ordered))
        given = np.where(denied(guard), np.where(np.isnan(target), np.nan, account.held), given)
        ordered = np.asarray(placed.ordered)
        return account._replace(ordered=ordered, guard=guard), given

    def _cut(
        self,
        account: Account,
        orders: Sequence[tuple[Order, ...]],
        target: np.ndarray,
        given: np.ndarray,
        held: np.ndarray,
        states: Sequence[State],
    ) -> tuple[list[tuple[Order, ...]], list[Cut | None]]:
        """Return the orders as the account's limits leave them, and where they are less.

        A cut takes the same share from every sleeve that trades in the direction of the net order.
        """
        change = target - held
        cut = ~np.isnan(target) & (given != target)
        if not cut.any():
            return list(orders), [None] * len(orders)
        said_of = np.asarray(account.guard.said)
        # A halt or a wild price stops everything; other limits are on what leaves the account.
        stopped = cut & ((said_of == COLLAR) | (np.asarray(account.guard.halted) > 0))
        with np.errstate(divide="ignore", invalid="ignore"):
            # The share of the net change that the limits allow.
            kept = np.where(change == 0.0, 0.0, np.clip((given - held) / change, 0.0, 1.0))
        left, cuts = [], []
        for k, member in enumerate(self.members):
            own: Any = states[k].account
            less = np.zeros(len(member.at), bool)
            found = []
            for order in orders[k]:
                j = list(member.agent.symbols).index(order.symbol)
                i, has = int(member.at[j]), float(own.held[j])
                moves = order.weight - has
                # An order against the net one makes it smaller, and no limit objects.
                if not cut[i] or (moves * change[i] < 0.0 and not stopped[i]):
                    found.append(order)
                    continue
                less[j] = True
                if kept[i] > 0.0 and not stopped[i]:
                    found.append(order._replace(weight=has + float(kept[i]) * moves))
            left.append(tuple(found))
            retried = less & np.isin(member.of(said_of), RETRIED)
            cuts.append(Cut(less, retried) if less.any() else None)
        return left, cuts


def _changed(before: Sequence[Sequence[Order]], now: Sequence[Sequence[Order]]) -> frozenset[str]:
    """Return the symbols whose net order is another one: an order came, or left others behind."""
    old, new = (
        {(o.symbol, o.client_id) for own in orders for o in own} for orders in (before, now)
    )
    left = {symbol for symbol, _ in new}
    return frozenset({s for s, _ in new - old} | ({s for s, _ in old - new} & left))


def _nets(changes: np.ndarray) -> bool:
    """Whether orders of several sleeves leave nothing for the venue."""
    return bool(abs(changes.sum()) <= NET * np.abs(changes).sum())
