"""Alert rules of a TOML file, and the state of each; `watch.sinks` notifies.

The states are those of Prometheus' alerting rules: inactive, pending, firing.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import operator
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nca_trader.config.ranges import between, one_of, refuse
from nca_trader.config.records import Mismatch
from nca_trader.config.toml import read_rows

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
    "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
ABSENT = "absent"
SINKS = ("log", "apprise", "call")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LABEL = re.compile(r'(\w+)\{(\w+)="([^"]*)"\}')
CONDITION = ("metric", "comparison", "threshold", "for_seconds")
INACTIVE, PENDING, FIRING, RESOLVED = "inactive", "pending", "firing", "resolved"


def seconds_of(value: Any) -> float:
    """Return the seconds of a length of time.

    Raises:
      Mismatch: it is not one.

    >>> seconds_of("5m"), seconds_of(90)
    (300.0, 90.0)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", value) if type(value) is str else None
    if found:
        return float(found[1]) * UNITS[found[2]]
    if isinstance(value, int | float) and type(value) is not bool and 0.0 <= value < math.inf:
        return float(value)
    raise Mismatch('a length of time, e.g. "30s", "5m", "2h",', value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """One `[[rule]]` of a rules file.

    Attributes:
      name: of the alert, unique in a file.
      metric: any exported metric, as `watch --once` prints it. A name without a label stands for
        each metric of that name: `loss` for that of each seed.
      comparison: ">", ">=", "<", "<=", "==" or "!=", of the metric with the threshold; or "absent":
        the metric is missing, or not a finite number.
      threshold: a number, None for "absent".
      for_seconds: the key `for`, e.g. "5m": how long the condition must hold before it fires.
      sinks: each "log", "apprise:URL" or "call:PACKAGE.MODULE:FUNCTION".
    """

    name: str = ""
    metric: str = ""
    comparison: str = ""
    threshold: float | None = None
    for_seconds: float = dataclasses.field(default=0.0, metadata={"key": "for", "read": seconds_of})
    sinks: tuple[str, ...] = dataclasses.field(default=("log",), metadata={"secret": True})

    def __post_init__(self) -> None:
        """Refuse what cannot be a rule. Whether its sinks are there is seen when they are opened.

        Raises:
          ConfigError: a line for each thing that is wrong.
        """
        refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        for name in ("name", "metric"):
            if not getattr(self, name).strip():
                yield f"{name} is missing; give a text."
        yield from one_of(self, "comparison", (*COMPARISONS, ABSENT))
        yield from between(self, "(-inf, inf)", "threshold")
        if self.comparison == ABSENT and self.threshold is not None:
            yield f"threshold={self.threshold}: what is absent is not compared; leave it out."
        elif self.comparison != ABSENT and self.threshold is None:
            yield "threshold is missing; give a number."
        if not self.sinks:
            yield 'sinks is empty; give e.g. ["log", "apprise:$ALERT_URL"].'
        # What follows the kind has secrets, and is not repeated.
        for kind in {sink.partition(":")[0] for sink in self.sinks} - {*SINKS}:
            yield f"sink {kind!r} is not known; give log, apprise:URL or call:MODULE:NAME."

    def series(self, samples: Mapping[str, float]) -> list[str]:
        """Return the metrics that the rule is about; its own name where there is none.

        Example:
          >>> rule = Rule(name="high", metric="loss", comparison=">", threshold=1)
          >>> rule.series({'loss{seed="0"}': 0.0, 'loss{seed="1"}': 1.0})
          ['loss{seed="0"}', 'loss{seed="1"}']
        """
        found = [name for name in samples if name.partition("{")[0] == self.metric]
        return found or [self.metric]

    def holds(self, samples: Mapping[str, float]) -> bool:
        """Return whether the condition holds, of any metric that the rule is about.

        A metric that is missing or NaN meets "absent" only.

        Example:
          >>> rule = Rule(name="kl", metric="approx_kl", comparison=">", threshold=0.05)
          >>> rule.holds({"approx_kl": 0.1}), rule.holds({})
          (True, False)
        """
        return any(self.meets(samples.get(name, math.nan)) for name in self.series(samples))

    def meets(self, value: float) -> bool:
        """Return whether a value meets the condition; NaN is a metric that is missing."""
        if self.comparison == ABSENT:
            return not math.isfinite(value)
        assert self.threshold is not None
        # NaN is excluded here, because `!=` would be true of it.
        return not math.isnan(value) and COMPARISONS[self.comparison](value, self.threshold)

    @property
    def condition(self) -> str:
        """The condition in words, e.g. `approx_kl > 0.05 for 300 s`."""
        threshold = "" if self.threshold is None else f" {self.threshold:g}"
        lasting = f" for {self.for_seconds:g} s" if self.for_seconds else ""
        return f"{self.metric} {self.comparison}{threshold}{lasting}"


@dataclasses.dataclass(frozen=True)
class Notification:
    """What a sink receives.

    Attributes:
      status: "firing" or "resolved".
      rule: the rule.
      value: of the metric, None if it has none.
      since: when the condition began to hold, in seconds since 1970.
      at: when this was noticed, in seconds since 1970.
      source: the run folder or the journal.
      series: the metric with its label, e.g. `loss{seed="1"}`.
      why: the reason in words, "" where none is known.
    """

    status: str
    rule: Rule
    value: float | None
    since: float
    at: float
    source: str
    series: str = ""
    why: str = ""

    @property
    def labels(self) -> dict[str, str]:
        """The label of the metric: {"seed": "1"}, or {}."""
        found = LABEL.fullmatch(self.series)
        return {} if found is None else {found[2]: found[3]}

    @property
    def name(self) -> str:
        """The rule, and what it fired of: `high, seed 1`."""
        of = [f"{label} {value}" for label, value in self.labels.items()]
        return ", ".join([self.rule.name, *of])

    def as_json(self) -> dict[str, Any]:
        """Return it as a dict of JSON types. Times are in ISO 8601, UTC."""
        since, at = (
            datetime.datetime.fromtimestamp(t, datetime.UTC).isoformat(timespec="seconds")
            for t in (self.since, self.at)
        )
        return {
            "status": self.status,
            "rule": self.rule.name,
            **{name: getattr(self.rule, name) for name in CONDITION},
            "value": self.value,
            "since": since,
            "at": at,
            "source": self.source,
            "labels": self.labels,
            "why": self.why,
        }

    def __str__(self) -> str:
        value = "no value" if self.value is None else f"{self.value:g}"
        why = f" ({self.why})" if self.why else ""
        condition = f"{self.rule.condition}; now {value}{why}"
        return f"{self.source}: {self.name} {self.status}: {condition}"


class Alerts:
    """The state of every rule, of each metric that it is about.

    Each fires once, and is resolved once, while its condition holds.

    A pending rule whose condition ends before its time becomes inactive without a notice.
    """

    def __init__(self, rules: Sequence[Rule], source: str):
        """Start with all rules inactive. source: the run folder or the journal, for notices."""
        self.rules, self._source = tuple(rules), source
        # By rule and metric.
        self._since: dict[tuple[str, str], float] = {}
        self._firing: set[tuple[str, str]] = set()

    def state(self, rule: Rule) -> str:
        """Return "inactive", "pending" or "firing"."""
        if any(name == rule.name for name, _ in self._firing):
            return FIRING
        return PENDING if any(name == rule.name for name, _ in self._since) else INACTIVE

    def update(
        self, samples: Mapping[str, float], now: float, why: Mapping[str, str] | None = None
    ) -> list[Notification]:
        """Take the metrics at `now`, and return the notices to send.

        Args:
          samples: the metrics.
          now: seconds since 1970.
          why: by metric, the reason in words for its value.
        """
        notices = []
        for rule in self.rules:
            # Also what fired and is gone, e.g. of a file that was started again.
            gone = [series for name, series in self._since if name == rule.name]
            for series in dict.fromkeys([*rule.series(samples), *gone]):
                # A metric that is gone has no value, and its alert is resolved unless it is for
                # "absent".
                value, mine = samples.get(series, math.nan), (rule.name, series)
                holds, fired, status = rule.meets(value), mine in self._firing, ""
                # Set also where the condition does not hold, and then deleted below.
                since = self._since.setdefault(mine, now)
                if holds and not fired and now - since >= rule.for_seconds:
                    self._firing.add(mine)
                    status = FIRING
                elif not holds:
                    del self._since[mine]
                    self._firing.discard(mine)
                    status = RESOLVED if fired else ""
                if status:
                    shown = value if math.isfinite(value) else None  # JSON has no NaN
                    said = (why or {}).get(series, "")
                    note = Notification(status, rule, shown, since, now, self._source, series, said)
                    notices.append(note)
        return notices


def read_rules(path: str | pathlib.Path) -> list[Rule]:
    """Read the rules of a TOML file, one `[[rule]]` each.

    Raises:
      ConfigError: all errors of the file, a line each: file, rule, what, remedy.
    """
    return read_rows(Rule, path, "rule")
