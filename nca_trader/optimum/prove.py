"""Trains an agent on markets whose optimum is known, and measures the fraction that it reaches.

Each run trains in memory on one draw of a market and is evaluated on another.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from nca_trader.agents import load_agent
from nca_trader.agents.policy import make_policy
from nca_trader.config import AgentConfig, EnvConfig
from nca_trader.config.ranges import switched
from nca_trader.data.synthetic import SyntheticMarket, market_of
from nca_trader.envs import FROZEN, load_env
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import ConfigError
from nca_trader.learner.exact import check_finite
from nca_trader.learner.learner import make_learner
from nca_trader.learner.pathwise import check_smooth
from nca_trader.optimum.frozen import env_of, fields_of, frozen, shown
from nca_trader.optimum.measure import Earnings, evaluation_bars, reached_by
from nca_trader.optimum.synthetic import solved
from nca_trader.parallel.jobs import Job, parse_workers, run_jobs
from nca_trader.progress import Progress, tracked
from nca_trader.runs.consent import own_names

# Bars times assets of the training path. Where a signal is 1% of the variance, the number of bars
# bounds what can be learnt: `ar1_weak` ends at 98.6%, with half of the bars and steps at 96 to 98%.
TRAINING_CELLS = 2**22
LOOKS = 12  # evaluations along a run, for the curve; they do not count as training time
MOST_TURNOVER = 0.01  # per step, where nothing can be earned
CONTROLS = ("no_history", "no_neighbours")  # what a control lacks
CONTROL_PART = 4  # a control runs 1 / 4 of the agent's steps: two controls take half of its time
# The claim for the nano preset: the fraction of the optimum that it reaches with every seed.
BARS = {
    "ou_mid": 0.95,
    "ou_log": 0.98,
    "ou_expensive": 0.95,
    "ar1_weak": 0.95,
    "hidden": 0.95,
    "garleanu_pedersen": 0.95,
    "sine": 0.99,
    "ring": 0.95,
    "ring_hop3": 0.95,
    "lagged_ar": 0.95,
    "hidden_level": 0.95,
    "kelly": 0.95,
    "merton": 0.95,
    "martingale": 0.0,  # there is nothing to earn: the agent must hardly trade
}
DEFAULT_BAR = 0.95
NUM_SEEDS = 3
# Fields of an environment that do not change what a position is paid.
FREE = ("features", "market", "market_state", "market_bars", "episode_bars", "random_start",
        "random_costs", "feature_dropout")  # fmt: skip

Say = Callable[[str], None]


class Point(NamedTuple):
    """A point of a curve.

    Attributes:
      seconds: of training.
      steps: environment steps done.
      reached: by then.
    """

    seconds: float
    steps: int
    reached: Earnings

    @property
    def height(self) -> float:
        """The fraction reached; the turnover where there is nothing to earn."""
        return self.reached.turnover if math.isnan(self.reached.fraction) else self.reached.fraction


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One market, the agent to prove there, and its controls.

    Attributes:
      market: name of the environment.
      config: of the environment.
      agent: the one to prove.
      controls: agents that lack something, by what they lack, see `CONTROLS`.
    """

    market: str
    config: EnvConfig
    agent: AgentConfig
    controls: dict[str, AgentConfig]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
    """The result of one seed of the agent on one market.

    Attributes:
      market: name of the environment.
      seed: of the market's draws and the agent.
      bar: the fraction to reach.
      curve: from the untrained agent on; the last point counts.
      controls: curves of the market's controls, trained once, with the first seed.
    """

    market: str
    seed: int
    bar: float
    curve: list[Point]
    controls: dict[str, list[Point]] = dataclasses.field(default_factory=dict)

    @property
    def reached(self) -> Earnings:
        """The result of the trained agent."""
        return self.curve[-1].reached

    @property
    def earns(self) -> bool:
        """Whether the market has something to earn; if not, the agent must hardly trade."""
        return not math.isnan(self.reached.fraction)

    @property
    def goal(self) -> float:
        """The level to reach: the bar, or the most turnover where there is nothing to earn."""
        return self.bar if self.earns else MOST_TURNOVER

    @property
    def without(self) -> dict[str, float | None]:
        """Fractions of the untrained agent and of the controls; None where not applicable."""
        found: dict[str, float | None] = dict.fromkeys(("untrained", *CONTROLS))
        for name, curve in {"untrained": self.curve[:1], **self.controls}.items():
            fraction = curve[-1].reached.fraction
            found[name] = None if math.isnan(fraction) else float(fraction)
        return found

    @property
    def complaint(self) -> str:
        """The reason why the bar is missed; "" where it is reached."""
        reached, untrained = self.reached, self.without["untrained"]
        # The bar has to require training: with its optimum in the middle of the allowed range,
        # `merton` was passed by untrained agents.
        if untrained is not None and untrained >= self.bar:
            return "void: the untrained agent reaches the bar"
        if reached.looks_ahead:
            return "earns more than is possible: it looks ahead"
        if not self.earns:
            too_much = reached.turnover >= MOST_TURNOVER
            return f"trades {reached.turnover:.3f} per step" if too_much else ""
        return "" if reached.fraction >= self.bar else "below the bar"

    @property
    def passed(self) -> bool:
        """Whether the bar is reached, and no more is earned than is possible."""
        return not self.complaint

    @property
    def seconds_to_bar(self) -> float | None:
        """Seconds of training after which the bar was first reached; None if it was not."""
        over = (p.seconds for p in self.curve if p.reached.fraction >= self.bar)
        return next(over, None)

    def row(self) -> dict[str, Any]:
        """Return the row of `--json`; fraction is None where there is nothing to earn."""
        last, reached = self.curve[-1], self.reached
        return {
            "market": self.market,
            "fraction": float(reached.fraction) if self.earns else None,
            **self.without,
            "bar": self.bar,
            "passed": self.passed,
            "steps": last.steps,
            "seconds": last.seconds,
            "seed": self.seed,
            "error": float(reached.error) if self.earns else None,
            "seconds_to_bar": self.seconds_to_bar,
            "turnover": reached.turnover,
        }

    def __str__(self) -> str:
        """Return the result in one line of a table."""
        last, reached, when = self.curve[-1], self.reached, self.seconds_to_bar
        found = f"trades {reached.turnover:.4f} per step, bar {MOST_TURNOVER:g}"
        if self.earns:
            found = f"{reached.fraction:z7.1%} +-{reached.error:.1%}, bar {self.bar:.0%}"
        soon = "" if when is None else f", bar after {when:.1f} s"
        parts = [
            f"{self.market:<18} seed {self.seed:<7} {found:<30}",
            f"{last.steps / 1e6:5.2f} M steps {last.seconds:6.1f} s{soon:<20}",
            self.complaint or "ok",
        ]
        known = {name: fraction for name, fraction in self.without.items() if fraction is not None}
        parts += [f"  {name} {fraction:z.1%}" for name, fraction in known.items()]
        return " ".join(parts)


