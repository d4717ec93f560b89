"""Fraction of a known optimum against seconds, for each estimator of advantages.

    python -m benchmarks.estimators ou_mid hidden --seeds 1 2 3 --out docs/lab-notes/estimators.png

The agent is nano as it is, trained and judged as `nca-trader prove` does; only the estimator
changes. Compilation is not in the seconds. Nothing else should run at the same time.
"""

import argparse
import dataclasses

from nca_trader.agents import load_agent
from nca_trader.optimum.prove import prepare, train_and_judge

ESTIMATORS = ("exact", "gae", "group")


def curves(market, steps, seeds):
    """`{estimator: [curve a seed]}` in one market."""
    trial = prepare(market, load_agent("nano"), steps)
    agent = trial.agent
    return {
        name: [
            train_and_judge(
                trial.config,
                dataclasses.replace(
                    agent, learner=dataclasses.replace(agent.learner, advantages=name)
                ),
                seed,
            )
            for seed in seeds
        ]
        for name in ESTIMATORS
    }


def plot(found, path):
    """A panel a market, a colour an estimator, a line a seed."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(found), figsize=(5 * len(found), 4), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, (market, by_name) in zip(axes[0], found.items(), strict=True):
        for colour, (name, runs) in enumerate(by_name.items()):
            for run in runs:
                x, y = [p.seconds for p in run], [p.reached.fraction for p in run]
                label = name if run is runs[0] else None
                panel.plot(x, y, color=f"C{colour}", marker=".", label=label)
        panel.axhline(0.95, color="grey", linestyle=":")
        panel.set(title=market, xlabel="seconds of training", ylim=(0.5, 1.01))
        panel.legend(loc="lower right")
    axes[0][0].set_ylabel("fraction of the optimum, fresh path")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(words=None):
    """Prints a line a run; writes the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("markets", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=3_000_000)
    parser.add_argument("--out", help="write the plot here (.png, .svg)")
    args = parser.parse_args(words)
    found = {}
    for market in args.markets:
        found[market] = curves(market, args.steps, args.seeds)
        for name, runs in found[market].items():
            for seed, run in zip(args.seeds, runs, strict=True):
                soon = next((p.seconds for p in run if p.reached.fraction >= 0.95), None)
                when = "95% not reached" if soon is None else f"95% after {soon:.1f} s"
                last = run[-1]
                print(
                    f"{market:<14} {name:<6} seed {seed}: {last.reached.fraction:6.1%} after "
                    f"{last.seconds:.1f} s, {when}",
                    flush=True,
                )
    if args.out:
        plot(found, args.out)


if __name__ == "__main__":
    main()
