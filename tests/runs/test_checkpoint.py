"""A checkpoint comes back bit for bit, or not at all."""

import gc
import json
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nca_trader.envs.account.state import open_account
from nca_trader.errors import RunError, StateError
from nca_trader.parallel.mesh import make_mesh
from nca_trader.runs.checkpoint import FILES, Checkpoints, _digests, flatten, unflatten


def make_tree(seed):
    """Every type that training holds, with the values that a careless copy would lose."""
    key = jax.random.key(seed)
    odd = jnp.array([jnp.nan, -0.0, jnp.inf, 1e-42, 1 / 3], jnp.float32)
    return {
        "params": {"w": jax.random.normal(key, (3, 4)), "odd": odd},
        "half": jax.random.normal(key, (5,)).astype(jnp.bfloat16),
        "pending": jnp.arange(-3, 3, dtype=jnp.int8),
        "ruined": jnp.array([True, False, True]),
        "update": jnp.int32(seed),
        "key": key,
        "keys": jax.random.split(key, 3),
        "other kind of key": jax.random.key(seed, impl="rbg"),
    }


def test_a_field_that_was_renamed_keeps_its_name_in_files():
    """Checkpoints of 0.2.0 have it so, and are resumed."""
    account = open_account(jnp.zeros(2))
    stored = flatten({"account": account})
    assert "['account'].ruined" in stored and not [name for name in stored if "bankrupt" in name]
    broke = stored | {"['account'].ruined": np.array(True)}
    assert bool(unflatten({"account": account}, broke)["account"].bankrupt)


