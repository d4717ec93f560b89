"""Who holds the account of a session: here one agent, all of it.

This is the one seam between a session and sleeves: a session asks its holder wherever sleeves make
a difference, and `paper.sleeved` has the holders of an account that several agents share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nca_trader.paper.broker import valued
from nca_trader.paper.core import Agent, Core, Observed, Outcome, State
from nca_trader.paper.ledger import Books, Ledger
from nca_trader.paper.router import VenueBroker
from nca_trader.paper.sleeves import Member
from nca_trader.paper.venue import Ticket

# Why an order ended although the decision behind it still stands: the next decision sends again.
UNDONE = ("rejected", "expired", "never-arrived", "too-old", "symbol-held")


class Holder:
    """Holds the account of a replay.

    members: the sleeves.
    """

    members: Sequence[Member] = ()

    def core(self, core: Core) -> Any:
        """Return the step function of the session, which has the methods of `core`."""
        return core

    def stage(self, state: State) -> None:
        """Tell the broker who ordered what; called before it gets the account's orders."""

    def allocations(self) -> list[tuple[str, dict[str, Any]]]:
        """Return keys and bodies of the events that share the fills since the last call."""
        return []

    def settled(self, state: State) -> State:
        """Return the state after orders filled at its close."""
        return state

    def off(self, state: State) -> float:
        """Return how far the sleeves' books are from the account's, relative to its worth."""
        return 0.0

    def worth(self, state: State, account: float) -> dict[str, float]:
        """Return the money of the account, by the name "", and of each sleeve by its own."""
        return {"": account}

    def described(self, state: State) -> dict[str, Any]:
        """Return what a snapshot says of sleeves."""
        return {}


class Sized(NamedTuple):
    """What a decision sends to a venue.

    tickets: sales first. refused: `(client_id, code)` of orders that cannot be sent. parts: units
    of each ticket by sleeve, by client id. crosses: bodies of `cross` events.
    """

    tickets: list[Ticket]
    refused: list[tuple[str, str]]
    parts: Mapping[str, dict[str, float]] = {}
    crosses: Sequence[dict[str, Any]] = ()


class VenueHolder:
    """Holds an account at a venue.

    Args:
      agent: what trades.

    Attributes:
      members: the sleeves.
      bases: worth at the first decision, of the account by the name "" and of each sleeve.
    """

    members: Sequence[Member] = ()

    def __init__(self, agent: Agent):
        self.agent = agent
        self.bases: dict[str, float] = {}

    def core(self, core: Core) -> Any:
        """As `Holder.core`."""
        return core

    def ledger(self) -> Any:
        """Return the books before the journal's first event: a `Ledger`."""
        return Ledger()

    def waiting(self, ledger: Any, symbol: str) -> dict[str, float]:
        """Return the units by sleeve that cross when `symbol` next trades."""
        return {}

    def observe(self, ledger: Any, state: State, close: np.ndarray) -> Observed:
        """Return the account as the venue has it at closes `[A]`.

        Raises:
          Halting: the sleeves' books do not sum to the account's.
        """
        symbols, working = self.agent.symbols, state.working
        orders = [ledger.order(working[s].client_id) if s in working else None for s in symbols]
        waiting = np.array([o is not None and o.state != "done" for o in orders])
        undone = np.array([o is not None and o.reason in UNDONE for o in orders])
        traded = ledger.flush(symbols)
        return self._seen("", ledger.books(symbols), close, traded, waiting, undone)

    def size(self, router: VenueBroker, state: State, outcome: Outcome) -> Sized:
        """Return what a decision sends, by the venue's books and the last closes."""
        agent = self.agent
        tickets, refused = router.size(
            outcome.sent, router.books(), state.close, agent.costs, agent.rules.borrow
        )
        return Sized(tickets, refused)

    def described(self, state: State, ledger: Any) -> dict[str, Any]:
        """As `Holder.described`."""
        return {}

    def _seen(
        self,
        name: str,
        books: Books,
        close: np.ndarray,
        traded: tuple[np.ndarray, np.ndarray],
        waiting: np.ndarray,
        undone: np.ndarray,
        dealt: np.ndarray | None = None,
    ) -> Observed:
        """Return what `books` are worth, of the account or of the sleeve of that name."""
        worth = valued(books.units, close)
        value = books.cash + float(worth.sum())
        units, price = traded
        return Observed(
            # The first decision begins at equity 1, whatever the account was worth then.
            equity=value / self.bases.setdefault(name, value),
            weight=worth / value,
            waiting=waiting,
            undone=undone,
            traded=valued(units, np.nan_to_num(price)) / value,
            price=np.where(np.isnan(price), close, price),
            value=value,
            dealt=units != 0.0 if dealt is None else dealt,
        )
