"""The types that all packages share: bars, one bar, costs, and the spec of an environment."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd
from jax import Array

from nca_trader.config.account import AccountConfig, Costs
from nca_trader.config.ranges import moment
from nca_trader.errors import BarError

# Numpy in float64 on the host; jax inside a traced function.
Tensor = Array | np.ndarray
SECOND, DAY = np.timedelta64(1, "s"), np.timedelta64(1, "D")
YEAR_DAYS = 365.2425
SECONDS_PER_YEAR = YEAR_DAYS * 86_400
EXCHANGE_DAYS = 252.0  # sessions per year on an exchange: 261 weekdays less about 9 holidays
COUNTED_YEARS, LONGEST_DAY = 2.0, 1.5  # from which bars are counted; days of a bar
USUAL_WEEKS = 4  # from which a holiday or a special session in each hides no day of the week
ROUND_THE_CLOCK = 22  # hours with bars per day from which a market counts as open day and night
# Sessions without a break, in hours by the clock there; FX opens on Sunday and closes on Friday.
ONE_SESSION = (
    ("America/New_York", 9.5, 16), ("Europe/London", 8, 16.5), ("Europe/Berlin", 9, 17.5),
    ("Asia/Kolkata", 9.25, 15.5), ("Asia/Seoul", 9, 15.5), ("Australia/Sydney", 10, 16),
    ("America/New_York", 17, 17),
)  # fmt: skip
PRICES = ("open", "high", "low", "close")
EXTRAS = ("half_spread", "dividend", "funding")
COLUMN = "column:"  # before the name of a column of your own, among the fields of bars


class Bar(NamedTuple):
    """One closed bar of one asset; `jax.vmap` adds assets, `jax.lax.scan` adds time.

    time: `[]` int64 seconds since 1970-01-01 UTC of the bar's open.
    open, high, low, close: `[]` float64 prices. volume: `[]` float64, in the file's own unit.
    present: `[]` bool, False where the asset has no bar at this time.
    half_spread, dividend, funding: `[]` float64 as in `Bars`, or None. columns: `[]` float64 each,
    by name, as in `Bars`; or None.

    Example:
      >>> import nca_trader as nca
      >>> bar = nca.sample_bars("sp500").as_bar()  # fields `[N, A]`, what a rule and a feature see
      >>> bar.close.shape
      (5031, 2)
    """

    time: Tensor
    open: Tensor
    high: Tensor
    low: Tensor
    close: Tensor
    volume: Tensor
    present: Tensor
    half_spread: Tensor | None = None
    dividend: Tensor | None = None
    funding: Tensor | None = None
    columns: dict[str, Tensor] | None = None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Bars:
    """Bars of `A` assets on one time axis of `N` bars, on the host in float64.

    A missing bar has `present` False, the last close as its prices, and volume 0. Before an asset's
    first bar its prices are NaN. The arrays are read-only.

    Attributes:
      time: `[N]` datetime64[ns], UTC, the bar's open; its close is one bar length later.
      symbols: `A` names.
      open, high, low, close, volume: `[N, A]` float64.
      present: `[N, A]` bool.
      half_spread: `[N, A]` half the quoted spread in this bar, as a fraction of the mid price; None
        without quotes.
      dividend: `[N, A]` cash per unit paid to holders over the gap before this bar's open, in the
        price's currency; prices are then not adjusted for it. None without dividends.
      funding: `[N, A]` payment of a long position at this bar's close, as a fraction of its value
        (perpetual futures); shorts receive it. None without funding.
      columns: `[N, A]` columns of your own by name, e.g. of `read_bars(..., extra=...)`: the last
        value known at this bar's close, NaN before the first.
      source: the origin of the bars, for reports and error messages.
      note: a caveat that reports must print, e.g. that an index is not tradable; or "".

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500").between("2010", "2011")
      >>> len(bars), bars.symbols, round(bars.bars_per_year)
      (252, ('SP500', 'NASDAQ'), 252)
    """

    time: np.ndarray
    symbols: tuple[str, ...]
    open: np.ndarray
    high: np.ndarray
    low: np.ndarray
    close: np.ndarray
    volume: np.ndarray
    present: np.ndarray
    half_spread: np.ndarray | None = None
    dividend: np.ndarray | None = None
    funding: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    source: str = ""
    note: str = ""

    def __post_init__(self):
        shape = (len(self.time), len(self.symbols))
        own = {name: _frozen(self.columns[name], np.float64) for name in sorted(self.columns)}
        object.__setattr__(self, "columns", own)
        for name in self.fields:
            array = _frozen(getattr(self, name), bool if name == "present" else np.float64)
            if array.shape != shape:
                raise BarError(
                    f"{self.source or 'bars'}: {name} has shape {array.shape} where "
                    f"[N, A] = {shape} is expected; give every field one column per symbol."
                )
            if not name.startswith(COLUMN):
                object.__setattr__(self, name, array)  # the dataclass is frozen for everyone else
        time = _frozen(self.time, "datetime64[ns]")
        if len(time) > 1 and not (np.diff(time) > np.timedelta64(0, "ns")).all():
            row = int(np.argmin(np.diff(time) > np.timedelta64(0, "ns"))) + 1
            raise BarError(
                f"{self.source or 'bars'}: time at row {row} ({time[row]}) is not after the row "
                "before it; sort the bars and remove duplicates."
            )
        object.__setattr__(self, "time", time)

    def __getattr__(self, name: str) -> np.ndarray:
        """Return a column of your own by its name among `fields`, e.g. "column:vix"."""
        if name.startswith(COLUMN) and name.removeprefix(COLUMN) in self.columns:
            return self.columns[name.removeprefix(COLUMN)]
        raise AttributeError(f"'Bars' object has no attribute {name!r}")

    def __len__(self) -> int:
        return len(self.time)

    def __repr__(self) -> str:
        span = f"{self.time[0]} to {self.time[-1]}" if len(self) else "empty"
        return f"Bars({len(self)} bars of {', '.join(self.symbols)}, {span})"

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the `[N, A]` arrays that these bars have; `split_columns` takes them."""
        extras = (name for name in EXTRAS if getattr(self, name) is not None)
        own = (f"{COLUMN}{name}" for name in self.columns)
        return (*PRICES, "volume", "present", *extras, *own)

    @property
    def num_assets(self) -> int:
        """A, the number of symbols."""
        return len(self.symbols)

    @property
    def index(self) -> pd.DatetimeIndex:
        """`[N]` the time axis for pandas, UTC."""
        return pd.DatetimeIndex(self.time, tz="UTC", name="time")

    @property
    def bars_per_year(self) -> float:
        """Bars per year of these bars' own calendar, see `trading_year`; 252 for daily equities."""
        return bars_per_year(self.time)

    def __getitem__(self, rows: slice) -> Bars:
        """Return the bars of a contiguous range of rows."""
        # A slice with a step would look like bars with gaps.
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise TypeError("Bars takes a contiguous slice of rows, e.g. bars[100:200].")
        fields = ("time", *self.fields)
        arrays = {name: getattr(self, name)[rows] for name in fields}
        return dataclasses.replace(self, **split_columns(arrays))

    def select(self, *symbols: str) -> Bars:
        """Return the bars of some assets, in the order of `symbols`."""
        unknown = [str(s) for s in symbols if s not in self.symbols]
        if unknown or not symbols:
            raise BarError(
                f"{self.source or 'bars'}: no symbol {', '.join(unknown) or 'given'}; "
                f"there are {', '.join(self.symbols)}."
            )
        columns = [self.symbols.index(s) for s in symbols]
        arrays = {name: getattr(self, name)[:, columns] for name in self.fields}
        return dataclasses.replace(self, symbols=tuple(symbols), **split_columns(arrays))

    def row(self, date: str | np.datetime64 | pd.Timestamp, name: str = "date") -> int:
        """Return the first row at or after `date`; `N` if there is none.

        Args:
          date: in UTC where it has no zone.
          name: of the caller's argument, for messages.

        Raises:
          ConfigError: `date` is not an ISO date.
        """
        # Numpy's times have no zone; here they are UTC.
        stamp = moment(date, name).tz_localize(None).to_datetime64()
        return int(np.searchsorted(self.time, stamp))

    def between(self, start: str | None = None, stop: str | None = None) -> Bars:
        """Return the bars with `start <= time < stop`; None sets no bound."""
        first = 0 if start is None else self.row(start, "start")
        last = len(self) if stop is None else self.row(stop, "stop")
        return self[first:last]

    def digest(self) -> str:
        """Return the SHA-256 over times, symbols and every value."""
        # Source and note are left out, so that equal bars from different folders have one digest.
        digest = hashlib.sha256(repr(self.symbols).encode())
        digest.update(self.time.astype("int64").tobytes())
        for name in self.fields:
            # Fields that all bars have need no name; those that may be absent do, or a spread could
            # have the digest of a dividend.
            named = name in EXTRAS or name.startswith(COLUMN)
            digest.update(name.encode() if named else b"")
            digest.update(np.ascontiguousarray(getattr(self, name)).tobytes())
        return digest.hexdigest()

    @functools.cached_property
    def seconds(self) -> np.ndarray:
        """`[N]` int64 seconds since 1970 UTC of the bars' opens."""
        return self.time.astype("datetime64[s]").astype(np.int64)

    def as_bar(self) -> Bar:
        """Return one `Bar` of numpy arrays `[N, A]`, which features and strategies scan."""
        time = np.broadcast_to(self.seconds[:, None], self.close.shape)
        return Bar(time, **split_columns({name: getattr(self, name) for name in self.fields}))

    def each(self) -> Iterator[Bar]:
        """Yield one `Bar` of arrays `[A]` after the other; a copy, which reaches no later row."""
        fields = [(name, getattr(self, name)) for name in self.fields]
        for row, second in enumerate(self.seconds):
            time = np.full(self.num_assets, second)
            yield Bar(time, **split_columns({k: np.array(values[row]) for k, values in fields}))


