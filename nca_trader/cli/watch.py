"""`nca-trader watch`: a run or a paper session while it goes on, its metrics and its alerts."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

HELP = "follow a run or a paper session: figures, a Prometheus exporter, alert rules"
SHOWN = ("update", "steps", "steps_per_s", "reward", "loss", "approx_kl", "skipped")
SHOWN += ("paper_bars", "paper_equity", "paper_drawdown")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--run", dest="run_dir", metavar="DIR", help="the run folder to follow")
    parser.add_argument("--journal", metavar="FILE", help="a paper session's journal to follow")
    parser.add_argument(
        "--rules", metavar="FILE.toml", help="alert rules, see docs/guides/watch.md"
    )
    parser.add_argument(
        "--prometheus",
        metavar="[HOST:]PORT",
        help="serve the metrics there; without HOST to this machine alone",
    )
    parser.add_argument(
        "--every", type=float, default=5.0, metavar="SECONDS", help="between looks (%(default)s)"
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="look once, tell no sink; exit code 1 if the condition of a rule holds",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Watches until it is asked to stop; returns the last figures.

    Raises:
      ConfigError: nothing to watch, or faults in the rules. RunError: there is no such run.
      StateError: with `--once`, the journal cannot be read.
      CheckFailed: with `--once`, the condition of a rule holds.
    """
    from nca_trader.cloud import local, place
    from nca_trader.errors import ConfigError
    from nca_trader.paper.journal import read_events
    from nca_trader.watch.alerts import Alerts, read_rules
    from nca_trader.watch.metrics import Watched

    if not args.run_dir and not args.journal:
        raise ConfigError("nothing to watch; give --run DIR, --journal FILE, or both.")
    if args.once and args.prometheus:
        raise ConfigError("--prometheus serves the metrics while it watches; leave out --once.")
    if args.once and args.journal:  # later looks would wait for it; there will be none
        next(read_events(args.journal), None)
    rules = read_rules(args.rules) if args.rules else []
    run = place(args.run_dir) if args.run_dir else None
    journal = local(args.journal, "a journal") if args.journal else None
    watched = Watched(run, journal)
    alerts = Alerts(rules, watched.name)
    return _once(args, watched, alerts) if args.once else _follow(args, watched, alerts)


def _once(args: argparse.Namespace, watched: Any, alerts: Any) -> dict[str, Any]:
    from nca_trader.cli import print_json
    from nca_trader.errors import CheckFailed

    samples = watched.look()
    for name, value in samples.items():
        print(f"{name:<32} {value:.6g}")
    holding = [rule for rule in alerts.rules if rule.holds(samples)]
    for rule in alerts.rules:
        print(f"rule {rule.name}: {'HOLDS' if rule in holding else 'no'}: {rule.condition}")
    result = {"metrics": samples, "holding": [rule.name for rule in holding]}
    if holding:
        if args.json:
            print_json(result)
        names = ", ".join(rule.name for rule in holding)
        raise CheckFailed(f"{watched.name}: the condition holds of {names}.")
    return result


def _follow(args: argparse.Namespace, watched: Any, alerts: Any) -> dict[str, Any]:
    """Looks again and again, until asked to stop."""
    from nca_trader.cli.interrupt import stop_on_signal
    from nca_trader.watch.alerts import Sinks
    from nca_trader.watch.metrics import Collector, exporter

    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, stream=sys.stderr)
    collector = Collector(watched.name)
    with contextlib.ExitStack() as stack:
        sinks = Sinks(sink for rule in alerts.rules for sink in rule.sinks)
        stack.callback(sinks.close)
        if args.prometheus:
            port = stack.enter_context(exporter(args.prometheus, collector))
            print(f"metrics of {watched.name} at port {port}, path /metrics", flush=True)
        stop = stack.enter_context(stop_on_signal("look"))
        shown = ""
        while True:
            samples = watched.look()
            collector.samples = samples
            sinks.tell(alerts.update(samples, time.time()))
            line = described(samples)
            if line != shown:
                print(line, flush=True)
                shown = line
            if _waited(args.every, stop):
                return {"metrics": samples, "firing": _firing(alerts)}


def _firing(alerts: Any) -> list[str]:
    return [rule.name for rule in alerts.rules if alerts.state(rule) == "firing"]


def _waited(seconds: float, stop: Callable[[], bool]) -> bool:
    """Waits, in short steps so that a request to stop is heard; whether there was one."""
    until = time.monotonic() + seconds
    while not stop() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.2))
    return stop()


def described(samples: dict[str, float]) -> str:
    """The figures that say most, on one line; no ages, which change at every look."""
    known = [(name, samples[name]) for name in SHOWN if name in samples]
    if not known:
        return "no row yet"
    return "  ".join(f"{name} {value:.6g}" for name, value in known)
