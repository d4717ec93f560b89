"""Processes that train as one: equal to one process, and to themselves when one is killed."""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tiny as tiny_experiment
from drawn import random_bars
from restarted import free_port, restarted
from untrained import leaves

from nca_trader.agents import load_agent
from nca_trader.agents.policy import make_policy
from nca_trader.cli import main
from nca_trader.cli.train import add_train_options
from nca_trader.config import PopulationConfig
from nca_trader.config.toml import to_toml
from nca_trader.data.bars import write_bars
from nca_trader.data.shards import write_shards
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import CheckFailed, ConfigError
from nca_trader.learner.learner import make_learner, shard_updates
from nca_trader.parallel import processes
from nca_trader.parallel.mesh import make_mesh, replicate
from nca_trader.parallel.processes import Peers, check, find_place, is_loss, meet, options
from nca_trader.runs.checkpoint import Checkpoints, flatten
from nca_trader.runs.manifest import Run

UPDATES = 12
# Programs that run for milliseconds compile in half the time, here and in the processes.
QUICK = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
STEPS = UPDATES * tiny_experiment.STEPS_PER_UPDATE


class Place(tiny_experiment.Tiny):
    """The files of the tiny experiment; trains nothing by itself."""

    def __init__(self, folder):
        super().__init__(folder)
        bars = random_bars(np.random.default_rng(0), tiny_experiment.NUM_BARS, 2)
        write_bars(bars, self.data)
        (folder / "env.toml").write_text(to_toml(tiny_experiment.ENV))
        (folder / "agent.toml").write_text(to_toml(tiny_experiment.AGENT))

    def start(self, root, arguments, devices=4, **more):
        """A command, or `nca-trader` with these arguments, in a process of its own."""
        program = [] if arguments[0] == sys.executable else [sys.executable, "-m", "nca_trader"]
        flag = f"--xla_force_host_platform_device_count={devices}"
        return subprocess.Popen(
            [*program, *arguments],
            env={**os.environ, **QUICK, "PYTHONPATH": str(root), "XLA_FLAGS": flag},
            text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more,
        )

    def words(self, run, *more, heartbeat=100):
        """Arguments of two processes that train into `run`."""
        port = free_port()
        peers = [f"--coordinator=127.0.0.1:{port}", "--processes=2", f"--heartbeat={heartbeat}"]
        return [
            [*self.train_command(run, steps=STEPS), *peers, f"--process={number}", *more]
            for number in (0, 1)
        ]

    def pair(self, root, run, *more):
        """The two processes, of four devices each."""
        return [self.start(root, words) for words in self.words(run, *more)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("hosts"))


@pytest.fixture(scope="module")
def alone(place):
    """The same run in one process of eight devices."""
    command = place.train_command(place.runs / "alone", steps=STEPS)
    jax.config.update("jax_disable_most_optimizations", True)
    assert main([*command, "--devices=8"]) == 0
    jax.config.update("jax_disable_most_optimizations", False)
    return Run(place.runs / "alone")


def assert_close(run, other, tolerance=1e-6):
    (step, got), (other_step, expected) = leaves(run), leaves(other)
    assert step == other_step == UPDATES and got.keys() == expected.keys()
    moved = 0.0
    for name, value in expected.items():
        if value.dtype == np.float32:
            np.testing.assert_allclose(got[name], value, rtol=0, atol=tolerance, err_msg=name)
            moved = max(moved, np.abs(value).max())
        else:  # keys, the cursor, which bars
            np.testing.assert_array_equal(got[name], value, err_msg=name)
    assert moved > 0.1


def wait_for(what, process, seconds=500):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)
    return found


