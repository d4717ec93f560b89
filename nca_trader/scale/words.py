"""The reports of `plan`, `train --profile` and the doctor as lines of text."""

from __future__ import annotations

import pathlib
import shlex
from collections.abc import Iterator
from typing import Any

from nca_trader.progress import human
from nca_trader.scale.doctor import GB, mesh_words
from nca_trader.scale.facts import Facts

# Kinds of memory in a plan; the indented ones are parts of the kind above them.
MEMORY = {
    "arguments": "  arguments   ",
    "params": "    of it params      ",
    "optimiser": "    of it optimiser   ",
    "replay": "    of it replay      ",
    "temporaries": "  temporaries ",
    "rollout": "    of it rollout     ",
    "code": "  code        ",
}


def plan_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the report of `scale.plan.plan`, with the keys `agent` and `env`, as text."""
    sizes = {
        key: ", ".join(f"{axis} = {size}" for axis, size in report[key].items())
        for key in ("mesh", "mesh_from_table")
    }
    where = f"{report['topology']}: {report['chips']} chips, mesh {sizes['mesh']}"
    yield f"{report['agent']} in {report['env']} on {where}"
    # The agent's own mesh is planned; a reader should know that the table has another one.
    if report["mesh_from_table"] != report["mesh"]:
        yield f"  (for a slice of this size the table has {sizes['mesh_from_table']})"
    if report["set"]:
        options = " ".join(f"--set {name}={value}" for name, value in report["set"].items())
        yield f"  train it with {options}"
    yield f"parameters {report['parameters']:,}; compiled in {report['compile_s']:.0f} s"
    yield ""
    yield from _memory_lines(report)
    yield ""
    yield from _communication_lines(report["collectives"])
    # None where the compiler refused the program, and so has no cycles.
    if report["estimate"] is not None:
        yield ""
        yield from _time_lines(report)
    yield ""
    yield from _advice_lines(report)
    if "largest" in report:
        yield ""
        yield from _largest_lines(report["largest"])


def _memory_lines(report: dict[str, Any]) -> Iterator[str]:
    verdict = "fits" if report["fits"] else "DOES NOT FIT"
    needed = report["hbm_bytes_per_chip"]
    # The compiler may refuse a program without saying what it needs.
    size = "more than it has" if needed is None else binary_size(needed)
    yield f"memory: {verdict}: {size} of {binary_size(report['hbm_limit'])} per chip"
    kinds = report["bytes_by_kind"]
    for kind, label in MEMORY.items():
        # A program that was refused has no sizes of arguments and temporaries.
        if kind in kinds:
            yield f"{label}{binary_size(kinds[kind]):>10}"
    if not report["fits"]:
        yield "  a larger learner.micro_batches, or policy.remat = 'step', needs less"


def _communication_lines(collectives: dict[str, Any]) -> Iterator[str]:
    if collectives:
        yield "communication, per update and device:"
    else:
        yield "communication: none"
    for kind, each in collectives.items():
        yield (
            f"  {each['count']:,} x {kind} over {each['group']} devices, "
            f"{binary_size(each['bytes'])} in all ({', '.join(each['dtypes'])})"
        )


def _time_lines(report: dict[str, Any]) -> Iterator[str]:
    estimate = report["estimate"]
    yield "time: estimates from the compiler's cycles and public rates; nothing was run"
    # The whole update has the most cycles, so it comes first.
    for name, cycles in sorted(report["cycles"].items(), key=lambda item: -item[1]):
        ratio = report["cycles_over_floor"].get(name)
        label = "the whole update" if name == "update" else name
        times = "" if ratio is None else f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"
        over = f"  {times:>9} x the floor of the matrix units" if times else ""
        yield f"  {label:<24}{cycles:>15,} cycles{over}"
    yield (
        f"  {duration(estimate['step_s'])} per update of {estimate['steps']:,} steps, "
        f"{human(estimate['steps_per_s'])} steps/s; matrix units busy for "
        f"{100 * estimate['matrix_units_busy']:.2g}% of it"
    )
    parts = ", ".join(f"{name} {duration(each)}" for name, each in estimate["seconds"].items())
    yield f"  bound by {estimate['bound']}: {parts}"
    if report["loops_counted_once"]:
        yield f"  {report['loops_counted_once']} loops of unknown length were counted once"


def _advice_lines(report: dict[str, Any]) -> Iterator[str]:
    for width in report["widths"]:
        # A width that fills its matrix units leaves nothing to change.
        if width["fills"] < 1.0:
            yield (
                f"width: {width['name']} = {width['width']} fills {width['fills']:.0%} of its "
                f"matrix units; {width['full_width']} fills them"
            )
    accounts, whole = (report["cycles"].get(name, 0) for name in ("collect: accounts", "update"))
    # Below half of the cycles a larger batch would not be nearly free.
    if 2 * accounts > whole:
        yield (
            f"batch: {accounts / whole:.0%} of the cycles are accounts, one small step after "
            "another, as long for many as for few: more segments per chip cost little (--largest)"
        )
    ratio = report["bars_per_parameter"]
    warning = "" if ratio >= 1 else "  WARNING: below 1, it can memorise the noise"
    yield f"independent bars per parameter: {ratio:.2g}{warning}"


def _largest_lines(found: dict[str, Any]) -> Iterator[str]:
    if found["largest"] is None:
        yield "largest batch: not even the smallest fits"
        return
    for name, title in (("largest", "largest batch that fits"), ("efficient", "as fast, to 5%")):
        if (each := found[name]) is None:
            yield f"{title}: not known"
            continue
        needed, rate = each["hbm_bytes_per_chip"], each["steps_per_s"]
        memory = "" if needed is None else f", {binary_size(needed)} per chip"
        speed = "" if rate is None else f", about {human(rate)} steps/s by two small batches"
        segments = f"learner.num_segments = {each['num_segments']:,}"
        yield f"{title}: {segments}, {each['steps']:,} steps per update{memory}{speed}"


def profile_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the result of `scale.profile.profile` as text."""
    low, high = found["update_quartiles_s"]
    yield f"device    {found['devices']} x {found['device']}"
    timed = f"half of {found['updates_timed']} within {duration(low)} to {duration(high)}"
    if not found["updates_timed"]:
        timed = "as traced, since no update came after the trace"
    rate = f"{found['steps_per_s']:,.0f} env-steps/s"
    yield f"update    {duration(found['update_s'])}, {timed}; {rate}"
    yield (
        f"products  {found['flops'] / 1e9:.3g} GFLOP per update and device, "
        f"{found['flops_per_s'] / 1e9:.3g} GFLOP/s: {found['flops_share']:.1%} of "
        f"{found['peak_flops_per_s'] / 1e9:.3g} ({found['peak_source']})"
    )
    moved, rate = found["traffic_bytes"] / 1e9, found["peak_bytes_per_s"] / 1e9
    share = found["traffic_share"]
    least = f"at most {moved:.3g} GB per update, counted without caches"
    # Counted without caches, the traffic can be more than memory can move.
    if share is None:
        yield f"traffic   {least}: more than memory's {rate:.3g} GB/s"
    else:
        yield f"traffic   {least}: {share:.1%} of what memory's {rate:.3g} GB/s could"
    memory = found["memory"]
    needed = ", ".join(
        f"{kind} {binary_size(memory[kind])}" for kind in ("arguments", "temporaries")
    )
    in_use = f"peak {binary_size(memory['peak'])} of {binary_size(memory['limit'])} in use"
    # A CPU has no memory statistics.
    if memory["peak"] is None:
        in_use = "the device reports no more"
    whole = f"{binary_size(memory['needed'])} per device by the compiler"
    yield f"memory    {whole}: {needed}; {in_use}"
    yield ""
    if found["parts"] is None:
        yield "parts     unknown: the trace names no operation of the learner's program"
    else:
        slower = found["trace_slowdown"]
        times = f" ({slower:.2g} times as slow as without)" if slower else ""
        yield f"an update by part, from a trace of {found['updates_traced']}{times}"
        spent = found["fine_parts"]
        for part, seconds in sorted(spent.items(), key=lambda item: -item[1]):
            yield f"  {part:<26}{seconds / found['update_s']:>7.1%}  {duration(seconds)}"
    yield ""
    yield f"bound     {found['bound']}: {found['advice']}"
    if found["loops_of_unknown_length"]:
        loops = found["loops_of_unknown_length"]
        yield f"          {loops} loops of unknown length count once in the products"
    trace = found["trace"]
    # jax writes to plugins/profile/TIME/ below the folder that TensorBoard takes.
    folder = shlex.quote(str(pathlib.Path(trace["xplane"]).parents[3]))
    yield f"trace     {trace['xplane']}"
    yield f"          TensorBoard: pip install tensorboard xprof; tensorboard --logdir {folder}"
    yield f"          Perfetto: open {trace['perfetto']} in https://ui.perfetto.dev"


