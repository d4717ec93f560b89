"""Checkpoints in an object store, each committed by one object that is put last.

STEP/files.json has the SHA-256 of every other object of a checkpoint. While it is not there the
checkpoint is not: an upload that was cut off leaves objects that nobody reads and the next upload
deletes. It is put after all others and deleted before them. Only objects that it names are read.
"""

from __future__ import annotations

import pathlib

from nca_trader.cloud import CloudPath, together
from nca_trader.config.records import read_json, record

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
