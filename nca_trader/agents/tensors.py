"""Named arrays in one file that can run no code, and that is refused if a single bit of it changed.

The layout is that of safetensors, which other tools read: 8 bytes of header length (little
endian), a JSON header, the arrays' bytes. The header's metadata hold what kind of file it is, the
version of its format, and the SHA-256 of all bytes with that digest itself written as zeros.
"""

from __future__ import annotations

import hashlib
import json
import math
import pathlib
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from nca_trader.cloud import Place
from nca_trader.config.records import read_json
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
LARGEST, RANK = 1 << 30, 8  # bytes of a file and axes of an array, at most


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


Layout = Mapping[str, tuple[type, tuple[int, ...]]]  # type and shape of each array, by name


def refuse_other(tensors: Mapping[str, np.ndarray], layout: Layout) -> None:
    """Refuses arrays that are not those of `layout`, and numbers that are not finite.

    Raises:
      ValueError: the first that is missing, unknown, of another type or shape, or not finite.
    """
    for name in [*layout, *tensors]:
        if name not in tensors or name not in layout:
            raise ValueError(f"tensor {name!r} is {'missing' if name in layout else 'unknown'}")
        found, (dtype, shape) = tensors[name], layout[name]
        if found.dtype != dtype or found.shape != shape:
            there, here = f"{found.dtype} {found.shape}", f"{np.dtype(dtype)} {shape}"
            raise ValueError(f"tensor {name!r} is {there} where its agent has {here}")
        if found.dtype.kind == "f" and not np.isfinite(found).all():
            raise ValueError(f"tensor {name!r} holds a number that is not finite")


def read_tensors(
    path: Place, kind: str, version: int
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays and the metadata of a file that `write_tensors` wrote.

    Raises:
      StateError: it was damaged or changed.
      RunError: there is no such file; it is of another kind, or of a version that is not read.
    """
    try:
        if isinstance(path, pathlib.Path) and path.stat().st_size > LARGEST:
            raise RunError(f"{path}: is larger than {LARGEST:,} bytes; give a {kind} file.")
        content = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}); give a {kind} file.") from None
    try:
        (length,) = struct.unpack("<Q", content[:8])
        header = read_json(content[8 : 8 + length], str(path))
        about = header.pop("__metadata__")
        there, number, digest = about["kind"], int(about["version"]), about["sha256"]
    except (StateError, ValueError, KeyError, TypeError, AttributeError, struct.error):
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
    if 8 + length > len(content):
        raise _damaged(path, "its header is longer than the file")
    arrays, end = {}, 8 + length
    for name, entry in sorted(header.items(), key=lambda item: _offset(item[1])):
        try:
            arrays[name] = _array(content, entry, 8 + length, end)
        except ValueError as error:
            raise _damaged(path, f"tensor {name!r} {error}") from None
        end += arrays[name].nbytes
    if end != len(content):
        raise _damaged(path, f"{len(content) - end:,} bytes belong to no tensor")
    return {name: arrays[name] for name in header}, about


def _field(digest: object) -> bytes:
    return f'"sha256": "{digest}"'.encode()


def _offset(entry: Any) -> int:
    """Where an array begins in the file's data; -1 where its entry does not say it."""
    place = entry.get("data_offsets") if isinstance(entry, dict) else None
    return place[0] if isinstance(place, list) and place and _counts(place, 2) else -1


def _counts(value: Any, most: int) -> bool:
    """Whether `value` is a list of at most `most` whole numbers of at least 0."""
    return (
        isinstance(value, list)
        and all(type(n) is int and n >= 0 for n in value[: most + 1])
        and (len(value) <= most)
    )


def _array(content: bytes, entry: Any, data: int, begin: int) -> np.ndarray:
    """The array of an entry, which must begin at `begin`; nothing is copied.

    Raises:
      ValueError: the entry is malformed, or its bytes are not inside the file; says which.
    """
    fields = {"dtype", "shape", "data_offsets"}
    if not isinstance(entry, dict) or entry.keys() != fields:
        raise ValueError("has not the fields dtype, shape and data_offsets alone")
    shape, place, dtype = entry["shape"], entry["data_offsets"], DTYPES.get(str(entry["dtype"]))
    if dtype is None:
        raise ValueError(f"has the type {str(entry['dtype'])[:20]!r}, not {', '.join(DTYPES)}")
    if not _counts(shape, RANK) or not _counts(place, 2) or len(place) != 2:
        raise ValueError(f"has a shape of other than {RANK} whole numbers at most, or no offsets")
    size = math.prod(shape)  # of Python's integers: it cannot overflow
    if size * dtype.itemsize != place[1] - place[0] or max(shape, default=0) > LARGEST:
        raise ValueError("has a shape that is not as large as its bytes")
    if data + place[0] != begin or data + place[1] > len(content):
        raise ValueError("has bytes that overlap others, leave a gap, or end behind the file")
    return np.frombuffer(content, dtype, size, begin).reshape(shape)


def _damaged(path: Place, what: str) -> StateError:
    return StateError(f"{path}: damaged: {what}; restore it from a copy, or export it again.")
