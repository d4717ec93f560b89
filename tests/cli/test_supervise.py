"""The supervisor starts again what died, and nothing else."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from nca_trader.errors import CheckFailed
from nca_trader.parallel import processes as module
from nca_trader.parallel.processes import Supervisor, free_port

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")

# Ends with the next code of the file, which it takes out; -N kills itself by signal N.
CHILD = """
import os, pathlib, sys
file = pathlib.Path(sys.argv[1])
code, *rest = map(int, file.read_text().split())
file.write_text(" ".join(map(str, rest)))
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""
WAITING = """
import signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
print("ready", flush=True)
while not asked:
    time.sleep(.01)
sys.exit(0)
"""


def supervised(tmp_path, codes, **options):
    """The exit code of a command that ends with these codes one after the other; what was said."""
    (tmp_path / "codes").write_text(" ".join(map(str, codes)))
    said = []
    command = [sys.executable, "-c", CHILD, str(tmp_path / "codes")]
    options = {"backoff": 0.0} | options
    return Supervisor(command, say=said.append, **options).run(), said


def test_what_died_is_started_again_until_it_is_done(tmp_path):
    code, said = supervised(tmp_path, [-signal.SIGKILL, 1, -signal.SIGABRT, 0])
    assert code == 0
    ends = [line for line in said if "ended" in line]
    assert ends == [
        "supervise: ended by SIGKILL; restart 1 of 10 in 0 s",
        "supervise: ended by exit code 1; restart 2 of 10 in 0 s",
        "supervise: ended by SIGABRT; restart 3 of 10 in 0 s",
    ]


@pytest.mark.parametrize("code", [2, 3, 4, 130])
def test_what_would_fail_again_is_not_started_again(tmp_path, code):
    found, said = supervised(tmp_path, [code, 0])
    assert found == code and len(said) == 1


def test_it_gives_up_with_one_line_after_so_many_restarts(tmp_path):
    with pytest.raises(CheckFailed, match=r"gave up after 2 restarts: .* by SIGKILL; see") as info:
        supervised(tmp_path, [-9, -9, -9, 0], restarts=2)
    assert "\n" not in str(info.value)


def test_a_start_that_lasts_ends_the_row_of_restarts(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "HEALTHY", 0.0)
    assert supervised(tmp_path, [-9, -9, -9, 0], restarts=1)[0] == 0


def test_each_restart_waits_twice_as_long_as_the_one_before(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(Supervisor, "_wait", lambda self, seconds: waits.append(seconds))
    supervised(tmp_path, [1] * 8 + [0], backoff=1.0)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


def test_when_one_of_several_dies_the_others_end_and_all_start_again(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GRACE", 0.2)
    script = tmp_path / "peer.py"
    # At the first start process 1 dies and process 0 would wait for ever; at the second both end.
    script.write_text(
        "import os, pathlib, sys, time\n"
        "mark = pathlib.Path(sys.argv[1] + sys.argv[-1].split('=')[1])\n"
        "again = mark.exists()\n"
        "mark.write_text(' '.join(sys.argv[2:]))\n"
        "if not again:\n"
        "    time.sleep(.2)\n"
        "    os.kill(os.getpid(), 9) if sys.argv[-1] == '--process=1' else time.sleep(100)\n"
    )
    said = []
    command = [sys.executable, str(script), f"{tmp_path}/"]
    assert Supervisor(command, processes=2, backoff=0.0, say=said.append).run() == 0
    assert [line.startswith("supervise: started as process") for line in said] == [
        True,
        False,
        True,
    ]
    words = [(tmp_path / str(number)).read_text().split() for number in (0, 1)]
    assert words[0][:2] == words[1][:2] and words[0][1] == "--processes=2"
    assert words[0][0].startswith("--coordinator=127.0.0.1:")


def test_a_free_port_can_be_listened_on():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


def test_a_signal_is_handed_on_and_nothing_is_started_again(root):
    command = [sys.executable, "-m", "nca_trader", "supervise", "--"]
    process = subprocess.Popen(
        [*command, sys.executable, "-c", WAITING],
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=500)
    assert process.returncode == 0 and err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--restarts", "3"], "give a command after --"),
        (["--", "/no/such/command"], "/no/such/command: is not a command here"),
        (["--processes", "0", "--", "true"], "--processes 0: give 0 or more of the first two"),
    ],
)
def test_what_cannot_be_started_is_said_in_one_line(command, args, says):
    said = command("supervise", *args)
    assert said.code == 2 and says in said.err and len(said.err.splitlines()) == 1


