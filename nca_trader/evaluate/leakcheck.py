"""Checks whether a strategy or a feature looks ahead, by running it on other futures.

A decision at row t may depend only on bars up to t. So the subject runs on the bars as they
are and on bars that differ only after t, and every row up to t must be equal. A difference proves
a leak, and the smallest one that was found is shown. No difference in many cases proves nothing.
"""

from __future__ import annotations

import dataclasses
from numbers import Integral
from typing import Any

import jax
import numpy as np

from nca_trader.agents.strategy import Strategy
from nca_trader.agents.targets import needs_account, strategy_targets
from nca_trader.config.ranges import expect
from nca_trader.data.features import Feature, feature_set
from nca_trader.envs.account.state import Rules
from nca_trader.errors import BarError, ConfigError
from nca_trader.evaluate.leaksearch import LENGTH, Example, Search, Subject, listed
from nca_trader.evaluate.simulate import simulate_strategy
from nca_trader.numerics import float64_on_cpu
from nca_trader.progress import tracked
from nca_trader.types import Bars, Costs

LEAST_BARS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The findings of `leakcheck`. Print it.

    Attributes:
      subject: name of what was checked.
      bars: number of bars, and the names of the assets.
      cases: number of cases that were run.
      decided: as given.
      tolerance: as given.
      seed: as given.
      leaks: cases in which a row up to t changed.
      raised: cases without an output, although the subject decides rows up to t when it sees the
        bars after t.
      reacted: cases in which a later row changed, as it should. 0 means that nothing was tested.
      columns: columns of the bars that leak, or "length".
      first_row: the first row that changed in any case; None if none did.
      largest: the largest change; 0 where every change is to or from NaN.
      example: the smallest leak that was found.
      error: the error of the first case that raised, in words; or "".
      notes: further remarks.
    """

    subject: str
    bars: str
    cases: int
    decided: str
    tolerance: float
    seed: int
    leaks: int
    raised: int
    reacted: int
    columns: tuple[str, ...]
    first_row: int | None
    largest: float
    example: Example | None
    error: str
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether no case changed the past or left the subject without an answer."""
        return not self.leaks and not self.raised

    @property
    def verdict(self) -> str:
        """The finding in one line."""
        name, cases = self.subject, self.cases
        if self.leaks:
            through = f"{name} looks ahead through {listed(self.columns)}"
            return f"{through} ({self.leaks} of {cases} cases). {self.example}."
        if self.raised:
            return (
                f"{name} needs later bars to answer for earlier ones "
                f"({self.raised} of {cases} cases). {self.error}."
            )
        if not self.reacted:
            return (
                f"{name}: no row changed in {cases} cases, earlier or later; it is "
                "constant, decides once, or reads its data elsewhere, so this shows nothing."
            )
        return (
            f"{name}: no look-ahead found in {cases} cases; later rows changed in "
            f"{self.reacted} of them, as they should."
        )

    def __str__(self) -> str:
        lines = [self.verdict]
        if self.leaks:
            largest = f"change {self.largest:.3g}" if self.largest else "to or from NaN"
            lines += [
                f"  columns    {listed(self.columns)}",
                f"  first row  {self.first_row} is the earliest that changed",
                f"  largest    {largest}",
            ]
            if self.raised:
                lines.append(f"  raised     in {self.raised} cases. {self.error}")
        lines.append(f"  checked    {self.bars}; decided at the {self.decided}; seed {self.seed}")
        if self.tolerance:
            lines.append(f"  tolerance  {self.tolerance:g}")
        return "\n".join(lines + [f"  note       {note}" for note in self.notes])

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return {"ok": self.ok, "verdict": self.verdict} | dataclasses.asdict(self)


