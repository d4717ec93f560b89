"""Progress of whole commands: on standard error, in pipes too, and never with --quiet."""

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
