"""Bars in, features out: reading and checking bars, samples, spans by date, online features."""

from nca_trader.data.bars import read_bars, write_bars
from nca_trader.data.checks import validate
from nca_trader.data.faults import REPAIRS
from nca_trader.data.features import FEATURES, Feature, FeatureSet, feature_set
from nca_trader.data.samples import sample_bars
from nca_trader.data.splits import Span, Splits, split

__all__ = [
    "FEATURES",
    "REPAIRS",
    "Feature",
    "FeatureSet",
    "Span",
    "Splits",
    "feature_set",
    "read_bars",
    "sample_bars",
    "split",
    "validate",
    "write_bars",
]
