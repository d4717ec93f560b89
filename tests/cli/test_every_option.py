"""Every option of every command changes what the command hands over, or is refused.

The table has a row for each option, and an option for each row. A command runs twice, without the
option and with it, up to the function of the library that does its work: what that function is
given must differ, or what is written and returned after it. Options that only print are listed.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import re
import shlex
import sys
import types
import warnings
from typing import NamedTuple

import jax
import numpy as np
import pandas as pd
import pytest
import tiny
from drawn import random_bars
from untrained import untrained_run

from nca_trader.cli import main
from nca_trader.cli.command import COMMANDS, build_parser
from nca_trader.cli.options import OF_BACKTESTS
from nca_trader.config.toml import to_toml
from nca_trader.data.bars import write_bars
from nca_trader.envs import FROZEN
from nca_trader.envs.trading import TradingEnv
from nca_trader.evaluate.evidence.selection import Selector
from nca_trader.runs.manifest import Run
from nca_trader.strategies.identity import digest_of
from nca_trader.strategies.strategy import Strategy
from nca_trader.types import Bars

BARS = random_bars(np.random.default_rng(0), 400, 2)
# Progress, the last line of stdout, and words about what is the same in any case.
PRINTS = {"--json", "--quiet", "--show-sharding"}
SETTINGS = ("jax_debug_nans", "jax_debug_infs", "jax_disable_jit", "jax_log_compiles")
SETTINGS += ("jax_traceback_filtering",)


class Handed(Exception):
    """The command has handed its work over."""


def described(value):
    """A value that a command hands over, as a text that is the same for the same work."""
    if isinstance(value, Bars):
        return f"bars {value.digest()}"
    if isinstance(value, TradingEnv):
        return f"env {value.config} {value.bars.digest()}"
    if isinstance(value, Run):
        return f"run {value.path} {value._seed} {value._forced} {value._acting}"
    if isinstance(value, Selector):
        return f"selector {value.first} {value.bars.digest()}"
    if isinstance(value, Strategy):
        return f"strategy {digest_of(value)}"
    if isinstance(value, argparse.Namespace):
        raise AssertionError("what is handed over has all options in it")
    if isinstance(value, dict):
        return {name: described(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [described(inner) for inner in value]
    if isinstance(value, functools.partial):
        return [described(value.func), described(value.args), described(value.keywords)]
    if isinstance(value, types.FunctionType):
        # `stop` and `say` of a command; a number that one holds is an option, e.g. `--speed`.
        held = [cell.cell_contents for cell in value.__closure__ or ()]
        return [value.__qualname__, [x for x in held if isinstance(x, int | float)][-1:]]
    if type(value).__name__ == "Watch":  # of `train`
        profiler = value._profiler
        return profiler and [str(profiler.folder), profiler._updates]
    return re.sub(r" at 0x[0-9a-f]+|demo-\d+-\d+", "", repr(value))


class Desk:
    """Runs commands in a folder up to where they hand over, and keeps what they do."""

    def __init__(self, patch):
        self.patch, self.calls, self.real = patch, [], {}

    def border(self, name, ends=True, gives=None):
        """Replace a function of the library; by default the command ends there."""

        def asked(*args, **kwargs):
            self.calls.append([name, described(args), described(kwargs)])
            if name.endswith("train.train"):
                self.calls.append([getattr(jax.config, setting) for setting in SETTINGS])
            if ends:
                raise Handed
            return gives(*args, **kwargs) if callable(gives) else gives

        self.real[asked] = through(name)
        self.patch.setattr(name, asked)

    def leave(self, modules):
        """Give the functions themselves to modules that were imported while they were replaced."""
        for module in modules:
            for key, value in [*vars(module).items()]:
                if isinstance(value, types.FunctionType) and value in self.real:
                    setattr(module, key, self.real[value])


def through(name):
    """The function itself, which a border calls after it has kept its arguments."""
    module, _, attribute = name.rpartition(".")
    return getattr(__import__(module, fromlist=[attribute]), attribute)


def demo_job(panel):
    dates = {"first": "2020-03-01", "train_until": "2020-10-01", "select_until": "2020-12-01"}
    bars = BARS if panel is None else BARS[:390]
    return types.SimpleNamespace(bars=bars, **dates)


def entries(rows):
    def entry(name, market):
        asked = {"steps": None, "digest": "x"}
        row = {"entry": asked, "steps": 128, "digest": FROZEN[market]}
        return types.SimpleNamespace(name=name, market=market, fractions=[1.0], rows=[row])

    return [entry("nano", "ou_mid"), entry("mine", "ou_expensive")]


class Clock:
    """The seconds of `watch`, whose second look ends it."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def time(self):
        return 0.0

    def sleep(self, seconds):
        self.now += seconds


