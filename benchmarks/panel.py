"""What the panel recipe earns over its base on real bars; docs/lab-notes/agents-on-real-bars.md.

    python -m benchmarks.panel benchmarks/results/panel.jsonl --data FOLDER
    python -m benchmarks.panel benchmarks/results/panel.jsonl --table

A cell is a walk-forward: at each date the agents are trained on all bars before it, and trade until
the next one. Its row is the agent less its base, paired bar by bar, with the same sizing. Rows that
are in the file are not computed again, and `--runs` keeps the folds of one that was cut off.

PRIMARY is the one cell that the recipe is judged by, named before it was computed: linear, the mean
of five seeds, true costs, on 47 futures from 1990 on. The others describe. Rows of the phase
"choosing" end before 1990: by them alone the recipe was chosen, by the agent's Sharpe ratio. A line
that added less than 0.03 was left out: ranks as features (0.01), and sizes by covariance (0.00),
which take twice the time on 47 assets and grow with the cube of their number.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import tempfile
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import nca_trader as nca
from nca_trader.agents import load_agent
from nca_trader.agents.base import env_on_base, strategy_named
from nca_trader.agents.policy import decide
from nca_trader.config.ranges import switch
from nca_trader.envs import load_env
from nca_trader.envs.account.state import open_account
from nca_trader.envs.rewards import begin_account
from nca_trader.evaluate.evidence import inference
from nca_trader.optimum.rows import about
from nca_trader.runs.folder import commit

HALF = "half_and_half"
RANKS = ("rank:return_21", "rank:return_63", "rank:return_252")
EQUITY: dict[str, Any] = {
    "timezone": "America/New_York",
    "columns": "split=split_factor,dividend=price_factor",
}
FUTURES: dict[str, Any] = {
    "file": "futures_panel.parquet",
    "read": {"repair": "close-only,no-volume,keep-jumps"},
    "train": "1977-01-03",
}


class Study(NamedTuple):
    """One data set: its file, how it is read, dates of training, costs, and the largest size.

    until: bars from here on are not even read.
    """

    file: str
    read: dict[str, Any]
    train: str
    test: tuple[str, ...]
    costs: nca.Costs = nca.Costs(commission=2e-4)
    size_cap: float = 5.0
    until: str | None = None


STUDIES = {
    "futures before 1990": Study(
        test=("1982-01-01", "1985-01-01", "1987-07-01"), until="1990-01-01", **FUTURES
    ),
    "futures": Study(test=("1990-01-01", "1995-01-01", "2000-01-01", "2005-01-01"), **FUTURES),
    "equities hourly": Study(
        file="us_equity_hourly.parquet",
        read=EQUITY | {"repair": "keep-jumps"},
        train="1998-01-02",
        test=("2011-04-18", "2014-01-01"),
        costs=nca.Costs(commission=1e-4, slippage=1e-4),
        size_cap=1.0,
    ),
    "EURUSD hourly": Study(
        file="eurusd_hourly_quotes.parquet",
        read={"timezone": "UTC", "columns": "bid=bid_close,ask=ask_close", "repair": "no-volume"},
        train="2007-01-01",
        test=("2012-08-02", "2013-10-01"),
        costs=nca.Costs(),  # the quoted spread is in the bars
    ),
    "BTCUSD hourly": Study(
        file="btcusd_hourly_2018_2022.parquet",
        read={"timezone": "UTC"},
        train="2018-05-15",
        test=("2021-01-09", "2021-08-01"),
        costs=nca.Costs(commission=1e-3, slippage=2e-4),
        size_cap=1.0,
    ),
    "S&P 500, NASDAQ": Study(
        file="",  # the sample bars of the package
        read={},
        train="1999-01-04",
        test=("2006-01-01", "2009-01-01", "2012-01-01", "2015-01-01"),
    ),
}


class Cell(NamedTuple):
    """A policy by a recipe on a data set; None is as in the presets.

    agent: a preset. rate: of learning. policy: other values of its fields.
    """

    study: str
    agent: str = "panel"
    base: str | None = None
    ranks: bool | None = None
    sizing: str | None = None
    rate: float | None = None
    policy: dict[str, Any] = {}  # noqa: RUF012


PRIMARY = "futures, linear"
# The recipe before, and each line of the new one alone.
OLD: dict[str, Any] = {"base": HALF, "rate": 1e-3}
ALL: dict[str, Any] = {"ranks": True, "sizing": "covariance"}
# As many parameters, within 1.4%, as the preset, whose cells see no other asset.
MESSAGES: dict[str, Any] = {"neighbours": "all", "hidden": 27}
CELLS = {
    PRIMARY: Cell("futures"),
    "equities hourly, linear": Cell("equities hourly"),
    "EURUSD hourly, linear": Cell("EURUSD hourly"),
    "BTCUSD hourly, linear": Cell("BTCUSD hourly"),
    "S&P 500 and NASDAQ, linear": Cell("S&P 500, NASDAQ"),
    "futures, linear, the recipe before": Cell("futures", **OLD),
    "futures, linear, thirds alone": Cell("futures", rate=1e-3),
    "futures, linear, ranks alone": Cell("futures", ranks=True, **OLD),
    "futures, linear, covariance alone": Cell("futures", sizing="covariance", **OLD),
    "futures, linear, all lines": Cell("futures", **ALL),
    # Chosen by the row above, after its years were seen: the environment of envs/panel_joint.toml.
    "equities hourly, linear, all lines": Cell("equities hourly", **ALL),
    "S&P 500 and NASDAQ, linear, all lines": Cell("S&P 500, NASDAQ", **ALL),
    "futures, nca, all lines": Cell("futures", "panel_nca", **ALL),
    "futures, nca": Cell("futures", "panel_nca"),
    "futures, nca with messages": Cell("futures", "panel_nca", policy=MESSAGES),
    "futures, nca with ranks": Cell("futures", "panel_nca", ranks=True),
    "equities hourly, nca": Cell("equities hourly", "panel_nca"),
    "EURUSD hourly, nca": Cell("EURUSD hourly", "panel_nca"),
    "BTCUSD hourly, nca": Cell("BTCUSD hourly", "panel_nca"),
    "S&P 500 and NASDAQ, nca": Cell("S&P 500, NASDAQ", "panel_nca"),
}
LISTENING = {
    "neighbours = all": Cell("futures", "panel_nca", policy={"neighbours": "all"}),
    "neighbours = nearest": Cell("futures", "panel_nca", policy={"neighbours": "nearest"}),
}


def env_of(cell: Cell) -> nca.EnvConfig:
    """The environment of a cell."""
    study, env = STUDIES[cell.study], load_env("panel_daily", name="env")
    plain = tuple(x for x in env.features if not x.startswith("rank:"))
    ranked = env.features != plain if cell.ranks is None else cell.ranks
    features = (*plain, *RANKS) if ranked else plain
    changes: dict[str, Any] = {"features": features, "costs": study.costs}
    changes["size_cap"] = study.size_cap
    return switch(env, **changes | ({} if cell.sizing is None else {"sizing": cell.sizing}))


def agent_of(cell: Cell) -> nca.AgentConfig:
    """The agent of a cell."""
    agent = load_agent(cell.agent, name="agent")
    changes = cell.policy | ({} if cell.base is None else {"base": cell.base})
    rate = agent.optimizer.learning_rate if cell.rate is None else cell.rate
    optimizer = dataclasses.replace(agent.optimizer, learning_rate=rate)
    return dataclasses.replace(agent, policy=switch(agent.policy, **changes), optimizer=optimizer)


def read(study: Study, folder: pathlib.Path) -> nca.Bars:
    """The bars of a data set."""
    bars = (
        nca.read_bars(folder / study.file, **study.read) if study.file else nca.sample_bars("sp500")
    )
    return bars.between(study.train, study.until)


def less(ours: Any, theirs: Any) -> list[float]:
    """The difference of two annual Sharpe ratios, and its 95% interval, paired by bar."""
    returns = [inference.block_returns(x.excess_returns, 2000) for x in (ours, theirs)]
    per_year = ours.bars_per_year * len(returns[0]) / len(ours.equity)
    found = inference.sharpe_difference_interval(returns[0], returns[1], per_year)
    apart = ours.metrics["sharpe"] - theirs.metrics["sharpe"]
    return [float(apart), float(found.low), float(found.high)]


def walked(cell: Cell, data: pathlib.Path, runs: pathlib.Path) -> Any:
    """The walk-forward of a cell; folds that are in `runs` are not trained again."""
    study = STUDIES[cell.study]
    spans = nca.Spans(train=study.train, test=study.test, scheme="expanding")
    bars, env = read(study, data), env_of(cell)
    return nca.walk_forward(bars, agent_of(cell), spans=spans, env=env, folder=runs / "walk")


def row_of(cell: Cell, data: pathlib.Path, runs: pathlib.Path) -> dict[str, Any]:
    """Walk forward, and compare the agent with its base."""
    began = time.perf_counter(), time.process_time()
    env, agent, walk = env_of(cell), agent_of(cell), walked(cell, data, runs)
    base = walk.baselines[strategy_named(agent.policy.base).name]
    found: dict[str, Any] = {
        "span": [str(walk.result.equity.index[i].date()) for i in (0, -1)],
        "agent": walk.result.metrics["sharpe"],
        "base": base.metrics["sharpe"],
        "turnover": [x.metrics["turnover"] for x in (walk.result, base)],
        "deployed": walk.gate.deployed,
    }
    for times in (1, 2, 3):
        pair = [x if times == 1 else x.at_costs(times) for x in (walk.result, base)]
        found[f"less_{times}"] = less(*pair)
    for name, start in (("hold", "equal weight"), ("trend", "time-series momentum")):
        (each,) = (x for key, x in walk.baselines.items() if key.startswith(start))
        found[name] = each.metrics["sharpe"]
    recipe = {"features": env.features, "sizing": env.sizing, "policy": vars(agent.policy)}
    took = [time.perf_counter() - began[0], time.process_time() - began[1]]
    return found | recipe | {"seconds": [round(x) for x in took]}


def folder_of(name: str) -> str:
    """The folder of a cell in `--runs`."""
    return name.replace(", ", "-").replace(" ", "-")


def rows_in(file: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a file; none where it is not there."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    spread = "{:+.3f} [{:.2f}, {:.2f}]"
    lines = ["| cell, test | agent | base | less base | at 2, 3 times the costs | turnover |"]
    lines.append("|-|-|-|-|-|-|")
    for row in rows:
        if row.get("phase") == "choosing":
            continue
        years = "-".join(x[:4] for x in row["span"])
        more = ", ".join(f"{row[f'less_{k}'][0]:+.2f}" for k in (2, 3))
        ours, theirs = row["turnover"]
        lines.append(
            f"| {row['cell']}, {years} | {row['agent']:.2f} | {row['base']:.2f} "
            f"| {spread.format(*row['less_1'])} | {more} | {ours / theirs:.2f} |"
        )
    return "\n".join(lines)


def listening(cell: Cell, data: pathlib.Path, runs: pathlib.Path) -> tuple[np.ndarray, nca.Bars]:
    """How much each asset's tilt answers to the features of each asset.

    Returns:
      `[A, A]` mean size of the derivative of a row's tilt by the features of a column, over every
      tenth of the last 2,000 bars before the last date of training; and those bars.
    """
    study = STUDIES[cell.study]
    bars = read(study, data).between(None, study.test[-1])
    agent = dataclasses.replace(agent_of(cell), num_seeds=1)
    env = nca.TradingEnv(bars, env_of(cell))
    run = nca.train(env, agent, runs / "listening")
    policy, params, length = run.policy, run.params(), run.policy.receptive_field
    market = env_on_base(env, agent.policy).market
    legs = market.legs
    assert legs is not None and legs.base is not None, "a policy on a base"
    base, size = legs.base, legs.size

    def tilts(x: Any, row: Any) -> Any:
        cells = policy.encode(params, x[None], rows(bars.present, row)[None])[0, -1]
        account = begin_account(policy.spec, open_account(jnp.zeros(bars.num_assets), env.rules))
        account = account._replace(base=base[row], size=size[row])
        return jnp.tanh(decide(policy, params, cells, account).logits[:, 0])

    def rows(of: Any, row: Any) -> Any:
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(of), row - length + 1, length)

    @jax.jit
    def answer(row: Any) -> Any:
        return jnp.abs(jax.jacobian(tilts)(rows(market.features, row), row)).sum((1, 3))

    every = range(len(bars) - 2000, len(bars), 10)
    return np.mean([np.asarray(answer(row)) for row in every], axis=0), bars


def draw_listening(answers: dict[str, np.ndarray], bars: nca.Bars, file: pathlib.Path) -> None:
    """Draws how much tilts answer to other assets, relative to their own."""
    figure = Figure(figsize=(5.6 * len(answers), 5.4), layout="constrained")
    for place, (name, answer) in enumerate(answers.items()):
        axes = figure.add_subplot(1, len(answers), place + 1)
        own = np.diagonal(answer)[:, None]  # 0 of an asset that has no bars yet
        relative = np.divide(answer, own, out=np.zeros_like(answer), where=own > 0.0)
        shown = axes.imshow(relative, cmap="Blues", vmin=0.0, vmax=1.0)
        most = (relative - np.eye(len(relative))).max(1)[own[:, 0] > 0.0]
        print(f"{name}: the asset listened to most has {np.median(most):.3f} of its own, median")
        axes.set(title=name, xlabel="to the features of", ylabel="how a tilt answers")
        axes.set_xticks(range(bars.num_assets), bars.symbols, rotation=90, fontsize=5)
        axes.set_yticks(range(bars.num_assets), bars.symbols, fontsize=5)
    figure.colorbar(shown, ax=figure.axes, label="relative to its own", shrink=0.7)
    figure.savefig(file, dpi=110)


def main() -> None:
    """Computes the cells that are not in the file, and prints its table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--data", type=pathlib.Path, help="folder of the bar files")
    parser.add_argument("--runs", type=pathlib.Path, help="keeps the folds of what is cut off")
    parser.add_argument("--only", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--listening", type=pathlib.Path, help="draw which assets cells listen to")
    parser.add_argument(
        "--between", nargs=2, choices=CELLS, metavar="CELL", help="compare two cells in --runs"
    )
    parser.add_argument("--table", action="store_true", help="print what is there; train nothing")
    args = parser.parse_args()
    if args.listening:
        answers = {}
        for name, cell in LISTENING.items():
            answers[name], bars = listening(cell, args.data, args.runs / name.replace(" ", "-"))
        draw_listening(answers, bars, args.listening)
        return
    if args.between:
        pair = [walked(CELLS[x], args.data, args.runs / folder_of(x)).result for x in args.between]
        print(" less ".join(args.between), np.round(less(*pair), 3))
        return
    done = {row["cell"] for row in rows_in(args.file)}
    for name in [] if args.table else [x for x in args.only if x not in done]:
        with tempfile.TemporaryDirectory() as spare:
            folder = (args.runs or pathlib.Path(spare)) / folder_of(name)
            row = {"cell": name} | row_of(CELLS[name], args.data, folder)
        row |= {"commit": commit()} | about()
        with args.file.open("a") as out:
            out.write(json.dumps(row, default=str) + "\n")
        print(name, np.round(row["less_1"], 3), flush=True)
    print(table(rows_in(args.file)))


if __name__ == "__main__":
    main()