def split_columns(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Bars` or `Bar`: columns of your own under `columns`.

    Example:
      >>> split_columns({"close": 1.0, "column:vix": 2.0})
      {'close': 1.0, 'columns': {'vix': 2.0}}
    """
    own = {k.removeprefix(COLUMN): x for k, x in arrays.items() if k.startswith(COLUMN)}
    rest = {name: x for name, x in arrays.items() if not name.startswith(COLUMN)}
    return rest | {"columns": own} if own else rest


def fields_of(bar: Bar) -> dict[str, Tensor]:
    """Return the arrays of a bar by name, as `Bars.fields` calls them, and its time."""
    given = {name: x for name, x in bar._asdict().items() if x is not None and name != "columns"}
    return given | {f"{COLUMN}{name}": x for name, x in (bar.columns or {}).items()}


def _frozen(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Return a read-only array of `dtype`: a copy, unless `array` is one already."""
    if isinstance(array, np.ndarray) and array.dtype == dtype:
        # A read-only view can still change where its base array is writable.
        owner = array if array.base is None else array.base
        if isinstance(owner, np.ndarray) and not (array.flags.writeable or owner.flags.writeable):
            return array
    array = np.array(array, dtype=dtype)
    array.setflags(write=False)
    return array


def bars_per_year(time: np.ndarray) -> float:
    """Return the bars per year of the bars' own calendar, see `trading_year`."""
    return trading_year(time)[0]


def trading_year(time: np.ndarray) -> tuple[float, str]:
    """Return the bars per year of the bars' own calendar, and where that number comes from.

    From two years on, and for bars longer than a day: N - 1 steps over the time between first and
    last bar. A shorter file shows its usual week. From four weeks on that is the median of each day
    of the week, before that 5, 6 or 7 whole days of 24 hours (1 or 2 where there are no more), so
    that exceptional days do not count. A week of five days is 50.4 a year, as on exchanges, or 52.2
    where they are traded round the clock (FX). As the file grows, what is counted over its whole
    weeks takes the place of that: none of it at first, half in a year, all in two.

    Less than a week shows the hours that trade, and which days if it has a weekend. A market that
    no gap shows closing never closes, unless the bars are a whole session of an exchange in
    `ONE_SESSION`, or begin or end with a week of FX.

    Days part in the longest time of the day without bars, or round the clock at the last bar, and
    not at a midnight, so that neither the zone of the market nor a change of its clock matters.

    Args:
      time: `[N]` datetime64[ns], UTC.

    Returns:
      Bars per year, NaN for fewer than two bars; and the words, e.g. "390 a day, 5 days a week".
    """
    if len(time) < 2:
        return float("nan"), "unknown of one bar"
    span = float((time[-1] - time[0]) / DAY)
    steps, counts = np.unique(np.diff(time), return_counts=True)
    step = steps[np.argmax(counts)]  # the commonest: nights and gaps are longer
    length = float(step / DAY)
    # A calendar year of daily bars spans a day less from the first bar to the last.
    if length > LONGEST_DAY or span >= COUNTED_YEARS * YEAR_DAYS - 1.0:
        return (len(time) - 1) * YEAR_DAYS / span, f"counted over {span / YEAR_DAYS:.1f} years"
    # Half a step of slack: a change of the clock moves a bar by an hour.
    in_day = np.arange(len(time)) - np.searchsorted(time, time - DAY + step / 2, "right") + 1
    whole = in_day[time - time[0] + 1.5 * step >= DAY]
    weeks, seen = int((span + length) // 7), 0.0
    # Most days are whole ones, some have fewer bars, and hardly any has more.
    a_day = float(np.quantile(whole, 0.75, method="lower") if weeks else in_day.max())
    shuts = "" if weeks else _shuts(time, step)
    if steps[-1] < 1.5 * step and not len(whole) and shuts != "day":
        a_day = round(1.0 / length)
    clock = length < 1.0 and a_day * length >= ROUND_THE_CLOCK / 24.0
    if weeks:
        # Days part in the midst of the night, past which a change of the clock moves no session.
        ago = np.unique((time[-1] - time) % DAY)
        night = np.diff(ago, append=DAY)
        slack = step / 2 if clock else DAY - (ago + night / 2)[np.argmax(night)]
        days = ((time[-1] - time + slack) // DAY).astype(int)  # before the last bar
        table = np.bincount(days[days < 7 * weeks], minlength=7 * weeks).reshape(weeks, 7)
        seen = table.sum() / weeks * YEAR_DAYS / 7
        # The median of each day of the week leaves out holidays and special sessions.
        least, a_week = (
            float(np.quantile(table, 0.5, axis=0, method=by).sum()) for by in ("lower", "higher")
        )
        sessions = min(max(round(a_week / a_day + 0.2), 1), 7)  # a short Friday is a day, too
        if weeks < USUAL_WEEKS and sessions in (3, 4):  # holidays may have taken the others
            sessions = 5
        # A change of the clock in the midst of the file parts its weeks into two halves.
        if weeks < USUAL_WEEKS or least <= sessions * a_day <= a_week:
            a_week = sessions * a_day
    else:
        weekdays = (time.astype("datetime64[D]").astype(np.int64) + 3) % 7  # 1970-01-01: a Thursday
        never = clock and not shuts and steps[-1] < max(1.5 * step, np.timedelta64(1, "h"))
        sessions = 7 if never or {5, 6} <= {*weekdays.tolist()} else 5
        a_week = sessions * a_day
    weeks_a_year = EXCHANGE_DAYS / 5 if sessions == 5 and not clock else YEAR_DAYS / 7
    share = 7 * weeks / (COUNTED_YEARS * YEAR_DAYS)
    usual = f"{a_day:,.0f} a day, {sessions} days a week"
    return float(share * seen + (1.0 - share) * a_week * weeks_a_year), usual


def _shuts(time: np.ndarray, step: np.timedelta64) -> str:
    """Return "day" for one session of an exchange, "week" for a begin or end of FX, or ""."""
    stamps, length = pd.DatetimeIndex(time[[0, -1]]).tz_localize("UTC"), pd.Timedelta(step)
    for zone, opens, closes in ONE_SESSION:
        first, last = stamps.tz_convert(zone).tz_localize(None)
        begins = first <= first.normalize() + pd.Timedelta(opens, "h") < first + length
        ends = last < last.normalize() + pd.Timedelta(closes, "h") <= last + length
        if begins and ends and first.date() == last.date() and last.day_of_week < 5:
            return "day"
        if opens == closes and begins * (first.day_of_week == 6) + ends * (last.day_of_week == 4):
            return "week"
    return ""


# Not where the class is defined: a preset must be readable without importing jax.
jax.tree_util.register_dataclass(
    Costs,
    data_fields=[field.name for field in dataclasses.fields(Costs) if field.name != "own"],
    meta_fields=["own"],  # names decide what is compiled
)
# Another cost compiles nothing, and another rule does.
jax.tree_util.register_dataclass(
    AccountConfig,
    data_fields=["costs"],
    meta_fields=[f.name for f in dataclasses.fields(AccountConfig) if f.name != "costs"],
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """The description of an environment that a policy is made for, and that a run stores.

    Attributes:
      symbols: the assets, in order. features: the features, in order.
      targets: the weights that an asset may be ordered to, rising, e.g. (-0.5, 0.0, 0.5); with
        actions "weights" their lowest and highest are the bounds.
      warmup: bars before every feature is defined.
      actions: "direction": an action is an index into `targets`; "orders": 0 sells, 1 holds, 2
        buys, which moves the last ordered target one step; "weights": an action is a target; or
        the name of your own, see `nca_trader.envs.actions`.
      constant_size: positions do not drift (reward "pnl"), so the ordered weights are the account.
      nearest: for each asset the numbers of the others, the most correlated first, as
        `nca_trader.envs.market` ranks them; () for one asset.
      memory: the reward whose memory the policy observes, "differential_sharpe" or "drawdown"; ""
        for rewards without a memory.
      variance: of a bar's return of full positions in all assets, as if these were independent, in
        the bars that the environment was made of. It is the unit of that memory; 0 without one.
      decay: of the moving moments of "differential_sharpe".
      choices, limits: of actions of your own: their number for each asset, 0 where they are
        numbers, and the bounds of these numbers. None with other actions.
      bar_seconds: length of a bar, where features of a slower time frame need it; else 0.
      base, tilt_limit, tilt_penalty: of the policy, see `PolicyConfig`. With a base an action is a
        tilt in [-1, 1].

    Example:
      >>> import nca_trader as nca
      >>> env = nca.TradingEnv(nca.sample_bars("sp500"), nca.EnvConfig(short=False))
      >>> env.spec.symbols, env.spec.targets
      (('SP500', 'NASDAQ'), (0.0, 0.5))
    """

    symbols: tuple[str, ...]
    features: tuple[str, ...]
    targets: tuple[float, ...]
    warmup: int
    actions: str = "direction"
    constant_size: bool = False
    nearest: tuple[tuple[int, ...], ...] = ()
    memory: str = ""
    variance: float = 0.0
    decay: float = 0.0
    choices: int | None = None
    limits: tuple[float, float] | None = None
    bar_seconds: int = 0
    base: str = "none"
    tilt_limit: float = 0.0
    tilt_penalty: float = 0.0

    @property
    def num_assets(self) -> int:
        """A, the number of symbols."""
        return len(self.symbols)

    @property
    def num_features(self) -> int:
        """F, the number of features."""
        return len(self.features)

    @property
    def states(self) -> tuple[str, ...]:
        """The features that are the state of a synthetic market."""
        return tuple(name for name in self.features if name.startswith("state:"))

    @property
    def num_actions(self) -> int:
        """The number n of discrete actions of each asset; 0 where they are not discrete."""
        if self.choices is not None:
            return self.choices
        return {"direction": len(self.targets), "orders": 3, "weights": 0}[self.actions]

    @property
    def action_bounds(self) -> tuple[float, float]:
        """The lowest and highest action, where actions are numbers."""
        if self.base != "none":
            return -1.0, 1.0
        return self.bounds if self.limits is None else self.limits

    @property
    def size(self) -> float:
        """The weight of a full position in each asset."""
        return max(abs(target) for target in self.targets)

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and highest weight that can be ordered in an asset."""
        return self.targets[0], self.targets[-1]
