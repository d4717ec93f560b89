"""Work that can be resumed: a folder with its settings, sealed, and its finished parts."""

from __future__ import annotations

import io
import json
import os
import pathlib
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from nca_trader.config.records import RESTORE, difference, open_record, seal_record
from nca_trader.errors import RunError, StateError
from nca_trader.machine import make_directory, refuse_links_in, refuse_packed, write_atomically


class WorkFolder:
    """The folder of one piece of work; without a folder nothing is kept.

    The same settings take the parts that are there, others are refused. The settings are written
    with the first part, and each file is whole or not there.

    Args:
      folder: of the work; None keeps nothing.
      name: of the file of its settings.
      what: a word for the work, e.g. "walk-forward".
      settings: what decides the numbers.
      part: a word for a part, e.g. "fold"; its file is `PART-000.npz`.
      adopted: a setting that the numbers do not depend on; a folder keeps its own.

    Attributes:
      settings: in the types of JSON, with what was adopted.

    Raises:
      RunError: the folder holds work of other settings, or other files.
      StateError: its settings were changed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        name: str,
        what: str,
        settings: Mapping[str, Any],
        part: str = "part",
        adopted: str | None = None,
    ):
        self.folder = None if folder is None else pathlib.Path(folder)
        self._file = pathlib.Path(folder or "") / name
        self.what, self.part = what, part
        # As the file gives them back, tuples as lists, and what JSON does not have as text.
        self.settings: dict[str, Any] = json.loads(json.dumps(settings, default=str))
        if self.folder is None:
            return
        if not self._file.is_file():
            if self.folder.is_file() or (self.folder.is_dir() and any(self.folder.iterdir())):
                raise RunError(
                    f"{self.folder}: holds files of something else; choose another folder."
                )
            return
        refuse_links_in(self.folder)
        there, _ = open_record(self._file.read_bytes(), str(self._file))
        if adopted is not None:
            self.settings[adopted] = there.get(adopted)
        changed = difference(there, self.settings)
        if changed is not None:
            key, was, asked = changed
            raise RunError(
                f"{self.folder}: a {what} of something else: {key} was {was!r} there and is "
                f"{asked!r} now; choose another folder, or ask for the same."
            )

    def _place(self, number: int) -> pathlib.Path:
        return self._file.parent / f"{self.part}-{number:03}.npz"

    def begin(self) -> None:
        """Make the folder and write the settings, where they are not there yet.

        Raises:
          StateError: it cannot be written.
        """
        if self.folder is not None and not self._file.exists():
            make_directory(self.folder)
            write_atomically(self._file, seal_record(self.settings))

    def read(self, number: int) -> dict[str, np.ndarray] | None:
        """Return the arrays of a part; None where it is not there.

        Raises:
          StateError: its file is damaged.
        """
        file = self._place(number)
        if self.folder is None or not file.is_file():
            return None
        try:
            content = file.read_bytes()
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                refuse_packed(sum(one.file_size for one in archive.infolist()), len(content))
            # A zip file has a checksum of each array.
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                return dict(arrays)
        except (OSError, ValueError, zipfile.BadZipFile, EOFError, MemoryError) as error:
            raise self.damaged(number, error) from None

    def damaged(self, number: int, error: Exception) -> StateError:
        """Return the error of a part whose file holds something else."""
        what = " ".join(str(error).split()) or type(error).__name__
        file = self._place(number)
        return StateError(
            f"{file}: not a {self.part} of a {self.what} ({what}); {RESTORE}, or delete it."
        )

    def write(self, number: int, arrays: Mapping[str, Any]) -> None:
        """Keep a part.

        Raises:
          StateError: it cannot be written.
        """
        if self.folder is None:
            return
        self.begin()
        # In memory first, since a file that is written piece by piece could be cut off.
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        write_atomically(self._place(number), buffer.getvalue())
