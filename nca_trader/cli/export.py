"""`nca-trader export`: a run's agent in one small file, measured against what it was."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

from nca_trader.cli.reading import reading_options, typed
from nca_trader.cli.train import add_bar_arguments, load_bars

HELP = "write a run's agent into one small file, of 4, 8 or 16 bits a weight"
NOTE = (
    "What is measured, is measured on the bars that trained the run. --data gives others; a look "
    "at bars that the run has not seen is counted in trials.jsonl next to the run folder."
)
CALLS = 300  # of which the median is a latency


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.epilog = NOTE
    parser.add_argument("--run", required=True, dest="run_dir", metavar="DIR", help="run folder")
    parser.add_argument("--out", required=True, metavar="FILE", help="the file to write")
    parser.add_argument("--bits", type=int, default=8, help="4, 8 (default) or 16 of a weight")
    parser.add_argument(
        "--activations",
        action="store_true",
        help="round what meets the weights as well, by steps measured on the training span",
    )
    parser.add_argument(
        "--codebook",
        default="none",
        metavar="KIND",
        help="euclidean or cosine: groups of weights share one of 2^bits entries",
    )
    parser.add_argument("--group", type=int, help="weights of a group (default 1; cosine 2)")
    parser.add_argument("--seed", type=int, metavar="N", help="the agent of that number, from 0")
    parser.add_argument(
        "--codebook-seed", type=int, default=0, help="of a codebook's training (default 0)"
    )
    parser.add_argument(
        "--min-agreement",
        type=float,
        default=0.99,
        metavar="SHARE",
        help="of decisions that must be the same; below it nothing is written (default .99)",
    )
    add_bar_arguments(parser)
    parser.add_argument("--until", help="with --data: only bars before this date")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures, and writes the file if enough decisions are the same."""
    from nca_trader.cloud import local
    from nca_trader.errors import CheckFailed, ConfigError
    from nca_trader.evaluate.simulate import agreement
    from nca_trader.runs.exported import Coding, compact, write_exported
    from nca_trader.runs.manifest import Run

    out = local(args.out, "what --out writes")
    if not out.parent.is_dir() or out.is_dir():
        raise ConfigError(f"--out {out}: give a file in a folder that is there.")
    group = args.group or (2 if args.codebook == "cosine" else 1)
    coding = Coding(
        bits=args.bits, codebook=args.codebook, group=group, activations=args.activations
    )
    source = Run(args.run_dir, seed=args.seed)
    bars, trained = _bars(args, source)
    params = source.params()
    weights = compact(
        source, params, coding, *_calibration(source, bars, trained, coding), args.codebook_seed
    )
    other = weights.params(source.policy)
    found = agreement(bars, source, params, other)
    looks = _count_look(source, bars)
    full = sum(leaf.nbytes for part in params.values() for leaf in part.values())
    rows = [
        {"weights": "float32", "bytes": full, "agreement": 1.0, "equity": found.equity[0]},
        {
            "weights": _name(coding),
            "bytes": weights.nbytes,
            "agreement": found.share,
            "equity": found.equity[1],
        },
    ]
    for row, spent in zip(rows, latencies(source.policy, params, other), strict=True):
        row |= spent
    _show(rows, found, getattr(bars, "bars", bars))
    if looks is not None:
        print(f"Looks at bars of these data after training so far: {looks}, by the ledger.")
    if not found.share >= args.min_agreement:
        raise CheckFailed(
            f"{found.share:.4f} of {found.decisions:,} decisions agree, below --min-agreement "
            f"{args.min_agreement:g}; nothing is written. Give more --bits, or a smaller --group."
        )
    size = write_exported(out, source, weights)
    read = typed("backtest", run_dir=str(out), data=args.data, **reading_options(args))
    print(f"The agent: {out}, {size:,} bytes; `{read}` reads it, and so does `paper`.")
    return {
        "out": str(out),
        "file_bytes": size,
        "agreement": found.share,
        "decisions": found.decisions,
        "equity_difference": found.difference,
        "looks": looks,
        "rows": rows,
    }


def _name(coding: Any) -> str:
    """A row's name."""
    if coding.codebook != "none":
        return f"{coding.codebook} codebook, {2**coding.bits} entries of {coding.group}"
    return f"{coding.bits} bits" + (", activations too" if coding.activations else "")


