"""The board: what agents of any library reach on markets whose optimum is known.

A row is what `nca-trader prove` adds to a file in .jsonl for one market, agent and seed. The board
joins the seeds of an agent: the interquartile mean of their fractions, with the interval of a
bootstrap over seeds.
Source: Agarwal et al., Deep Reinforcement Learning at the Edge of the Statistical Precipice (2021).
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FuncFormatter, NullFormatter

from nca_trader.config.records import Mismatch, convert, finite, read_json
from nca_trader.errors import ConfigError, argument, printable
from nca_trader.evaluate.figures import (
    AGENT,
    BASELINES,
    DASHES,
    MUTED,
    PRINTED,
    SEED,
    settings,
)
from nca_trader.evaluate.report import plots
from nca_trader.evaluate.report.render import render, write
from nca_trader.evaluate.wording import decimal, percent, whole
from nca_trader.optimum.rows import Row

REACHED = 0.95  # of the optimum: the steps and seconds to this part are on the board, see `arrival`
RESAMPLES = 2_000
HEADERS = ("fraction", "95% interval", "seeds", "steps", "steps to 95%", "seconds to 95%",
           "seconds before", "passed")  # fmt: skip
PICTURES = ("png", "svg")
LARGEST = 1e9  # of numbers of a row, in size
MOST_ROWS, MOST_BYTES = 10_000, 1 << 22  # of files: what is computed of more takes the machine
WIDEST = 0.1  # of the optimum: three standard errors with which two fractions still compare
LEGEND_LINE, LEGEND_LETTER, LEGEND_ROW, NARROW_AXES = 0.7, 0.08, 0.2, 5.5  # inches


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stored:
    """The fields of a row that the board reads, with their types; a file may be a stranger's."""

    market: str
    seed: int | None
    fraction: float | None
    steps: int | None
    curve: list[list[float | None]]
    entry: dict[str, Any]
    name: str | None = None
    error: float | None = None
    turnover: float | None = None
    passed: bool | None = None
    seed_given: bool | None = None
    complaint: str | None = None
    digest: str | None = None
    date: str | None = None
    machine: str | None = None
    versions: dict[str, str] | None = None
    seconds_before: float | None = None
    commit: str | None = None

    def __post_init__(self):
        kinds = dict.fromkeys(("name", "digest", "chosen"), str | None)
        kinds |= dict.fromkeys(("steps", "transitions"), int | None)
        if wrong := [k for k, kind in kinds.items() if not isinstance(self.entry.get(k), kind)]:
            raise ValueError(f"has an 'entry' whose {wrong[0]!r} is of another type")
        numbers = [self.fraction, self.error, self.turnover, *itertools.chain(*self.curve)]
        counts = [self.steps, self.entry.get("steps"), self.entry.get("transitions")]
        numbers += [*counts, self.seconds_before]
        # NaN compares with nothing.
        if not all(x is None or abs(x) <= LARGEST for x in numbers):
            raise ValueError(f"has a number that is not within {LARGEST:g}")
        if any(len(point) != 4 for point in self.curve):
            raise ValueError("has a point of 'curve' without steps, seconds, fraction and error")
        for column in (0, 1):
            places = [x for point in self.curve if (x := point[column]) is not None]
            if places != sorted(places) or min(places, default=0) < 0:
                raise ValueError("has a 'curve' whose steps or seconds do not ascend from 0 on")
        if min(self.error or 0, self.seconds_before or 0, *(count or 0 for count in counts)) < 0:
            raise ValueError("has an 'error', 'steps' or another count below 0")
        if self.fraction is not None and (self.seed is None or not self.curve):
            raise ValueError("has a 'fraction' without 'seed' or 'curve'")
        if self.curve and self.curve[-1][2] != self.fraction:
            raise ValueError("has a 'curve' that does not end at its 'fraction'")


