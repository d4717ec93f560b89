"""Learning curves of one agent in each precision preset, on one market whose optimum is known.

    python -m benchmarks.precision --out docs/lab-notes/precision.png

Every preset trains from the same seed on the same bars, and is judged on the same others, as
`nca-trader prove` judges.
"""

import argparse
import dataclasses

from nca_trader.agents import load_agent
from nca_trader.config import PrecisionConfig
from nca_trader.optimum.prove import prepare, train_and_judge

PRESETS = {
    "f32": PrecisionConfig(),
    "bf16": PrecisionConfig(matmul="bfloat16"),
    "f32 parameters, bf16 compute": PrecisionConfig(matmul="bfloat16", compute="bfloat16"),
}
BAR = 0.95


def curves(market, name, steps, seed):
    """`(preset, points)` of each preset; a point has steps, seconds and what was reached."""
    trial = prepare(market, load_agent(name), steps)
    agent = trial.agent
    for preset, precision in PRESETS.items():
        yield (
            preset,
            train_and_judge(trial.config, dataclasses.replace(agent, precision=precision), seed),
        )


def plot(found, market, path):
    """Fraction of the optimum against steps, all presets on one page."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    looks = (("o", 10, "-"), ("s", 7, "--"), ("^", 4, ":"))  # they may lie on one another
    for (preset, points), (mark, size, line) in zip(found.items(), looks, strict=True):
        style = {"marker": mark, "markersize": size, "linestyle": line, "fillstyle": "none"}
        steps = [point.steps / 1e6 for point in points]
        axes.plot(steps, [p.reached.fraction for p in points], label=preset, **style)
    axes.axhline(BAR, color="grey", linestyle=":", label=f"{BAR:.0%}")
    axes.set(xlabel="environment steps, millions", ylabel=f"fraction of the optimum of {market}")
    axes.set_ylim(top=1.0)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(words=None):
    """Prints a line for each preset; writes the plot where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--market", default="ou_mid")
    parser.add_argument("--agent", default="nano")
    parser.add_argument("--steps", type=int, default=4_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="write the plot here (.png, .svg)")
    args = parser.parse_args(words)
    found = {}
    for preset, points in curves(args.market, args.agent, args.steps, args.seed):
        found[preset], last = points, points[-1]
        print(
            f"{preset:<30} {last.reached.fraction:.1%} +-{last.reached.error:.1%} after "
            f"{last.steps / 1e6:.2f} M steps, {last.seconds:.1f} s",
            flush=True,
        )
    if args.out:
        plot(found, args.market, args.out)


if __name__ == "__main__":
    main()
