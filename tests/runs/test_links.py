"""Nothing behind a link in a folder of ours is written, and nothing that is not ours is deleted."""

import os
import pathlib
import shutil

import pytest
from tiny import STEPS_PER_UPDATE, Tiny

import nca_trader as nca
from nca_trader import RunError
from nca_trader.cli import main
from nca_trader.machine import refuse_links_in
from nca_trader.runs.checkpoint import Checkpoints

BARS = nca.sample_bars("sp500")[:300]


def train(folder, updates):
    command = Tiny(folder.parents[1]).train_command(folder, steps=updates * STEPS_PER_UPDATE)
    return main(command)


def walk(folder):
    rule = nca.rules.sma_cross
    grid = {"fast": [2], "slow": [5]}
    nca.walk_forward(BARS, rule, train=100, test=50, grid=grid, folder=folder, check=False)


def sweep(folder):
    nca.sweep(BARS, nca.rules.sma_cross, {"fast": [2, 3]}, resume=folder, trials=None)


def content(folder):
    """Every file below a folder with its bytes, and every folder."""
    return {p: p.is_file() and p.read_bytes() for p in sorted(folder.rglob("*"))}


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """A run with one checkpoint, of update 1."""
    path = tiny.copy(tmp_path_factory.mktemp("links") / "tiny").path
    assert saved(path, 1) == ["1"]
    return path


@pytest.fixture
def photos(tmp_path):
    """A folder of somebody, with numbers as names."""
    for name in ("2019", "1", "9.orbax-checkpoint-tmp"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "me.jpg").write_bytes(b"me")
    return tmp_path / "photos"


def link_each(folder, outside):
    """Put a link in the place of one entry of a folder after the other, and yield its path."""
    shutil.copytree(folder, outside)
    for path in sorted(outside.rglob("*"), reverse=True):
        at = folder / path.relative_to(outside)
        at.rename(folder.with_name("aside"))
        at.symlink_to(path)
        yield at
        at.unlink()
        folder.with_name("aside").rename(at)


def test_no_entry_of_a_run_may_be_a_link(run, tmp_path, capsys):
    mine, outside = shutil.copytree(run, run.with_name("mine")), tmp_path / "outside"
    before, entries = None, []
    for at in link_each(mine, outside):
        before = before or content(outside)
        with pytest.raises(RunError, match=rf"{at.name}: is a link to .*outside"):
            refuse_links_in(mine)
        entries.append(at.relative_to(mine))
        # Each command takes a second; the kinds of entries are what differs.
        if at.parent == mine or at.name == "1":
            capsys.readouterr()
            assert train(mine, 2) == 2 and content(outside) == before
            assert f"{at}: is a link to" in capsys.readouterr().err
    assert {pathlib.Path(p) for p in ("run.json", "checkpoints", "checkpoints/1")} <= {*entries}


@pytest.mark.parametrize("work", [pytest.param(walk, marks=pytest.mark.heavy), sweep])
def test_no_entry_of_stored_work_may_be_a_link(work, tmp_path):
    work(tmp_path / "mine")
    outside = tmp_path / "outside"
    for at in link_each(tmp_path / "mine", outside):
        before = content(outside)
        with pytest.raises(RunError, match=rf"{at.name}: is a link to"):
            work(tmp_path / "mine")
        assert content(outside) == before


def saved(folder, step):
    """Save one more checkpoint as a run does that keeps one; the names in its folder."""
    with Checkpoints(folder / "checkpoints", keep=1) as checkpoints:
        checkpoints._write(step, checkpoints.newest()[1], {})
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_folders_of_somebody_are_never_deleted(run, photos, capsys):
    """Neither behind a link nor among our checkpoints, whatever number they have as a name."""
    before = content(photos)
    mine = shutil.copytree(run, run.with_name("with_photos"))
    (mine / "checkpoints").rename(mine / "aside")
    (mine / "checkpoints").symlink_to(photos)
    assert train(mine, 2) == 2 and content(photos) == before
    (mine / "checkpoints").unlink()
    (mine / "aside").rename(mine / "checkpoints")
    for name in ("2019", "0"):
        shutil.copytree(photos / "2019", mine / "checkpoints" / name)
    assert saved(mine, 2) == saved(mine, 2) == ["0", "2", "2019"]
    assert (mine / "checkpoints/2019/me.jpg").read_bytes() == b"me"
    assert saved(mine, 5) == ["0", "2019", "5"]  # from the newest of ours
    nca.Run(mine).params()


def test_a_run_of_a_version_without_a_list_goes_on(run):
    mine = shutil.copytree(run, run.with_name("older"))
    (mine / "checkpoints.json").unlink()
    assert saved(mine, 3) == ["3"]


def test_a_link_inside_the_folder_and_those_of_a_tracker_pass(tmp_path):
    (tmp_path / "study.log").write_text("x")
    (tmp_path / "study.log.lock").symlink_to("study.log")
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb/debug.log").symlink_to("/var/log/some")
    refuse_links_in(tmp_path)
    (tmp_path / "wandb").rename(tmp_path / "a")
    (tmp_path / "wandb").symlink_to("/var/log")
    with pytest.raises(RunError, match=r"a/debug.log|wandb: is a link to"):
        refuse_links_in(tmp_path)


def test_a_link_to_itself_and_a_pipe_end_in_no_traceback_and_no_wait(run):
    mine = shutil.copytree(run, run.with_name("odd"))
    (mine / "loop").symlink_to("loop")
    for file in ("checkpoints.json", "checkpoints/1/files.json"):
        (mine / file).unlink()
        os.mkfifo(mine / file)
    assert train(mine, 1) == 0
    assert saved(mine, 2)