def prepare(name: str, agent: AgentConfig, steps: int | None = None) -> Trial:
    """Prepare the trial of `agent` in one environment.

    Args:
      name: of the environment, a preset or a TOML file.
      agent: the agent to prove.
      steps: environment steps; None is the agent's own, fewer where there are several assets.

    Raises:
      ConfigError: an unknown environment; one on real bars; one that does not pay what its market
        pays.
    """
    if name in FROZEN:
        frozen(name)  # refuses an edited preset
    config = shown(load_env(name))
    if not config.market:
        raise ConfigError(f"{name}: its bars are real, and no optimum is known; try ou_mid.")
    market = solved(market_of(config))
    check_account(name, config, market)
    config = dataclasses.replace(config, market_bars=1_000)
    kind = env_of(config, 0)  # a short draw, to see the kind of account and the number of assets
    num_assets = kind.spec.num_assets
    config = dataclasses.replace(config, market_bars=TRAINING_CELLS // num_assets)
    # A step of A assets teaches as much as about A / 2 steps of one. A position is learnt from
    # each asset, but a message from the third neighbour is not seen more often: `ring_hop3` needs
    # twice the steps that A alone would give.
    steps = steps or min(agent.learner.steps, -(-2 * agent.learner.steps // num_assets))
    agent = dataclasses.replace(suited(agent, kind), num_seeds=1)
    agent = dataclasses.replace(agent, learner=dataclasses.replace(agent.learner, steps=steps))
    controls = controls_of(agent, num_assets) if market.optimum else {}
    return Trial(market=name, config=config, agent=agent, controls=controls)


def check_account(name: str, config: EnvConfig, market: SyntheticMarket) -> None:
    """Refuse an environment whose account is not the market's, because its optimum differs.

    Raises:
      ConfigError: one line, with every field that differs and the value of the market.
    """
    paid = fields_of(market.config)
    differ = [
        f"{field} = {was!r} where the market has {paid[field]!r}"
        for field, was in fields_of(config).items()
        if field not in FREE and was != paid[field]
    ]
    if differ:
        raise ConfigError(
            f"{name}: contradicts its market, {config.market}: {'; '.join(differ)}; set these "
            "fields to the market's, or change the market's parameters."
        )


def suited(agent: AgentConfig, env: TradingEnv) -> AgentConfig:
    """Return the agent with the estimator of least noise that the environment allows.

    "exact" where an account has finitely many states, "pathwise" where its reward is a smooth
    function of the ordered weights; else the agent's own.
    """
    # With a learnt critic `garleanu_pedersen` ended at 93 to 98%: its error about the position
    # moved the mean of the policy. These two need no critic.
    for name, check in (("exact", check_finite), ("pathwise", check_smooth)):
        try:
            check(env)
        except ConfigError:
            continue
        learner = switched(agent.learner, advantages=name)
        return dataclasses.replace(agent, learner=learner)
    return agent


def controls_of(agent: AgentConfig, num_assets: int) -> dict[str, AgentConfig]:
    """Return agents without history or neighbours, where `agent` has them, with short runs."""
    found = {}
    if agent.policy.kind != "mlp" or agent.policy.window > 1:
        one_bar = dataclasses.replace(load_agent("mlp").policy, window=1)
        found["no_history"] = dataclasses.replace(agent, policy=one_bar)
    if agent.policy.neighbours != "none" and num_assets > 1:
        alone = switched(agent.policy, neighbours="none")
        found["no_neighbours"] = dataclasses.replace(agent, policy=alone)
    short = max(agent.learner.steps // CONTROL_PART, 1)
    learner = dataclasses.replace(agent.learner, steps=short)
    return {name: dataclasses.replace(each, learner=learner) for name, each in found.items()}


def prove(
    markets: Sequence[str] | None = None,
    agent: AgentConfig | str | os.PathLike[str] = "nano",
    *,
    steps: int | None = None,
    seeds: Sequence[int] | None = None,
    controls: bool = True,
    workers: int | str | None = None,
    say: Say = lambda line: None,
) -> list[Proof]:
    """Train an agent on markets whose optimum is known, and measure the fraction it reaches.

    Args:
      markets: environments, each a preset's name or the path of a TOML file; None is all presets
        of known optimum.
      agent: a config, a preset's name, or a path.
      steps: environment steps of each run; None is the agent's own.
      seeds: one run each, of every market; None draws three.
      controls: whether to train, once per market, agents that lack history or neighbours.
      workers: that train, see `nca_trader.parallel.jobs`. The fractions do not depend on them, the
        seconds do.
      say: called with a line for each run.

    Returns:
      A `Proof` for each market and seed; `proof.row()` is what `nca-trader prove --json` prints.

    Raises:
      ConfigError: an unknown market or agent, or a market without a known optimum.

    Example:
      >>> import nca_trader as nca
      >>> proofs = nca.prove(["ou_mid"], steps=100_000, seeds=[1])  # doctest: +SKIP
      >>> proofs[0].reached.fraction  # doctest: +SKIP
      0.93
    """
    names = list(BARS) if markets is None else list(markets)
    loaded = load_agent(agent)
    parse_workers(workers)
    # All are prepared first, so that a mistake in the last name is found before any run.
    prepared = [prepare(name, loaded, steps) for name in names]
    # Drawn and not fixed, so that seeds cannot be chosen by their results.
    seeds = [secrets.randbelow(1_000_000) for _ in range(NUM_SEEDS)] if seeds is None else seeds
    return prove_markets(prepared, seeds, controls, workers, say)


def prove_markets(
    prepared: Sequence[Trial],
    seeds: Sequence[int],
    controls: bool,
    workers: int | str | None = None,
    say: Say = lambda line: None,
) -> list[Proof]:
    """Train and evaluate every seed on every market; train the controls with the first."""
    # Controls show what a market needs and not how seeds differ, so one run of each is enough.
    runs = [
        [(name, trial.controls[name], seeds[0]) for name in (trial.controls if controls else ())]
        + [("", trial.agent, seed) for seed in seeds]
        for trial in prepared
    ]
    jobs = [
        Job(f"{trial.market}, {name or f'seed {seed}'}", (trial.config, agent, seed))
        for trial, own in zip(prepared, runs, strict=True)
        for name, agent, seed in own
    ]
    found: dict[int, list[Point]] = {}
    proofs: list[Proof] = []

    def ready() -> Iterator[Proof]:
        """Yield the proofs in order, up to the first that is not there yet."""
        numbers = itertools.count()
        for trial, own in zip(prepared, runs, strict=True):
            bar, curves = BARS.get(trial.market, DEFAULT_BAR), {}
            for name, _, seed in own:
                curve = found.get(next(numbers))
                if curve is None:
                    return
                if name:
                    curves[name] = curve
                    continue
                market = trial.market
                yield Proof(market=market, seed=seed, bar=bar, curve=curve, controls=curves)

    def gather(number: int, curve: list[Point]) -> None:
        found[number] = curve
        shown.update()
        for proof in list(ready())[len(proofs) :]:
            proofs.append(proof)
            say(str(proof))

    code = [name for trial in prepared for name in own_names(trial.config, trial.agent)]
    with Progress(len(jobs), "prove", "runs") as shown:
        run_jobs(_train_and_evaluate, jobs, workers=workers, done=gather, code=code)
    return proofs


def _train_and_evaluate(
    shared: None, config: EnvConfig, agent: AgentConfig, seed: int
) -> list[Point]:
    return train_and_evaluate(config, agent, seed)


def train_and_evaluate(config: EnvConfig, agent: AgentConfig, seed: int) -> list[Point]:
    """Train on one draw of the market, and evaluate on another before, during and after training.

    The seconds of the points contain neither compilation nor evaluations.
    """
    # Independent seeds for the path to train on, the path to evaluate on, and the agent.
    trained_on, evaluated_on, key = np.random.SeedSequence(seed).generate_state(3)
    env = env_of(config, int(trained_on))
    evaluated = dataclasses.replace(config, market_bars=evaluation_bars(env.spec.num_assets))
    fresh = env_of(evaluated, int(evaluated_on))
    policy = make_policy(agent, env.spec)
    learner = make_learner(env, policy, agent)
    jax.block_until_ready(learner.step(learner.init(jax.random.key(0))))  # compiles
    updates = -(-agent.learner.steps // learner.steps_per_update)
    every = -(-updates // LOOKS)
    state = learner.init(jax.random.key(int(key) >> 1))
    seconds, curve = 0.0, [Point(0.0, 0, reached_by(fresh, policy, state.params))]
    for update in tracked(range(1, updates + 1), "train", "updates"):
        began = time.perf_counter()
        state = jax.block_until_ready(learner.step(state)[0])
        seconds += time.perf_counter() - began
        if update % every == 0 or update == updates:
            steps = update * learner.steps_per_update
            curve.append(Point(seconds, steps, reached_by(fresh, policy, state.params)))
    return curve
