"""Markets: bars, shards or a synthetic task as arrays that accounts are stepped over.

Everything here runs once, on the host; `nca_trader.envs.trading` steps accounts over the result.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.config import MAX_NEIGHBOURS, AccountConfig, EnvConfig
from nca_trader.data.feature_sets import FeatureSet, feature_set
from nca_trader.data.shards import Shards
from nca_trader.envs import rewards
from nca_trader.envs.account.risk import alone_of, sizes
from nca_trader.envs.account.state import BarReturns, legs_of
from nca_trader.envs.actions import SCHEMES
from nca_trader.errors import BarError, ConfigError
from nca_trader.machine import memory
from nca_trader.markets import Task
from nca_trader.markets import market_of as synthetic_of
from nca_trader.types import Bars, EnvSpec, Tensor

# Copies of the features in memory at once: as computed, joined with the market's state, and on the
# device.
COPIES = 3
MOST_LEAD = 5  # bars, by which an asset is seen to lead another


class Dynamics(NamedTuple):
    """The static part of an environment: actions, rewards and rules of an account.

    config: as given. spec: what a policy needs to know. rules: what an account is given.
    """

    config: EnvConfig
    spec: EnvSpec
    rules: AccountConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Market:
    """Bars as the device holds them, float32, and the dynamics of an account on them.

    It is an argument of every jitted function: millions of bars must not become constants of a
    program. Files, shards and synthetic markets all become one of these.

    Attributes:
      features: `[N, A, F]`. legs: returns and prices, each `[N, A]` or None.
      volatility: `[]` of equal weights in every asset, per bar; see `volatility_of`.
      rows: `[]` int32 number of bars where the arrays are padded; None: all N are bars.
      dynamics: static.
    """

    features: Tensor
    legs: BarReturns
    volatility: Tensor
    rows: Tensor | None
    dynamics: Dynamics = dataclasses.field(metadata={"static": True})

    @property
    def num_bars(self) -> Any:
        """The number of bars without padding, an int or `[]` int32."""
        return len(self.legs.present) if self.rows is None else self.rows

    def legs_at(self, index: Array) -> BarReturns:
        """Return the returns and prices of the bars at `index` `[...]`."""
        row = jnp.asarray(index, jnp.uint32)  # unsigned: jax adds no check for negative indices
        return jax.tree.map(lambda leg: leg[row], self.legs)


def market_of(
    bars: Bars, features: np.ndarray, dynamics: Dynamics, shards: Shards | None = None
) -> Market:
    """Make the market of `bars` in numpy.

    Args:
      bars: N bars of A assets.
      features: `[N, A, F]` float32.
      dynamics: of the environment.
      shards: where `bars` are one of them, the arrays are padded with zeros to the longest, so that
        all shards share one compiled program.
    """
    # Returns are computed in float64, where the digits of a price are, and cast last.
    legs = jax.tree.map(
        lambda leg: leg if leg.dtype == bool else leg.astype(np.float32),
        legs_of(bars, dynamics.rules),
    )
    if dynamics.rules.covariance is not None:
        legs = legs._replace(size=sizes(bars, dynamics.rules.covariance, dtype=np.float32))
    volatility = volatility_of(legs, dynamics.rules.size_cap)
    if shards is None:
        return Market(features, legs, volatility, None, dynamics)
    longest = max(shard.rows for shard in shards)

    def pad(leaf: np.ndarray) -> np.ndarray:
        return np.pad(leaf, [(0, longest - len(leaf))] + [(0, 0)] * (leaf.ndim - 1))

    rows = np.asarray(len(bars), np.int32)
    return Market(pad(features), jax.tree.map(pad, legs), volatility, rows, dynamics)


def spec_of(
    config: EnvConfig,
    symbols: tuple[str, ...],
    states: tuple[str, ...] = (),
    bar_seconds: int = 0,
) -> EnvSpec:
    """Describe the environment of `config` over `symbols` for a policy.

    Args:
      config: of the environment.
      symbols: A names, in order.
      states: names of the market's own state, which is observed after the features.
      bar_seconds: length of the bars; only features of a slower time frame need it.

    Returns:
      The spec, without what follows from the values of bars: `nearest` and `variance`.
    """
    size = 1.0 / len(symbols) if config.size is None else config.size
    scheme, features = SCHEMES[config.actions], feature_set_of(config, bar_seconds)
    own = config.actions not in SCHEMES.builtin
    return EnvSpec(
        symbols=symbols,
        features=(*config.features, *states),
        targets=(-size, 0.0, size) if config.short else (0.0, size),
        warmup=max(
            features.warmup,
            # Before that bar a size is 0, so nothing could be ordered.
            0 if config.sizing == "fixed" else config.volatility_span,
        ),
        actions=config.actions,
        constant_size=config.reward == "pnl",
        memory="" if rewards.SCHEMES[config.reward].memory is None else config.reward,
        decay=config.sharpe_decay if config.reward == "differential_sharpe" else 0.0,
        choices=scheme.choices if own else None,
        bar_seconds=features.bar_seconds,
        limits=(float(scheme.low), float(scheme.high)) if own and not scheme.choices else None,
    )


def feature_set_of(config: EnvConfig, bar_seconds: int) -> FeatureSet:
    """Return the features of `config` on bars of that length, see `EnvSpec.bar_seconds`."""
    return feature_set(config.features, bar_seconds, config.sessions)


def first_of(shards: Shards) -> Bars:
    """Read the first shard.

    Raises:
      BarError: there are no shards, or they differ in their number of symbols.
    """
    if not len(shards):
        raise BarError(f"{shards.folder}: there are no shards in it; write some first.")
    for shard in shards:
        if len(shard.symbols) != len(shards[0].symbols):
            raise BarError(
                f"{shards.folder / shard.path}: has {len(shard.symbols)} symbols, and "
                f"{shards[0].path} has {len(shards[0].symbols)}; an agent trains on one number "
                "of assets, so write shards of as many symbols each."
            )
    return shards.read(shards[0])


def state_names(source: Bars | Task, config: EnvConfig) -> tuple[str, ...]:
    """Return the names of the market's own state that an environment observes."""
    names: tuple[str, ...] = ()
    if isinstance(source, Task):
        names = source.signal_names
    elif config.market and config.market_state:
        # A market of your own is drawn: its draws alone say whether they have a state.
        names = synthetic_of(config).state_names
    # The prefix keeps them apart from a feature of the same name.
    return tuple(f"state:{name}" for name in names) if config.market_state else ()


