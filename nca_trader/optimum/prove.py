"""Trains an agent on markets whose optimum is known, and measures the fraction that it reaches.

Each run trains in memory on one draw of a market and is evaluated on another.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import itertools
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any

import jax
import numpy as np

from nca_trader import __version__
from nca_trader.agents import load_agent
from nca_trader.agents.policy import make_policy
from nca_trader.config import AccountConfig, AgentConfig, EnvConfig
from nca_trader.config.account import gather_account
from nca_trader.config.agent import alone
from nca_trader.config.learning import LearnerConfig, OptimizerConfig
from nca_trader.config.ranges import switch
from nca_trader.config.toml import to_toml
from nca_trader.envs import FROZEN, load_env
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import ConfigError, argument
from nca_trader.learner.exact import check_finite, coupled
from nca_trader.learner.learner import make_learner
from nca_trader.learner.pathwise import check_smooth
from nca_trader.markets import SyntheticMarket, market_of
from nca_trader.optimum.frozen import env_of, fields_of, frozen, show_features
from nca_trader.optimum.measure import CELLS, GROUP, evaluation_bars, reached_by
from nca_trader.optimum.optima.synthetic import solved
from nca_trader.optimum.outside.entry import entry_of
from nca_trader.optimum.outside.outside import prove_entry
from nca_trader.optimum.rows import BARS, Point, Score
from nca_trader.parallel.jobs import Job, parse_workers, run_jobs
from nca_trader.progress import Progress, track
from nca_trader.runs.consent import own_names

# Bars times assets of the training path. Where a signal is 1% of the variance, the number of bars
# bounds what can be learnt: `ar1_weak` ends at 98.6%, with half of the bars and steps at 96 to 98%.
TRAINING_CELLS = 2**22
LOOKS = 12  # evaluations along a run, for the curve; they do not count as training time
LEAST_UPDATES = 64
# Of a batch that is made smaller, in this order: where environments share a segment, the same bars
# are seen again.
SMALLEST = {"envs_per_segment": 1, "segment_length": 64, "num_segments": 32}
# The part of the agent's steps, and the factor on a rate that falls. Without drawn actions accounts
# of a segment learn the same, so it has one, and a step's gradient has less noise. "coupled" are
# the assets of an "exact" account that a cap couples: in 500 gradient steps `factor_panel` stays at
# 74% with the agent's rate, all assets held at once, and reaches 96% with 8 times, 98% with 40.
SPED = {"pathwise": (2, 4.0), "coupled": (16, 40.0)}
# Without drawn actions few steps may be longer. At 100,000 steps 8 times the rate took `nano`, with
# one seed, on `ring_hop3` from 78% to 99%, on `hidden` from 91% to 97%, on `ou_expensive` from 88%
# to 94%; 32 times was too much, and so was 8 times for `mlp`, whose rate does not fall.
MOST_RATE = 8.0
CHOSEN = (
    "{:.3g} times the preset's rate, a factor chosen at 100,000 steps with one seed of ring_hop3, "
    "hidden and ou_expensive"
)
CONTROL_PART = 4  # a control runs 1 / 4 of the agent's steps: two controls take half of its time
UNSAMPLED = {"exact": check_finite, "pathwise": check_smooth}  # no actions are drawn, no critic
NUM_SEEDS = 3
# Fields of an environment that do not change what a position is paid.
FREE = ("features", "market", "market_state", "market_bars", "episode_bars", "random_start",
        "random_costs", "feature_dropout")  # fmt: skip

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One market, the agent to prove there, and its controls.

    Attributes:
      market: name of the environment.
      config: of the environment.
      agent: the one to prove.
      controls: agents that lack something, by what they lack, see `nca_trader.optimum.rows`.
      transitions: pairs of state and action that a step evaluates for an asset.
      chosen: where and how a setting of the agent was chosen on markets of `prove`; "" for none.
    """

    market: str
    config: EnvConfig
    agent: AgentConfig
    controls: dict[str, AgentConfig]
    transitions: int = 1
    chosen: str = ""


