"""Jobs: order, bits and errors are the same in this process, in two processes and on a cluster."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from drawn import random_bars
from tiny import AGENT

import nca_trader as nca
from nca_trader.config.modules import digest_of_files
from nca_trader.errors import BarError, ConfigError, StoreError
from nca_trader.parallel import jobs
from nca_trader.parallel.jobs import Job, parse_workers, run_jobs


@pytest.fixture(scope="module")
def cluster():
    """A scheduler and two workers, each a process of one thread."""
    distributed = pytest.importorskip("distributed")
    local = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=":0", resources={"GPU": 1}
    )
    with local:
        yield local.scheduler_address


@pytest.fixture(params=["here", "processes", "cluster"])
def workers(request):
    values = {"here": lambda: 1, "processes": lambda: 2}
    return values.get(request.param, lambda: request.getfixturevalue("cluster"))()


class Counted:
    """Counts how often it is unpacked in a process."""

    unpacked = 0

    def __reduce__(self):
        return (Counted.rebuilt, ())

    @classmethod
    def rebuilt(cls):
        cls.unpacked += 1
        return cls()


def mixed(shared, i):
    """A float of many roundings, of what is shared and of the job's own number."""
    import jax
    import jax.numpy as jnp

    counted, x = shared
    value = np.asarray(jax.jit(lambda x: jnp.tanh(x @ x.T).sum(0))(x * (i + 1)))
    return os.getpid(), type(counted).unpacked, jax.config.jax_numpy_rank_promotion, value


@pytest.mark.heavy
def test_results_come_in_order_and_bit_for_bit(workers):
    shared = (Counted(), np.random.default_rng(0).normal(size=(40, 40)).astype(np.float32))
    asked, seen = [Job(f"job {i}", (i,)) for i in range(5)], []
    found = run_jobs(mixed, asked, shared, workers=workers, done=lambda i, _: seen.append(i))
    for i, (pid, unpacked, promotion, value) in enumerate(found):
        np.testing.assert_array_equal(value, mixed(shared, i)[-1])
        assert (pid == os.getpid()) == (workers == 1)
        # What is shared reaches a worker once, and settings of jax are the caller's.
        assert unpacked == (workers != 1) and promotion == "raise"
    assert sorted(seen) == [0, 1, 2, 3, 4]
    assert len({pid for pid, *_ in found}) <= 2


def own_code_of(names, i):
    from nca_trader.config.extensions import load
    from nca_trader.config.modules import digest_of_files, locate

    modules = [name.partition(":")[0] for name in names]
    values = [load("features", name)(i) for name in names]
    return values, [digest_of_files(m) for m in modules], [str(locate(m)) for m in modules]


@pytest.mark.heavy
def test_workers_are_sent_the_files_of_own_code(cluster, tmp_path, monkeypatch):
    """A module of a package, one of a folder, a script: none of them lies where a worker looks."""
    files = {
        "own_pack/__init__.py": "",
        "own_pack/inner.py": "from . import base\ndef f(x):\n    return base.twice(x)\n",
        "own_pack/base.py": "def twice(x):\n    return 2 * x\n",
        "own_pack/unused.py": "raise SystemExit\n",
        "own_one.py": "def add(by):\n    import own_late as o\n    return lambda x: o.f(x, by)\n",
        "own_late.py": "def f(x, y):\n    return x + y\n",
        "scripts/own two.py": "import own_three\ndef g(x):\n    return own_three.POWER ** x\n",
        "scripts/own_three.py": "POWER = 3\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    names = ["own_pack.inner:f", "own_one:add(by=10)", "scripts/own two.py:g"]
    asked = [Job(str(i), (i,)) for i in (2, 3)]

    def found():
        return run_jobs(own_code_of, asked, names, workers=cluster, code=[*names, "rsi"])

    digests = [digest_of_files(name.partition(":")[0]) for name in names]
    first = found()
    assert [values for values, _, _ in first] == [[4, 12, 9], [6, 13, 27]]
    for _, there, places in first:
        assert there == digests
        assert not any(place.startswith(str(tmp_path)) for place in places)
    # Files that are changed afterwards, also one that is imported: workers live on.
    (tmp_path / "own_pack/base.py").write_text("def twice(x):\n    return 20 * x\n")
    (tmp_path / "scripts/own_three.py").write_text("POWER = 5\n")
    assert [values for values, _, _ in found()] == [[40, 12, 25], [60, 13, 125]]
    # Another script's module of the same name.
    (tmp_path / "own_one.py").write_text("def add(by):\n    return lambda x: -by\n")
    assert [values[1] for values, _, _ in found()] == [-10, -10]
    with pytest.raises(ConfigError, match="no module named 'own_pack' here"):
        run_jobs(own_code_of, asked, names, workers=cluster)  # nothing is left for other calls


class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(one)


def failing(_, kind):
    if kind == "bars":
        raise BarError("row 3 is missing; give it.")
    if kind == "odd":
        raise Odd(1, 2)
    if kind == "zero":
        raise ZeroDivisionError("by zero")


def fail(kind, workers):
    run_jobs(failing, [Job("fold 2", ("",)), Job("fold 3", (kind,))], workers=workers)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["here", "cluster"])
