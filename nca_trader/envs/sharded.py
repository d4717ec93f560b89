"""Shards of bars as one environment: every shard is a market, of one shape on the device."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np

from nca_trader.config import EnvConfig
from nca_trader.config.ranges import expect
from nca_trader.data.shards import Shards
from nca_trader.envs.rewards import check_paid
from nca_trader.envs.trading import Market, TradingEnv, features_of, host_market
from nca_trader.errors import BarError, ConfigError, StateError
from nca_trader.types import Bars


class ShardedEnv(TradingEnv):
    """An environment whose bars do not fit into memory: agents train on shard after shard.

    What a policy needs to know (`spec`), `bars`, `features` and `market` are those of the first
    shard; `market` is on the host, padded as `prepare` pads.

    Attributes:
      shards: in the order in which they are trained on. rows: N of a padded market.
    """

    def __init__(self, shards: Shards, config: EnvConfig | str | os.PathLike[str] | None = None):
        """Reads the first shard; the others wait.

        Raises:
          BarError: no shards, or shards of different numbers of symbols. Else see `TradingEnv`,
            `Shards.read`.
        """
        accepted = "Shards, e.g. of nca_trader.data.open_shards"
        expect("shards", shards, Shards, accepted, config=config)
        if not len(shards):
            raise BarError(f"{shards.folder}: there are no shards in it; write some first.")
        for shard in shards:
            if len(shard.symbols) != len(shards[0].symbols):
                raise BarError(
                    f"{shards.folder / shard.path}: has {len(shard.symbols)} symbols, and "
                    f"{shards[0].path} has {len(shards[0].symbols)}; an agent trains on one number "
                    "of assets, so write shards of as many symbols each."
                )
        super().__init__(shards.read(shards[0]), config)
        if self.config.market and self.config.market_state:
            raise ConfigError(
                f"{shards.folder}: shards do not hold the state of the market "
                f"{self.config.market}; set market_state = false."
            )
        self.shards, self.rows = shards, max(shard.rows for shard in shards)
        self.market = self._padded(self.bars, self.features)

    @property
    def one_universe(self) -> bool:
        """Whether every shard has the same symbols in the same order."""
        return len({shard.symbols for shard in self.shards}) == 1

    def check_lengths(self, need: int) -> None:
        """Refuses shards that are too short to train on.

        Args:
          need: bars of a segment and of what its first decision looks back at.

        Raises:
          BarError: the first of them.
        """
        for shard in self.shards:
            if shard.rows < need:
                raise BarError(
                    f"{self.shards.folder / shard.path}: {shard.rows} bars, but training needs "
                    f"{need} of each shard; write the shards anew with rows that leave no short "
                    "last one, or lower learner.segment_length or policy.dilations."
                )

    def prepare(self, bars: Bars) -> Market:
        """A shard's market on the host, padded to `rows`, so that all share one program.

        Raises:
          StateError: the shard has other columns than the first one.
        """
        check_paid(self.config, bars, self.spec.size)
        features = features_of(bars, self.config, np.zeros((*bars.close.shape, 0), np.float32))
        # Values learnt on one shard hold on the next: all rewards are scaled by the first.
        market = self._padded(bars, features)._replace(volatility=self.market.volatility)
        if jax.tree.structure(market) != jax.tree.structure(self.market):
            raise StateError(
                f"{bars.source or 'a shard'}: the shard from {bars.time[0]} on has other columns "
                f"than {self.shards[0].path} ({', '.join(sorted(bars.fields))}); write all shards "
                "from bars with the same columns."
            )
        return market

    def _padded(self, bars: Bars, features: np.ndarray) -> Market:
        """Rows after the last are 0; no segment reaches them, since `rows` says where bars end."""
        market = host_market(bars, features, self.costs, self.rules)

        def pad(leaf: Any) -> np.ndarray:
            return np.pad(leaf, [(0, self.rows - len(leaf))] + [(0, 0)] * (leaf.ndim - 1))

        padded = market._replace(features=pad(market.features), legs=jax.tree.map(pad, market.legs))
        return padded._replace(rows=np.int32(len(bars)))
