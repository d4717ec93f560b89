"""Alert rules of a TOML file, the state of each, and the sinks that are notified.

The states are those of Prometheus' alerting rules: inactive, pending, firing.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import json
import logging
import math
import operator
import os
import pathlib
import queue
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from nca_trader.config.ranges import nearest, refuse
from nca_trader.config.records import read_toml
from nca_trader.errors import ConfigError

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
    "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
ABSENT = "absent"
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
KEYS = ("name", "metric", "comparison", "threshold", "for", "sinks")
# Kinds of sinks: what stands after the colon, and the remedy.
SINKS = {
    "log": (r"$", 'give "log" alone'),
    "webhook": (r"https?://[^/\s]|\$", "give webhook:http(s)://... or webhook:$NAME of a variable"),
    "call": (r"[A-Za-z_][\w.]*:[A-Za-z_]\w*$", "give call:package.module:function"),
}
INACTIVE, PENDING, FIRING, RESOLVED = "inactive", "pending", "firing", "resolved"
TIMEOUT = 5.0  # seconds that one POST may take
WAITS = (1.0, 5.0, 15.0)  # seconds before each new try
WAITING = 1000  # notices that may wait for a slow sink; later ones are dropped
CLOSING = 20.0  # seconds that the end waits for what is under way
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """One `[[rule]]` of a rules file.

    Attributes:
      name: of the alert, unique in a file.
      metric: any exported metric, as `watch --once` prints it.
      comparison: ">", ">=", "<", "<=", "==" or "!=", of the metric with the threshold; or "absent":
        the metric is missing, or not a finite number.
      threshold: a number, None for "absent".
      for_seconds: the key `for`, e.g. "5m": how long the condition must hold before it fires.
      sinks: each "log", "webhook:URL" or "call:PACKAGE.MODULE:FUNCTION".
    """

    name: str
    metric: str
    comparison: str
    threshold: float | None = None
    for_seconds: float = 0.0
    sinks: tuple[str, ...] = ("log",)

    def holds(self, samples: Mapping[str, float]) -> bool:
        """Return whether the condition holds.

        A metric that is missing or NaN meets "absent" only.

        Example:
          >>> rule = Rule(name="kl", metric="approx_kl", comparison=">", threshold=0.05)
          >>> rule.holds({"approx_kl": 0.1}), rule.holds({})
          (True, False)
        """
        value = samples.get(self.metric, math.nan)
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
class Notice:
    """What a sink receives.

    Attributes:
      status: "firing" or "resolved".
      rule: the rule.
      value: of the metric, None if it has none.
      since: when the condition began to hold, in seconds since 1970.
      at: when this was noticed, in seconds since 1970.
      source: the run folder or the journal.
    """

    status: str
    rule: Rule
    value: float | None
    since: float
    at: float
    source: str

    def as_json(self) -> dict[str, Any]:
        """Return the body of a webhook's request. Times are in ISO 8601, UTC."""
        since, at = (
            datetime.datetime.fromtimestamp(t, datetime.UTC).isoformat(timespec="seconds")
            for t in (self.since, self.at)
        )
        return {
            "status": self.status,
            "rule": self.rule.name,
            "metric": self.rule.metric,
            "comparison": self.rule.comparison,
            "threshold": self.rule.threshold,
            "for_seconds": self.rule.for_seconds,
            "value": self.value,
            "since": since,
            "at": at,
            "source": self.source,
        }

    def __str__(self) -> str:
        value = "no value" if self.value is None else f"{self.value:g}"
        return f"{self.source}: {self.rule.name} {self.status}: {self.rule.condition}; now {value}"


