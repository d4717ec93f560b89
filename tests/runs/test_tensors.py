"""Arrays in a file: back to the bit, readable by others, refused if anything of it changed."""

import itertools
import json
import struct

import numpy as np
import pytest

from nca_trader.errors import RunError, StateError
from nca_trader.runs.exported import read_tensors, write_tensors

KIND = "test"
TENSORS = {
    "a": np.array([[1.5, -0.0], [np.nan, 3e-42]], np.float32),
    "b": np.arange(-3, 4, dtype=np.int8),
    "c": np.array(7, np.uint8),
    "d": np.array([-(2**15)], np.int16),
    "e": np.zeros((0, 3), np.int32),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    assert write_tensors(path, TENSORS, {"note": 'with "sha256": in it'}, KIND, 3) > 0
    return path


def test_what_is_written_comes_back_to_the_bit(file):
    tensors, about = read_tensors(file, KIND, 3)
    assert about["note"] == 'with "sha256": in it' and about["kind"] == KIND
    assert list(tensors) == list(TENSORS)
    for name, array in TENSORS.items():
        assert tensors[name].dtype == array.dtype and tensors[name].shape == array.shape
        assert tensors[name].tobytes() == array.tobytes()


def test_another_reader_of_safetensors_finds_the_arrays(file):
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    body = content[8 + length :]
    first, last = header["d"]["data_offsets"]
    assert header["d"]["dtype"] == "I16" and header["d"]["shape"] == [1]
    assert struct.unpack("<h", body[first:last]) == (-(2**15),)
    ends = sorted(header[name]["data_offsets"] for name in TENSORS)
    assert ends[0][0] == 0 and ends[-1][1] == len(body)  # no gap: so the format demands
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))


def test_a_single_flipped_bit_is_refused_wherever_it_is(file):
    content = file.read_bytes()
    rng = np.random.default_rng(0)
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << int(rng.integers(8))
        file.write_bytes(damaged)
        with pytest.raises(
            (StateError, RunError), match=r"damaged.*export it again|is a .* file, not"
        ):
            read_tensors(file, KIND, 3)


def test_a_file_that_was_cut_is_refused(file):
    content = file.read_bytes()
    for length in range(0, len(content), 7):
        file.write_bytes(content[:length])
        with pytest.raises(StateError, match=r"damaged: .*; restore it"):
            read_tensors(file, KIND, 3)


def test_another_version_kind_or_no_file_is_refused_with_the_remedy(file, tmp_path):
    with pytest.raises(RunError, match="format 3, this version reads 4; write it again"):
        read_tensors(file, KIND, 4)
    with pytest.raises(RunError, match="is a test file, not a policy file"):
        read_tensors(file, "policy", 3)
    with pytest.raises(RunError, match="cannot be read"):
        read_tensors(tmp_path / "none", KIND, 3)
