"""`nca-trader dashboard`: a page that shows paper sessions and training runs, live."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
from typing import Any

from nca_trader.cli import stop_on_signal, stopped


def add_dashboard_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    many: dict[str, Any] = {"action": "extend", "nargs": "+", "default": []}
    runs = "run folders to show; also exported files, for what their sessions see"
    parser.add_argument("--run", metavar="DIR", help=runs, **many)
    journals = "journals of paper sessions to show; they need not exist yet"
    parser.add_argument("--journal", metavar="FILE", help=journals, **many)
    root = "show every run and journal of a folder, later ones too (runs, where nothing is given)"
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
      ConfigError: nothing to show, a path outside the root, or an address that is not allowed.
      StateError: the port is taken.
    """
    from nca_trader.errors import ConfigError
    from nca_trader.watch.dashboard.sources import Sources

    try:
        from nca_trader.watch.dashboard.server import access, listen, make_app, read_token, serve
    except ImportError:
        raise ConfigError(
            "dashboard needs starlette and uvicorn; pip install 'nca-trader[dashboard]'."
        ) from None
    root = args.root
    if not (args.run or args.journal or root):
        root = "runs" if pathlib.Path("runs").is_dir() else None
        if root is None:
            raise ConfigError("nothing to show; give --run DIR, --journal FILE or --root DIR.")
    token = read_token(args.token_file) if args.token_file else ""
    names = tuple(args.expose)
    access(args.host, args.port, names, token)  # refused before anything is opened
    sources = Sources(args.run, args.journal, root)
    with contextlib.closing(sources), listen(args.host, args.port) as listener:
        port = listener.getsockname()[1]
        shown = len(sources.all())
        host = names[0] if names else "localhost" if args.host == "::1" else args.host
        address = f"http://{host}:{port}/"
        print(f"{shown} sessions and runs at {address} (Ctrl-C ends the page alone)", flush=True)
        with stop_on_signal("look") as stop:
            serve(make_app(sources, access(args.host, port, names, token)), listener)
    result = {"address": address, "shown": shown}
    return stopped(args, result) if stop() else result
