"""`nca-trader tune`: searches hyper-parameters of an agent, and counts every trial."""

from __future__ import annotations

import argparse
from typing import Any

from nca_trader.cli.options import READING, add_options, load_bars, load_experiment
from nca_trader.progress import say

NOTE = (
    "Trials train before the last 20% of the bars and are scored on those. Give --until, so that "
    "later bars stay unseen for one evaluation of the best agent. Every trial is counted in "
    "trials.jsonl next to --folder."
)


def add_tune_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.epilog = NOTE
    add_options(parser, "data", *READING, env={"required": True}, agent={"required": True})
    add_options(
        parser, "set", seed={"default": 0, "help": "of the search and the agents (default 0)"}
    )
    parser.add_argument(
        "--until",
        "--stop",
        metavar="DATE",
        help="search on bars before this date, keep the rest unseen",
    )
    parser.add_argument(
        "--space",
        action="append",
        required=True,
        metavar="TABLE.KEY=VALUES",
        help="a hyper-parameter: LOW:HIGH, LOW:HIGH:log, or A,B,C; repeatable",
    )
    for name, metavar, kind, default, text in (
        ("folder", "DIR", str, None, "holds the study; the same command resumes it"),
        ("trials", "N", int, 20, "of the search in all (default 20)"),
        ("seeds", "N", int, 1, "agents of each trial, whose mean counts (default 1)"),
        ("steps", "N", int, None, "environment steps of each agent"),
        ("batch", "N", int, 4, "trials proposed together; decides the search (default 4)"),
        ("metric", "NAME", str, "sharpe", "to maximise (default sharpe)"),
        ("workers", "W", str, None, "processes of this machine, or tcp://HOST:PORT of a cluster"),
    ):
        required = name == "folder"
        parser.add_argument(
            f"--{name}", metavar=metavar, type=kind, default=default, help=text, required=required
        )


def run_tune(args: argparse.Namespace) -> dict[str, Any]:
    """Search; return the trials and the best agent."""
    from nca_trader.config.spans import parse_space
    from nca_trader.data.synthetic import task_of
    from nca_trader.evaluate.tune import tune

    env, agent = load_experiment(args)
    if args.data or not env.market:
        bars = load_bars(args)
    else:
        bars = task_of(env, args.seed).bars
    names = ("trials", "seeds", "steps", "metric", "seed", "batch", "workers")
    found = tune(
        bars.between(None, args.until),
        agent,
        parse_space(args.space),
        args.folder,
        env=env,
        done=lambda number, score: say(f"trial {number}: {args.metric} {score:.3f}"),
        **{name: getattr(args, name) for name in names},
    )
    print(found.trials.drop(columns="seeds").to_string(float_format="{:.4g}".format))
    luck = ""
    if found.by_luck == found.by_luck:
        luck = f"; the best of so many without skill is expected to show {found.by_luck:.2f}"
    print(
        f"best {args.metric} {found.score:.3f}; the trial log has {found.count} agents on these "
        f"symbols{luck}. The best agent: {found.path}"
    )
    return {
        "trials": found.trials.reset_index().to_dict("records"),
        "best": str(found.path),
        "score": found.score,
        "count": found.count,
        "by_luck": found.by_luck,
    }
