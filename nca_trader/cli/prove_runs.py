"""The runs of `nca-trader prove`: each trains in memory on one draw and is judged on another."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from nca_trader.agents.policy import make_policy
from nca_trader.agents.presets import load_agent
from nca_trader.data.synthetic import task_of
from nca_trader.data.synthetic.market import PriceOutOfRange
from nca_trader.envs.presets import load_env
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import ConfigError
from nca_trader.evaluate.prove import Reached, evaluation_bars, reached_by
from nca_trader.learner.exact import check_finite
from nca_trader.learner.update import make_learner
from nca_trader.presets import AgentConfig, EnvConfig, PolicyConfig
from nca_trader.ranges import switched

# What an agent sees of every market: the last return, and how high price and volume stand. All
# of it comes from the bars up to the decision; the market's own state is not among it.
FEATURES = ("return_1", "price_level", "volume_level")
TRAINING_CELLS = 2**22  # bars times assets of the path that is trained on
LOOKS = 12  # evaluations along a run, for the curve; the clock stands still in them
MOST_TURNOVER = 0.01  # a step, where nothing can be earned

Report = Callable[[str], None]


class Point(NamedTuple):
    """A point of a curve: seconds of training, steps done, what was reached by then."""

    seconds: float
    steps: int
    reached: Reached


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One market, the agents that are tried on it, and what they see.

    Attributes:
      market: name. config: of the environment. agents: by label; the first is the one to prove.
    """

    market: str
    config: EnvConfig
    agents: dict[str, AgentConfig]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
    """One seed of the agent on one market.

    Attributes:
      market, seed, bar: what was tried. curve: the last point is what counts.
      beside: curves of the other agents by label; empty but for the first seed.
    """

    market: str
    seed: int
    bar: float
    curve: list[Point]
    beside: dict[str, list[Point]] = dataclasses.field(default_factory=dict)

    @property
    def reached(self) -> Reached:
        """What the trained agent reached."""
        return self.curve[-1].reached

    @property
    def complaint(self) -> str:
        """Why the bar is missed; "" where it is reached."""
        reached = self.reached
        if reached.looks_ahead:
            return "earns more than can be: it looks ahead"
        if np.isnan(reached.fraction):
            too_much = reached.turnover >= MOST_TURNOVER
            return f"trades {reached.turnover:.3f} a step" if too_much else ""
        return "" if reached.fraction >= self.bar else "below the bar"

    @property
    def passed(self) -> bool:
        """Whether the bar is reached, and nothing is earned that cannot be."""
        return not self.complaint

    @property
    def seconds_to_bar(self) -> float | None:
        """Seconds of training after which the bar was first seen to be reached."""
        over = (p.seconds for p in self.curve if p.reached.fraction >= self.bar)
        return next(over, None)

    def row(self) -> dict[str, Any]:
        """For `--json`; fraction is None where there is nothing to earn."""
        last, reached = self.curve[-1], self.reached
        nothing = np.isnan(reached.fraction)
        return {
            "market": self.market,
            "fraction": None if nothing else float(reached.fraction),
            "bar": self.bar,
            "passed": self.passed,
            "steps": last.steps,
            "seconds": last.seconds,
            "seed": self.seed,
            "error": None if nothing else float(reached.error),
            "seconds_to_bar": self.seconds_to_bar,
            "turnover": reached.turnover,
            "beside": {
                label: float(curve[-1].reached.fraction) for label, curve in self.beside.items()
            },
        }