def rows(run):
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
def test_a_pair_of_which_one_is_killed_ends_as_one_process_that_was_not(place, alone, root):
    run = place.runs / "killed"
    said = [place.folder / f"said_{number}" for number in (0, 1)]
    pair = []
    for words, path in zip(place.words(run, heartbeat=10), said, strict=True):
        with open(path, "w") as file:
            pair.append(place.start(root, restarted(*words), stderr=file))
    wait_for(lambda: rows(run) >= 3, pair[0])
    os.kill(int(re.findall(r"started (\d+)\n", said[1].read_text())[-1]), signal.SIGKILL)
    there = rows(run)
    outs = [process.communicate(timeout=500)[0] for process in pair]
    texts = [path.read_text() for path in said]
    assert [process.returncode for process in pair] == [0, 0], texts
    assert 3 <= there < UPDATES and "ended -9\n" in texts[1] and texts[0].count("started") > 1
    assert "".join(outs).count("trained") == 1  # the first process alone speaks
    updates = [row["update"] for row in Run(run).metrics()]
    assert updates == list(range(1, UPDATES + 1))
    assert_close(Run(run), alone)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_saved_at_the_same_update(place, alone, root):
    run = place.runs / "stopped"
    pair = place.pair(root, run)
    wait_for(lambda: rows(run) >= 3, pair[0])
    pair[1].send_signal(signal.SIGTERM)
    said = [process.communicate(timeout=500) for process in pair]
    assert [process.returncode for process in pair] == [130, 130], said
    done = rows(run)
    assert 3 <= done < UPDATES and f"all is saved in {run}; the same command resumes" in said[0][0]
    assert leaves(Run(run))[0] == done
    # One process goes on with what two have saved.
    assert main([*place.train_command(run, steps=STEPS), "--devices=8"]) == 0
    assert_close(Run(run), alone)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_process_ends_the_other_within_the_heartbeat(place, root, lost):
    run = place.runs / f"lost_{lost}"
    pair = place.pair(root, run, "--heartbeat=10")
    # A row is there before the thread that writes a checkpoint is done.
    wait_for(lambda: any((run / "checkpoints").glob("*/files.json")), pair[0])
    pair[lost].kill()
    began = time.monotonic()
    _, err = pair[1 - lost].communicate(timeout=500)
    assert pair[1 - lost].returncode not in (0, 2, 3, 4, 130), err
    assert time.monotonic() - began < 30
    pair[lost].communicate()
    with Checkpoints(run / "checkpoints") as checkpoints:
        assert checkpoints.newest()[0] >= 1


# A process of two: joins, agrees, saves what lies on both and reads it again; writes what it saw.
PEER = """
import json, pathlib, sys
from nca_trader.parallel.processes import Peers, join_processes

number, port, folder = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
with join_processes(Peers(f"127.0.0.1:{port}", 2, number)):
    import jax, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from nca_trader.parallel import hosts
    from nca_trader.errors import RunError, StateError
    from nca_trader.learner.train import agreed
    from nca_trader.parallel.mesh import make_mesh
    from nca_trader.runs.checkpoint import Checkpoints, flatten, unflatten
    from nca_trader.runs.folder import check_shared

    def fails():
        raise StateError("its own mistake")

    def refused(call, *args):
        try:
            call(*args)
        except (RunError, StateError) as error:
            return f"{type(error).__name__}: {error}"

    told = {"number": hosts.own(), "devices": jax.device_count()}
    told["each"] = hosts.all_gather(number + 1).tolist()
    told["first"] = int(hosts.broadcast(np.int32(10 + number)))
    told["did"] = hosts.on_first(lambda: "done")
    told["agreed"] = agreed(number == 1, number == 1), agreed(False, number == 0)
    told["failed"] = refused(hosts.on_first, fails)
    told["shared"] = refused(check_shared, folder / "shared")
    told["unshared"] = refused(check_shared, folder / f"own_{number}", 0.5)

    mesh = make_mesh(8)
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def tree(seed):
        keys = jax.random.split(jax.random.key(seed), 8)
        rows = jax.random.normal(keys[0], (8, 2))
        odd = jax.numpy.stack([jax.numpy.float32(x) for x in (-0.0, jax.numpy.nan, seed)])
        return {"keys": keys, "rows": rows, "odd": odd, "key": jax.random.key(seed)}

    place = {"keys": split, "rows": split, "odd": whole, "key": whole}
    make = jax.jit(tree, out_shardings=place)
    with Checkpoints(folder / "shared" / "checkpoints") as checkpoints:
        checkpoints.save(2, make(2))
        step, leaves = checkpoints.newest()
    back = unflatten(make(3), leaves)
    told["step"], told["own_rows"] = step, len(back["rows"].addressable_shards)
    again, expected = flatten(back), flatten(make(2))
    told["same"] = all(again[name].tobytes() == expected[name].tobytes() for name in expected)
    told["placed"] = all(back[name].sharding == place[name] for name in place)
    (folder / f"told_{number}.json").write_text(json.dumps(told))
    print("said by", number)
"""


