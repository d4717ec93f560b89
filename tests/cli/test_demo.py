"""The main job, end to end and small: one command from real bars to a page."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import re
import signal
import sqlite3
import subprocess
import sys
import time
import types

import numpy as np
import pandas as pd
import pytest

from nca_trader import BarError, ConfigError, load_agent, load_env, sample_bars, write_bars
from nca_trader.cli import demo as demo_command
from nca_trader.cli import demo_sections, main
from nca_trader.cli.demo import job_of
from nca_trader.config.toml import to_toml
from nca_trader.evaluate.evidence import inference
from nca_trader.learner import train as train_module
from nca_trader.optimum import prove as prove_runs
from nca_trader.optimum.measure import Earnings
from nca_trader.optimum.prove import Point

TINY = """
[policy]
kind = "mlp"
channels = 4
hidden = 8
window = 8

[learner]
num_segments = 8
segment_length = 32
envs_per_segment = 2
num_epochs = 1
num_minibatches = 1

[checkpoint]
every = 2
"""
STEPS = 8 * 32 * 2 * 2
REACHED = Earnings(0.97, 0.001, 1e-3, 1e-5, -1e-5, 1e-6, 0.05)


def command(*args):
    return [sys.executable, "-m", "nca_trader", "demo", *map(str, args)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("agents") / "tiny.toml"
    path.write_text(TINY)
    return path


def in_process(words, **_):
    """What the command of another process says, run in this one."""
    assert words[:4] == [sys.executable, "-P", "-m", "nca_trader"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        return subprocess.CompletedProcess(words, main(words[4:]), said.getvalue(), "")


@pytest.fixture(scope="module")
def demo(tiny, tmp_path_factory, quick_compile):
    """A finished demo of few bars: its JSON, its folder, what it printed, and its progress."""
    out = tmp_path_factory.mktemp("with a space")
    job, env = job_of(None), tiny.with_name("env.toml")
    env.write_text(to_toml(dataclasses.replace(load_env("panel_daily"), features=("return_1",))))
    dates = {"first": "2010-06-01", "train_until": "2011-01-01", "select_until": "2011-09-01"}
    job = dataclasses.replace(job, bars=job.bars.between("2009-01-01", "2012-02-01"), **dates)
    said, progress = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_command, "job_of", lambda panel: job)
        # That a process of its own trades alike, and learns a known market, is a slow test's.
        patch.setattr(demo_command, "subprocess", types.SimpleNamespace(run=in_process))
        patch.setattr(inference.resampled, "__defaults__", (200, 0))  # fewer draws of intervals
        patch.setattr(prove_runs, "train_and_evaluate", lambda *_: [Point(2.0, 20, REACHED)] * 2)
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(progress):
            given = ["--agent", tiny, "--env", env, "--steps", STEPS, "--out", out, "--json"]
            assert main(["demo", *map(str, given)]) == 0
    (folder,) = [path for path in out.iterdir() if path.is_dir()]
    return json.loads(said.getvalue().splitlines()[-1]), folder, said.getvalue(), progress


def test_demo_ends_with_a_table_and_the_page(demo):
    result, folder, said, progress = demo
    assert result["complete"] and result["parity"] is True
    assert re.match(r"demo-\d{8}-\d{6}", folder.name)
    assert pathlib.Path(result["page"]) == folder / "report.html"
    for name in ("buy and hold", "SMA cross 50/200", "always flat"):
        assert re.search(rf"^{name} .*%", said, re.M)
    assert said.splitlines()[-2].endswith("report.html")
    # Where no terminal reads it progress is plain lines, without a carriage return or an escape.
    assert "steps/s" in progress.getvalue()
    assert "\r" not in progress.getvalue() and "\x1b" not in progress.getvalue()


def test_page_says_what_was_done(demo):
    _, folder, *_ = demo
    page = (folder / "report.html").read_text()
    shown = ("2011-09-01", "2012-01-31", "buy and hold", "next_open", "commission", "not tradable")
    # First what was earned, in a sentence and a plot; what it means is folded.
    first, _, rest = page.partition('<details class="means">')
    assert "Out of sample, 2011-09-01 to 2012-01-31, the agent" in first and "<svg" in first
    assert "<h2>Verdict" in rest and "Can it learn?" in rest
    assert "nothing on this page is advice" in rest.rpartition("</details>")[2]
    for text in (*shown, "seed 2", "Turnover", "flat", "long", "jax", "What this shows"):
        assert text in page, text
    assert not re.search(r"src=.https?:|<link[^>]*href=|<script [^>]*src", page)


def test_test_span_is_touched_once_and_every_seed_is_a_trial(demo):
    _, folder, *_ = demo
    lines = (folder.parent / "trials.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert [(e["kind"], e.get("trials")) for e in entries] == [("train", 3), ("test", None)]
    assert entries[1].get("seed") is None  # the mean of all


def test_paper_and_backtest_on_disk_cover_the_test_years(demo):
    result, folder, *_ = demo
    table = pd.read_parquet(folder / "backtest.parquet")
    assert len(table) == 104
    assert str(table["time"].iloc[0].date()) == "2011-09-01"
    with sqlite3.connect(folder / "journal.sqlite") as journal:
        query = "SELECT count(*) FROM event JOIN series ON id = series WHERE kind = 'decision'"
        (decisions,) = journal.execute(query)
    journal.close()
    assert decisions == (104,)
    assert result["paper"]["equity"] == pytest.approx(table["equity"].iloc[-1], rel=1e-6)


def test_what_is_deployed_was_decided_without_the_test_years(demo):
    result, folder, said, _ = demo
    selection, decided = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("selection", "deployment")
    )
    assert "selected" not in selection and len(selection["sharpe"]) == 3
    for found in (selection, decided):
        assert found["data"]["first"].startswith("2011") and found["data"]["last"] < "2011-09"
    manifest = json.loads((folder / "run.json").read_text())
    assert manifest["data"]["last"].startswith("2010-12-31")
    # A random agent beats no baseline in a year.
    assert decided["baseline"] == result["deployed"] != "the mean agent"
    assert decided["sentence"] in said
    page = (folder / "report.html").read_text()
    assert f"deployed: {decided['baseline']}" in page and "nothing is judged" in page
    assert "mean of all" in page and "in training" in page and "mean agent, not deployed" in page
    # The numbers in large print are of what does not trade, and the score is the best of several.
    assert "<span>Total return, mean agent, not deployed</span>" in page
    assert f"of {selection['scored']} scored: that score is too good" in page
    assert "Mean gross" in page


def test_the_page_says_what_the_result_may_be_and_what_to_try_next(demo):
    result, folder, said, _ = demo
    page = (folder / "report.html").read_text()
    assert "Generalisation gap" in page and "exposure-matched hold" in page
    assert list(result["checks"]) == [
        "Evaluations on the test span", "The same exposure without its timing",
        "Independent bars per parameter",
    ]  # fmt: skip
    for text in result["checks"].values():
        assert text[:40] in said
    assert result["checks"]["Evaluations on the test span"].endswith(", by the trial log.")
    assert "504 bars" in result["checks"]["Independent bars per parameter"]
    assert "What to try next" in page and "demo --panel" in page
    assert "--deploy" in said


def test_two_assets_stand_on_hold_and_trend_and_more_on_the_preset(tiny, tmp_path, monkeypatch):
    """A rank among two says nothing. An agent that is named keeps its own base."""
    bases = []

    def train(env, agent, *_, **more):
        bases.append(agent.policy.base)
        raise ConfigError("no further")

    monkeypatch.setattr(train_module, "train", train)
    two = dataclasses.replace(job_of(None), bars=job_of(None).bars.between("2008-01-01", None))
    many = sample_bars("fx").select("EUR", "GBP", "CHF").between("2008-01-01", None)
    for job, agent in ((two, []), (dataclasses.replace(two, bars=many), []), (two, [str(tiny)])):
        monkeypatch.setattr(demo_command, "job_of", lambda panel, job=job: job)
        words = ["demo", "--out", str(tmp_path), *(["--agent", *agent] if agent else [])]
        assert main(words) != 0
    preset = load_agent("panel_nca").policy.base
    assert bases == ["half_and_half", preset, "none"] and preset != "half_and_half"


def test_what_a_tilt_changed_and_earned_is_counted_by_hand():
    returns = 0.01 * np.random.default_rng(0).normal(size=(2, 60))
    of = [
        types.SimpleNamespace(
            name="half", weights=[weights, [0.5, -0.25]] * 30, excess_returns=each,
            bars_per_year=30.0, equity=pd.Series([1.0] * 59 + [end]),
            metrics={"sharpe": sharpe, "turnover": sharpe},
        )
        for weights, each, end, sharpe in (
            ([0.5, 0.25], returns[0], 1.21, 0.5), ([0.5, -0.25], returns[1], 1.0, 0.25)
        )
    ]  # fmt: skip
    found = demo_sections.tilt_section(*of)
    facts = dict(found.facts)
    assert "its base, half" in found.verdict
    # 0.5 of one asset at every other bar, of 0.75; two years.
    assert facts["Positions"].startswith("33.3% of its base's")
    assert facts["Return over its base"].startswith("+9.53% a year")
    assert facts["Sharpe ratio less its base's"].startswith("+0.250, 95% interval ")


def test_a_panel_is_cut_into_spans_that_follow_each_other(tmp_path):
    drawn, found = job_of("simulated"), job_of(None)
    assert "Sharpe ratio of 2.00" in drawn.note
    assert "simulated" in drawn.title
    rows = [drawn.bars.row(x, "start") for x in (drawn.train_until, drawn.select_until)]
    years = np.diff([0, *rows, len(drawn.bars)]) / drawn.bars.bars_per_year
    assert years == pytest.approx([14.5, 8.7, 5.8], abs=0.1)  # the gate has its 8 years
    dates = (found.first, found.train_until, found.select_until)
    assert dates == ("2000-03-01", "2011-01-01", "2013-01-01")
    assert found.spans == ("2011-2012", "2013-2018") and "dozens of times" in found.note
    write_bars(sample_bars("sp500"), tmp_path / "mine.parquet")
    mine = job_of(str(tmp_path / "mine.parquet"))
    assert mine.bars.symbols == found.bars.symbols and mine.title.endswith("mine")
    write_bars(sample_bars("sp500")[:500], tmp_path / "short.parquet")
    with pytest.raises(BarError, match="500 bars; a demo of a panel needs 1200"):
        job_of(str(tmp_path / "short.parquet"))


# Most of a demo as small as this is compilation; its figures are tested elsewhere.
QUICK = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


@pytest.mark.slow
def test_the_demo_of_a_simulated_panel_ends_with_its_page(tmp_path, root):
    tilted = tmp_path / "tilted.toml"
    tilted.write_text(TINY.replace("[policy]", '[policy]\nbase = "half_and_half"'))
    args = command("--panel", "simulated", "--agent", tilted, "--steps", STEPS, "--out", tmp_path)
    done = subprocess.run(
        [*args, "--json"], capture_output=True, text=True, cwd=root, env=QUICK, timeout=900
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    (folder,) = tmp_path.glob("demo-*")
    job = job_of("simulated")
    bars, test = job.bars, job.bars.row(job.select_until, "start")
    # Training, the choice and the test follow each other, and none has a bar of another.
    data = json.loads((folder / "run.json").read_text())["data"]
    decided = json.loads((folder / "deployment.json").read_text())
    assert data["last"] < decided["data"]["first"] <= job.train_until + "T23"
    assert decided["data"]["last"] < job.select_until
    table = pd.read_parquet(folder / "backtest.parquet")
    assert len(table) == len(bars) - test
    assert result["complete"] and result["parity"] is True
    assert result["paper"]["equity"] == pytest.approx(table["equity"].iloc[-1], rel=1e-6)
    # The best rule's 2.0 before costs; two standard errors of 5.8 years are 0.8.
    assert max(m["sharpe"] or 0.0 for m in result["results"].values()) < 2.8
    page = (folder / "report.html").read_text()
    shown = ("planted trend", "Sharpe ratio of 2.00", "mean of all", "What the tilt changed")
    for text in (*shown, "its base, half equal weight"):
        assert text in page, text
    assert decided["sentence"] in done.stdout
    lines = (tmp_path / "trials.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["train", "test"]


@pytest.mark.heavy
def test_interrupt_saves_and_says_how_to_go_on(tiny, tmp_path, root):
    # Far too many steps to end by itself within the test.
    args = command("--agent", tiny, "--steps", 10_000_000, "--out", tmp_path)
    process = subprocess.Popen(
        args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root, env=QUICK
    )
    until = time.monotonic() + 500
    while time.monotonic() < until:
        rows = list(tmp_path.glob("demo-*/metrics.jsonl"))
        if rows and rows[0].read_text().count("\n") >= 3:
            break
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=500)
    assert process.returncode == 130, err
    (folder,) = tmp_path.glob("demo-*")
    said = out.splitlines()[-1]
    assert "go on with: nca-trader demo" in said and f"--resume {folder}" in said
    done = [int(path.name) for path in (folder / "checkpoints").iterdir()]
    assert max(done) == (folder / "metrics.jsonl").read_text().count("\n")
