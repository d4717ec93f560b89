"""`nca-trader sweep` searches a rule's parameters, and `tune` an agent's."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

from nca_trader.cli.options import (
    ACCOUNT,
    COUNT,
    OF_BACKTESTS,
    READING,
    account_of,
    add_options,
    again,
    load_bars,
    load_experiment,
)
from nca_trader.progress import say

NOTE = (
    "START:STOP:STEP leaves STOP out, as Python's range does. Every combination counts in "
    "the project folder's trial log, and the deflated Sharpe ratio counts all trials there."
)
TUNE_NOTE = (
    "Trials train before the last 20% of the bars and are scored on those. Give --until, so that "
    "later bars stay unseen for one evaluation of the best agent. Every trial is counted in "
    "trials.jsonl next to --folder."
)
SHOWN = ("sharpe", "total_return", "max_drawdown", "trades")
BEST = 10  # rows that are printed


def add_sweep_options(parser: argparse.ArgumentParser) -> None:
    """Add the rule, its grid, its bars, the account and the page."""
    parser.epilog = NOTE
    required = {"required": True}
    add_options(parser, "data", *READING, *ACCOUNT, *OF_BACKTESTS, "workers", "out")
    add_options(parser, strategy=required, grid=required, seed={"help": "of --sample, from 0"})
    parser.add_argument("--sample", type=COUNT, metavar="N", help="draw N combinations")
    parser.add_argument("--method", choices=("sobol", "halton", "latin", "random"))
    parser.add_argument("--precision", choices=("f32", "f64"), default="f32")
    parser.add_argument(
        "--tails", action="store_true", help="add value at risk, shortfall, tail ratio and omega"
    )
    parser.add_argument("--resume", metavar="DIR", help="keep finished parts there, and go on")
    add_options(parser, trials={"default": "runs"})


def run_sweep(args: argparse.Namespace) -> dict[str, Any]:
    """Run the sweep; return its rows and the verdict."""
    from nca_trader.config.spans import parse_grid
    from nca_trader.evaluate.combinations import combinations_of, member_of, with_levels_of
    from nca_trader.evaluate.sweep.sweep import sweep

    grid, method, seed = parse_grid(args.grid, args.sample is not None), args.method, args.seed or 0
    # The function and not a strategy: the sweep calls it with traced parameters.
    rule = with_levels_of(member_of(args.strategy), grid)
    # Refused before the bars are read.
    combinations_of(rule, grid, args.sample, method or "sobol", seed)
    account = account_of(args)
    bars = load_bars(args)
    names = ("precision", "sample", "tails", "resume", "trials", "workers")
    more = {name: getattr(args, name) for name in names}
    table = sweep(bars, rule, grid, account=account, method=method or "sobol", seed=seed, **more)
    # NaN sorts last: a combination that never trades is not the best.
    best = table.sort_values("sharpe", ascending=False)[:BEST]
    print(f"The best {len(best)} of {len(table):,} combinations by Sharpe ratio:")
    print(best[[*table.attrs["parameters"], *SHOWN]].to_string(index=False, float_format="%.4g"))
    print(table.attrs["verdict"])
    if args.out is not None:
        out = pathlib.Path(args.out)
        if out.suffix == ".html":
            write_best(bars, rule, table, out, again(args), account)
        elif out.suffix == ".parquet":
            table.to_parquet(out, index=False)
        else:
            table.to_csv(out, index=False)
        print(f"The {'page' if out.suffix == '.html' else 'table'}: {out}")
    rows = table.to_dict("records")
    return {"rows": rows, "verdict": table.attrs["verdict"], "search": table.attrs["search"]}


def write_best(
    bars: Any, rule: Any, table: Any, out: pathlib.Path, command: str, account: Any
) -> None:
    """Write the page of the best combination with the table of all, or of the table alone.

    Args:
      bars: of the sweep.
      rule: that was swept.
      table: of the sweep.
      out: path of the page.
      command: that makes it again.
      account: an `AccountConfig`.
    """
    from nca_trader.evaluate.backtest import backtest
    from nca_trader.evaluate.combinations import make_subject
    from nca_trader.evaluate.report.page import report
    from nca_trader.evaluate.report.tables import report_sweep

    if table["sharpe"].isna().all():  # none of them ever trades
        report_sweep(table, out, command=command)
        return
    best = table[table.attrs["parameters"]].to_dict("records")[table["sharpe"].argmax()]
    result = backtest(bars, make_subject(rule, best), account=account)
    report(bars, result, out, sweep=table, command=command)


def add_tune_options(parser: argparse.ArgumentParser) -> None:
    """Add the agent, the space to search, and the spans to score on."""
    parser.epilog = TUNE_NOTE
    required, shared = {"required": True}, ("until", "set", "track", "steps", "metric", "workers")
    add_options(
        parser,
        "data",
        *READING,
        *shared,
        env=required,
        agent=required,
        folder=required,
        seed={"default": 0, "help": "of the search and the agents (default 0)"},
        seeds={"default": 1, "help": "agents of each trial, whose mean counts (default 1)"},
        trials={"type": COUNT, "default": 20, "metavar": "N", "help": "of the search in all (20)"},
    )
    parser.add_argument(
        "--space",
        action="append",
        required=True,
        metavar="TABLE.KEY=VALUES",
        help="a hyper-parameter: LOW:HIGH, LOW:HIGH:log, or A,B,C; repeatable",
    )
    batch = "trials proposed together; decides the search (default 4)"
    parser.add_argument("--batch", metavar="N", type=COUNT, default=4, help=batch)


def run_tune(args: argparse.Namespace) -> dict[str, Any]:
    """Search; return the trials and the best agent."""
    from nca_trader.config.spans import parse_space
    from nca_trader.evaluate.tune import tune
    from nca_trader.markets import task_of

    env, agent = load_experiment(args)
    if args.data or not env.market:
        bars = load_bars(args)
    else:
        # One draw for all trials: they must differ in the agent alone.
        bars = task_of(env, args.seed).bars
    names = ("trials", "seeds", "steps", "metric", "seed", "batch", "workers", "track")
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
    # NaN, which differs from itself, where too few trials have a score.
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