def test_an_exception_carries_the_name_of_its_job(kind, request):
    workers = None if kind == "here" else request.getfixturevalue("cluster")
    with pytest.raises(BarError, match=r"^fold 3: row 3 is missing; give it\.$"):
        fail("bars", workers)
    # Others keep their type, and get a note.
    with pytest.raises(ZeroDivisionError, match="by zero") as caught:
        fail("zero", workers)
    assert caught.value.__notes__ == ["in the job 'fold 3'"]
    # One that cannot be rebuilt from its message is not lost on its way.
    with pytest.raises(Odd if kind == "here" else RuntimeError, match="1"):
        fail("odd", workers)


def dying(folder, i):
    """Job 1 ends its worker the first time, in the middle of its work."""
    mark = pathlib.Path(folder) / f"begun-{i}-{os.getpid()}"
    mark.touch()
    if i == 1 and len(list(pathlib.Path(folder).glob("begun-1-*"))) == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    return np.float64(i) / 3


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["processes", "cluster"])
def test_the_job_of_a_killed_worker_is_done_again(kind, tmp_path, request):
    workers = 2 if kind == "processes" else request.getfixturevalue("cluster")
    asked = [Job(f"job {i}", (i,)) for i in range(4)]
    found = run_jobs(dying, asked, str(tmp_path), workers=workers)
    assert found == [i / 3 for i in range(4)]
    assert len(list(tmp_path.glob("begun-1-*"))) == 2
    if kind == "processes":  # and no other job's: only its own process ended
        assert len(list(tmp_path.glob("begun-*"))) == 5


def always_dying(_, i):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.heavy
def test_a_job_that_always_kills_its_worker_is_given_up_by_name(monkeypatch):
    monkeypatch.setattr(jobs, "RETRIES", 0)
    with pytest.raises(RuntimeError, match="fold 2: its workers died 1 times"):
        run_jobs(always_dying, [Job("fold 2", (2,)), Job("fold 2", (3,))], workers=2)


def echo(_, i):
    return i


@pytest.mark.heavy
def test_resources_that_no_worker_has_are_refused_and_others_are_taken(cluster):
    asked = [Job("a", (0,)), Job("b", (1,))]
    assert len(run_jobs(echo, asked, workers=f"{cluster}?GPU=1")) == 2
    with pytest.raises(ConfigError, match="no worker has 1 TPU; start a dask"):
        run_jobs(echo, asked, workers=f"{cluster}?TPU=1")


def test_a_worker_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(jobs, "_facts", lambda: {"nca_trader": "0", "jax": "0", "cores": 1})
    real = {"nca_trader": "1", "jax": "1", "cores": 1}
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr(distributed.Client, "run", lambda *a, **k: {"tcp://w": real})
    inside = {"processes": False, "protocol": "tcp://", "dashboard_address": ":0"}
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, **inside) as local:
        with pytest.raises(ConfigError, match="this worker has nca_trader 1, here it is 0"):
            asked = [Job("a", (0,)), Job("b", (1,))]
            run_jobs(echo, asked, workers=local.scheduler_address)


