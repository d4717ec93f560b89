"""Checkpoints: Orbax on disk or in a store, with a SHA-256 of every file and leaf.

Orbax restores a flipped byte without an error and with wrong values, so the checksums are ours: a
checkpoint that does not verify is skipped for the newest one that does. Files are verified before
Orbax reads them, since a damaged file that it reads leaves threads behind that print tracebacks.

Training waits for a copy of its state in the host's memory; a thread does the rest. The thread is
ours and not Orbax's, since checksums are computed before and after what Orbax does. In a run of
several processes the first one writes the whole state: accounts and indexes of bars are small,
and a leaf that is whole fits any other mesh.

What is deleted is what FOLDER.json names: the numbers that were begun here. A folder of somebody
else that has a number as its name stays.

In an object store, STEP/files.json has the SHA-256 of every other object of a checkpoint, and is
written last and deleted first. A checkpoint without it does not count: an upload that was cut off
leaves objects that are never read, and the next upload deletes them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import json
import logging
import math
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.cloud import CloudPath, Place, together
from nca_trader.config.records import read_json, record
from nca_trader.errors import ConfigError, NcaTraderError, RunError, StateError, StoreError, logger
from nca_trader.machine import refuse_packed, scratch, sha256_of, write_atomically
from nca_trader.parallel import hosts

FORMAT = 1
FILES = "files.json"  # in a checkpoint's folder: SHA-256 of every other file there
REMEDY = "use the versions in the run's run.json, or train into another folder."
log = logger(__name__)


def flatten(tree: Any) -> dict[str, np.ndarray]:
    """Return the leaves of `tree` by path, whole and on the host; typed keys as their data.

    A collective: where a leaf is on devices of several processes, all of them must call it.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {_stored_name(path): hosts.copy_to_host(_data(leaf)) for path, leaf in leaves}


def _stored_name(path: Any) -> str:
    """Return the name of a leaf as files have it: one field had another name before."""
    return jax.tree_util.keystr(path).replace("bankrupt", "ruined")


def unflatten(like: Any, leaves: dict[str, np.ndarray]) -> Any:
    """Return a tree of the structure, types and shardings of `like` with the values of `leaves`.

    Raises:
      RunError: `leaves` are of another tree; the message names the first leaf that differs.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    refuse_other(shapes_of(like), leaves)
    values = []
    for path, leaf in paths:
        value = leaves[_stored_name(path)]
        # Each process puts what its own devices hold, whatever the mesh was when it was saved.
        placed = jax.make_array_from_callback(value.shape, leaf.sharding, value.__getitem__)
        if _is_key(leaf):
            placed = jax.random.wrap_key_data(placed, impl=jax.random.key_impl(leaf))
        values.append(jax.device_put(placed, leaf.sharding))
    return jax.tree_util.tree_unflatten(structure, values)


def shapes_of(tree: Any, prefix: str = "") -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape and type of each leaf by its path, as `flatten` names it; keys as their data."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {prefix + _stored_name(p): jax.eval_shape(_data, leaf) for p, leaf in leaves}


def refuse_other(like: Mapping[str, Any], there: Mapping[str, Any], where: str = "") -> None:
    """Refuse leaves of another agent: other names, shapes or types.

    Args:
      like: the leaves that are right, by path, with their `shape` and `dtype`.
      there: those of the checkpoint.
      where: what the message begins with.

    Raises:
      RunError: the message names the first leaf that differs.
    """
    if odd := sorted(like.keys() ^ there.keys()):
        side = "there" if odd[0] in there else "here"
        what = f"the checkpoint is of another agent: {odd[0]} is only {side}"
        raise RunError(f"{where}{what}; {REMEDY}")
    for name, leaf in like.items():
        found = there[name]
        if found.shape != leaf.shape or found.dtype != leaf.dtype:
            raise RunError(
                f"{where}the checkpoint is of another agent: {name} is {found.dtype}"
                f"{list(found.shape)} there and {leaf.dtype}{list(leaf.shape)} here; {REMEDY}"
            )


def _data(leaf: Array) -> Array:
    # NumPy has no type for the typed keys of JAX.
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_key(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _digests(folder: pathlib.Path) -> dict[str, str]:
    """Return the SHA-256 of every file below `folder` but `FILES`, by its path there."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != FILES)
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}


def _compare(found: dict[str, str], expected: dict[str, str]) -> None:
    for name in sorted({*found, *expected}):
        if found.get(name) != expected.get(name):
            raise StateError(f"SHA-256 of {name} differs" if name in found else f"no {name}")