class Alerts:
    """The state of every rule. Each fires once, and is resolved once, while its condition holds.

    A pending rule whose condition ends before its time becomes inactive without a notice.
    """

    def __init__(self, rules: Sequence[Rule], source: str):
        """Start with all rules inactive. source: the run folder or the journal, for notices."""
        self.rules, self._source = tuple(rules), source
        self._since: dict[str, float] = {}
        self._firing: set[str] = set()

    def state(self, rule: Rule) -> str:
        """Return "inactive", "pending" or "firing"."""
        if rule.name in self._firing:
            return FIRING
        return PENDING if rule.name in self._since else INACTIVE

    def update(self, samples: Mapping[str, float], now: float) -> list[Notice]:
        """Take the metrics at `now`, and return the notices to send."""
        notices = []
        for rule in self.rules:
            value = samples.get(rule.metric, math.nan)
            holds, fired, status = rule.holds(samples), rule.name in self._firing, ""
            # Set also where the condition does not hold, and then deleted below.
            since = self._since.setdefault(rule.name, now)
            if holds and not fired and now - since >= rule.for_seconds:
                self._firing.add(rule.name)
                status = FIRING
            elif not holds:
                del self._since[rule.name]
                self._firing.discard(rule.name)
                status = RESOLVED if fired else ""
            if status:
                shown = value if math.isfinite(value) else None  # JSON has no NaN
                notices.append(Notice(status, rule, shown, since, now, self._source))
        return notices


def read_rules(path: str | pathlib.Path) -> list[Rule]:
    """Read the rules of a TOML file, one `[[rule]]` each.

    Raises:
      ConfigError: all errors of the file, a line each: file, rule, what, remedy.
    """
    try:
        # Editors on Windows put a byte-order mark before the text.
        text = pathlib.Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error}); save it as UTF-8.") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); give a file of [[rule]] rows."
        ) from None
    table = read_toml(text, str(path))
    rows = table.pop("rule", [])
    refuse(f"{path}: {key} is not a known key; write rows of [[rule]]." for key in table)
    if not isinstance(rows, list) or not rows or not all(isinstance(r, dict) for r in rows):
        raise ConfigError(f"{path}: holds no rule; write rows of [[rule]].")
    problems: list[str] = []
    names: set[str] = set()
    for number, row in enumerate(rows, 1):
        named = f" ({row['name']})" if isinstance(row.get("name"), str) else ""
        found = list(_problems(row))
        if not found and row["name"] in names:
            found = ["the name is another rule's; give it one of its own."]
        names.add(str(row.get("name")))
        problems += [f"{path}: rule {number}{named}: {what}" for what in found]
    refuse(problems)
    return [
        Rule(
            name=row["name"],
            metric=row["metric"],
            comparison=row["comparison"],
            threshold=_number(row.get("threshold")),
            for_seconds=_seconds(row.get("for", 0)) or 0.0,
            sinks=tuple(row.get("sinks", ("log",))),
        )
        for row in rows
    ]


