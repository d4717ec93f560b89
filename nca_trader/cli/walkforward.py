"""`nca-trader walkforward`: refits fold by fold, and reports what was earned out of sample."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import re
from typing import Any

from nca_trader.cli.options import (
    ACCOUNT,
    OF_BACKTESTS,
    READING,
    account_of,
    add_options,
    again,
    load_bars,
    overrides,
    params_of,
)
from nca_trader.errors import ConfigError

NOTE = (
    "Each fold is fitted on its train span alone, and decides in the test span after it; one "
    "account fills all decisions. With --folder a walk-forward that was stopped resumes. Each is "
    "counted in the trial log of --trials: the more were tried, the better the best looks by luck."
)


def add_walkforward_options(parser: argparse.ArgumentParser) -> None:
    """Add what is refitted, the spans of the folds, and where results go."""
    parser.epilog = NOTE
    what = parser.add_mutually_exclusive_group(required=True)
    add_options(what, "strategy", "agent")
    shared = "data param grid metric seeds steps workers folder trials track until out".split()
    add_options(
        parser,
        *READING,
        *ACCOUNT,
        *OF_BACKTESTS,
        *shared,
        env={"help": "with --agent: the environment; with --strategy: its costs and limits"},
        set={"help": "with --agent: change a field of it, or env.KEY; repeatable"},
        seed={"default": 0, "help": "of all random numbers (default 0)"},
    )
    for name, metavar, kind, default, text in (
        ("train", "BARS|DATE", _start, None, "of each train span, or the date of its first bar"),
        ("test", "BARS|DATES", _starts, None, "of each test span, or the dates where they begin"),
        ("purge", "BARS", int, 0, "left out at the end of the train span (default 0)"),
        ("embargo", "BARS", int, 0, "left out in addition (default 0)"),
        ("scheme", "NAME", str, "rolling", "rolling or expanding (default rolling)"),
    ):
        parser.add_argument(f"--{name}", metavar=metavar, type=kind, default=default, help=text)
    parser.add_argument(
        "--warm-start", action="store_true", help="agents begin with those of the fold before"
    )
    parser.add_argument(
        "--deploy",
        metavar="RUN",
        help="a run of the same agent: record there whether it trades, or the best baseline",
    )


def _start(text: str) -> int | str:
    """Return a number of bars, or a date as it is."""
    return text if re.search(r"\d-", text) else int(text)


def _starts(text: str) -> int | tuple[str, ...]:
    """Return a number of bars, or the dates that commas separate."""
    return tuple(text.split(",")) if "," in text or re.search(r"\d-", text) else int(text)


def run_walkforward(args: argparse.Namespace) -> dict[str, Any]:
    """Walk forward; return the folds, the metrics and the verdict."""
    from nca_trader.agents import load_agent
    from nca_trader.config.spans import parse_grid
    from nca_trader.envs import load_env
    from nca_trader.evaluate.combinations import member_of
    from nca_trader.evaluate.walkforward.walk import walk_forward
    from nca_trader.markets import task_of
    from nca_trader.runs.consent import own_names
    from nca_trader.runs.manifest import Run
    from nca_trader.types import Bars

    # As in `backtest`: without --env a rule's weights are not limited.
    env = None if args.env is None else load_env(args.env, overrides(args, "env."))
    # A synthetic market brings its own bars, and its optimum.
    if env is not None and env.market and not args.data:
        source: Any = task_of(env, args.seed)
    else:
        source = load_bars(args)
    if args.until is not None:
        if not isinstance(source, Bars):
            raise ConfigError("--until is of bars with dates; give them with --data.")
        source = source.between(None, args.until)
    deployed = None
    if args.deploy is not None:
        assert env is not None  # an agent needs one
        # Opened before the folds are trained: a wrong path should cost no hours.
        agent = load_agent(args.agent, overrides(args, ""))
        deployed = Run(args.deploy, force_agent=True, allow_code=own_names(env, agent))
    # An agent's folds have the environment's account by themselves.
    account = account_of(args, env if args.strategy else None, env)
    more: dict[str, Any] = {}
    if args.agent:
        subject: Any = load_agent(args.agent, overrides(args, ""))
        more |= {"env": env, "seeds": args.seeds, "steps": args.steps, "seed": args.seed}
        more |= {"deploy": deployed}
        more |= {"warm_start": args.warm_start, "name": pathlib.Path(args.agent).stem}
    else:
        subject = member_of(args.strategy)
        if params := params_of(args):  # those that the grid does not give
            # The wrapper keeps the rule's name and source, by which folds and trials know it.
            subject = functools.update_wrapper(functools.partial(subject, **params), subject)
    names = ("train", "test", "purge", "embargo", "scheme", "metric")
    more |= {name: getattr(args, name) for name in (*names, "folder", "workers", "track")}
    more["trials"] = args.trials or (None if args.folder else "runs")
    walk = walk_forward(source, subject, account=account, grid=parse_grid(args.grid), **more)
    print(walk)
    if deployed is not None:
        walk.deploy(deployed)
        print(f"recorded in {args.deploy}: {walk.gate.deployed} trades")
    # Digests say nothing to a reader; --json has them.
    folds = walk.folds.drop(columns=["train_sha256", "test_sha256"])
    for column in folds.select_dtypes("datetimetz"):
        folds[column] = folds[column].dt.strftime("%Y-%m-%d")
    print(folds.to_string(float_format="{:.3f}".format))
    if args.out is not None and args.out.endswith(".html"):
        from nca_trader.evaluate.report.page import report  # imports matplotlib

        bars = getattr(source, "bars", source)
        report(bars, walk.result, args.out, command=again(args), folds=folds)
    elif args.out is not None:
        walk.result.save(args.out)
    if args.out is not None:
        print(f"The {'page' if args.out.endswith('.html') else 'result by bar'}: {args.out}")
    rows = walk.folds.reset_index().to_dict("records")
    return {
        "folds": rows,
        "metrics": walk.metrics,
        "verdict": walk.verdict,
        "gate": dataclasses.asdict(walk.gate) | {"deployed": walk.gate.deployed},
        "baselines": {name: result.metrics for name, result in walk.baselines.items()},
        "interval": walk.interval._asdict() | {"difference": walk.difference},
    }
