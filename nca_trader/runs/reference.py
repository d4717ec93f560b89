"""features.json: how a run's features are distributed over its training bars, and their schema.

The population stability index (PSI) compares live values with it: values are counted in ten bins
of equal share in training, and `PSI = sum (p - q) ln(p / q)` over the shares p live and q there.
A feature's values follow each other, so that a window of training itself is far from the whole: the
threshold of a feature is twice the index of the most unusual window of training, and at least
0.25, which is by convention a major shift.

Source: Siddiqi, Credit Risk Scorecards (2006), chapter 9, for the index and its 0.25.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json

import jax
import numpy as np

from nca_trader.config.extensions import split_frame
from nca_trader.data.features import FEATURES
from nca_trader.errors import ConfigError

FILE = "features.json"
WINDOW = 250  # bars that are compared
BINS = 10
MAJOR = 0.25  # of the index
MARGIN = 2.0  # above the most unusual window of training
LEAST = 4 * WINDOW  # bars of training: fewer say too little about what is usual
MOST_VALUES, MOST_WINDOWS = 200_000, 200  # of a feature, spread evenly: more change nothing
HALF = 0.5  # added to each count: no share is 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """The distribution of F features over the training bars.

    Attributes:
      schema: see `schema_of`. names: F.
      edges: `[F, 9]` the deciles. share: `[F, 10]` of training values in each bin.
      threshold: `[F]` of the index of WINDOW bars.
    """

    schema: str
    names: list[str]
    edges: list[list[float]]
    share: list[list[float]]
    threshold: list[float]

    def __post_init__(self):
        wide, high = (BINS - 1, BINS), len(self.names)
        fits = len(self.threshold) == high and all(
            len(rows) == high and all(len(row) == width for row in rows)
            for rows, width in zip((self.edges, self.share), wide, strict=True)
        )
        if not fits:
            raise ConfigError(f"the distribution of {high} features has rows of another shape.")


def schema_of(names: tuple[str, ...]) -> str:
    """Return a SHA-256 of the features' order, warm-up and memory; "" for a market's own states.

    Another version that computes a feature from other bars has another schema.
    """
    features = {name: split_frame(name)[1] for name in names}
    if any(name not in FEATURES for name in features.values()):
        return ""
    memory = {
        name: [
            FEATURES[bare].warmup,
            *(
                [jax.tree_util.keystr(path), str(np.asarray(x).dtype), list(np.shape(x))]
                for path, x in jax.tree_util.tree_leaves_with_path(FEATURES[bare].init())
            ),
        ]
        for name, bare in features.items()
    }
    return hashlib.sha256(json.dumps([list(names), memory], sort_keys=True).encode()).hexdigest()


def reference_of(
    features: np.ndarray, present: np.ndarray, names: tuple[str, ...], warmup: int
) -> Reference | None:
    """Measure features over training bars; None where these are too few.

    Args:
      features: `[N, A, F]`.
      present: `[N, A]`.
      names: F.
      warmup: bars before the first values that mean something.
    """
    features, present = features[warmup:], present[warmup:]
    if len(features) < LEAST or not names:
        return None
    starts = np.linspace(0, len(features) - WINDOW, MOST_WINDOWS).astype(int)
    edges, share, threshold = [], [], []
    for f in range(len(names)):
        values = features[..., f]
        known = values[present & np.isfinite(values)]
        if not known.size:
            return None
        step = max(known.size // MOST_VALUES, 1)
        cuts = np.quantile(known[::step], np.arange(1, BINS) / BINS).astype(np.float64)
        whole = counts_of(known[::step], cuts)
        edges.append(cuts.tolist())
        share.append(((whole + HALF) / (whole.sum() + BINS * HALF)).tolist())
        usual = [
            float(psi(counts_of(v[p & np.isfinite(v)], cuts), np.array(share[-1])))
            for v, p in ((values[a : a + WINDOW], present[a : a + WINDOW]) for a in starts)
        ]
        threshold.append(max(MAJOR, MARGIN * max(usual)))
    return Reference(
        schema=schema_of(names),
        names=list(names),
        edges=edges,
        share=share,
        threshold=threshold,
    )


def counts_of(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return `[10]` how many values lie in each bin."""
    return np.bincount(np.searchsorted(edges, values, "right"), minlength=BINS).astype(np.float64)


def psi(counts: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Return the population stability index `[...]` of counts `[..., 10]` against shares.

    >>> share = np.full((2, 10), 0.1)
    >>> print(psi(np.array([np.full(10, 50.0), np.arange(10.0) * 10]), share).round(2))
    [0.   0.76]
    """
    if counts.shape != share.shape:
        raise ConfigError(f"counts have shape {counts.shape} and shares {share.shape}.")
    p = (counts + HALF) / (counts.sum(-1, keepdims=True) + BINS * HALF)
    return ((p - share) * np.log(p / share)).sum(-1)
