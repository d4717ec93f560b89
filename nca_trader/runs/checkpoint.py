"""Checkpoints: Orbax on disk, one SHA-256 a file and a leaf, restored only if all agree.

Orbax restores a flipped byte without an error and with wrong values, so the checksums are ours:
a checkpoint that does not verify is passed over for the newest one that does. Those of the files
are looked at first: a damaged file that Orbax reads leaves threads behind that print tracebacks.

Training waits for a copy of its state in the host's memory; a thread does the rest. The thread is
ours and not Orbax's, since the checksums come before what Orbax does and after it. In a run of
several processes the first one writes the whole state: accounts and indexes of bars are small,
and what is whole goes onto any other mesh.

Into an object store a checkpoint goes by way of a temporary folder, and comes back the same way.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import pathlib
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import Array

from nca_trader.cloud import CloudPath, Place, together
from nca_trader.config.records import read_json, record
from nca_trader.disk import scratch, sha256_of, write_atomically
from nca_trader.errors import ConfigError, NcaTraderError, RunError, StateError, StoreError
from nca_trader.parallel import hosts

FORMAT = 1
REMEDY = "use the versions in the run's run.json, or train into another folder."
log = logging.getLogger(__name__)


def flatten(tree: Any) -> dict[str, np.ndarray]:
    """The leaves of `tree` by path, copied to the host; typed keys as their data.

    A leaf that lies on the devices of several processes comes whole; all of them must call this.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): hosts.copied(_data(leaf)) for path, leaf in leaves}


