"""A tracker shows each row of metrics.jsonl, and training never waits for it or ends with it."""

import json
import struct
import sys
import threading

import pytest
import tiny as experiment

import nca_trader as nca
from nca_trader import ConfigError, train
from nca_trader.config import extensions
from nca_trader.config.spans import Range
from nca_trader.runs import trackers as module
from nca_trader.runs.trackers import numbers_of, subject_of, track_results, tracker_of

LONGER = 4 * experiment.STEPS_PER_UPDATE


def events_of(folder):
    """Every event of a folder's files, in the order in which TensorBoard reads the files."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            body, end = data[12 : 12 + length], 12 + length
            yield event_pb2.Event.FromString(body)
            data = data[end + 4 :]


def shown(folder):
    """`{step: {tag: value}}` that TensorBoard shows: a start takes back its step and later ones."""
    rows, texts = {}, []
    for event in events_of(folder):
        if event.HasField("session_log"):
            rows = {step: row for step, row in rows.items() if step < event.step}
        for value in event.summary.value:
            if value.HasField("tensor"):
                texts.append(value.tensor.string_val[0].decode())
            else:
                rows.setdefault(event.step, {})[value.tag] = value.simple_value
    return rows, texts


def assert_shows(rows, run):
    expected = {row["steps"]: numbers_of(row) for row in run.metrics()}
    assert rows.keys() == expected.keys() and len(rows) >= 2
    for step, row in expected.items():
        assert len(row) > 10
        assert rows[step] == pytest.approx(row, rel=1e-6)  # TensorBoard has float32


@pytest.fixture
def bench(tiny, tmp_path):
    """Trains the tiny agent for some steps into `runs/tracked` of a folder, with a tracker."""

    def run(track, steps=2 * experiment.STEPS_PER_UPDATE, name="tracked", **options):
        path = tmp_path / "runs" / name
        return train(tiny.env, experiment.AGENT, path, steps=steps, track=track, **options)

    return run


@pytest.mark.heavy
def test_event_files_hold_every_row_and_the_configuration(bench, tmp_path):
    pytest.importorskip("tensorboardX")
    run = bench(f"tensorboard:{tmp_path / 'board'}")
    rows, (text,) = shown(tmp_path / "board" / "tracked")
    assert_shows(rows, run)
    config = json.loads(text)
    assert config["seed"] == 0 and config["agent"]["policy"]["channels"] == 4
    assert config["env"]["features"] == ["return_1", "return_5"]


@pytest.mark.heavy
def test_a_resumed_run_goes_on_in_the_same_place_and_takes_back_what_it_lost(bench, tmp_path):
    pytest.importorskip("tensorboardX")
    board = tmp_path / "board" / "tracked"

    def killed(row):
        if row["update"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # the row of update 3 has no checkpoint
        bench(f"tensorboard:{board.parent}", LONGER, report=killed)
    assert sorted(shown(board)[0]) == [experiment.STEPS_PER_UPDATE * n for n in (1, 2, 3)]
    run = bench(f"tensorboard:{board.parent}", LONGER)
    rows, _ = shown(board)
    assert len(list(board.iterdir())) == 2 and len(rows) == 4
    assert_shows(rows, run)


@pytest.mark.heavy
def test_rows_of_a_rollback_are_taken_back(tiny, tmp_path):
    pytest.importorskip("tensorboardX")
    tracker = tracker_of(f"tensorboard:{tmp_path / 'board'}")
    tracker.start(subject_of(tiny.run), 0)
    for step, value in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0)):
        tracker.log(step, {"x": value})
    tracker.finish({"best": 20.0})
    assert shown(tmp_path / "board" / "tiny")[0] == {1: {"x": 1.0}, 2: {"x": 20.0, "best": 20.0}}


class Own:
    """A tracker of a user that keeps what it is given, and fails or waits where it is told to."""

    def __init__(self, fails=(), gate=None):
        self.calls, self.fails, self.gate = [], fails, gate

    def _take(self, name, *args):
        if self.gate is not None:
            self.gate.wait(60)
        self.calls.append((name, *args))
        if name in self.fails:
            raise SystemExit(f"{name} fails")

    def start(self, subject, step):
        self._take("start", subject, step)

    def log(self, step, metrics):
        self._take("log", step, metrics)

    def finish(self, results):
        self._take("finish", results)


@pytest.mark.heavy
def test_a_tracker_of_your_own_gets_three_calls_in_order(bench):
    own = Own()
    run = bench(own)
    assert [call[0] for call in own.calls] == ["start", "log", "log", "finish"]
    subject = own.calls[0][1]
    assert (subject.name, subject.folder) == ("tracked", run.path) and own.calls[0][2] == 0
    assert subject.config["agent"]["policy"]["channels"] == 4 and own.calls[3] == ("finish", {})
    bench(own, LONGER)
    assert own.calls[4][2] == own.calls[2][1] == run.metrics()[1]["steps"]


@pytest.mark.heavy
def test_the_chosen_update_and_later_results_are_shown(tiny, tmp_path, monkeypatch):
    select = nca.Selector(tiny.bars, "2020-07-19")
    own, path = Own(), tmp_path / "runs" / "selected"
    run = train(tiny.env, experiment.AGENT, path, steps=256, select=select, track=own)
    chosen = run.selection
    found = {"selection/update": float(chosen.update), "selection/score": chosen.score}
    assert own.calls[-1] == ("finish", {k: v for k, v in found.items() if v is not None})
    result = nca.backtest(tiny.bars, run, start="2020-07-19")
    track_results(own, run, "test", result.metrics)
    assert own.calls[-2][0] == "start" and own.calls[-2][2] == run.metrics()[-1]["steps"]
    name, shown_results = own.calls[-1]
    assert name == "finish" and shown_results["test/sharpe"] == result.metrics["sharpe"]


@pytest.mark.slow
def test_a_search_and_a_walk_forward_are_tracked(tiny, tmp_path):
    pytest.importorskip("optuna")
    own, how = Own(), {"env": experiment.ENV, "steps": 1}
    space = {"optimizer.learning_rate": Range(low=1e-4, high=1e-2, log=True)}
    bars, folder = tiny.bars, tmp_path / "search"
    found = nca.tune(bars, experiment.AGENT, space, folder, trials=2, track=own, **how)
    rates = found.trials["optimizer.learning_rate"]
    assert [call[2]["optimizer.learning_rate"] for call in own.calls[1:3]] == list(rates)
    assert own.calls[0][1].config["metric"] == "sharpe" and own.calls[3][1]["count"] == 2
    own, rule = Own(), nca.rules.sma_cross
    grid = {"fast": (2, 5), "slow": (20,)}
    walk = nca.walk_forward(bars, rule, grid=grid, train=100, test=40, track=own)
    names = [name for name, *_ in own.calls]
    assert names == ["start", *["log"] * len(walk.folds), "finish"]
    assert own.calls[0][1][:2] == ("sma_cross", None)
    assert [call[2]["fast"] for call in own.calls[1:-1]] == list(walk.folds["fast"])
    assert own.calls[-1][1]["test/sharpe"] == walk.metrics["sharpe"]
    assert "gate/" in str(own.calls[-1][1])


def test_a_tracker_of_the_current_folder_is_not_installed(tmp_path, monkeypatch):
    about = tmp_path / "other-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[nca_trader.trackers]\nplanted = json:loads\n")
    monkeypatch.chdir(tmp_path)
    for entry in ("", ".", str(tmp_path)):
        monkeypatch.setattr(sys, "path", [entry, *sys.path])
        extensions.installed_points.cache_clear()
        with pytest.raises(ConfigError, match=r"planted:.* is not known"):
            tracker_of("planted:[]")
    monkeypatch.chdir("/")
    extensions.installed_points.cache_clear()
    with pytest.raises(ConfigError, match="has no start"):  # found where it is installed
        tracker_of("planted:[]")
    extensions.installed_points.cache_clear()


@pytest.mark.heavy
@pytest.mark.parametrize("fails", [("start",), ("log",), ("start", "log", "finish")])
def test_a_tracker_that_fails_is_one_warning(bench, caplog, fails):
    run = bench(Own(fails))
    assert len(run.metrics()) == 2
    lines = [record.getMessage() for record in caplog.records if "tracker" in record.getMessage()]
    assert len(lines) == 1 and f"the tracker Own failed ({fails[0]}: {fails[0]} fails)" in lines[0]


@pytest.mark.heavy
def test_a_tracker_that_hangs_is_left_behind(bench, caplog, monkeypatch):
    monkeypatch.setattr(module, "CLOSING", 0.05)
    gate = threading.Event()
    own = Own(gate=gate)
    run = bench(own)  # comes back although not one call has
    assert own.calls == [] and len(run.metrics()) == 2
    assert caplog.text.count("the tracker Own failed (finish: not done in 0.05 s)") == 1
    gate.set()


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("tensorbord:x", "did you mean 'tensorboard'"),
        ("tensorboard:s3://mine/board", "lies on this machine's disk"),
        ("tensorboard:{file}/below", "cannot be made"),
        (object(), "has no start, log, finish"),
    ],
)
def test_what_cannot_track_is_refused_before_training(bench, tmp_path, named, says):
    (tmp_path / "file").write_text("")
    if isinstance(named, str):
        pytest.importorskip("tensorboardX")
        named = named.format(file=tmp_path / "file")
    with pytest.raises(ConfigError, match=says):
        bench(named, name="refused")
    assert not (tmp_path / "runs" / "refused").exists()


@pytest.mark.parametrize(("kind", "library"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_library_is_named(monkeypatch, kind, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=f"needs {library}.*pip install {library}"):
        tracker_of(kind)


def test_without_a_folder_they_lie_in_the_run(bench):
    pytest.importorskip("tensorboardX")
    run = bench("tensorboard")
    assert_shows(shown(run.path / "tensorboard")[0], run)