def borders(desk, command, after):
    """Where a command hands its work over; `after` goes on as far as it can."""
    bars = lambda *args, **kwargs: BARS  # noqa: E731
    desk.border("nca_trader.data.bars.read_bars", ends=False, gives=bars)
    if command == "demo":
        desk.border("nca_trader.cli.demo.job_of", ends=False, gives=demo_job)
    if command in ("demo", "train"):
        desk.border("nca_trader.learner.train.train")
    if command == "train":
        desk.border("nca_trader.parallel.processes.join_processes")
    if command in ("prove", "board"):
        desk.border("nca_trader.optimum.prove.prove", ends=command == "board", gives=[])
        desk.border("nca_trader.optimum.board.write_board", ends=False)
        desk.patch.setattr("secrets.randbelow", lambda below: 7)
    if command == "board":
        desk.border("nca_trader.optimum.board.read_rows", ends=False, gives=[])
        desk.patch.setattr("nca_trader.optimum.board.entries_of", entries)
        desk.patch.setattr("nca_trader.optimum.board.markdown", lambda entries: "")
    opened = dict.fromkeys(("backtest", "paper", "journal"), "exported.read_run")
    if opened := (opened | {"export": "manifest.Run"}).get(command):
        name = f"nca_trader.runs.{opened}"
        desk.border(name, ends=False, gives=through(name))
    if command == "backtest":
        name = "nca_trader.evaluate.backtest.backtest"
        desk.border(name, ends=not after, gives=through(name))
        for name in ("runs.trackers.track_results", "evaluate.report.page.report"):
            desk.border(f"nca_trader.{name}", ends=False)
        desk.patch.setattr("nca_trader.evaluate.result.Result.stress", stress_of(desk))
    if command == "sweep":
        desk.border("nca_trader.evaluate.sweep.sweep.sweep", ends=False, gives=table)
        desk.border("nca_trader.cli.sweep.write_best", ends=False)
    if command == "walkforward":
        desk.border(
            "nca_trader.evaluate.walkforward.walk.walk_forward", ends=not after, gives=walked(desk)
        )
        desk.border("nca_trader.evaluate.report.page.report", ends=False)
    if command == "tune":
        desk.border("nca_trader.evaluate.tune.tune")
    if command == "export":
        desk.border("nca_trader.evaluate.export.measure", ends=False, gives=measured)
        desk.border("nca_trader.evaluate.export.measure_portable", ends=False, gives=measured)
        for form in ("exported.write_exported", "portable.write_portable"):
            desk.border(f"nca_trader.runs.{form}", ends=False, gives=1)
    if command == "paper":
        desk.border("nca_trader.paper.session.trade.paper_trade")
    if command == "journal":
        desk.border("nca_trader.paper.session.rebuild.rebuild")
        desk.border("nca_trader.paper.journal.journal.verify")
    if command == "data":
        for name, gives in (("fetch_bars", BARS), ("write_whole", None), ("late_starts", {})):
            desk.border(f"nca_trader.paper.feeds.fetch.{name}", ends=False, gives=gives)
    if command == "leakcheck":
        desk.border("nca_trader.evaluate.lookahead.leakcheck.leakcheck")
    if command == "plan":
        desk.border("nca_trader.scale.plan.plan", ends=False, gives={"fits": True, "set": {}})
        desk.patch.setattr("nca_trader.scale.words.plan_lines", lambda report: [])
    if command == "watch":
        clock, look = Clock(), through("nca_trader.watch.metrics.Watched").look
        desk.patch.setattr("nca_trader.cli.watch.time", clock)

        def looked(watched):
            desk.calls.append([str(watched.name), clock.now])
            if clock.now:
                raise Handed
            return look(watched)

        desk.patch.setattr("nca_trader.watch.metrics.Watched.look", looked)
        watched = "nca_trader.watch.metrics.Watched"
        desk.border(watched, ends=False, gives=through(watched))
        desk.border("nca_trader.watch.metrics.exporter")
        rules = "nca_trader.watch.alerts.read_rules"
        desk.border(rules, ends=False, gives=through(rules))
    if command == "dashboard":
        for name in ("access", "read_token", "make_app"):
            name = f"nca_trader.watch.dashboard.server.{name}"
            gives = "x" * 40 if name.endswith("token") else through(name)
            desk.border(name, ends=False, gives=gives)
        desk.border("nca_trader.watch.dashboard.server.listen")
        name = "nca_trader.watch.dashboard.sources.FollowedSessions"
        desk.border(name, ends=False, gives=through(name))
    if command == "doctor":
        desk.border("nca_trader.scale.facts.gather", ends=False, gives=None)
        desk.border("nca_trader.scale.doctor.examine", ends=False, gives=[])
        desk.border("nca_trader.scale.doctor.mesh_of")
    if command == "resume":
        desk.border("nca_trader.paper.session.halts.resume")
        desk.patch.setattr("time.time_ns", lambda: 0)
    if command == "halt":
        desk.border("nca_trader.paper.journal.halting.request_halt")
    if command == "runs":
        for name in ("runs_in", "compare_runs", "remove_run"):
            desk.border(f"nca_trader.runs.listing.{name}")


