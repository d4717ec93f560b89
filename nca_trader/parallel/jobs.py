"""Independent jobs over workers: in this process, in processes of this machine, or on a cluster.

A job is a name and the arguments of one function. What all jobs share, such as the bars, is sent
once to each worker. Results come in the order of the jobs.

workers                  where
None or 1                this process
N                        N processes of this machine (`concurrent.futures`, spawned)
"tcp://HOST:PORT"        the dask.distributed cluster of that scheduler (extra `cluster`)
"tls://HOST:PORT"        the same, encrypted and authenticated as dask's own configuration says
"tcp://HOST:PORT?GPU=1"  each job takes that much of a resource of its worker

Processes of this machine are always those of `concurrent.futures`: they need no extra, open no
port, and behave alike on every installation.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from nca_trader.config.extensions import receive, sources_of
from nca_trader.errors import (
    ConfigError,
    NcaTraderError,
    StoreError,
    argument,
    in_a_command,
    logger,
    options_named,
)
from nca_trader.machine import SAFE, cores, environment, killed_after
from nca_trader.progress import quiet

T = TypeVar("T")
Answers = Generator[tuple[int, Any], None, None]  # a job's number, and what it returned
RETRIES = 3  # deaths of its worker after which a job is given up, as `dask.distributed` counts
PATIENCE = 60.0  # seconds to wait for a scheduler, and for its first worker
SCHEMES = ("tcp://", "tls://")
# Settings of jax that change numbers; the caller's may not be the defaults.
NUMERIC = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl",
    "jax_threefry_partitionable", "jax_numpy_rank_promotion",
)  # fmt: skip
# Those that belong to this machine: its devices, and a folder.
LOCAL = ("jax_platforms", "jax_num_cpu_devices", "jax_compilation_cache_dir")
log = logger(__name__)


class Job(NamedTuple):
    """One call of the function.

    Attributes:
      name: for errors, e.g. "fold 3, seed 1".
      arguments: of the function, after what all jobs share.
    """

    name: str
    arguments: tuple[Any, ...] = ()


class Cluster(NamedTuple):
    """A dask.distributed cluster.

    Attributes:
      address: of its scheduler.
      resources: what a job takes of its worker, e.g. `{"GPU": 1.0}`.
    """

    address: str
    resources: dict[str, float]


def parse_workers(workers: int | str | None) -> int | Cluster:
    """Parse and check `workers`, see the head of this module; nothing is contacted.

    Raises:
      ConfigError: no number of processes, no address, or the extra is missing.

    Example:
      >>> parse_workers(4), parse_workers(None)
      (4, 1)
    """
    if workers is None:
        return 1
    text = str(workers)
    accepted = "give a number of processes of at least 1, or tcp://HOST:PORT of a dask scheduler"
    refused = ConfigError(f"{argument('workers', text)}: {accepted}.")
    # `True` counts as a number elsewhere.
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    address, _, query = text.partition("?")
    host, _, port = address[6:].rpartition(":")
    if not address.startswith(SCHEMES) or not host or not port.isdecimal():
        raise refused
    resources = {}
    for part in filter(None, query.split("&")):
        name, _, amount = part.partition("=")
        try:
            resources[name] = float(amount)
        except ValueError:
            resources[name] = 0.0
        if not name or not resources[name] > 0.0:
            raise ConfigError(
                f"{argument('workers', text)}: {part} is not a resource; write e.g. ?GPU=1."
            )
    if importlib.util.find_spec("distributed") is None:
        raise ConfigError(
            f"{argument('workers', text)}: a cluster needs distributed, which is not installed; "
            "pip install distributed, or give a number of processes."
        )
    return Cluster(address, resources)


def run_jobs(
    function: Callable[..., T],
    jobs: Sequence[Job],
    shared: Any = None,
    *,
    workers: int | str | None = None,
    done: Callable[[int, T], None] = lambda number, result: None,
    code: Iterable[str] = (),
) -> list[T]:
    """Call `function(shared, *job.arguments)` for every job.

    A job whose worker dies is done again, on another worker. The numbers are those of this process
    bit for bit, on a machine of as many cores: with one core XLA sums in another order.

    Args:
      function: the work; of other modules or of the caller's script.
      jobs: independent of each other.
      shared: sent once to each worker.
      workers: see the head of this module.
      done: called here with a job's number and result as soon as it is there, in any order, e.g.
        to save it.
      code: the names in configs of the jobs. A cluster is sent the files of those of own code.

    Returns:
      The results, in the order of the jobs.

    Raises:
      ConfigError: `workers` is not valid, or a worker has another version of the package; own
        code for a cluster is missing, or is not the user's own.
      NcaTraderError: the first that a job raised, with the job's name. Other exceptions keep their
        type, and carry the name as a note.
      StoreError: the cluster cannot be reached.
      RuntimeError: the workers of one job died `RETRIES` times in a row.

    Example:
      >>> run_jobs(lambda base, x: base + x, [Job("one", (1,)), Job("two", (2,))], 10)
      [11, 12]
    """
    chosen = parse_workers(workers)
    results: dict[int, T] = {}
    # One worker, or one job, gains nothing from a second process.
    alone = chosen == 1 or (isinstance(chosen, int) and len(jobs) < 2)
    if alone:
        found = _here(function, jobs, shared)
    else:
        found = _elsewhere(function, jobs, shared, chosen, code)
    # Closed also where `done` raises or the user interrupts: then no worker is left running.
    with contextlib.closing(found):
        for number, result in found:
            done(number, result)
            results[number] = result
    return [results[number] for number in range(len(jobs))]


def _here(function: Callable[..., T], jobs: Sequence[Job], shared: Any) -> Answers:
    for number, job in enumerate(jobs):
        try:
            result = function(shared, *job.arguments)
        except Exception as error:
            raise _named(error, job.name) from error.__cause__
        yield number, result


def _elsewhere(
    function: Callable[..., Any],
    jobs: Sequence[Job],
    shared: Any,
    chosen: int | Cluster,
    code: Iterable[str],
) -> Answers:
    """Send the function and the jobs as bytes; yield what comes back, in any order."""
    import cloudpickle

    far = isinstance(chosen, Cluster)
    with _by_value():
        settings = _settings(NUMERIC if far else (*NUMERIC, *LOCAL))
        # Processes of this machine find the files themselves.
        sources = sources_of(code if far else ())
        common = cloudpickle.dumps((function, shared, settings, in_a_command(), sources))
        packed = [cloudpickle.dumps(job.arguments) for job in jobs]
    labels = [job.name for job in jobs]
    if isinstance(chosen, Cluster):
        answers = _on_cluster(chosen, common, packed, labels)
    else:
        answers = _on_processes(min(chosen, len(jobs)), common, packed, labels)
    with contextlib.closing(answers):
        for number, answer in answers:
            failed, value = cloudpickle.loads(answer)
            if failed:
                raise _named(value, labels[number])
            yield number, value


def _named(error: Exception, name: str) -> Exception:
    """Return the exception of a job with the job's name."""
    if isinstance(error, NcaTraderError):
        return type(error)(f"{name}: {error}")
    error.add_note(f"in the job {name!r}")
    return error