def prepare(name: str, agent: AgentConfig, steps: int | None = None) -> Trial:
    """The trial of `agent` in the environment called `name`, for `steps` or the agent's own.

    The agent's own are of one asset. A step of A assets teaches as much as some A / 2 of one: a
    position is learnt from each, yet what comes from the third neighbour is no likelier seen.

    Raises:
      ConfigError: no such environment, or one whose bars are real.
    """
    config = load_env(name)
    if not config.market:
        raise ConfigError(f"{name}: its bars are real, and no optimum is known; try ou_mid.")
    config = dataclasses.replace(config, features=FEATURES, market_state=False, market_bars=1_000)
    kind = _env_of(config, 0)
    config = dataclasses.replace(config, market_bars=TRAINING_CELLS // kind.spec.num_assets)
    steps = steps or min(agent.learner.steps, -(-2 * agent.learner.steps // kind.spec.num_assets))
    learner = dataclasses.replace(suited(agent, kind).learner, steps=steps)
    agent = dataclasses.replace(agent, learner=learner, num_seeds=1)
    return Trial(market=name, config=config, agents=contenders(agent, kind.spec.num_assets))


def suited(agent: AgentConfig, env: TradingEnv) -> AgentConfig:
    """The agent with exact advantages where an account has finitely many states; else as it is."""
    try:
        check_finite(env)
    except ConfigError:
        return agent
    learner = switched(agent.learner, advantages="exact")
    return dataclasses.replace(agent, learner=learner)


def contenders(agent: AgentConfig, num_assets: int) -> dict[str, AgentConfig]:
    """The agent, and what stands beside it, by label; all learn as it does."""

    def other(policy: PolicyConfig) -> AgentConfig:
        return dataclasses.replace(agent, policy=policy)

    mlp = load_agent("mlp").policy
    found = {agent.policy.kind: agent}
    found.setdefault("mlp", other(mlp))
    found["one bar"] = other(dataclasses.replace(mlp, window=1))
    if agent.policy.neighbours != "none" and num_assets > 1:
        found["own history"] = other(switched(agent.policy, neighbours="none"))
    return found


def prove(
    trial: Trial, bar: float, seeds: Sequence[int], *, beside: bool, report: Report
) -> list[Proof]:
    """Trains and judges every seed, and beside the first the other contenders."""
    proofs = []
    for seed in seeds:
        curves = {}
        for label, agent in trial.agents.items():
            if curves and not (beside and seed == seeds[0]):
                break
            curves[label] = train_and_judge(trial.config, agent, seed)
        first, *others = curves
        proof = Proof(
            market=trial.market,
            seed=seed,
            bar=bar,
            curve=curves[first],
            beside={label: curves[label] for label in others},
        )
        proofs.append(proof)
        report(line_of(proof))
    return proofs


def line_of(proof: Proof) -> str:
    """One line of the table."""
    last, reached = proof.curve[-1], proof.reached
    if np.isnan(reached.fraction):
        figure = f"trades {reached.turnover:.4f} a step, bar {MOST_TURNOVER:g}"
    else:
        figure = f"{reached.fraction:z7.1%} +-{reached.error:.1%}, bar {proof.bar:.0%}"
    when = proof.seconds_to_bar
    soon = "" if when is None else f", bar after {when:.1f} s"
    verdict = "ok" if proof.passed else proof.complaint
    parts = [
        f"{proof.market:<18} seed {proof.seed:<7} {figure:<30}",
        f"{last.steps / 1e6:5.2f} M steps {last.seconds:6.1f} s{soon:<20} {verdict}",
    ]
    parts += [
        f"   {label} {curve[-1].reached.fraction:z.1%}" for label, curve in proof.beside.items()
    ]
    return " ".join(parts)


def train_and_judge(config: EnvConfig, agent: AgentConfig, seed: int) -> list[Point]:
    """Trains on one draw of the market and looks at another now and then.

    Compilation is not in the seconds, nor are the looks.
    """
    trained_on, judged_on, key = np.random.SeedSequence(seed).generate_state(3)
    env = _env_of(config, int(trained_on))
    judged = dataclasses.replace(config, market_bars=evaluation_bars(env.spec.num_assets))
    fresh = _env_of(judged, int(judged_on))
    policy = make_policy(agent, env.spec)
    learner = make_learner(env, policy, agent)
    jax.block_until_ready(learner.step(learner.init(jax.random.key(0))))  # compiles
    updates = -(-agent.learner.steps // learner.steps_per_update)
    every = -(-updates // LOOKS)
    state = learner.init(jax.random.key(int(key) >> 1))
    seconds, curve = 0.0, []
    for update in range(1, updates + 1):
        began = time.perf_counter()
        state = jax.block_until_ready(learner.step(state)[0])
        seconds += time.perf_counter() - began
        if update % every == 0 or update == updates:
            steps = update * learner.steps_per_update
            curve.append(Point(seconds, steps, reached_by(fresh, policy, state.params)))
    return curve


@functools.lru_cache(maxsize=4)
def _env_of(config: EnvConfig, seed: int) -> TradingEnv:
    """An environment of the draw; kept, for the agents that are tried one after the other.

    Of half as many bars where the price would leave what a float holds: a coin's that is thrown two
    million times does, for one seed in ten.
    """
    try:
        return TradingEnv(task_of(config, seed), config)
    except PriceOutOfRange:
        return _env_of(dataclasses.replace(config, market_bars=config.market_bars // 2), seed)
