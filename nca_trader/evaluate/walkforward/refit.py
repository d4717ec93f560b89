"""What is fitted in one fold, and how it then acts: a rule's parameters, a model, or an agent."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nca_trader.agents.heads import mean_order
from nca_trader.agents.quantise import leaves_of, params_of
from nca_trader.config import AccountConfig, AgentConfig, EnvConfig
from nca_trader.config.account import complete_account
from nca_trader.config.agent import alone
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import BarError, ConfigError
from nca_trader.evaluate.backtest import backtest
from nca_trader.evaluate.combinations import combinations_of, make_subject, takes_bars
from nca_trader.evaluate.lookahead.futures import Future, changed
from nca_trader.evaluate.lookahead.outputs import compare
from nca_trader.evaluate.sweep.sweep import METRICS, run_combinations
from nca_trader.evaluate.walkforward.folds import Fold, Span
from nca_trader.learner.train import train
from nca_trader.machine import cores, scratch
from nca_trader.parallel.mesh import use_cores
from nca_trader.strategies.strategy import Strategy
from nca_trader.strategies.targets import as_targets, in_force, needs_account, strategy_targets
from nca_trader.types import Bars

Grid = Mapping[str, Sequence[Any]]
FACTORS = (30.0, 1 / 30.0)  # on prices that a fold must not see, where it is checked


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refit:
    """What is refitted fold by fold, and the account that trades it; all jobs share it.

    Attributes:
      bars: all of them; a fold gets its own spans.
      folds: see `make_folds`.
      subject: a `Strategy`, a rule, or a function of bars; an `AgentConfig`.
      grid: values of each parameter that is refitted; {} where nothing is.
      metric: of `Result.metrics`, by which a combination is chosen; more is better.
      account: what the account is given, in the fit as in the test; its costs are known.
      env: of an agent, with that account.
      steps: environment steps of an agent in each fold; None is the agent's own.
    """

    bars: Bars
    folds: Sequence[Fold]
    subject: Any
    grid: Grid
    metric: str
    account: AccountConfig
    env: EnvConfig | None = None
    steps: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
    """What one fold found and decided.

    Attributes:
      targets: `[n, A]` float64 weights of the n rows of the test span, see `act`; NaN: no order.
      chosen: the parameters that the train span chose.
      score: of the choice, on the train span; NaN where nothing was chosen.
      tried: how many combinations it was chosen from; of agents, the seeds that act together.
      order: "on_change" or "rebalance".
      with_account: whether a strategy decides that needs the stitched account itself; `targets` are
        then NaN.
      train_sha256, test_sha256: of the bars, see `Bars.digest`.
      seconds: that the fold took in its worker.
      leaves: of agents, the parameters of each seed, by name.
    """

    targets: np.ndarray
    chosen: dict[str, Any]
    score: float
    tried: int
    order: str
    with_account: bool
    train_sha256: str
    test_sha256: str
    seconds: float
    leaves: tuple[dict[str, np.ndarray], ...] = ()


def is_agent(subject: Any) -> bool:
    """Whether a subject is an agent: its config, the name of a preset, or the path of a file."""
    return isinstance(subject, AgentConfig | str | os.PathLike)


@functools.lru_cache(maxsize=4096)
def _cached(subject: Any, items: tuple[tuple[str, Any], ...]) -> Any:
    return make_subject(subject, dict(items))


def candidate(subject: Any, parameters: Mapping[str, Any]) -> Any:
    """Return the strategy, or the function of bars, of these parameters.

    It is one object for equal ones: jax finds what it compiled for it in an earlier fold.
    """
    return _cached(subject, tuple(parameters.items()))


def scores(refit: Refit, bars: Bars, tried: Sequence[dict[str, Any]]) -> np.ndarray:
    """Return the metric of every combination on `bars`, `[n]`; NaN where it is undefined."""
    if len(tried) > 1 and refit.metric in METRICS and not takes_bars(refit.subject, refit.grid):
        # One program for the whole grid; a loop would compile each combination by itself.
        table = run_combinations(bars, refit.subject, list(tried), refit.account, "f64").table
        rows = table[list(refit.grid)].itertuples(index=False, name=None)
        # By values: a sweep groups combinations, and leaves out those that the rule refuses.
        known = dict(zip(rows, table[refit.metric], strict=True))
        return np.array([known.get(tuple(one.values()), np.nan) for one in tried], np.float64)
    found = []
    for parameters in tried:
        try:
            subject = candidate(refit.subject, parameters)
        except ConfigError:
            # A grid may hold pairs that the rule refuses, e.g. fast not below slow.
            if len(tried) == 1:
                raise
            found.append(np.nan)
            continue
        result = backtest(bars, subject, account=refit.account, look=False, check=False)
        found.append(result.metrics[refit.metric])
    return np.array(found, np.float64)


def fit(refit: Refit, bars: Bars, span: Span) -> tuple[Any, dict[str, Any], float, int]:
    """Fit the subject on the bars of `span` alone.

    Returns:
      The strategy or function of bars that acts, the parameters that were chosen, their score, and
      how many were tried.
    """
    tried = combinations_of(refit.subject, refit.grid) if refit.grid else [{}]
    own = bars[slice(*span)]
    if refit.grid:
        found = scores(refit, own, tried)
        if np.isnan(found).all():
            raise BarError(
                f"{refit.metric} of every combination is undefined on {own.index[0]} to "
                f"{own.index[-1]}: none traded; give a longer train span or other values."
            )
        best = int(np.nanargmax(found))
        return candidate(refit.subject, tried[best]), tried[best], float(found[best]), len(tried)
    if isinstance(refit.subject, Strategy) or not takes_bars(refit.subject, ()):
        # Nothing is fitted: a strategy without a grid.
        return candidate(refit.subject, {}), {}, float("nan"), 1
    # Only the train span is in its reach: later bars are not hidden but absent.
    fitted = refit.subject(own)
    # What it returns says what it is: a model that was fitted, or weights that need no fit.
    if isinstance(fitted, Strategy) or callable(fitted):
        return fitted, {}, float("nan"), 1
    return refit.subject, {}, float("nan"), 1


def act(subject: Any, bars: Bars, fold: Fold, delay: int | None) -> np.ndarray:
    """Return the targets of the rows of the fold's test span, `[n, A]`.

    The history begins where the fold does. The order in force before the test span is repeated at
    its first row, where the fold takes over. The first fold has as many rows more at its beginning
    as orders are late.
    """
    # Bars before the fold are left out, so that its result does not depend on them.
    begin, (first, last) = fold.train[0], fold.test
    own = bars[begin:last]
    if isinstance(subject, Strategy):
        targets = strategy_targets(own, subject)
    else:
        targets = as_targets(subject(own), own)
    start = max(first - begin - (delay or 0) * (fold.number == 0), 0)
    return in_force(targets, start)[start:]


def fit_fold(refit: Refit, number: int) -> Fitted:
    """Fit one fold, and let it act on its test span: the job of everything but agents."""
    began, fold = time.perf_counter(), refit.folds[number]
    subject, chosen, score, tried = fit(refit, refit.bars, fold.train)
    # Its orders depend on fills, which only the account of all folds has.
    if needs := needs_account(refit.bars, subject):
        own = isinstance(refit.subject, Strategy)
        if not (refit.grid or own) and takes_bars(refit.subject, ()):
            raise ConfigError(
                f"strategy {subject.name!r}: sees its portfolio or orders exits, and a function "
                "fitted it, so that a file cannot hold it; give a rule with a grid."
            )
        rows = fold.test[1] - fold.test[0]
        targets = np.full((rows, refit.bars.num_assets), np.nan)
    else:
        targets = act(subject, refit.bars, fold, refit.account.delay)
    return Fitted(
        targets=targets,
        chosen=chosen,
        score=score,
        tried=tried,
        order=complete_account(refit.account, subject).order,
        with_account=needs,
        train_sha256=refit.bars[slice(*fold.train)].digest(),
        test_sha256=refit.bars[slice(*fold.test)].digest(),
        seconds=time.perf_counter() - began,
    )


def check_fold(refit: Refit, number: int, fitted: Fitted) -> str:
    """Fit and run one fold again on altered bars; return what leaked, or "".

    1. Every bar that is not of the train span is replaced. The fit must come to the same choice and
       decisions. It also finds a function that remembers what it was given in another fold.
    2. The bars of the test span's second half are replaced. Earlier decisions must stay.
    """
    fold, bars, delay = refit.folds[number], refit.bars, refit.account.delay
    rows = np.arange(len(bars))
    own = (rows >= fold.train[0]) & (rows < fold.train[1])
    begin, end = fold.test
    middle = (begin + end) // 2

    def altered(rows: np.ndarray, factor: float) -> Bars:
        # The same noise at each call: a check that is repeated must find the same.
        cells = np.broadcast_to(rows[:, None], bars.close.shape)
        rng, future = np.random.default_rng(0), Future(cells, cells)
        return changed(rng, bars, "values", future, factor)

    subject: Any = None
    for factor in FACTORS:
        subject, chosen, score, _ = fit(refit, altered(~own, factor), fold.train)
        same = chosen == fitted.chosen and np.array_equal(score, fitted.score, equal_nan=True)
        # Its decisions are not in the file, and are made by the account later.
        if same and not fitted.with_account:
            same = np.array_equal(act(subject, bars, fold, delay), fitted.targets, equal_nan=True)
        if not same:
            return (
                "its fit depends on bars outside of the train span, or on what it saw in other "
                "folds"
            )
        if refit.grid:
            break  # fits of a grid are this package's own, and take longer
    # A `Strategy` gets one bar after the other, so only a function can look ahead.
    for factor in () if isinstance(subject, Strategy) else FACTORS:
        again = act(subject, altered(rows >= middle, factor), fold, delay)
        if compare(fitted.targets, again, len(again) - end + middle - 1, tolerance=0.0):
            return "its decisions depend on later bars"
    return ""


def train_seed(refit: Refit, number: int, seed: int, begin: dict[str, np.ndarray] | None) -> Fitted:
    """Train one seed of an agent in one fold, and let it act: the job of agents.

    Args:
      refit: of the walk-forward.
      number: of the fold.
      seed: of all random numbers.
      begin: parameters of the fold before (a warm start); None draws them.
    """
    began, fold, env = time.perf_counter(), refit.folds[number], refit.env
    assert env is not None  # `walk_forward` gives every agent an environment
    agent = alone(refit.subject)  # so that workers share the seeds of a fold
    if (devices := int(np.prod(agent.mesh.axes))) > 1:
        use_cores(min(devices, cores()))
    (first, last), (start, stop) = fold.train, fold.test
    params = None if begin is None else params_of(begin)
    bars = refit.bars
    with scratch() as folder:
        # The folder is deleted at the end: metrics and checkpoints of a job are not kept.
        run = train(
            TradingEnv(bars[first:last], env),
            agent,
            folder / "run",
            steps=refit.steps,
            seed=seed,
            params=params,
        )
        # The run gets no bars before its train span, as in a new start. The account of all folds
        # is late, and not what is decided.
        account = dataclasses.replace(refit.account, delay=0)
        how = {"account": account, "start": str(bars.index[start]), "look": False}
        result = backtest(bars[first:stop], run, **how)
        leaves = leaves_of(run.params())
    return Fitted(
        targets=result.targets.to_numpy(),
        chosen={},
        score=math.nan,
        tried=1,
        order=complete_account(refit.account, env).order,
        with_account=False,
        train_sha256=bars[first:last].digest(),
        test_sha256=bars[start:stop].digest(),
        seconds=time.perf_counter() - began,
        leaves=(leaves,),
    )


def mean_of(seeds: Sequence[Fitted], ensemble: str) -> Fitted:
    """Return the fold's result from its seeds: what they order together, see `mean_order`.

    Each seed decides on an account of its own. To select one of them on a part of the train span
    would be a lottery, and would take that part from training.
    """
    return dataclasses.replace(
        seeds[0],
        targets=mean_order([seed.targets for seed in seeds], ensemble),
        tried=len(seeds),
        seconds=sum(seed.seconds for seed in seeds),
        leaves=tuple(seed.leaves[0] for seed in seeds),
    )
