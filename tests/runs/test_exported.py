"""An exported agent: whole in one file, decides as its weights say, refused where it is wrong."""

import dataclasses
import hashlib
import json
import pathlib
import shutil
import struct
import tracemalloc

import jax
import numpy as np
import pytest

from nca_trader.agents import quantise
from nca_trader.errors import ConfigError, RunError, StateError
from nca_trader.evaluate.backtest import backtest
from nca_trader.runs import exported
from nca_trader.runs.exported import (
    Coding,
    Exported,
    compact,
    read_run,
    read_tensors,
    write_exported,
    write_tensors,
)

CODINGS = [
    Coding(bits=4),
    Coding(bits=8, activations=True),
    Coding(bits=16),
    Coding(bits=4, codebook="euclidean"),
    Coding(bits=4, codebook="cosine", group=2),
]

FIRST = "2020-01-01"


def compacted(tiny, coding):
    run, env = tiny.run, tiny.env
    return compact(run, run.params(), coding, env.features, env.bars.present)


@pytest.fixture(scope="module")
def written(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "agent"
    write_exported(path, tiny.run, compacted(tiny, Coding(bits=8)))
    return path


@pytest.fixture
def file(written, tmp_path):
    """A copy to be changed."""
    return pathlib.Path(shutil.copy(written, tmp_path))


@pytest.mark.heavy
@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_an_agent_comes_back_from_its_file_to_the_bit(tiny, tmp_path, coding):
    weights = compacted(tiny, coding)
    path = tmp_path / "agent"
    size = write_exported(path, tiny.run, weights)
    assert size == path.stat().st_size
    back, run = Exported(path), tiny.run
    assert back.weights.coding == coding and back.weights.nbytes == weights.nbytes
    assert (back.name, back.spec, back.selected) == (run.name, run.spec, run.selected)
    assert (back.agent_config, back.env_config) == (run.agent_config, run.env_config)
    want = weights.params(run.policy)
    jax.tree.map(np.testing.assert_array_equal, back.params(), want)
    assert bool(jax.tree.leaves(want)[0].any())


def test_sixteen_bits_trade_as_the_run_does(tiny, tmp_path):
    path = tmp_path / "agent"
    write_exported(path, tiny.run, compacted(tiny, Coding(bits=16)))
    ours, theirs = (backtest(tiny.bars, r, start=FIRST) for r in (Exported(path), tiny.run))
    np.testing.assert_allclose(ours.equity, theirs.equity, rtol=1e-12)
    assert ours.in_sample == theirs.in_sample and ours.charged == theirs.charged


def test_calibration_never_sees_a_bar_behind_the_training_span(tiny):
    env, run = tiny.env, tiny.run
    assert len(env) < len(tiny.bars)
    found = quantise.ranges(run.policy, run.params(), env.features, env.bars.present)
    wild = env.features.copy()
    wild[-1] = 100.0  # clipped to 5: a bar of the span does count
    other = quantise.ranges(run.policy, run.params(), wild, env.bars.present)
    assert other["nca.embed"] > found["nca.embed"]


def test_an_older_format_a_foreign_file_and_another_k_are_refused(file, tmp_path):
    tensors, about = read_tensors(file, exported.KIND, exported.VERSION)
    old = tmp_path / "old"
    write_tensors(old, tensors, about, exported.KIND, exported.VERSION - 1)
    with pytest.raises(RunError, match="format 1, this version reads 2; write it again from its"):
        read_run(old)
    write_tensors(old, tensors, about, "nca_trader codebook", 1)
    with pytest.raises(RunError, match="is a nca_trader codebook file, not a nca_trader policy"):
        read_run(old)
    with pytest.raises(ConfigError, match="steps=3"):
        read_run(file, steps=3)
    short = {name: tensor for name, tensor in tensors.items() if name != "nca.taps"}
    write_tensors(old, short, about, exported.KIND, exported.VERSION)
    with pytest.raises(StateError, match=r"nca\.taps"):
        read_run(old).params()


def test_a_folder_is_read_as_a_run(tiny):
    assert type(read_run(tiny.path)).__name__ == "Run"
    assert read_run(tiny.path, steps=3).policy.receptive_field == 1 + 2 * (1 + 2 + 1)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"bits": 5}, "give 4, 8 or 16"),
        ({"codebook": "hamming"}, "euclidean, cosine"),
        ({"group": 2}, "give codebook"),
        ({"codebook": "cosine", "group": 0}, "at least 1"),
        ({"codebook": "cosine", "group": 2, "activations": True}, "leave one out"),
    ],
)
def test_a_coding_that_is_none_is_refused(changes, remedy):
    with pytest.raises(ConfigError, match=remedy):
        dataclasses.replace(Coding(), **changes)


