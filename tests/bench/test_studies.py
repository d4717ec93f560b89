"""The studies' recipe: its research never sees the test span, and the page shows the results."""

import dataclasses
import json

import numpy as np
import pytest

import nca_trader as nca
from benchmarks import studies

SMALL = {"sma_cross": {"fast": [3, 5], "slow": [10, 20]}, "momentum": {"lookback": [5, 20]}}


@pytest.mark.slow
def test_research_is_the_same_whatever_the_test_span_holds(monkeypatch):
    monkeypatch.setattr(studies, "GRIDS", SMALL)
    monkeypatch.setattr(studies, "FOLDS", 3)
    bars = nca.sample_bars("sp500").select("SP500")[-600:]
    cut = int(studies.RESEARCH * len(bars))
    rows = np.arange(len(bars))[:, None] >= cut
    other = dataclasses.replace(
        bars,
        **{
            name: np.where(rows, 3.0 * getattr(bars, name), getattr(bars, name))
            for name in ("open", "high", "low", "close")
        },
    )
    first, second = (studies.study(b, studies.INDEX) for b in (bars, other))
    assert json.dumps(first["research"]) == json.dumps(second["research"])
    research = first["research"]
    assert research["trials"] == 6 and research["rules"][research["chosen"]]["trials"] <= 6
    assert research["last"] < first["test"]["first"] and first["test"]["looks"] == 1
    # The same market in another unit of price gives the same result to a holder.
    assert first["test"]["hold"]["sharpe"] == pytest.approx(second["test"]["hold"]["sharpe"])
    assert first["test"]["hold"]["less_hold"] == 0.0


def test_the_page_shows_the_results(root):
    results = json.loads(studies.RESULTS.read_text())
    page = (root / "docs" / "lab-notes" / "studies.md").read_text()
    for line in studies.table(results).splitlines():
        assert line in page
    # One recipe for all, written down before.
    assert len({row["manifest"]["recipe"] for row in results.values()}) == 1


def test_a_data_set_that_is_there_is_not_looked_at_again(monkeypatch, tmp_path, capsys):
    out = tmp_path / "studies.json"
    out.write_text(studies.RESULTS.read_text())
    monkeypatch.setattr(studies, "study", lambda *given: pytest.fail("looked again"))
    monkeypatch.setattr("sys.argv", ["studies", "--out", str(out)])
    studies.main()
    assert capsys.readouterr().out.strip() == studies.table(json.loads(out.read_text()))
