"""Runs `nca-trader paper` in processes that die at a chosen call: one import, a fork for each.

Lines of JSON on stdin: {"argv", "faults", "fatal", "log", "env"}. `faults` are the simulated
exchange's. `fatal` is null, a number (the call of the journal or the exchange that is the last),
"before:KIND" or "after:KIND" of an event of the journal that this process records as new,
"accepted:N" (the N-th order is in the exchange's books and the journal has no answer), or
[call, what]: "TERM", "TERM twice", "KILL", or "exchange", which is out of reach from there on.
The answer is a line: the exit code, below 0 for a signal.
"""

import importlib
import json
import os
import signal
import sys
import warnings


def die():
    os.kill(os.getpid(), signal.SIGKILL)


VENUE = ("submit", "cancel", "look_up", "working", "activity", "holdings", "quote")


def act(what):
    from brokenexchange import Broken

    if what == "exchange":
        Broken.down = True
        return None
    if what == "KILL":
        return die()
    for _ in range(2 if what == "TERM twice" else 1):
        os.kill(os.getpid(), signal.SIGTERM)


def arm(fatal):
    from brokenexchange import Broken

    from nca_trader.paper.journal.journal import Journal

    calls, doomed = 0, False
    at, what = fatal if isinstance(fatal, list) else (fatal, "")

    def counted(owner, name):
        inner = getattr(owner, name)

        def call(*args, **kwargs):
            nonlocal calls
            for moment in range(2):
                calls += 1
                if calls == at:
                    act(what) if what else die()
                if moment == 0:
                    found = inner(*args, **kwargs)
            return found

        setattr(owner, name, call)

    if not isinstance(fatal, str):
        for name in ("record", "commit", "_write_head"):
            counted(Journal, name)
        for name in VENUE:
            counted(Broken, name)
        return None
    when, kind = fatal.split(":")
    if when == "accepted":
        submit, left = Broken.submit, iter(range(int(kind) - 1))

        def submitted(self, ticket):
            answer = submit(self, ticket)
            if answer.outcome == "accepted" and next(left, None) is None:
                die()
            return answer

        Broken.submit = submitted
        return None
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

    from nca_trader.paper.clock import Clock

    Clock.sleep = lambda self, seconds: time.sleep(seconds / 20)
    Clock.monotonic = lambda self: time.monotonic() * 20


def child(argv, faults, fatal, log, env):
    import functools
    import time

    os.environ.update(env)
    time.tzset()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(0)
    hasten()
    from brokenexchange import Broken, Faults

    from nca_trader.paper.session import trade as session

    session.Exchange = functools.partial(Broken, faults=Faults(**faults))
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
    # Imported once and forked, not used: what computes starts threads, which a fork would lose.
    for name in ("papertape", "jax.numpy", "nca_trader.cli", "nca_trader.paper.session.trade"):
        importlib.import_module(name)
    for line in sys.stdin:
        task = json.loads(line)
        pid = os.fork()
        if pid == 0:
            child(**task)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