def leakcheck(
    subject: Any,
    bars: Bars,
    *,
    cases: int = 200,
    seed: int = 0,
    decided: str = "close",
    tolerance: float = 0.0,
    name: str | None = None,
) -> Report:
    """Search a strategy or a feature for look-ahead by running it on other futures.

    Args:
      subject: a function `bars -> targets` (or features) of shape `[N]` or `[N, ...]`, one row
        per bar; or a `Strategy`; or a `Feature`, or its name in `FEATURES`.
      bars: at least 20 bars that the subject is meant for, with their holes and history.
      cases: number of other futures to try.
      seed: of the cases; the same seed tries the same ones.
      decided: when row t is decided. "close": bars up to t are known and the order fills later.
        "open": of bar t only its open is known, and that the bar exists.
      tolerance: the largest change that counts as rounding, relative to the value where that is
        above 1. 0 compares bit for bit (NaN equals NaN, 0.0 equals -0.0).
      name: of the subject, for the report.

    Returns:
      A `Report`; `ok` is False where the past changed.

    Raises:
      ConfigError: an unknown feature or option; or a subject that cannot be checked, because on
        the bars as they are it raises, does not return one row per bar, or differs between runs.
      BarError: fewer than 20 bars.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[:200]
      >>> found = nca.leakcheck(lambda bars: bars.close - bars.close.mean(), bars, cases=10)
      >>> found.ok, found.columns
      (False, ('close',))
    """
    expect("cases", cases, Integral, "a whole number")
    if cases < 1:
        raise ConfigError(f"cases = {cases}: try at least one; 200 is usual.")
    if decided not in ("close", "open"):
        raise ConfigError(f"decided = {decided!r} is unknown; there are 'close' and 'open'.")
    if not 0.0 <= tolerance < np.inf:
        raise ConfigError(f"tolerance = {tolerance} is not a tolerance; give 0, or e.g. 1e-9.")
    expect("bars", bars, Bars, "Bars, e.g. of nca.read_bars", subject=subject)
    if len(bars) < LEAST_BARS:
        raise BarError(
            f"{bars.source or 'bars'}: {len(bars)} bars are too few to tell a past from a future; "
            f"give at least {LEAST_BARS}."
        )
    known = as_subject(subject)
    search = Search(known._replace(name=name or known.name), tolerance, decided == "open")
    drawn = search.begin(np.random.default_rng(seed), bars)
    for number in tracked(range(cases), "leakcheck", "cases"):
        search.run(drawn.draw(number))
    # Once more on the bars as they are: this shows what a subject keeps from call to call.
    search.refuse_other(search.values(bars), "changes from call to call")
    if search.early:
        search.notes.append(f"refused too short a history in {search.early} cases")
    # After all cases, as the smallest leak needs some runs of its own.
    example = search.smallest()
    return Report(
        subject=search.subject.name,
        bars=f"{len(bars)} bars of {', '.join(bars.symbols)}",
        cases=cases,
        decided=decided,
        tolerance=tolerance,
        seed=seed,
        leaks=len(search.leaking),
        raised=search.raised,
        reacted=search.reacted,
        columns=tuple(field for field in (*bars.fields, LENGTH) if field in search.through),
        first_row=min((int(found.rows[0]) for _, found in search.leaking), default=None),
        # `fmax` passes over NaN: a change to or from NaN has no size.
        largest=float(np.fmax.reduce([found.largest for _, found in search.leaking], initial=0.0)),
        example=example,
        error=search.error,
        notes=tuple(search.notes),
    )


def as_subject(subject: Any) -> Subject:
    """Turn a function, a `Strategy`, a `Feature` or a feature's name into a function of bars."""
    if isinstance(subject, str):
        return Subject(f"feature {subject}", feature_set((subject,)).batch, True)
    if isinstance(subject, Strategy):

        def decisions(bars: Bars) -> np.ndarray:
            if not needs_account(bars, subject):
                return strategy_targets(bars, subject)
            # Weights held show what stops close as well.
            rules = Rules(order=subject.order)
            return np.asarray(simulate_strategy(bars, subject, Costs(), rules, 0, len(bars)).weight)

        return Subject(subject.name, decisions, True)
    if isinstance(subject, Feature):  # of one asset
        # The state of a feature is of one asset, so each asset gets a copy.
        update = jax.vmap(subject.update)

        def start(num_assets: int, /) -> Any:
            state = subject.init()
            return jax.tree.map(lambda x: np.broadcast_to(x, (num_assets, *np.shape(x))), state)

        # In float64, as a backtest runs it; each number of bars compiles once.
        scan = jax.jit(lambda state, bar: jax.lax.scan(update, state, bar)[1])

        def run(bars: Bars) -> np.ndarray:
            with float64_on_cpu():
                return np.asarray(scan(start(bars.num_assets), bars.as_bar()))

        return Subject("feature", run, True)
    if callable(subject):
        name = getattr(subject, "__name__", type(subject).__name__)
        return Subject(name, subject, False)
    raise ConfigError(
        f"{subject!r} can't be checked; give a function of bars, a Strategy, or a feature or its "
        "name."
    )
