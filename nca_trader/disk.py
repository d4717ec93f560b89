"""Files that are whole or not there, and known by their SHA-256."""

import contextlib
import hashlib
import os
import pathlib

from nca_trader.cloud import CloudPath, Place
from nca_trader.errors import StateError


def write_atomically(path: Place, content: str | bytes) -> None:
    """Writes `content`, a text as UTF-8, so that a reader, or a crash, never sees half of it.

    Raises:
      StateError: it can't be written; then nothing of it is left. Of a store see `CloudPath`.
    """
    content = content.encode() if isinstance(content, str) else content
    if isinstance(path, CloudPath):
        path.put(content)
        return
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise StateError(
            f"{path}: cannot be written ({error.strerror}); mend that, then try again."
        ) from None


def sha256_of(path: pathlib.Path) -> str:
    """SHA-256 of the bytes of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
