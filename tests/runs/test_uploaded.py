"""Checkpoints in a store: one is there once its last object is, and damage is never read."""

import itertools
import json

import numpy as np
import pytest

from nca_trader.cloud import place
from nca_trader.errors import ConfigError, StateError, StoreError
from nca_trader.runs.checkpoint import Checkpoints

WHERE = "run/checkpoints"


def tree(step):
    return {"a": np.random.default_rng(step).normal(size=50), "b": np.int32(step)}


def opened(keep=3):
    return Checkpoints(place(f"s3://b/{WHERE}"), keep)


def save(*steps, keep=3):
    with opened(keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, tree(step))


def newest():
    """The number of the newest checkpoint that verifies; its values are those of that number."""
    with opened() as checkpoints:
        found = checkpoints.newest()
    if found is None:
        return None
    wanted = tree(found[0])
    assert found[1]["['b']"] == wanted["b"] and (found[1]["['a']"] == wanted["a"]).all()
    return found[0]


def steps(objects):
    return sorted({int(name.partition("/")[0]) for name in objects.below(WHERE)})


def test_the_newest_checkpoint_comes_back_and_older_ones_are_deleted(objects):
    assert newest() is None
    save(1, 2, 3, 4, keep=2)
    assert newest() == 4 and steps(objects) == [3, 4]
    with opened() as checkpoints:
        assert checkpoints.steps() == [3, 4]
    for step in (3, 4):
        below = objects.below(f"{WHERE}/{step}")
        named = json.loads(objects[f"{WHERE}/{step}/files.json"])
        assert sorted([*named, "files.json"]) == below
    # Put last of its checkpoint, deleted first of it.
    for step, order, end in ((4, objects.puts, -1), (1, objects.deletes, 0)):
        own = [key for key in order if key.startswith(f"{WHERE}/{step}/")]
        assert own[end] == f"{WHERE}/{step}/files.json" and len(own) > 5


def stop_at(objects, what, count):
    """The connection breaks at the request of this kind that comes after `count` others."""
    left = itertools.count(count, -1)

    def fail(asked, key):
        if asked == what and next(left) <= 0:
            raise RuntimeError("connection reset")

    objects.before = fail


def test_an_upload_that_stops_at_any_put_is_never_taken(objects):
    save(1)
    first, done, stop = len(objects.below(WHERE)), False, 0
    while not done:  # the checkpoint's writer does not always make as many files
        stop_at(objects, "put", stop)
        try:
            save(2)
            done = True
        except StoreError as error:
            assert "connection reset" in str(error)
            stop += 1
        objects.before = lambda what, key: None
        assert newest() == (2 if done else 1)
    # What the stopped ones left is gone: only what the two heads name is there.
    assert stop >= first - 2 and 0 < len(objects.below(WHERE)) - first <= stop


def test_leftovers_of_an_upload_of_another_number_are_deleted(objects):
    save(1)
    stop_at(objects, "put", 3)
    with pytest.raises(StoreError):
        save(5)
    objects.before = lambda what, key: None
    assert steps(objects) == [1, 5]
    save(3)  # those from 3 on were passed over
    assert steps(objects) == [1, 3] and newest() == 3
    stop_at(objects, "put", 3)
    with pytest.raises(StoreError):
        save(4)
    objects.before = lambda what, key: None
    save(5)  # what is left of 4 is older
    assert steps(objects) == [1, 3, 5]


def test_only_what_the_list_of_checkpoints_names_is_deleted(objects):
    mine = {f"{WHERE}/2/photo": b"2", f"{WHERE}/2019/photo": b"1"}
    objects |= mine
    save(1, 3, 4, 5, keep=1)
    assert steps(objects) == [2, 5, 2019] and mine.items() <= objects.items()


def test_a_deletion_that_stops_leaves_no_half_a_checkpoint(objects):
    save(1, 2, keep=2)
    for stop in range(4):
        stop_at(objects, "delete", stop)
        with pytest.raises(StoreError):
            save(3 + stop, keep=1)
        objects.before = lambda what, key: None
        assert newest() == 3 + stop
        with opened() as checkpoints:
            for step in checkpoints.steps():
                assert checkpoints._read(step)["['b']"] == step


@pytest.mark.parametrize(
    ("error", "kind"),
    [(RuntimeError("no route to host"), StoreError), (RuntimeError("token request"), ConfigError)],
)
def test_a_store_that_does_not_answer_is_no_damage(objects, error, kind):
    save(1, 2)

    def fail(what, key):
        if what == "get" and key.startswith(f"{WHERE}/2/") and not key.endswith("files.json"):
            raise error

    objects.before = fail
    # Going back to 1 would throw away what is there, for a network that is back in a minute.
    with pytest.raises(kind):
        newest()


@pytest.mark.heavy
def test_names_that_lead_outside_are_not_followed(objects, tmp_path):
    save(1, 2)
    head = f"{WHERE}/2/files.json"
    objects[head] = json.dumps({"../../../evil": "0", **json.loads(objects[head])}).encode()
    objects["evil"] = b"evil"
    assert newest() == 1 and "evil" not in objects.gets


def test_nothing_stays_in_the_temporary_folder(objects, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    save(1, 2)
    newest()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_flipped_byte_in_any_object_leads_back_to_the_checkpoint_before(objects, caplog):
    save(1, 2)
    rng = np.random.default_rng(0)
    names = [name for name in objects.below(f"{WHERE}/2") if objects[f"{WHERE}/2/{name}"]]
    for name in ("files.json", *rng.choice(names, 4, replace=False)):
        key = f"{WHERE}/2/{name}"
        whole = objects[key]
        cut = whole[: int(rng.integers(len(whole)))]
        objects[key] = flipped(whole, rng) if rng.random() < 0.7 else cut
        caplog.clear()
        assert newest() == 1, name
        assert "s3://b/run/checkpoints: checkpoint 2 is damaged" in caplog.text
        objects[key] = whole
    del objects[f"{WHERE}/2/{names[0]}"]
    assert newest() == 1
    objects[f"{WHERE}/2/{names[0]}"] = b"not what it was"
    save(2)
    assert newest() == 2
    for key in [f"{WHERE}/{step}/files.json" for step in (1, 2)]:
        objects[key] = b"{}"
    with pytest.raises(StateError, match=r"none of the checkpoints \[1, 2\] verifies"):
        newest()


def flipped(content, rng):
    at = int(rng.integers(len(content)))
    return content[:at] + bytes([content[at] ^ (1 << int(rng.integers(8)))]) + content[at + 1 :]