@pytest.mark.heavy
def test_two_processes_agree_and_save_as_one(tmp_path, root):
    port, flag = free_port(), "--xla_force_host_platform_device_count=4"
    pair = [
        subprocess.Popen(
            [sys.executable, "-c", PEER, str(number), str(port), str(tmp_path)],
            env={**os.environ, **QUICK, "PYTHONPATH": str(root), "XLA_FLAGS": flag},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (0, 1)
    ]
    said = [process.communicate(timeout=500) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], said
    assert "said by 0" in said[0][0] and said[1][0] == ""  # the first alone speaks
    told = [json.loads((tmp_path / f"told_{number}.json").read_text()) for number in (0, 1)]
    unshared = [one.pop("unshared") for one in told]
    failed = [one.pop("failed") for one in told]
    for number, one in enumerate(told):
        assert one == {
            "number": number,
            "devices": 8,
            "each": [1, 2],
            "first": 10,
            "did": None if number else "done",
            "agreed": [[True, False], [False, True]],
            "shared": None,
            "step": 2,
            "own_rows": 4,
            "same": True,
            "placed": True,
        }
        assert "process 1 of 2 does not see what process 0 writes there" in unshared[number]
        assert "give a folder on storage that all hosts share" in unshared[number]
    assert failed[0] == "StateError: its own mistake"
    assert failed[1].startswith("StateError: process 0 failed")
    there = sorted(path.name for path in (tmp_path / "shared").iterdir())
    assert there == ["checkpoints", "checkpoints.json"]
    with Checkpoints(tmp_path / "shared" / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [2]


def on_halves(first, second, mesh):
    """An array of which the first half of the devices holds one copy, the other half another."""
    half = mesh.size // 2
    pairs = zip([first] * half + [second] * half, mesh.devices.flat, strict=True)
    copies = [jax.device_put(value, device) for value, device in pairs]
    return jax.make_array_from_single_device_arrays(np.shape(first), replicate(mesh), copies)


CLUSTERS = ("SLURM_", "KUBERNETES_", "TPU_", "OMPI_", "JAX_COORDINATOR", "JOB_", "CLOUD_TPU_")


def come(address, number, seconds=20.0, after=0.0, total=4):
    """What process `number` says after it has waited for the others; "" where all came."""
    time.sleep(after)
    try:
        return meet(address, total, number, seconds) or ""
    except CheckFailed as error:
        return str(error)


def come_together(address, *numbers, **options):
    with concurrent.futures.ThreadPoolExecutor(len(numbers)) as pool:
        said = [pool.submit(come, address, number, **options) for number in numbers]
        return [each.result() for each in said]


def test_processes_meet_in_any_order_also_where_strangers_call():
    port = free_port()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        said = [
            pool.submit(come, f"localhost:{port}", number, after=after)
            for number, after in ((2, 0.0), (1, 0.0), (0, 0.5), (3, 3.0))
        ]
        time.sleep(1.5)
        for word in (b"", b"PRI * HTTP/2.0\r\n\r\n", b"nca_trader one\n", b"nca_trader 77\n"):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(word)
        began = time.monotonic()
        assert [each.result() for each in said] == [""] * 4
        assert time.monotonic() - began < 8


def test_who_waits_names_the_coordinator_and_who_is_missing(monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    zero, two = come_together(address, 0, 2, seconds=2)
    assert f'coordinator="{address}": waited 2 s for processes 1, 3 of 4;' in zero
    assert re.search(r"waited 2 s for processes (0, )?1, 3 of 4", two) and address in two
    (alone,) = come_together(address, 1, seconds=0.5, total=2)
    assert "waited 0.5 s for process 0 of 2 (Connection refused); start what is missing." in alone
    assert "`nca-trader doctor` with coordinator=" in alone and "\n" not in alone
    (lost,) = come_together("nowhere.invalid:1", 1, seconds=0.1, total=2)
    assert "nowhere.invalid:1" in lost and "process 0 of 2 (Name or service not known)" in lost
    # One that came and was stopped is missing again.
    monkeypatch.setattr(processes, "GONE", 1.0)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        zero = pool.submit(come, address, 0, 3)
        pool.submit(come, address, 1, 0.5)
        assert "waited 3 s for processes 1, 2, 3 of 4;" in zero.result()


def test_a_process_0_of_an_earlier_start_is_not_taken_for_the_new_one():
    with socket.create_server(("127.0.0.1", 0)) as old:

        def serve():
            for said in (b"\0\0\x1e\x04\0\0\0\0\0", b"", b"\n"):
                with old.accept()[0] as peer:
                    peer.sendall(said)

        with concurrent.futures.ThreadPoolExecutor() as pool:
            pool.submit(serve)
            said = come(f"127.0.0.1:{old.getsockname()[1]}", 1, 2, total=2)
    assert "process 0 of 2 (it does not answer)" in said


def test_a_command_that_waits_says_so_and_ends_in_one_line(place, capsys):
    words, (port, taken) = place.train_command(place.runs / "waits"), (free_port(), free_port())
    peers = [f"--coordinator=127.0.0.1:{port}", "--processes=2"]
    assert main([*words, *peers, "--process=1", "--initialization-timeout=3"]) == 1
    waiting, line = capsys.readouterr().err.splitlines()
    about = f"process 0 of 2 at 127.0.0.1:{port} (Connection refused)"
    assert waiting == f"join waiting for {about}"
    assert line.startswith(f"nca-trader train: --coordinator 127.0.0.1:{port}: waited 3 s for")
    assert main([*words, *peers, "--process=0", "--initialization-timeout=2", "--quiet"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "for process 1 of 2; start" in line
    with socket.create_server(("", taken)):
        peers[0] = f"--coordinator=127.0.0.1:{taken}"
        assert main([*words, *peers, "--process=0"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert f"--coordinator 127.0.0.1:{taken}" in line and "Address already in use" in line


def test_the_place_of_a_process_is_what_jax_finds(monkeypatch):
    for name in [name for name in os.environ if name.startswith(CLUSTERS)]:
        monkeypatch.delenv(name)
    assert find_place(Peers("a:1", 2, 1)) == ("a:1", 2, 1)
    assert find_place(Peers()) == (None, None, None)
    given = {"JOB_ID": "7", "STEP_NODELIST": "one,two", "NTASKS": "2", "PROCID": "1"}
    for name, value in {**given, "LOCALID": "0", "STEP_NUM_NODES": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "4321")
    assert find_place(Peers()) == ("one:4321", 2, 1)


def test_where_no_cluster_is_known_the_options_are_asked_for(tmp_path, root):
    process = member(root, tmp_path / "never")
    said = process.communicate(timeout=500)[1]
    assert process.returncode != 0 and not (tmp_path / "never").exists()
    assert "distributed: JAX does not know this cluster" in said
    assert "give coordinator, processes and process." in said


@pytest.mark.slow
def test_each_process_learns_from_its_own_shards(place, root):
    bars = random_bars(np.random.default_rng(1), 1200, 2)
    shards = write_shards(bars, place.folder / "shards", rows=200)
    parts = [shards.part(number, 2, by="file") for number in (0, 1)]
    assert {len(part) for part in parts} != {0} and sum(map(len, parts)) == len(shards) == 6
    run = place.runs / "shards"
    pair = [
        place.start(root, [word for word in process if not word.startswith("--until")])
        for process in place.words(run, f"--data={shards.folder}")
    ]
    said = [process.communicate(timeout=500) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], said

    # The same with one process, each half of whose devices is handed a process's shards.
    config, agent = tiny_experiment.ENV, load_agent(place.folder / "agent.toml")
    agent = dataclasses.replace(agent, learner=dataclasses.replace(agent.learner, steps=STEPS))
    env, mesh = TradingEnv(shards, config), make_mesh(8)
    learner = make_learner(env, make_policy(agent, env.spec), agent, mesh)
    state, turn = learner.init(jax.random.key(0)), shard_updates(env.shards, agent.learner)
    for update in range(UPDATES):
        own = [part[update // turn % len(part)] for part in parts]
        markets = [env.prepare(shards.read(shard)) for shard in own]
        market = jax.tree.map(lambda a, b: on_halves(a, b, mesh), *markets)
        state, _ = learner.step(state, market)
    expected, (step, got) = flatten(state), leaves(Run(run))
    assert step == UPDATES
    for name, value in expected.items():
        if name.startswith(".params"):
            np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-6, err_msg=name)
    assert len(set(Run(run).metrics()[i]["shard"] for i in range(UPDATES))) > 1


@pytest.mark.parametrize(
    ("peers", "said"),
    [
        (Peers("10.0.0.1:8476", 2), "process is missing: give coordinator"),
        (Peers("", 2, 0), "coordinator is missing"),
        (Peers("10.0.0.1", 2, 0), 'coordinator="10.0.0.1": give HOST:PORT'),
        (Peers(":8476", 2, 0), "give HOST:PORT"),
        (Peers("a:1", 2, 2), "process=2 of processes=2: processes are numbered from 0 to 1"),
        (Peers("a:1", 2, -1), "process=-1"),
        (Peers(processes=0), "processes=0: give at least 1"),
        (Peers("a:1", -1, 0), "processes=-1: give at least 1"),
        (Peers("a:1", 2, 1, heartbeat=0), "heartbeat=0: give at least 1 second"),
    ],
)
def test_peers_that_cannot_be_meant_are_refused(peers, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        check(peers)


def test_the_loss_of_a_process_is_known_by_either_type_that_jax_raises():
    text = "UNKNOWN: Gloo AllGather failed: Read error: Connection reset by peer"
    assert is_loss(jax.errors.JaxRuntimeError(text)) and is_loss(ValueError(text))
    assert not any(map(is_loss, [ValueError("of mine"), ConfigError("steps"), KeyError(text)]))


def test_no_processes_at_all_are_not_what_is_not_given():
    alone = argparse.Namespace(
        distributed=False,
        coordinator="",
        processes=None,
        process=None,
        heartbeat=1,
        initialization_timeout=1,
    )
    assert options(alone) is None
    none = argparse.Namespace(**{**vars(alone), "processes": 0})
    with pytest.raises(ConfigError, match="processes=0: give at least 1"):
        check(options(none))


@pytest.mark.parametrize("peers", [Peers(), Peers("10.0.0.1:8476", 2, 1), Peers("[::1]:80", 1, 0)])
def test_peers_that_can_be_meant_are_not(peers):
    check(peers)


def test_an_option_that_was_renamed_is_read_with_one_warning():
    parser = argparse.ArgumentParser()
    add_train_options(parser)
    given = ["--run", "r", "--env", "ou_mid", "--agent", "nano", "--coordinator", "a:1"]
    new = parser.parse_args([*given, "--initialization-timeout", "7"])
    with pytest.warns(FutureWarning, match="--patience is now called --initialization-timeout"):
        old = parser.parse_args([*given, "--patience", "7"])
    assert options(old) == options(new) == Peers("a:1", initialization_timeout=7)
    assert options(parser.parse_args(given)).initialization_timeout == 300
    assert "--patience" not in parser.format_help()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_population_of_two_processes_stops_goes_on_and_ends_as_that_of_one(place, root):
    population = PopulationConfig(learning_rate=(1e-4, 1e-2))
    agent = dataclasses.replace(tiny_experiment.AGENT, num_seeds=3, population=population)
    (place.folder / "population.toml").write_text(to_toml(agent))
    more = [f"--agent={place.folder / 'population.toml'}", "--heartbeat=600"]
    run = place.runs / "population"
    pair = place.pair(root, run, *more)
    wait_for(lambda: rows(run) >= 3, pair[0], 1500)
    pair[1].send_signal(signal.SIGTERM)
    said = [process.communicate(timeout=1500) for process in pair]
    assert [process.returncode for process in pair] == [130, 130], said
    assert 3 <= rows(run) < UPDATES and "the same command resumes" in said[0][0]
    pair = place.pair(root, run, *more)
    said = [process.communicate(timeout=1500) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], said

    one = place.runs / "population_alone"
    jax.config.update("jax_disable_most_optimizations", True)
    assert main([*place.train_command(one, steps=STEPS), more[0], "--devices=8"]) == 0
    jax.config.update("jax_disable_most_optimizations", False)
    assert_close(Run(run), Run(one))
    drawn = [Run(path).metrics()[0]["seeds"]["learning_rate"] for path in (run, one)]
    assert drawn[0] == drawn[1] and len({*drawn[0]}) == 3


# Joins with what the environment says of the cluster, and writes what it saw.
MEMBER = """
import json, pathlib, sys
from nca_trader.parallel.processes import Peers, join_processes

with join_processes(Peers(initialization_timeout=100)):
    import jax
    from nca_trader.parallel import hosts
    told = [hosts.own(), jax.process_count(), hosts.all_gather(hosts.own()).tolist()]
    pathlib.Path(sys.argv[1]).write_text(json.dumps(told))
"""


def member(root, target, **cluster):
    """A process in an environment with nothing but `cluster` to say of others."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith(CLUSTERS)}
    return subprocess.Popen(
        [sys.executable, "-c", MEMBER, str(target)],
        env=plain | QUICK | {"PYTHONPATH": str(root)} | cluster,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.heavy
def test_processes_that_slurm_starts_find_each_other_without_an_option(tmp_path, root):
    """As `srun` does: the job's nodes and number, of which JAX makes the coordinator's port."""
    job = {
        "SLURM_JOB_ID": str(free_port()), "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "1",
    }  # fmt: skip
    pair = [
        member(root, tmp_path / str(n), **job, SLURM_PROCID=str(n), SLURM_LOCALID=str(n))
        for n in (0, 1)
    ]
    said = [process.communicate(timeout=500)[1] for process in pair]
    assert [process.returncode for process in pair] == [0, 0], said
    for n in (0, 1):
        assert json.loads((tmp_path / str(n)).read_text()) == [n, 2, [0, 1]]
