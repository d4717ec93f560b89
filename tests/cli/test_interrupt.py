"""Ctrl-C stops with all saved, the second at once; the same command goes on."""

import argparse
import importlib
import os
import signal
import subprocess
import sys
import time

import pytest
from tiny import STEPS_PER_UPDATE

from nca_trader.cli import COMMANDS, build_parser, main, stop_on_signal
from nca_trader.runs.manifest import Run


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


def start(root, arguments, folder=None):
    env = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.Popen(
        [sys.executable, "-m", "nca_trader", *arguments],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(what, process, seconds=500):
    deadline = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@pytest.mark.slow
def test_training_stops_saved_goes_on_and_stops_at_once_when_told_twice(
    command, tiny, tmp_path, root
):
    mine = tiny.copy(tmp_path / "t")
    run = mine.runs / "stopped"
    # Checkpoints far apart: the one that is there afterwards was saved because of the signal.
    arguments = [*mine.train_command(run, steps=10**8), "--set=checkpoint.every=0"]

    process = start(root, arguments)
    wait_for((run / "run.json").exists, process)
    # Both signals wait while it is stopped, so that the second comes before any update ends.
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        process.send_signal(number)
    out, err = process.communicate(timeout=500)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "interrupted; what was saved before stays" and out == ""
    assert "Traceback" not in err

    said = command("backtest", f"--run={run}", f"--data={mine.data}")
    assert (
        said.code == 2
        and "no checkpoint yet; by its record it was begun with this command" in said.err
    )

    process = start(root, arguments)
    metrics = run / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=500)
    assert process.returncode == 130, err
    assert "stopping after this update; once more stops at once" in err
    assert f"all is saved in {run}; the same command resumes" in out
    done = len(Run(run).metrics())
    assert [path.name for path in (run / "checkpoints").iterdir()] == [str(done)]

    steps = (done + 2) * STEPS_PER_UPDATE
    said = command(*mine.train_command(run, steps=steps), "--json")
    assert said.code == 0 and said.json["update"] == done + 2 and said.json["complete"] is True
    updates = [row["update"] for row in Run(run).metrics()]
    assert updates == list(range(1, done + 3))
