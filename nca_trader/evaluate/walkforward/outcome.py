"""What a walk-forward found: its account, its baselines and what they show."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax import Array

from nca_trader.config import AgentConfig, EnvConfig
from nca_trader.envs.account.exits import Order
from nca_trader.evaluate import metrics
from nca_trader.evaluate.evidence.deploy import deploy, refuse_other
from nca_trader.evaluate.evidence.gate import GateResult
from nca_trader.evaluate.evidence.inference import ConfidenceInterval
from nca_trader.evaluate.result import Result
from nca_trader.evaluate.walkforward.refit import Fitted, Refit, candidate
from nca_trader.runs.manifest import Deployment, Run
from nca_trader.strategies.strategy import Strategy
from nca_trader.types import Bar, Bars

CONSTANT = "best constant weight"
SHOWN = 3  # folds of a sentence


@dataclasses.dataclass(frozen=True, kw_only=True)
class WalkForward:
    """The result of a walk-forward.

    Attributes:
      result: one account over the stitched test spans.
      folds: one row per fold: its spans, the SHA-256 of its bars, what was chosen on the train
        span, and the stitched account's metrics in its test span.
      baselines: results of the baselines on the same bars, costs and fills, by name.
      difference: mean return per year of `result` less that of the best constant weight.
      interval: its 95% interval.
      gate: whether `result` was shown to be better than the best baseline that could be deployed,
        and of an agent with a base whether it does that no harm.
      verdict: what the test spans do and do not show, by the gate.
      bars: all bars of the walk-forward.
      recipe: environment and agent that each fold trained; None of a strategy.
      year: bars that the baselines' trend looks back.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500").select("SP500")[-1000:]
      >>> grid = {"fast": (5, 10), "slow": (30,)}
      >>> walk = nca.walk_forward(bars, nca.rules.sma_cross, grid=grid, train=500, test=250)
      >>> len(walk.folds), len(walk.result.equity)
      (2, 500)
    """

    result: Result
    folds: pd.DataFrame
    baselines: dict[str, Result]
    difference: float
    interval: ConfidenceInterval
    gate: GateResult
    verdict: str
    bars: Bars
    recipe: tuple[EnvConfig, AgentConfig] | None = None
    year: int = 252

    def deploy(self, run: Run) -> Deployment:
        """Record in a run's folder what trades in its place, by the gate of this walk-forward.

        The folds judge the recipe, and the run is the agent that the recipe made of all years.

        Args:
          run: trained by the recipe of the folds, on bars that reach at least as far as they do.

        Raises:
          ConfigError: this is a walk-forward of a strategy; the run is of another recipe; the
            folds judge on bars after those that trained or selected the run.
        """
        # The last bar that the folds judge: the run must have seen bars at least as late.
        last = int(self.bars.index.searchsorted(self.result.equity.index[-1]))
        refuse_other(run, self.recipe, self.bars, last)
        assert self.recipe is not None
        judged = self.bars.between(str(self.result.equity.index[0]), None)
        # The stitched test spans have no gap, so their number of bars is enough.
        judged = judged[: len(self.result.equity)]
        return deploy(run, self.gate, judged, self.year)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of `result`."""
        return self.result.metrics

    @property
    def table(self) -> pd.DataFrame:
        """One row for the walk-forward and for each baseline, one column per metric."""
        rows = {self.result.name: self.metrics}
        return pd.DataFrame(rows | {name: r.metrics for name, r in self.baselines.items()}).T

    def __repr__(self) -> str:
        shown = self.table[["total_return", "sharpe", "max_drawdown", "turnover"]]
        # A strategy is not deployed by the gate.
        found = self.gate.sentence if self.recipe else self.gate.finding
        return f"{shown.to_string(float_format='{:.3f}'.format)}\n{self.verdict}\n{found}"


def table_of(refit: Refit, fitted: list[Fitted], result: Result) -> pd.DataFrame:
    """Return one row per fold."""
    index, rows = refit.bars.index, []
    # From the one account, so that a fold's first bar pays for the change of strategy.
    returns = pd.Series(metrics.simple_returns(result.equity), result.equity.index)
    for fold, one in zip(refit.folds, fitted, strict=True):
        (begin, end), (first, last) = fold.train, fold.test
        own = returns.reindex(index[first:last]).to_numpy()
        rows.append(
            {
                "train_start": index[begin],
                "train_stop": index[end - 1],
                "train_bars": end - begin,
                "test_start": index[first],
                "test_stop": index[last - 1],
                "test_bars": last - first,
                **one.chosen,
                "tried": one.tried,
                "train_score": one.score,
                "total_return": metrics.total_return(own),
                "sharpe": metrics.sharpe(own, refit.bars.bars_per_year),
                "train_sha256": one.train_sha256,
                "test_sha256": one.test_sha256,
                "seconds": one.seconds,
            }
        )
    table = pd.DataFrame(rows, index=pd.RangeIndex(len(rows), name="fold"))
    begins = (index[fold.test[0]] for fold in refit.folds)
    waiting = [", ".join(result.closed_until(begin)) for begin in begins]
    # A column of what most walks cannot have would be empty.
    return table.assign(closed_before=waiting) if any(waiting) else table