def stress_of(desk):
    def stress(result):
        desk.calls.append("stress")
        raise Handed

    return stress


def table(*args, **kwargs):
    shown = dict.fromkeys(("sharpe", "total_return", "max_drawdown", "trades"), 1.0)
    found = pd.DataFrame([{"lookback": 5, **shown}])
    found.attrs |= {"parameters": ["lookback"], "verdict": "", "search": {}}
    return found


class Gate(NamedTuple):
    deployed: str = "nothing"


def walked(desk):
    """The result of a walk-forward, as far as the command looks at it."""

    def walk_forward(*args, **kwargs):
        def save(path):
            desk.calls.append(["saved", str(path)])

        def deploy(run):
            desk.calls.append(["deployed", described(run)])
            raise Handed

        folds = pd.DataFrame({"train_sha256": ["a"], "test_sha256": ["b"]})
        result = types.SimpleNamespace(save=save)
        return types.SimpleNamespace(result=result, folds=folds, deploy=deploy)

    return walk_forward


def measured(*args, **kwargs):
    found = types.SimpleNamespace(share=0.995, decisions=10, difference=0.0)
    row = {"weights": "x", "bytes": 1, "agreement": 1.0, "equity": 1.0}
    row |= {"stream_us": 1.0, "window_us": 1.0}
    return types.SimpleNamespace(
        first="2020", last="2021", weights=None, found=found, evaluations=None, rows=[row, row]
    )