@contextlib.contextmanager
def _by_value() -> Iterator[None]:
    """Send code of modules that a worker cannot import, such as FILE.py of a user, by value."""
    import cloudpickle

    own = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        loader = getattr(spec, "loader", None)
        # `__main__` is sent by value in any case, and packages are found by their first name.
        if module.__name__ != name or "." in name:
            continue
        if isinstance(loader, importlib.machinery.SourceFileLoader):
            if importlib.machinery.PathFinder.find_spec(name) is None:
                own.append(module)
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def sendable(value: Any) -> bool:
    """Return whether a worker can be sent the value; one that holds a lock or a file cannot."""
    import cloudpickle

    try:
        with _by_value():
            cloudpickle.dumps(value)
    except Exception:  # whatever an object's own `__reduce__` raises
        return False
    return True


def _settings(names: Sequence[str]) -> dict[str, Any]:
    jax = sys.modules.get("jax")  # a caller that has not imported it has changed nothing
    return {} if jax is None else {name: getattr(jax.config, name) for name in names}


# Jobs of one process run one after the other: a dask worker may have several threads, and settings
# of jax are the process's.
_one_at_a_time = threading.Lock()


@functools.lru_cache(maxsize=1)
def _unpacked(common: bytes) -> tuple[Any, Any, bool]:
    """Unpack once in each worker what all jobs share, and take over the caller's settings."""
    import cloudpickle

    function, shared, settings, command, sources = cloudpickle.loads(common)
    receive(sources)
    if settings:
        import jax

        for name, value in settings.items():
            # Devices that exist already cannot be changed.
            with contextlib.suppress(RuntimeError):
                jax.config.update(name, value)
    return function, shared, command


def perform(common: bytes, packed: bytes) -> bytes:
    """Do one job in a worker; return whether it failed, and its result or its exception."""
    import cloudpickle

    with _one_at_a_time, quiet():  # the caller shows how far its jobs are
        function, shared, command = _unpacked(common)
        try:
            # Messages of a job name options where the caller is a command.
            with options_named() if command else contextlib.nullcontext():
                result = function(shared, *cloudpickle.loads(packed))
            return cloudpickle.dumps((False, result))
        except Exception as error:
            try:
                # A class that cannot be rebuilt from its message would fail at the receiver.
                answer = cloudpickle.dumps((True, error))
                cloudpickle.loads(answer)
            except Exception:
                error = RuntimeError(f"{type(error).__name__}: {error}")
                answer = cloudpickle.dumps((True, error))
            return answer


# What `_begin` was given, in a process of `_on_processes`.
_common = b""


def _begin(common: bytes) -> None:
    """Prepare a spawned process: hold what jobs share, leave Ctrl-C to the caller, end with it."""
    global _common
    _common = common
    # The terminal sends it to every process, and the caller ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def end_with_parent() -> None:
        # A caller that is killed cannot end its workers, which would wait for jobs without end.
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _perform_held(packed: bytes) -> bytes:
    return perform(_common, packed)