def prepare(
    name: str,
    agent: AgentConfig,
    steps: int | None = None,
    given: AccountConfig = AccountConfig(),
) -> Trial:
    """Prepare the trial of `agent` in one environment.

    Args:
      name: of the environment, a preset or a TOML file.
      agent: the agent to prove.
      steps: environment steps; None is the agent's own, fewer where there are several assets.
      given: of the account, in the place of the environment's own.

    Raises:
      ConfigError: an unknown environment; one on real bars; one that does not pay what its market
        pays.
    """
    market, config = known_market(name, given)
    config = dataclasses.replace(config, market_bars=1_000)
    kind = env_of(config, 0)  # a short draw, to see the kind of account and the number of assets
    num_assets = kind.spec.num_assets
    # A step of A assets teaches as much as about A / 2 steps of one. A position is learnt from
    # each asset, but a message from the third neighbour is not seen more often: `ring_hop3` needs
    # twice the steps that A alone would give.
    learner, rate = suited(agent.learner, kind)
    usual = min(learner.steps, -(-2 * learner.steps // num_assets))
    steps = steps or usual
    optimizer = paced(agent.optimizer, learner.advantages, rate, usual / steps)
    factor = optimizer.learning_rate / agent.optimizer.learning_rate
    chosen = CHOSEN.format(factor) if factor > rate else ""
    agent = dataclasses.replace(alone(agent), learner=batched(learner, steps), optimizer=optimizer)
    # Fewer bars than steps would be seen again.
    cells = min(TRAINING_CELLS, max(CELLS, 2 ** math.ceil(math.log2(steps))))
    config = dataclasses.replace(config, market_bars=cells // num_assets)
    controls = controls_of(agent, num_assets) if market.optimum else {}
    exact = learner.advantages == "exact"
    return Trial(
        market=name,
        config=config,
        agent=agent,
        controls=controls,
        transitions=kind.spec.num_actions**2 if exact else 1,  # as many positions as actions
        chosen=chosen,
    )


def known_market(
    name: str, given: AccountConfig = AccountConfig()
) -> tuple[SyntheticMarket, EnvConfig]:
    """Return the market of an environment with its optimum, and the environment that agents see.

    Raises:
      ConfigError: see `prepare`.
    """
    if name in FROZEN:
        frozen(name)  # refuses an edited preset
    config = show_features(load_env(name)).with_account(given)
    if not config.market:
        raise ConfigError(f"{name}: its bars are real, and no optimum is known; try ou_mid.")
    market = solved(market_of(config))
    if None in (market.optimum, market.optimal_policy, market.expected_return):
        raise ConfigError(
            f"{name}: no optimum of its market, {config.market}, is known (optimum, optimal_policy "
            "and expected_return of the Task); try ou_mid."
        )
    check_account(name, config, market)
    return market, config


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


def suited(learner: LearnerConfig, env: TradingEnv) -> tuple[LearnerConfig, float]:
    """Return the learner with the estimator of least noise that the environment allows.

    "exact" where an account has finitely many states, "pathwise" where its reward is a smooth
    function of the ordered weights; else its own. Some have a batch of their own where the
    learner's is one of drawn actions, and a factor on the rate, which is returned too; see `SPED`.
    """
    # With a learnt critic `garleanu_pedersen` ended at 93 to 98%: its error about the position
    # moved the mean of the policy. These two need no critic.
    for name, check in UNSAMPLED.items():
        try:
            check(env)
        except ConfigError:
            continue
        found = switch(learner, advantages=name)
        key = "coupled" if name == "exact" and coupled(env.market.dynamics) else name
        if name == learner.advantages or key not in SPED:
            return found, 1.0
        part, rate = SPED[key]
        return dataclasses.replace(found, envs_per_segment=1, steps=-(-found.steps // part)), rate
    return learner, 1.0


def paced(
    optimizer: OptimizerConfig, advantages: str, rate: float, fewer: float
) -> OptimizerConfig:
    """Return the agent's optimizer, whose rate begins higher where no action is drawn.

    Args:
      optimizer: of the agent.
      advantages: that it is trained with here.
      rate: factor of `suited`.
      fewer: the usual number of steps over that of this run.
    """
    if advantages not in UNSAMPLED or optimizer.schedule == "constant":
        return optimizer
    factor = min(rate * max(fewer, 1.0) ** 0.5, max(rate, MOST_RATE))
    return dataclasses.replace(optimizer, learning_rate=factor * optimizer.learning_rate)


def batched(learner: LearnerConfig, steps: int) -> LearnerConfig:
    """Return the learner for this many steps, with smaller batches where these are few.

    With the batches of a long run, 131,072 steps are four updates: `mlp` then reaches 62% of
    `ou_mid`, and 96% with these.
    """
    size = {name: getattr(learner, name) for name in SMALLEST}
    for name, least in SMALLEST.items():
        while math.prod(size.values()) * LEAST_UPDATES > steps and size[name] >= 2 * least:
            size[name] //= 2
    return dataclasses.replace(learner, steps=steps, **size)


def controls_of(agent: AgentConfig, num_assets: int) -> dict[str, AgentConfig]:
    """Return agents without history or neighbours, where `agent` has them, with short runs."""
    found = {}
    if agent.policy.kind != "mlp" or agent.policy.window > 1:
        one_bar = dataclasses.replace(load_agent("mlp").policy, window=1)
        found["no_history"] = dataclasses.replace(agent, policy=one_bar)
    if agent.policy.neighbours != "none" and num_assets > 1:
        alone = switch(agent.policy, neighbours="none")
        found["no_neighbours"] = dataclasses.replace(agent, policy=alone)
    short = max(agent.learner.steps // CONTROL_PART, 1)
    learner = dataclasses.replace(agent.learner, steps=short)
    return {name: dataclasses.replace(each, learner=learner) for name, each in found.items()}


def prove(
    markets: Sequence[str] | None = None,
    agent: AgentConfig | str | os.PathLike[str] = "nano",
    *,
    allow_code: bool = False,
    python: str | None = None,
    agent_seconds: float | None = None,
    steps: int | None = None,
    seeds: Sequence[int] | None = None,
    controls: bool = True,
    workers: int | str | None = None,
    say: Say = lambda line: None,
    account: AccountConfig | None = None,
    **settings: Any,
) -> list[Score]:
    """Measure the fraction of a known optimum that an agent reaches, on each of several markets.

    An agent of ours is trained; one from outside plays as it is, in a process of its own.

    Args:
      markets: environments, each a preset's name or the path of a TOML file; None is all presets
        of known optimum.
      agent: to train, a config, a preset's name, or the path of a TOML file. Or from outside: a run
        or exported file, "FILE.py:NAME", "MODEL.zip" or "MODEL.zip,VECNORMALIZE.pkl" of
        Stable-Baselines3, or "STATE.pkl" of rejax; see docs/guides/prove.md.
      allow_code: whether an agent from outside may be one of pickled objects, or a run of own code
        that you have not signed.
      python: the program of the Python that plays an agent from outside; None is this one.
      agent_seconds: that an agent from outside has on each market, loading included; None is
        1800.
      steps: environment steps of each run; None is the agent's own.
      seeds: one run each, of every market; None draws three. Of an agent from outside, one
        evaluation each; None draws one after it is loaded.
      controls: whether to train, once per market, agents that lack history or neighbours.
      workers: that train, see `nca_trader.parallel.jobs`. The fractions do not depend on them, the
        seconds do.
      say: called with a line for each run.
      account: what the account is given. A value that its market does not have is refused, because
        the optimum would be another.
      settings: fields of `nca.AccountConfig` by name, in the place of the record.

    Returns:
      A `Score` for each market and seed; `proof.row()` is what `nca-trader prove --json` prints.

    Raises:
      ConfigError: an unknown market or agent, or a market without a known optimum; an agent from
        outside fails.

    Example:
      >>> import nca_trader as nca
      >>> proofs = nca.prove(["ou_mid"], steps=100_000, seeds=[1])  # doctest: +SKIP
      >>> proofs[0].reached.fraction  # doctest: +SKIP
      0.93
    """
    names = list(BARS) if markets is None else list(markets)
    given = gather_account(account, settings, inspect.signature(prove).parameters)
    parse_workers(workers)
    for seed in [] if seeds is None else [*seeds] or [None]:
        if not isinstance(seed, Integral) or seed < 0:
            raise ConfigError(
                f"{argument('seeds')}: give whole numbers of at least 0, e.g. [1, 2]."
            )
    if (entry := entry_of(agent, allow_code, python, agent_seconds)) is not None:
        if steps is not None:
            raise ConfigError(f"{entry.name} is not trained here; give no {argument('steps')}.")
        asked = [(name, *known_market(name, given)) for name in names]
        return prove_entry(entry, asked, seeds, controls, say)
    loaded = load_agent(agent)
    # All are prepared first, so that a mistake in the last name is found before any run.
    prepared = [prepare(name, loaded, steps, given) for name in names]
    # Drawn and not fixed, so that seeds cannot be chosen by their results.
    seeds = [secrets.randbelow(1_000_000) for _ in range(NUM_SEEDS)] if seeds is None else seeds
    return prove_markets(prepared, seeds, controls, workers, say)


def prove_markets(
    prepared: Sequence[Trial],
    seeds: Sequence[int],
    controls: bool,
    workers: int | str | None = None,
    say: Say = lambda line: None,
) -> list[Score]:
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
    proofs: list[Score] = []

    def ready() -> Iterator[Score]:
        """Yield the proofs in order, up to the first that is not there yet."""
        numbers = itertools.count()
        for trial, own in zip(prepared, runs, strict=True):
            curves = {}
            for name, _, seed in own:
                curve = found.get(next(numbers))
                if curve is None:
                    return
                if name:
                    curves[name] = curve
                    continue
                market, entry = trial.market, described(trial)
                yield Score(market=market, seed=seed, curve=curve, controls=curves, entry=entry)

    def gather(number: int, curve: list[Point]) -> None:
        found[number] = curve
        shown.update()
        for proof in list(ready())[len(proofs) :]:
            proofs.append(proof)
            say(str(proof))

    code = [name for trial in prepared for name in own_names(trial.config, trial.agent)]
    with Progress(len(jobs), "prove", "runs") as shown:
        run_jobs(train_and_evaluate, jobs, workers=workers, done=gather, code=code)
    return proofs


def described(trial: Trial) -> dict[str, Any]:
    """Return what a row says of an agent that is trained here."""
    agent = trial.agent
    digest = hashlib.sha256(to_toml(agent).encode()).hexdigest()
    return {
        "kind": "agent",
        "name": agent.policy.kind,
        "library": "nca_trader",
        "version": __version__,
        "digest": digest,
        "steps": agent.learner.steps,  # asked: the digest is of these, a last update may pass them
        "transitions": trial.transitions,
        "chosen": trial.chosen,
    }


def train_and_evaluate(
    shared: None, config: EnvConfig, agent: AgentConfig, seed: int
) -> list[Point]:
    """Train on one draw of the market, and evaluate on another before, during and after training.

    `shared` is what `run_jobs` gives all jobs, here nothing.
    """
    return list(training(config, agent, seed))


def training(
    config: EnvConfig, agent: AgentConfig, seed: int, due: Callable[[float], bool] | None = None
) -> Iterator[Point]:
    """Yield the points of a run: before training, on its way and at its end.

    The seconds of the points contain neither compilation nor evaluations.

    Args:
      config: of the environment.
      agent: to train.
      seed: of the market's draws and of the agent.
      due: whether to evaluate after so many seconds, on the whole path; None evaluates `LOOKS`
        times, on the whole path at the end alone.
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
    yield Point(0.0, 0, reached_by(fresh, policy, state.params))
    seconds = 0.0
    for update in track(range(1, updates + 1), "train", "updates"):
        began = time.perf_counter()
        state = jax.block_until_ready(learner.step(state)[0])
        seconds += time.perf_counter() - began
        if update == updates or (due(seconds) if due else update % every == 0):
            # The first and the last are compared with a bar, so they are of the whole path.
            most = GROUP if update < updates and not due else None
            yield Point(
                seconds,
                update * learner.steps_per_update,
                reached_by(fresh, policy, state.params, most),
            )