def test_no_scheduler_is_one_line(monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr(jobs, "PATIENCE", 0.5)
    with pytest.raises(StoreError, match=r"tcp://127\.0\.0\.1:9: no dask scheduler answers"):
        run_jobs(echo, [Job("a", (0,)), Job("b", (1,))], workers="tcp://127.0.0.1:9")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0, "give a number of processes"),
        (-2, "give a number"),
        (True, "give a number"),
        ("many", "give a number"),
        ("tcp://host", "tcp://HOST:PORT"),
        ("http://host:1", "tcp://HOST:PORT"),
        ("tcp://host:1?GPU", "GPU is not a resource; write e.g"),
        ("tcp://host:1?GPU=-1", "GPU=-1 is not a resource"),
    ],
)
def test_unknown_workers_are_refused(given, said):
    with pytest.raises(ConfigError, match=f"workers=.*{said}"):
        parse_workers(given)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(jobs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed; pip install distributed"):
        parse_workers("tcp://host:1")


def openssl(folder, *words):
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


@pytest.mark.heavy
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_cluster_behind_tls_takes_only_callers_with_its_certificate(tmp_path, monkeypatch):
    distributed, dask = pytest.importorskip("distributed"), pytest.importorskip("dask")
    openssl(
        tmp_path, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=nca",
        "-keyout", "key.pem", "-out", "cert.pem", "-addext", "basicConstraints=critical,CA:TRUE",
    )  # fmt: skip
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    tls = {"ca-file": cert}
    for role in ("client", "worker", "scheduler"):
        tls |= {f"{role}.cert": cert, f"{role}.key": key}
    tls = {f"distributed.comm.tls.{name}": path for name, path in tls.items()}
    asked = [Job("a", (0,)), Job("b", (1,))]
    with dask.config.set(tls):
        with distributed.LocalCluster(
            n_workers=1,
            processes=False,
            threads_per_worker=1,
            dashboard_address=":0",
            protocol="tls://",
            security=distributed.Security(),
        ) as local:
            assert local.scheduler_address.startswith("tls://")
            assert run_jobs(echo, asked, workers=local.scheduler_address) == [0, 1]
            with dask.config.set(dict.fromkeys(tls)):
                with pytest.raises(StoreError, match="TLS"):
                    run_jobs(echo, asked, workers=local.scheduler_address)


SCRIPT = """
import os, signal, sys, time
from nca_trader.parallel.jobs import Job, run_jobs

def slow(folder, i):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    time.sleep(600)

if __name__ == "__main__":
    # A shell that starts the tests in the background leaves this signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_jobs(slow, [Job("a", (0,)), Job("b", (1,))], sys.argv[1], workers=2)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_a_caller_that_ends(how, tmp_path, root):
    script, folder = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(SCRIPT)
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": str(root)}
    caller = subprocess.Popen(
        [sys.executable, script, folder], env=environment, stderr=subprocess.DEVNULL
    )
    wait(lambda: len(list(folder.iterdir())) == 2)
    caller.send_signal(how)
    caller.wait(120)
    pids = [int(file.name) for file in folder.iterdir()]
    wait(
        lambda: (
            not any(pathlib.Path(f"/proc/{pid}/cmdline").exists() and alive(pid) for pid in pids)
        )
    )


def alive(pid):
    try:
        return "Z" not in pathlib.Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]
    except OSError:
        return False


def wait(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_walk_with_own_features_rewards_and_costs_is_the_same_on_a_cluster(
    cluster, tmp_path, monkeypatch
):
    (tmp_path / "own_walk.py").write_text(
        "from nca_trader.data.features import FEATURES\n"
        "back = FEATURES['return_5']\n"
        "def paid(config, spec, step):\n    return 2.0 * step.log_return\n"
        "def fee(trade):\n    return 1e-3 + 1e-2 * abs(trade.traded)\n"
    )
    monkeypatch.chdir(tmp_path)
    bars = random_bars(np.random.default_rng(4), 240, 1)
    costs = nca.Costs(own=("own_walk.py:fee",))
    env = nca.EnvConfig(features=("return_1", "own_walk:back"), reward="own_walk:paid", costs=costs)
    spans = {"train": 160, "test": 40, "seeds": 1, "check": False}
    here, far = (
        nca.walk_forward(bars, AGENT, env=env, workers=w, **spans) for w in (None, cluster)
    )
    np.testing.assert_array_equal(far.result.equity, here.result.equity)
    # Own costs of a rule, which has no environment.
    rule = nca.rules.buy_and_hold()
    here, far = (
        nca.walk_forward(bars, rule, costs, workers=w, train=160, test=40) for w in (None, cluster)
    )
    np.testing.assert_array_equal(far.result.equity, here.result.equity)
