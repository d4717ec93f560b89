"""Named arrays in one file that can run no code, and that is refused if a single bit of it changed.

The layout is that of safetensors, which other tools read: 8 bytes of header length (little
endian), a JSON header, the arrays' bytes. The header's metadata hold what kind of file it is, the
version of its format, and the SHA-256 of all bytes with that digest itself written as zeros.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import struct
from collections.abc import Mapping

import numpy as np

from nca_trader.cloud import Place
from nca_trader.disk import write_atomically
from nca_trader.errors import RunError, StateError

DTYPES = {
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
NO_DIGEST = "0" * 64


def write_tensors(
    path: pathlib.Path,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str],
    kind: str,
    version: int,
) -> int:
    """Writes a file, whole or not at all; returns its size in bytes.

    Args:
      path: where to. tensors: arrays of float32, int32, int16, int8 or uint8, by name.
      metadata: texts by name, but "kind", "version" and "sha256".
      kind: what the file is, e.g. "nca_trader policy". version: of its format.

    Raises:
      StateError: it cannot be written.
    """
    about = {**metadata, "kind": kind, "version": str(version), "sha256": NO_DIGEST}
    header: dict[str, object] = {"__metadata__": about}
    pieces, end = [], 0
    for name, array in tensors.items():
        piece = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": NAMES[array.dtype.newbyteorder("<")],
            "shape": list(array.shape),
            "data_offsets": [end, end + len(piece)],
        }
        pieces.append(piece)
        end += len(piece)
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    content = struct.pack("<Q", len(text)) + text + b"".join(pieces)
    digest = hashlib.sha256(content).hexdigest()
    content = content.replace(_field(NO_DIGEST), _field(digest), 1)
    write_atomically(path, content)
    return len(content)


def read_tensors(
    path: Place, kind: str, version: int
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays and the metadata of a file that `write_tensors` wrote.

    Raises:
      StateError: it was damaged or changed.
      RunError: there is no such file; it is of another kind, or of a version that is not read.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}); give a {kind} file.") from None
    try:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        about = header.pop("__metadata__")
        there, number, digest = about["kind"], int(about["version"]), about["sha256"]
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        raise _damaged(path, "its header cannot be read") from None
    blank = content.replace(_field(digest), _field(NO_DIGEST), 1)
    if hashlib.sha256(blank).hexdigest() != digest:
        raise _damaged(path, "its SHA-256 differs from the one it was written with")
    if there != kind:
        raise RunError(f"{path}: is a {there} file, not a {kind} file.")
    if number != version:
        raise RunError(
            f"{path}: format {number}, this version reads {version}; write it again from its run."
        )
    body = content[8 + length :]
    return {name: _array(body, entry) for name, entry in header.items()}, about


def _field(digest: object) -> bytes:
    return f'"sha256": "{digest}"'.encode()


def _array(body: bytes, entry: dict) -> np.ndarray:
    first, last = entry["data_offsets"]
    return np.frombuffer(body[first:last], DTYPES[entry["dtype"]]).reshape(entry["shape"])


def _damaged(path: Place, what: str) -> StateError:
    return StateError(f"{path}: damaged: {what}; restore it from a copy, or export it again.")
