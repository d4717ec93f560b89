"""`export`: a table, a file that `backtest` and `paper` read, and a refusal below the bar."""

import pathlib
import re

import pytest
from tiny import TRAINING_ROWS, UNTIL

from nca_trader.data.bars import write_bars
from nca_trader.evaluate import simulate as module


@pytest.fixture
def export(command, tiny, tmp_path, monkeypatch):
    """Runs the command on a copy of the tiny run, with few calls to take a latency of."""
    monkeypatch.setattr("nca_trader.evaluate.export.CALLS", 3)
    here = tiny.copy(tmp_path / "copy")

    def run(*args):
        return command("export", "--run", here.path, "--out", tmp_path / "agent", *args)

    run.path, run.tiny = tmp_path / "agent", here
    return run


def test_too_few_agreements_are_refused_and_nothing_is_written(export, monkeypatch):
    def apart(*args):
        return module.Agreement(0.98, 100, (1.0, 1.1))

    monkeypatch.setattr(module, "agreement", apart)
    data = ("--data", export.tiny.data, "--until", UNTIL)
    said = export(*data, "--json")
    assert said.code == 1 and not export.path.exists()
    assert re.fullmatch(
        r"nca-trader export: 0\.9800 of 100 decisions agree, below --min-agreement 0\.99; nothing "
        r"is written\. Give .*\n",
        said.err,
    )
    assert export(*data, "--min-agreement", "0.98").code == 0 and export.path.exists()


def test_bars_that_did_not_train_the_run_calibrate_nothing(export, tmp_path):
    other = tmp_path / "other.csv"
    write_bars(export.tiny.bars[3:], other)
    said = export("--activations", "--data", other)
    assert said.code == 2 and "are not those that trained" in said.err


def test_without_data_it_is_the_bars_that_trained_or_a_plain_refusal(export):
    record = export.tiny.run.manifest.data
    assert record.rows == TRAINING_ROWS
    said = export("--bits", "16", "--json")
    assert said.code == 0, said.err
    assert said.json["decisions"] == 2 * (TRAINING_ROWS - export.tiny.run.policy.first_decision)
    source = pathlib.Path(record.source)
    content = source.read_bytes()
    try:
        source.write_bytes(b"")
        said = export("--bits", "16")
    finally:
        source.write_bytes(content)
    assert said.code == 2 and "give them by --data" in said.err


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (("--until", "2020-03-01"), "give --data FILE"),
        (("--codebook", "cosine", "--group", "1"), "has no direction"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_one_line(export, options, remedy):
    said = export(*options)
    assert said.code == 2 and remedy in said.err and said.err.count("\n") == 1


def test_a_compiled_agent_and_its_card_are_written(export):
    said = export("--format", "stablehlo", "--json")
    assert said.code == 0, said.err
    assert said.json["agreement"] == 1.0 and export.path.read_bytes()[:2] == b"PK"
    assert "decisions from 2020-01-01" in said.out and "README.md in it says how" in said.out
    card = pathlib.Path(said.json["card"]).read_text()
    assert "stablehlo, float32" in card and "export.deserialize" in card
    refused = export("--format", "stablehlo", "--bits", "4")
    assert refused.code == 2 and "--bits has no effect without --format nca" in refused.err


@pytest.mark.heavy
def test_a_file_is_written_and_backtest_and_paper_read_it(export, command, tmp_path):
    data = ("--data", export.tiny.data)
    said = export(*data, "--until", UNTIL, "--bits", "16", "--activations", "--json")
    assert said.code == 0, said.err
    row = said.json
    assert row["agreement"] == 1.0 and abs(row["equity_difference"]) < 1e-6
    assert row["file_bytes"] == export.path.stat().st_size
    full, few = row["rows"]
    assert 0.5 * full["bytes"] < few["bytes"] < full["bytes"]
    assert min(each[key] for each in row["rows"] for key in ("stream_us", "window_us")) > 0
    policy = export.tiny.run.policy
    assert row["decisions"] == 2 * (TRAINING_ROWS - policy.first_decision)
    assert row["looks"] is None
    assert re.search(r"16 bits, .* too +\d+ +1.0000", said.out), said.out
    card = pathlib.Path(row["card"]).read_text()
    assert card.startswith("# tiny\n") and "nca, 16 bits, activations too" in card
    ours = command("backtest", "--run", export.path, *data, "--json").json
    assert ours["start"] == UNTIL and ours["in_sample"] == 0 and ours["looks"] == 1
    feed = ("--feed", f"replay:{export.tiny.data}", "--start", UNTIL)
    said = command("paper", "--run", export.path, *feed, "--journal", tmp_path / "db", "--json")
    assert said.json["equity"] == pytest.approx(1 + ours["total_return"], rel=1e-9)
    assert said.json["fills"] > 0
