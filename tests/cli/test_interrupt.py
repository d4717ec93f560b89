"""Ctrl-C stops with all saved, the second at once; the same command goes on."""

import os
import signal
import subprocess
import sys
import time

import pytest
from tiny import STEPS_PER_UPDATE

from nca_trader.cli import stop_on_signal
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


def start(root, arguments):
    env = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.Popen(
        [sys.executable, "-m", "nca_trader", *arguments],
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
    assert said.code == 2 and "no checkpoint yet; give the command that began it" in said.err

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