RULES = """[[rule]]
name = "kl"
metric = "approx_kl"
comparison = ">"
threshold = 1.0
sinks = ["log"]
"""
OWN = """
import nca_trader as nca

def mine(fast=10):
    return nca.rules.momentum(fast)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What commands read: bars, configs, a run of two agents, a strategy, a journal, rules."""
    folder = tmp_path_factory.mktemp("options")
    write_bars(BARS, folder / "bars.csv")
    write_bars(BARS, folder / "other.csv")
    agent = dataclasses.replace(tiny.AGENT, num_seeds=2)
    for name, config in (("env", tiny.ENV), ("agent", agent)):
        (folder / f"{name}.toml").write_text(to_toml(config))
    other = dataclasses.replace(tiny.ENV, short=False, costs=tiny.Costs(commission=1e-3))
    (folder / "env2.toml").write_text(to_toml(other))
    learner = dataclasses.replace(tiny.AGENT.learner, discount=0.9)
    mesh = dataclasses.replace(tiny.AGENT.mesh, devices=2)
    (folder / "agent2.toml").write_text(
        to_toml(dataclasses.replace(agent, learner=learner, mesh=mesh))
    )
    for name in ("run", "run2"):
        untrained_run(folder / "runs" / name, BARS[:200], tiny.ENV, agent)
    (folder / "elsewhere").mkdir()
    (folder / "mine.py").write_text(OWN)
    for name in ("one.db", "two.db", "rows.jsonl", "more.jsonl"):
        (folder / name).write_text("")
    (folder / "rules.toml").write_text(RULES)
    (folder / "token").write_text("x" * 40)
    return folder


def done(folder, words, monkeypatch, after):
    """What a command does: its exit code, what it hands over and writes; and its error."""
    words = shlex.split(words)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    said, err = io.StringIO(), io.StringIO()
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        patch.chdir(folder)
        desk, loaded = Desk(patch), {*sys.modules}
        borders(desk, words[0], after)
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(err):
            try:
                code = main(words)
            except Handed:
                code = 0
            except SystemExit as end:
                code = end.code
            except AttributeError as error:
                if "SimpleNamespace" not in str(error):
                    raise
                code = 0  # a stand-in of a result has no more
    desk.leave([sys.modules[name] for name in {*sys.modules} - loaded])
    written = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stat().st_mtime_ns != before.get(path):
            # A trial log has the time of each line.
            log = path.name == "trials.jsonl"
            written[str(path.relative_to(folder))] = "" if log else path.read_bytes()
            if path not in before:
                path.unlink()
    if words[0] in ("presets", "config", "trials", "init"):
        desk.calls.append(said.getvalue())
    return code, [desk.calls, written], err.getvalue()


class Row(NamedTuple):
    """An option with its value; what the command needs for it to matter.

    words: of the option. base: more words of the command. after: what it does comes after the
    library's work. instead: words of the base that it takes the place of. refused: what is said
    of the value. needed: what is said without it.
    """

    words: str
    base: str = ""
    after: bool = False
    instead: str = ""
    refused: str = ""
    needed: str = ""


FILE = " --data bars.csv"
READ = {
    "symbol": "--symbol S0", "timezone": "--timezone America/New_York", "repair": "--repair sort",
    "columns": "--columns close=2", "dates": "--dates dmy", "decimal": "--decimal ,",
    "header": "--header 1",
    "every": "--every 1d", "memory_gb": "--memory-gb 3", "split": "--split S0:2020-02-03:2",
    "extra": "--extra vix=vix.csv",
}  # fmt: skip
FILES = {option: Row(words, FILE) for option, words in READ.items()}
TRADE = {
    "commission": "--commission 1e-3", "slippage": "--slippage 1e-3", "fill": "--fill close",
    "order": "--order rebalance", "limit": "--limit max_gross=0.5",
}  # fmt: skip
USUAL = READ | TRADE | {
    "data": "--data other.csv", "env": "--env env2.toml", "agent": "--agent agent2.toml",
    "seed": "--seed 5", "steps": "--steps 999", "set": "--set learner.discount=0.9",
    "workers": "--workers 2", "allow_code": "--allow-code", "until": "--until 2020-12-01",
    "track": "--track tensorboard", "delay": "--delay 1", "start": "--start 2020-12-01",
    "stop_loss": "--stop-loss 0.1", "take_profit": "--take-profit 0.2",
    "trailing_stop": "--trailing-stop 0.1", "trials": "--trials elsewhere",
    "param": "--param lookback=7", "reason": "--reason b", "journal": "--journal two.db",
}  # fmt: skip


