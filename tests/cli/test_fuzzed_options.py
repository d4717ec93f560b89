"""Made-up options, TOML and Python values: an error is one line and never a traceback.

The short form parses and checks; the long form, marked slow, runs whole commands.
"""

import argparse
import dataclasses
import importlib
import os
import random
import sys

import pytest

import nca_trader as nca
from nca_trader.cli import COMMANDS, build_parser, main
from nca_trader.config import AgentConfig, EnvConfig, LearnerConfig, PolicyConfig
from nca_trader.config.toml import from_toml_text, literal, preset_folder, to_toml
from nca_trader.errors import NcaTraderError

SEED = int(os.environ.get("NCA_TRADER_FRESH", "7"))
# No URL: a whole command would ask the network.
TEXTS = """
nan|inf|-inf|0|-1|1|2|3.5|1e309|-0.0|99999999999999999999|0x10|1_0|true|none|[]|[1]|{}|{a=1}|"
'|'a|=|a=|=b|a=b|env.x=1|policy.kind=mine:f|learner.steps=1e9|a.b.c=1|costs=3|env.costs=3
2013-01-01|2013-13-40|2013|05/06/2013|:|2013-01-01:|:2014|2013-01-01:2012|mine|mine:|mine:f
mine:f(|mine:f(a=1)|mine:f(1)|a b|../x|/|~|.|..|no/x.html|x.html|x.csv|x.py|x.py:f|bars.csv
feature:|feature:rsi|feature:no|state:x|nano|index_daily|momentum|sma_cross|sort|sort,srot|,
time=1|time=1+2,close=*|1min|7h|0d|-3d|fast=5:10:1|fast=1,2|fast=a|lookback=1:1000000000
tcp://x|local|4|replay:x|replay:bars.csv|alpaca:|alpaca:SPY|ccxt:|ccxt:a:b|simulated:
simulated:seed=x|v5e-8|v9|ä|\N{SNOWMAN}|max_drawdown=0.2|max_drawdown=a|max_drawdwn=1|close
open|next_open|rebalance|\x1b[2J|f32|sobol|rolling|sharpe|ou|ou_mid|j.db|alpaca
SPY,QQQ|ccxt:nonsuch|out.csv|optimizer.learning_rate=1e-4:1e-2:log|policy.kind=mlp,gru|1d|new
"""
VALUES = [*filter(None, TEXTS.replace("\n", "|").split("|")), "", " ", "a" * 3000]
# Whole commands that need no jax, or little of it, and so run in the short form too.
BRIEF = ("config", "data", "halt", "init", "journal", "presets", "resume", "runs", "trials")
LONG = {"demo", "dashboard", "watch"}
SUBPARSERS = argparse._SubParsersAction
PARSERS = next(a.choices for a in build_parser()._actions if isinstance(a, SUBPARSERS))


def made_up(rng, command):
    """Words for a command: what it needs, some of its options, values that may fit."""
    words = [command]
    for action in PARSERS[command]._actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        if not (action.required or rng.random() < 0.3):
            continue
        choices = [str(c) for c in action.choices or ()]
        value = rng.choice(choices if choices and rng.random() < 0.9 else VALUES)
        if action.type is not None and rng.random() < 0.7:
            value = rng.choice(["0", "1", "2", "10", "-1", "0.5", "1e-3", "99999999999999999999"])
        if not action.option_strings:
            words.append(value)
        elif action.nargs == 0:
            words.append(action.option_strings[-1])
        else:
            words.append(f"{action.option_strings[-1]}={value}")
    return words


def refused(run, *about):
    """Run it; its error, if any, is the package's own or argparse's."""
    try:
        return run()
    except SystemExit as error:
        return error.code
    except NcaTraderError as error:
        assert str(error), about
    except Exception as error:
        raise AssertionError(f"{about}: {type(error).__name__}: {error}") from error


@pytest.fixture
def empty(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = [*sys.path]
    nca.write_bars(nca.sample_bars("sp500")[:60], "bars.csv")
    (tmp_path / "j.db").write_text("no journal")
    yield
    assert sys.path == before


def cases(command, number):
    rng = random.Random(f"{SEED}{command}")
    return [made_up(rng, command) for _ in range(number)]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.few(12)
def test_made_up_options_are_refused_in_words(command, empty, monkeypatch):
    module = importlib.import_module(f"nca_trader.cli.{COMMANDS[command][0]}")
    # Everything but the command itself: parsing, presets, files, ranges.
    monkeypatch.setattr(module, f"run_{command}", lambda args: None)
    codes = [refused(lambda w=words: main(w), words) for words in cases(command, 15)]
    # Of these every value is a text, or a file that the command itself looks for.
    texts = ("doctor", "init", "presets", "halt", "resume")
    assert {*codes} <= {0, 2, 4} and (2 in codes or command in texts)


@pytest.mark.parametrize("command", BRIEF)
def test_brief_commands_with_made_up_options_end_in_words(command, empty, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda prompt: "n")
    for words in cases(command, 10):
        refused(lambda w=words: main(w), words)


def mutated(rng, text):
    """A preset with a few of its values, keys or lines changed."""
    lines = text.splitlines()
    for _ in range(1 + (rng.random() < 0.3)):
        at = rng.randrange(len(lines))
        key, equals, value = lines[at].partition("=")
        what = rng.random()
        if equals and what < 0.7:
            given = rng.choice(VALUES)
            bare = rng.random() < 0.7
            lines[at] = f"{key}= {given if bare else literal(given)}"
        elif equals and what < 0.8:
            lines[at] = f"{key.strip()}{rng.choice('xyz')} ={value}"
        elif what < 0.9:
            lines.insert(at, lines[rng.randrange(len(lines))])
        else:
            lines[at] = rng.choice(VALUES)
    return "\n".join(lines)


@pytest.mark.parametrize(("cls", "folder"), [(EnvConfig, "envs"), (AgentConfig, "agents")])
def test_a_damaged_preset_is_refused_in_words(cls, folder):
    rng = random.Random(f"{SEED}{folder}")
    texts = [to_toml(cls())]
    texts += [p.read_text() for p in sorted(preset_folder(folder).glob("*.toml"))]
    outcomes = []
    for _ in range(200):
        text = mutated(rng, rng.choice(texts))

        def run(text=text):
            outcomes.append(0)
            config = from_toml_text(cls, text, "mine.toml")
            assert from_toml_text(cls, to_toml(config), "again.toml") == config
            outcomes[-1] = 1

        refused(run, text)
    assert 10 < sum(outcomes) < 190  # neither all of them pass nor none does


@pytest.mark.heavy
@pytest.mark.parametrize("cls", [EnvConfig, PolicyConfig, LearnerConfig])
def test_values_of_any_type_are_refused_in_words(cls):
    rng = random.Random(f"{SEED}{cls.__name__}")
    values = [
        None, True, 0, -1, 1.5, float("nan"), "", "a", (), (1,), ("a",), [], {}, object(), int, len,
        b"x", 10**30,
    ]  # fmt: skip
    names = [field.name for field in dataclasses.fields(cls)]
    for _ in range(400):
        given = {name: rng.choice(values) for name in rng.sample(names, rng.randint(1, 3))}
        refused(lambda g=given: cls(**g), given)


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted({*COMMANDS} - LONG))
def test_whole_commands_with_made_up_options_end_in_words(command, empty, monkeypatch):
    monkeypatch.setenv("NCA_TRADER_NO_CACHE", "1")
    for words in cases(command, 60):
        refused(lambda w=words: main(w), words)
