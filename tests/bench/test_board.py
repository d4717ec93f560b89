"""The board's script: it resumes, and refuses rows that would not compare."""

import json
import statistics
from types import SimpleNamespace

import pytest
from scipy import stats

from benchmarks import board
from benchmarks.peers import looks
from nca_trader.optimum.board import arrival, entries_of, read_rows, seconds_of


@pytest.fixture
def script(monkeypatch):
    """Runs the script on one core at a commit, without training; returns what it ran."""
    asked, at = [], SimpleNamespace(commit="0123456789ab", cores=1)

    def ran(name, market, seed, args):
        asked.append((name, market, seed, args.steps, args.seconds))
        row = {"market": market, "seed": seed, "fraction": 0.9, "steps": 5, "entry": {}}
        return row | {"curve": [[5, 1.0, 0.9, 0.0]]}

    monkeypatch.setattr(board, "ours", ran)
    monkeypatch.setattr(board, "theirs", ran)
    monkeypatch.setattr(board, "versions", lambda python, package: {package: "1"})
    monkeypatch.setattr(board, "commit", lambda: at.commit)
    monkeypatch.setattr(board, "cores", lambda: at.cores)
    return SimpleNamespace(asked=asked, at=at)


def test_what_is_done_is_not_done_again_and_the_first_seed_of_all_comes_first(script, tmp_path):
    file = tmp_path / "rows.jsonl"
    words = [str(file), "--names", "nca_trader nano", "SB3 DQN", "--markets", "ou_mid", "hidden"]
    board.main([*words, "--seeds", "2"])
    seeds = json.loads(file.with_suffix(".seeds").read_text())
    pairs = [(n, m) for n in ("nca_trader nano", "SB3 DQN") for m in ("ou_mid", "hidden")]
    assert [run[:3] for run in script.asked] == [(*pair, seed) for seed in seeds for pair in pairs]
    board.main([*words, "--seeds", "3"])
    assert len(script.asked) == 12
    board.main([*words, "--seeds", "3"])
    assert len(script.asked) == 12
    rows = read_rows([file])
    assert {row["commit"] for row in rows} == {"0123456789ab"} and len(rows) == 12
    assert rows[2]["versions"] == {"stable_baselines3": "1"} and len(entries_of(rows)) == 4


def test_rows_of_two_commits_or_of_changes_are_refused(script, tmp_path):
    words = [str(tmp_path / "rows.jsonl"), "--names=nca_trader nano", "--markets=ou_mid"]
    for now in ("0123456789ab+dirty", "unknown"):
        script.at.commit = now
        with pytest.raises(SystemExit, match="of one commit, without changes; this is"):
            board.main(words)
    script.at.commit = "0123456789ab"
    board.main([*words, "--seeds=1"])
    script.at.commit = "ba9876543210"
    with pytest.raises(SystemExit, match="of one commit"):
        board.main(words)
    assert len(script.asked) == 1


def test_a_race_is_on_one_core_of_agents_that_need_no_number_of_steps(script, tmp_path, capsys):
    words = [str(tmp_path / "race.jsonl"), "--seconds=60", "--seeds=1"]
    board.main(words)
    assert {run[0] for run in script.asked} == {*board.RACERS, *board.LEARNERS} - {"SB3 DQN"}
    assert {run[1] for run in script.asked} == {*board.RACED} <= {*board.MARKETS}
    script.at.cores = 2
    for more, said in (([], "on one core"), (["--names=SB3 DQN"], "on one core")):
        with pytest.raises(SystemExit):
            board.main([*words, *more])
        assert said in capsys.readouterr().err
    script.at.cores = 1
    for more, said in (
        (["--names=SB3 DQN"], "not run here: SB3 DQN"),
        (["--set", "policy.hidden=8"], "no --set"),
    ):
        with pytest.raises(SystemExit):
            board.main([*words, *more])
        assert said in capsys.readouterr().err


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(time=100.0)
    monkeypatch.setattr(looks.time, "perf_counter", lambda: now.time)
    return now


def test_a_race_is_evaluated_at_seconds_that_grow_by_a_quarter(tmp_path, clock):
    seen = looks.Looks(str(tmp_path), 0, 2.0, ".x")
    seen.start()
    saved, on, steps = [], True, 0

    def save(path):
        saved.append(path)
        clock.time += 50.0  # is not training

    while on:
        steps, clock.time = steps + 10, clock.time + 0.1
        on = seen.look(steps, save)
    seconds = [look["seconds"] for look in seen.found]
    # At 0.25 and each 1.25 times that, the first update which is past it, and after the end.
    due = [0.25 * 1.25**k for k in range(10)]
    expected = [*dict.fromkeys(round(-(-x // 0.1) * 0.1, 6) for x in due if x < 2.0)]
    assert seconds[: len(expected)] == pytest.approx(expected) and 2.0 < seconds[-1] < 2.11
    assert len(saved) == len(seconds) and 0.0 < seen.before < 1e5
    planned = looks.Looks(str(tmp_path), 80, 0.0, ".x")
    planned.start()
    assert all(planned.look(steps, save) for steps in range(10, 80, 10))
    assert planned.look(80, save, end=True)
    assert [look["steps"] for look in planned.found] == [20, 40, 80]


def test_an_agent_arrives_at_the_first_of_two_evaluations_in_a_row():
    curve = [[1, 0.1, 0.96, 0.0], [2, 0.2, 0.9, 0.0], [3, 0.3, 0.95, 0.0], [4, 0.4, 0.97, 0.0]]
    assert arrival(curve) == curve[2] and arrival(curve[:3]) is None and arrival([]) is None
    # Of an agent that was trained elsewhere there is one point.
    assert arrival([[7, None, 0.96, 0.0]])[0] == 7
    found = {"all_seconds_to_95": [0.3, 0.5, None], "seconds_to_95": 0.5, "reached_95": 2}
    assert seconds_of(found) == "0.5 (0.3 to never)"


def table_of(page, heading):
    """The rows of the first table below a heading."""
    rest = page[page.index(heading) :]
    rest = rest[rest.index("\n|-|") :]
    return rest[: rest.index("\n\n")].splitlines()[2:]


def test_the_race_of_the_page_is_that_of_the_rows(root):
    """Of one commit: medians and ranges, and what passes before training in a column of its own."""
    lines = (root / "benchmarks/results/race.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len({row["commit"] for row in rows}) == 1
    expected = []
    for name in [*board.RACERS, *(name for name in board.LEARNERS if name != "SB3 DQN")]:
        of_it, cells = [row for row in rows if row["name"] == name], []
        for market in board.RACED:
            own = [row for row in of_it if row["market"] == market]
            if own[0]["fraction"] is None:
                cells.append("n/a")
                continue
            cells.append(seconds_of(entries_of(own)[0].summary()) or "never")
        begun = [row["seconds_before"] for row in of_it if "seconds_before" in row]
        cells.append(f"{statistics.median(begun):.0f}")
        expected.append(f"| {name} | {len({row['seed'] for row in of_it})} | {' | '.join(cells)} |")
    page = (root / "docs/board.md").read_text()
    assert table_of(page, "## Seconds to 95%") == expected


def test_the_table_of_the_page_is_that_of_the_rows(root):
    lines = (root / "benchmarks/results/board.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    names = [*board.OURS, *board.LEARNERS]
    expected = []
    for name in names:
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
