"""A command that we print can be pasted back into a shell: it is complete, and it is quoted."""

import argparse
import functools
import re
import shlex

import pandas as pd
import pytest
from sources import literals
from sources import parsed as parsed_file

import nca_trader
from nca_trader.cli import build_parser, demo, prove
from nca_trader.cli.options import again, write_command
from nca_trader.evaluate import export
from nca_trader.optimum import prove as prove_runs
from nca_trader.scale.doctor import examine
from nca_trader.scale.facts import Facts


@pytest.fixture
def mine(tiny, tmp_path):
    """The tiny run where names hold spaces; its bars need `--columns`."""
    mine = tiny.copy(tmp_path / "my files")
    frame = pd.read_csv(mine.data).rename(columns={"close": "last px"})
    frame.to_csv(mine.data, index=False)
    return mine


COLUMNS = {"columns": "close=last px", "dates": "dmy"}


def options(**given):
    return [f"--{name}={value}" for name, value in given.items()]


def printed(text, start="nca-trader "):
    """The words of the command that `text` shows in backticks, without the program's name."""
    return shlex.split(re.search(f"`({start}[^`]*)`", text)[1])[1:]


PARSER = build_parser()


def parsed(words):
    return vars(PARSER.parse_args(words))


COMMANDS = next(a.choices for a in PARSER._actions if a.dest == "command")
SUBS = {  # e.g. `verify` of `journal`
    name: next(({*a.choices} for a in parser._actions if a.choices and not a.option_strings), set())
    for name, parser in COMMANDS.items()
}
# A command in code marks is named with the program, or by itself with its second word.
NAMED = re.compile(r"nca-trader (?!that )([a-z]+)(?: ([a-z|]+))?|`([a-z]+) ([a-z|]+)(?:`| [-A-Z{])")
OLD = re.compile(r"version (\d+\.\d+\.\d+)|nca[-_]trader[-: ]v?(\d+\.\d+\.\d+)")


@functools.cache
def said(root):
    """Each text that the package says, and each page but the changelog, with where it is."""
    texts = []
    for path in sorted((root / "nca_trader").rglob("*.py")):
        for line, text in literals(parsed_file(path)):
            texts.append((f"{path.relative_to(root)}:{line}", text))
    for path in [*root.glob("*.md"), *root.glob("docs/**/*.md"), root / "llms.txt"]:
        if path.name != "CHANGELOG.md":
            texts.append((str(path.relative_to(root)), path.read_text()))
    return texts


def test_every_command_that_a_message_or_a_page_names_exists(root):
    named, gone = set(), []
    for where, text in said(root):
        for first, second, bare, of_bare in NAMED.findall(text):
            name, more = first or bare, second or of_bare
            if bare and bare not in SUBS:  # not a command, e.g. `make test`
                continue
            named.add(name)
            there = name in SUBS and (not SUBS[name] or {*more.split("|")} <= {"", *SUBS[name]})
            gone += [] if there else [f"{where}: {name} {more}"]
    assert gone == [] and len(named) > 15


def test_every_version_that_a_message_or_a_page_names_was_one(root):
    """Of this package: none later than its own, and that of a wheel is its own."""
    known = re.findall(r"^## ([\d.]+) ", (root / "CHANGELOG.md").read_text(), re.M)
    assert known[0] == nca_trader.__version__ and len(known) > 1
    for where, text in said(root):
        for ours, packed in OLD.findall(text):
            if where.startswith("docs") and ours:  # of another package
                continue
            assert (ours or packed) in known, where
        for wheel in re.findall(r"nca_trader-([\d.]+)-py3", text):
            assert wheel == known[0], where


def test_what_train_prints_backtests_the_run_on_the_same_file(command, mine):
    said = command(*mine.train_command(mine.path), *options(**COLUMNS))
    assert said.code == 0, said.err
    words = printed(said.out)
    assert words[0] == "backtest" and f"--data={mine.data}" not in words
    assert parsed(words)["data"] == str(mine.data)
    again = command(*words, "--quiet")  # a slow machine shows progress
    assert again.code == 0 and again.err == "", again


@pytest.mark.heavy
def test_what_export_prints_reads_the_file_that_it_wrote(command, mine, monkeypatch):
    monkeypatch.setattr(export, "latencies", lambda *_: [{"stream_us": 1.0, "window_us": 1.0}] * 2)
    out = mine.folder / "my agent.nca"
    given = options(run=mine.path, out=out, data=mine.data, bits=16, **COLUMNS)
    said = command("export", *given)
    assert said.code == 0, said.err
    assert command(*printed(said.out)).code == 0


def test_what_prove_prints_repeats_its_first_seed(command, monkeypatch):
    monkeypatch.setattr(prove_runs, "prove", lambda *_, **__: [])
    monkeypatch.setattr("nca_trader.optimum.board.write_board", lambda *_: None)
    given = ["prove", "ou_mid", "sine", "--set=learner.num_epochs=2", "--set=num_seeds = 1"]
    said = command(*given, "--steps=5", "--alone", "--out=a b.html")
    again = parsed(printed(said.out))
    assert again.pop("seed") in map(int, re.findall(r"\d+", said.out.partition(";")[0]))
    first = parsed([*given, "--steps=5", "--alone", "--out=a b.html"])
    first.pop("seed")
    assert again == first
    assert prove.NUM_SEEDS == len(re.findall(r"\d+", said.out.partition(";")[0]))


def test_what_an_interrupted_demo_prints_goes_on_with_it(tmp_path):
    given = {"env": "my env.toml", "agent": "nano", "steps": 7, "seed": 3}
    typed, path = options(**given, out="mine"), tmp_path / "runs of mine" / "demo"
    for more, panel in (([], None), (["--panel"], ""), (["--panel", "a b.csv"], "a b.csv")):
        args = PARSER.parse_args(["demo", *typed, *more])
        again = parsed(shlex.split(demo.command_of(args, resume=path))[1:])
        assert {name: again[name] for name in given} == given
        assert (again["resume"], again["out"], again["panel"]) == (str(path), "runs", panel)
        once_more = parsed(shlex.split(demo.command_of(args))[1:])
        assert once_more == parsed(["demo", *typed, *more])


def test_what_the_doctor_prints_checks_the_same_file():
    facts = Facts(data="my bars.csv", data_error="no", reading=("--columns=close=last px",))
    finding = next(each for each in examine(facts) if each.name == "data")
    again = parsed(printed(finding.remedy))
    assert (again["command"], again["file"]) == ("data", "my bars.csv")
    assert again["columns"] == "close=last px"


def test_every_kind_of_value_survives_a_shell():
    line = write_command("train", env="a b.toml", steps=None, seed=-1, set=["x='y z'", "q=$HOME"])
    words = ["nca-trader", "train", "--env", "a b.toml", "--seed=-1"]
    assert shlex.split(line) == [*words, "--set", "x='y z'", "--set", "q=$HOME"]


@pytest.mark.parametrize(
    "needed",
    ["backtest --strategy=momentum", "walkforward --agent=nano", "sweep --strategy=x --grid=y=1"],
)
def test_the_command_of_a_page_has_every_option_that_was_given(needed):
    needed = needed.split()
    for option in COMMANDS[needed[0]]._actions:
        if option.dest in ("help", "json", "quiet", "strategy", "agent", "run_dir"):
            continue
        value = [] if option.nargs == 0 else [str(next(iter(option.choices or ["7"])))]
        given = parsed([*needed, option.option_strings[-1], *value])
        assert parsed(shlex.split(again(argparse.Namespace(**given)))[1:]) == given, option.dest