def test_the_commands_own_exit_code_and_options_go_through(command):
    child = "import sys; sys.exit(4 if sys.argv[1:] == ['--json', '--restarts=7'] else 0)"
    said = command("supervise", "--", sys.executable, "-c", child, "--json", "--restarts=7")
    assert said.code == 4 and said.out == ""


def test_this_installation_is_started_where_its_scripts_are_not_on_the_path(command, monkeypatch):
    started = []

    class Started(Supervisor):
        def run(self):
            started.append(self._command)
            return 0

    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(module, "Supervisor", Started)
    assert command("supervise", "--", "nca-trader", "train").code == 0
    assert started == [[sys.executable, "-P", "-m", "nca_trader", "train"]]


# Starts a process of its own, says both numbers, and waits; ends by signals as most programs do.
FAMILY = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "1000"])
print(os.getpid(), child.pid, flush=True)
sys.exit(int(sys.argv[1])) if len(sys.argv) > 1 else child.wait()
"""


# Starts what follows so that it hears a SIGHUP: these tests may run under nohup themselves.
HEARD = (
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    "os.execvp(sys.argv[1], sys.argv[1:])",
)


def lives(pid):
    """Whether the process runs; a zombie does not."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the second: it ended between open and read
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def ended(pid, seconds=10.0):
    end = time.monotonic() + seconds
    while lives(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not lives(pid)


@pytest.fixture
def family(root):
    """Starts `supervise` over a family; gives the supervisor, the command's pid and its child's."""
    started, pids = [], []

    def start(*before):
        process = subprocess.Popen(
            [*HEARD, *before, sys.executable, "-m", "nca_trader", "supervise", "--",
             sys.executable, "-c", FAMILY],
            env={**os.environ, "PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )  # fmt: skip
        started.append(process)
        pids.extend(map(int, process.stdout.readline().split()))
        return process, *pids[-2:]

    yield start
    for pid in [*pids, *(process.pid for process in started)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in started:
        process.communicate()


@linux
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_supervisor_that_ends_leaves_nothing_running(family, number):
    process, command, child = family()
    process.send_signal(number)
    assert ended(command)
    assert process.wait(10) == (-9 if number == signal.SIGKILL else 128 + own(number))
    # Of a killed supervisor's command only the process that it started can be ended.
    assert number == signal.SIGKILL or ended(child)


def own(number):
    """What a command is sent for a signal of the supervisor's: train saves at a SIGTERM."""
    return signal.SIGTERM if number == signal.SIGHUP else number


@linux
def test_under_nohup_a_terminal_that_closes_ends_nothing(family):
    process, command, child = family("nohup")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None and lives(command) and lives(child)
    process.send_signal(signal.SIGTERM)
    assert ended(command) and ended(child)


@linux
def test_a_supervisor_that_died_before_its_child_asked_for_the_signal_starts_nothing(tmp_path):
    mark = tmp_path / "mark"
    command = module.bound(["touch", str(mark)], parent=2**22 + 1)  # above every pid
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not mark.exists()
    assert subprocess.run(module.bound(["touch", str(mark)]), check=False).returncode == 0
    assert mark.exists()


@linux
def test_what_a_command_left_running_is_ended_before_the_next_start(capfd, monkeypatch):
    monkeypatch.setattr(module, "GRACE", 1.0)
    command = [sys.executable, "-c", FAMILY, "1"]
    with pytest.raises(CheckFailed, match="gave up after 1 restarts"):
        Supervisor(command, restarts=1, backoff=0.0).run()
    pids = [int(word) for line in capfd.readouterr().out.splitlines() for word in line.split()]
    assert len(pids) == 4 and not any(map(lives, pids))


def test_a_command_that_cannot_be_run_is_said_in_one_line(tmp_path, capfd):
    program = tmp_path / "program"
    program.write_text("no program")
    program.chmod(0o755)
    said = []
    assert Supervisor([str(program)], say=said.append).run() == 2
    assert len(said) == 1 and capfd.readouterr().err == f"{program}: Exec format error\n"
