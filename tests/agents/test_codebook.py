"""Codebooks: k-means against a plain one, directions of length 1, exactness where it must be."""

import numpy as np
import pytest

from nca_trader.agents import quantise as codebook
from nca_trader.agents.quantise import Codebook, train_codebook
from nca_trader.errors import ConfigError


def points(seed=0, count=300, size=2):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(6, size)) * 5
    return (centres[rng.integers(6, size=count)] + rng.normal(size=(count, size))).astype("f4")


def plain_lloyd(groups, entries):
    """K-means as in the textbook, one point after the other, in float64."""
    entries = [np.array(c, "f8") for c in entries]
    for _ in range(100):
        owner = [int(np.argmin([((g - c) ** 2).sum() for c in entries])) for g in groups]
        moved = []
        for k, c in enumerate(entries):
            mine = [g.astype("f8") for g, o in zip(groups, owner, strict=True) if o == k]
            moved.append(sum(mine) / len(mine) if mine else c)
        if all(np.allclose(a, b, atol=1e-9) for a, b in zip(entries, moved, strict=True)):
            return np.array(moved), owner
        entries = moved
    raise AssertionError("it did not end")


def test_k_means_ends_where_a_plain_lloyd_ends():
    groups = points()
    begin = codebook.spread(groups, 6, np.random.default_rng(7))
    book = train_codebook(groups, "euclidean", 6, seed=7)
    want, owner = plain_lloyd(groups, begin)
    np.testing.assert_allclose(book.entries, want, rtol=1e-5)
    np.testing.assert_array_equal(book.nearest(groups), owner)


def test_k_means_plus_plus_spreads_its_beginnings_and_follows_its_seed():
    rng = np.random.default_rng(0)
    far = np.repeat(np.arange(8.0)[:, None] * 100, 50, axis=0) + rng.normal(size=(400, 1))
    begin = codebook.spread(far.astype("f4"), 8, np.random.default_rng(1))
    assert sorted(np.round(begin[:, 0] / 100)) == list(range(8))  # one in each clump
    one, two, other = (train_codebook(points(), "cosine", 5, seed=s) for s in (1, 1, 2))
    np.testing.assert_array_equal(one.entries, two.entries)
    assert not np.array_equal(np.sort(one.entries, 0), np.sort(other.entries, 0))


def test_directions_have_length_one_and_are_chosen_by_angle():
    groups = points(3, size=3)
    book = train_codebook(groups, "cosine", 16)
    np.testing.assert_allclose(np.linalg.norm(book.entries, axis=1), 1.0, rtol=1e-6)
    unit = groups / np.linalg.norm(groups, axis=1, keepdims=True)
    angle = np.arccos(np.clip(unit.astype("f8") @ book.entries.T.astype("f8"), -1, 1))
    chosen = angle[np.arange(len(groups)), book.nearest(groups)]
    np.testing.assert_allclose(chosen, angle.min(1), atol=1e-6)
    np.testing.assert_array_equal(book.nearest(groups), book.nearest(17 * groups))
    # A longer codebook leaves less of an angle.
    finer = train_codebook(groups, "cosine", 64)
    assert (unit * finer.entries[finer.nearest(groups)]).sum(1).mean() > np.cos(chosen).mean()


def test_an_entry_that_nothing_is_near_to_stays():
    book = Codebook("euclidean", np.array([[0.0], [9.0]], "f4"))
    moved = codebook.centres(np.array([[1.0], [3.0]], "f4"), np.array([0, 0]), book)
    np.testing.assert_array_equal(moved, [[2.0], [9.0]])


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_of_as_many_values_as_entries_come_back_exactly(bits):
    rng = np.random.default_rng(0)
    values = rng.normal(size=2**bits).astype("f4")
    values[0] = 1.0 + np.abs(values).max()
    w = values[rng.integers(len(values), size=(301, 3))]
    w[: len(values)] = values[:, None][: len(w)]  # each channel has all, so one scale fits all
    leaves = {"m.w": w, "m.b": np.ones(3, "f4")}
    tensors = codebook.coded({**leaves}, "euclidean", bits, 1, 0)
    with pytest.raises(ConfigError, match="saves nothing"):
        codebook.coded(leaves, "euclidean", 8, 64, 0)
    back = codebook.decoded(tensors, {k: v.shape for k, v in leaves.items()}, "euclidean", bits)
    np.testing.assert_array_equal(back["m.b"], leaves["m.b"])
    np.testing.assert_allclose(back["m.w"], w, rtol=2e-6)
    assert tensors["m.w"].nbytes == (903 if bits == 8 else 452)


def test_directions_and_gains_give_a_matrix_back_that_has_them():
    # Odd length: the last group of a channel is filled up with zeros.
    rng = np.random.default_rng(0)
    angles = 2 * np.pi * np.arange(16) / 16
    directions = np.stack([np.cos(angles), np.sin(angles)], -1)
    directions = directions[rng.integers(16, size=(40, 3))]
    gains = rng.integers(1, 256, size=(40, 3, 1))
    gains[0] = 255
    w = (gains * directions).transpose(0, 2, 1).reshape(80, 3).astype("f4") / 255
    shapes = {"m.w": w.shape}
    back = codebook.decoded(codebook.coded({"m.w": w}, "cosine", 4, 2, 3), shapes, "cosine", 4)
    np.testing.assert_allclose(back["m.w"], w, atol=0.5 / 255 * 1.01)
    odd = codebook.coded({"m.w": w[:79]}, "cosine", 4, 2, 3)
    back = codebook.decoded(odd, {"m.w": (79, 3)}, "cosine", 4)
    np.testing.assert_allclose(back["m.w"][:78], w[:78], atol=2.5 / 255)


def test_what_makes_no_codebook_is_refused():
    with pytest.raises(ConfigError, match="a single weight has no direction"):
        train_codebook(np.ones((9, 1)), "cosine", 2)
    with pytest.raises(ConfigError, match="16 entries for 1 different groups"):
        train_codebook(np.ones((99, 2)), "euclidean", 16)
    with pytest.raises(ConfigError, match="4 or 8 bits"):
        codebook.coded({}, "euclidean", 16, 1, 0)
