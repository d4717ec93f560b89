"""The recipe of `benchmarks.agents` on panels whose truth is known.

    python -m benchmarks.planted optimum    # 20 panels with a weak trend: how much of it is earned
    python -m benchmarks.planted noise      # 100 panels without any: how many pass the gate
    python -m benchmarks.planted power      # 100 panels with a trend that the baselines miss

Each row is written to benchmarks/results/planted.jsonl when it is known. A panel has four
independent assets of `hidden_level`: a trend that an agent can only infer from returns. What is
attainable is exact: see `best`. Environment, features, costs in training, estimator, policy and
gate are the recipe's; a small panel needs fewer seeds and steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import tempfile
import time
import weakref
from typing import Any, NamedTuple

import jax
import numpy as np

import nca_trader as nca
from benchmarks.agents import AGENT, ENV, WARM, Study, agent_of, baselines, env_of, rows_of
from nca_trader.agents.policy import make_policy
from nca_trader.data.synthetic.switching import autoregressive
from nca_trader.evaluate.gate import Gate, gate
from nca_trader.evaluate.result import Result
from nca_trader.evaluate.selection import Acting
from nca_trader.learner.learner import Learner, make_learner
from nca_trader.learner.train import planned_steps
from nca_trader.optimum.switching import Switching, solve
from nca_trader.optimum.synthetic import make, market
from nca_trader.runs.manifest import Run, commit, now, versions
from nca_trader.types import Bars, Costs

RESULTS = pathlib.Path(__file__).resolve().parent / "results" / "planted.jsonl"
ASSETS, SIGMA, COST, YEAR = 4, 0.01, 2e-4, 365.2425  # a bar every day
LEVELS = 12  # Gauss's nodes of half of the positions


class Truth(NamedTuple):
    """A trend: how long it lasts, and how large it is.

    phi: of the hidden level. spread: its deviation. train, test: bars.
    """

    phi: float
    spread: float
    train: int
    test: int


# The best rule has a Sharpe ratio of 1.0 net of costs.
WEAK = Truth(phi=0.99, spread=6.9e-4, train=200_000, test=100_000)
# Too quick for the baselines: the best of them, the trend of a year, is behind by 1.0.
QUICK = Truth(phi=0.95, spread=1.13e-3, train=60_000, test=10_950)
POLICY = "mlp"
SMALL = {"num_seeds": 2, "steps": 500_000}
# The share of the optimum: how much a panel of four can teach in 548 years is less than asked, so
# the one policy for all assets learns from more of them. A full position of one is a share of the
# book, and aversion to risk grows with their number, so that each asset's problem is the same.
TRAINED = 32
WHOLE = {
    "policy": "linear",  # the forecast is
    "num_seeds": 2,
    "steps": 1_500_000,
    "num_segments": 16,
    "rate": 1e-2,
    "env": {
        "risk_aversion": ENV.risk_aversion * TRAINED / ASSETS,
        "random_costs": (1.0, 2.0),
        "volatility_span": 500,  # volatility is constant here
    },
}
PANEL = Study(file="", read={}, costs=Costs(commission=COST), selecting=(), testing=())


class Best(NamedTuple):
    """The rule of highest `E[R - k/2 R^2]` net of costs, for each asset of a panel.

    optimum: per bar, of the whole panel. levels: `[n]` positions. bought, sold: `[n]` states at
    which the rule buys up to them, and sells down to them.
    """

    optimum: float
    levels: np.ndarray
    bought: np.ndarray
    sold: np.ndarray

    def positions(self, states: np.ndarray) -> np.ndarray:
        """Return `[N, A]` weights after each close, for the filtered levels `[N, A]`."""
        low = np.interp(states, self.bought, self.levels)
        high = np.interp(states, self.sold, self.levels)
        held, found = np.zeros(states.shape[1]), np.empty_like(states)
        for t in range(len(states)):
            held = np.clip(held, low[t], high[t])
            found[t] = held
        return found


def best(truth: Truth, risk: float = ENV.risk_aversion, cost: float = COST) -> Best:
    """Return the exact rule for positions up to a full one either way.

    `E[r] = m` and `E[r^2] = S + m^2`, with the filter's m and S. A position a earns
    `a m - k/2 a^2 (S + m^2)`, the sum over levels w up to a of `m - k w (S + m^2)`. So each level
    is a unit that is held or not, as in `optimum.switching`: the optimum is the integral of
    the units' gains. Products of different assets' m in R^2 are left out; they are 1e-3 of S.
    """
    solved = market("hidden_level", phi=truth.phi, spread=truth.spread, sigma=SIGMA, cost=cost)
    known = solved.moments[1][0]
    noise = SIGMA**2 + truth.spread**2 - known**2  # S: of a return given those before it
    moved = known * np.sqrt(1 - truth.phi**2)
    # A full position of the account bears the recipe's volatility.
    most = 0.15 / np.sqrt(YEAR * (SIGMA**2 + truth.spread**2)) / ASSETS
    nodes, weights = np.polynomial.legendre.leggauss(LEVELS)
    levels, weights = most * (nodes + 1) / 2, most * weights / 2  # the positive half

    def unit(level: float) -> Switching:
        return solve(
            autoregressive(lambda m: m - risk * level * (noise + m * m), truth.phi, moved, cost)
        )

    bought, sold, gain = [], [], 0.0
    for level, weight in zip(levels, weights, strict=True):
        rule = unit(level)
        mean = -risk * level * (noise + known**2)
        gain += weight * (rule.gain + mean) / 2  # E[max(D - c, 0)]
        ends = np.concatenate([[-np.inf], rule.cuts, [np.inf]])
        buys, sells = rule.signals == 1.0, rule.signals == -1.0
        bought.append(ends[:-1][buys].min() if buys.any() else np.inf)
        sold.append(ends[1:][sells].max() if sells.any() else -np.inf)
    # Below 0 everything is mirrored: to hold less than nothing is to be short.
    bought, sold = np.array(bought), np.array(sold)
    return Best(
        optimum=2 * ASSETS * gain,
        levels=np.concatenate([-levels[::-1], levels]),
        bought=np.concatenate([-sold[::-1], bought]),
        sold=np.concatenate([-bought[::-1], sold]),
    )


def drawn(
    truth: Truth, num_bars: int, seed: int, shuffle: bool = False, num_assets: int = ASSETS
) -> tuple[Bars, np.ndarray]:
    """Return daily bars `[N, A]`, and what is known of each level at their closes.

    With `shuffle` returns lose their mean and all rows change places: no past return says anything
    of a later one, and assets keep what they share.
    """
    given: dict[str, Any] = {"phi": truth.phi, "spread": truth.spread, "sigma": SIGMA}
    task = make(
        "hidden_level", **given, cost=COST, num_assets=num_assets, reward="simple",
        num_bars=num_bars, seed=seed,
    )  # fmt: skip
    returns = task.returns
    if shuffle:
        returns = np.random.default_rng(seed).permutation(returns - returns.mean(0))
    close = 100.0 * np.cumprod(1.0 + returns, axis=0)
    before = np.concatenate([np.full((1, num_assets), 100.0), close[:-1]])
    bars = dataclasses.replace(
        task.bars,
        # So many days fit into the range of a time in nanoseconds.
        time=np.datetime64("1700-01-01", "ns") + np.arange(len(close)) * np.timedelta64(1, "D"),
        open=before,
        high=np.maximum(before, close),
        low=np.minimum(before, close),
        close=close,
    )
    return bars, task.states


class Recipe:
    """The recipe's agents, for many panels of one shape: programs are compiled for the first one.

    They are those that `nca.train` ends with, bit for bit; a test compares them.
    """

    def __init__(
        self,
        policy: str = POLICY,
        num_seeds: int = 2,
        rate: float = AGENT.optimizer.learning_rate,
        env: dict[str, Any] | None = None,
        **learner: Any,
    ):
        """Take the agent that trades `policy`, with other fields of its learner.

        Args:
          policy: of the recipe's four.
          num_seeds: agents whose mean trades.
          rate: of learning.
          env: fields of the environment that differ from the recipe's.
          learner: fields of the learner that do.
        """
        agent = agent_of(policy)
        self.agent = dataclasses.replace(
            agent,
            learner=dataclasses.replace(agent.learner, **learner),
            optimizer=dataclasses.replace(agent.optimizer, learning_rate=rate),
            num_seeds=num_seeds,
        )
        self.env = dataclasses.replace(env_of(PANEL), **env or {})
        self._built: tuple[Learner, Acting] | None = None

    def trained(self, env: nca.TradingEnv) -> Run:
        """Return a run whose agents were trained in `env`."""
        if self._built is None:
            # A folder with the manifest, which a backtest reads; its parameters are replaced below.
            folder = tempfile.TemporaryDirectory()
            weakref.finalize(self, folder.cleanup)  # one that is only collected warns
            run = nca.train(env, self.agent, f"{folder.name}/run", steps=1)
            learner = make_learner(env, make_policy(self.agent, env.spec), self.agent)
            self._built = learner, Acting(run, run.params(), None)
        learner, acting = self._built
        state = learner.init(jax.random.key(0))
        for _ in range(planned_steps(self.agent) // learner.steps_per_update):
            state, _ = learner.step(state, env.market)
        acting._params = jax.tree.map(np.array, state.params)
        return acting

    def account(self, before: Bars, bars: Bars, start: str) -> Result:
        """Train on the bars `before`; return the mean agent's account on others."""
        run = self.trained(nca.TradingEnv(before, self.env))
        return nca.backtest(bars, run, start=start, look=False)


