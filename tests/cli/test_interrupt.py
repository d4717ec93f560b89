"""Ctrl-C stops with all saved, the second at once; the same command goes on."""

import argparse
import importlib
import signal
import time

import pytest

from nca_trader.cli import COMMANDS, build_parser, main, stop_on_signal


def test_the_first_signal_asks_and_the_second_insists(capsys):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), stop_on_signal("bar") as stop:
        assert not stop()
        signal.raise_signal(signal.SIGTERM)
        assert stop()
        assert "stopping after this bar; once more stops at once" in capsys.readouterr().err
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def needed(name):
    """The words that a command cannot do without."""
    commands = next(action.choices for action in build_parser()._actions if action.choices)
    words = []
    for action in commands[name]._actions:
        if action.required and action.option_strings:
            words.append(f"{action.option_strings[-1]}=1")
        elif action.required and action.nargs != argparse.REMAINDER:
            words.append(next(iter(action.choices or ["1"])))
    for group in commands[name]._mutually_exclusive_groups:
        words += [f"{group._group_actions[0].option_strings[0]}=1"] * group.required
    return words


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.few(8)
def test_every_command_that_is_interrupted_ends_with_130(name, number, monkeypatch, capsys):
    module = importlib.import_module(f"nca_trader.cli.{COMMANDS[name][0]}")

    def interrupted(args):
        signal.raise_signal(number)
        time.sleep(0)  # a handler runs between two instructions
        return {"done": True}

    monkeypatch.setattr(module, f"run_{name}", interrupted)
    monkeypatch.setattr("nca_trader.cli.checks.check", lambda args: None)
    before = signal.getsignal(signal.SIGTERM)
    assert main([name, "--json", *needed(name)]) == 130
    said = capsys.readouterr()
    assert said.err == "interrupted; what was saved before stays\n" and said.out == ""
    assert signal.getsignal(signal.SIGTERM) is before