def _problems(row: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a row, a sentence each."""
    for key in row:
        if key not in KEYS:
            named = key if key.isprintable() else repr(key)
            yield f"{named} is not a known key; {nearest(key, KEYS)}Known: {', '.join(KEYS)}."
    missing = [k for k in KEYS[:3] if not isinstance(row.get(k), str) or not row[k].strip()]
    yield from (f"{key} = {row.get(key)!r}: give a text." for key in missing)
    known = (*COMPARISONS, ABSENT)
    comparison, threshold = row.get("comparison"), row.get("threshold")
    if "comparison" not in missing and comparison not in known:
        yield f"comparison = {comparison!r} is not known; it may be {', '.join(known)}."
    if comparison == ABSENT:
        if threshold is not None:
            yield f"threshold = {threshold!r}: what is absent is not compared; leave it out."
    elif _number(threshold) is None:
        yield f"threshold = {threshold!r}: give a finite number."
    if _seconds(row.get("for", 0)) is None:
        yield f'for = {row["for"]!r} is not a length of time; write e.g. "30s", "5m", "2h".'
    sinks = row.get("sinks", ["log"])
    if not isinstance(sinks, list) or not sinks:
        yield f'sinks = {sinks!r}: give a list, e.g. ["log", "webhook:https://..."].'
        return
    for sink in sinks:
        kind, _, target = str(sink).partition(":")
        if kind not in SINKS:
            known = '"log", "webhook:URL" or "call:MODULE:NAME"'
            yield f"sink {sink!r} is not known; it may be {known}."
        elif not re.match(SINKS[kind][0], target):
            yield f"sink {sink!r}: {SINKS[kind][1]}."


def _number(value: Any) -> float | None:
    """Return a finite number, None for anything else; TOML's true and false are not numbers."""
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None


def _seconds(text: Any) -> float | None:
    """Seconds that "90s", "5m", "2h", "1d" or a number mean, None for anything else."""
    if (seconds := _number(text)) is not None:
        return seconds if seconds >= 0 else None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", text) if type(text) is str else None
    return float(found[1]) * UNITS[found[2]] if found else None


Sink = Callable[[Notice], object]  # what it returns is ignored


def sink_of(text: str) -> Sink:
    """Return the function that an entry of a rule's `sinks` names.

    Raises:
      ConfigError: a variable is not set, a module cannot be imported or has no such function.
    """
    kind, _, target = text.partition(":")
    if kind == "log":
        return lambda notice: log.log(
            logging.WARNING if notice.status == FIRING else logging.INFO, "%s", notice
        )
    if kind == "webhook":
        # A variable of the environment keeps a secret address out of the file.
        url = os.environ.get(target[1:].strip("{}"), "") if target.startswith("$") else target
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"sink {text}: set the variable to a URL, http(s)://...")
        return Webhook(url, WAITS)
    module, _, name = target.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` does, for the user's own module
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"sink {text}: {error}; give call:package.module:function that Python finds from here."
        ) from None
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise ConfigError(f"sink {text}: {name} is not a function.")
    return found


class Webhook:
    """Posts a notice as JSON, and tries again if the network or the server (5xx, 429) fails."""

    def __init__(self, url: str, waits: Iterable[float]):
        """Set the address, http or https. waits: seconds before each new try."""
        self._url, self._waits = url, tuple(waits)

    def __call__(self, notice: Notice) -> None:
        """Post the notice.

        Raises:
          OSError: the last try failed too, or the server refused it.
        """
        data = json.dumps(notice.as_json()).encode()
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, data, head, method="POST")
        for wait in (*self._waits, None):
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT):
                    return
            except OSError as error:
                code = 500
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                    code = error.code
                # A server that has read it and refuses it will refuse it again.
                if wait is None or (code < 500 and code != 429):
                    raise
            time.sleep(wait)


class Worker:
    """One sink with its own thread, so that a slow sink delays nothing else."""

    def __init__(self, name: str, sink: Sink):
        """Start the thread. name: for the log."""
        self._name, self._sink = name, sink
        # Bounded: a sink that hangs for days must not fill the memory.
        self._waiting: queue.Queue[Notice | None] = queue.Queue(WAITING)
        # A daemon: a sink that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def tell(self, notice: Notice) -> None:
        """Hand a notice over. Never blocks and never raises."""
        try:
            self._waiting.put_nowait(notice)
        except queue.Full:
            log.error("sink %s: too slow; dropped %s", self._name, notice)

    def close(self, seconds: float = CLOSING) -> None:
        """Wait at most `seconds` for the notices that were handed over."""
        try:
            self._waiting.put(None, timeout=seconds)
            self._thread.join(seconds)
        except queue.Full:
            pass
        if self._thread.is_alive():
            log.error("sink %s: not done in %g s; what waited is lost", self._name, seconds)

    def _run(self) -> None:
        while (notice := self._waiting.get()) is not None:
            try:
                self._sink(notice)
            except Exception as error:  # a user's function may raise anything
                log.error("sink %s: failed (%s); lost: %s", self._name, error, notice)


class Sinks:
    """A worker for each sink that the rules name."""

    def __init__(self, names: Iterable[str]):
        """Open them.

        Raises:
          ConfigError: see `sink_of`; before any thread is started.
        """
        # Each sink once, in order: several rules may share it.
        opened = {name: sink_of(name) for name in dict.fromkeys(names)}
        # A webhook's path is often its secret: the log names what stands before it.
        self._workers = {n: Worker("/".join(n.split("/")[:3]), s) for n, s in opened.items()}

    def tell(self, notices: Iterable[Notice]) -> None:
        """Hand each notice to the sinks of its rule, and return at once."""
        for notice in notices:
            for name in notice.rule.sinks:
                self._workers[name].tell(notice)

    def close(self) -> None:
        """Wait a while for the notices under way."""
        for worker in self._workers.values():
            worker.close()
