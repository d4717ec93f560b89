"""Agents of a session: a trained run, a strategy, or a function of bars."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nca_trader.agents.heads import distribution
from nca_trader.agents.policy import decide_next
from nca_trader.cloud import CloudPath
from nca_trader.config import AccountConfig
from nca_trader.envs.account import exits
from nca_trader.envs.account.exits import Book
from nca_trader.envs.account.state import Account, open_account
from nca_trader.envs.rewards import begin_account, remember
from nca_trader.errors import ConfigError, argument
from nca_trader.numerics import MOST_ASSETS, as_one_kernel, cpu, float64_on_cpu
from nca_trader.paper.session.core import Agent, Decision, Usual
from nca_trader.paper.session.drift import usual_turnover
from nca_trader.runs.deciding import inputs_of
from nca_trader.runs.folder import NUMBERS, read_table, versions
from nca_trader.runs.manifest import Run
from nca_trader.strategies.blend import asked_of
from nca_trader.strategies.identity import digest_of
from nca_trader.strategies.strategy import Strategy
from nca_trader.strategies.targets import (
    as_targets,
    call_function,
    has_exits,
    in_force,
    largest_weight,
    strategy_faults,
)
from nca_trader.types import Bar, Bars, EnvSpec, fields_of, split_columns


def run_agent(run: Run, rules: AccountConfig) -> Agent:
    """Return the agent of a run: the mean of its seeds, or the one that was chosen.

    Raises:
      ConfigError: it observes the state of a synthetic market, which no feed has.
    """
    if run.spec.states:
        raise ConfigError(
            f"{run.path}: its agent observes the state of the market {run.env_config.market}, "
            "which no feed has; paper-trade one that was trained on bars alone."
        )
    policy, inputs, num_assets = (
        run.policy,
        inputs_of(run.env_config, run.spec),
        run.spec.num_assets,
    )
    # A hundred kernels of a few numbers each take 70 us, one takes 20.
    update = as_one_kernel(inputs.update) if num_assets <= MOST_ASSETS else inputs.update
    # One bar is too little work for an accelerator: the way to it takes longer.
    params = jax.device_put(run.params(), cpu())

    def see(params: Any, memory: Any, bar: Bar) -> Any:
        kept, row, _ = update(memory[0], bar)
        stream, _ = policy.stream(params, memory[1], row, jnp.asarray(bar.present))
        return (kept, stream), row

    # All of a bar in one call: three programs take 60 us longer.
    def think(params: Any, memory: Any, bar: Bar, account: Account) -> Any:
        kept, row, base = update(memory[0], bar)
        account, present = account._replace(base=base), jnp.asarray(bar.present)
        stream, *found = decide_next(policy, params, memory[1], row, present, account)
        return (kept, stream), row, *found

    return policy_agent(
        spec=run.spec,
        names=inputs.names,
        begin=lambda: (inputs.init(num_assets), policy.begin()),
        see=functools.partial(jax.jit(see), params),
        think=functools.partial(jax.jit(think), params),
        receptive_field=policy.receptive_field,
        num_agents=run.num_acting,
        first_decision=policy.first_decision,
        rules=rules,
        usual=usual_of(run),
        identity=identity_of(run),
        history=run.history,
    )


def identity_of(run: Run) -> dict[str, Any]:
    """Return what makes an agent this one: a journal does not resume with other parameters."""
    return {
        "agent": run.name,
        "config": {name: run.manifest.config[name] for name in ("env.toml", "agent.toml")},
        "params": digest_of(run.params()),
        **_versions(),
    }


def usual_of(run: Run) -> Usual:
    """Return what the agent of a run is used to: its training bars, and its saved backtest."""
    # An exported file is not a folder, and has no backtest next to it.
    table, turnover = run.path / "backtest.parquet", None
    if not isinstance(table, CloudPath) and table.is_file():
        found = read_table(table)
        if "turnover" in found.columns:
            turnover = usual_turnover(found["turnover"].to_numpy(np.float64))
    return Usual(run.reference, turnover)


class Sight(NamedTuple):
    """The memory of a policy's agent.

    seen: of the features, and of the policy's stream, a function of the last RF - 1 bars. unfit:
    bars for which the stream still holds a feature that is not finite.
    """

    seen: Any
    unfit: int


def policy_agent(
    spec: EnvSpec,
    names: Sequence[str],
    begin: Callable[[], Any],
    see: Callable[[Any, Bar], tuple[Any, Any]],
    think: Callable[[Any, Bar, Account], tuple[Any, Any, Any, Any]],
    receptive_field: int,
    identity: dict[str, Any],
    num_agents: int = 1,
    **rest: Any,
) -> Agent:
    """Return the agent of a policy, which takes its most probable action.

    Args:
      spec: of the environment that it was trained in.
      names: of its `F` features.
      begin: `() -> memory`, before the first bar.
      see: `(memory, bar) -> memory, features [A, F] float32`, one new bar; called within
        `float64_on_cpu`, as `think` is.
      think: `(memory, bar, account) -> memory, features [A, F], logits [A, S n], target [A]`, in
        place of `see` at a bar that is decided at.
      receptive_field: RF bars, after which a stream has forgotten one.
      identity: hashes and versions that make a session this one.
      num_agents: S, whose orders become one, see `mean_policy`.
      **rest: further fields of the `Agent`.
    """
    num_assets, outputs = len(spec.symbols), num_agents * distribution(spec).outputs(spec)
    nothing = np.full(num_assets, np.nan)
    # Several agents have no single action.
    none = np.zeros(num_assets, int) if num_agents == 1 else None
    unusable = Decision(nothing, np.full((num_assets, outputs), np.nan), none, False)
    # A `spec` that is an argument of a compiled function is hashed and compared at every call.
    remember_bar = jax.jit(functools.partial(remember, spec))

    def opened() -> Account:
        # Flat, whatever weights the episodes of training began with.
        with float64_on_cpu():
            return begin_account(spec, open_account(np.zeros(num_assets), rest["rules"]))

    @float64_on_cpu()  # once per bar; the blocks inside then cost nothing
    def act(memory: Sight, bar: Bar, account: Account | None, book: Book | None, first: bool):
        now, logits, target = account, None, None
        # What the reward remembers is a feature of this agent, and begins at its first decision.
        if now is not None and spec.memory and not first:
            now = jax.tree.map(np.asarray, remember_bar(now))
        if now is None:
            seen, row = see(memory.seen, bar)
        else:
            seen, row, logits, target = think(memory.seen, bar, now)
        row = np.asarray(row)
        # A NaN stays in the stream until the receptive field has passed over it.
        unfit = max(memory.unfit - 1, 0) if np.isfinite(row).all() else receptive_field
        memory = Sight(seen, unfit)
        if now is None:
            return memory, None, None
        if unfit:
            return memory, now, unusable._replace(features=row)
        logits, target = np.asarray(logits), np.asarray(target)
        # argmax takes a NaN for the largest number, and would trade on it.
        if logits.shape != (num_assets, outputs) or not np.isfinite(logits).all():
            return memory, now, unusable
        usable = bool(np.isfinite(target).all())
        action = logits.argmax(-1) if num_agents == 1 else None
        return memory, now, Decision(target, logits, action, usable, row)

    about = {"targets": list(spec.targets), "actions": spec.actions}
    return Agent(
        symbols=spec.symbols,
        begin=lambda: Sight(begin(), 0),
        open=opened,
        act=act,
        identity={**about, "receptive_field": receptive_field, **identity},
        features=tuple(names),
        **rest,
    )


class Plan(NamedTuple):
    """The memory of a strategy: its own state, and `[A]` the last target that it gave."""

    state: Any
    last: np.ndarray


def strategy_agent(strategy: Strategy, bars: Bars, rules: AccountConfig) -> Agent:
    """Return the agent of a strategy, which may see its portfolio.

    Args:
      strategy: what decides.
      bars: any bars of the symbols that it trades; for their types alone.
      rules: of the account.

    Raises:
      ConfigError: its orders have exits, which no broker of this version can rest; its code raises.
    """
    if has_exits(bars, strategy):
        raise ConfigError(
            f"strategy {strategy.name!r}: its orders carry stops or targets, which no broker of "
            "this version can rest; leave them out, or close the position in `act`."
        )
    num_assets, sees, none = bars.num_assets, strategy.sees_portfolio, bars[:0]
    call, names = jax.jit(strategy.decide), [part.name for part in strategy.parts]

    def begin() -> Plan:
        with float64_on_cpu(), strategy_faults(none, strategy):
            return Plan(strategy.init(num_assets), np.full(num_assets, np.nan))

    def act(memory: Plan, bar: Bar, account: Account | None, book: Book | None, first: bool):
        with float64_on_cpu(), strategy_faults(none, strategy):
            seen = None
            if sees and account is not None and book is not None:
                seen = exits.portfolio(account, book)
            elif sees:  # before trading it sees an account that never traded
                flat = open_account(np.zeros(num_assets))
                book = exits.open_book(num_assets, np.float64)
                seen = exits.portfolio(flat, book, trading=False)
            state, order = call(memory.state, bar, seen)
            target, size = np.asarray(order.target), np.asarray(order.size)
        # As in a backtest: a target is repeated where the account is seen, a weight elsewhere.
        if not sees:
            target, size = target * size, 1.0
        last = np.where(np.isnan(target), memory.last, target)
        if account is None:
            return Plan(state, last), None, None
        # The order in force before the first bar is repeated there, and nowhere else.
        weight = (last if first else target) * size
        decision = _decision(weight)
        if names:
            parts = dict(zip(names, np.asarray(asked_of(state)), strict=True))
            decision = decision._replace(parts=parts)
        return Plan(state, last), account, decision

    return Agent(
        symbols=bars.symbols,
        begin=begin,
        open=lambda: _flat(num_assets, rules),
        act=act,
        first_decision=0,
        rules=rules,
        identity=_identity_of(strategy),
        sees_book=sees,
        history=strategy.history,
        sized=True,
    )


class History(NamedTuple):
    """The memory of a function of bars: all bars so far, and `[n, A]` what it last returned."""

    bars: Bars | None
    targets: np.ndarray


def function_agent(function: Callable[[Bars], Any], bars: Bars, rules: AccountConfig) -> Agent:
    """Return the agent of a function of bars, which is called on the history at each decision.

    Args:
      function: `(bars) -> targets`, `[N]` or `[N, A]`.
      bars: any bars of the symbols that it trades; for their names alone.
      rules: of the account.
    """
    name = getattr(function, "__name__", type(function).__name__)
    largest = largest_weight(rules)

    def act(memory: History, bar: Bar, account: Account | None, book: Book | None, first: bool):
        # Kept before trading too: a function may need the whole history at its first decision.
        known = _appended(memory.bars, bar, bars.symbols)
        if account is None:
            return History(known, memory.targets), None, None
        try:
            found = call_function(known, function)
        except ConfigError as error:
            raise ConfigError(
                f"{str(error).rstrip('.')}. It was called on the {len(known)} bars up to "
                f"{known.index[-1]}; give {argument('start')} where it needs more of them."
            ) from None
        # Until it has enough bars it may order nothing, which a backtest would refuse.
        none = np.isnan(np.asarray(found, float)).all()
        targets = np.full(known.close.shape, np.nan)
        targets = targets if none else as_targets(found, known, largest)
        before = memory.targets
        # To rounding, since a function may sum its history in another order when it is longer.
        same = np.isclose(before, targets[: len(before)], rtol=1e-9, atol=1e-12, equal_nan=True)
        if not same.all():
            row = int(np.argmin(same.all(1)))
            raise ConfigError(
                f"{name}: its target at {known.index[row]} changed when the bar of "
                f"{known.index[-1]} came; decide each row with bars up to it."
            )
        weight = in_force(targets, len(targets) - 1)[-1] if first else targets[-1]
        return History(known, targets), account, _decision(weight)

    return Agent(
        symbols=bars.symbols,
        begin=lambda: History(None, np.zeros((0, bars.num_assets))),
        open=lambda: _flat(bars.num_assets, rules),
        act=act,
        first_decision=0,
        rules=rules,
        identity=_identity(name, function),
    )


def _decision(weight: np.ndarray) -> Decision:
    # NaN orders nothing and is harmless; infinity is an order that no broker takes.
    usable = not np.isinf(weight).any()
    return Decision(weight if usable else np.full(len(weight), np.nan), usable=usable)


def _flat(num_assets: int, rules: AccountConfig) -> Account:
    with float64_on_cpu():
        return jax.tree.map(np.asarray, open_account(np.zeros(num_assets), rules))


def _appended(history: Bars | None, bar: Bar, symbols: tuple[str, ...]) -> Bars:
    """Return the bars so far and one more."""
    fields: dict[str, Any] = {name: np.asarray(x)[None] for name, x in fields_of(bar).items()}
    time = fields.pop("time")[:, 0].astype("datetime64[s]")
    one = Bars(time=time, symbols=symbols, source="the feed", **split_columns(fields))
    if history is None:
        return one
    # The whole history is copied at each bar; a function of bars reads all of it anyway.
    joined = {
        name: np.concatenate([getattr(history, name), getattr(one, name)])
        for name in ("time", *one.fields)
    }
    return dataclasses.replace(one, **split_columns(joined))


def _identity_of(strategy: Strategy) -> dict[str, Any]:
    """Return what makes a strategy this one, and of a blend also its parts."""
    if not strategy.parts:
        return _identity(strategy.name, strategy)
    parts = {
        part.name: {
            "share": float(part.share),
            **(_identity_of(part.subject) if part.run is None else identity_of(part.run)),
        }
        for part in strategy.parts
    }
    return {"strategy": strategy.name, "parts": parts, **_versions()}


def _identity(name: str, subject: Any) -> dict[str, Any]:
    """Return the name of a strategy or a function, and the digest of its code and its values."""
    return {"strategy": name, "strategy_source": digest_of(subject)[:16], **_versions()}


def _versions() -> dict[str, Any]:
    """Return the versions that a journal resumes with."""
    return {"versions": versions() | {"nca-trader": NUMBERS}}
