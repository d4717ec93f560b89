"""From a run folder and a bar file to a finished paper session."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nca_trader.agents.policy import Params, read_out
from nca_trader.cloud import CloudPath
from nca_trader.config.ranges import expect, moment
from nca_trader.data.features import feature_set
from nca_trader.envs.account.state import Account, rules_of
from nca_trader.errors import BarError, ConfigError, argument
from nca_trader.numerics import float64_on_cpu
from nca_trader.paper.broker import SimulatedBroker
from nca_trader.paper.core import Agent
from nca_trader.paper.feed import ReplayFeed, parse_feed
from nca_trader.paper.journal import Journal
from nca_trader.paper.reading import replayed
from nca_trader.paper.session import Session
from nca_trader.runs.exported import read_run
from nca_trader.runs.manifest import Run, seen_rows, versions

DEFAULT_CAPITAL = 100_000.0  # money


def agent_of(run: Run) -> Agent:
    """What a session needs of `run`: its selected seed, its costs, its rules."""
    if run.env_config.market and run.env_config.market_state:
        raise ConfigError(
            f"{run.path}: its agent observes the state of the market {run.env_config.market}, "
            "which no feed has; paper-trade one that was trained on bars alone."
        )
    policy, params = run.policy, run.params()
    digest = params_digest(params)
    params = jax.device_put(params, jax.local_devices(backend="cpu")[0])
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
            "config": {name: run.manifest["config"][name] for name in ("env.toml", "agent.toml")},
            "params": digest,
            "versions": versions(),
        },
    )


def params_digest(params: Params) -> str:
    """SHA-256 over every leaf's path, type, shape and bytes."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)}{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def seconds_of(date: str | None) -> int | None:
    """Seconds since 1970 of a date or time, UTC where it names no zone; None for None."""
    if date is None:
        return None
    return int(np.ceil(moment(date, "start").timestamp()))


def paper_trade(
    run: str | os.PathLike[str] | CloudPath,
    feed: str,
    journal: str | os.PathLike[str],
    broker: str = "simulated",
    start: str | None = None,
    capital: float = DEFAULT_CAPITAL,
    stop: Callable[[], bool] = lambda: False,
    reading: Mapping[str, Any] | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """Paper-trades the agent of a run folder; bad input is refused before anything is written.

    Args:
      run: the run folder, or an exported file. feed: `replay:FILE`.
      journal: SQLite file, made if it is not there.
      broker: "simulated". start: date before which nothing is decided. capital: money.
      stop: asked after each bar; True ends the session there, to be gone on with later.
      reading: options of `read_bars` for the feed's file.
      seed: number of the agent that trades; None is the selected one.

    Returns:
      `Session.result()`; `in_sample`, how many of the bars traded so far are no later than the
      last that trained or selected the agent; `seed`, and `agent`, which names it and the others.
    """
    for name, path in {"run": run, "journal": journal}.items():
        expect(name, path, str | os.PathLike | CloudPath, "a path")
    expect("capital", capital, Real, "a sum of money")
    replayed(feed, broker)
    first = seconds_of(start)
    opened_run = read_run(run, seed=seed)
    agent = agent_of(opened_run)
    source = parse_feed(feed, agent.symbols, reading)
    _refuse_too_few(source, agent, start, first)
    if agent.rules.capital is not None:  # lots and fees are those of the money that is traded
        agent = agent._replace(rules=agent.rules._replace(capital=float(capital)))
    books = SimulatedBroker(capital, agent.costs, agent.symbols, agent.rules)
    with contextlib.closing(Journal(Path(journal), clock=source.now)) as opened:
        result = Session(agent, books, opened, capital, first).trade(source, stop)
    times = source.bars.time.astype("datetime64[s]").astype(np.int64)
    begun = agent.first_decision if first is None else int(np.searchsorted(times, first))
    begun = max(begun, agent.first_decision)
    seen = min(seen_rows(source.bars, opened_run), result["bars"])
    named = {"seed": opened_run.selected, "agent": opened_run.described}
    in_sample = min(max(seen - begun, 0), result["decisions"])
    return result | {"in_sample": in_sample} | named


def _refuse_too_few(feed: ReplayFeed, agent: Agent, start: str | None, first: int | None) -> None:
    if len(feed) <= agent.first_decision:
        raise BarError(
            f"{feed.source}: {len(feed)} bars, and the agent's first decision needs "
            f"{agent.first_decision + 1} (warm-up and receptive field); give a longer file."
        )
    if first is not None and first > feed.last:
        raise BarError(
            f"{feed.source}: ends at {np.datetime64(feed.last, 's')}, before "
            f"{argument('start', start)}; "
            "give a later file or an earlier start."
        )
