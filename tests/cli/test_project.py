"""Presets, resolved configs and new projects: what a newcomer starts from."""

import importlib.util
import json
import subprocess
import sys
import time
import tomllib

import pytest
from conftest import ROOT

import nca_trader as nca
from nca_trader.cli import main
from nca_trader.config.toml import presets
from nca_trader.paper.clock import Clock


def said(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def refused(capsys, *words):
    assert main([*words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_every_file_of_a_checkout_is_listed_with_a_sentence(capsys):
    rows = said(capsys, "presets", "list")["presets"]
    files = {("environment", p.stem) for p in (ROOT / "envs").glob("*.toml")}
    files |= {("agent", p.stem) for p in (ROOT / "agents").glob("*.toml")}
    assert {(row["kind"], row["name"]) for row in rows} == files and len(rows) == len(files)
    assert all(20 < len(row["about"]) < 250 and "#" not in row["about"] for row in rows)


def test_a_copy_is_the_preset_and_never_replaces_a_file(capsys, tmp_path):
    path = said(capsys, "presets", "copy", "nano", str(tmp_path))["path"]
    assert path == str(tmp_path / "nano.toml")
    assert nca.load_agent(path) == nca.load_agent("nano")
    assert said(capsys, "presets", "show", "nano")["text"] == (tmp_path / "nano.toml").read_text()
    (tmp_path / "nano.toml").write_text("mine")
    line = refused(capsys, "presets", "copy", "nano", str(tmp_path / "nano.toml"))
    assert "exists; choose another place" in line and (tmp_path / "nano.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["show"], "write `presets show NAME`"),
        (["list", "nano"], "write `presets list`"),
        (["copy", "nano", "/dev/null/x"], "cannot be written"),
    ],
)
def test_what_is_missing_or_too_much_is_one_line(capsys, words, says):
    assert says in refused(capsys, "presets", *words)


def test_a_shown_config_reads_back_equal_with_its_changes(capsys):
    words = ["config", "show", "--env", "index_daily", "--agent", "nano"]
    main([*words, "--set", "env.costs.commission=1e-3", "--set", "policy.steps=3"])
    env, _, agent = capsys.readouterr().out.partition("# agent nano\n")
    from nca_trader.config.toml import from_toml_text

    changed = nca.load_env("index_daily", ["costs.commission=1e-3"])
    assert from_toml_text(nca.EnvConfig, env, "shown") == changed
    assert from_toml_text(nca.AgentConfig, agent, "shown") == nca.load_agent(
        "nano", ["policy.steps=3"]
    )
    assert set(tomllib.loads(agent)) == set(said(capsys, *words)["agent"])
    assert "give --env, --agent or both" in refused(capsys, "config", "show")
    line = refused(capsys, "config", "show", "--env", "sine", "--set", "policy.steps=3")
    assert "--set policy.steps=3 changes the agent; name it with --agent" in line


def test_a_new_project_backtests_its_strategy_and_loads_its_configs(capsys, tmp_path):
    folder = tmp_path / "mine"
    files = said(capsys, "init", str(folder))["files"]
    assert sorted(files) == sorted(str(p) for p in folder.rglob("*") if p.is_file())
    assert nca.load_env(folder / "env.toml") == nca.load_env("index_daily")
    assert nca.load_agent(folder / "agent.toml") == nca.load_agent("nano")
    spec = importlib.util.spec_from_file_location("mine", folder / "strategy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    bars = nca.sample_bars("sp500")[:600]
    result = nca.backtest(bars, module.trend(lookback=50))
    assert len(result.trades) > 3 and nca.leakcheck(module.trend(), bars, cases=3).ok


class Hurried(Clock):
    """A wait takes no time, and moves the clock on."""

    waited = 0.0

    def monotonic(self):
        return time.monotonic() + self.waited

    def sleep(self, seconds):
        self.waited += seconds


@pytest.mark.heavy
def test_the_broker_of_a_new_project_passes_the_check_and_each_fault_fails_it(tmp_path, capsys):
    said(capsys, "init", str(tmp_path / "mine"))
    ran = subprocess.run(
        [sys.executable, "broker.py"], cwd=tmp_path / "mine", capture_output=True, text=True
    )
    assert ran.returncode == 0 and "ok       an order is found by its id" in ran.stdout, ran.stderr
    assert ran.stdout.count("ok  ") == len(ran.stdout.splitlines()) == 11
    text = (tmp_path / "mine" / "broker.py").read_text()
    for whole, fault in (
        ("self.cash -= ticket.units * price", "self.cash += ticket.units * price"),
        ("if fill.ts >= since", "if fill.ts >= 0"),
        ('return Answer(Outcome.REJECTED, "duplicate")', "pass"),
        ("return self.orders.get(client_id)", "return None"),
    ):
        assert text.count(whole) == 1
        space = {"__name__": "broker"}
        exec(text.replace(whole, fault), space)
        found = nca.check_broker(space["account"](), "SPY", units=1.0, clock=Hurried())
        assert not found.passed, fault


def test_a_project_replaces_nothing_and_leaves_nothing_half_written(capsys, tmp_path):
    (tmp_path / "strategy.py").write_text("mine")
    line = refused(capsys, "init", str(tmp_path))
    assert "strategy.py: exists; choose another place" in line
    assert [p.name for p in tmp_path.iterdir()] == ["strategy.py"]
    assert (tmp_path / "strategy.py").read_text() == "mine"
    assert presets()  # and the presets themselves are still there