def forged(file, change):
    """Rewrites a file's header and data by hand, with the checksum that they then have."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    header["__metadata__"]["sha256"] = "0" * 64
    text = change(header, data)
    text = text if isinstance(text, bytes) else json.dumps(header, sort_keys=True).encode()
    whole = struct.pack("<Q", len(text)) + text + bytes(data)
    digest = hashlib.sha256(whole).hexdigest().encode()
    file.write_bytes(whole.replace(b'"sha256": "' + b"0" * 64, b'"sha256": "' + digest, 1))


def entry(**fields):
    """Changes fields of the entry of the tensor nca.taps."""
    return lambda header, data: header["nca.taps"].update(fields)


def about(name, old, new):
    """Changes a text of the metadata, in which `old` must stand."""

    def change(header, data):
        text = header["__metadata__"][name]
        assert old in text
        header["__metadata__"][name] = text.replace(old, new)

    return change


def not_finite(header, data):
    first, _ = header["nca.taps:step"]["data_offsets"]
    data[first : first + 4] = struct.pack("<f", float("nan"))


def shared_bytes(header, data):
    whole = header["nca.taps"]
    one = next(e for n, e in header.items() if n.endswith(":step"))
    one["data_offsets"] = [whole["data_offsets"][0], whole["data_offsets"][0] + 4 * one["shape"][0]]


def nested(header, data):
    return b'{"__metadata__": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


FORGERIES = {
    "a shape that is not its bytes": entry(shape=[1 << 40, 1 << 40]),
    "a shape of many axes": entry(shape=[1] * 1000),
    "a negative shape": entry(shape=[-4, -12]),
    "a shape of truth": entry(shape=[True]),
    "a shape of text": entry(shape="12"),
    "zero times a huge axis": entry(shape=[0, 1 << 62], data_offsets=[0, 0]),
    "offsets behind the file": entry(data_offsets=[1 << 40, (1 << 40) + 8]),
    "negative offsets": entry(data_offsets=[-8, 0]),
    "offsets of one number": entry(data_offsets=[0]),
    "huge offsets": entry(data_offsets=[0, 10**300]),
    "an unknown type": entry(dtype="F8"),
    "a type that is no text": entry(dtype=[]),
    "another field": entry(extra=1),
    "no entry": lambda header, data: header.update({"nca.taps": None}),
    "overlapping offsets": shared_bytes,
    "bytes of no tensor": lambda header, data: data.extend(bytes(8)),
    "a scale that is not finite": not_finite,
    "a tensor less": lambda header, data: header.pop("nca.taps"),
    "a deep nest": nested,
    "a header that is a list": lambda header, data: b"[]",
    "metadata that is a text": lambda header, data: header.update(__metadata__="x"),
    "a version of digits": about("version", str(exported.VERSION), "1" * 5000),
    "steps without end": about("agent.toml", "\nsteps = 2\n", "\nsteps = 1000000000\n"),
    "a wide policy": about("agent.toml", "channels = 4", "channels = 1000000000000"),
    "a long dilation": about("agent.toml", "dilations = [", "dilations = [4000000000, "),
    "a billion agents": about("agent.toml", "num_seeds = 1\n", "num_seeds = 1000000000\n"),
    "another number of bits": about("coding", '"bits": 8', '"bits": 4'),
    "a group": about("coding", '"none", "group": 1', '"cosine", "group": 9'),
    "an infinite step": about("steps", "{", '{"nca.embed": Infinity'),
    "a step of no matrix": about("steps", "{", '{"nca.none": 1.0'),
    "a step of 0": about("steps", "{", '{"nca.embed": 0.0'),
    "an agent after the first nine digits": about("seed", "0", "0000000001"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_file_with_a_valid_sum_and_other_contents_is_one_line(file, name):
    forged(file, FORGERIES[name])
    tracemalloc.start()
    with pytest.raises((StateError, ConfigError, RunError)) as caught:
        read_run(file).params()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    said = str(caught.value)
    assert said.startswith(f"{file}: ") and "\n" not in said and len(said) < 1000, said
    assert peak < 64 << 20, peak


def test_a_forgery_without_change_is_read(file):
    want = read_run(file).params()
    forged(file, lambda header, data: None)
    jax.tree.map(np.testing.assert_array_equal, read_run(file).params(), want)


def check_flips(file, seed, count):
    """Flips bits of header and data, gives the file its new sum, and reads it."""
    rng, content, refused = np.random.default_rng(seed), file.read_bytes(), 0

    def flip(header, data):
        text = bytearray(json.dumps(header, sort_keys=True).encode())
        for _ in range(int(rng.integers(1, 4))):
            some = text if rng.random() < 0.7 else data
            some[int(rng.integers(len(some)))] ^= 1 << int(rng.integers(8))
        return bytes(text)

    for case in range(count):
        file.write_bytes(content)
        forged(file, flip)
        try:
            params = read_run(file).params()
        except (StateError, ConfigError, RunError) as error:
            refused += 1
            said = str(error)
            assert str(file) in said and all(map(str.isprintable, said.split("\n"))), (case, said)
        else:
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)), case
    assert count / 4 < refused < count


def test_flipped_bits_under_a_valid_sum_are_refused_or_finite(file):
    check_flips(file, 0, 40)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_many_flipped_bits_under_a_valid_sum_are_refused_or_finite(file, seed):
    check_flips(file, seed, 700)
