"""`walk_forward`: refits fold by fold, and stitches what was decided out of sample."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from nca_trader.agents import load_agent
from nca_trader.agents.base import base_named
from nca_trader.cloud import Place, place
from nca_trader.config import AccountConfig, AgentConfig, EnvConfig
from nca_trader.config.account import complete_account, gather_account
from nca_trader.config.agent import LEAST_SEEDS, alone
from nca_trader.config.ranges import expect, take_settings
from nca_trader.config.spans import (
    Spans,
    Training,
    check_metric,
    check_spans,
)
from nca_trader.envs import load_env
from nca_trader.errors import CheckFailed, ConfigError, argument
from nca_trader.evaluate import metrics
from nca_trader.evaluate.backtest import backtest, count_trial
from nca_trader.evaluate.combinations import (
    RuleWithLevels,
    combinations_of,
    make_subject,
    refuse_seen,
    takes_bars,
    valid,
    with_levels_of,
)
from nca_trader.evaluate.evidence.deploy import judge, mean_exposure, refuse_other
from nca_trader.evaluate.evidence.inference import mean_difference_interval
from nca_trader.evaluate.evidence.verdict import walk_verdict
from nca_trader.evaluate.result import Result
from nca_trader.evaluate.walkforward import stored
from nca_trader.evaluate.walkforward.folds import Fold, make_folds
from nca_trader.evaluate.walkforward.outcome import (
    CONSTANT,
    WalkForward,
    best_constant,
    closed_sentence,
    join_folds,
    matched_hold,
    table_of,
)
from nca_trader.evaluate.walkforward.refit import (
    Fitted,
    Grid,
    Refit,
    check_fold,
    fit_fold,
    is_agent,
    mean_of,
    train_seed,
)
from nca_trader.evaluate.wording import count
from nca_trader.machine import write_atomically
from nca_trader.markets import Task
from nca_trader.parallel.jobs import Job, parse_workers, run_jobs
from nca_trader.progress import Progress
from nca_trader.runs import trials as trial_log
from nca_trader.runs.consent import own_names
from nca_trader.runs.folder import now
from nca_trader.runs.parts import WorkFolder
from nca_trader.runs.trackers import Tracked, Tracking, named, tracker_of
from nca_trader.runs.trials import data_record, entry_of
from nca_trader.strategies.baselines import MATCHED, baseline_rules, constant_exposure, year_of
from nca_trader.strategies.strategy import Strategy
from nca_trader.types import Bars, Costs

T = TypeVar("T")


def walk_forward(
    bars: Bars | Task,
    subject: Any,
    account: AccountConfig | Costs | None = None,
    spans: Spans | None = None,
    *,
    training: Training | None = None,
    grid: Grid | None = None,
    metric: str = "sharpe",
    folder: str | os.PathLike[str] | None = None,
    trials: str | os.PathLike[str] | None = None,
    workers: int | str | None = None,
    check: bool = True,
    done: Callable[[int, Fitted], None] = lambda number, fitted: None,
    **settings: Any,
) -> WalkForward:
    """Fit on a train span, act on the test span after it, and repeat fold by fold.

    Each fold decides on its own; one account then fills all decisions one after the other. So a
    position is carried from fold to fold, and a change of strategy pays the costs of the trades
    that it causes. An agent decides in each fold on an account of its own, which is flat at the
    fold's first bar, as if it were deployed that day.

    Args:
      bars: N bars of A assets; or a synthetic task.
      subject: what is fitted. A rule (a function of parameters that returns a `Strategy`) with a
        `grid`: each fold takes the best combination. A function of bars that returns a `Strategy`
        or a function of bars: a model fitted on the train span. An agent (a config, a preset's
        name or a path): each fold trains it. A `Strategy`, or a function of bars that returns
        weights, has nothing to refit.
      account: all that the account is given in one record, or only its costs, in the fit as in the
        test. Costs that are not given are none, for an agent those of `env`, for a blend those of
        its runs. An agent trains with what environments have of it, and is tested with the whole.
      spans: how the bars are cut, e.g. `nca.Spans(train=1000, test=250, purge=5)`, or by dates.
      training: of an agent, its environment, seeds and steps, e.g. `nca.Training(env="panel")`.
      grid: values of each parameter, e.g. `{"fast": (5, 10), "slow": (50, 100)}`.
      metric: of `Result.metrics`, by which the train span chooses a combination; more is better.
      folder: keeps each fold in a file, so that the same call resumes after a kill.
      trials: project folder whose trial log counts the walk-forward; None takes the one that
        `folder` is in, and without `folder` nothing is counted.
      workers: None, a number of processes, or a cluster; see `nca_trader.parallel.jobs`.
      check: whether the first fold is fitted again on altered bars, and refused where it depends
        on bars that it must not see. Agents are not trained again: they get their span alone.
      done: called with each fold's number and result as it is ready.
      settings: fields of `nca.Spans` and of `nca.Training` by name, e.g. `train=1000, test=250`, in
        place of the objects; and of `nca.AccountConfig`, as `nca.backtest` takes them. `order`
        None is the strategy's or the agent's own, and "rebalance" for functions of bars.

    Returns:
      The stitched result, its folds and baselines, and a verdict.

    Raises:
      ConfigError: an argument of another type or out of range; spans that do not fit together.
      BarError: bars for fewer than two folds, or too few to train.
      CheckFailed: a fold leaks.
      RunError: `folder` holds something else. StateError: a file there is damaged.
      StoreError: the cluster of `workers` cannot be reached.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500").select("SP500")[-1000:]
      >>> walk = nca.walk_forward(bars, nca.rules.buy_and_hold(), train=500, test=250)
      >>> bool(walk.result.equity.iloc[-1] == walk.baselines["buy and hold"].equity.iloc[-1])
      True
    """
    expect("bars", bars, Bars | Task, "Bars, e.g. of nca.read_bars", subject=subject)
    spans = take_settings("spans", Spans, spans, settings)
    how = take_settings("training", Training, training, settings)
    known = [field.name for cls in (Spans, Training) for field in dataclasses.fields(cls)]
    given = gather_account(account, settings, known)
    check_spans(spans)
    parse_workers(workers)
    check_metric(metric)
    # The task is kept for its environment, which an agent takes where none is given.
    task, bars = bars, bars.bars if isinstance(bars, Task) else bars
    agent = is_agent(subject)
    config = _env_of(how, task) if agent else None
    if config is not None:  # trained as it is tested, but for what no environment has
        config = config.with_account(given.in_training)
    # Tuples, because a generator would be used up by the first fold.
    grid = {key: tuple(values) for key, values in (grid or {}).items()}
    subject = subject if agent else with_levels_of(subject, grid)
    _refuse_subject(subject, grid, how)
    name = how.name or _name_of(subject)
    if agent:
        subject = load_agent(subject)
        alone(subject)  # each seed trains so; refused here what needs several in one program
        seeds = how.seeds or (LEAST_SEEDS if subject.num_seeds == 1 else subject.num_seeds)
        subject = dataclasses.replace(subject, num_seeds=seeds)
    # Before the first fold: a wrong limit should cost no hours.
    complete = complete_account(given, config or subject)
    refit = Refit(
        bars=bars,
        folds=tuple(make_folds(bars, spans)),
        subject=subject,
        grid=grid,
        metric=metric,
        account=dataclasses.replace(given, costs=complete.costs),
        env=config,
        steps=how.steps,
    )
    tested = refit.folds[0].test[0]
    judged = subject
    if grid and not takes_bars(subject, grid):
        judged = make_subject(subject, valid(subject, combinations_of(subject, grid))[0][0])
    refuse_seen(bars, judged, tested, "begin to test at row {row} ({date}) or later")
    if how.deploy is not None:
        last = refit.folds[-1].test[1] - 1
        recipe = None if config is None else (config, refit.subject)
        refuse_other(how.deploy, recipe, bars, last)
    tracker = tracker_of(how.track)  # refused before the first fold
    walk = _Walk(refit, how, folder, trials, workers, check, done, name)
    unit = "agents" if agent else "folds"
    with Progress(walk.seeds * len(refit.folds), "walk forward", unit) as shown:
        fitted = walk.fitted(shown)
    with Progress(None, "compare with the baselines, check a fold"):
        found = walk.stitched(fitted)
    config = stored.settings(refit, {"seeds": walk.seeds, "seed": how.seed})
    walked = Tracked(name, None if folder is None else place(folder), config)
    with contextlib.closing(Tracking(tracker, walked)) as it:
        for number, row in enumerate(found.folds.to_dict("records"), 1):
            it.log(number, {str(key): value for key, value in row.items()})
        it.results = named("test", found.metrics) | named("gate", found.gate)
    return found


def _env_of(training: Training, source: Any) -> EnvConfig:
    if training.env is None and isinstance(source, Task):
        return source.config
    if training.env is None:
        raise ConfigError(f"{argument('env')} is missing; an agent needs an environment.")
    return load_env(training.env)


def _refuse_subject(subject: Any, grid: Grid, training: Training) -> None:
    """Refuse a subject that is none of those that can be walked, and settings without effect."""
    agent = is_agent(subject)
    if not (agent or isinstance(subject, Strategy) or callable(subject)):
        raise ConfigError(
            f"{argument('subject')} is a {type(subject).__name__}; give a Strategy, a rule with a "
            "grid, a function of bars, or an agent."
        )
    if grid and (agent or isinstance(subject, Strategy)):
        what = "an agent" if agent else "a Strategy"
        raise ConfigError(
            f"{argument('grid')}: {what} has no parameters to refit; give the rule itself, "
            "e.g. nca.rules.sma_cross."
        )
    if not agent:
        both = ("name", "track")
        fields = (field.name for field in dataclasses.fields(training) if field.name not in both)
        training.refuse("is of an agent, not of a strategy", *fields)
    if grid and callable(subject):
        one = combinations_of(subject, grid)[0]  # refuses what is not a grid of it
        if isinstance(subject, RuleWithLevels) and takes_bars(subject, one):
            raise ConfigError(
                f"{argument('grid')}: {subject.levels[0]} of a function of bars cannot differ from "
                "fold to fold; give it to the account, or walk a rule."
            )


def _name_of(subject: Any) -> str:
    if isinstance(subject, Strategy):
        return subject.name
    if isinstance(subject, str | os.PathLike):
        return pathlib.Path(subject).stem
    if isinstance(subject, AgentConfig):
        return f"{subject.policy.kind} agent"
    return getattr(subject, "__name__", type(subject).__name__)


@dataclasses.dataclass(frozen=True)
class _Walk:
    """The arguments of one call, and its two halves."""

    refit: Refit
    how: Training
    folder: str | os.PathLike[str] | None
    trials: str | os.PathLike[str] | None
    workers: int | str | None
    check: bool
    done: Callable[[int, Fitted], None]
    name: str

    @functools.cached_property
    def _path(self) -> pathlib.Path | None:
        return None if self.folder is None else pathlib.Path(self.folder)

    @property
    def _log(self) -> Place | None:
        """The project folder that counts the walk-forward."""
        if self.trials is not None:
            log = place(self.trials, "trials")
            return log.resolve() if isinstance(log, pathlib.Path) else log
        return None if self._path is None else self._path.resolve().parent

    @property
    def _agent(self) -> bool:
        return is_agent(self.refit.subject)

    @property
    def seeds(self) -> int:
        """The agents of a fold; 1 of a strategy."""
        return self.refit.subject.num_seeds if self._agent else 1

    @property
    def _base(self) -> Strategy | None:
        """The rule that the agent tilts."""
        env = self.refit.env
        if not self._agent or env is None or (name := self.refit.subject.policy.base) == "none":
            return None
        return base_named(name, env.short).strategy

    def fitted(self, shown: Progress) -> list[Fitted]:
        """Return every fold; those in the folder are not computed again."""
        known: dict[int, Fitted] = {}
        more: dict[str, Any] = {}
        if self._agent:
            how = self.how
            more = {"seeds": self.seeds, "seed": how.seed, "warm_start": how.warm_start}
        settings = {} if self._path is None else stored.settings(self.refit, more)
        parts = WorkFolder(self._path, stored.FILE, "walk-forward", settings, "fold")
        parts.begin()
        for fold in self.refit.folds:
            if (found := stored.read_fold(parts, fold.number)) is not None:
                known[fold.number] = found
        todo = [fold for fold in self.refit.folds if fold.number not in known]
        # The time left is estimated from the folds that are still to be computed.
        shown.skip(len(known) * self.seeds)

        def keep(number: int, fold: Fitted) -> None:
            parts.write(number, stored.arrays_of(fold))
            known[number] = fold
            self.done(number, fold)

        if self._agent:
            self._train(todo, known, keep, shown)
        else:
            # A job gets only the fold's number, because every worker already has the bars in the
            # refit.
            jobs = [Job(fold.name, (fold.number,)) for fold in todo]

            def fitted(job: int, found: Fitted) -> None:
                keep(todo[job].number, found)
                shown.update()

            self._run(fit_fold, jobs, fitted)
            if self.check:
                self._refuse_leak(known, bool(todo))
        return [known[fold.number] for fold in self.refit.folds]

    def _refuse_leak(self, known: Mapping[int, Fitted], computed: bool) -> None:
        """Check one fold once; what was found is kept, so that calling again does not avoid it.

        It comes after all folds, so that it also finds a fit that remembers other folds. Of folds
        that were all in the folder it takes the last one, whose fit had the most to remember.
        """
        kept = None if self._path is None else self._path / stored.CHECKED
        if kept is not None and kept.is_file():
            leak = kept.read_text()
        else:
            fold = self.refit.folds[0 if computed else -1]
            leak = check_fold(self.refit, fold.number, known[fold.number])
            leak = leak and f"{fold.name} leaks: {leak}"
            if kept is not None:
                write_atomically(kept, leak)
        if leak:
            raise CheckFailed(
                f"{leak}. Fit with the bars that are given alone, and decide with bars up to each "
                f"row; {argument('check')} skips this."
            )

    def _train(
        self,
        todo: list[Fold],
        known: Mapping[int, Fitted],
        keep: Callable[[int, Fitted], None],
        shown: Progress,
    ) -> None:
        """Train every seed of every fold; folds that begin with the one before come in turn."""
        rounds = [[fold] for fold in todo] if self.how.warm_start else [todo]
        for folds in filter(None, rounds):
            pairs = [(fold, i) for fold in folds for i in range(self.seeds)]
            jobs = []
            for fold, i in pairs:
                before = known.get(fold.number - 1) if self.how.warm_start else None
                begin = None if before is None else before.leaves[i]
                what = (fold.number, self.how.seed + i, begin)
                jobs.append(Job(f"{fold.name}, seed {i}", what))
            found: dict[int, dict[int, Fitted]] = {}

            def gather(
                job: int,
                trained: Fitted,
                # Bound as defaults, as the loop binds both names again.
                pairs: list[tuple[Fold, int]] = pairs,
                found: dict[int, dict[int, Fitted]] = found,
            ) -> None:
                shown.update()
                fold, i = pairs[job]
                of_fold = found.setdefault(fold.number, {})
                of_fold[i] = trained
                # A fold is kept as soon as its last seed is there.
                if len(of_fold) == self.seeds:
                    each = [of_fold[i] for i in range(self.seeds)]
                    keep(fold.number, mean_of(each, self.refit.subject.ensemble))

            self._run(train_seed, jobs, gather)

    def _run(self, job: Callable[..., T], jobs: list[Job], done: Callable[[int, T], None]) -> None:
        env, code = self.refit.env, self.refit.account.costs.own or ()
        names = own_names(env, self.refit.subject) if env else ()
        run_jobs(job, jobs, self.refit, workers=self.workers, done=done, code=[*code, *names])

    def stitched(self, fitted: list[Fitted]) -> WalkForward:
        """Fill the decisions of all folds with one account, next to the baselines."""
        refit, folds = self.refit, self.refit.folds
        first, last = folds[0].test[0], folds[-1].test[1]
        # `stop` is the date of the first bar that is left out; None if there is no such bar.
        stop = str(refit.bars.index[last]) if last < len(refit.bars) else None
        common: dict[str, Any] = {"start": str(refit.bars.index[first]), "stop": stop}
        env = refit.env
        common["account"] = complete_account(refit.account, env) if env else refit.account
        result, per_year = self._account(fitted, first, common), refit.bars.bars_per_year
        year = year_of(per_year, first)
        known, controls = self._baselines(result, year, common)
        ours, theirs = (metrics.simple_returns(r.equity) for r in (result, controls[CONSTANT]))
        difference = float(np.mean(ours - theirs) * per_year)
        interval = mean_difference_interval(ours, theirs, per_year)
        found = judge(result, {result.name: result.excess_returns}, known, self._base)
        where = f"Out of sample over {count(len(folds), 'fold')}"
        log = self._log and self._log.name
        verdict = walk_verdict(where, result, known, found, difference, interval, log)
        table = table_of(refit, fitted, result)
        verdict = " ".join(filter(None, [verdict, closed_sentence(table)]))
        # Which a page shows above the folds.
        table.attrs["verdict"] = f"{verdict} {found.evidence}"
        return WalkForward(
            result=result,
            folds=table,
            baselines=known | controls,
            difference=difference,
            interval=interval,
            gate=found,
            verdict=verdict,
            bars=refit.bars,
            recipe=(refit.env, refit.subject) if refit.env else None,
            year=year,
        )

    def _account(self, fitted: list[Fitted], first: int, common: dict[str, Any]) -> Result:
        """Backtest what the folds decided, and count it."""
        bars = self.refit.bars
        account = dataclasses.replace(common["account"], order=fitted[0].order)
        if self._agent:  # its targets are weights, which its own sizes have scaled
            account = account.unsized
        decided = join_folds(self.refit, fitted)
        result = backtest(bars, decided, name=self.name, **common | {"account": account})
        if self._log is None:
            return result
        # One trial: the combinations inside were judged on train spans, and none saw a test
        # span. It is what the folds ordered, so the same walk again is not another trial.
        result, tried = count_trial(result, bars, first, self._log, "walk-forward")
        if tried.new:
            entry = entry_of("test", f"walk-forward {self.name}", data_record(bars), time=now())
            trial_log.record(self._log, entry)
        return result

    def _baselines(
        self, result: Result, year: int, common: dict[str, Any]
    ) -> tuple[dict[str, Result], dict[str, Result]]:
        """Backtest the baselines, and the controls, which are known in hindsight only."""
        bars, account = self.refit.bars, common["account"].without_levels
        common = common | {"account": account}
        rules = baseline_rules(year, account.sizing not in (None, "fixed"), self._base)
        known = {name: backtest(bars, rule, **common) for name, rule in rules.items()}
        # These weights include their sizes, so they are not sized again.
        unsized = dataclasses.replace(account, order="rebalance").unsized
        rebalanced: dict[str, Any] = common | {"account": unsized}
        constant = best_constant(bars, result.targets)
        controls = {CONSTANT: backtest(bars, constant, name=CONSTANT, **rebalanced)}
        matched, how = matched_hold(bars, result.weights), rebalanced
        if self._agent:  # as a run would trade it
            matched, how = constant_exposure(mean_exposure(result, account)), common
        controls[MATCHED] = backtest(bars, matched, name=MATCHED, **how)
        return known, controls