class Standing(NamedTuple):
    """What one agent reached on one market, over its seeds.

    Attributes:
      market, name: of the rows.
      rows: one of each seed.
    """

    market: str
    name: str
    rows: list[Row]

    @property
    def fractions(self) -> np.ndarray:
        """`[n]` of the optimum; empty where the pair is not applicable."""
        return np.array([row["fraction"] for row in self.rows if row["fraction"] is not None])

    @property
    def why_not(self) -> str:
        """Why the market has no fraction: the agent cannot trade it, or nothing is to be earned."""
        complaint, turnover = (self.rows[0].get(name) for name in ("complaint", "turnover"))
        if not complaint and isinstance(turnover, float):
            return f"trades {turnover:.4f} per step"
        return printable(str(complaint or "")).removeprefix("n/a: ")

    @property
    def passed(self) -> str:
        """How many seeds reached their bar, and why the others did not."""
        missed = [row for row in self.rows if row.get("passed") is not True]
        whys = dict.fromkeys(printable(str(row.get("complaint") or "")) for row in missed)
        found = f"{len(self.rows) - len(missed)} of {len(self.rows)}"
        # An agent may know the paths of a seed that it was given.
        found += ", seed given" * any(row.get("seed_given") for row in self.rows)
        return ": ".join(filter(None, [found, ", ".join(filter(None, whys))]))

    def reached(self, axis: int) -> list[float]:
        """Return the steps (axis 0) or seconds (1) of each seed to 95%; inf where it did not."""
        found = [arrival(row["curve"]) for row in self.rows]
        return [math.inf if p is None or p[axis] is None else float(p[axis]) for p in found]

    def summary(self) -> dict[str, Any]:
        """Return the entry of the JSON board; numbers that do not exist are None."""
        about = {"market": self.market, "name": self.name, "seeds": len(self.fractions)}
        if not len(self.fractions):
            return about | {"not_applicable": self.why_not}
        middle, low, high = interquartile(self.fractions)
        # A seed that did not arrive is infinite there, and so is the median of too few.
        steps, seconds = (finite(float(np.median(self.reached(axis)))) for axis in (0, 1))
        most = max(row["steps"] or 0 for row in self.rows)
        before = [row["seconds_before"] for row in self.rows if row.get("seconds_before")]
        return about | {
            "fraction": middle,
            "interval": [low, high],
            "fractions": self.fractions.tolist(),
            "steps": most,
            "evaluated": most * max(row["entry"].get("transitions") or 1 for row in self.rows),
            "steps_to_95": steps,
            "seconds_to_95": seconds,
            "all_seconds_to_95": [finite(each) for each in sorted(self.reached(1))],
            "seconds_before": float(np.median(before)) if before else None,
            "reached_95": sum(arrival(row["curve"]) is not None for row in self.rows),
            "seed": [row["seed"] for row in self.rows],
            "machines": _all(self.rows, "machine"),
            "versions": _all(self.rows, "versions"),
            "digests": _all(self.rows, "digest"),
            "dates": _all(self.rows, "date"),
            "commits": _all(self.rows, "commit"),
        }


def _all(rows: Sequence[Row], name: str) -> list[Any]:
    """Return the different values of a field, in order."""
    found: list[Any] = []
    for row in rows:
        if (value := row.get(name)) is not None and value not in found:
            found.append(value)
    return found


def interquartile(values: np.ndarray) -> tuple[float, float, float]:
    """Compute the interquartile mean of `[n]` values, and the ends of its 95% interval.

    The interval is that of a percentile bootstrap over the values; with one value it is that value.

    Example:
      >>> interquartile(np.array([0.0, 0.9, 0.9, 0.9, 1.0]))[0]
      0.9
    """

    def middle(x: np.ndarray) -> np.ndarray:
        cut = x.shape[-1] // 4
        return np.sort(x, axis=-1)[..., cut : x.shape[-1] - cut].mean(-1)

    drawn = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(middle(values[drawn]), (0.025, 0.975))
    return float(middle(values)), float(low), float(high)


def read_rows(paths: Sequence[str | os.PathLike[str]]) -> list[Row]:
    """Read files of rows.

    Raises:
      ConfigError: a file is missing or has no rows; a line is not a row, or stands there twice.
      StateError: a line is not JSON.
    """
    rows, seen, names = [], set(), [field.name for field in dataclasses.fields(_Stored)]
    for path in map(Path, paths):
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; `nca-trader prove` adds rows to one.")
        with open(path, "rb") as file:
            lines = file.read(MOST_BYTES + 1).removesuffix(b"\n").split(b"\n")
            if file.tell() > MOST_BYTES or len(rows) + len(lines) > MOST_ROWS:
                raise ConfigError(f"{path}: more than 10,000 rows or 4 MiB; give fewer rows.")
        for number, line in enumerate(lines if any(lines) else (), 1):
            where = f"{path}, line {number}"
            row: Any = read_json(line, where) if line else None
            try:
                # Other keys are not the board's.
                own = {k: row[k] for k in names if k in row} if isinstance(row, dict) else row
                convert(own, _Stored)
            except Mismatch as wrong:
                raise ConfigError(
                    f"{where}: is not a row of `prove`: {printable(wrong.sentence)}."
                ) from None
            # `--json` of `prove` names the file of an agent.
            row["name"] = printable(str(row.get("name", row["entry"].get("name"))))
            row["market"] = printable(row["market"])
            key = row["market"], row["name"], row["seed"]
            # What an agent cannot play has no seed.
            if row["seed"] is not None and key in seen:
                raise ConfigError(f"{where}: seed {key[2]} of {key[1]} on {key[0]} again.")
            seen.add(key)
            rows.append(row)
    if not rows:
        raise ConfigError(f"{', '.join(map(str, paths))}: no rows; `nca-trader prove` adds them.")
    return rows


