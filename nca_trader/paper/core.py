"""One bar of a paper session as a pure function: bar in, decision and orders out.

No file, no broker, no clock: `Core.step` gives the same outcome for the same state and bar, in
the live loop and when a session is rebuilt from its journal.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from nca_trader.agents.heads import best_target, distribution
from nca_trader.agents.policy import Params, read_out
from nca_trader.data.features import feature_set
from nca_trader.envs.account import step as accounting
from nca_trader.envs.account.state import (
    FILLED,
    REST,
    WHOLE,
    Account,
    Legs,
    Quote,
    Rules,
    next_legs,
    open_account,
    rules_of,
)
from nca_trader.envs.account.step import capped
from nca_trader.envs.rewards import begun, remembered
from nca_trader.errors import ConfigError
from nca_trader.numerics import cpu, float64_on_cpu
from nca_trader.paper.broker import Order, client_id
from nca_trader.runs.manifest import Run, versions
from nca_trader.types import Bar, Costs, EnvSpec

# Costs and rules are static: a session has one of each, and what they leave out is not compiled.
on_bar = jax.jit(accounting.on_bar, static_argnums=(2, 3))
trade = jax.jit(accounting.trade, static_argnums=(2, 3))
_target = jax.jit(best_target, static_argnums=0)
_remembered = jax.jit(remembered, static_argnums=0)
_capped = jax.jit(capped, static_argnums=1)


@functools.partial(jax.jit, static_argnums=(3, 4))
def place(
    account: Account, target: Array, quote: Quote, costs: Costs, rules: Rules
) -> tuple[Account, Any]:
    """Order without filling, also where orders fill at the close: the broker is sent the orders."""
    return accounting.place(account, target, quote, costs, rules._replace(fill="next_open"))


class Agent(NamedTuple):
    """What a session needs of a trained agent.

    spec: of the environment that it was trained in.
    features: a `FeatureSet`: `names`, `init(num_assets) -> state` and
      `step(state, bar) -> state, [A, F] float32`.
    begin: `() -> stream`, before the first bar. see: `(stream, features [A, F] float32, present
      [A]) -> stream, cells`, one new bar. decide: `(cells, account) -> logits [A, n]`.
    receptive_field: RF bars, after which a stream has forgotten one. first_decision: row of the
      first bar that may be decided at.
    costs, rules: of the account. identity: hashes and versions that make a session this one.
    """

    spec: EnvSpec
    features: Any
    begin: Callable[[], Any]
    see: Callable[[Any, np.ndarray, np.ndarray], tuple[Any, Any]]
    decide: Callable[[Any, Account], np.ndarray]
    receptive_field: int
    first_decision: int
    costs: Costs
    rules: Rules
    identity: dict[str, Any]

    @property
    def symbols(self) -> tuple[str, ...]:
        """The `A` assets, in order."""
        return self.spec.symbols


def agent_of(run: Run) -> Agent:
    """Return the agent of a run: its selected seed, its costs, its rules.

    Raises:
      ConfigError: it observes the state of a synthetic market, which no feed has.
    """
    if run.env_config.market and run.env_config.market_state:
        raise ConfigError(
            f"{run.path}: its agent observes the state of the market {run.env_config.market}, "
            "which no feed has; paper-trade one that was trained on bars alone."
        )
    policy, params = run.policy, run.params()
    # Part of the session's identity: a journal does not resume with other parameters.
    digest = params_digest(params)
    params = jax.device_put(params, cpu())
    stream = jax.jit(policy.stream)
    act = jax.jit(lambda *args: read_out(policy, *args))

    def see(state: Any, row: np.ndarray, present: np.ndarray) -> tuple[Any, Any]:
        with float64_on_cpu():
            return stream(params, state, row, present)

    def logits(cells: Any, account: Account) -> np.ndarray:
        with float64_on_cpu():
            return np.asarray(act(params, cells, account))

    return Agent(
        spec=run.spec,
        features=feature_set(run.env_config.features),
        begin=policy.begin,
        see=see,
        decide=logits,
        receptive_field=policy.receptive_field,
        first_decision=policy.first_decision,
        costs=run.env_config.costs,
        rules=rules_of(run.env_config),
        identity={
            "agent": run.name,
            "config": {name: run.manifest.config[name] for name in ("env.toml", "agent.toml")},
            "params": digest,
            "versions": versions(),
        },
    )


def params_digest(params: Params) -> str:
    """Return the SHA-256 of every leaf's path, type, shape and bytes."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        array = np.asarray(leaf)
        # Shape and type as well: the same bytes in another shape are another agent.
        digest.update(f"{jax.tree_util.keystr(path)}{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


class State(NamedTuple):
    """What one bar passes to the next; its size does not grow.

    rows: bars seen. last: seconds of the last bar's open. close: `[A]` last closes, NaN before
    the first. missing: `[A]` bars missing in a row. features: the feature set's own.
    stream: the policy's own, a function of the last RF - 1 bars. unfit: bars for which the stream
    still holds a feature that is not finite. account: None before trading starts.
    working: the orders that wait, by symbol.
    """

    rows: int
    last: int | None
    close: np.ndarray
    missing: np.ndarray
    features: Any
    stream: Any
    unfit: int
    account: Account | None
    working: dict[str, Order]


class Decision(NamedTuple):
    """logits: `[A, n]`; action: `[A]`; target: `[A]` weights, NaN where the policy failed."""

    logits: np.ndarray
    action: np.ndarray
    target: np.ndarray

    @property
    def usable(self) -> bool:
        """Whether the policy's output was finite, so that it was acted upon."""
        return bool(np.isfinite(self.target).all())


class Outcome(NamedTuple):
    """What follows from a bar. decision: None before trading starts.

    working: every order that should be at the broker now. sent: those among them that are new.
    closed: `(client_id, reason)` of orders that no longer work.
    """

    decision: Decision | None = None
    working: tuple[Order, ...] = ()
    sent: tuple[Order, ...] = ()
    closed: tuple[tuple[str, str], ...] = ()


class Core:
    """The step function of one session.

    Args:
      agent: what to trade with.
      run: the session's hash, which its client ids carry.
      start: seconds since 1970 UTC before which nothing is decided; None is as early as can be.
    """

    def __init__(self, agent: Agent, run: str, start: int | None = None):
        self.agent, self._run = agent, run
        self._start = -(2**62) if start is None else start  # before any time in seconds

    def begin(self) -> State:
        """Return the state before the first bar."""
        num_assets = len(self.agent.symbols)
        return State(
            rows=0,
            last=None,
            close=np.full(num_assets, np.nan),
            missing=np.zeros(num_assets, int),
            features=self.agent.features.init(num_assets),
            stream=self.agent.begin(),
            unfit=0,
            account=None,
            working={},
        )

    def legs(self, state: State, bar: Bar) -> Legs:
        """Return the returns and prices of `bar` for an account after `state`, in float64 numpy.

        A first bar has returns 0, since there is no close before it.
        """
        seconds = 0 if state.last is None else int(bar.time[0]) - state.last
        missing = self._missing(state, bar)
        return next_legs(state.close, bar, seconds, missing, self.agent.costs, self.agent.rules)

    def _missing(self, state: State, bar: Bar) -> np.ndarray:
        """Return `[A]` bars missing in a row, `bar` included; 0 before an asset's first."""
        gone = ~np.asarray(bar.present) & np.isfinite(state.close)
        return np.where(gone, state.missing + 1, 0)

    def step(self, state: State, bar: Bar, legs: Legs) -> tuple[State, Outcome]:
        """Move the account through `bar` (fields `[A]`, usable) and decide at its close.

        Args:
          state: after the bar before.
          bar: the closed bar.
          legs: of this bar, from `self.legs(state, bar)`.

        Returns:
          The state after the bar, and what follows from it.
        """
        present = np.asarray(bar.present)
        features, row = self.agent.features.step(state.features, bar)
        stream, cells = self.agent.see(state.stream, row, present)
        finite = bool(np.isfinite(row).all())
        seconds = int(bar.time[0])
        after = state._replace(
            rows=state.rows + 1,
            last=seconds,
            close=np.where(present, bar.close, state.close),
            missing=self._missing(state, bar),
            features=features,
            stream=stream,
            # A NaN stays in the stream until the receptive field has passed over it.
            unfit=max(state.unfit - 1, 0) if finite else self.agent.receptive_field,
        )
        # The stream and the features were updated in any case: they need the bars before `start`.
        if state.account is None:
            if state.rows < self.agent.first_decision or seconds < self._start:
                return after, Outcome()
            # Flat, whatever weights the episodes of training began with.
            with float64_on_cpu():
                account = begun(self.agent.spec, open_account(np.zeros(len(present))))
        else:
            account = self._run_account(on_bar, state.account, legs)
            if self.agent.spec.memory:  # what the reward remembers is a feature of this agent
                with float64_on_cpu():
                    memory = _remembered(self.agent.spec, account)
                    account = jax.tree.map(np.asarray, memory)
        decision = self._decide(after, cells, account)
        return self._place(after, account, decision, legs.at_close)

    def _decide(self, state: State, cells: Any, account: Account) -> Decision:
        """Return the most probable action of each asset; no order if a number is not finite."""
        num_assets, spec = len(self.agent.symbols), self.agent.spec
        held = Decision(
            np.full((num_assets, distribution(spec).outputs(spec)), np.nan),
            np.zeros(num_assets, int),
            np.full(num_assets, np.nan),
        )
        if state.unfit:
            return held
        logits = np.asarray(self.agent.decide(cells, account))
        # argmax takes a NaN for the largest number, and would trade on it.
        if logits.shape != held.logits.shape or not np.isfinite(logits).all():
            return held
        with float64_on_cpu():
            target = np.asarray(_target(spec, logits, account.ordered))
        return Decision(logits, logits.argmax(-1), target)

    def _place(
        self, state: State, account: Account, decision: Decision, quote: Quote
    ) -> tuple[State, Outcome]:
        """Order the decision, and fill it in the account where orders fill at this close."""
        rules = self.agent.rules
        # Ordered first and filled last, also where orders fill at this close: what is pending in
        # between is what the broker is sent.
        placed = self._run_account(place, account, decision.target, quote)
        whole = np.asarray(placed.pending) == WHOLE
        if rules.order == "on_change":
            new = whole & (np.asarray(placed.ordered) != np.asarray(account.ordered))
        else:
            # Every target that is given is a new order, which replaces the one before it.
            new = whole & ~np.isnan(decision.target)
        with float64_on_cpu():
            weights = np.asarray(_capped(placed.ordered, rules))
        working = {}  # every order that the account has pending should be at the broker
        for i, symbol in enumerate(self.agent.symbols):
            if placed.pending[i] == FILLED:
                continue
            # The rest of an older order keeps its id: a broker must not take it for a new order.
            if new[i]:
                name = client_id(self._run, state.last or 0, symbol)
            else:
                name = state.working[symbol].client_id
            rest = bool(placed.pending[i] == REST)
            working[symbol] = Order(name, symbol, float(weights[i]), rest)
        sent = tuple(working[self.agent.symbols[i]] for i in np.flatnonzero(new))
        kept = {order.client_id for order in working.values()}
        closed = tuple(
            (order.client_id, "replaced" if symbol in working else "done")
            for symbol, order in state.working.items()
            if order.client_id not in kept
        )
        if rules.fill == "close":
            placed = self._run_account(trade, placed, quote)
        state = state._replace(account=placed, working=working)
        return state, Outcome(decision, tuple(working.values()), sent, closed)

    def _run_account(self, function: Callable, *args) -> Account:
        """Call a compiled account function in float64 on the CPU; numpy arrays come back."""
        with float64_on_cpu():
            account, _ = function(*args, self.agent.costs, self.agent.rules)
            return jax.tree.map(np.asarray, account)