def observed_states(source: Bars | Task, config: EnvConfig, names: tuple[str, ...]) -> np.ndarray:
    """Return `[N, A, S]` float32 values of the market's own state.

    Args:
      source: the bars.
      config: of the environment.
      names: of what it observes, see `state_names`.

    Raises:
      ConfigError: it observes a state, which bars alone do not have.
    """
    if names and isinstance(source, Task):
        return source.signals.astype(np.float32)
    bars = source.bars if isinstance(source, Task) else source
    if names:
        raise ConfigError(
            f"{bars.source or 'bars'}: the environment observes the state of the market "
            f"{config.market}, which bars do not hold; give no bars, or set market_state = false."
        )
    return np.zeros((*bars.close.shape, 0), np.float32)


def features_of(bars: Bars, config: EnvConfig, states: np.ndarray, bar_seconds: int) -> np.ndarray:
    """Return `[N, A, F]` float32: the features of `config`, then the market's own `states`.

    Args:
      bars: N bars.
      config: of the environment.
      states: `[N, A, S]` of the market.
      bar_seconds: see `EnvSpec`.

    Raises:
      BarError: memory does not hold them.
    """
    if not config.features:
        return states
    # Refused before anything is computed: where memory runs out, Linux kills without a message.
    width = len(config.features) + states.shape[-1]
    need, free = COPIES * 4 * bars.close.size * width, memory().free
    if need > free:
        raise BarError(
            f"{bars.source or 'bars'}: {width} features of {len(bars):,} bars of "
            f"{bars.num_assets} assets need {need / 1e9:.3g} GB and {free / 1e9:.3g} GB are free; "
            "give fewer bars or features, or train on shards (docs/guides/streaming.md)."
        )
    return np.concatenate([feature_set_of(config, bar_seconds).batch(bars), states], axis=-1)


def volatility_of(legs: BarReturns, cap: float = np.inf) -> np.ndarray:
    """Return `[]` float32 standard deviation of the log-returns of equal weights in every asset.

    Sizes are those by volatility alone, at most `cap`.

    Where prices always move by the same amount, the deviation is a rounding error. There it is that
    move.
    """
    # In float64: 1 plus a small return loses most of the return's digits in float32.
    overnight, intraday = (np.asarray(r, np.float64) for r in (legs.overnight, legs.intraday))
    growth = (1.0 + overnight) * (1.0 + intraday)
    if legs.size is not None:
        # Of positions with the sizes that the close before gave.
        size = np.minimum(alone_of(legs.size), cap)
        held = np.vstack([np.zeros_like(size[:1]), size[:-1]])
        growth = 1.0 + held * (growth - 1.0)
    # A price that falls to 0 would have the log -inf, and the deviation would be NaN.
    log_return = np.log(np.maximum(growth, 1e-6)).mean(axis=1)
    return np.asarray(max(log_return.std(), abs(log_return.mean())), np.float32)


def nearest_assets(bars: Bars) -> tuple[tuple[int, ...], ...]:
    """Rank, for each asset, up to `MAX_NEIGHBOURS` others by what their returns say of its own.

    That is the size of the correlation, the largest of those at the same bar and at up to
    `MOST_LEAD` bars before. A pair without a correlation is last; equals keep their order.

    Returns:
      The numbers of the others, per asset; () for one asset, which has no others.
    """
    if bars.num_assets < 2:
        return ()
    size = np.max([np.abs(correlations(bars, lead)) for lead in range(MOST_LEAD + 1)], axis=0)
    order = np.argsort(-size, axis=1, kind="stable")
    kept = min(bars.num_assets - 1, MAX_NEIGHBOURS)
    return tuple(tuple(int(b) for b in row[row != a][:kept]) for a, row in enumerate(order))


def correlations(bars: Bars, lead: int = 0) -> np.ndarray:
    """Compute `[A, A]` float64 correlations of log-returns, close to close.

    Entry [a, b] is of a's returns with those of b `lead` bars before. A return to or from a missing
    bar counts as the asset's mean: two assets that share few bars correlate little. 0 stands for no
    correlation: too few bars, or an asset that never moved.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        returns = np.diff(np.log(bars.close), axis=0)
    there = bars.present[1:] & bars.present[:-1] & np.isfinite(returns)
    mean = np.where(there, returns, 0.0).sum(0) / np.maximum(there.sum(0), 1)
    r = np.where(there, returns - mean, 0.0)
    x, y = r[lead:], r[: max(len(r) - lead, 0)]
    count = max(len(x), 1)
    of_x, of_y = (np.sqrt((a**2).sum(0) / count) for a in (x, y))
    # What remains of the returns of a constant growth is rounding.
    usable = np.minimum(of_x[:, None], of_y) > 1e-12
    size = np.where(usable, count * of_x[:, None] * of_y, 1.0)
    return np.where(usable, x.T @ y / size, 0.0)