def entries_of(rows: Sequence[Row]) -> list[Standing]:
    """Return the entries, market by market in the order of the rows."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["market"], row["name"]), []).append(row)
    markets, names = (dict.fromkeys(row[key] for row in rows) for key in ("market", "name"))
    order = [{key: number for number, key in enumerate(each)} for each in (markets, names)]
    pairs = sorted(found, key=lambda pair: (order[0][pair[0]], order[1][pair[1]]))
    return [Standing(*pair, found[pair]) for pair in pairs]


def cells(entry: Standing) -> list[str]:
    """Return the entry's cells of a table, below `HEADERS`."""
    found = entry.summary()
    if not found["seeds"]:
        return ["n/a", entry.why_not, *[""] * (len(HEADERS) - 2)]
    steps, before = found["steps_to_95"], found["seconds_before"]
    done = whole(found["steps"]) if found["steps"] else ""  # it was trained elsewhere
    if found["evaluated"] > found["steps"]:
        done += f" ({whole(found['evaluated'])} transitions)"
    return [
        percent(found["fraction"]),
        # One seed says nothing of how seeds differ.
        " to ".join(map(percent, found["interval"])) if found["seeds"] > 1 else "",
        str(found["seeds"]),
        done,
        "" if steps is None else whole(steps),
        seconds_of(found),
        "" if before is None else decimal(before, 1),
        entry.passed,
    ]


def seconds_of(found: dict[str, Any]) -> str:
    """Return the median of a summary's seconds to 95%, and their range where it has seeds."""
    each = ["never" if x is None else decimal(x, 1) for x in found["all_seconds_to_95"]]
    if found["reached_95"] == 0:
        return ""
    middle = found["seconds_to_95"]
    middle = "never" if middle is None else decimal(middle, 1)
    return middle if len(each) == 1 else f"{middle} ({each[0]} to {each[-1]})"


def sources(entries: Sequence[Standing]) -> list[str]:
    """Return the lines below a board: digests of the markets, versions and machines."""
    rows = [row for entry in entries for row in entry.rows]
    lines = []
    for market in dict.fromkeys(entry.market for entry in entries):
        of_it = _all([row for row in rows if row["market"] == market], "digest")
        lines.append(f"{market}: digest {', '.join(str(digest)[:16] for digest in of_it)}")
    for name in dict.fromkeys(entry.name for entry in entries):
        versions = _all([row for row in rows if row["name"] == name], "versions")
        reported = ["; ".join(f"{k} {v}" for k, v in each.items()) for each in versions]
        chosen = dict.fromkeys(row["entry"].get("chosen") for row in rows if row["name"] == name)
        lines.append(f"{name}: {' / '.join([*reported, *(str(each) for each in chosen if each)])}")
    lines += [f"Machine: {machine}" for machine in _all(rows, "machine")]
    return [printable(line) for line in lines]


def markdown(entries: Sequence[Standing]) -> str:
    """Return the board as Markdown: a table for each market."""
    lines = []
    for market, own in itertools.groupby(entries, lambda entry: entry.market):
        lines += [f"### {_escaped(market)}", "", f"| agent | {' | '.join(HEADERS)} |"]
        lines.append("|-" * (len(HEADERS) + 1) + "|")
        each = ([entry.name, *cells(entry)] for entry in own)
        lines += [f"| {' | '.join(map(_escaped, row))} |" for row in each]
        lines.append("")
    return "\n".join([*lines, *(f"- {_escaped(line)}" for line in sources(entries)), ""])


def _escaped(text: str) -> str:
    """Return a text in which Markdown reads no cell, link, code or element of HTML."""
    return re.sub(r"([\\`|<>\[\]])", r"\\\1", text)


