"""`nca-trader watch` and `dashboard` follow runs and paper sessions: metrics, alerts, a page."""

from __future__ import annotations

import argparse
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

from nca_trader.cli import end_stopped, fail_check, stop_on_signal
from nca_trader.cli.options import real
from nca_trader.cloud import local, place
from nca_trader.errors import ConfigError, extra

SHOWN = ("update", "steps", "steps_per_s", "reward", "loss", "approx_kl", "skipped")
SHOWN += ("paper_bars", "paper_equity", "paper_drawdown")


def add_watch_options(parser: argparse.ArgumentParser) -> None:
    """Add what to follow, how often, and where its metrics and alerts go."""
    parser.add_argument("--run", dest="run_dir", metavar="DIR", help="the run folder to follow")
    parser.add_argument("--journal", metavar="FILE", help="a paper session's journal to follow")
    rules = "alert rules, see docs/guides/watch.md"
    parser.add_argument("--rules", metavar="FILE.toml", help=rules)
    parser.add_argument(
        "--prometheus",
        metavar="[HOST:]PORT",
        help="serve the metrics there; without HOST to this machine alone",
    )
    parser.add_argument(
        "--every",
        type=real("[0.05, inf)"),
        default=5.0,
        metavar="SECONDS",
        help="between looks (%(default)s)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="look once, alert no sink; exit code 1 if the condition of a rule holds",
    )


def run_watch(args: argparse.Namespace) -> dict[str, Any]:
    """Watch until the user asks to stop; return the last metrics.

    Raises:
      ConfigError: nothing to watch, faults in the rules, or a sink that is not there.
      RunError: there is no such run.
      StateError: with `--once`, the journal cannot be read.
      CheckFailed: with `--once`, the condition of a rule holds.
    """
    from nca_trader.paper.journal.journal import read_events
    from nca_trader.watch.alerts import Alerts, read_rules
    from nca_trader.watch.metrics import Watched
    from nca_trader.watch.sinks import open_sinks

    if not args.run_dir and not args.journal:
        raise ConfigError("nothing to watch; give --run DIR, --journal FILE, or both.")
    if args.once and args.journal:
        # Without --once a later look may find the journal; here the first look is the only one.
        next(read_events(args.journal), None)
    rules = read_rules(args.rules) if args.rules else []
    opened = open_sinks(sink for rule in rules for sink in rule.sinks)
    run = place(args.run_dir) if args.run_dir else None
    journal = local(args.journal, "a journal") if args.journal else None
    watched = Watched(run, journal)
    alerts = Alerts(rules, watched.name)
    if not args.once:
        return _follow(args, watched, alerts, opened)
    samples = watched.look()
    for name, value in samples.items():
        print(f"{name:<32} {value:.6g}  {watched.why.get(name, '')}".rstrip())
    # One look has no duration, so `for` is not applied.
    holding = [rule for rule in rules if rule.holds(samples)]
    for rule in rules:
        print(f"rule {rule.name}: {'HOLDS' if rule in holding else 'no'}: {rule.condition}")
    result = {"metrics": samples, "holding": [rule.name for rule in holding]}
    if holding:
        names = ", ".join(rule.name for rule in holding)
        fail_check(args, result, f"{watched.name}: the condition holds of {names}.")
    return result


@contextlib.contextmanager
def logged() -> Iterator[None]:
    """Print what `nca_trader.watch` logs to standard error, with the time, while the block runs."""
    # Not the root logger, which Orbax configures when it is imported.
    log, handler = logging.getLogger("nca_trader.watch"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    level, propagates = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagates
        log.setLevel(level)


def _follow(
    args: argparse.Namespace, watched: Any, alerts: Any, opened: Mapping[str, Any]
) -> dict[str, Any]:
    """Look again and again, until asked to stop."""
    from nca_trader.watch.metrics import Collector, exporter
    from nca_trader.watch.sinks import Sinks

    collector = Collector(watched.name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(logged())
        sinks = Sinks(opened)
        stack.callback(sinks.close)
        if args.prometheus:
            port = stack.enter_context(exporter(args.prometheus, collector))
            print(f"metrics of {watched.name} at port {port}, path /metrics", flush=True)
        stop = stack.enter_context(stop_on_signal("look"))
        shown = ""
        while True:
            # One assignment: the server's thread sees the old samples or the new ones.
            collector.samples = samples = watched.look()
            sinks.tell(alerts.update(samples, time.time(), watched.why))
            # No ages, which would change the line at every look.
            known = [f"{name} {samples[name]:.6g}" for name in SHOWN if name in samples]
            line = "  ".join(known) or "no row yet"
            if line != shown:
                print(line, flush=True)
                shown = line
            until = time.monotonic() + args.every
            # Short sleeps: a signal sets a flag, and would wait for the end of a long one.
            while not stop() and (left := until - time.monotonic()) > 0:
                time.sleep(min(left, 0.2))
            if stop():
                firing = [rule.name for rule in alerts.rules if alerts.state(rule) == "firing"]
                end_stopped(args, {"metrics": samples, "firing": firing})


def add_dashboard_options(parser: argparse.ArgumentParser) -> None:
    """Add the journals to show, the address, and who may ask."""
    many: dict[str, Any] = {"action": "extend", "nargs": "+", "default": []}
    journals = "journals of paper sessions to show; they need not exist yet"
    parser.add_argument("--journal", metavar="FILE", help=journals, **many)
    root = "show every journal of a folder, later ones too (without --journal: .)"
    parser.add_argument("--root", metavar="DIR", help=root)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    parser.add_argument("--port", type=int, default=8321, help="0 takes a free one (%(default)s)")
    expose = "open the page to other machines, which reach this one by that name"
    parser.add_argument("--expose", metavar="NAME", help=expose, **many)
    token = "ask for the token in that file (mode 0600), which is made if it is missing"
    parser.add_argument("--token-file", metavar="FILE", help=token)


def run_dashboard(args: argparse.Namespace) -> dict[str, Any]:
    """Serve the page until the user asks to stop; return its address.

    Raises:
      ConfigError: a path outside the root, or an address that is not allowed.
      StateError: the port is taken.
    """
    from nca_trader.watch.dashboard.sources import FollowedSessions

    with extra("dashboard needs starlette and uvicorn; pip install starlette uvicorn."):
        from nca_trader.watch.dashboard.server import access, listen, make_app, read_token, serve
    # A file and not an option: options are seen by every user of the machine.
    token = read_token(args.token_file) if args.token_file else ""
    names = tuple(args.expose)
    access(args.host, args.port, names, token)  # refused before anything is opened
    sources = FollowedSessions(args.journal, args.root or (None if args.journal else "."))
    with contextlib.closing(sources), listen(args.host, args.port) as listener:
        # Read back, because port 0 lets the system choose.
        port = listener.getsockname()[1]
        shown = len(sources.all())
        # A page is opened by a name that its own check of the Host header accepts.
        host = names[0] if names else "localhost" if args.host == "::1" else args.host
        address = f"http://{host}:{port}/"
        print(f"{shown} sessions at {address} (Ctrl-C ends the page alone)", flush=True)
        with stop_on_signal("look") as stop:
            serve(make_app(sources, access(args.host, port, names, token)), listener)
    result = {"address": address, "shown": shown}
    return end_stopped(args, result) if stop() else result
