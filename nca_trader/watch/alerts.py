"""Alert rules as rows of a TOML file, and the state of each: pending, firing, resolved."""

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
INACTIVE, PENDING, FIRING, RESOLVED = "inactive", "pending", "firing", "resolved"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """One `[[rule]]` of a rules file.

    Attributes:
      name: of the alert, once in a file. metric: any exported one, as `watch --once` prints it.
      comparison: ">", ">=", "<", "<=", "==", "!=", of the metric with the threshold; or "absent":
        there is no such metric, or it is not a finite number, and no threshold is given.
      threshold: a number. for_seconds: the key `for`, e.g. "5m": so long must it hold before the
        alert fires; 0 if left out.
      sinks: who is told, each "log", "webhook:URL" or "call:PACKAGE.MODULE:FUNCTION".
    """

    name: str
    metric: str
    comparison: str
    threshold: float | None = None
    for_seconds: float = 0.0
    sinks: tuple[str, ...] = ("log",)

    def holds(self, samples: Mapping[str, float]) -> bool:
        """Whether the condition is met; a metric that is missing or NaN meets "absent" alone."""
        value = samples.get(self.metric, math.nan)
        if self.comparison == ABSENT:
            return not math.isfinite(value)
        assert self.threshold is not None
        return not math.isnan(value) and COMPARISONS[self.comparison](value, self.threshold)

    @property
    def condition(self) -> str:
        """In words, e.g. `approx_kl > 0.05 for 300 s`."""
        threshold = "" if self.threshold is None else f" {self.threshold:g}"
        lasting = f" for {self.for_seconds:g} s" if self.for_seconds else ""
        return f"{self.metric} {self.comparison}{threshold}{lasting}"


@dataclasses.dataclass(frozen=True)
class Notice:
    """What sinks are told. status: "firing" or "resolved". since: when the condition began to hold.

    value: of the metric, None if it has none. Times are seconds since 1970. source: what is
    watched.
    """

    status: str
    rule: Rule
    value: float | None
    since: float
    at: float
    source: str

    def as_json(self) -> dict[str, Any]:
        """As a webhook gets it; times in ISO 8601, UTC."""
        rule = self.rule
        return {
            "status": self.status,
            "rule": rule.name,
            "metric": rule.metric,
            "comparison": rule.comparison,
            "threshold": rule.threshold,
            "for_seconds": rule.for_seconds,
            "value": self.value,
            "since": _iso(self.since),
            "at": _iso(self.at),
            "source": self.source,
        }

    def __str__(self) -> str:
        value = "no value" if self.value is None else f"{self.value:g}"
        return f"{self.source}: {self.rule.name} {self.status}: {self.rule.condition}; now {value}"


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")


class Alerts:
    """The state of every rule; each fires once, and is resolved once, while its condition holds.

    Source of the states: Prometheus' alerting rules. A pending rule whose condition ends before
    its time has passed goes back without a word.
    """

    def __init__(self, rules: Sequence[Rule], source: str):
        """All inactive. source: what is watched, for notices."""
        self.rules, self._source = tuple(rules), source
        self._since: dict[str, float] = {}
        self._firing: set[str] = set()

    def state(self, rule: Rule) -> str:
        """One of "inactive", "pending" and "firing"."""
        if rule.name in self._firing:
            return FIRING
        return PENDING if rule.name in self._since else INACTIVE

    def update(self, samples: Mapping[str, float], now: float) -> list[Notice]:
        """Takes a look's figures at `now`; what there is to tell."""
        return [notice for rule in self.rules for notice in self._moved(rule, samples, now)]

    def _moved(self, rule: Rule, samples: Mapping[str, float], now: float) -> Iterator[Notice]:
        value = samples.get(rule.metric, math.nan)
        told = value if math.isfinite(value) else None
        if rule.holds(samples):
            since = self._since.setdefault(rule.name, now)
            if rule.name not in self._firing and now - since >= rule.for_seconds:
                self._firing.add(rule.name)
                yield Notice(FIRING, rule, told, since, now, self._source)
            return
        since = self._since.pop(rule.name, now)
        if rule.name in self._firing:
            self._firing.discard(rule.name)
            yield Notice(RESOLVED, rule, told, since, now, self._source)


def read_rules(path: str | pathlib.Path) -> list[Rule]:
    """The rules of a TOML file, one `[[rule]]` each.

    Raises:
      ConfigError: with a line for each thing that is wrong: file, row, what, remedy.
    """
    try:
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
    return [_rule(row) for row in rows]


def _rule(row: dict[str, Any]) -> Rule:
    threshold = row.get("threshold")
    return Rule(
        name=row["name"],
        metric=row["metric"],
        comparison=row["comparison"],
        threshold=None if threshold is None else float(threshold),
        for_seconds=_seconds(row.get("for", 0)) or 0.0,
        sinks=tuple(row.get("sinks", ("log",))),
    )