def _bars(args: argparse.Namespace, run: Any) -> tuple[Any, int | None]:
    """What is measured on, and how many of its first bars are those that trained the run.

    Without `--data` it is just those; with it, None where they are not among them.
    """
    from nca_trader.data.bars import read_bars
    from nca_trader.data.samples import sample_bars
    from nca_trader.data.synthetic import seed_of, task_of
    from nca_trader.errors import BarError, ConfigError

    record, config = run.manifest.data, run.env_config
    if args.data is not None:
        bars = load_bars(args).between(None, args.until)
        return bars, _trained_rows(bars, record)
    if args.until is not None:
        raise ConfigError("--until is about a bar file; give --data FILE with it.")
    if config.market:
        task = task_of(config, seed_of(record.source))
        return task, len(task.bars)
    try:
        sample = record.source.startswith("sample bars ")
        bars = sample_bars("sp500") if sample else read_bars(record.source)
        if sample and list(bars.symbols) != record.symbols:
            bars = bars.select(*record.symbols)
        rows = _trained_rows(bars, record)
    except BarError:
        rows = None
    if rows is None:
        raise ConfigError(
            f"{run.path}: the bars that trained it are not in {record.source} as it is now; "
            "give them by --data FILE, with the options that read them."
        )
    return bars[:rows], rows


def _trained_rows(bars: Any, record: Any) -> int | None:
    """Of the first bars, how many are those of a manifest's record; None where they are not."""
    rows = record.rows
    return rows if len(bars) >= rows and bars[:rows].digest() == record.sha256 else None


def _calibration(run: Any, source: Any, trained: int | None, coding: Any) -> tuple[Any, Any]:
    """Features and presence of the training span, cut before anything is computed of it."""
    from nca_trader.envs.market import features_of, observed_states
    from nca_trader.errors import ConfigError

    if not coding.activations:
        return None, None
    if trained is None:
        raise ConfigError(
            f"--activations: the first bars of --data are not those that trained {run.path}, and "
            "steps are measured on no others; give that file."
        )
    bars = getattr(source, "bars", source)[:trained]
    states = observed_states(source, run.env_config)[1]
    return features_of(bars, run.env_config, states[:trained]), bars.present


def _count_look(run: Any, source: Any) -> int | None:
    """Notes a look at bars that the run has not seen; None where it was none."""
    from nca_trader.evaluate.backtest import count_look
    from nca_trader.runs.manifest import seen_rows

    bars = getattr(source, "bars", source)
    seen = seen_rows(bars, run)
    return count_look(run, bars[seen:]) if seen < len(bars) else None


def latencies(policy: Any, *several: Any) -> list[dict[str, float]]:
    """Median microseconds of a decision with each of `several` parameters.

    Of a new bar of a stream, and of a whole window.
    """
    import jax
    import numpy as np

    from nca_trader.agents.policy import decide, read_out
    from nca_trader.envs.account.state import open_account
    from nca_trader.envs.rewards import begun

    spec, rows = policy.spec, policy.receptive_field
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, spec.num_assets, spec.num_features)).astype(np.float32)
    present = np.ones(x.shape[:2], bool)
    account = begun(spec, open_account(np.zeros(spec.num_assets, np.float32)))
    state = policy.begin()

    @jax.jit
    def stream(params: Any, state: Any, x: Any, present: Any) -> Any:
        state, cells = policy.stream(params, state, x, present)
        return state, read_out(policy, params, cells, account)

    @jax.jit
    def window(params: Any, x: Any, present: Any) -> Any:
        return decide(policy, params, x, present, account)

    streams = [lambda p=p: stream(p, state, x[0], present[0]) for p in several]
    windows = [lambda p=p: window(p, x, present) for p in several]
    medians = zip(_medians_us(streams), _medians_us(windows), strict=True)
    return [{"stream_us": one, "window_us": two} for one, two in medians]


def _medians_us(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """In turns, so that what slows the machine for a while slows all of them."""
    import jax

    spent: list[list[float]] = [[] for _ in calls]
    for turn in range(CALLS + 1):
        for call, times in zip(calls, spent, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(call())
            if turn:  # the first compiles
                times.append(time.perf_counter() - began)
    return [1e6 * sorted(times)[CALLS // 2] for times in spent]


def _show(rows: list[dict[str, Any]], found: Any, bars: Any) -> None:
    """Prints the table."""
    print(f"{'weights':<40} {'bytes':>9} {'agree':>8} {'equity':>9} {'stream us':>10} window us")
    for row in rows:
        print(
            f"{row['weights']:<40} {row['bytes']:>9,} {row['agreement']:>8.2%} "
            f"{row['equity']:>9.4f} {row['stream_us']:>10.0f} {row['window_us']:>9.0f}"
        )
    first, last = bars.index[0].date(), bars.index[-1].date()
    print(
        f"Equity differs by {found.difference:+.3%}; {found.decisions:,} decisions from {first} to "
        f"{last}; latency is the median of {CALLS} calls."
    )
