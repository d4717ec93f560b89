"""Changes the package in small ways, and counts which changes the tests find.

A mutation is one operator, comparison, `and`, number or truth value of a room of the package. It is
drawn by seed, written into a copy of the checkout, and tested there: first the nearest tests of
`tools/affected.py`, then the whole default suite if none of them failed. What is found is appended
to a file, and a run with the same file resumes where the last one ended.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from typing import Any, NamedTuple

import affected

ROOT = affected.ROOT
ROOMS = ("envs", "learner", "evaluate", "paper", "data", "agents", "runs")
OTHER: dict[type, str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "/", ast.Mod: "*",
    ast.Pow: "*", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=",
    ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip
# What they write is for people.
SPOKEN = ("print", "log", "warn", "warning", "info", "debug", "add_argument", "described")
# Mutations that change nothing which a user could notice, judged by hand.
EQUIVALENT = ROOT / "tools/mutations.toml"
# They compare the text of the sources, and find any change.
TEXTUAL = ("tests/runs/test_before.py", "tests/strategies/test_identity.py")
WHOLE = 1800.0  # seconds that the whole suite may take


class Mutation(NamedTuple):
    """One change: `old` at a place of a file becomes `new`."""

    file: str
    line: int
    column: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column} {self.old} -> {self.new}"

    def applied(self, text: str) -> str:
        """Return the text of the file with the change."""
        lines = text.splitlines(keepends=True)
        line = lines[self.line - 1]
        assert line[self.column :].startswith(self.old), self
        lines[self.line - 1] = line[: self.column] + self.new + line[self.column + len(self.old) :]
        return "".join(lines)


def mutations(file: str, text: str) -> list[Mutation]:
    """Return every mutation of a file, but of messages and annotations."""
    lines, found = text.splitlines(), []

    def add(line: int, column: int, old: str, new: str) -> None:
        # Columns of `ast` count bytes.
        column = len(lines[line - 1].encode()[:column].decode())
        found.append(Mutation(file, line, column, old, new))

    for node in code(ast.parse(text)):
        if isinstance(node, ast.BinOp):
            between(add, lines, node.left, node.right, node.op)
        elif isinstance(node, ast.Compare):
            for left, op, right in zip(
                [node.left, *node.comparators], node.ops, node.comparators, strict=False
            ):
                between(add, lines, left, right, op)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                between(add, lines, left, right, node.op)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            add(node.lineno, node.col_offset, "-" if isinstance(node.op, ast.USub) else "not ", "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            add(node.lineno, node.col_offset, str(node.value), str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            old = ast.get_source_segment(text, node) or ""
            new = str(node.value + 1) if isinstance(node.value, int) else repr(2 * node.value + 1)
            add(node.lineno, node.col_offset, old, new)
    return found


def code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree that compute, and no message, annotation or import for types."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):
        return
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name):
        if node.test.id == "TYPE_CHECKING":
            return
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in SPOKEN or name.endswith("Error"):
            return
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from code(child)


def between(add: Any, lines: list[str], left: Any, right: Any, op: Any) -> None:
    """Add the mutation of the operator between two operands, if both are on one line."""
    new = OTHER.get(type(op))
    if new is None or left.end_lineno != right.lineno:
        return
    gap = lines[left.end_lineno - 1].encode()[left.end_col_offset : right.col_offset].decode()
    old = gap.strip(" ()")
    if old:
        start = left.end_col_offset + len(gap[: gap.index(old)].encode())
        add(left.end_lineno, start, old, new)


def valid(one: Mutation, text: str) -> bool:
    """Whether the changed file is another program of Python."""
    try:
        changed = ast.dump(ast.parse(one.applied(text)))
    except (SyntaxError, AssertionError):
        return False
    return changed != ast.dump(ast.parse(text))


def drawn(root: pathlib.Path, seed: int, number: int, rooms: tuple[str, ...]) -> list[Mutation]:
    """Draw mutations, in turn of each room; the same seed draws the same of the same sources."""
    each, texts = [], {}
    share = -(-number // len(rooms))
    for room in rooms:
        every = []
        for path in sorted((root / "nca_trader" / room).rglob("*.py")):
            file = path.relative_to(root).as_posix()
            texts[file] = path.read_text()
            every += mutations(file, texts[file])
        random.Random(f"{seed} {room}").shuffle(every)
        each.append(list(itertools.islice((x for x in every if valid(x, texts[x.file])), share)))
    return [own[i] for i in range(share) for own in each if i < len(own)][:number]


def copy(root: pathlib.Path, to: pathlib.Path) -> None:
    """Copy what git tracks, and the environment as a link."""
    files = subprocess.run(
        ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    shutil.rmtree(to, ignore_errors=True)
    for file in files:
        if (root / file).is_file():
            (to / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / file, to / file)
    (to / ".venv").symlink_to(root / ".venv")
    # Tests ask git for the tree.
    own = ["git", "-C", str(to), "-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    for words in (["init", "-q"], ["add", "--all"], ["commit", "-q", "-m", "a copy"]):
        subprocess.run([*own, *words], check=True)


def nearest(root: pathlib.Path, file: str, seconds: float) -> list[str]:
    """Return the nearest tests of a file, that take about so many seconds."""
    tests = sorted((root / "tests").rglob("test_*.py"))
    texts = {path.relative_to(root).as_posix(): path.read_text() for path in tests}
    record = ROOT / affected.DURATIONS
    known = json.loads(record.read_text()) if record.is_file() else {}
    chosen, spent = [], 0.0
    for test in affected.affected(affected.graph(root), {file}, texts):
        takes = known.get(test, affected.UNKNOWN)
        if test in (*affected.ALWAYS, *TEXTUAL) or (chosen and spent + takes > seconds):
            continue
        chosen.append(test)
        spent += takes
    return chosen


def failed(root: pathlib.Path, words: list[str], seconds: float) -> str | None:
    """Run tests; return the first that failed, or None."""
    command = [".venv/bin/python", "-m", "pytest", "-q", "-x", "--no-header", "-p",
               "no:cacheprovider", *words]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return "a test that does not end"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if not lines:
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout}{done.stderr}")
    return lines[0].split(" - ")[0].split(maxsplit=1)[1]


def judged(root: pathlib.Path, one: Mutation, near: float, whole: bool) -> dict[str, Any]:
    """Test one mutation in the copy at `root`, which is as before afterwards.

    Raises:
      RuntimeError: the test that found it fails without it, too.
    """
    path = root / one.file
    text = path.read_text()
    path.write_text(one.applied(text))
    try:
        tests = nearest(root, one.file, near)
        by = failed(root, tests, 20 * near) if tests else None
        if by is None and whole:
            ignored = [f"--ignore={test}" for test in TEXTUAL]
            by = failed(root, ["-n", "2", "--dist", "loadfile", *ignored], WHOLE)
    finally:
        path.write_text(text)
    # The whole function: the name of a case may be a number that the change alone gives.
    if by is not None and ".py" in by and failed(root, [by.partition("[")[0]], WHOLE):
        raise RuntimeError(f"{by} fails without {one}; repair it first.")
    return one._asdict() | {"by": by, "near": len(tests)}


def known(rows: list[dict[str, Any]], equivalent: set[str]) -> str:
    """Return the rate by room, and what was missed."""
    lines = []
    for room in dict.fromkeys(row["file"].split("/")[1] for row in rows):
        own = [row for row in rows if row["file"].split("/")[1] == room]
        counted = [row for row in own if row["by"] or sentence(row) not in equivalent]
        found = sum(bool(row["by"]) for row in counted)
        lines.append(f"{room}: {found} of {len(counted)}, {len(own) - len(counted)} equivalent")
    missed = [sentence(row) for row in rows if not row["by"]]
    return "\n".join([*lines, *(f"missed: {each}" for each in missed if each not in equivalent)])


def sentence(row: dict[str, Any]) -> str:
    """Return a mutation as the list of equivalent ones has it: by its line's text."""
    return f"{row['file']}: {row['text'].strip()}: {row['old']} -> {row['new']}"