def closed_sentence(table: pd.DataFrame) -> str:
    """Return which folds begin without an asset that a level closed before; "" for none."""
    if "closed_before" not in table:
        return ""
    folds = table["closed_before"][table["closed_before"] != ""]
    shown = [f"fold {number} ({symbols})" for number, symbols in folds[:SHOWN].items()]
    more = [f"{len(folds) - SHOWN} more"] * (len(folds) > SHOWN)
    return (
        "A level closed assets before a fold, which begins without them because their targets had "
        f"not changed: {', '.join(shown + more)}."
    )


STEPS = 10  # between no position and the largest, of the weights that the baseline is chosen from


def join_folds(refit: Refit, fitted: list[Fitted]) -> np.ndarray | Strategy:
    """Return what the folds decided one after the other.

    Targets `[N, A]` of all rows, NaN outside of the test spans; or, where they depend on the
    account, the strategy that acts as each fold's own in its test span.
    """
    folds = list(zip(refit.folds, fitted, strict=True))
    if fitted[0].with_account:
        chosen = [(fold.test[0], candidate(refit.subject, one.chosen)) for fold, one in folds]
        return switching(chosen)
    targets = np.full((len(refit.bars), refit.bars.num_assets), np.nan)
    for fold, one in folds:
        targets[fold.test[1] - len(one.targets) : fold.test[1]] = one.targets
    return targets


def switching(parts: list[tuple[int, Strategy]]) -> Strategy:
    """Return the strategy that decides as the newest part whose first row has come.

    All parts see every bar, so each knows the history when its turn comes. The order in force is
    repeated there. The account, its entries and its stops pass from part to part.

    Args:
      parts: first row and strategy, by row; of one rule.
    """
    firsts = jnp.array([first for first, _ in parts])
    strategies = [strategy for _, strategy in parts]

    def init(num_assets: int) -> Any:
        states = tuple(strategy.init(num_assets) for strategy in strategies)
        return jnp.zeros((), jnp.int32), states, jnp.full((len(parts), num_assets), jnp.nan)

    def act(state: Any, bar: Bar, portfolio: Any) -> tuple[Any, Order]:
        row, states, lasts = state
        decided = [s.decide(own, bar, portfolio) for s, own in zip(strategies, states, strict=True)]
        shape = bar.close.shape

        def stacked(*leaves: Any) -> Array:
            # One strategy may order a stop for all assets, and another one for each.
            return jnp.stack([jnp.broadcast_to(leaf, shape) for leaf in leaves])

        # A level that one part orders and another does not is NaN there.
        each = zip(*(order for _, order in decided), strict=True)
        every = [
            None if all(x is None for x in one) else [jnp.nan if x is None else x for x in one]
            for one in each
        ]
        orders = Order._make(None if one is None else stacked(*one) for one in every)
        # NaN orders nothing, so each part remembers what it ordered last.
        lasts = jnp.where(jnp.isnan(orders.target), lasts, orders.target)
        turn = jnp.maximum(jnp.searchsorted(firsts, row, side="right") - 1, 0)
        order = jax.tree.map(lambda leaf: leaf[turn], orders)
        begins = (row == firsts).any()
        order = order._replace(target=jnp.where(begins, lasts[turn], order.target))
        return (row + 1, tuple(own for own, _ in decided), lasts), order

    # Without the portfolio where none of them sees it.
    taken = act if strategies[0].sees_portfolio else lambda s, bar: act(s, bar, None)
    return Strategy(init, taken, strategies[0].name, strategies[0].order)


def best_constant(bars: Bars, ordered: pd.DataFrame) -> np.ndarray:
    """Return the targets `[N, A]` of the baseline: one weight, equal in all assets, rebalanced.

    It is the one of highest log growth over all bars, before costs, known in hindsight: what a
    strategy has to beat to be worth its timing. It is between 0 and the most that was `ordered`,
    or 1, and may be short where the strategy ever was.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        # A missing bar counts as no move.
        returns = np.nan_to_num(bars.close[1:] / bars.close[:-1] - 1.0).mean(1)
    asked = np.nan_to_num(ordered.to_numpy())
    most = max(1.0, float(np.abs(asked).sum(1).max()))
    weights = np.linspace(-most if (asked < 0.0).any() else 0.0, most, 2 * STEPS + 1)
    # Below a loss of all equity, growth counts as the worst there is.
    growth = [np.log(np.maximum(1.0 + w * returns, 1e-12)).sum() for w in weights]
    best = weights[int(np.argmax(growth))]
    return np.full((len(bars), bars.num_assets), best / bars.num_assets)


def matched_hold(bars: Bars, weights: pd.DataFrame) -> np.ndarray:
    """Return the targets `[N, A]` of holding what an account held on average, rebalanced.

    It has the account's exposure to each asset and none of its timing.
    """
    return np.broadcast_to(weights.to_numpy().mean(0), bars.close.shape)
