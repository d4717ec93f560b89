"""`nca-trader profile`: where the time of training goes here, what bounds it, what to try."""

from __future__ import annotations

import argparse
import pathlib
import shlex
from typing import Any

from nca_trader.cli.train import (
    add_experiment_arguments,
    load_experiment,
    load_training_env,
    use_cores_for,
)

HELP = "trace some updates of training: where their time goes, what bounds them, what to try"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    add_experiment_arguments(parser)
    parser.add_argument("--until", help="bars before this date only")
    parser.add_argument("--steps", type=int, default=3, help="updates to trace (%(default)s)")
    parser.add_argument(
        "--out", default="profile", metavar="DIR", help="where the trace goes (%(default)s)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Profiles; returns what was measured."""
    from nca_trader.cloud import local
    from nca_trader.scale.profile import profile

    config, agent = load_experiment(args)
    use_cores_for(agent)
    env = load_training_env(args, config)
    found = profile(env, agent, local(args.out, "a trace"), args.steps)
    print("\n".join(described(found)))
    return {"env": args.env, "agent": args.agent} | found


def described(found: dict[str, Any]) -> list[str]:
    """What was measured, as lines."""
    low, high = found["update_quartiles_s"]
    lines = [
        f"device    {found['devices']} x {found['device']}",
        f"compile   {found['compile_s']:.1f} s, {found['programs']} programs, "
        f"{found['cache_hits']} of them from the cache; the first update took "
        f"{found['first_over_steady']:,.0f} times a later one",
        f"update    {_seconds(found['update_s'])}, half of {found['updates_timed']} within "
        f"{_seconds(low)} to {_seconds(high)}; {found['steps_per_s']:,.0f} env-steps/s",
        f"products  {found['flops'] / 1e9:.3g} GFLOP an update and device, "
        f"{found['flops_per_s'] / 1e9:.3g} GFLOP/s: {found['flops_share']:.1%} of "
        f"{found['peak_flops_per_s'] / 1e9:.3g} ({found['peak_source']})",
        _traffic(found),
        _memory(found["memory"]),
        "",
        *_parts(found),
        "",
        *_cycle(found["cycle"]),
        "",
        f"bound     {found['bound']}: {found['advice']}",
    ]
    if found["retraces"]:
        lines.append(f"          compiled again {found['retraces']} times after the first update")
    if found["loops_of_unknown_length"]:
        loops = found["loops_of_unknown_length"]
        lines.append(f"          {loops} loops of unknown length count once in the products")
    files = found["trace"]
    return [
        *lines,
        f"trace     {files['xplane']}",
        f"          TensorBoard: pip install tensorboard xprof; "
        f"tensorboard --logdir {shlex.quote(str(pathlib.Path(files['xplane']).parents[3]))}",
        f"          Perfetto: open {files['perfetto']} in https://ui.perfetto.dev",
    ]


def _traffic(found: dict[str, Any]) -> str:
    moved, rate = found["traffic_bytes"] / 1e9, found["peak_bytes_per_s"] / 1e9
    share = found["traffic_share"]
    said = f"{share:.1%} of what" if share is not None else "more than"
    after = f"memory's {rate:.3g} GB/s could" if share is not None else f"memory's {rate:.3g} GB/s"
    return f"traffic   at most {moved:.3g} GB an update, counted without caches: {said} {after}"


def _memory(memory: dict[str, Any]) -> str:
    line = (
        f"memory    {_bytes(memory['needed'])} a device by the compiler: arguments "
        f"{_bytes(memory['arguments'])}, temporaries {_bytes(memory['temporaries'])}"
    )
    if memory["peak"] is None:
        return line + "; the device tells no more"
    return line + f"; peak {_bytes(memory['peak'])} of {_bytes(memory['limit'])} in use"


def _parts(found: dict[str, Any]) -> list[str]:
    if found["parts"] is None:
        return ["parts     unknown: the trace names no operation of the learner's program"]
    whole = sum(found["fine_parts"].values())
    lines = [
        f"an update by part, from a trace of {found['updates_traced']} "
        f"({found['trace_slowdown']:.2g} times as slow as without)"
    ]
    ordered = sorted(found["fine_parts"].items(), key=lambda item: -item[1])
    lines += [f"  {part:<26}{spent / whole:>7.1%}  {_seconds(spent)}" for part, spent in ordered]
    return lines


def _cycle(cycle: dict[str, Any]) -> list[str]:
    whole = cycle["seconds"]
    lines = [
        f"from checkpoint to checkpoint: {cycle['updates']} updates, one save, and one backtest "
        "of the training bars, which `train` itself does not make"
    ]
    for part, spent in cycle["parts"].items():
        lines.append(f"  {part:<26}{spent / whole:>7.1%}  {_seconds(spent)}")
    return lines


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"


def _bytes(size: float | None) -> str:
    if size is None:
        return "?"
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
