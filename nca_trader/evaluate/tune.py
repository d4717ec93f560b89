"""`tune`: searches hyper-parameters of an agent with Optuna, and counts every trial.

Each trial trains agents on the first part of the bars and scores them on the last. The bars after
those that are given stay unseen: they are for one evaluation of the best.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from nca_trader.agents import load_agent
from nca_trader.config import AccountConfig, AgentConfig, EnvConfig
from nca_trader.config.account import EXITS, OFF, complete_account, gather_account
from nca_trader.config.agent import alone
from nca_trader.config.ranges import expect, take_settings
from nca_trader.config.records import finite, plain
from nca_trader.config.spans import (
    Range,
    Training,
    check_metric,
    check_optuna,
    check_space,
    override,
)
from nca_trader.config.toml import to_toml
from nca_trader.envs import load_env
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import ConfigError, argument
from nca_trader.evaluate.backtest import backtest
from nca_trader.evaluate.evidence.inference import expected_max_sharpe
from nca_trader.learner.train import train
from nca_trader.machine import scratch, write_atomically
from nca_trader.parallel.jobs import Job, parse_workers, run_jobs
from nca_trader.progress import Progress
from nca_trader.runs import trials
from nca_trader.runs.consent import codes_of, own_names
from nca_trader.runs.folder import now
from nca_trader.runs.parts import WorkFolder
from nca_trader.runs.trackers import Tracked, Tracking, tracker_of
from nca_trader.runs.trials import data_record, entry_of
from nca_trader.types import Bars

JOURNAL, SETTINGS, BEST = "study.log", "tune.json", "best.toml"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
    """The result of a search.

    Attributes:
      trials: one row per trial: its hyper-parameters, its score (NaN where it failed), the scores
        of its seeds.
      best: the agent of the best trial.
      score: of the best trial, on the selection span.
      count: trials in the trial log on these symbols, with those of this search; what deflated
        statistics take as the number of trials.
      by_luck: the Sharpe ratio per year that the best of `count` agents without skill is expected
        to show on as many bars; NaN for another metric.
      path: of the best agent's TOML file.
    """

    trials: pd.DataFrame
    best: AgentConfig
    score: float
    count: int
    by_luck: float
    path: pathlib.Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Search:
    """What every trial of a search shares."""

    bars: Bars
    env: EnvConfig
    account: AccountConfig
    agent: AgentConfig
    edge: int
    steps: int | None
    seed: int
    metric: str


def tune(
    bars: Bars,
    agent: AgentConfig | str | os.PathLike[str],
    space: Mapping[str, Range],
    folder: str | os.PathLike[str],
    *,
    account: AccountConfig | None = None,
    training: Training | None = None,
    trials: int = 20,
    selection: float = 0.2,
    metric: str = "sharpe",
    batch: int = 4,
    workers: int | str | None = None,
    done: Callable[[int, float], None] = lambda number, score: None,
    **settings: Any,
) -> Tuned:
    """Search hyper-parameters of an agent; a folder that holds a search resumes it.

    Args:
      bars: all that the search may see.
      agent: what is searched around, a config, a preset's name or a path.
      space: a `Range` by key of the agent, see `nca_trader.config.spans.parse_space`.
      folder: holds the study (Optuna's journal), its settings, and the best agent.
      account: what the account is given, in the place of the environment's: agents train with what
        environments have of it, and are scored with the whole.
      training: the environment, and the seeds and steps of each trial.
      trials: of the search in all, with those that a resumed one has done.
      selection: share of the bars, at the end, that score.
      metric: of `Result.metrics`, more is better.
      batch: trials that are proposed together and train at once. The search depends on it, and
        not on the number of workers.
      workers: see `nca_trader.parallel.jobs`.
      done: called with each trial's number and score.
      settings: fields of `nca.Training` and of `nca.AccountConfig` by name, in place of the
        objects, e.g. `env="index_daily"`.

    Returns:
      The trials and the best agent.

    Raises:
      ConfigError: an argument that is not valid, or Optuna is missing.
      RunError: `folder` holds another search, or something else.

    Example:
      >>> import nca_trader as nca
      >>> from nca_trader.config.spans import Range
      >>> space = {"optimizer.learning_rate": Range(low=1e-5, high=1e-2, log=True)}
      >>> bars = nca.sample_bars("sp500").between(None, "2013")
      >>> found = nca.tune(bars, "nano", space, "runs/a", env="index_daily")  # doctest: +SKIP
      >>> found.best.optimizer.learning_rate  # doctest: +SKIP
      0.0008
    """
    check_optuna()
    expect("bars", bars, Bars, "Bars, e.g. of nca.read_bars", agent=agent)
    check_metric(metric)
    parse_workers(workers)
    how = take_settings("training", Training, training, settings)
    how.refuse("is of a walk-forward", "warm_start", "deploy", "name")
    known = [*inspect.signature(tune).parameters, "env", "seeds", "steps", "seed"]
    given = gather_account(account, settings, known)
    steps, seed, seeds = how.steps, how.seed, how.seeds or 1
    for name, value in (("trials", trials), ("batch", batch)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{argument(name, value)}: give a whole number of at least 1.")
    if not 0.0 < selection < 1.0:
        raise ConfigError(f"{argument('selection', selection)}: give a share between 0 and 1.")
    if not space:
        raise ConfigError(f"{argument('space')}: no hyper-parameter to search; give one.")
    config = load_env(how.env).with_account(given.in_training)
    complete_account(given, config)  # refused before the first trial
    # A job trains one seed, so that workers share the seeds of a trial.
    loaded = alone(load_agent(agent))
    # With the agent: a key is known, and both ends are values that its config accepts.
    check_space(loaded, space)
    search = _Search(
        bars=bars,
        env=config,
        account=given,
        agent=loaded,
        edge=len(bars) - round(len(bars) * selection),
        steps=steps,
        seed=seed,
        metric=metric,
    )
    path = pathlib.Path(folder)
    decisive = {
        "bars": bars.digest(),
        "env": plain(config),
        "agent": plain(loaded),
        # Of own features, costs and so on, which the configs above only name.
        "code": plain(codes_of(own_names(config, loaded)) or {}),
        "space": {name: values._asdict() for name, values in space.items()},
        "steps": steps,
        "seeds": seeds,
        "seed": seed,
        "selection": selection,
        "metric": metric,
        "batch": batch,
    }
    levels = {name: x for name in EXITS if (x := getattr(given, name)) not in (None, OFF[name])}
    if given.delay or given.risk or levels:
        decisive["account"] = {"delay": given.delay, "risk": plain(given.risk), **levels}
    tracker = tracker_of(how.track)
    WorkFolder(path, SETTINGS, "search", decisive).begin()
    study = study_of(path / JOURNAL)
    before = len(_finished(study))
    searched = Tracked(path.resolve().name, path, decisive)
    with (
        Progress(trials * seeds, "tune", "agents") as shown,
        contextlib.closing(Tracking(tracker, searched, before)) as tracked,
    ):

        def report(number: int, score: float) -> None:
            tracked.log(number, study.get_trials()[number].params | {"score": score})
            done(number, score)

        # The time left is estimated from what is still to be trained.
        shown.skip(min(before, trials) * seeds)
        _search(study, search, space, path, trials, seeds, batch, workers, report, shown)
        found = _result(study, search, path)
        tracked.results = {name: getattr(found, name) for name in ("score", "count", "by_luck")}
    return found


def study_of(file: pathlib.Path, name: str = "tune") -> Any:
    """Open a study in a journal, or begin one that is maximised."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(file)))
    study = optuna.create_study(
        storage=storage, study_name=name, direction="maximize", load_if_exists=True
    )
    # Trials that a kill interrupted: their values are proposed again, by the same seed.
    for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    return study


def _finished(study: Any) -> list[Any]:
    """Return the trials that were trained and scored, whether or not they have a score."""
    return [trial for trial in study.get_trials() if "scores" in trial.user_attrs]


def _search(
    study: Any,
    search: _Search,
    space: Mapping[str, Range],
    folder: pathlib.Path,
    total: int,
    seeds: int,
    batch: int,
    workers: int | str | None,
    done: Callable[[int, float], None],
    shown: Progress,
) -> None:
    import optuna

    root = folder.resolve()
    data = data_record(search.bars)
    while (begun := len(_finished(study))) < total:
        # Seeded by what is done, so that a resumed search proposes what an unbroken one would.
        study.sampler = optuna.samplers.TPESampler(seed=search.seed + begun)
        asked = [study.ask() for _ in range(min(batch, total - begun))]
        proposed = [overrides_of(trial, space) for trial in asked]
        pairs = [(k, i) for k in range(len(asked)) for i in range(seeds)]
        jobs = [
            Job(f"trial {asked[k].number}, seed {i}", (proposed[k], search.seed + i))
            for k, i in pairs
        ]
        agents = [load_agent(search.agent, overrides) for overrides in proposed]
        code = [name for agent in agents for name in own_names(search.env, agent)]
        # Counted before they train, so that no trial is forgotten.
        for trial in asked:
            name = f"{root.name}-{trial.number}"
            trials.record(root.parent, entry_of("train", name, data, trials=seeds, time=now()))
        found = run_jobs(
            _score,
            jobs,
            search,
            workers=workers,
            done=lambda number, score: shown.update(),
            code=code,
        )
        for k, trial in enumerate(asked):
            each = found[k * seeds : (k + 1) * seeds]
            # If one seed never traded, the mean is NaN and the trial fails, however good the other
            # seeds are.
            score = float(np.mean(each))
            trial.set_user_attr("scores", finite(each))
            if math.isnan(score):  # an agent that never trades has no Sharpe ratio
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, score)
            done(trial.number, score)