def doctor_lines(facts: Facts, mesh: dict[str, int]) -> Iterator[str]:
    """Yield what the machine has, and the mesh to train on."""
    names = ("nca_trader", "python", "jax", "jaxlib", "flax", "optax", "libtpu")
    known = [f"{name} {facts.versions[name]}" for name in names if name in facts.versions]
    yield f"versions  {', '.join(known)}"
    # Of the first that says it: the devices of a machine are alike.
    each = next((size for size in facts.device_memory if size), None)
    kinds = f"{len(facts.kinds)} {facts.platform or 'none'} ({', '.join(sorted(set(facts.kinds)))})"
    yield f"devices   {kinds}" + (f", {each / GB:.1f} GB each for JAX" if each else "")
    sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    yield f"mesh      {sizes}: train {mesh_words(mesh)}"
    free, memory = facts.memory_free / GB, facts.memory / GB
    yield f"host      {facts.cores} cores, {free:.1f} GB free of memory's {memory:.1f}"
    used = f", {facts.cache_bytes / GB:.2f} GB" if facts.cache else ""
    yield f"cache     {facts.cache or 'none'}{used}"
    if facts.coordinator and not facts.coordinator_error:
        yield f"network   coordinator {facts.coordinator} answers"
    if facts.data_rows is not None:
        yield f"data      {facts.data}: {facts.data_rows:,} bars"


def binary_size(size: float | None) -> str:
    """Write bytes in powers of 1024, in which a chip's memory is given, e.g. "15.75 GiB"."""
    if size is None:
        return "?"
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def duration(seconds: float) -> str:
    """Write seconds in the unit that fits, e.g. "3.2 ms"."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
