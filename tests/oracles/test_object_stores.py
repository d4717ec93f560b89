"""Through obstore, against a server on this machine, which is killed, damaged and cut off."""

import importlib.util
import os
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

if importlib.util.find_spec("obstore") is None:
    pytest.skip("obstore is not installed here", allow_module_level=True)

from objects import Missing, Objects
from restarted import free_port, restarted
from s3_server import serving
from tiny import STEPS_PER_UPDATE

from nca_trader import cloud
from nca_trader.cli import main
from nca_trader.cloud import place
from nca_trader.data.bars import read_bars
from nca_trader.data.shards import open_shards, write_shards
from nca_trader.errors import ConfigError, StoreError
from nca_trader.runs import trials
from nca_trader.runs.checkpoint import Checkpoints
from nca_trader.runs.manifest import Run

STORE = cloud._store


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A server with a bucket `real`, named by the environment as a user would name it."""
    with serving() as server:
        pointed(monkeypatch, server.url)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield server
    STORE.cache_clear()


def pointed(monkeypatch, url):
    STORE.cache_clear()
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("GOOGLE_BASE_URL", url)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "token")


def told(run, folder):
    """What a sequence of calls answers, errors among it: of a real store as of `Objects`."""
    found = []

    def tell(do):
        try:
            found.append(do())
        except (FileNotFoundError, ConfigError, StoreError) as error:
            found.append((type(error), str(error)))

    def names(path):
        return {name: version.size for name, version in path.below().items()}

    large, back, x = folder / "large", folder / "back", run / "x"
    large.write_bytes(bytes(range(256)) * 24_000)  # in several parts
    for what in (run.exists, run.is_dir, run.is_file, run.read_bytes, lambda: names(run)):
        tell(what)
    tell(lambda: x.put(b"\x00\xff"))
    tell(lambda: (run / "deep/er").put(large))
    tell(lambda: (run.parent / f"{run.name}2").put(b"alike"))
    tell(lambda: (run / "deep/er").download(back))
    tell(lambda: back.read_bytes() == large.read_bytes())
    for what in (run.exists, run.is_dir, run.is_file, lambda: names(run)):
        tell(what)
    tell(lambda: names(run.parent.parent))
    tell(lambda: x.read()[0])
    tell(lambda: x.read()[1] == x.version() == run.below()["x"])
    tell(lambda: x.version().tag == (x.put(b"\x00\xfe"), x.version().tag)[1])
    tell(x.unlink)
    tell(lambda: x.unlink(missing_ok=True))
    tell(lambda: run.delete(["deep/er"]))
    tell(lambda: names(run))
    return found


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_the_store_in_memory_of_other_tests_answers_as_these_do(
    scheme, server, tmp_path, monkeypatch
):
    runs = [place(f"{scheme}://{bucket}/runs/a b%20ä") for bucket in ("real", "none-such")]
    real = [told(run, tmp_path) for run in runs]
    fake = Objects()
    monkeypatch.setattr(cloud, "_store", lambda _, bucket: fake if bucket == "real" else Missing())
    assert [told(run, tmp_path) for run in runs] == real
    assert {type(answer) for answer in real[0]} >= {bool, bytes, dict, tuple, type(None)}


def test_bars_and_shards_are_read_from_there(server, tiny):
    place("gs://real/bars.csv").put(tiny.data)
    assert read_bars("gs://real/bars.csv").digest() == tiny.bars.digest()
    write_shards(tiny.bars, "s3://real/shards", rows=100)
    shards = open_shards("s3://real/shards")
    assert [shards.read(shard).digest() for shard in shards] == [
        tiny.bars[at : at + 100].digest() for at in (0, 100, 200)
    ]


def test_a_store_that_is_not_there_or_wants_a_key_is_one_line(server, monkeypatch, capsys):
    monkeypatch.setattr(cloud, "RETRIES", 2)
    pointed(monkeypatch, "http://127.0.0.1:1")
    for scheme in ("s3", "gs"):
        assert main(["data", "check", f"{scheme}://real/bars.csv"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert (
            f"{scheme}://real/bars.csv: the store failed or cannot be reached, at the first" in line
        )
        assert "first try and 2 more (Generic" in line and "after 2 retries" in line
    STORE.cache_clear()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    assert main(["data", "check", "s3://real/bars.csv"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "s3://real/bars.csv: no credentials, or no right" in line and "AWS_ACCESS_KEY_ID" in line


@pytest.mark.parametrize(
    ("status", "code", "says", "tries"),
    [
        (403, 2, "no credentials, or no right to do this", 1),
        (301, 2, "another region than AWS_REGION says", 1),
        (503, 1, "the store failed or cannot be reached, at the first try and 2 more", 3),
        ("", 1, "the store failed or cannot be reached, at the first try and 2 more", 3),
    ],
)
def test_what_a_store_answers_is_told_in_one_line(
    status, code, says, tries, server, monkeypatch, capsys
):
    monkeypatch.setattr(cloud, "RETRIES", 2)
    server.status = lambda method, path: status
    assert main(["data", "check", "s3://real/bars.csv"]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line and len(server.asked) == tries


def test_what_fails_a_few_times_is_asked_again(server):
    run, times = place("s3://real/run"), 1
    for do in (lambda: run.put(b"x"), run.read_bytes, run.below, run.version, run.unlink):
        server.asked.clear()
        server.status = lambda method, path: 503 if len(server.asked) <= times else None
        do()
        assert len(server.asked) == times + 1
    assert not server.buckets["real"]


# Kills itself by SIGKILL at the k-th put of the checkpoint 2: in the middle of an upload. An upload
# puts from several threads; the lock lets exactly k of them reach the store.
KILLED = """
import itertools, os, signal, sys, threading
from nca_trader.cloud import CloudPath
put, count, one_at_a_time = CloudPath.put, itertools.count(), threading.Lock()
def killing(self, content):
    with one_at_a_time:
        if "/checkpoints/2/" in self.key and next(count) == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        put(self, content)
