"""A mistyped name, a file that is not there or a value out of range is refused in one line.

Names, files and options without an effect do not wait for jax.
"""

import json
import os
import subprocess
import sys

import pytest

from nca_trader.cli import COMMANDS

# Runs each command in turn; without jax, importing it is an error that no command catches.
PROGRAM = """
import contextlib, io, json, sys

class NoJax:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib"):
            raise RuntimeError("jax was imported")

sys.meta_path.insert(0, NoJax())
from nca_trader.cli import main

for words in json.loads(sys.argv[1]):
    said, printed = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
        except RuntimeError as error:
            code = str(error)
    print(json.dumps([code, said.getvalue(), printed.getvalue()]))
"""
TRAIN = "train --env index_daily --agent nano --run new "
PLAN = "plan --agent nano --topology v5e-8 "
WALK = "walkforward --strategy momentum --train 100 --test 10 "
TUNE = "tune --env index_daily --agent nano --folder new "
REPLAY = "paper --run run --feed replay:bars.csv --journal j.db "
# What is typed (`run` is an empty run folder, bars.csv an empty file), and what is said.
CASES = (
    ("train --env index_dayly --agent nano --run new", "did you mean 'index_daily'?"),
    ("train --env index_daily --agent nanno --run new", "did you mean 'nano'?"),
    (TRAIN + "--set policy.chanels=3", "chanels is not a known key; did you mean 'channels'?"),
    (TRAIN + "--set env.comission=3", "comission is not a known key"),
    (TRAIN + "--data nowhere.csv", "nowhere.csv: D001 no such file. Check the path."),
    (TRAIN + "--steps 0", "--steps: 0 is not a whole number of at least 1"),
    (TRAIN + "--seed=-1", "--seed: -1 is not a whole number from 0"),
    (TRAIN + "--devices 0", "devices=0 is below its least value"),
    (TRAIN + "--until 05/06/2006", "--until 05/06/2006 may mean two days"),
    ("presets show nanno", "did you mean 'nano'?"),
    ("presets copy nano", "write `presets copy NAME TO`"),
    ("config show", "give --env, --agent or both"),
    ("config show --agent nanno", "did you mean 'nano'?"),
    ("init bars.csv", "bars.csv"),
    ("dashboard --root nowhere", "nowhere: there is no such folder"),
    ("demo --agent nanno", "did you mean 'nano'?"),
    ("demo --steps 0", "--steps: 0 is not"),
    ("prove ou_mit", "did you mean 'ou_mid'?"),
    ("prove --agent nanno", "did you mean 'nano'?"),
    ("prove ou_mid --steps 0", "--steps: 0 is not"),
    ("prove ou_mid --out x.pdf", "--out x.pdf: write to a name that ends in .html or .md or .png"),
    ("board rows.jsonl --out x.pdf", "--out x.pdf: write to a name that ends in .md or .json"),
    ("board verify rows.jsonl --agent nanno", "did you mean 'nano'?"),
    ("sweep --strategy sma_cross --grid fast=5:10:1 --sample 0", "--sample: 0 is not"),
    (WALK + "--warm-start", "--warm-start has no effect without --agent"),
    (WALK + "--out x.xlsx", "--out x.xlsx: write to a name that ends in"),
    (
        TUNE + "--space learner.discount=0.9:0.99 --trials 0",
        "--trials: 0 is not a whole number of at least 1",
    ),
    ("trials nowhere", "nowhere: there is no such folder"),
    ("runs list run run", "list takes one folder; got 2"),
    ("runs rm nowhere", "nowhere: not a run folder"),
    ("runs rm", "rm needs the folder of a run"),
    ("backtest --run run --steps 0", "--steps: 0 is not"),
    ("backtest --strategy momentum --env index_dayly", "did you mean 'index_daily'?"),
    ("backtest --strategy momentum --data nowhere.csv", "nowhere.csv: D001 no such file."),
    ("backtest --strategy momentum --start 5.6.2006", "--start 5.6.2006 may mean two days"),
    ("backtest --strategy momentum --seed 1", "--seed has no effect without --run"),
    ("backtest --strategy momentum --steps 2", "--steps has no effect without --run"),
    ("backtest --run run --env index_daily", "--env has no effect without --strategy"),
    ("backtest --strategy momentum --repair sort", "--repair is about a bar file; give --data"),
    (TRAIN + "--columns close=x", "--columns is about a bar file; give --data FILE"),
    ("backtest --strategy momentum --stop soon", "--stop soon is not a date"),
    ("backtest --strategy momentum --until soon", "--stop soon is not a date"),
    (TRAIN + "--stop soon", "--until soon is not a date"),
    (TRAIN + "--set env.reward=mine", "reward='mine' is not known; "),
    (TRAIN + "--set policy.kind=mine.Mine", "or 'module:name' of your own"),
    ("backtest --strategy momentum --out x.xlsx", "--out x.xlsx: write to a name that ends in"),
    ("backtest --strategy momentum --out no/x.csv", "--out no/x.csv: there is no folder no"),
    ("export --run run --out a.nca --bits 5", "--bits: invalid choice: 5 (choose from 4, 8, 16)"),
    (
        "export --run run --out a.nca --min-agreement 2",
        "--min-agreement: 2 is not a number in [0, 1]",
    ),
    ("export --run run --out a.nca --data nowhere.csv", "nowhere.csv: D001 no such file."),
    (REPLAY.replace("bars.csv", "nowhere.csv"), "nowhere.csv: D001 no such file."),
    (REPLAY.replace("replay:", ""), "--feed bars.csv is not a feed"),
    (REPLAY.replace("j.db", "no/j.db"), "no: there is no such folder"),
    (REPLAY + "--broker alpaca", "--broker alpaca: a replay's orders go to the simulated exchange"),
    (REPLAY + "--capital 0", "--capital: 0 is not a number in (0, inf)"),
    (REPLAY + "--start 05/06/2006", "--start 05/06/2006 may mean two days"),
    ("journal verify nowhere.db", "nowhere.db"),
    ("data check nowhere.csv", "nowhere.csv: D001 no such file."),
    ("leakcheck momentum --data nowhere.csv", "nowhere.csv: D001 no such file."),
    ("leakcheck momentum --data bars.csv --cases 0", "--cases: 0 is not"),
    (
        "leakcheck momentum --data bars.csv --tolerance=-1",
        "--tolerance: -1 is not a number in [0, inf)",
    ),
    (PLAN.replace("nano", "nanno"), "did you mean 'nano'?"),
    (PLAN + "--env index_dayly", "did you mean 'index_daily'?"),
    (PLAN + "--data nowhere.csv", "nowhere.csv: D001 no such file."),
    (TRAIN + "--profile 0", "--profile: 0 is not a whole number of at least 1"),
    ("watch --run run --every 0", "--every: 0 is not a number in [0.05, inf)"),
    ("doctor --agent nanno", "did you mean 'nano'?"),
)


@pytest.fixture(scope="module")
def ends(tmp_path_factory, root):
    """All cases run once: by what is typed, the exit code and what was printed."""
    folder = tmp_path_factory.mktemp("cheap")
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text("{}")
    (folder / "bars.csv").write_text("")
    words = json.dumps([typed.split() for typed, _ in CASES])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, words],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    lines = map(json.loads, done.stdout.splitlines())
    return {typed: end for (typed, _), end in zip(CASES, lines, strict=True)}


@pytest.mark.parametrize(("typed", "says"), CASES)
def test_it_is_refused_before_jax_is_imported(ends, typed, says):
    code, said, printed = ends[typed]
    assert code == 2, said or code
    assert len(said.splitlines()) == 1 and says in said and not printed, said


def test_every_command_has_a_case():
    asks_only = {"halt", "resume"}  # of a journal, which only the library reads
    assert {typed.split()[0] for typed, _ in CASES} == set(COMMANDS) - asks_only