def judged(bars: Bars, truth: Truth, recipe: Recipe) -> Gate:
    """Return the gate's finding on the bars after training."""
    start = str(bars.index[truth.train])
    account = recipe.account(bars[: truth.train], bars, start)
    others = baselines(bars, PANEL, start, None)
    return gate(
        {"mean agent": account.judged_returns},
        {name: each.judged_returns for name, each in others.items()},
        account.bars_per_year,
    )


def utility(weights: np.ndarray, cost: np.ndarray, states: np.ndarray, truth: Truth) -> float:
    """Return the mean of `E[R - k/2 R^2]` given the past, of weights `[N, A]` held in each bar.

    The noise of returns is left out, which in 100,000 bars is more than the agent may lack.
    """
    known = market(
        "hidden_level", phi=truth.phi, spread=truth.spread, sigma=SIGMA, cost=COST
    ).moments[1][0]
    noise = SIGMA**2 + truth.spread**2 - known**2
    held, m = weights[1:], states[:-1]  # what a close knows is earned in the next bar
    mean = (held * m).sum(1) - cost[1:]
    return float((mean - ENV.risk_aversion / 2 * ((held**2 * noise).sum(1) + mean**2)).mean())


def sharpe(returns: np.ndarray) -> float:
    """Return the ratio per year of `[T]` returns."""
    return float(returns.mean() / returns.std() * np.sqrt(YEAR))