def overrides_of(trial: Any, space: Mapping[str, Range]) -> list[str]:
    """Draw the values of a trial; return them as overrides of the agent."""
    found = []
    for key, values in space.items():
        if values.choices:
            value = trial.suggest_categorical(key, list(values.choices))
        elif isinstance(values.low, int) and isinstance(values.high, int):
            value = trial.suggest_int(key, values.low, values.high, log=values.log)
        else:
            value = trial.suggest_float(key, values.low, values.high, log=values.log)
        found.append(override(key, value))
    return found


def _score(search: _Search, overrides: list[str], seed: int) -> float:
    """Train one agent of a trial, and score it on the selection span: one job."""
    agent = load_agent(search.agent, overrides)
    with scratch() as folder:
        env = TradingEnv(search.bars[: search.edge], search.env)
        # The folder is deleted at the end: only the score is kept, and the trial log is elsewhere.
        run = train(env, agent, folder / "run", steps=search.steps, seed=seed)
        start = str(search.bars.index[search.edge])
        result = backtest(search.bars, run, account=search.account, start=start, look=False)
        return result.metrics[search.metric]


def _result(study: Any, search: _Search, folder: pathlib.Path) -> Tuned:
    rows = [
        {"trial": t.number, **t.params, "score": math.nan if t.value is None else t.value}
        | {"seeds": t.user_attrs["scores"]}
        for t in _finished(study)
    ]
    table = pd.DataFrame(rows).set_index("trial")
    best, score = search.agent, math.nan
    if table["score"].notna().any():
        number = int(table.index[int(np.nanargmax(table["score"]))])
        chosen = next(t for t in study.get_trials() if t.number == number)
        overrides = [override(key, value) for key, value in chosen.params.items()]
        best, score = load_agent(search.agent, overrides), float(chosen.value)
    write_atomically(folder / BEST, to_toml(best))
    count = trials.count(folder.resolve().parent, "train", data_record(search.bars))
    luck, num = math.nan, len(search.bars) - search.edge
    if search.metric == "sharpe":
        # Of trials without skill, whose ratios have a variance of 1 / (T - 1).
        per_bar = expected_max_sharpe(max(count, 1), 1.0 / max(num - 1, 1))
        luck = per_bar * math.sqrt(search.bars.bars_per_year)
    return Tuned(
        trials=table, best=best, score=score, count=count, by_luck=luck, path=folder / BEST
    )