def write_board(path: str | os.PathLike[str], rows: Sequence[Row]) -> None:
    """Write the board of rows, in the form that the path's ending names.

    Args:
      path: ends in .md (tables), .json (everything), .html (a page with plots) or as a picture.
      rows: of `read_rows`, or those of `proof.rows_of`.

    Raises:
      ConfigError: another ending. StateError: it cannot be written there.
    """
    path, entries = Path(path), entries_of(rows)
    kind = path.suffix.removeprefix(".")
    if kind in PICTURES:
        write(path, picture(entries, kind))
    elif path.suffix == ".md":
        write(path, markdown(entries))
    elif path.suffix == ".json":
        summaries = [entry.summary() for entry in entries]
        write(path, json.dumps({"board": summaries}, indent=1, allow_nan=False) + "\n")
    elif path.suffix == ".html":
        write(path, page(entries))
    else:
        endings = ", ".join(f".{each}" for each in ("md", "json", *PICTURES))
        raise ConfigError(f"{argument('out', str(path))}: give a name in {endings} or .html.")


def page(entries: Sequence[Standing]) -> str:
    """Return the board as a page: a plot and a table for each market."""
    colours = _colours(entries)
    markets = []
    for market, own in itertools.groupby(entries, lambda entry: entry.market):
        own = list(own)
        drawn = [entry for entry in own if len(entry.fractions)]
        said = "; ".join(f"{entry.name} {cells(entry)[0]}" for entry in drawn)
        plot = drawn and plots.in_both_widths(
            lambda figure, drawn=drawn: draw_market(
                figure, drawn, colours, narrow=figure.get_figwidth() < 6
            ),
            f"board-{market}",
            f"{market}: fraction of the optimum against steps and against seconds. {said}",
        )
        markets.append((market, plot or "", [(entry.name, cells(entry)) for entry in own]))
    return render("board.html", markets=markets, headers=HEADERS, sources=sources(entries))


def picture(entries: Sequence[Standing], kind: str) -> bytes:
    """Return the plots of all markets as one picture, e.g. of the kind "png"."""
    drawn = [entry for entry in entries if len(entry.fractions)]
    markets = [(market, list(own)) for market, own in itertools.groupby(drawn, lambda e: e.market)]
    out, colours = io.BytesIO(), _colours(entries)
    printed = PRINTED | {SEED: "#707000"}  # there a seed is a baseline's orange
    with matplotlib.rc_context(settings(printed)):
        figure = Figure((11.6, 3.6 * max(len(markets), 1)), layout="constrained")
        parts = figure.subfigures(max(len(markets), 1), 1, squeeze=False)
        if not markets:
            figure.text(0.5, 0.5, "no row has a fraction to draw", ha="center")
        for part, (market, own) in zip(parts[:, 0], markets, strict=False):
            part.supylabel(market)
            draw_market(part, own, colours, printed)
        figure.savefig(out, format=kind, dpi=110)
    return out.getvalue()


def _colours(entries: Sequence[Standing]) -> dict[str, tuple[str, Any]]:
    """Return a colour and a dash for each agent, the same in every plot."""
    pens = itertools.cycle(
        itertools.product(("-", *DASHES), (AGENT, *BASELINES[:3], SEED, BASELINES[3]))
    )
    names = dict.fromkeys(entry.name for entry in entries)
    return {name: (colour, dash) for name, (dash, colour) in zip(names, pens, strict=False)}


