"""What flows through the system: bars, one bar, costs, and what an environment looks like."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import NamedTuple

import jax
import numpy as np
import pandas as pd
from jax import Array

from nca_trader.errors import BarError, ConfigError

# Numpy on the host, in float64; jax within a traced function, where `vmap` and `scan` take it.
Tensor = Array | np.ndarray
SECONDS_PER_YEAR = 365.2425 * 86_400
PRICES = ("open", "high", "low", "close")


class Bar(NamedTuple):
    """One closed bar of one asset; `jax.vmap` adds assets, `jax.lax.scan` adds time.

    time: `[]` int64 seconds since 1970-01-01 UTC of the bar's open.
    open, high, low, close: `[]` float64 prices. volume: `[]` float64, in the file's own unit.
    present: `[]` bool, False where the asset has no bar at this time.
    """

    time: Tensor
    open: Tensor
    high: Tensor
    low: Tensor
    close: Tensor
    volume: Tensor
    present: Tensor


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Bars:
    """Bars of `A` assets on one time axis of `N` bars, on the host in float64.

    A missing bar has `present` False and carries the last close as its prices, with volume 0;
    before an asset's first bar its prices are NaN. The arrays are read-only.

    Attributes:
      time: `[N]` datetime64[ns], UTC, the bar's open; its close is one bar length later.
      symbols: `A` names.
      open, high, low, close, volume: `[N, A]` float64.
      present: `[N, A]` bool.
      source: where the bars came from, for reports and error messages.
      note: what a report must say about these bars, e.g. that an index is not tradable; or "".
    """

    time: np.ndarray
    symbols: tuple[str, ...]
    open: np.ndarray
    high: np.ndarray
    low: np.ndarray
    close: np.ndarray
    volume: np.ndarray
    present: np.ndarray
    source: str = ""
    note: str = ""

    def __post_init__(self):
        shape = (len(self.time), len(self.symbols))
        for name in (*PRICES, "volume", "present"):
            array = np.array(getattr(self, name), dtype=bool if name == "present" else np.float64)
            if array.shape != shape:
                raise BarError(
                    f"{self.source or 'bars'}: {name} has shape {array.shape} where "
                    f"[N, A] = {shape} is expected; give every field one column a symbol."
                )
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        time = np.array(self.time, dtype="datetime64[ns]")
        if len(time) > 1 and not (np.diff(time) > np.timedelta64(0, "ns")).all():
            row = int(np.argmin(np.diff(time) > np.timedelta64(0, "ns"))) + 1
            raise BarError(
                f"{self.source or 'bars'}: time at row {row} ({time[row]}) is not after the row "
                "before it; sort the bars and remove duplicates."
            )
        time.setflags(write=False)
        object.__setattr__(self, "time", time)

    def __len__(self) -> int:
        return len(self.time)

    def __repr__(self) -> str:
        span = f"{self.time[0]} to {self.time[-1]}" if len(self) else "empty"
        return f"Bars({len(self)} bars of {', '.join(self.symbols)}, {span})"

    @property
    def num_assets(self) -> int:
        """A, the number of symbols."""
        return len(self.symbols)

    @property
    def index(self) -> pd.DatetimeIndex:
        """`[N]` the time axis as pandas wants it, UTC."""
        return pd.DatetimeIndex(self.time, tz="UTC", name="time")

    @property
    def bars_per_year(self) -> float:
        """Bars in a year of these bars' own calendar: 252 or so for daily equities."""
        if len(self) < 2:
            return float("nan")
        seconds = (self.time[-1] - self.time[0]) / np.timedelta64(1, "s")
        return (len(self) - 1) * SECONDS_PER_YEAR / seconds

    def __getitem__(self, rows: slice) -> Bars:
        """The bars of a contiguous range of rows."""
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise TypeError("Bars takes a contiguous slice of rows, e.g. bars[100:200].")
        fields = ("time", *PRICES, "volume", "present")
        return dataclasses.replace(self, **{name: getattr(self, name)[rows] for name in fields})

    def select(self, *symbols: str) -> Bars:
        """The bars of some of the assets, in the order asked for."""
        unknown = [s for s in symbols if s not in self.symbols]
        if unknown or not symbols:
            raise BarError(
                f"{self.source or 'bars'}: no symbol {', '.join(unknown) or 'given'}; "
                f"there are {', '.join(self.symbols)}."
            )
        columns = [self.symbols.index(s) for s in symbols]
        fields = (*PRICES, "volume", "present")
        arrays = {name: getattr(self, name)[:, columns] for name in fields}
        return dataclasses.replace(self, symbols=tuple(symbols), **arrays)

    def row(self, date: str | np.datetime64 | pd.Timestamp) -> int:
        """The first row at or after `date` (UTC where it has no zone); `N` if there is none.

        Raises:
          ConfigError: `date` is not a date.
        """
        try:
            stamp = pd.Timestamp(date)
        except ValueError:
            stamp = pd.NaT
        if not isinstance(stamp, pd.Timestamp):  # also what pandas makes of "" and "nat"
            raise ConfigError(f"{date!r} is not a date; give one such as 2013-01-02.")
        stamp = stamp.tz_localize("UTC") if stamp.tz is None else stamp.tz_convert("UTC")
        return int(np.searchsorted(self.time, stamp.tz_localize(None).to_datetime64()))

    def between(self, start: str | None = None, stop: str | None = None) -> Bars:
        """The bars with `start <= time < stop`; either may be None."""
        first = 0 if start is None else self.row(start)
        last = len(self) if stop is None else self.row(stop)
        return self[first:last]

    def digest(self) -> str:
        """SHA-256 over times, symbols and every value: the same bars give the same digest."""
        digest = hashlib.sha256(repr(self.symbols).encode())
        digest.update(self.time.astype("int64").tobytes())
        for name in (*PRICES, "volume", "present"):
            digest.update(np.ascontiguousarray(getattr(self, name)).tobytes())
        return digest.hexdigest()

    def as_bar(self) -> Bar:
        """The bars as one `Bar` of numpy arrays `[N, A]`, which features and strategies scan."""
        seconds = self.time.astype("datetime64[s]").astype(np.int64)
        time = np.broadcast_to(seconds[:, None], self.close.shape)
        return Bar(time, self.open, self.high, self.low, self.close, self.volume, self.present)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("commission", "slippage"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What trading costs; a pytree, so that a compiled backtest takes any costs.

    Attributes:
      commission: fraction of traded notional, e.g. 5e-4 for 5 bp.
      slippage: fraction of price by which a fill is worse than the bar's price, e.g. 2e-4.
    """

    commission: float = 0.0
    slippage: float = 0.0

    def __post_init__(self):
        for name in ("commission", "slippage"):
            value = getattr(self, name)
            # Under a trace it is an array, of a value that was checked before.
            if isinstance(value, int | float) and not 0.0 <= value < 1.0:
                raise ConfigError(
                    f"costs.{name} = {value} is not a fraction in [0, 1); 5 bp is 5e-4."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """What a policy needs to know of an environment, and what ties a run to it.

    Attributes:
      symbols: the assets, in order. features: the features, in order.
      targets: the target weight that each discrete action means, e.g. (-0.5, 0.0, 0.5).
      warmup: bars before every feature is defined.
    """

    symbols: tuple[str, ...]
    features: tuple[str, ...]
    targets: tuple[float, ...]
    warmup: int

    @property
    def num_assets(self) -> int:
        """A, the number of symbols."""
        return len(self.symbols)

    @property
    def num_features(self) -> int:
        """F, the number of features."""
        return len(self.features)

    @property
    def num_actions(self) -> int:
        """The number n of discrete actions of each asset."""
        return len(self.targets)