CloudPath.put = killing
"""
SAVING = (
    KILLED
    + """
import numpy as np
from nca_trader.cloud import place
from nca_trader.runs.checkpoint import Checkpoints
pid = os.getpid()
for k in range(1000):
    if not os.fork():
        sys.argv[1] = k
        with Checkpoints(place(f"s3://real/{k}/checkpoints")) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, {"a": np.full(1000, step)})
                checkpoints.wait()
        os._exit(0)
    if os.wait()[1] == 0:
        print(k)
        break
"""
)


def python(root, code, *words):
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, words)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


def test_a_process_killed_at_any_put_of_an_upload_leaves_the_checkpoint_before(server, root):
    done = python(root, SAVING, -1)
    puts = int(done.stdout.split()[-1])
    assert puts > 5, done.stderr
    for k in range(puts + 1):
        with Checkpoints(place(f"s3://real/{k}/checkpoints")) as checkpoints:
            step, leaves = checkpoints.newest()
        assert step == (2 if k == puts else 1)
        assert (leaves["['a']"] == step).all()


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.few(1)
def test_a_run_killed_in_an_upload_goes_on_and_ends_as_a_local_one(scheme, server, tiny, root):
    place(f"{scheme}://real/in/bars.csv").put(tiny.data)
    url = f"{scheme}://real/runs/tiny"
    words = tiny.train_command(url, data=f"{scheme}://real/in/bars.csv")
    code = KILLED + "from nca_trader.cli import main; sys.exit(main(sys.argv[2:]))"
    killed = python(root, code, 4, *words)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with Checkpoints(place(f"{url}/checkpoints")) as checkpoints:
        assert checkpoints.steps() == [1]
    assert list(place(f"{url}/checkpoints/2").iterdir())
    assert main(words) == 0
    run = Run(url)
    assert [row["update"] for row in run.metrics()] == [1, 2]
    same = jax.tree.map(np.array_equal, run.params(), tiny.run.params())
    assert jax.tree.all(same)

    # A byte of the newest is flipped in the store: the one before is taken, and trained on from.
    name = max(
        (name for name in place(f"{url}/checkpoints/2").below() if name != "files.json"),
        key=lambda name: place(f"{url}/checkpoints/2/{name}").version().size,
    )
    damaged = place(f"{url}/checkpoints/2/{name}")
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 4
    damaged.put(bytes(content))
    assert not jax.tree.all(jax.tree.map(np.array_equal, run.params(), tiny.run.params()))
    assert main(words) == 0
    assert jax.tree.all(jax.tree.map(np.array_equal, run.params(), tiny.run.params()))
    assert main(["backtest", "--run", url, "--data", f"{scheme}://real/in/bars.csv"]) == 0


class Host:
    """A machine of two: what restarts it, with a key to the store and a disk of its own."""

    def __init__(self, number, words, folder, root, port):
        self.said, self.number = folder / f"said_{number}", number
        peers = [f"--coordinator=127.0.0.1:{port}", "--processes=2", f"--process={number}"]
        own = {name: str(folder / f"{name}_{number}") for name in ("XDG_CACHE_HOME", "TMPDIR")}
        os.mkdir(own["TMPDIR"])
        path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        own |= {"AWS_ACCESS_KEY_ID": f"host{number}", "PYTHONPATH": path}
        own["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
        with open(self.said, "w") as file:
            self.process = subprocess.Popen(
                restarted(*words, *peers, "--heartbeat=60"),
                env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **own},
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def kill(self):
        """Kills what trains, as a machine that is lost would."""
        pids = re.findall(r"started (\d+)\n", self.said.read_text())
        os.kill(int(pids[-1]), signal.SIGKILL)

    def end(self):
        """What it printed, once it has ended as it should."""
        out, _ = self.process.communicate(timeout=900)
        said = self.said.read_text()
        assert self.process.returncode == 0, said
        assert "ended -9" in said and "Traceback" not in said
        return out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hosts_train_into_one_bucket_and_go_on_when_either_is_killed(server, tiny, root):
    """Process 1 is killed between two updates, later process 0 in the middle of an upload."""
    updates = 10
    url, there = "s3://real/runs/two", server.buckets["real"]
    place("s3://real/in/bars.csv").put(tiny.data)
    given = {"data": "s3://real/in/bars.csv", "steps": updates * STEPS_PER_UPDATE}
    port, kills = free_port(), [("checkpoints/7/", 0), ("checkpoints/3/files.json", 1)]

    def kill(method, path):
        if kills and method == "PUT" and f"/runs/two/{kills[-1][0]}" in path:
            hosts[kills.pop()[1]].kill()
        return None

    server.status = kill
    folder = tiny.folder / "hosts"
    folder.mkdir()
    words = tiny.train_command(url, **given)
    hosts = [Host(number, words, folder, root, port) for number in (0, 1)]
    out = [host.end() for host in hosts]
    assert not kills and "trained" in out[0] and out[1] == ""

    run = Run(url)
    assert [row["update"] for row in run.metrics()] == list(range(1, updates + 1))
    jax.config.update("jax_disable_most_optimizations", True)
    assert main([*tiny.train_command(folder / "alone", **given), "--devices=2"]) == 0
    jax.config.update("jax_disable_most_optimizations", False)
    alone = Run(folder / "alone")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6),
        run.params(),
        alone.params(),
    )
    # One writes, each reads for itself; nothing is left but what a run in a folder has.
    asked = [(key, method, path) for key, method, path in server.by if "/runs/" in path]
    assert {key for key, method, _ in asked if method not in ("GET", "HEAD")} == {"host0"}
    head = f"/{url.removeprefix('s3://')}/checkpoints/6/files.json"
    assert {key for key, method, path in asked if (method, path) == ("GET", head)} == {
        "host0",
        "host1",
    }
    names = {name.partition("/")[0] for name in there.below("runs/two")}
    assert names == {path.name for path in alone.path.iterdir()}
    assert trials.count(place("s3://real/runs"), "train") == 1


def test_nothing_of_a_store_is_imported_before_there_is_a_url(root):
    code = (
        "import sys, nca_trader.cli as cli; cli.build_parser(); "
        "import nca_trader.runs.checkpoint, nca_trader.data; "
        "print([m for m in sys.modules if m.partition('.')[0] == 'obstore'])"
    )
    done = python(root, code)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
