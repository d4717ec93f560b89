"""What a service manager does, small: starts a command again until its exit code is final."""

import socket
import sys

# Prints the number of each process, and then how it ended.
PROGRAM = """
import subprocess, sys, time
while True:
    process = subprocess.Popen(sys.argv[1:])
    print("started", process.pid, file=sys.stderr, flush=True)
    code = process.wait()
    print("ended", code, file=sys.stderr, flush=True)
    if code in (0, 2, 3, 4, 130):  # as RestartPreventExitStatus of tools/service has them
        sys.exit(code)
    time.sleep(0.2)
"""


def restarted(*words):
    """The command that starts `nca-trader` with these words again and again."""
    return [sys.executable, "-c", PROGRAM, sys.executable, "-m", "nca_trader", *words]


def free_port():
    """A port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