def _pool(common: bytes) -> concurrent.futures.ProcessPoolExecutor:
    """Return an executor of one process: where it dies, only its job is lost, and it is known."""
    context = multiprocessing.get_context("spawn")
    with environment(**SAFE):  # its queues start a process that keeps count of them
        return concurrent.futures.ProcessPoolExecutor(1, context, _begin, (common,))


def _on_processes(
    count: int, common: bytes, packed: Sequence[bytes], names: Sequence[str]
) -> Answers:
    """Keep `count` processes busy; yield each job's number and answer."""
    waiting = collections.deque(range(len(packed)))
    deaths: collections.Counter[int] = collections.Counter()
    running: dict[concurrent.futures.Future[bytes], tuple[Any, int]] = {}
    # Workers that are idle end by themselves; those at work are not waited for.
    with killed_after():
        idle = [_pool(common) for _ in range(count)]
        while waiting or running:
            while idle and waiting:
                pool, number = idle.pop(0), waiting.popleft()
                with environment(**SAFE):  # a process starts with its first job
                    future = pool.submit(_perform_held, packed[number])
                running[future] = pool, number
            finished, _ = concurrent.futures.wait(
                running, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in finished:
                pool, number = running.pop(future)
                try:
                    answer = future.result()
                except concurrent.futures.process.BrokenProcessPool:
                    deaths[number] += 1
                    if deaths[number] > RETRIES:
                        raise _given_up(names[number]) from None
                    log.warning("%s: its worker died; it is done again", names[number])
                    pool = _pool(common)
                    waiting.appendleft(number)
                else:
                    yield number, answer
                idle.append(pool)


def _given_up(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name}: its workers died {RETRIES + 1} times. They may lack memory, or the program may "
        "be a script whose calls are not below `if __name__ == '__main__':`."
    )


def _on_cluster(
    cluster: Cluster, common: bytes, packed: Sequence[bytes], names: Sequence[str]
) -> Answers:
    """Submit every job to a dask scheduler, which places and repeats them; yield the answers."""
    import distributed

    try:
        client = distributed.Client(cluster.address, timeout=PATIENCE, set_as_default=False)
    except (OSError, TimeoutError, TypeError, ValueError) as error:
        what = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise StoreError(
            f"{cluster.address}: no dask scheduler answers ({what}); start one, or check the "
            "address, the network and the TLS settings."
        ) from None
    # A TypeError is of TLS without a certificate.
    with client:
        _check_cluster(client, cluster)
        waiting, lost = set(range(len(packed))), 0
        while waiting:
            # Once to each worker; one that joins later fetches it from another.
            held = client.scatter(common, broadcast=True, direct=False)
            futures = {
                client.submit(
                    perform, held, packed[number], pure=False, resources=cluster.resources or None
                ): number
                for number in sorted(waiting)
            }
            try:
                for future in distributed.as_completed(futures, loop=client.loop):
                    number = futures[future]
                    try:
                        answer = future.result()
                    except distributed.KilledWorker:
                        raise _given_up(names[number]) from None
                    except concurrent.futures.CancelledError:
                        continue  # every worker that held the shared part died: sent again below
                    waiting.discard(number)
                    yield number, answer
            finally:
                client.cancel(list(futures))
            lost += bool(waiting)
            if lost > RETRIES:
                raise _given_up(names[min(waiting)])


def _facts() -> dict[str, Any]:
    """Return what decides a worker's numbers."""
    found = {name: importlib.metadata.version(name) for name in ("nca_trader", "jax")}
    return found | {"cores": cores()}


def _check_cluster(client: Any, cluster: Cluster) -> None:
    """Refuse workers of another version, or without the resource that a job takes."""
    import distributed

    try:
        client.wait_for_workers(1, timeout=PATIENCE)
    except (TimeoutError, distributed.TimeoutError):
        raise StoreError(
            f"{cluster.address}: no worker has joined for {PATIENCE:.0f} seconds; start some."
        ) from None
    workers = client.scheduler_info(n_workers=-1)["workers"]
    for name, amount in cluster.resources.items():
        # Dask would wait for such a worker without end.
        if not any(worker["resources"].get(name, 0) >= amount for worker in workers.values()):
            raise ConfigError(
                f"{cluster.address}: no worker has {amount:g} {name}; start a dask worker with "
                f"the resources {name}={amount:g}."
            )
    ours = _facts()
    for address, theirs in client.run(_facts, on_error="return").items():
        if not isinstance(theirs, dict):
            raise ConfigError(
                f"{address}: this worker cannot import nca_trader ({theirs}); install it there."
            )
        for name in ("nca_trader", "jax"):
            if theirs[name] != ours[name]:
                raise ConfigError(
                    f"{address}: this worker has {name} {theirs[name]}, here it is {ours[name]}; "
                    "install the same version."
                )
        if theirs["cores"] != ours["cores"]:
            said = "%s has %d cores and this machine %d: sums may differ in their last bits"
            log.warning(said, address, theirs["cores"], ours["cores"])
