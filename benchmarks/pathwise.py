"""Score against samples and seconds: the gradient through the account next to PPO.

    python -m benchmarks.pathwise --seeds 1 2 3 --out docs/lab-notes/pathwise.png

Both train the same small MLP on a simulated panel whose trend is planted, in `panel_daily`, at the
true costs, and are scored by the mean agent's Sharpe ratio on fresh draws of the panel after
training on one. Both take the preset's gradient steps, 4 an update. Seconds are of this process's
CPU and leave compilation out.
"""

import argparse
import dataclasses
import json
import tempfile
import time

import numpy as np

METHODS = ("pathwise", "gae")
UPDATES = (0, 2, 4, 8, 16, 32, 64, 92)
ASSETS, BARS, SHARPE = 6, 5000, 2.0


def agent_of(method):
    """Return a small MLP with this estimator."""
    import nca_trader as nca
    from nca_trader.config import LearnerConfig, PolicyConfig

    learner = LearnerConfig(
        steps=3_000_000,
        num_segments=64,
        segment_length=128,
        envs_per_segment=4,
        num_epochs=1,
        num_minibatches=4,
        advantages=method,
        # A path-wise policy has no spread and so no entropy, and refuses another value.
        entropy_coef=LearnerConfig.entropy_coef if method == "pathwise" else 0.0,
    )
    policy = PolicyConfig(kind="mlp", channels=16, hidden=32, window=1)
    return dataclasses.replace(nca.load_agent("panel"), policy=policy, learner=learner, num_seeds=1)


def curve(method, seed, tested):
    """Return a row for each number of updates: samples, seconds, Sharpe ratio on fresh panels."""
    import nca_trader as nca
    from nca_trader.data.synthetic.closed_form import trend_panel
    from nca_trader.evaluate.selection import Acting
    from nca_trader.runs.checkpoint import Checkpoints

    # PPO and the path-wise estimator both learn from the logarithm of growth here.
    daily = nca.load_env("panel_daily")
    config = dataclasses.replace(daily, random_costs=None, reward="log_return", risk_aversion=0.0)
    agent = agent_of(method)
    panel = trend_panel(ASSETS, BARS, seed=1000 + seed, sharpe=SHARPE).bars
    env = nca.TradingEnv(panel, config)
    shape = agent.learner
    per_update = shape.num_segments * shape.segment_length * shape.envs_per_segment
    rows, clock = [], {"began": None, "spent": 0.0}
    keep = dataclasses.replace(agent.checkpoint, every=2, every_seconds=0.0, keep=99)
    agent = dataclasses.replace(agent, checkpoint=keep)

    def report(row):
        now = time.process_time()
        if clock["began"] is None:  # the first update compiles
            clock["began"] = now
        seconds[row["update"]] = now - clock["began"]

    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        steps = UPDATES[-1] * per_update
        run = nca.train(env, agent, f"{folder}/run", steps=steps, seed=seed, report=report)
        like = run.params()
        with Checkpoints(run.path / "checkpoints") as kept:
            for update in UPDATES[1:]:
                state = kept.newest(update)
                if state is None:
                    continue
                params = {
                    module: {name: state[1][f".params['{module}']['{name}']"] for name in leaves}
                    for module, leaves in like.items()
                }
                acting = Acting(run, params)
                found = [
                    nca.backtest(bars, acting, start=str(bars.index[300]), look=False)
                    for bars in tested
                ]
                sharpe = [result.metrics["sharpe"] for result in found]
                rows.append(
                    {
                        "method": method,
                        "seed": seed,
                        "samples": update * per_update,
                        "cpu_s": round(seconds[update], 2),
                        "sharpe": round(float(np.mean(np.nan_to_num(sharpe))), 3),
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    return rows


def plot(rows, path, best):
    """Draw two panels: against samples, and against seconds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, key, label in zip(
        axes, ("samples", "cpu_s"), ("environment steps", "seconds of CPU"), strict=True
    ):
        for colour, method in enumerate(METHODS):
            for seed in sorted({row["seed"] for row in rows}):
                own = [r for r in rows if (r["method"], r["seed"]) == (method, seed)]
                name = "PPO (gae)" if method == "gae" else method
                axis.plot(
                    [r[key] for r in own],
                    [r["sharpe"] for r in own],
                    color=f"C{colour}",
                    marker=".",
                    label=name if seed == own[0]["seed"] == rows[0]["seed"] else None,
                )
        axis.axhline(best, color="grey", linestyle=":", label="best rule, before costs")
        axis.set(xlabel=label)
        if key == "samples":
            axis.set_xscale("log")
    axes[0].set_ylabel("Sharpe ratio on fresh panels, net")
    axes[0].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(words=None):
    """Print a line for each score; write the plot."""
    from nca_trader.data.synthetic.closed_form import trend_panel

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--out", help="write the plot here (.png, .svg)")
    args = parser.parse_args(words)
    tested = [trend_panel(ASSETS, BARS, seed=k, sharpe=SHARPE).bars for k in (1, 2)]
    rows = [row for m in METHODS for seed in args.seeds for row in curve(m, seed, tested)]
    if args.out:
        plot(rows, args.out, SHARPE)


if __name__ == "__main__":
    main()
