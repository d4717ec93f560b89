"""A process of the runs that `learner/test_two_hosts.py` compares; see there.

python two_hosts.py FOLDER [HOST:PORT PROCESS]
"""

import contextlib
import importlib.util
import itertools
import json
import pathlib
import sys

import numpy as np

KINDS, ESTIMATORS = ("nca", "mlp", "gru"), ("gae", "group", "exact")
# Mesh of the two processes' eight devices; kind, estimator, what else, updates.
CASES = {
    f"{kind} {estimator}": ((8, 1, 1), kind, estimator, "", 2)
    for kind, estimator in itertools.product(KINDS, ESTIMATORS)
}
CASES["replay"] = ((8, 1, 1), "nca", "gae", "replay", 3)
CASES["parts of the parameters on both"] = ((2, 4, 1), "nca", "gae", "", 2)


def meshes():
    """The module of the comparison on one host, whose learners these are."""
    path = pathlib.Path(__file__).parent / "learner" / "test_meshes.py"
    spec = importlib.util.spec_from_file_location("test_meshes", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["test_meshes"] = module
    spec.loader.exec_module(module)
    return module


def main(folder, coordinator="", process="0"):
    from nca_trader.parallel import hosts
    from nca_trader.parallel.processes import Peers, joined
    from nca_trader.runs.checkpoint import flatten

    peers = Peers(coordinator, 2, int(process), heartbeat=100)
    with joined(peers) if coordinator else contextlib.nullcontext():
        module = meshes()
        for name, (axes, *what) in CASES.items():
            state, rows = module.stepped_in_float64(axes if coordinator else module.ONE, *what)
            leaves = flatten(state)
            if hosts.first():
                rows = np.array(json.dumps(rows))
                np.savez(pathlib.Path(folder) / f"{name}.npz", rows=rows, **leaves)


if __name__ == "__main__":
    main(*sys.argv[1:])