@contextlib.contextmanager
def _as_state_error(path: Place, what: str) -> Iterator[None]:
    try:
        yield
    except NcaTraderError:  # of a store
        raise
    # The storage below Orbax raises types of its own; those of the system pass through.
    except (OSError, ValueError) as error:
        raise StateError(
            f"{path}: checkpoints cannot be {what} ({error}); repair that, then give the same "
            "command again."
        ) from error


def _checksum(value: np.ndarray) -> str:
    # Type and shape are hashed too: the same bytes as another type are another leaf.
    head = f"{value.dtype}{value.shape}".encode()
    return hashlib.sha256(head + np.ascontiguousarray(value).tobytes()).hexdigest()


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """The checkpoints of one run, by number of updates done."""

    def __init__(self, path: Place, keep: int = 3):
        """Open or create the folder `path`; the newest `keep` checkpoints stay.

        Raises:
          StateError: the folder cannot be made or read.
        """
        # Here, since a rule needs none of it, and it takes 0.15 s to import.
        import orbax.checkpoint as ocp

        self._orbax = ocp
        self.path, self._keep = path, keep
        self._list = path.parent / f"{path.name}.json"
        self._uploaded: Uploaded | None = None
        self._closing = contextlib.ExitStack()
        with _as_state_error(path, "opened"):
            if isinstance(path, CloudPath):
                self._uploaded = Uploaded(path, keep)
                path = self._closing.enter_context(scratch())
            path.mkdir(parents=True, exist_ok=True)
            self._folder = path.absolute()  # Orbax's
            # Not asynchronous: the thread below does that, with the checksums, see above.
            options: dict[str, Any] = {"enable_async_checkpointing": False, "create": False}
            if hosts.count() > 1:  # Orbax must wait for no other process: they only read
                own = hosts.own()
                options["multiprocessing_options"] = ocp.options.MultiprocessingOptions(
                    primary_host=own,
                    active_processes={own},
                    barrier_sync_key_prefix=f"process_{own}",
                )
            if not hosts.first():
                options |= {"read_only": True, "save_interval_steps": 0}
            self._manager = ocp.CheckpointManager(
                self._folder, options=ocp.CheckpointManagerOptions(**options)
            )
        # One thread, so checkpoints are written in the order of their updates.
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.wait()
        except NcaTraderError as error:
            if kind is None:
                raise
            log.warning("%s", error)  # the exception that ended the block is raised
        finally:
            self._writer.shutdown()
            self._manager.close()
            self._closing.close()

    def save(self, update: int, tree: Any, config: dict[str, str] | None = None) -> None:
        """Save every leaf of `tree`; return after the copy to the host, before the write to disk.

        It waits for the previous checkpoint, if that is still being written.

        Args:
          update: number of updates done.
          tree: pytree of arrays that training carries.
          config: files of the configuration by name, so that a checkpoint describes itself.
            Nothing reads them: a run has its own.

        Raises:
          StateError: the previous checkpoint could not be written, see `wait`.
        """
        self.wait()
        # In every process, because `flatten` is a collective; only the first one writes.
        leaves = flatten(tree)
        if hosts.first():
            self._writing = self._writer.submit(self._write, update, leaves, config or {})

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk, or in the store.

        Raises:
          StateError: it cannot be written, e.g. because the disk is full.
          ConfigError, StoreError: it cannot be stored, see `CloudPath`.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def check(self) -> None:
        """Raise the error of `wait` if it is known already; do not wait."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def _write(self, update: int, leaves: dict[str, np.ndarray], config: dict[str, str]) -> None:
        sums = {name: _checksum(value) for name, value in leaves.items()}
        with _as_state_error(self.path, "written"):
            ours, there = self._begun(), self._manager.all_steps()
            # Before the first byte: a process that is killed leaves what the next one may delete.
            write_atomically(self._list, json.dumps(sorted({*ours, update})) + "\n")
            # The last are damaged ones that were skipped.
            for step in ours:
                if step in there and step >= update:
                    self._manager.delete(step)
            self._manager.save(
                update,
                force=True,  # also below a number that is not ours
                args=self._orbax.args.Composite(
                    leaves=self._orbax.args.StandardSave(leaves),
                    sums=self._orbax.args.JsonSave(
                        {"format": FORMAT, "sha256": sums, "config": config}
                    ),
                ),
            )
            self._manager.wait_until_finished()
            folder = self._folder / str(update)
            # After Orbax has written: checksums of unfinished files would refuse a good checkpoint.
            write_atomically(folder / FILES, json.dumps(_digests(folder)) + "\n")
            older = [step for step in ours if step in there and step < update]
            # The store has the others, so one local copy is enough.
            for step in older if self._uploaded else older[: max(len(older) + 1 - self._keep, 0)]:
                self._manager.delete(step)
            if self._uploaded is not None:
                self._uploaded.upload(update, folder, ours)

    def _begun(self) -> list[int]:
        """Return the numbers that this run began to write; without a list, what it finished."""
        with contextlib.suppress(StateError):
            if self._list.is_file():  # a pipe of that name would wait without end
                return record(list[int], read_json(self._list.read_bytes(), ""), "")
        steps = self._uploaded.steps() if self._uploaded else self._manager.all_steps()
        return [step for step in sorted(steps) if (self.path / str(step) / FILES).is_file()]

    def steps(self) -> list[int]:
        """Return the numbers of the checkpoints on disk, oldest first, verified or not."""
        self.wait()
        if self._uploaded is not None:
            return self._uploaded.steps()
        return sorted(self._manager.all_steps())

    def newest(
        self,
        only: int | None = None,
        like: Mapping[str, jax.ShapeDtypeStruct] | None = None,
        part: str = "",
    ) -> tuple[int, dict[str, np.ndarray]] | None:
        """Return the newest checkpoint whose every leaf verifies; None if there is no checkpoint.

        If there are several processes, the first one chooses, and each reads and verifies.

        Args:
          only: the number of the one that counts; None are all.
          like: shape and type of each leaf, by path; others are refused before a leaf is unpacked,
            which may take any memory. None takes every leaf.
          part: what the paths of the leaves begin with that are read.

        Raises:
          StateError: there are checkpoints and none of them verifies.
          RunError: the newest that is whole has another format, or is of another agent.
          ConfigError, StoreError: the store does not answer, which is not damage.
        """
        read = functools.partial(self._read, like=like, part=part)
        found = hosts.on_first(lambda: self._newest(only, read))
        if hosts.count() == 1:
            return found
        # Only arrays are broadcast, so -1 stands for None.
        step = int(hosts.broadcast(np.int32(-1 if found is None else found[0])))
        return found if found is not None or step < 0 else (step, read(step))

    def _newest(
        self, only: int | None, read: Callable[[int], dict[str, np.ndarray]]
    ) -> tuple[int, dict[str, np.ndarray]] | None:
        steps = [step for step in self.steps() if only in (None, step)]
        for step in reversed(steps):
            try:
                return step, read(step)
            # These are not damage: an older checkpoint would hide the cause.
            except (RunError, ConfigError, StoreError):
                raise
            # Orbax and its storage raise many types for a truncated or missing file.
            except Exception as error:
                what = str(error).partition(" [tensorstore_spec")[0][:200]
                log.warning("%s: checkpoint %d is damaged (%s)", self.path, step, what)
            # Orbax gives up at the first file that fails. The tasks that read the others fail
            # unheard, and asyncio prints a traceback for each when they are collected: do it now.
            logger = logging.getLogger("asyncio")
            was, logger.disabled = logger.disabled, True
            try:
                gc.collect()
            finally:
                logger.disabled = was
        if steps:
            raise StateError(
                f"{self.path}: none of the checkpoints {steps} verifies; restore the folder from "
                "a copy, or train into another folder."
            )
        return None

    def _read(self, step: int, like: Any = None, part: str = "") -> dict[str, np.ndarray]:
        """Return the verified leaves of a checkpoint; copy one from a store, for the moment."""
        if self._uploaded is None:
            return self._verified(step, like, part)
        copy = self._folder / str(step)
        shutil.rmtree(copy, ignore_errors=True)
        try:
            self._uploaded.download(step, copy)
            self._manager.reload()
            return self._verified(step, like, part)
        finally:
            shutil.rmtree(copy, ignore_errors=True)
            self._manager.reload()

    def _verified(self, step: int, like: Any, part: str) -> dict[str, np.ndarray]:
        files = self._folder / str(step) / FILES
        # A kill may have come before the file was written; leaves have checksums of their own.
        whole = files.is_file()
        if whole:
            expected = record(dict[str, str], read_json(files.read_bytes(), FILES), FILES)
            found = _digests(files.parent)
            # A file that came later, such as a desktop's, is not damage.
            _compare({name: found[name] for name in found if name in expected}, expected)
        sums = self._manager.restore(
            step, args=self._orbax.args.Composite(sums=self._orbax.args.JsonRestore())
        )
        sums = sums["sums"]
        if sums["format"] != FORMAT:
            problem = f"checkpoint {step} has format {sums['format']}, this version reads {FORMAT}"
            if whole:  # so the number is not a flipped byte
                raise RunError(f"{self.path}: {problem}; {REMEDY}")
            raise StateError(problem)
        handler: Any = self._orbax.PyTreeCheckpointHandler()
        folder = files.parent / "leaves"
        there = {k: v for k, v in handler.metadata(folder).items() if k.startswith(part)}
        if like is not None:
            refuse_other(like, there, f"{self.path}: ")
        counts = {k: max(math.prod(v.shape), 1) for k, v in there.items()}
        if any(math.prod(v.storage.chunk_shape) > counts[k] for k, v in there.items()):
            raise StateError("a leaf unpacks to more than its shape")
        # Parameters are random numbers, unlike a whole state, in which much is still 0.
        size = sum(count * there[k].dtype.itemsize for k, count in counts.items())
        packed = sum(path.stat().st_size for path in folder.rglob("*"))
        if part:
            refuse_packed(size, packed)
        how = self._orbax.args.PyTreeRestore(
            item=dict.fromkeys(there, 0),
            restore_args=dict.fromkeys(there, self._orbax.RestoreArgs(restore_type=np.ndarray)),
            partial_restore=True,
        )
        leaves = {k: np.asarray(v) for k, v in handler.restore(folder, args=how).items()}
        # The files verify above, but only this shows that Orbax read them right.
        wanted = {k: v for k, v in sums["sha256"].items() if k.startswith(part)}
        _compare({name: _checksum(leaf) for name, leaf in leaves.items()}, wanted)
        return leaves


class Uploaded:
    """The checkpoints below a place in a store, by number. At most one process may write."""

    def __init__(self, path: CloudPath, keep: int):
        """Read nothing yet; the newest `keep` stay."""
        self._path, self._keep = path, keep

    def steps(self) -> list[int]:
        """Return the numbers of the committed checkpoints, oldest first, verified or not."""
        return _committed(self._objects())

    def upload(self, step: int, folder: pathlib.Path, ours: Collection[int]) -> None:
        """Upload a checkpoint's files, `FILES` last; then delete all of `ours` but `keep`.

        Checkpoints from `step` on are deleted first: they were skipped as damaged.
        """
        objects = {old: names for old, names in self._objects().items() if old in ours}
        self._delete({old: names for old, names in objects.items() if old >= step})
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        head = folder / FILES
        there = self._path / str(step)
        together(
            lambda file: (there / file.relative_to(folder).as_posix()).put(file),
            [file for file in files if file != head],
        )
        # Last: this object commits the checkpoint.
        (there / FILES).put(head.read_bytes())
        older = {old: names for old, names in objects.items() if old < step}
        # An upload that was cut off is not committed, so its objects are deleted too.
        kept = [*_committed(older), step][-self._keep :]
        self._delete({old: names for old, names in older.items() if old not in kept})

    def download(self, step: int, folder: pathlib.Path) -> None:
        """Copy `FILES` of a checkpoint, and what it names, into a folder; verify nothing.

        Raises:
          FileNotFoundError, StateError, ValueError: it is incomplete, or `FILES` is damaged.
        """
        there = self._path / str(step)
        content = (there / FILES).read_bytes()
        names = list(record(dict[str, str], read_json(content, FILES), FILES))
        # The names come from the store; none may lead out of the folder, see `lstrip` below.
        if any(".." in pathlib.PurePosixPath(name).parts for name in names):
            raise ValueError(f"{FILES} names files outside the checkpoint")
        together(lambda name: (there / name).download(folder / name.lstrip("/")), names)
        (folder / FILES).write_bytes(content)

    def _objects(self) -> dict[int, list[str]]:
        """Return the names of the objects below the checkpoints' folder, by checkpoint."""
        found: dict[int, list[str]] = {}
        for name in self._path.below():
            step = name.partition("/")[0]
            if step.isdecimal():
                found.setdefault(int(step), []).append(name)
        return dict(sorted(found.items()))

    def _delete(self, objects: dict[int, list[str]]) -> None:
        names = {name for each in objects.values() for name in each}
        heads = sorted(names & {f"{step}/{FILES}" for step in objects})
        # First the heads: a checkpoint whose files are partly deleted must not count.
        self._path.delete(heads)
        self._path.delete(sorted(names - {*heads}))


def _committed(objects: dict[int, list[str]]) -> list[int]:
    return [step for step, names in objects.items() if f"{step}/{FILES}" in names]