def draw_market(
    figure: Figure | SubFigure,
    entries: Sequence[Standing],
    colours: Mapping[str, tuple[str, Any]],
    printed: Mapping[str, str] = MappingProxyType({}),
    narrow: bool = False,
) -> None:
    """Draw the interquartile mean of each agent's curves, with its interval, on two axes.

    Args:
      figure: to draw on.
      entries: of one market, each with a fraction.
      colours: colour and dash of each name.
      printed: of colours that a page decides, those of a picture.
      narrow: whether the axes stand below each other.
    """
    for place, (column, label) in enumerate(((0, "environment steps"), (1, "seconds of training"))):
        axes = figure.add_subplot(*((2, 1) if narrow else (1, 2)), place + 1)
        for entry in entries:
            colour, dash = colours[entry.name]
            colour = printed.get(colour, colour)
            name = entry.name if place == 0 else None
            curves = [known_points(row["curve"], column) for row in entry.rows]
            # Of one that was trained elsewhere the level alone is known.
            if not all(len(curve) > 1 and curve[-1][column] > 0 for curve in curves):
                level = interquartile(entry.fractions)[0]
                axes.axhline(level, color=colour, linestyle=":", linewidth=1.6, label=name)
                continue
            x, middle, low, high = join_curves(curves, column)
            axes.plot(x, middle, color=colour, linestyle=dash, linewidth=1.6, label=name)
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.axhline(REACHED, color=printed.get(MUTED, MUTED), linewidth=0.8)
        axes.set_ylim(-0.05, 1.05)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}")
        )
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(label)
        if place == 0:
            axes.set_ylabel("of the optimum")
    longest = max(len(entry.name) for entry in entries)
    each = figure.dpi * (LEGEND_LINE + LEGEND_LETTER * longest)
    columns = max(int(figure.bbox.width / each), 1)
    if narrow and isinstance(figure, Figure):  # there the legend has many rows
        figure.set_figheight(NARROW_AXES + LEGEND_ROW * -(-len(entries) // columns))
    figure.legend(loc="outside upper left", ncols=columns, frameon=False)


def arrival(curve: Sequence[Sequence[Any]]) -> Sequence[Any] | None:
    """Return the first of two points of a curve in a row at 95%; None where there is none.

    An agent that was trained elsewhere has one point, which counts alone.
    """
    known = [point for point in curve if point[2] is not None]
    there = [point[2] >= REACHED for point in known]
    after = there[1:] if len(known) > 1 else there
    both = (now and later for now, later in zip(there, after, strict=False))
    return next((point for point, here in zip(known, both, strict=False) if here), None)


def known_points(curve: Sequence[Sequence[Any]], column: int) -> list[Sequence[float]]:
    """Return the points that have a fraction and this column: who trained elsewhere has neither."""
    return [point for point in curve if point[2] is not None and point[column] is not None]


def join_curves(
    curves: Sequence[Sequence[Sequence[float]]], column: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Join the curves of seeds along their steps (column 0) or seconds (1).

    Returns:
      `[m]` places, and there the interquartile mean and the ends of its interval.
    """
    ends = [curve[-1][column] for curve in curves]
    starts = [next(p[column] for p in curve if p[column] > 0) for curve in curves]
    # Where every seed has been, so that the mean is of the same seeds everywhere.
    x = np.geomspace(max(starts), max(min(ends), max(starts)), 60)
    heights = [np.interp(x, [p[column] for p in curve], [p[2] for p in curve]) for curve in curves]
    found = np.array([interquartile(at) for at in np.stack(heights, axis=1)])
    return x, *found.T


class Repeat(NamedTuple):
    """A row of the board next to its repetition on new draws.

    Attributes:
      market: of both.
      reported: fraction on the board, the interquartile mean of its seeds.
      found: fraction on the new draws.
      error: standard error of the difference.
      others: rows on the board of another agent, whose digest differs.
    """

    market: str
    reported: float
    found: float
    error: float
    others: int = 0

    @property
    def verdict(self) -> str:
        """What is found, in words: it agrees, or why not."""
        if self.others:
            return f"{self.others} of its rows have the digest of another agent; give that agent"
        if abs(self.reported - self.found) > 3.0 * self.error:
            return "differs"
        return "agrees" if 3.0 * self.error <= WIDEST else "cannot tell, give rows that vary less"

    def __str__(self) -> str:
        """Return the comparison in one line."""
        return (
            f"{self.market}: {self.reported:.1%} on the board, {self.found:.1%} now, "
            f"+-{self.error:.1%}: {self.verdict}"
        )


def repeated(entry: Standing, rows: Sequence[Row]) -> Repeat:
    """Compare an entry of the board with the rows of a repetition.

    The error has three parts: how the seeds of either differ, and the error of the evaluation of
    each, as both were played on draws of their own. The row's own error counts up to 3 times the
    new one, as it may be a stranger's. Where a row's account went bankrupt, it has no bound.
    """
    old, found = entry.fractions, [row["fraction"] for row in rows]
    digests = [row["entry"].get("digest") for row in entry.rows]
    others = sum(digest != rows[0]["entry"].get("digest") for digest in digests)
    reported = interquartile(old)[0]
    if None in found:  # it goes bankrupt now
        return Repeat(entry.market, reported, -math.inf, 0.0, others)
    new = np.array(found)
    # One seed says nothing of how seeds differ: the spread is that of all that there are.
    spread = max(float(np.std(each, ddof=1)) if len(each) > 1 else 0.0 for each in (old, new))
    if len(old) < len(digests):  # one went bankrupt, and no mean has it
        spread = math.inf
    theirs, ours = (
        float(np.mean([row.get("error") or 0.0 for row in part])) for part in (entry.rows, rows)
    )
    seeds = spread * math.sqrt(1 / len(old) + 1 / len(new))
    error = math.hypot(seeds, min(theirs, 3.0 * ours), ours)
    return Repeat(entry.market, reported, interquartile(new)[0], error, others)
