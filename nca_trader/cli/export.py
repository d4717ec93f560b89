"""`nca-trader export`: writes a run's agent into one file, and measures what that changes."""

from __future__ import annotations

import argparse
from typing import Any

from nca_trader.cli.options import (
    COUNT,
    READING,
    add_options,
    load_bars,
    reading_options,
    real,
    write_command,
)

NOTE = (
    "The file is measured on the bars that trained the run. --data gives others; an evaluation on "
    "bars that the run has not seen is counted in trials.jsonl next to the run folder."
)


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """Add the run, the file, and the bits of its weights."""
    parser.epilog = NOTE
    add_options(
        parser,
        "seed",
        "force_agent",
        "allow_code",
        "data",
        "until",
        *READING,
        out={"required": True, "help": "the file to write"},
        run={"required": True, "help": "run folder"},
    )
    forms = (
        "nca (default): for this package; stablehlo: compiled, needs jax alone, not this package"
    )
    parser.add_argument("--format", choices=("nca", "stablehlo"), default="nca", help=forms)
    parser.add_argument(
        "--bits", type=int, choices=(4, 8, 16), default=8, help="4, 8 (default) or 16 per weight"
    )
    parser.add_argument(
        "--activations",
        action="store_true",
        help="also round what meets the weights, by steps measured on the training span",
    )
    codebook = "euclidean or cosine: groups of weights share one of 2^bits entries"
    parser.add_argument("--codebook", default="none", metavar="KIND", help=codebook)
    parser.add_argument("--group", type=COUNT, help="weights per group (default 1; cosine 2)")
    trained = "of a codebook's training (default 0)"
    parser.add_argument("--codebook-seed", type=int, default=0, help=trained)
    parser.add_argument(
        "--min-agreement",
        type=real("[0, 1]"),
        default=0.99,
        metavar="SHARE",
        help="of decisions that must be the same; below it nothing is written (default .99)",
    )


def run_export(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, and write the file if enough decisions are the same."""
    from nca_trader.cloud import local
    from nca_trader.errors import ConfigError
    from nca_trader.evaluate.export import measure, measure_portable
    from nca_trader.runs.exported import Coding
    from nca_trader.runs.manifest import Run

    out = local(args.out, "what --out writes")
    # Refused here, and not after the measurement.
    if not out.parent.is_dir() or out.is_dir():
        raise ConfigError(f"--out {out}: give a file in a folder that is there.")
    compiled = args.format == "stablehlo"
    # A cosine codebook codes directions, and a single weight has none.
    group = args.group or (2 if args.codebook == "cosine" else 1)
    # Its own checks refuse a pair of options that no format has.
    coding = Coding(
        bits=args.bits, codebook=args.codebook, group=group, activations=args.activations
    )
    how = {"force_agent": args.force_agent, "allow_code": args.allow_code}
    run = Run(args.run_dir, seed=args.seed, **how)
    if run.replacement is not None:
        raise ConfigError(
            f"{run.path}: its agent is not deployed, {run.replacement.name} is; give --force-agent "
            "to export the agent all the same."
        )
    # None stands for the bars that trained the run.
    bars = None if args.data is None else load_bars(args).between(None, args.until)
    if compiled:
        measured = measure_portable(run, bars)
    else:
        measured = measure(run, coding, bars, args.codebook_seed)
    return _written(args, run, measured, out)


def _written(args: argparse.Namespace, run: Any, measured: Any, out: Any) -> dict[str, Any]:
    """Write the measured agent and its model card."""
    import pandas as pd

    from nca_trader.errors import CheckFailed
    from nca_trader.evaluate.export import CALLS, card_of
    from nca_trader.machine import write_atomically
    from nca_trader.runs.exported import write_exported
    from nca_trader.runs.portable import USE, write_portable

    found, compiled = measured.found, args.format == "stablehlo"
    span = f"{found.decisions:,} decisions from {measured.first} to {measured.last}"
    if compiled:
        print(f"{found.share:.2%} of {span} agree.")
    else:
        print(pd.DataFrame(measured.rows).to_string(index=False, float_format="{:.4f}".format))
        print(
            f"Equity differs by {found.difference:+.3%}; {span}; latency is the median of {CALLS} "
            "calls."
        )
    if measured.evaluations is not None:
        evaluations = measured.evaluations
        print(f"Evaluations on these data after training so far: {evaluations}, by the trial log.")
    # `not >=`: a NaN is too little as well.
    if not found.share >= args.min_agreement:
        raise CheckFailed(
            f"{found.share:.4f} of {found.decisions:,} decisions agree, below --min-agreement "
            f"{args.min_agreement:g}; nothing is written. Give more --bits, or a smaller --group."
        )
    # Written after the check, so an agent that decides differently leaves no file.
    facts = {"Agreement": f"{found.share:.2%} of {span} equal those of the run"}
    if compiled:
        use = USE.replace('"agent.zip"', repr(out.name))
        card = card_of(run, {"File": "stablehlo, float32", **facts}, use)
        size, read = (
            write_portable(out, run, measured.weights, card),
            "README.md in it says how to run it",
        )
    else:
        size = write_exported(out, run, measured.weights)
        form = {"File": f"nca, {measured.rows[-1]['weights']}, {size:,} bytes", **facts}
        card = card_of(run, form, f"import nca_trader as nca\n\nagent = nca.load({out.name!r})")
        # With the reading options, without which the same file may be refused.
        read = write_command("backtest", run_dir=str(out), data=args.data, **reading_options(args))
        read = f"`{read}` reads it, and so does `paper`"
    card_file = out.with_name(out.name + ".md")
    write_atomically(card_file, card)
    print(f"The agent: {out}, {size:,} bytes; {read}. Its model card: {card_file}.")
    return {
        "out": str(out),
        "card": str(card_file),
        "file_bytes": size,
        "agreement": found.share,
        "decisions": found.decisions,
        "equity_difference": found.difference,
        "looks": measured.evaluations,
        "rows": measured.rows,
    }
