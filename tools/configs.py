"""What the code says of a config's fields: their descriptions and their ranges."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterable
from typing import Any
from unittest import mock

from nca_trader.config import account, agent

# A value that switches on the checks of a field whose default is None.
EXAMPLES = {"int": 1, "float": 0.5, "tuple[float, float]": (0.5, 0.5)}
# Ranges that no single check states.
OTHERS = {
    "random_costs": "0 < low <= high",
    "dilations": f"1 to {agent.MAX_WIDTH} each",
    "num_neighbours": f"1 to {agent.MAX_NEIGHBOURS}",
    "remat": "none, step, every:n, dots",
}


def sentence(text: str | None) -> str:
    """Return the first sentence of a docstring or a comment, without its full stop."""
    return re.split(r"(?<=\.)\s", " ".join((text or "").split()))[0].rstrip(".")


def described(cls: Any) -> dict[str, str]:
    """Return what a config's docstring says of each field, by name."""
    whole = re.split(r"\n(?:Example|Raises):", inspect.cleandoc(cls.__doc__))[0]
    summary, _, text = whole.partition("Attributes:")
    names = [field.name for field in dataclasses.fields(cls)]
    word = "|".join(sorted(names, key=len, reverse=True))
    heads = list(re.finditer(rf"(?:^\s+|[.;] )((?:{word})(?:,\s+(?:{word}))*):\s", text, re.M))
    found: dict[str, str] = {}
    for head, end in zip(heads, [*(h.start() for h in heads), len(text)][1:], strict=True):
        about = " ".join(text[head.end() : end].split()).rstrip(".;")
        found |= dict.fromkeys(re.findall(r"\w+", head[1]), about)
    for name in names - found.keys():  # described with another field, or in the summary
        other = (f"see `{key}`" for key, about in found.items() if f"`{name}`" in about)
        found[name] = next(other, sentence(summary[summary.find(f"`{name}`") :]))
    return found


def ranges_of(cls: Any) -> dict[str, str]:
    """Return the range of each field, as the checks of the config's constructor state it."""
    found: dict[str, str] = {}
    if cls is account.Costs:
        found = dict.fromkeys(account.AMOUNTS, "[0, inf)")
        for name in described(cls).keys() - found.keys():
            share = name in account.FRACTIONS
            most = account.IMPLAUSIBLE.get(name, 1.0 if share else 10.0)
            found[name] = f"[0, {most:g})" if share else f"(-{most:g}, {most:g})"
        return found

    def between(config: Any, interval: str, *names: str) -> tuple[()]:
        found.update(dict.fromkeys(names, interval))
        return ()

    def whole(config: Any, least: int, *names: str, most: int | None = None) -> tuple[()]:
        return between(config, f"{least} or more" if most is None else f"{least} to {most}", *names)

    def one_of(config: Any, name: str, allowed: Iterable[str]) -> tuple[()]:
        return between(config, ", ".join(allowed), name)

    record = {"between": between, "whole": whole, "one_of": one_of, "refuse": lambda *_: None}
    kinds = {f.name: f.type.removesuffix(" | None") for f in dataclasses.fields(cls)}
    given = [f.name for f in dataclasses.fields(cls) if f.default is None]  # else not checked
    with contextlib.ExitStack() as patches:
        for module in (sys.modules[cls.__module__], account):  # whose limits an environment shares
            own = {n: f for n, f in record.items() if hasattr(module, n)}
            patches.enter_context(mock.patch.multiple(module, **own))
        cls(**{name: EXAMPLES[kinds[name]] for name in given if kinds[name] in EXAMPLES})
    return found | OTHERS
