"""Writes the reference of the site from the code; run as a script, it prints the page."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

from configs import described, ranges_of, sentence

from nca_trader import cli
from nca_trader.config import AccountConfig, AgentConfig, EnvConfig, account, toml
from nca_trader.config.reading import REPAIRS
from nca_trader.config.records import plain
from nca_trader.data import features
from nca_trader.data.reading import faults
from nca_trader.envs import rewards

HEAD = "# Reference\n\n`make site` writes this page from the code: edit the docstrings instead.\n"


def table(columns: str, rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table whose first column is code; vertical bars are escaped."""
    texts = ([" ".join(str(cell).split()).replace("|", "\\|") for cell in row] for row in rows)
    cells = ((f"`{first}`", *others) for first, *others in texts)
    head, *lines = (f"| {' | '.join(row)} |" for row in (columns.split(", "), *cells))
    return "\n".join([head, "|" + "-|" * len(columns.split(", ")), *lines]) + "\n"


def keys(cls: Any) -> str:
    """Return the table of a config's keys."""
    about, limits, rows = described(cls), ranges_of(cls), []
    for f in dataclasses.fields(cls):
        if not dataclasses.is_dataclass(f.default):
            kind, limit = f.type.replace(" | ", " or "), limits.get(f.name, "")
            default = f"`{toml.literal(plain(f.default, toml.NONE))}`"
            rows.append((f.name, kind, default, limit and f"`{limit}`", about[f.name]))
    return table("key, type, default, range, description", rows)


def given() -> str:
    """Return the table of what an account is given, and what is taken where it is not."""
    about, own = described(AccountConfig), EnvConfig().account
    rows = (
        (name, usual, getattr(own, name) if name not in ("delay", "risk") else "-", about[name])
        for name, usual in account.DEFAULTS.items()
        if name != "costs"
    )
    return table("field, of targets and strategies, of an environment, description", rows)


def feature(name: str) -> tuple[object, ...]:
    """Return the row of a feature; the docstring of its factory has the formula."""
    made = features.BUILT_IN[name]
    inner = inspect.getclosurevars(made.update).nonlocals["update"]
    factory = getattr(features, inner.__qualname__.partition(".")[0])
    return name, made.warmup, sentence(factory.__doc__)


def presets(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each preset and the first sentence of its comment."""
    for name in toml.preset_names(folder):
        comment = re.match(r"(?:#.*\n)*", (toml.preset_folder(folder) / f"{name}.toml").read_text())
        yield name, sentence(comment[0].replace("#", "") if comment else "")


def options(parser: Any, shared: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each option of a command and its help, but for those whose help is in `shared`."""
    for action in parser._actions:
        value = action.metavar or (action.choices and f"{{{','.join(map(str, action.choices))}}}")
        value = "" if action.nargs == 0 else value or action.dest.upper()
        text = parser._get_formatter()._expand_help(action) if action.help else ""
        if action.dest not in ("help", "json") and text not in shared:
            yield " ".join([*action.option_strings, value]).strip(), text


def page() -> str:
    """Return the text of the whole page."""
    actions = re.findall(r'"(\w+)" ([^"]*?)(?:;|$)', described(EnvConfig)["actions"])
    paid = ((name, sentence(f.__doc__) or "log-return") for name, f in rewards.SCHEMES.items())
    codes = [
        (c.name, c.text, c.remedy, ", ".join(f"`{n}`" for n in c.repairs)) for c in faults.Kind
    ]
    of_agent = {f.name: type(f.default) for f in dataclasses.fields(AgentConfig)}
    tables = {name: cls for name, cls in of_agent.items() if dataclasses.is_dataclass(cls)}
    actions_of = cli.build_parser()._actions
    commands: Any = next(a.choices for a in actions_of if a.dest == "command")
    reading = list(options(commands["data"], ()))[2:]
    exits = re.findall(r"(\d+) ([^;]+?)[;.]", (cli.__doc__ or "").partition("Exit codes:")[2])
    parts = {"# Features": table("name, warm-up bars, value", map(feature, features.BUILT_IN))}
    parts |= {"# Actions": table("kind, what an action does", actions)}
    parts |= {"# Rewards": table("name, reward of a step", paid), "# Costs": keys(account.Costs)}
    parts |= {"# Account": given()}
    parts |= {"# Keys of an environment": keys(EnvConfig), "# Keys of an agent": keys(AgentConfig)}
    parts |= {
        f"## [{name}]": keys(cls) for name, cls in tables.items() if dataclasses.is_dataclass(cls)
    }
    for of in ("envs", "agents"):
        parts[f"# Presets in {of}/"] = table("name, description", presets(of))
    parts["# Repairs of bar files"] = table("name, what it does", REPAIRS.items())
    parts["# Fault codes of bar files"] = table("code, fault, remedy, repairs", codes)
    parts["# Commands"] = "Every command has `--json`: one JSON object as the last line.\n"
    parts["## Options of bar files"] = table("option, description", reading)
    for name, parser in commands.items():
        rows = options(parser, [text for _, text in reading])
        about = f"Purpose: {parser.description}.\n\n{table('option, description', rows)}"
        parts[f"## nca-trader {name}"] = about
    parts["# Exit codes"] = table("code, meaning", exits)
    return "\n".join([HEAD, *(f"#{title}\n\n{text}" for title, text in parts.items())])


if __name__ == "__main__":
    print(page())
