"""`nca-trader presets`, `config` and `init`: presets, resolved configs, and a new project."""

from __future__ import annotations

import argparse
from typing import Any

from nca_trader.cli.options import add_options, overrides
from nca_trader.config import toml
from nca_trader.errors import ConfigError


def add_presets_options(parser: argparse.ArgumentParser) -> None:
    """Add what to do with the presets, and their names."""
    parser.add_argument(
        "action",
        choices=("list", "show", "copy"),
        help="list: all presets; show: the file of one; copy: to a file of your own",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="show, copy: the preset")
    parser.add_argument("target", nargs="?", metavar="TO", help="copy: a new file, or a folder")


def run_presets(args: argparse.Namespace) -> dict[str, Any]:
    """List, show or copy presets.

    Raises:
      ConfigError: there is no such preset, the target exists, or a word is missing or too many.
    """
    # argparse fills two optional words from the left, so their count says which are there.
    given = sum(word is not None for word in (args.name, args.target))
    wanted = {"list": 0, "show": 1, "copy": 2}[args.action]
    if given != wanted:
        words = ("", " NAME", " NAME TO")[wanted]
        raise ConfigError(f"presets {args.action}: write `presets {args.action}{words}`.")
    if args.action == "list":
        found = toml.presets()
        for preset in found:
            print(f"{preset.kind:<12}{preset.name:<20}{preset.about}")
        return {"presets": [{"name": p.name, "kind": p.kind, "about": p.about} for p in found]}
    if args.action == "show":
        preset = toml.preset(args.name)
        text = preset.path.read_text(encoding="utf-8")
        # The file as it is, comments included, so that `show > my.toml` is a preset.
        print(text, end="")
        return {"name": preset.name, "kind": preset.kind, "text": text}
    path = str(toml.copy_preset(args.name, args.target))
    print(f"wrote {path}; edit it, and give its path in place of {args.name}")
    return {"name": args.name, "path": path}


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Add the environment and the agent to print."""
    parser.add_argument("action", choices=("show",), help="print every key with its value")
    add_options(parser, "env", "agent", "set")


def run_config(args: argparse.Namespace) -> dict[str, Any]:
    """Print the environment and the agent, with every default written out.

    Raises:
      ConfigError: neither is named, or one cannot be loaded.
    """
    from nca_trader.agents import load_agent
    from nca_trader.config.records import plain
    from nca_trader.config.toml import to_toml
    from nca_trader.envs import load_env

    if args.env is None and args.agent is None:
        raise ConfigError("config show: give --env, --agent or both.")
    found: dict[str, Any] = {}
    for kind, prefix, load in (("env", "env.", load_env), ("agent", "", load_agent)):
        named, changes = getattr(args, kind), overrides(args, prefix)
        if named is None:
            continue
        config = load(named, changes)
        print(f"# {kind} {named}\n{to_toml(config)}")
        found[kind] = plain(config)
    return found


def add_init_options(parser: argparse.ArgumentParser) -> None:
    """Add the folder to write a project into."""
    parser.add_argument("folder", metavar="DIR", help="made if it does not exist")


def run_init(args: argparse.Namespace) -> dict[str, Any]:
    """Write a project folder.

    Raises:
      ConfigError: one of its files exists, or cannot be written.
    """
    written = [str(path) for path in toml.start_project(args.folder)]
    for path in written:
        print(f"wrote {path}")
    print(f"start with {args.folder}/README.md")
    return {"files": written}