def bits(tree):
    """The tree's leaves by path as type, shape and bytes."""
    return {n: (v.dtype.name, v.shape, v.tobytes()) for n, v in flatten(tree).items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the checkpoints 1 and 2; copied, never changed."""
    path = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Checkpoints(path) as checkpoints:
        checkpoints.save(1, make_tree(1))
        checkpoints.save(2, make_tree(2))
    return path


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def newest(path):
    with Checkpoints(path) as checkpoints:
        return checkpoints.newest()


def files_of(step):
    return sorted(path for path in step.rglob("*") if path.is_file())


def test_every_leaf_comes_back_bit_for_bit_with_its_type(folder):
    step, leaves = newest(folder)
    there = unflatten(make_tree(7), leaves)
    assert step == 2 and bits(there) == bits(make_tree(2))
    assert jax.tree.map(lambda x: x.dtype, there) == jax.tree.map(lambda x: x.dtype, make_tree(2))
    assert jax.random.key_impl(there["other kind of key"]) == "rbg"


def harm(step, rng):
    """Flips bits of one byte in a file of a checkpoint, or cuts the file; says which."""
    files = [path for path in files_of(step) if path.stat().st_size]
    sizes = np.array([path.stat().st_size for path in files])
    # By the root of its size: most bytes are in the data, but every file must be met.
    path = files[rng.choice(len(files), p=np.sqrt(sizes) / np.sqrt(sizes).sum())]
    data = bytearray(path.read_bytes())
    at = rng.integers(len(data))
    if rng.random() < 0.5:
        path.write_bytes(bytes(data[:at]))
        return f"{path.relative_to(step)} cut to {at} bytes"
    data[at] ^= int(rng.integers(1, 256))
    path.write_bytes(bytes(data))
    return f"{path.relative_to(step)} byte {at}"


def check_harms(saved, tmp_path, seeds):
    """Restores what was harmed; how many times it fell back to the older checkpoint."""
    fell_back = 0
    for seed in seeds:
        path = shutil.copytree(saved, tmp_path / str(seed))
        what = harm(path / "2", np.random.default_rng(seed))
        step, leaves = newest(path)
        assert bits(unflatten(make_tree(7), leaves)) == bits(make_tree(step)), what
        fell_back += step == 1
        shutil.rmtree(path)
    return fell_back


@pytest.mark.slow
def test_each_of_two_hundred_flipped_bytes_and_cut_files_is_found(saved, tmp_path):
    assert check_harms(saved, tmp_path, range(100, 300)) == 200


@pytest.fixture
def without_file_sums(saved, tmp_path):
    """As a kill leaves it between the checkpoint and the checksums of its files."""
    path = shutil.copytree(saved, tmp_path / "killed")
    (path / "2" / FILES).unlink()
    return path


def test_a_checkpoint_whose_files_have_no_sums_yet_is_good(without_file_sums):
    step, leaves = newest(without_file_sums)
    assert step == 2 and bits(unflatten(make_tree(7), leaves)) == bits(make_tree(2))


@pytest.mark.heavy
def test_a_leaf_that_was_wrong_when_it_was_written_is_found(tmp_path, monkeypatch):
    with Checkpoints(tmp_path / "c") as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr("nca_trader.runs.checkpoint._checksum", lambda value: "0" * 64)
            checkpoints.save(1, {"x": jnp.ones(2)})
        with pytest.raises(StateError, match=r"none of the checkpoints \[1\]"):
            checkpoints.newest()


def test_a_file_that_came_later_is_no_damage(folder):
    (folder / "2" / "leaves" / ".DS_Store").write_text("a desktop was here")
    assert newest(folder)[0] == 2


def data_of(step):
    """All data files: any one of them alone may hold nothing but what was superseded."""
    return [path for path in files_of(step / "leaves") if path.parent.name == "d"]


def truncate(step):
    for path in data_of(step):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove_files(step):
    for path in data_of(step):
        path.unlink()


def remove_sums(step):
    shutil.rmtree(step / "sums")


def empty_sums(step):
    (step / "sums" / "metadata").write_text("{}")


DAMAGES = [truncate, remove_files, remove_sums, empty_sums]


@pytest.mark.heavy
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(folder, damage, caplog):
    damage(folder / "2")
    step, leaves = newest(folder)
    assert step == 1 and bits(unflatten(make_tree(7), leaves)) == bits(make_tree(1))
    assert "checkpoint 2 is damaged" in caplog.text


def test_no_checkpoint_is_none_and_not_an_error(tmp_path):
    assert newest(tmp_path / "new") is None


@pytest.mark.heavy
def test_training_that_walked_back_saves_over_what_was_damaged(folder):
    truncate(folder / "2")
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.newest()[0] == 1
        checkpoints.save(2, make_tree(5))
        assert bits(unflatten(make_tree(7), checkpoints.newest()[1])) == bits(make_tree(5))


@pytest.mark.heavy
def test_a_damaged_checkpoint_does_not_stop_the_saving_of_earlier_ones(folder):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(9, make_tree(9))
    truncate(folder / "9")
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.newest()[0] == 2
        checkpoints.save(3, make_tree(3))
    assert newest(folder)[0] == 3


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        for step in (1, 2, 3, 5):
            checkpoints.save(step, {"x": jnp.full(2, step)})
        assert checkpoints.steps() == [3, 5]
    assert newest(tmp_path / "c")[0] == 5


def test_what_a_kill_left_half_written_is_ignored(folder):
    shutil.copytree(folder / "2", folder / "3.orbax-checkpoint-tmp")
    (folder / "3.orbax-checkpoint-tmp" / "commit_success.txt").unlink(missing_ok=True)
    assert newest(folder)[0] == 2
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(3, make_tree(3))
    assert newest(folder)[0] == 3


def test_a_leaf_of_another_shape_or_type_is_refused_by_its_name(folder):
    leaves = newest(folder)[1]
    wide, typed = make_tree(7), make_tree(7)
    wide["params"]["w"] = jnp.zeros((3, 5))
    typed["half"] = jnp.zeros(5)
    with pytest.raises(RunError, match=r"\['params'\]\['w'\] is float32\[3, 4\] there and .*3, 5"):
        unflatten(wide, leaves)
    with pytest.raises(RunError, match=r"\['half'\] is bfloat16\[5\] there and float32\[5\] here"):
        unflatten(typed, leaves)


def test_a_leaf_too_many_or_too_few_is_refused_by_its_name(folder):
    leaves = newest(folder)[1]
    more = make_tree(7) | {"momentum": jnp.zeros(2)}
    fewer = {name: leaf for name, leaf in make_tree(7).items() if name != "half"}
    with pytest.raises(RunError, match=r"\['momentum'\] is only here"):
        unflatten(more, leaves)
    with pytest.raises(RunError, match=r"\['half'\] is only there"):
        unflatten(fewer, leaves)


def test_a_file_in_place_of_the_folder_is_said_in_one_line(tmp_path):
    (tmp_path / "c").write_text("not a folder")
    with pytest.raises(StateError, match=r"c: checkpoints cannot be opened"):
        Checkpoints(tmp_path / "c")


def test_a_full_disk_is_said_in_one_line_and_the_older_checkpoint_stays(folder, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with Checkpoints(folder) as checkpoints:
        monkeypatch.setattr(checkpoints._manager, "save", full)
        checkpoints.save(3, make_tree(3))
        with pytest.raises(StateError, match=r"cannot be written .*No space left"):
            checkpoints.wait()
    assert newest(folder)[0] == 2


def test_what_could_not_be_written_is_said_at_the_end_at_the_latest(folder, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with pytest.raises(StateError, match="No space left"), Checkpoints(folder) as checkpoints:
        monkeypatch.setattr(checkpoints._manager, "save", full)
        checkpoints.save(3, make_tree(3))


def test_training_goes_on_while_a_thread_writes_and_its_state_may_change_meanwhile(folder):
    go_on = threading.Event()
    with Checkpoints(folder) as checkpoints:
        write = checkpoints._write

        def late(*args):
            assert go_on.wait(60)
            write(*args)

        checkpoints._write = late
        given = {"x": np.arange(3.0)}
        checkpoints.save(3, given)  # returns, although nothing is written
        checkpoints.check()
        assert [path.name for path in sorted(folder.iterdir())] == ["1", "2"]
        given["x"][:] = -1.0
        go_on.set()
        step, leaves = checkpoints.newest()
    assert step == 3 and leaves["['x']"].tolist() == [0.0, 1.0, 2.0]


def reformat(step, number, whole=True):
    """Makes a checkpoint one of another format, as a version that knew it would have written."""
    file = step / "sums" / "metadata"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": number}))
    if whole:
        (step / FILES).write_text(json.dumps(_digests(step)))
    else:
        (step / FILES).unlink()


@pytest.mark.parametrize("number", [0, 2])
def test_another_format_is_refused_with_the_remedy_and_not_walked_back_from(folder, number):
    reformat(folder / "2", number)
    with pytest.raises(RunError, match=rf"2 has format {number}, this version reads 1; use the"):
        newest(folder)


@pytest.mark.heavy
def test_a_format_that_may_be_a_flipped_byte_is_damage(folder, caplog):
    reformat(folder / "2", 3, whole=False)
    assert newest(folder)[0] == 1 and "checkpoint 2 is damaged" in caplog.text


def on_devices(count, seed=9):
    """A tree whose leaves are split over `count` devices, or the same on all of them."""
    mesh = make_mesh(count)
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    rows = seed * jnp.arange(16.0).reshape(8, 2)
    tree = make_tree(seed) | {"segments": rows, "seeds": jax.random.split(jax.random.key(seed), 8)}
    return {
        name: jax.device_put(leaf, split if name in ("segments", "seeds") else whole)
        for name, leaf in tree.items()
    }


@pytest.mark.parametrize("counts", [(8, 4, 1), (1, 8)])
def test_what_was_saved_on_some_devices_comes_back_on_others_bit_for_bit(tmp_path, counts):
    there = on_devices(counts[0])
    for step, count in enumerate(counts[1:]):
        with Checkpoints(tmp_path / "c") as checkpoints:
            checkpoints.save(step, there)
            like = on_devices(count, seed=1)
            there = unflatten(like, checkpoints.newest()[1])
        for leaf, asked in zip(jax.tree.leaves(there), jax.tree.leaves(like), strict=True):
            assert leaf.sharding == asked.sharding
            assert len(leaf.addressable_shards) == count
        assert there["segments"].addressable_shards[0].data.shape == (8 // count, 2)
    assert bits(there) == bits(on_devices(1))


def test_a_checkpoint_of_a_run_holds_the_runs_configuration(tiny):
    newest = max((tiny.path / "checkpoints").iterdir(), key=lambda path: int(path.name))
    assert json.loads((newest / "sums" / "metadata").read_text())["config"] == {
        name: (tiny.path / name).read_text() for name in ("env.toml", "agent.toml")
    }


# Orbax leaves reads behind when one fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_the_sums_of_the_leaves_alone_let_no_wrong_value_through(without_file_sums, tmp_path):
    assert check_harms(without_file_sums, tmp_path, range(300, 308)) > 0
    time.sleep(0.3)  # so that what they print ends within this test
    gc.collect()


@pytest.mark.heavy
def test_where_every_checkpoint_is_damaged_the_folder_is_named(folder):
    truncate(folder / "1")
    remove_sums(folder / "2")
    with pytest.raises(StateError, match=r"checkpoints: none of the checkpoints \[1, 2\]") as info:
        newest(folder)
    assert str(folder) in str(info.value)
