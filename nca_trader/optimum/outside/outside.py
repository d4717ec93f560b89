"""Proves an agent from outside: it plays fresh paths of each market in a process of its own."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nca_trader.config import EnvConfig
from nca_trader.envs.gym.environment import action_space
from nca_trader.envs.gym.packed import account_size
from nca_trader.errors import ConfigError
from nca_trader.markets import SyntheticMarket
from nca_trader.optimum.frozen import env_of
from nca_trader.optimum.measure import Earnings
from nca_trader.optimum.outside.entry import OutsideAgent, Playing, unreadable
from nca_trader.optimum.outside.paths import (
    LONE_PATHS,
    Paths,
    alone,
    draw_paths,
    judge,
    play,
    simple_controls,
)
from nca_trader.optimum.rows import NOTHING, Point, Score
from nca_trader.progress import Progress
from nca_trader.types import EnvSpec

SEED_BITS = 63


Asked = tuple[str, SyntheticMarket, EnvConfig]  # an environment's name, its market, its config


def prove_entry(
    entry: OutsideAgent,
    markets: Sequence[Asked],
    seeds: Sequence[int] | None,
    controls: bool,
    say: Callable[[str], None],
) -> list[Score]:
    """Play an agent from outside on each market.

    Args:
      entry: the agent.
      markets: to play.
      seeds: one evaluation each; None draws one for each market once the agent is loaded.
      controls: whether to play it without history and neighbours, too.
      say: called with a line for each result.

    Raises:
      ConfigError: it cannot be loaded, fails, or answers with something else than actions; or it
        cannot play the only market.
    """
    jobs = [(asked, seed) for asked in markets for seed in seeds or [None]]
    proofs = []
    # Before its first process begins: what it opens while it loads, it reads later.
    with unreadable(), Progress(len(jobs), "prove", "markets") as shown:
        for asked, seed in jobs:
            proofs.append(proof := _prove(entry, asked, seed, controls))
            shown.update()
            if proof.reason and len(markets) == 1:
                raise ConfigError(f"{entry.name} on {proof.market}: {proof.reason}.")
            say(str(proof))
    if all(proof.reason for proof in proofs):
        raise ConfigError(f"{entry.name} can play none of these markets; see the lines above.")
    return proofs


def _prove(entry: OutsideAgent, asked: Asked, seed: int | None, controls: bool) -> Score:
    name, market, config = asked
    short = dataclasses.replace(config, market_bars=1_000)
    spec = env_of(short, 0).spec
    size = spec.num_assets * spec.num_features + account_size(spec)
    # A run orders weights: no action orders what several agents order together.
    choices = 0 if entry.kind == "run" else spec.num_actions
    reached, found, given = NOTHING, {}, seed is not None
    with Playing(entry, name, spec.num_assets, size, choices) as playing:
        facts = playing.facts
        reason = mismatch(facts, spec, size)
        if not reason:
            # Drawn after it is loaded, of more numbers than it could have tried.
            seed = secrets.randbits(SEED_BITS) if seed is None else seed
            paths = draw_paths(market, config, seed)
            reached = _played(playing, paths, entry)
            found = simple_controls(paths, seed) | (
                _lacking(playing, paths, entry) if controls else {}
            )
    return Score(
        market=name,
        seed=seed,
        curve=[Point(math.nan, facts.get("steps"), reached)],
        controls={k: [Point(math.nan, None, each)] for k, each in found.items()},
        entry=dataclasses.replace(entry, facts=facts).record(),
        given=given,
        reason=reason,
    )


def mismatch(facts: dict[str, Any], spec: EnvSpec, size: int) -> str:
    """Return why an agent cannot play a market of this spec and observation; "" where it can."""
    for name, there, verb in (
        ("features", list(spec.features), "observes"),
        ("observation", size, "observes numbers:"),
        ("space", str(action_space(spec)), "acts in"),
    ):
        if (given := facts.get(name, there)) == there:
            continue
        reason = f"it {verb} {given}, and the market has {there}"
        if name == "observation" and given % size == 0 and given > size:
            # A stack of Stable-Baselines3 says how it is filled, and is played.
            reason += (
                f"; its file does not say how {given // size} bars are stacked: give FILE.py:NAME, "
                "a function of observations and memory that stacks them"
            )
        return reason
    return ""


def _played(
    playing: Playing, paths: Paths, entry: OutsideAgent, lone: bool = False, forget: bool = False
) -> Earnings:
    spec = paths.dynamics.spec
    if entry.kind == "run":
        targets = dataclasses.replace(spec, actions="weights")
        paths = paths._replace(dynamics=paths.dynamics._replace(spec=targets))
    begins = True

    def decide(seen: np.ndarray) -> np.ndarray:
        nonlocal begins
        actions = playing.act(seen, begins or forget)
        begins = False
        return actions

    if lone:
        return judge(paths, play(paths, alone(decide, spec.num_assets, spec.num_features)))
    return judge(paths, play(paths, decide))


def _lacking(playing: Playing, paths: Paths, entry: OutsideAgent) -> dict[str, Earnings]:
    """Judge the agent without memory and without neighbours, where it has them."""
    found = {}
    if playing.facts["memory"]:
        found["no_history"] = _played(playing, paths, entry, forget=True)
    if paths.task.num_assets > 1:
        fewer = paths.first(LONE_PATHS)
        found["no_neighbours"] = _played(playing, fewer, entry, lone=True)
    return found
