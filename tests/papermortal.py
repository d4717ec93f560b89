"""Runs `nca-trader paper` in processes that die at a chosen call: one import, a fork for each.

Lines of JSON on stdin: {"argv", "fatal", "log", "env"}. `fatal` is null, a number (the call of the
journal or the exchange that is the last), "before:KIND" or "after:KIND" of an event of the journal
that this process records as new, or [call, what]: "TERM", "TERM twice", "KILL", or "exchange" to
kill that.
The answer is a line: the exit code, below 0 for a signal.
"""

import json
import os
import pathlib
import signal
import sys
import warnings


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def act(what, argv):
    if what == "exchange":
        about = pathlib.Path(argv[argv.index("--journal") + 1] + ".exchange").read_text()
        return os.kill(json.loads(about)["pid"], signal.SIGKILL)
    if what == "KILL":
        return die()
    for _ in range(2 if what == "TERM twice" else 1):
        os.kill(os.getpid(), signal.SIGTERM)


def arm(fatal, argv):
    from nca_trader.paper.exchange_process import RemoteExchange
    from nca_trader.paper.journal import Journal

    calls, doomed = 0, False
    at, what = fatal if isinstance(fatal, list) else (fatal, "")

    def counted(owner, name):
        inner = getattr(owner, name)

        def call(*args, **kwargs):
            nonlocal calls
            for moment in range(2):
                calls += 1
                if calls == at:
                    act(what, argv) if what else die()
                if moment == 0:
                    found = inner(*args, **kwargs)
            return found

        setattr(owner, name, call)

    if not isinstance(fatal, str):
        for name in ("record", "commit", "_write_head"):
            counted(Journal, name)
        return counted(RemoteExchange, "_ask")
    when, kind = fatal.split(":")
    record, commit = Journal.record, Journal.commit

    def recorded(self, run, of, key, body, ts):
        nonlocal doomed
        query = "SELECT 1 FROM event JOIN series ON id = series "
        query += "WHERE run = ? AND kind = ? AND key = ?"
        new = of == kind and not self._db.execute(query, (run, of, key)).fetchone()
        if new and when == "before":
            die()
        doomed = doomed or new
        return record(self, run, of, key, body, ts)

    def committed(self):
        commit(self)
        if doomed and not self._db.in_transaction:
            die()

    Journal.record, Journal.commit = recorded, committed


def hasten():
    """Let waits take a twentieth of their time."""
    import time

    from nca_trader.paper import exchange_process
    from nca_trader.paper.clock import Clock

    Clock.sleep = lambda self, seconds: time.sleep(seconds / 20)
    Clock.monotonic = lambda self: time.monotonic() * 20
    exchange_process.subprocess.Popen = Forked
    exchange_process.STARTING = exchange_process.ENDING = 2000.0  # a hundred seconds


class Forked:
    """In place of `subprocess.Popen` of the exchange: a fork, as its import costs two seconds."""

    def __init__(self, command, stdout, **_):
        assert command[-1] == "nca_trader.paper.exchange_process"
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for old, new in ((reading, 0), (stdout.fileno(), 1), (stdout.fileno(), 2)):
                os.dup2(old, new)
            os.closerange(3, 4096)  # the journal's lock is not the exchange's
            from nca_trader.paper.exchange_process import main

            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            sys.stdin = open(0)
            try:
                os._exit(main())
            finally:
                os._exit(1)
        os.close(reading)
        self.stdin = open(writing, "wb")

    def poll(self):
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout=None):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def child(argv, fatal, log, env):
    import time

    os.environ.update(env)
    time.tzset()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(0)
    hasten()
    if fatal is not None:
        arm(fatal, argv)
    from nca_trader.cli import main

    code = 97
    try:
        code = main(argv)
    except SystemExit as end:
        code = end.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve():
    warnings.filterwarnings("ignore", message=".*fork.*")
    import nca_trader.agents.rules
    import nca_trader.cli
    import nca_trader.evaluate.subjects
    import nca_trader.evaluate.verdict
    import nca_trader.paper.live
    import nca_trader.runs.exported  # noqa: F401

    for line in sys.stdin:
        task = json.loads(line)
        pid = os.fork()
        if pid == 0:
            child(**task)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
