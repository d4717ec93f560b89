"""Runs `nca-trader paper` in processes that die at a chosen call: one import, a fork for each.

Lines of JSON on stdin: {"argv", "fatal", "log"}. `fatal` is null, a number (the call of the journal
or the exchange that is the last), or "before:KIND" or "after:KIND" of an event of the journal that
this process records as new. The answer is a line: the status of `waitpid`, and its CPU seconds.
"""

import json
import os
import resource
import signal
import sys
import warnings


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def arm(fatal):
    from nca_trader.paper.exchange_process import RemoteExchange
    from nca_trader.paper.journal import Journal

    calls = 0
    doomed = False

    def counted(owner, name):
        inner = getattr(owner, name)

        def call(*args, **kwargs):
            nonlocal calls
            for moment in range(2):
                calls += 1
                if calls == fatal:
                    die()
                if moment == 0:
                    found = inner(*args, **kwargs)
            return found

        setattr(owner, name, call)

    if isinstance(fatal, int):
        for name in ("record", "commit", "_write_head"):
            counted(Journal, name)
        return counted(RemoteExchange, "_ask")
    when, kind = fatal.split(":")
    record, commit = Journal.record, Journal.commit

    def recorded(self, run, of, key, body, ts):
        nonlocal doomed
        query = "SELECT 1 FROM event WHERE run = ? AND kind = ? AND key = ?"
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
    exchange_process.STARTING = exchange_process.ENDING = 2000.0  # a hundred seconds


def child(argv, fatal, log):
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(0)
    hasten()
    if fatal is not None:
        arm(fatal)
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
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, flush=True)


if __name__ == "__main__":
    serve()
