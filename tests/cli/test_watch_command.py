"""`nca-trader watch` as a user gives it: once, and beside a run that goes on."""

import signal
import types

import pytest

from nca_trader.config.records import seal_record

RULES = """
[[rule]]
name = "kl"
metric = "approx_kl"
comparison = ">"
threshold = 0.05

[[rule]]
name = "value"
metric = "loss"
comparison = "absent"
for = "1d"
"""


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(row(1, 0.01))
    (tmp_path / "rules.toml").write_text(RULES)
    return folder


def row(update, kl, **more):
    known = {"update": update, "reward": 0.5, "approx_kl": kl, "loss": 1.0}
    return seal_record(known | more, indent=None)


def test_once_prints_every_figure_and_every_rule(command, run):
    said = command("watch", "--run", run, "--rules", run.parent / "rules.toml", "--once", "--json")
    assert said.code == 0
    assert said.json["metrics"]["approx_kl"] == 0.01 and said.json["holding"] == []
    assert "rule kl: no: approx_kl > 0.05" in said.out


def test_once_fails_where_a_condition_holds(command, run):
    with open(run / "metrics.jsonl", "a") as file:
        file.write(row(2, 0.5, loss=None))
    said = command("watch", "--run", run, "--rules", run.parent / "rules.toml", "--once", "--json")
    assert said.code == 1 and said.json["holding"] == ["kl", "value"]
    assert said.json["metrics"]["loss"] is None
    assert len(said.err.splitlines()) == 1 and "kl, value" in said.err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "give --run DIR, --journal FILE"),
        (["--run", ".", "--rules", "none-such.toml"], "cannot be read"),
        (["--run", ".", "--prometheus", "many"], "give a port"),
        (["--run", ".", "--prometheus", "9105", "--once"], "has no effect without a second look"),
        (["--journal", "none-such", "--once"], "no such journal"),
    ],
)
def test_what_can_not_be_watched_is_one_line(command, args, says):
    said = command("watch", *args)
    assert said.code == 2 and says in said.err and len(said.err.splitlines()) == 1


@pytest.mark.parametrize("once", [[], ["--once"]])
@pytest.mark.parametrize("sink", ["apprise:$NO_SUCH_VARIABLE", "call:no_such_module_here:tell"])
def test_a_sink_that_is_not_there_is_refused_before_the_first_look(command, run, sink, once):
    rules = run.parent / "rules.toml"
    rules.write_text(f'{RULES}sinks = ["{sink}"]')
    said = command("watch", "--run", run, "--rules", rules, *once)
    assert said.code == 2 and said.out == ""
    assert f"sink {sink}: " in said.err and len(said.err.splitlines()) == 1


def test_it_follows_a_run_and_says_each_change_once(command, run, monkeypatch):
    now, rows = [0.0], iter([row(2, 0.5), "", row(3, 0.01)])

    def sleep(seconds):
        now[0] += 1.0
        with open(run / "metrics.jsonl", "a") as file:
            file.write(next(rows, None) or "")
        if now[0] > 3.5:
            signal.raise_signal(signal.SIGTERM)

    clock = types.SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr("nca_trader.cli.watch.time", clock)
    words = ("--run", run, "--every", "1", "--rules", run.parent / "rules.toml", "--json")
    said = command("watch", *words)
    assert said.code == 130 and said.json["firing"] == []
    shown = [line.partition("  ")[0] for line in said.out.splitlines()[:-1]]
    assert shown == ["update 1", "update 2", "update 3"]
    told = [line.split("; now")[0] for line in said.err.splitlines() if " kl " in line]
    assert [line.partition("kl ")[2] for line in told] == [
        "firing: approx_kl > 0.05", "resolved: approx_kl > 0.05"
    ]  # fmt: skip


def test_a_file_that_is_no_journal_is_not_waited_for_by_one_look(command, tmp_path):
    (tmp_path / "j.db").write_text("x")
    said = command("watch", "--journal", tmp_path / "j.db", "--once")
    assert said.code == 4 and "j.db: is not a readable journal" in said.err
