"""Progress of whole commands: on standard error, in pipes too, and never with --quiet."""

import json

import pytest

import nca_trader as nca


def written():
    nca.write_bars(nca.sample_bars("sp500")[:200], "bars.csv")


@pytest.mark.heavy
def test_a_quiet_command_shows_none_and_neither_does_a_program_in_a_pipe(
    command, monkeypatch, capsys
):
    written()
    monkeypatch.setattr("nca_trader.progress.QUIET", 0.0)
    said = command("leakcheck", "momentum", "--data=bars.csv", "--cases=5", "--quiet")
    assert said.code == 0 and said.err == ""
    nca.leakcheck(nca.rules.momentum(5), nca.read_bars("bars.csv"), cases=2)
    assert capsys.readouterr().err == ""


SHOWN = {
    "data check bars.csv": "read bars.csv  100%",
    "backtest --strategy=momentum --data=bars.csv --out=page.html": "backtest ... ",
    "sweep --strategy=sma_cross --grid=fast=5:9:1 --grid=slow=20,30": "sweep  100%  8 of 8 comb",
    "walkforward --strategy=sma_cross --grid=fast=5,9 --grid=slow=30 --train=2000 --test=1500":
    "walk forward  100%  2 of 2 folds",
    "leakcheck momentum --data=bars.csv --cases=5": "leakcheck  100%  5 of 5 cases",
    "paper --strategy=momentum --feed=replay:bars.csv --journal=j.db": "paper  100%  200 of 200",
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("typed", SHOWN)
def test_a_command_shows_its_steps_and_stdout_is_results_alone(command, typed, monkeypatch):
    written()
    monkeypatch.setattr("nca_trader.progress.QUIET", 0.0)  # as if each step took long
    said = command(*typed.split(), "--json")
    assert said.code == 0, said
    lines = said.err.splitlines()
    assert any(line.startswith(SHOWN[typed]) for line in lines), lines
    assert "\r" not in said.err and "\x1b" not in said.err
    assert json.loads(said.out.splitlines()[-1]) and "100%  " not in said.out
