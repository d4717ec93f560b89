"""The report of `nca-trader plan` in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Report = dict[str, Any]
SOURCES = "estimates from the compiler's cycles and public rates; nothing was run"


def lines(report: Report) -> Iterator[str]:
    """The report, a line at a time."""
    yield from _what(report)
    yield from _memory(report)
    yield from _communication(report)
    yield from _compute(report)
    yield from _advice(report)
    if "largest" in report:
        yield from _largest(report["largest"])


def _sizes(mesh: dict[str, int]) -> str:
    return ", ".join(f"{axis} = {size}" for axis, size in mesh.items())


def _what(report: Report) -> Iterator[str]:
    yield (
        f"{report['agent']} in {report['env']} on {report['topology']}: {report['chips']} chips, "
        f"mesh {_sizes(report['mesh'])}"
    )
    if report["mesh_from_table"] != report["mesh"]:
        yield f"  (for a slice of this size the table has {_sizes(report['mesh_from_table'])})"
    if report["set"]:
        options = " ".join(f"--set {name}={value}" for name, value in report["set"].items())
        yield f"  train it with {options}"
    yield f"parameters {report['parameters']:,}; compiled in {report['compile_s']:.0f} s"


def _memory(report: Report) -> Iterator[str]:
    verdict = "fits" if report["fits"] else "DOES NOT FIT"
    needed = report["hbm_bytes_per_chip"]
    size = "more than it has" if needed is None else size_of(needed)
    yield ""
    yield f"memory: {verdict}: {size} of {size_of(report['hbm_limit'])} a chip"
    kinds = report["bytes_by_kind"]
    for kind, of in (
        ("arguments", "all that an update is given: "),
        ("params", ""),
        ("optimiser", ""),
        ("replay", ""),
        ("temporaries", "while it runs: "),
        ("rollout", ""),
        ("code", ""),
    ):
        if kind in kinds:
            indent = "  " if of or kind == "code" else "    of it "
            yield f"{indent}{kind:<12}{size_of(kinds[kind]):>10}"
    if report["micro_batches"] > 1:
        yield f"  with learner.micro_batches = {report['micro_batches']}, as train would choose"


def _communication(report: Report) -> Iterator[str]:
    yield ""
    if not report["collectives"]:
        yield "communication: none"
        return
    yield "communication, an update, of each device:"
    for kind, each in report["collectives"].items():
        dtypes = ", ".join(each["dtypes"])
        yield (
            f"  {each['count']:,} x {kind} over {each['group']} devices, "
            f"{size_of(each['bytes'])} in all ({dtypes})"
        )


def _compute(report: Report) -> Iterator[str]:
    estimate = report["estimate"]
    if estimate is None:
        return
    yield ""
    yield f"time: {SOURCES}"
    parts = sorted(report["cycles"].items(), key=lambda item: -item[1])  # the whole comes first
    for name, cycles in parts:
        floor = report["cycles_over_floor"].get(name)
        over = "" if floor is None else f"  {times(floor):>9} x the floor of the matrix units"
        label = "the whole update" if name == "update" else name
        yield f"  {label:<24}{cycles:>15,} cycles{over}"
    yield (
        f"  {duration(estimate['step_s'])} an update of {estimate['steps']:,} steps, "
        f"{count(estimate['steps_per_s'])} steps/s; matrix units busy for "
        f"{100 * estimate['matrix_units_busy']:.2g}% of it"
    )
    seconds = ", ".join(f"{name} {duration(each)}" for name, each in estimate["seconds"].items())
    yield f"  bound by {estimate['bound']}: {seconds}"
    if report["loops_counted_once"]:
        yield f"  {report['loops_counted_once']} loops of unknown length were counted once"


def _advice(report: Report) -> Iterator[str]:
    yield ""
    for width in report["widths"]:
        if width["fills"] < 1.0:
            yield (
                f"width: {width['name']} = {width['width']} fills {width['fills']:.0%} of its "
                f"matrix units; {width['full_width']} fills them"
            )
    accounts, whole = (report["cycles"].get(name, 0) for name in ("collect: accounts", "update"))
    if 2 * accounts > whole:
        yield (
            f"batch: {accounts / whole:.0%} of the cycles are accounts, one small step after "
            "another, as long for many as for few: more segments a chip cost little (--largest)"
        )
    yield f"remat: {report['remat']['advice']}"
    ratio = report["bars_per_parameter"]
    warning = "" if ratio >= 1 else "  WARNING: under 1, it can learn the noise by heart"
    yield f"independent bars a parameter: {ratio:.2g}{warning}"


def _largest(found: Report) -> Iterator[str]:
    yield ""
    if found["largest"] is None:
        yield "largest batch: not even the smallest fits"
        return
    for name, title in (("largest", "largest batch that fits"), ("efficient", "as fast, to 5%")):
        each = found[name]
        yield (
            f"{title}: learner.num_segments = {each['num_segments']:,}, {each['steps']:,} steps an "
            f"update, {size_of(each['hbm_bytes_per_chip'])} a chip, estimated "
            f"{count(each['steps_per_s'])} steps/s"
        )


def times(ratio: float) -> str:
    """A ratio as people read it."""
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"


def count(number: float) -> str:
    """A large number as people read it."""
    return f"{number / 1e6:,.3g} million" if number >= 1e6 else f"{number:,.0f}"


def size_of(size: float) -> str:
    """Bytes as people read them, in powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def duration(seconds: float) -> str:
    """Seconds as people read them."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