def _problems(row: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a row, a sentence each."""
    for key in row:
        if key not in KEYS:
            named = key if key.isprintable() else repr(key)
            yield f"{named} is not a known key; {nearest(key, KEYS)}Known: {', '.join(KEYS)}."
    for key in ("name", "metric", "comparison"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            yield f"{key} = {row.get(key)!r}: give a text."
    known = (*COMPARISONS, ABSENT)
    comparison = row.get("comparison")
    if isinstance(comparison, str) and comparison.strip() and comparison not in known:
        yield f"comparison = {comparison!r} is not known; it may be {', '.join(known)}."
    threshold = row.get("threshold")
    if comparison == ABSENT:
        if threshold is not None:
            yield f"threshold = {threshold!r}: what is absent is not compared; leave it out."
    elif not _is_number(threshold):
        yield f"threshold = {threshold!r}: give a finite number."
    if _seconds(row.get("for", 0)) is None:
        yield f'for = {row["for"]!r} is no length of time; write e.g. "30s", "5m", "2h".'
    sinks = row.get("sinks", ["log"])
    if not isinstance(sinks, list) or not sinks:
        yield f'sinks = {sinks!r}: give a list, e.g. ["log", "webhook:https://..."].'
    else:
        for sink in sinks:
            yield from _sink_problems(sink)


def _sink_problems(sink: Any) -> Iterator[str]:
    kind, _, target = str(sink).partition(":")
    if sink == "log":
        return
    if kind == "webhook":
        if not re.match(r"https?://[^/\s]", target) and not target.startswith("$"):
            yield f"sink {sink!r}: give webhook:http(s)://... or webhook:$NAME of a variable."
    elif kind == "call":
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", target):
            yield f"sink {sink!r}: give call:package.module:function."
    else:
        yield f'sink {sink!r} is not known; it may be "log", "webhook:URL" or "call:MODULE:NAME".'


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _seconds(text: Any) -> float | None:
    """Seconds that "90s", "5m", "2h", "1d" or a number mean; None if it means none."""
    if type(text) in (int, float):
        return float(text) if 0 <= text < math.inf else None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", text) if type(text) is str else None
    return float(found[1]) * UNITS[found[2]] if found else None


TIMEOUT = 5.0  # seconds that one POST may take
WAITS = (1.0, 5.0, 15.0)  # seconds before each new try
WAITING = 1000  # notices that may wait for a slow sink; later ones are dropped
CLOSING = 20.0  # seconds that the end waits for what is under way
log = logging.getLogger(__name__)
Sink = Callable[[Notice], object]  # what it returns is of no interest


def sink_of(text: str) -> Sink:
    """The function that a rule's `sinks` entry means.

    Raises:
      ConfigError: a variable is not set, a module can't be imported or has no such function.
    """
    kind, _, target = text.partition(":")
    if kind == "webhook":
        return Webhook(_expanded(target), WAITS)
    return _function(target) if kind == "call" else _to_log


def _to_log(notice: Notice) -> None:
    log.log(logging.WARNING if notice.status == FIRING else logging.INFO, "%s", notice)


def _expanded(url: str) -> str:
    """The URL, or that of the environment's variable that it names: so no secret is in a file."""
    if not url.startswith("$"):
        return url
    found = os.environ.get(url[1:].strip("{}"), "")
    if not found.startswith(("http://", "https://")):
        raise ConfigError(f"sink webhook:{url}: set the variable to a URL, http(s)://...")
    return found


def _function(target: str) -> Sink:
    module, _, name = target.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` does: the user's own module lies there
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"sink call:{target}: {error}; give call:package.module:function that Python finds "
            "from here."
        ) from None
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise ConfigError(f"sink call:{target}: {name} is no function.")
    return found


class Webhook:
    """Posts a notice as JSON; tries again where the network or the server (5xx, 429) fails."""

    def __init__(self, url: str, waits: Iterable[float]):
        """url: http or https. waits: seconds before each new try."""
        self._url, self._waits = url, tuple(waits)

    def __call__(self, notice: Notice) -> None:
        """Posts it.

        Raises:
          OSError: also the last try failed, or the server refused it.
        """
        data = json.dumps(notice.as_json()).encode()
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, data, head, method="POST")
        for wait in (*self._waits, None):
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT):
                    return
            except urllib.error.HTTPError as error:
                error.close()
                # The server has read it and says no: it will again.
                if wait is None or (error.code < 500 and error.code != 429):
                    raise
            except OSError:
                if wait is None:
                    raise
            time.sleep(wait)


class Worker:
    """One sink with a thread of its own, so that a slow one holds up nobody."""

    def __init__(self, name: str, sink: Sink):
        """Starts the thread. name: for the log, without what follows the scheme of a URL."""
        self._name, self._sink = name, sink
        self._waiting: queue.Queue[Notice | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._thread.start()

    def tell(self, notice: Notice) -> None:
        """Hands it over; never blocks and never raises."""
        try:
            self._waiting.put_nowait(notice)
        except queue.Full:
            log.error("sink %s: too slow; dropped %s", self._name, notice)

    def close(self, seconds: float = CLOSING) -> None:
        """Waits for what was handed over, so long."""
        try:
            self._waiting.put(None, timeout=seconds)
        except queue.Full:
            pass
        else:
            self._thread.join(seconds)
        if self._thread.is_alive():
            log.error("sink %s: not done in %g s; what waited is lost", self._name, seconds)

    def _work(self) -> None:
        while (notice := self._waiting.get()) is not None:
            try:
                self._sink(notice)
            except Exception as error:  # whatever a user's function raises
                log.error("sink %s: failed (%s); lost: %s", self._name, error, notice)


class Sinks:
    """A worker for each sink that the rules name."""

    def __init__(self, names: Iterable[str]):
        """Opens them.

        Raises:
          ConfigError: see `sink_of`; before any thread is started.
        """
        opened = {name: sink_of(name) for name in dict.fromkeys(names)}
        # A webhook's path is often its secret.
        self._workers = {n: Worker("/".join(n.split("/")[:3]), s) for n, s in opened.items()}

    def tell(self, notices: Iterable[Notice]) -> None:
        """Hands each notice to its rule's sinks; returns at once."""
        for notice in notices:
            for name in notice.rule.sinks:
                self._workers[name].tell(notice)

    def close(self) -> None:
        """Waits a while for what is under way."""
        for worker in self._workers.values():
            worker.close()