def main(argv: list[str] | None = None) -> int:
    """Draw, test and print; 0 whatever was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the draw (%(default)s)")
    parser.add_argument("--number", type=int, default=60, help="of mutations (%(default)s)")
    parser.add_argument("--rooms", default=",".join(ROOMS), help="of the package (%(default)s)")
    parser.add_argument("--near", type=float, default=60.0, help="seconds of the nearest tests")
    parser.add_argument("--near-only", action="store_true", help="without the whole suite")
    parser.add_argument("--out", default="build/mutations.jsonl", help="the file to go on with")
    parser.add_argument("--list", action="store_true", help="print what is drawn, test nothing")
    args = parser.parse_args(argv)
    chosen = drawn(ROOT, args.seed, args.number, tuple(args.rooms.split(",")))
    if args.list:
        print("\n".join(map(str, chosen)))
        return 0
    out, there = ROOT / args.out, ROOT / "build/mutated"
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []
    done = {tuple(row[name] for name in Mutation._fields) for row in rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    copy(ROOT, there)
    for number, one in enumerate(chosen, 1):
        if tuple(one) in done:
            continue
        text = (ROOT / one.file).read_text().splitlines()[one.line - 1]
        row = judged(there, one, args.near, not args.near_only) | {"text": text}
        rows.append(row)
        with open(out, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{number}/{len(chosen)} {one}: {row['by'] or 'MISSED'}", flush=True)
    equivalent = tomllib.loads(EQUIVALENT.read_text()) if EQUIVALENT.is_file() else {}
    wanted = {tuple(one) for one in chosen}
    rows = [row for row in rows if tuple(row[name] for name in Mutation._fields) in wanted]
    print(known(rows, set(equivalent.get("equivalent", []))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
