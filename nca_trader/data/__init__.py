"""Bars and features: reading and checking, samples, calendars, shards, online features."""

from nca_trader.config.reading import REPAIRS
from nca_trader.data.bars import read_bars, sample_bars, validate, write_bars
from nca_trader.data.calendar import (
    EVERY_DAY,
    FX_WEEK,
    Sessions,
    flat_at_close,
    new_york,
    session_ends,
)
from nca_trader.data.feature_sets import FeatureSet, feature_set
from nca_trader.data.features import FEATURES, Feature
from nca_trader.data.resampling import align, resample
from nca_trader.data.shards import Shards, open_shards, stream, write_shards

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
