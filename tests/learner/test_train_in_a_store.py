"""A run in an object store is the run that it would be in a folder, also after it was stopped."""

import json

import jax
import numpy as np
import pytest
from tiny import AGENT, UNTIL

from nca_trader.cli import main
from nca_trader.cloud import place
from nca_trader.config.records import plain
from nca_trader.errors import ConfigError, RunError, StoreError
from nca_trader.learner.train import train
from nca_trader.runs import trials
from nca_trader.runs.exported import read_run
from nca_trader.runs.folder import check_shared
from nca_trader.runs.manifest import Run

URL = "s3://b/runs/tiny"
TIMES = ("steps_per_s",)  # of a row: what no two runs have alike


def figures(run):
    return [{k: v for k, v in row.items() if k not in TIMES} for row in run.metrics()]


def equal(one, other):
    return jax.tree.all(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), one, other))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.heavy
def test_a_run_stopped_in_an_upload_goes_on_and_ends_as_a_local_one(tiny, objects, cache, capsys):
    left = [3]

    def fail(what, key):
        """Of the second checkpoint the third object and all after it."""
        if what == "put" and key.startswith("runs/tiny/checkpoints/2/"):
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("connection reset")

    objects.before = fail
    with pytest.raises(StoreError, match="connection reset"):
        train(tiny.env, AGENT, URL)
    objects.before = lambda what, key: None
    run = Run(URL)
    assert 0 < len(objects.below("runs/tiny/checkpoints/2")) < 5
    # All rows that led to the checkpoint are there before it is, and one it did not lead to.
    assert [row["update"] for row in figures(run)] == [1, 2]

    done = train(tiny.env, AGENT, URL)
    assert equal(done.params(), tiny.run.params()) and figures(done) == figures(tiny.run)
    there, here = plain(done.manifest), plain(tiny.run.manifest)
    same = set(there) - {"created", "command", "commit"}
    assert {key: there[key] for key in same} == {key: here[key] for key in same}
    names = {name.partition("/")[0] for name in objects.below("runs/tiny")}
    assert names == {path.name for path in tiny.path.iterdir()}

    # The commands that read a run take its URL; looks are counted beside it.
    objects["in/bars.csv"] = tiny.data.read_bytes()
    bars = ["--data", "s3://b/in/bars.csv", "--json"]
    assert main(["backtest", "--run", URL, *bars]) == 0
    there = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(["backtest", "--run", str(tiny.path), *bars]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) | {"looks": 1} == there
    kinds = [entry.kind for entry in trials.entries(place("s3://b/runs"))]
    assert kinds == ["train", "test"]
    assert main(["watch", "--run", URL, "--once"]) == 0
    assert "rows                             2\n" in capsys.readouterr().out


def test_a_folder_of_something_else_is_refused(tiny, objects):
    objects["runs/x/notes.txt"] = b"mine"
    with pytest.raises(RunError, match=r"^s3://b/runs/x: holds files of something else"):
        train(tiny.env, AGENT, "s3://b/runs/x")
    with pytest.raises(
        ConfigError, match=r"^s3://b: is a bucket; name a folder in it, e\.g\. s3://b/"
    ):
        train(tiny.env, AGENT, "s3://b")
    with pytest.raises(RunError, match=r"^s3://b/runs/y: not a run folder"):
        read_run("s3://b/runs/y")
    assert list(objects) == ["runs/x/notes.txt"]


def test_the_word_that_hosts_look_for_is_put_and_taken_away(objects):
    check_shared(place("s3://b/runs/a"))
    assert len(objects.puts) == 1 and objects.puts == objects.deletes and not objects


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "--run", "s3://no/runs/a"], "s3://no: there is no such bucket"),
        (["train", "--run", "az://b/runs/a"], "az:// is not known here"),
        (["train", "--run", URL, "--profile", "1"], "the trace of --profile lies on this machine"),
        (["backtest", "--run", "s3://no/runs/a"], "s3://no: there is no such bucket"),
        (["watch", "--run", "s3://b/runs/none"], "s3://b/runs/none: no such folder"),
        (["watch", "--journal", "s3://b/j.db"], "a journal lies on this machine's disk"),
        (["demo", "--out", "s3://b/demo"], "a demo lies on this machine's disk"),
        (["export", "--run", URL, "--out", "s3://b/x"], "what --out writes lies on this machine"),
    ],
)
def test_a_url_that_cannot_be_used_is_one_line(words, says, tiny, objects, capsys):
    if words[0] == "train":
        words += [f"--env={tiny.folder / 'env.toml'}", f"--agent={tiny.folder / 'agent.toml'}"]
        words += [f"--data={tiny.data}", f"--until={UNTIL}"]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"nca-trader {words[0]}: ") and says in line
    assert not objects