def usual(*names):
    """Rows of options that have the same words wherever they are."""
    return {name: Row(USUAL[name]) for name in " ".join(names).split()}


RUN, RULE = "--run runs/run", "--strategy momentum"
OF_RUN = {
    "run_dir": Row("--run runs/run2", "", False, RUN),
    "strategy": Row("--strategy sma_cross", "", False, RUN),
    "seed": Row("--seed 1"),
    "force_agent": Row("--force-agent"),
    "param": Row("--param lookback=7", RULE, instead=RUN),
    "env": Row("--env env2.toml", RULE, instead=RUN),
    **usual("allow_code", *TRADE),
}
PEERS = " --coordinator 10.0.0.1:80 --processes 2 --process 0"
AGENT = "--env env.toml --agent agent.toml"
EXPORT = "--run runs/run --out new.nca"
WALK = "--strategy momentum --train 100 --test 50 --data bars.csv"
WALKED = "--env env.toml --agent agent.toml --train 100 --test 50 --data bars.csv"
VERIFY = "verify rows.jsonl --agent nano"
REPLAY = "--feed replay:bars.csv --journal new.db"
FETCH = "fetch yahoo SPY --from 2020-01-01 --bar 1d --out new.csv"
JOB = " --manifest jobset --run /runs/a --image mine"
OUTSIDE = "ou_mid --agent mine.py:mine"
WHOLE = (VERIFY, WALKED, FETCH, OUTSIDE)  # bases of their own
# By command: its words, and a row for each option by its `dest`.
OPTIONS = {
    "demo": (AGENT, {
        **usual("env agent seed steps"),
        "out": Row("--out elsewhere"),
        "resume": Row("--resume runs/run"),
        "panel": Row("--panel simulated"),
    }),
    "init": ("one", {"folder": Row("two", instead="one")}),
    "presets": ("show nano", {
        "action": Row("list", instead="show nano"),
        "name": Row("mlp", instead="nano"),
        "target": Row("copy nano new.toml", instead="show nano"),
    }),
    "config": ("show --agent nano --env ou_mid", {
        **usual("set"),
        "action": Row("hide", instead="show", refused="invalid choice"),
        "env": Row("--env index_daily"),
        "agent": Row("--agent mlp"),
    }),
    "train": (AGENT + FILE + " --run new", FILES | {
        **usual("env agent data until seed steps track"),
        "devices": Row("--devices 4"),
        "set": Row("--set env.short=false"),
        "select": Row("--select 2020-10-01:2020-12-01"),
        "run_dir": Row("--run other"),
        "distributed": Row("--distributed"),
        "coordinator": Row("--coordinator 10.0.0.2:80", PEERS),
        "processes": Row("--processes 3", PEERS),
        "process": Row("--process 1", PEERS),
        "heartbeat": Row("--heartbeat 5", PEERS),
        "initialization_timeout": Row("--initialization-timeout 5", PEERS),
        "debug_nans": Row("--debug-nans"),
        "debug_infs": Row("--debug-infs"),
        "disable_jit": Row("--disable-jit"),
        "log_compiles": Row("--log-compiles"),
        "full_traceback": Row("--full-traceback"),
        "profile": Row("--profile 2"),
    }),
    "prove": ("ou_mid --agent nano", {
        **usual("seed set steps workers"),
        "markets": Row("ar1", instead="ou_mid"),
        "agent": Row("--agent mlp"),
        "agent_seconds": Row("--agent-seconds 9", OUTSIDE),
        "allow_code": Row("--allow-code", OUTSIDE),
        "python": Row("--python python3", OUTSIDE),
        "alone": Row("--alone"),
        "out": Row("--out new.md"),
    }),
    "board": ("rows.jsonl", {
        "words": Row("more.jsonl", instead="rows.jsonl"),
        "agent": Row("--agent mlp --name nano", VERIFY),
        "seed": Row("--seed 5", VERIFY),
        "agent_seconds": Row("--agent-seconds 9", VERIFY),
        "name": Row("--name mine", VERIFY),
        "allow_code": Row("--allow-code", VERIFY),
        "python": Row("--python python3", VERIFY),
        "out": Row("--out new.md"),
    }),
    "backtest": (RUN + FILE, FILES | OF_RUN | {
        **usual("data start", *OF_BACKTESTS),
        "track": Row("--track tensorboard", after=True),
        "steps": Row("--steps 3"),
        "stop": Row("--stop 2021-01-01"),
        "stress": Row("--stress", after=True),
        "trials": Row("--trials elsewhere", RULE, instead=RUN),
        "out": Row("--out new.csv", after=True),
    }),
    "sweep": (RULE + " --grid lookback=5,10" + FILE, FILES | {
        **usual("data workers trials", *OF_BACKTESTS, *TRADE),
        "strategy": Row("--strategy time_series_momentum"),
        "grid": Row("--grid lookback=5,20", instead="--grid lookback=5,10"),
        "seed": Row("--seed 5", "--sample 2"),
        "sample": Row("--sample 2"),
        "method": Row("--method halton", "--sample 2"),
        "precision": Row("--precision f64"),
        "tails": Row("--tails"),
        "resume": Row("--resume elsewhere"),
        "out": Row("--out new.csv"),
    }),
    "trials": ("runs", {"folder": Row("elsewhere", instead="runs")}),
    "runs": ("list runs", {
        "action": Row("compare runs/run runs/run2", instead="list runs"),
        "paths": Row("elsewhere", instead="runs"),
        "yes": Row("--yes", "rm runs/run", instead="list runs", needed="give --yes"),
    }),
    "walkforward": (WALK, FILES | {
        **usual("data param env workers trials track until", *OF_BACKTESTS, *TRADE),
        "strategy": Row("--strategy sma_cross"),
        "agent": Row("--agent agent2.toml", WALKED),
        "set": Row("--set learner.discount=0.9", WALKED),
        "seed": Row("--seed 5", WALKED),
        "grid": Row("--grid lookback=5,20"),
        "train": Row("--train 120"),
        "test": Row("--test 60"),
        "purge": Row("--purge 2"),
        "embargo": Row("--embargo 2"),
        "scheme": Row("--scheme expanding"),
        "metric": Row("--metric calmar", "--grid lookback=5,20"),
        "seeds": Row("--seeds 4", WALKED),
        "steps": Row("--steps 999", WALKED),
        "folder": Row("--folder elsewhere"),
        "warm_start": Row("--warm-start", WALKED),
        "deploy": Row("--deploy runs/run", WALKED),
        "out": Row("--out new.csv", after=True),
    }),
    "tune": (AGENT + FILE + " --space optimizer.b1=0.8:0.9 --folder new", FILES | {
        **usual("data env agent set track seed until steps workers"),
        "space": Row("--space optimizer.b2=0.8:0.9"),
        "folder": Row("--folder elsewhere"),
        "trials": Row("--trials 3"),
        "seeds": Row("--seeds 3"),
        "batch": Row("--batch 2"),
        "metric": Row("--metric calmar"),
    }),
    "export": (EXPORT, FILES | {
        **usual("allow_code data"),
        "seed": Row("--seed 1"),
        "force_agent": Row("--force-agent"),
        "run_dir": Row("--run runs/run2"),
        "out": Row("--out other.nca"),
        "until": Row("--until 2020-12-01", FILE),
        "format": Row("--format stablehlo"),
        "bits": Row("--bits 4"),
        "activations": Row("--activations"),
        "codebook": Row("--codebook euclidean"),
        "group": Row("--group 2", "--codebook euclidean"),
        "codebook_seed": Row("--codebook-seed 5", "--codebook euclidean"),
        "min_agreement": Row("--min-agreement 0.999", refused="below --min-agreement"),
    }),
    "paper": (f"{RUN} {REPLAY}", OF_RUN | usual(*READ) | {
        **usual("start"),
        "feed": Row("--feed replay:other.csv"),
        "broker": Row("--broker alpaca", "--feed alpaca:SPY"),
        "warmup": Row("--warmup 600", "--feed alpaca:SPY"),
        "journal": Row("--journal other.db"),
        "speed": Row("--speed 5"),
        "capital": Row("--capital 5"),
    }),
    "halt": ("--journal one.db --reason a", usual("journal reason")),
    "resume": ("--journal one.db --reason a", usual("journal reason")),
    "journal": (f"replay one.db {RUN}", OF_RUN | {
        "action": Row("verify one.db", instead=f"replay one.db {RUN}"),
        "file": Row("two.db", instead="one.db"),
    }),
    "data": ("check bars.csv", usual(*READ) | {
        "what": Row(FETCH, instead="check bars.csv"),
        "file": Row("other.csv", instead="bars.csv"),
        "symbols": Row("QQQ", FETCH, instead="SPY"),
        "begin": Row("--from 2021-01-01", FETCH),
        "end": Row("--to 2021-01-01", FETCH),
        "bar": Row("--bar 1h", FETCH),
        "out": Row("--out other.parquet", FETCH),
        "cache": Row("--cache elsewhere", FETCH),
    }),
    "leakcheck": (RULE.split()[1] + FILE, usual(*READ) | {
        **usual("data param seed"),
        "strategy": Row("sma_cross", instead="momentum"),
        "cases": Row("--cases 7"),
        "decided": Row("--decided open"),
        "tolerance": Row("--tolerance 1e-9"),
    }),
    "plan": ("--agent agent.toml --env env.toml --topology v5e-8" + FILE, FILES | {
        **usual("set agent env"),
        "data": Row("--data other.csv", JOB),
        "topology": Row("--topology v5e-16"),
        "largest": Row("--largest"),
        "manifest": Row("--manifest slurm", JOB),
        "run": Row("--run /runs/b", JOB),
        "image": Row("--image other", JOB),
        "out": Row("--out other.yaml", JOB),
    }),
    "watch": ("--run runs/run", {
        "run_dir": Row("--run runs/run2"),
        "journal": Row("--journal one.db"),
        "rules": Row("--rules rules.toml"),
        "prometheus": Row("--prometheus 9099"),
        "every": Row("--every 7"),
        "once": Row("--once"),
    }),
    "dashboard": ("--journal one.db", {
        **usual("journal"),
        "root": Row("--root .", instead="--journal one.db"),
        "host": Row("--host localhost"),
        "port": Row("--port 8333"),
        "expose": Row("--expose two", "--host 0.0.0.0 --token-file token --expose one"),
        "token_file": Row("--token-file token"),
    }),
    "doctor": ("--agent agent.toml" + FILE, FILES | {
        **usual("agent data"),
        "coordinator": Row("--coordinator 10.0.0.1:80"),
    }),
}  # fmt: skip
ROWS = [(command, option) for command, (_, rows) in OPTIONS.items() for option in rows]


