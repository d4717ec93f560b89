"""First answers are timed in new processes, with their own cache of programs."""

import pytest

from benchmarks import cold
from nca_trader.errors import StateError

JOB = cold.Job(
    "writes its cache", "import os; open(os.environ['XDG_CACHE_HOME'] + '.txt', 'a').write('x')"
)


@pytest.mark.parametrize("warm", [False, True])
def test_a_job_is_run_by_new_processes_in_new_folders(monkeypatch, warm):
    lines = []
    monkeypatch.setattr(cold, "PROCESSES", 2)
    real = cold.timed

    def timed(line, folder, cache=None):
        lines.append((folder, cache))
        return real(line, folder, cache)

    monkeypatch.setattr(cold, "timed", timed)
    seconds, cpu = cold.measured(JOB, warm)
    assert 0.0 < cpu and 0.0 < seconds
    folders, caches = zip(*lines, strict=True)
    assert len(set(folders)) == 2 + warm and len(set(caches)) == (1 if warm else 2)


def test_a_job_that_fails_says_how():
    with pytest.raises(StateError, match="no such thing"):
        cold.timed(cold.command("raise SystemExit('no such thing')"), None)


def test_every_job_is_a_command_of_today():
    """The README's script and each command line are taken as they are."""
    from nca_trader.cli.command import build_parser

    for job in cold.JOBS:
        for does in filter(None, (job.does, job.before)):
            if isinstance(does, str):
                compile(does, job.name, "exec")
            else:
                build_parser().parse_args(does)


def test_the_bars_of_the_scripts_are_bars():
    scope = {}
    exec(cold.WALK, scope)
    assert scope["walk"](50, 2, "h").close.shape == (50, 2)
