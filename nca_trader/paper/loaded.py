"""One decision, anywhere: `nca.load` opens an agent that other programs ask for target weights."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from nca_trader.cloud import CloudPath
from nca_trader.config import AccountConfig
from nca_trader.config.ranges import describe, expect
from nca_trader.envs.account.risk import sizes
from nca_trader.errors import BarError, ConfigError
from nca_trader.evaluate.simulate import decide_last
from nca_trader.paper.journal.bars import complete
from nca_trader.paper.session.core import Core, Observed, View
from nca_trader.paper.session.subjects import agent_of
from nca_trader.runs.exported import read_run
from nca_trader.runs.manifest import Run
from nca_trader.strategies.strategy import Opened, sized_once, weights_by_covariance
from nca_trader.strategies.targets import strategy_targets
from nca_trader.types import PRICES, Bar, Bars, fields_of, split_columns

Weights = ArrayLike | Mapping[str, float] | pd.Series


def load(
    path: str | os.PathLike[str] | CloudPath,
    seed: int | None = None,
    force_agent: bool = False,
    allow_code: bool = False,
) -> LoadedAgent:
    """Open an agent that decides anywhere: in a script, a notebook, a service of your own.

    Args:
      path: a run folder, or a file that `nca-trader export` wrote.
      seed: the agent that acts; None is the one that was chosen, or the mean of all.
      force_agent: the agent, also where a baseline was deployed in its place.
      allow_code: whether code that the run names and that came from elsewhere may load.

    Returns:
      The agent, or the baseline that was deployed in its place.

    Raises:
      RunError: there is no run.
      StateError: it is damaged.
      ConfigError: it names code of its own without your consent.

    Example:
      >>> import nca_trader as nca
      >>> agent = nca.load("agent.nca")  # doctest: +SKIP
      >>> agent.decide(bars, weights=[0.5, 0.0])  # doctest: +SKIP
      array([0.5, 0.5])
    """
    expect("path", path, str | os.PathLike | CloudPath, "a run folder or an exported file")
    return LoadedAgent(read_run(path, seed=seed, force_agent=force_agent, allow_code=allow_code))


class LoadedAgent(Opened):
    """An agent, or the baseline that was deployed in its place; `nca.load` opens it.

    Attributes:
      run: the run that it is of. name: of what decides. symbols: that trained it.

    Example:
      >>> import nca_trader as nca
      >>> agent = nca.load("agent.nca")  # doctest: +SKIP
      >>> agent.symbols  # doctest: +SKIP
      ('SP500', 'NASDAQ')
    """

    def __init__(self, run: Run):
        """Wrap an opened run."""
        self.run, self.symbols = run, run.spec.symbols
        self.name = run.name if run.replacement is None else run.replacement.name

    @functools.cached_property
    def _params(self) -> Any:
        return self.run.params()

    def __repr__(self) -> str:
        return f"LoadedAgent({self.name!r}, {', '.join(self.symbols)})"

    def decide(self, bars: Bars, weights: Weights, ordered: Weights | None = None) -> np.ndarray:
        """Return the target weights at the last close of `bars`, bit for bit those of a backtest.

        It reads all of `bars` at each call. For one decision after another `stream` is faster.

        Args:
          bars: N bars of A assets, closed, the newest last. The features and the receptive field
            need some history; start where the backtest starts, to get its bits.
          weights: `[A]` held at that close, before the decision, as fractions of equity; or by
            symbol.
          ordered: `[A]` the last target weights that were ordered, NaN for none; None is `weights`.

        Returns:
          `[A]` float64 target weights. A rule that orders nothing repeats its last target, and NaN
          before its first.

        Raises:
          BarError: symbols that the agent does not trade, or too few bars for a decision.
          ConfigError: weights of another shape, or not finite; an agent that remembers what it
            earned, e.g. of `reward = "drawdown"`, which needs `stream`.
        """
        expect("bars", bars, Bars, "nca.Bars", weights=weights)
        held = _weights("weights", weights, bars.symbols)
        before = held if ordered is None else _weights("ordered", ordered, bars.symbols, held)
        rule = self.run.replacement
        if rule is None:
            if self.run.spec.memory:
                raise ConfigError(
                    f"{self.run.path}: its agent observes what it earned (reward = "
                    f"{self.run.spec.memory!r}), which one decision does not show; use `stream`."
                )
            return decide_last(bars, self.run, self._params, held, before)
        if rule.sees_portfolio:
            raise ConfigError(
                f"{rule.name}: sees the fills of its account, which weights do not show; use "
                "nca.paper_trade."
            )
        rules = self.run.account
        targets = strategy_targets(bars, sized_once(rule, rules.scale))
        if rules.scale is not None:
            targets = targets * sizes(bars, rules.scale)
        elif rules.covariance is not None:
            targets = weights_by_covariance(bars, targets, rules.covariance)
        return pd.DataFrame(targets).ffill().to_numpy()[-1]

    def stream(self, history: Bars | None = None) -> AgentStream:
        """Return the agent as a stream of closed bars, which remembers what it has seen.

        Args:
          history: bars before the first one that is decided at. They also say which symbols are
            traded; None are those that trained the agent.

        Raises:
          BarError: symbols that the agent does not trade.
        """
        return AgentStream(self.run, history)


class AgentStream:
    """An agent that is given one closed bar after the other; `LoadedAgent.stream` begins it.

    Attributes:
      symbols: `A` names, in the order of weights. rows: bars seen. first_decision: bars that it has
        to see before the first that it decides at.

    Example:
      >>> live = nca.load("agent.nca").stream(history)  # doctest: +SKIP
      >>> live.update(bar, weights=[0.0, 0.5])  # doctest: +SKIP
      array([0.5, 0.5])
    """

    def __init__(self, run: Run, history: Bars | None = None):
        """Begin before any bar, or after `history`."""
        if history is None:
            none, names = np.zeros((0, run.spec.num_assets)), run.spec.symbols
            fields: Any = dict.fromkeys((*PRICES, "volume", "present"), none)
            history = Bars(time=np.zeros(0, "datetime64[ns]"), symbols=names, **fields)
        expect("history", history, Bars, "nca.Bars of the bars before the first decision")
        # What is ordered and filled is the caller's; an amount of money sizes nothing here.
        agent = agent_of(run.path, run, history, 1.0, AccountConfig())
        if agent.sees_book:
            raise ConfigError(
                f"{run.path}: what was deployed sees the fills of its account; use nca.paper_trade."
            )
        self.symbols, self.first_decision = agent.symbols, agent.first_decision
        self._memory = "" if run.replacement is not None else run.spec.memory
        self._core = Core(agent, "")
        self._state = self._core.begin()
        self._seen = history[:0]
        for bar in history.each():
            self._step(bar)

    @property
    def rows(self) -> int:
        """Bars seen so far."""
        return self._state.rows

    def update(
        self,
        bar: Bar | Bars,
        weights: Weights,
        ordered: Weights | None = None,
        equity: float | None = None,
    ) -> np.ndarray:
        """Take one closed bar, and return the target weights at its close.

        Args:
          bar: fields `[A]`, e.g. of `Bars.each`; or bars of one row. An asset without a bar has
            `present` False.
          weights: `[A]` held at this close, before the decision, as fractions of equity; or by
            symbol.
          ordered: `[A]` the last target weights that were ordered; None are those that the last
            call returned.
          equity: of the account, in any unit; only agents that remember what they earned need it.

        Returns:
          `[A]` float64 target weights, NaN for no order, e.g. up to `first_decision`.

        Raises:
          BarError: a bar of other assets, not after the last one, or with impossible prices. The
            stream is as it was.
          ConfigError: weights of another shape, or not finite; no `equity` where it is needed.
        """
        one, held = self._one(bar), _weights("weights", weights, self.symbols)
        before = None if ordered is None else _weights("ordered", ordered, self.symbols, held)
        if self._memory and equity is None:
            raise ConfigError(
                f"equity: the agent observes what it earned (reward = {self._memory!r}); give the "
                "account's equity at this close."
            )
        worth = 1.0 if equity is None else equity
        if not (isinstance(worth, int | float | np.number) and 0.0 < worth < np.inf):
            raise ConfigError(f"equity is {describe(equity)}; give a number above 0.")
        return self._step(one, held, before, float(worth))

    def _step(
        self,
        bar: Bar,
        held: np.ndarray | None = None,
        ordered: np.ndarray | None = None,
        equity: float = 1.0,
    ) -> np.ndarray:
        """Learn a bar, and decide at it where `held` is given."""
        state, none = self._state, np.zeros(len(self.symbols), bool)
        bar = complete(bar, state.close)
        legs, view = self._core.legs(state, bar), View()
        if held is not None and self._core.ready(state, bar):
            zeros = np.zeros(len(held))
            seen = Observed(equity, held, none, none, zeros, np.asarray(bar.close), equity, none)
            view = self._core.reported(state, bar, legs, seen)
            if ordered is not None and view.account is not None:
                view = view._replace(account=view.account._replace(ordered=ordered))
        self._state, found = self._core.step(state, bar, legs, view)
        if found.decision is None:
            return np.full(len(self.symbols), np.nan)
        return np.array(found.decision.target, np.float64)

    def _one(self, bar: Bar | Bars) -> Bar:
        """Return a bar of `[A]` fields, checked."""
        if isinstance(bar, Bars):
            if bar.symbols != self.symbols or len(bar) != 1:
                raise BarError(
                    f"bar is {len(bar)} bars of {', '.join(bar.symbols)}; give one of "
                    f"{', '.join(self.symbols)}."
                )
            bar = next(bar.each())
        expect("bar", bar, Bar, "one nca.Bar, or nca.Bars of one row")
        shape = (len(self.symbols),)
        arrays = {name: np.asarray(x) for name, x in fields_of(bar).items()}
        for name, array in arrays.items():
            if array.shape != shape:
                raise BarError(
                    f"bar: {name} has shape {array.shape} where [A] = {shape} is expected; give a "
                    f"number for each of {', '.join(self.symbols)}."
                )
        one = bar._replace(**split_columns(arrays))
        there = arrays["present"].astype(bool)
        last = self._state.last
        if last is not None and int(one.time[0]) <= last:
            raise BarError(f"bar: its time {int(one.time[0])} is not after the last bar's, {last}.")
        with np.errstate(invalid="ignore"):
            inside = (one.low > 0) & (one.low <= one.open) & (one.open <= one.high)
            inside &= (one.low <= one.close) & (one.close <= one.high) & np.isfinite(one.high)
        if bad := [s for s, ok in zip(self.symbols, inside | ~there, strict=True) if not ok]:
            raise BarError(
                f"bar: {bad[0]} has impossible prices; low is above 0 and at most open and close, "
                "high at least these. An asset without a bar has present = False."
            )
        return one


def _weights(
    name: str, given: Weights, symbols: tuple[str, ...], unset: np.ndarray | None = None
) -> np.ndarray:
    """Return `[A]` float64 weights in the order of `symbols`; NaN becomes `unset`, if given."""
    if isinstance(given, pd.Series | Mapping):
        named = {str(symbol): value for symbol, value in given.items()}
        if set(named) != set(symbols) or len(named) != len(given):
            raise ConfigError(
                f"{name} are of {', '.join(named) or 'no symbol'}; give {', '.join(symbols)}."
            )
        given = [named[symbol] for symbol in symbols]
    try:
        array = np.atleast_1d(np.asarray(given, np.float64))
    except (TypeError, ValueError):
        array = np.full((), np.nan)
    if unset is not None and array.shape == unset.shape:
        array = np.where(np.isnan(array), unset, array)
    if array.shape != (len(symbols),) or not np.isfinite(array).all():
        raise ConfigError(
            f"{name} = {given!r}: give a finite number for each of {', '.join(symbols)}."
        )
    return array
