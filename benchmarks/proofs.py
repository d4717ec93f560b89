"""Ten seeds of every market of `nca-trader prove`, drawn when this is started; it can be stopped.

    python -m benchmarks.proofs benchmarks/results/proofs.jsonl
    python -m benchmarks.proofs FILE --markets garleanu_pedersen merton --seeds 10
    python -m benchmarks.proofs benchmarks/results/proofs.jsonl --table        # what is there

The seeds are drawn once and are the first line of the file, so that none is left out afterwards.
Each run that ends appends a line: the row of `prove --json`, the commit, the date and the machine.
The same command resumes. The controls are not trained here; `untrained` costs nothing.
"""

import argparse
import json
import pathlib
import platform
import secrets

import numpy as np

from nca_trader.agents import load_agent
from nca_trader.machine import cores
from nca_trader.optimum.prove import BARS, prepare, prove_markets
from nca_trader.runs.folder import commit, now


def machine():
    """The processor's name and how many cores this process may use."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {cores()} cores"


def begun(file, count):
    """The seeds and the rows of `file`, which is begun with `count` seeds where it is not there."""
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        seeds = [secrets.randbelow(1_000_000) for _ in range(count)]
        file.write_text(json.dumps({"seeds": seeds, "date": now()}) + "\n")
    first, *rows = (json.loads(line) for line in file.read_text().splitlines())
    return first["seeds"], rows


def run(file, markets, count, agent="nano"):
    """Trains what is not in `file` yet, all seeds of one market after the other."""
    seeds, rows = begun(file, count)
    done = {(row["market"], row["seed"]) for row in rows}
    about = {"agent": agent, "commit": commit(), "machine": machine()}
    for market in markets:
        left = [seed for seed in seeds if (market, seed) not in done]
        if not left:
            continue
        trial = prepare(market, load_agent(agent))
        for seed in left:
            (proof,) = prove_markets([trial], [seed], controls=False, say=print)
            with file.open("a") as out:
                out.write(json.dumps(proof.row() | about | {"date": now()}) + "\n")


def table(file):
    """The rows of docs/lab-notes/proofs.md: of each market the bar, and what its seeds reached."""
    _, rows = begun(file, 0)
    lines = ["| market | bar | seeds | lowest, median, highest | untrained | bar after |"]
    lines.append("|-|-|-|-|-|-|")
    for market in BARS:
        own = [row for row in rows if row["market"] == market]
        if not own:
            continue
        if own[0]["fraction"] is None:
            traded = [row["turnover"] for row in own]
            reached, untrained, bar = f"trades {max(traded):.4f} a step at most", "", "0.01 a step"
        else:
            low, middle, high = np.quantile([row["fraction"] for row in own], (0, 0.5, 1))
            reached = f"{low:.1%}, {middle:.1%}, {high:.1%}"
            untrained = f"{max(row['untrained'] for row in own):.0%} at most"
            bar = f"{own[0]['bar']:.0%}"
        after = [row["seconds_to_bar"] for row in own if row["seconds_to_bar"] is not None]
        soon = f"{min(after):.0f} to {max(after):.0f} s" if after else ""
        seeds = f"{sum(row['passed'] for row in own)} of {len(own)} pass"
        lines.append(f"| {market} | {bar} | {seeds} | {reached} | {untrained} | {soon} |")
    return "\n".join(lines)


def main():
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--markets", nargs="+", default=list(BARS), metavar="MARKET")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--table", action="store_true", help="print what is there; train nothing")
    args = parser.parse_args()
    if args.table:
        print(table(args.file))
        return
    run(args.file, args.markets, args.seeds)


if __name__ == "__main__":
    main()
