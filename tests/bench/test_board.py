"""The board's script: it resumes, and searches hyper-parameters before it trains with the best."""

import json
import math

import pytest
from scipy import stats

from benchmarks import board
from nca_trader.agents import load_agent

pytest.importorskip("optuna")


def test_trials_have_seeds_of_their_own_and_what_is_done_is_not_done_again(tmp_path, monkeypatch):
    asked = []

    def run_one(name, market, seed, args, given, last=False):
        asked.append((name, market, seed, given, last))
        assert args.steps == (33_333 if last else 100_000)
        reached = -abs(math.log(given["optimizer.learning_rate"] / 1e-3))
        return {"market": market, "seed": seed, "fraction": reached, "curve": [], "entry": {}}

    monkeypatch.setattr(board, "run_one", run_one)
    file = tmp_path / "rows.jsonl"
    words = [str(file), "--names", "nca_trader nano", "--markets", "ou_mid", "--seeds", "2"]
    board.main([*words, "--trials", "3"])
    trials, runs = asked[:3], asked[3:]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    seeds = json.loads(file.with_suffix(".seeds").read_text())
    assert [run[2] for run in runs] == [row["seed"] for row in rows] == seeds
    assert not {trial[2] for trial in trials} & {*seeds} and all(trial[4] for trial in trials)
    best = max(trials, key=lambda trial: -abs(math.log(trial[3]["optimizer.learning_rate"] / 1e-3)))
    assert {row["name"] for row in rows} == {"nca_trader nano, tuned"}
    assert all(row["given"] == best[3] == run[3] for row, run in zip(rows, runs, strict=True))
    board.main([*words, "--trials", "3"])
    assert len(asked) == 5
    board.main([*words, "--trials", "3", "--seeds", "3"])
    assert len(asked) == 6 and asked[-1][3] == best[3]
    # Rows of other hyper-parameters are not joined to these.
    monkeypatch.setattr(board, "best_of", lambda *_: best[3] | {"policy.window": 7})
    with pytest.raises(SystemExit, match="nca_trader nano, tuned on ou_mid has rows of fewer"):
        board.main([*words, "--trials", "4", "--seeds", "4"])
    assert len(file.read_text().splitlines()) == 3


def test_the_ranges_of_our_agents_are_of_settings_that_they_have():
    for name, preset in board.OURS.items():
        for text in board.SPACES[name]:
            key, _, values = text.partition("=")
            for value in values.removesuffix(":log").replace(":", ",").split(","):
                load_agent(preset, [f"{key}={value}"])


def test_the_table_of_the_page_is_that_of_the_rows(root):
    lines = (root / "benchmarks/results/board.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    names = [*board.OURS, *board.PEERS]
    expected = []
    for name in [*names, *(f"{name}, tuned" for name in names)]:
        cells, counts = [], set()
        for market in board.MARKETS:
            own = [r for r in rows if (r["market"], r["name"]) == (market, name)]
            found = [row["fraction"] for row in own if row["fraction"] is not None]
            counts |= {len(found)} - {0}
            mean = f"{stats.trim_mean(found, 0.25):.1%}" if found else ""
            cells.append(mean or "n/a" * bool(own))
        if counts:
            seeds = " to ".join(map(str, sorted({min(counts), max(counts)})))
            expected.append(f"| {name} | {seeds} | {' | '.join(cells)} |")
    page = (root / "docs/board.md").read_text()
    table = page[page.index("\n|-|") : page.index("\n\n", page.index("\n|-|"))].splitlines()
    assert table[2:] == expected