def unflatten(like: Any, leaves: dict[str, np.ndarray]) -> Any:
    """A tree of the structure, types and shardings of `like` with the values of `leaves`.

    Raises:
      RunError: `leaves` are of another tree; names the first leaf that differs.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    if set(names) != set(leaves):
        odd = sorted(set(names) ^ set(leaves))
        where = "there" if odd[0] in leaves else "here"
        raise RunError(f"the checkpoint is of another agent: {odd[0]} is only {where}; {REMEDY}")
    values = [_like(name, leaf, leaves[name]) for name, (_, leaf) in zip(names, paths, strict=True)]
    return jax.tree_util.tree_unflatten(structure, values)


def _data(leaf: Array) -> Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_key(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _like(name: str, leaf: Array, value: np.ndarray) -> Array:
    shape = jax.eval_shape(_data, leaf)
    if value.shape != shape.shape or value.dtype != shape.dtype:
        raise RunError(
            f"the checkpoint is of another agent: {name} is {value.dtype}{list(value.shape)} "
            f"there and {shape.dtype}{list(shape.shape)} here; {REMEDY}"
        )
    # Each process puts what its own devices hold, whatever the mesh was when it was saved.
    placed = jax.make_array_from_callback(value.shape, leaf.sharding, value.__getitem__)
    if _is_key(leaf):
        placed = jax.random.wrap_key_data(placed, impl=jax.random.key_impl(leaf))
    return jax.device_put(placed, leaf.sharding)


def _digests(folder: pathlib.Path) -> dict[str, str]:
    """SHA-256 of every file below `folder` but `FILES`, by its path there."""
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
    # The storage below Orbax has error types of its own; those of the system come as they are.
    except (OSError, ValueError) as error:
        raise StateError(
            f"{path}: checkpoints cannot be {what} ({error}); mend that, then give the same "
            "command again."
        ) from error


def _forget_failed_reads() -> None:
    """Collects what a failed restore left behind, now and without a word.

    Orbax gives up at the first file that fails; the tasks that read the others fail with nobody
    to hear it, and whenever they are collected asyncio prints a traceback for each.
    """
    logger = logging.getLogger("asyncio")
    was, logger.disabled = logger.disabled, True
    try:
        gc.collect()
    finally:
        logger.disabled = was


def _checksum(value: np.ndarray) -> str:
    head = f"{value.dtype}{value.shape}".encode()
    return hashlib.sha256(head + np.ascontiguousarray(value).tobytes()).hexdigest()


def _options(keep: int) -> ocp.CheckpointManagerOptions:
    """Of the process that writes; the others only read, and none waits for another."""
    alone: dict[str, Any] = {"enable_async_checkpointing": False, "create": False}
    if hosts.count() > 1:
        own = hosts.own()
        alone["multiprocessing_options"] = ocp.options.MultiprocessingOptions(
            primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process_{own}"
        )
    if not hosts.first():
        alone |= {"read_only": True, "save_interval_steps": 0}
        return ocp.CheckpointManagerOptions(**alone)
    return ocp.CheckpointManagerOptions(max_to_keep=keep, **alone)


class Checkpoints:
    """The checkpoints of one run, by number of updates done."""

    def __init__(self, path: Place, keep: int = 3):
        """Opens or creates the folder `path`; the newest `keep` checkpoints stay.

        Raises:
          StateError: the folder cannot be made or read.
        """
        self.path = path
        self._uploaded: Uploaded | None = None
        self._closing = contextlib.ExitStack()
        with _as_state_error(path, "opened"):
            if isinstance(path, CloudPath):
                self._uploaded, keep = Uploaded(path, keep), 1
                path = self._closing.enter_context(scratch())
            path.mkdir(parents=True, exist_ok=True)
            self._folder = path.absolute()  # Orbax's
            self._manager = ocp.CheckpointManager(self._folder, options=_options(keep))
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.wait()
        except NcaTraderError as error:
            if kind is None:
                raise
            log.warning("%s", error)  # what ended the block is said, and this before it
        finally:
            self._writer.shutdown()
            self._manager.close()
            self._closing.close()

    def save(self, update: int, tree: Any, config: dict[str, str] | None = None) -> None:
        """Saves every leaf of `tree`; returns once they are copied, `wait` once they are on disk.

        It waits for the checkpoint before, if that is still being written.

        Args:
          update: number of updates done. tree: what training carries.
          config: files of the configuration by name, so that a checkpoint says by itself what
            it is one of; the run's own files are the ones that are read.

        Raises:
          StateError: the checkpoint before could not be written, see `wait`.
        """
        self.wait()
        leaves = flatten(tree)
        if hosts.first():
            self._writing = self._writer.submit(self._write, update, leaves, config or {})

    def wait(self) -> None:
        """Returns once what was saved is on disk.

        Raises:
          StateError: it is not: the disk is full, or the folder not writable.
          ConfigError, StoreError: it is not in the store, see `CloudPath`.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def check(self) -> None:
        """Raises what `wait` would, where that is known already; waits for nothing."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def _write(self, update: int, leaves: dict[str, np.ndarray], config: dict[str, str]) -> None:
        sums = {name: _checksum(value) for name, value in leaves.items()}
        with _as_state_error(self.path, "written"):
            # One that was passed over as damaged: Orbax saves nothing below its newest step.
            for step in self._manager.all_steps():
                if step >= update:
                    self._manager.delete(step)
            self._manager.save(
                update,
                args=ocp.args.Composite(
                    leaves=ocp.args.StandardSave(leaves),
                    sums=ocp.args.JsonSave({"format": FORMAT, "sha256": sums, "config": config}),
                ),
            )
            self._manager.wait_until_finished()
            folder = self._folder / str(update)
            write_atomically(folder / FILES, json.dumps(_digests(folder)) + "\n")
            if self._uploaded is not None:
                self._uploaded.upload(update, folder)

    def steps(self) -> list[int]:
        """Numbers of the checkpoints on disk, oldest first, verified or not."""
        self.wait()
        if self._uploaded is not None:
            return self._uploaded.steps()
        return sorted(self._manager.all_steps())

    def newest(self) -> tuple[int, dict[str, np.ndarray]] | None:
        """The newest checkpoint whose every leaf verifies; None where there is none at all.

        Of several processes the first one chooses, and each reads and verifies.

        Raises:
          StateError: there are checkpoints and none of them verifies.
          RunError: the newest that is whole has another format.
          ConfigError, StoreError: the store does not answer, which is no damage.
        """
        found = hosts.on_first(self._newest)
        if hosts.count() == 1:
            return found
        step = int(hosts.of_first(np.int32(-1 if found is None else found[0])))
        return found if found is not None or step < 0 else (step, self._read(step))

    def _newest(self) -> tuple[int, dict[str, np.ndarray]] | None:
        steps = self.steps()
        for step in reversed(steps):
            try:
                return step, self._read(step)
            except (RunError, ConfigError, StoreError):
                raise
            # Orbax and its storage raise many types for a truncated or missing file.
            except Exception as error:
                what = str(error).partition(" [tensorstore_spec")[0][:200]
                log.warning("%s: checkpoint %d is damaged (%s)", self.path, step, what)
            _forget_failed_reads()
        if steps:
            raise StateError(
                f"{self.path}: none of the checkpoints {steps} verifies; restore the folder from "
                "a copy, or train into another folder."
            )
        return None

    def _read(self, step: int) -> dict[str, np.ndarray]:
        """The leaves of a checkpoint, verified; of one in a store with a copy that then goes."""
        if self._uploaded is None:
            return self._verified(step)
        copy = self._folder / str(step)
        shutil.rmtree(copy, ignore_errors=True)
        try:
            self._uploaded.download(step, copy)
            self._manager.reload()
            return self._verified(step)
        finally:
            shutil.rmtree(copy, ignore_errors=True)
            self._manager.reload()

    def _verified(self, step: int) -> dict[str, np.ndarray]:
        files = self._folder / str(step) / FILES
        # A kill may have come before this file was written; the leaves have their own checksums.
        whole = files.exists()
        if whole:
            expected = record(dict[str, str], read_json(files.read_bytes(), FILES), FILES)
            found = _digests(files.parent)
            # A file that came later, such as a desktop's, is no damage.
            _compare({name: found[name] for name in found if name in expected}, expected)
        sums = self._manager.restore(step, args=ocp.args.Composite(sums=ocp.args.JsonRestore()))
        sums = sums["sums"]
        if sums["format"] != FORMAT:
            problem = f"checkpoint {step} has format {sums['format']}, this version reads {FORMAT}"
            if whole:  # and so no flipped byte
                raise RunError(f"{self.path}: {problem}; {REMEDY}")
            raise StateError(problem)
        read = self._manager.restore(
            step, args=ocp.args.Composite(leaves=ocp.args.StandardRestore())
        )
        leaves = {name: np.asarray(value) for name, value in read["leaves"].items()}
        _compare({name: _checksum(leaf) for name, leaf in leaves.items()}, sums["sha256"])
        return leaves


FILES = "files.json"  # in a checkpoint's folder: SHA-256 of every other file there


class Uploaded:
    """The checkpoints below a place in a store, by number; one process at most may write."""

    def __init__(self, path: CloudPath, keep: int):
        """Asks nothing of the store yet; the newest `keep` stay."""
        self._path, self._keep = path, keep

    def steps(self) -> list[int]:
        """Numbers of the checkpoints that are committed, oldest first, verified or not."""
        return _committed(self._objects())

    def upload(self, step: int, folder: pathlib.Path) -> None:
        """Puts a checkpoint's files there, `FILES` last; then deletes what is older than `keep`.

        Before, checkpoints from `step` on are deleted: they were passed over as damaged.
        """
        objects = self._objects()
        self._delete({old: names for old, names in objects.items() if old >= step})
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        head = folder / FILES
        there = self._path / str(step)
        together(
            lambda file: (there / file.relative_to(folder).as_posix()).put(file),
            [file for file in files if file != head],
        )
        (there / FILES).put(head.read_bytes())
        older = {old: names for old, names in objects.items() if old < step}
        kept = [*_committed(older), step][-self._keep :]
        self._delete({old: names for old, names in older.items() if old not in kept})

    def download(self, step: int, folder: pathlib.Path) -> None:
        """Copies the files that a checkpoint's `FILES` names, and that, into a folder.

        Nothing is verified: that is done with the files.

        Raises:
          FileNotFoundError, StateError, ValueError: it is not whole, or its `FILES` is damaged.
        """
        there = self._path / str(step)
        content = (there / FILES).read_bytes()
        names = list(record(dict[str, str], read_json(content, FILES), FILES))
        if any(".." in pathlib.PurePosixPath(name).parts for name in names):
            raise ValueError(f"{FILES} names files outside the checkpoint")
        together(lambda name: (there / name).download(folder / name.lstrip("/")), names)
        (folder / FILES).write_bytes(content)

    def _objects(self) -> dict[int, list[str]]:
        """Names of the objects, relative to the checkpoints' folder, by checkpoint."""
        found: dict[int, list[str]] = {}
        for name in self._path.below():
            step = name.partition("/")[0]
            if step.isdecimal():
                found.setdefault(int(step), []).append(name)
        return dict(sorted(found.items()))

    def _delete(self, objects: dict[int, list[str]]) -> None:
        names = {name for each in objects.values() for name in each}
        heads = sorted(names & {f"{step}/{FILES}" for step in objects})
        self._path.delete(heads)
        self._path.delete(sorted(names - {*heads}))


def _committed(objects: dict[int, list[str]]) -> list[int]:
    return [step for step, names in objects.items() if f"{step}/{FILES}" in names]
