"""Named arrays in one file that runs no code and is refused if a single bit of it changed.

The layout is that of safetensors, which other tools read: 8 bytes of header length (little
endian), a JSON header, the bytes of the arrays. The header's metadata hold the kind of file, the
version of its format, and the SHA-256 of all bytes, computed with zeros in its own place. The
safetensors library checks no sum: version 0.8.0 loaded a file after any one bit of its arrays was
flipped. So this module has its own reader; a test flips a bit in every byte of a file.
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

Layout = Mapping[str, tuple[type, tuple[int, ...]]]  # type and shape of each array, by name


def write_tensors(
    path: pathlib.Path,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str],
    kind: str,
    version: int,
) -> int:
    """Write a file completely or not at all.

    Args:
      path: the file.
      tensors: arrays of float32, int32, int16, int8 or uint8, by name.
      metadata: texts by name, other than "kind", "version" and "sha256".
      kind: the kind of file, e.g. "nca_trader policy".
      version: of its format.

    Returns:
      The size of the file in bytes.

    Raises:
      StateError: it cannot be written.
    """
    about = {**metadata, "kind": kind, "version": str(version), "sha256": NO_DIGEST}
    header: dict[str, object] = {"__metadata__": about}
    pieces, end = [], 0
    for name, array in tensors.items():
        # The format has row-major arrays only.
        piece = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": NAMES[array.dtype.newbyteorder("<")],
            "shape": list(array.shape),
            "data_offsets": [end, end + len(piece)],
        }
        pieces.append(piece)
        end += len(piece)
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the arrays
    content = struct.pack("<Q", len(text)) + text + b"".join(pieces)
    digest = hashlib.sha256(content).hexdigest()
    content = content.replace(_field(NO_DIGEST), _field(digest), 1)
    write_atomically(path, content)
    return len(content)


def refuse_other(tensors: Mapping[str, np.ndarray], layout: Layout) -> None:
    """Validate that arrays have the names, types and shapes of `layout` and are finite.

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
    """Read a file that `write_tensors` wrote; the arrays are views of its bytes.

    Returns:
      The arrays by name, and the metadata.

    Raises:
      StateError: it was damaged or changed.
      RunError: there is no such file, it is of another kind, or of a version that is not read.
    """
    try:
        # Before reading: a wrong file must not fill the memory.
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
    # The first match is in the header, which comes before the arrays.
    blank = content.replace(_field(digest), _field(NO_DIGEST), 1)
    if hashlib.sha256(blank).hexdigest() != digest:
        raise _damaged(path, "its SHA-256 differs from the one it was written with")
    # After the digest, so a damaged name is called damage and not another kind.
    if there != kind:
        raise RunError(f"{path}: is a {there} file, not a {kind} file.")
    if number != version:
        raise RunError(
            f"{path}: format {number}, this version reads {version}; write it again from its run."
        )
    # A forged file has a valid digest too, so every entry is validated before it is read.
    arrays, end = {}, 8 + length
    try:
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            shape, place, dtype = entry.pop("shape"), entry.pop("data_offsets"), entry.pop("dtype")
            if entry or dtype not in DTYPES or not _counts(shape, RANK) or not _counts(place, 2):
                raise _damaged(path, f"tensor {name!r} has a malformed entry")
            size = math.prod(shape)  # of Python's integers: it cannot overflow
            begin, stop = (8 + length + offset for offset in place)
            if begin != end or stop > len(content) or max(shape, default=0) > LARGEST:
                raise _damaged(path, f"tensor {name!r} overlaps others or leaves a gap")
            if size * DTYPES[dtype].itemsize != stop - begin:
                raise _damaged(path, f"tensor {name!r} is not as large as its bytes")
            arrays[name] = np.frombuffer(content, DTYPES[dtype], size, begin).reshape(shape)
            end = stop
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _damaged(path, "an entry of its header is malformed") from None
    if end != len(content):
        raise _damaged(path, f"{len(content) - end:,} bytes belong to no tensor")
    # In the order of the header, not of the bytes.
    return {name: arrays[name] for name in header}, about


def _field(digest: object) -> bytes:
    return f'"sha256": "{digest}"'.encode()


def _counts(value: Any, most: int) -> bool:
    """Whether `value` is a list of at most `most` whole numbers, none below 0."""
    return (
        isinstance(value, list)
        and all(type(n) is int and n >= 0 for n in value[: most + 1])
        and (len(value) <= most)
    )


def _damaged(path: Place, what: str) -> StateError:
    return StateError(f"{path}: damaged: {what}; restore it from a copy, or export it again.")
