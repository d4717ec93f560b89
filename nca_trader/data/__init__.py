"""Bars and features: reading and checking, samples, calendars, shards, online features."""

from nca_trader.config.reading import REPAIRS
from nca_trader.data.bars import read_bars, validate, write_bars
from nca_trader.data.calendar import EVERY_DAY, FX_WEEK, Sessions, flat_at_close, session_ends
from nca_trader.data.features import FeatureSet, feature_set
from nca_trader.data.holidays import new_york
from nca_trader.data.indicators import FEATURES
from nca_trader.data.online import Feature
from nca_trader.data.resampling import align, resample
from nca_trader.data.samples import sample_bars
from nca_trader.data.shards import Shards, open_shards, write_shards
from nca_trader.data.stream import stream

__all__ = [
    "EVERY_DAY",
    "FEATURES",
    "FX_WEEK",
    "REPAIRS",
    "Feature",
    "FeatureSet",
    "Sessions",
    "Shards",
    "align",
    "feature_set",
    "flat_at_close",
    "new_york",
    "open_shards",
    "read_bars",
    "resample",
    "sample_bars",
    "session_ends",
    "stream",
    "validate",
    "write_bars",
    "write_shards",
]
