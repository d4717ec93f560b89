"""Return against K: a trained run backtested with fewer and more updates a cell.

    python -m benchmarks.anytime --run runs/mine --data bars.csv --start 2015-01-01 --out k.png

Every row is a look at the same bars: choosing the best K by it is fitting the test span.
"""

import argparse

from nca_trader.data.bars import read_bars, sample_bars
from nca_trader.evaluate.backtest import backtest
from nca_trader.runs.manifest import Run


def table(run_dir, bars, steps, start=None):
    """A row for each K: receptive field, total return, Sharpe ratio, turnover a bar."""
    for k in steps:
        run = Run(run_dir, steps=k)
        result = backtest(bars, run, start=start)
        yield {
            "K": k,
            "trained": k == run.agent_config.policy.steps,
            "receptive_field": run.policy.receptive_field,
            "total_return": result.metrics["total_return"],
            "sharpe": result.metrics["sharpe"],
            "turnover": float(result.turnover.mean()),
        }


def plot(rows, path):
    """Total return against K, the K of training marked."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot([row["K"] for row in rows], [row["total_return"] for row in rows], marker="o")
    for row in rows:
        if row["trained"]:
            axes.axvline(row["K"], linestyle=":", label="K of training")
    axes.set(xlabel="K, updates of a cell at inference", ylabel="total return")
    axes.legend()
    figure.savefig(path)
    plt.close(figure)


def main(words=None):
    """Prints the table; writes the plot where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--run", required=True)
    parser.add_argument("--data", help="a bar file; the sample bars if there is none")
    parser.add_argument("--start", help="trade from this date")
    parser.add_argument("--most", type=int, help="the largest K (default twice that of training)")
    parser.add_argument("--out", help="write the plot here (.png, .svg)")
    args = parser.parse_args(words)
    run = Run(args.run)
    bars = read_bars(args.data) if args.data else sample_bars("sp500").select(*run.spec.symbols)
    most = args.most or 2 * run.agent_config.policy.steps
    rows = []
    for row in table(args.run, bars, range(1, most + 1), args.start):
        rows.append(row)
        print("  ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
    if args.out:
        plot(rows, args.out)


if __name__ == "__main__":
    main()
