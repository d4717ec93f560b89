"""Bars and features: reading and checking, samples, calendars, shards, online features."""

from nca_trader.data.bars import read_bars, validate
from nca_trader.data.calendar import EVERY_DAY, FX_WEEK, Sessions, new_york
from nca_trader.data.shards import open_shards, stream, write_shards

__all__ = [
    "EVERY_DAY",
    "FX_WEEK",
    "Sessions",
    "new_york",
    "open_shards",
    "read_bars",
    "stream",
    "validate",
    "write_shards",
]