def options_of(command):
    """The `dest` of each option of a command, but for those that print."""
    commands = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    found = (a for a in commands.choices[command]._actions if a.dest != "help")
    return {action.dest for action in found if not PRINTS & {*action.option_strings}}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_table_has_a_row_for_each_option_and_an_option_for_each_row(command):
    assert {*OPTIONS[command][1]} == options_of(command)


@pytest.mark.drawn(len(ROWS) // 24)
@pytest.mark.parametrize(("command", "option"), ROWS, ids=[".".join(row) for row in ROWS])
def test_an_option_changes_what_is_done(command, option, folder, monkeypatch):
    base, rows = OPTIONS[command]
    row = rows[option]
    if row.base in WHOLE:
        usual, words = row.base, row.instead or None
    elif row.base and row.instead in base and row.instead:  # the base takes its place
        usual, words = base.replace(row.instead, row.base), None
    else:
        usual, words = f"{base} {row.base}", row.instead or None
    other = f"{usual} {row.words}" if words is None else usual.replace(words, row.words)
    code, before, error = done(folder, f"{command} {usual}", monkeypatch, row.after)
    assert row.needed in error if row.needed else code == 0, error
    code, found, error = done(folder, f"{command} {other}", monkeypatch, row.after)
    if row.refused:
        assert code in (1, 2) and row.refused in error
        return
    assert code == 0, error
    assert found != before, f"{other}: changes nothing"


@pytest.mark.heavy
@pytest.mark.parametrize("command", COMMANDS)
def test_without_an_option_a_command_does_the_same_twice(command, folder, monkeypatch):
    words = f"{command} {OPTIONS[command][0]}"
    first, second = (done(folder, words, monkeypatch, False)[:2] for _ in range(2))
    assert first == second


ONE = f"train {AGENT} --run new"


TRAIN, REPLAYED = f"{ONE}{FILE}", f"paper {RULE} {REPLAY}"


SWEPT = f"sweep {RULE} --grid lookback=5{FILE}"


# Commands and options that lack something they need.
IDLE = {
    "board rows.jsonl": "--agent nano | --seed 5 | --name mine | --allow-code | --python p"
    " | --agent-seconds 9",
    TRAIN: "--heartbeat 5 | --initialization-timeout 5",
    ONE.replace("env.toml", "ou_mid"): "--symbol X",
    f"plan {AGENT} --topology v5e-8".replace("env.toml", "ou_mid"): "--symbol X",
    "doctor --agent agent.toml": "--symbol X",
    f"export {EXPORT}": "--symbol X | --codebook-seed 5",
    f"backtest {RUN}{FILE}": "--trials elsewhere | --param lookback=7 | --env env2.toml",
    f"backtest {RULE}{FILE}": "--force-agent | --allow-code | --seed 1 | --steps 3",
    SWEPT: "--seed 5 | --method halton",
    f"walkforward {WALK}": "--seeds 4 | --seed 4 | --set learner.discount=0.9 | --metric calmar"
    " | --set env.short=false | --steps 9 | --warm-start | --deploy runs/run",
    f"walkforward {WALKED}": "--param lookback=7 | --metric calmar",
    REPLAYED: "--force-agent | --allow-code | --seed 1 | --warmup 600",
    REPLAYED.replace("replay:bars.csv", "alpaca:SPY"): "--speed 5",
    "journal verify one.db": "--seed 1 | --force-agent | --allow-code | --param a=1 | "
    "--env env2.toml | " + " | ".join(TRADE.values()),
    f"journal replay one.db {RULE}": "--force-agent | --seed 1",
    f"journal replay one.db {RUN}": "--env env2.toml | --param a=1",
    "runs list runs": "--yes",
    f"demo {AGENT} --resume runs/run": "--out elsewhere",
    "watch --run runs/run --once": "--every 7 | --prometheus 9099",
    "prove ou_mid --agent nano": "--python python3 | --allow-code | --agent-seconds 9",
}


@pytest.mark.drawn(8)
@pytest.mark.parametrize(
    ("words", "idle"), [(words, one) for words, more in IDLE.items() for one in more.split(" | ")]
)
def test_an_option_without_effect_beside_the_others_is_refused(words, idle, folder, monkeypatch):
    code, (calls, written), error = done(folder, f"{words} {idle}", monkeypatch, False)
    assert code == 2 and not calls and not written
    (line,) = error.splitlines()
    said = "has no effect without", "name it with --", "is about a bar file; give --data"
    assert idle.split()[0] in line and any(each in line for each in said), line