def optimum_row(seed: int, recipe: Recipe, truth: Truth = WEAK) -> dict[str, Any]:
    """Return how much of the optimum the recipe earns on one panel."""
    # Two draws of one market: so many days in a row do not fit into the range of a time.
    before, _ = drawn(truth, truth.train, seed + 10_000, num_assets=TRAINED)
    warm = max(WARM, recipe.env.volatility_span + 1)
    found, (bars, states) = best(truth), drawn(truth, warm + truth.test, seed)
    account = recipe.account(before, bars, str(bars.index[warm]))
    states = states[warm:]
    ideal = found.positions(states)
    traded = np.abs(np.diff(ideal, axis=0, prepend=0.0)).sum(1)
    returns = bars.close[warm + 1 :] / bars.close[warm:-1] - 1.0
    attained = (ideal[:-1] * returns).sum(1) - COST * traded[:-1]
    own = utility(account.weights.to_numpy(), account.cost.to_numpy(), states, truth)
    # Shifted: the account's weights are those held in a bar, and `ideal` is ordered at its close.
    late = np.concatenate([np.zeros((1, ASSETS)), ideal[:-1]])
    paid = COST * np.concatenate([[0.0], traded[:-1]])
    return {
        "fraction": own / found.optimum,
        "best_rule": utility(late, paid, states, truth) / found.optimum,
        "sharpe": account.metrics["sharpe"],
        "sharpe_of_best": sharpe(attained),
    }


def gate_row(seed: int, recipe: Recipe, shuffle: bool, truth: Truth = QUICK) -> dict[str, Any]:
    """Return whether one panel's agent passes the gate."""
    bars, _ = drawn(truth, truth.train + truth.test, seed, shuffle)
    found = judged(bars, truth, recipe)
    return {
        "passed": found.passed,
        "bound": found.bound,
        "sharpe": found.sharpe,
        "baseline": found.baseline,
    }


# Seeds of the panels, what a row is, and the recipe's size.
PARTS: dict[str, tuple[range, Any, dict[str, Any]]] = {
    "optimum": (range(20), optimum_row, WHOLE),
    "noise": (range(100), functools.partial(gate_row, shuffle=True), SMALL),
    # The length of training was chosen on the first of the 20 panels before these.
    "power": (range(20, 120), functools.partial(gate_row, shuffle=False), SMALL),
}


def summary(rows: list[dict[str, Any]]) -> str:
    """Return what the rows say."""
    lines = []
    for part in PARTS:
        of = [row for row in rows if row["part"] == part and row["seed"] in PARTS[part][0]]
        if of and part == "optimum":
            share = np.array([row["fraction"] for row in of])
            error = share.std(ddof=1) / np.sqrt(len(of)) if len(of) > 1 else np.nan
            sharpes = np.mean([row["sharpe"] / row["sharpe_of_best"] for row in of])
            lines.append(
                f"optimum: {share.mean():.3f} +- {error:.3f} of {len(of)} panels; "
                f"{sharpes:.3f} of the best rule's Sharpe ratio"
            )
        elif of:
            lines.append(f"{part}: {sum(row['passed'] for row in of)} of {len(of)} pass the gate")
    return "\n".join(lines)


def main() -> None:
    """Compute the rows of a part that are not in the results yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=[*PARTS, "table"])
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--count", type=int)
    args = parser.parse_args()
    if args.part != "table":
        seeds, row_of, size = PARTS[args.part]
        recipe = Recipe(**size)
        done = {(row["part"], row["seed"]) for row in rows_of(args.out)}
        for seed in seeds[: args.count]:
            if (args.part, seed) in done:
                continue
            began = time.process_time()
            row = {"part": args.part, "seed": seed, **row_of(seed, recipe)}
            row |= {"cpu_seconds": round(time.process_time() - began, 1)}
            row |= {"commit": commit(), "versions": versions(), "date": now()}
            with args.out.open("a") as file:
                file.write(json.dumps(row, default=float) + "\n")
            print({key: row[key] for key in list(row)[:-3]}, flush=True)
    print(summary(rows_of(args.out)))


if __name__ == "__main__":
    main()
