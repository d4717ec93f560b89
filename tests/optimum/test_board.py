"""The board: seeds joined to entries, every form of the table, and rows that are repeated."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
import types

import numpy as np
import pytest
from scipy import stats

import nca_trader as nca
from nca_trader.cli import main
from nca_trader.errors import ConfigError, NcaTraderError
from nca_trader.optimum import board
from nca_trader.optimum import prove as prove_runs
from nca_trader.optimum.outside import outside, paths


def row(market="ou_mid", name="a", seed=1, fraction=0.9, **other):
    curve = [[0, 0.0, -1.0, 0.01], [500, 2.0, 0.5, 0.01]]
    curve += [[steps, steps / 250, fraction, 0.01] for steps in (1000, 1500)]
    facts = {"market": market, "name": name, "seed": seed, "fraction": fraction, "error": 0.01}
    facts |= {"steps": 1500, "seconds": 6.0, "curve": curve, "entry": {"name": name}}
    return facts | {"digest": "d" * 64, "machine": "a machine", "versions": {"jax": "1"}} | other


def impossible(**other):
    return row(fraction=None, curve=[], steps=0, complaint="n/a: several actions", **other)


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_interquartile_mean_is_scipys_and_its_interval_that_of_a_bootstrap():
    rng = np.random.default_rng(3)
    for length in (1, 4, 5, 10):
        values = rng.normal(size=length)
        middle, low, high = board.interquartile(values)
        assert middle == pytest.approx(stats.trim_mean(values, 0.25), rel=1e-12)
        assert values.min() <= low <= middle <= high <= values.max()
    values = rng.normal(size=10)
    theirs = stats.bootstrap(
        (values,), lambda x, axis: stats.trim_mean(x, 0.25, axis), method="percentile", rng=rng
    ).confidence_interval
    _, low, high = board.interquartile(values)
    assert (low, high) == pytest.approx(tuple(theirs), abs=0.1 * (high - low))


def test_seeds_are_joined_and_a_seed_that_did_not_arrive_counts_as_never():
    rows = [row(seed=k, fraction=f) for k, f in enumerate((0.96, 0.97, 0.2, 0.98, 0.99))]
    (entry,) = board.entries_of(rows)
    found = entry.summary()
    assert found["fraction"] == pytest.approx((0.96 + 0.97 + 0.98) / 3)
    assert found["reached_95"] == 4 and found["steps_to_95"] == 1000 < found["steps"]
    assert found["seconds_to_95"] == 4.0 and found["seed"] == [0, 1, 2, 3, 4]
    assert board.seconds_of(found) == "4.0 (4.0 to never)" in board.cells(entry)
    (entry,) = board.entries_of(rows[1:4])
    assert entry.summary()["steps_to_95"] == 1000.0  # two of three
    (entry,) = board.entries_of([row(seed=k, fraction=0.5) for k in range(3)])
    assert entry.summary()["steps_to_95"] is None and entry.reached(1) == [math.inf] * 3


def test_curves_are_joined_where_every_seed_has_been():
    slow = [[0, 0.0, 0.0, 0.0], [100, 9.0, 1.0, 0.0]]
    fast = [[0, 0.0, 0.0, 0.0], [100, 3.0, 1.0, 0.0]]
    x, middle, low, high = board.join_curves([slow, fast, fast], 1)
    assert x[-1] <= 9.0 and (low <= middle).all() and (middle <= high).all()
    x, middle, *_ = board.join_curves([slow] * 3, 0)
    np.testing.assert_allclose(middle, x / 100, rtol=1e-9)


def test_each_form_tells_the_same(tmp_path, capsys):
    rows = [row(name="<b>bold</b>", seed=k, fraction=0.9 + k / 100) for k in range(3)]
    rows += [row(market="hidden", name="<b>bold</b>", fraction=0.25), impossible(name="other")]
    file = written(tmp_path / "rows.jsonl", rows)
    for ending in ("md", "json", "html", "png"):
        assert main(["board", file, "--out", str(tmp_path / f"board.{ending}"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    text = (tmp_path / "board.md").read_text()
    assert "### ou_mid" in text and "91.0%" in text and "| other | n/a | several actions" in text
    assert "digest dddddddddddddddd" in text and "a machine" in text and "jax 1" in text
    assert json.loads((tmp_path / "board.json").read_text())["board"] == said["board"]
    page = (tmp_path / "board.html").read_text()
    assert "mathdefault" not in page and "25.0%" in text and "25.0% to" not in text
    assert "<b>bold" not in page and "&lt;b&gt;bold" in page and page.count("<svg") == 4
    assert not re.search(r'(src|href)="https?:', page)


def test_who_was_trained_elsewhere_has_a_level_and_no_curve(tmp_path, capsys):
    rows = [row(), row(name="own", fraction=0.97, curve=[[None, None, 0.97, 0.01]], steps=None)]
    rows += [impossible(name="other", seed=None, market=m) for m in ("ou_mid", "ou_mid", "hidden")]
    rows += [row(market="martingale", fraction=None, curve=[[0, 0.0, None, None]])]
    rows[-1]["name"] = "\x1b[2J"
    file = written(tmp_path / "rows.jsonl", rows)
    assert main(["board", file, "--out", str(tmp_path / "board.html")]) == 0
    assert "97.0%" in (tmp_path / "board.html").read_text()
    assert "\x1b" not in capsys.readouterr().out


NAN, END = math.nan, [1000, 4.0, 0.9, 0.01]
WRONG = [
    ("steps", "many", "steps = "),
    ("fraction", True, "fraction = true"),
    ("fraction", NAN, "not within"),
    ("error", math.inf, "not within"),
    ("error", -0.1, "below 0"),
    ("seed", None, "without 'seed'"),
    ("entry", {"steps": "many"}, "whose 'steps' is of another type"),
    ("entry", {"steps": 10**12}, "not within"),
    ("entry", {"name": {}}, "whose 'name' is"),
    ("versions", "1", "versions = "),
    ("versions", {"jax": [NAN]}, "versions.jax = "),
    ("machine", NAN, "machine = "),
    ("curve", [END[:3]], "without steps, seconds"),
    ("curve", [], "without 'seed' or 'curve'"),
    ("curve", [[0, 0.0, 1e308, 0.01], END], "not within"),
    ("curve", [[2000, 2.0, 0.99, 0.01], END], "do not ascend"),
    ("curve", [[-1, 0.0, 0.1, 0.01], END], "do not ascend"),
    ("curve", [[0, 0.0, 0.1, 0.01], [1000, 4.0, 0.99, 0.01]], "does not end at"),
]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no rows"),
        ("{", "line 1"),
        ("[]\n", "line 1: is not a row"),
        ("\n" + json.dumps(row()), "line 1: is not a row"),
        (json.dumps(row(curve=[["now", 1.0, 0.5, 0.1]])) + "\n", r"curve\[0\]"),
        ('{"market": "ou_mid"}\n', "of `prove`: has no 'seed'"),
        *((json.dumps(row(**{name: value})), said) for name, value, said in WRONG),
        (2 * (json.dumps(row()) + "\n"), "line 2: seed 1 of a on ou_mid again"),
    ],
)
def test_what_is_no_row_is_refused_in_a_line(tmp_path, text, said):
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(NcaTraderError, match=said) as error:
        board.read_rows([file])
    assert str(file) in str(error.value)
    with pytest.raises(ConfigError, match="no such file"):
        board.read_rows([tmp_path / "none.jsonl"])


def test_bytes_that_are_no_text_and_a_line_break_inside_of_one(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(NcaTraderError, match="line 1: not JSON"):
        board.read_rows([file])
    file.write_text(json.dumps(row(machine="a\u2028b"), ensure_ascii=False) + "\n")
    assert board.read_rows([file])[0]["machine"] == "a\u2028b"


def test_a_strangers_words_make_no_cell_link_or_element(tmp_path):
    words = "evil | 100% | <img src=x> [a](javascript:b) `c`"
    rows = board.read_rows([written(tmp_path / "a.jsonl", [row(name=words, machine=words)])])
    text = board.markdown(board.entries_of(rows))
    assert not re.search(r"(?<!\\)[<>\[\]`]", text)
    (line,) = [line for line in text.splitlines() if line.startswith("| evil")]
    assert len(re.split(r"(?<!\\)\|", line)) == len(board.HEADERS) + 3


def test_an_even_number_of_seeds_has_a_middle_and_who_did_not_train_may_reach_it(tmp_path):
    curves = [[[0, 0.0, 0.0, 0.0], *[[steps, 1.0, 0.96, 0.0]] * 2] for steps in (2, 300)]
    each = [row(seed=k, fraction=0.96, curve=curve) for k, curve in enumerate(curves)]
    (entry,) = board.entries_of(each)
    assert entry.summary()["steps_to_95"] == 151.0
    (entry,) = board.entries_of([row(curve=[[None, None, 0.97, 0.01]], fraction=0.97)])
    assert entry.summary()["reached_95"] == 1 and entry.summary()["steps_to_95"] is None
    (entry,) = board.entries_of([row(seed_given=True, passed=True)])
    assert entry.passed == "1 of 1, seed given"
    # Nothing that a curve shows: its level alone is drawn.
    still = [[0, 0.0, 0.1, 0.01], [0, 0.0, 0.9, 0.01]]
    board.write_board(tmp_path / "a.svg", [row(curve=still)])


def test_a_repetition_within_its_error_agrees_and_one_beyond_differs():
    (entry,) = board.entries_of([row(seed=k, fraction=f) for k, f in enumerate((0.90, 0.92, 0.94))])
    assert board.repeated(entry, [row(fraction=0.95)]).verdict == "agrees"
    assert board.repeated(entry, [row(fraction=0.70)]).verdict == "differs"
    (sure,) = board.entries_of([row(fraction=0.92)])
    assert board.repeated(sure, [row(fraction=0.86)]).verdict == "differs"
    # Two evaluations on draws of their own: their errors are those of a right angle.
    (one,) = board.entries_of([row(error=0.03)])
    assert board.repeated(one, [row(error=0.04)]).error == pytest.approx(0.05)
    assert board.repeated(one, [row(fraction=None)]).verdict == "differs"  # it goes bankrupt now
    assert board.entries_of([]) == []
    (vague,) = board.entries_of([row(fraction=1.4, error=0.2)])
    assert board.repeated(vague, [row(fraction=0.87)]).verdict == "differs"


@pytest.mark.parametrize(
    ("fractions", "found", "verdict"),
    [
        ([1.0] * 6 + [-1.6] * 2, -0.02, "cannot tell"),  # which agreed with anything
        ([1.0] * 6 + [None] * 2, 1.0, "cannot tell"),  # bankrupt with two seeds
        ([1.0] * 6 + [0.9] * 2, 0.0, "differs"),
        ([0.9, 0.92], 0.91, "agrees"),
        ([0.9, 1.0], 0.95, "cannot tell"),
        ([0.9], 0.905, "agrees"),
    ],
)
def test_rows_that_vary_much_agree_with_nothing(fractions, found, verdict):
    about = {"curve": [], "complaint": "goes bankrupt"}
    error = 1e9 if fractions == [0.9] else 0.01
    rows = [
        row(seed=k, fraction=f, error=error, **(about if f is None else {}))
        for k, f in enumerate(fractions)
    ]
    (entry,) = board.entries_of(rows)
    repeat = board.repeated(entry, [row(fraction=found)])
    assert repeat.verdict.partition(",")[0] == verdict
    assert repeat.verdict in str(repeat)


def test_rows_of_more_than_one_agent_are_no_agreement():
    digests = ("a", "a", "b", None)
    rows = [row(seed=k, entry={"digest": digest}) for k, digest in enumerate(digests)]
    (entry,) = board.entries_of(rows)
    assert "2 of its rows" in board.repeated(entry, [row(entry={"digest": "a"})]).verdict
    assert "4 of its rows" in board.repeated(entry, [row(entry={"digest": "c"})]).verdict
    (entry,) = board.entries_of(rows[:2])
    assert board.repeated(entry, [row(entry={"digest": "a"})]).verdict == "agrees"


def test_what_verify_says_is_what_it_exits_with(tmp_path, monkeypatch, capsys):
    frozen, new = prove_runs.FROZEN["ou_mid"], row(entry={"digest": "a"})
    monkeypatch.setattr(
        prove_runs, "prove", lambda *_, **__: [types.SimpleNamespace(row=lambda: new)]
    )

    def verify(*rows, name="mlp"):
        file = written(tmp_path / "rows.jsonl", rows)
        code = main(["board", "verify", file, "--agent", "mlp", "--name", name, "--json"])
        said = capsys.readouterr()
        assert code == 0 or len(said.err.splitlines()) == 1
        found = json.loads(said.out.splitlines()[-1])["repeats"] if code < 2 else []
        assert (code == 0) == (bool(found) and all(one["agrees"] for one in found))
        return code, said.err

    same = {"name": "mlp", "digest": frozen, "entry": {"digest": "a"}}
    assert verify(row(**same)) == (0, "")
    assert verify(row(**same), row(**same | {"seed": 2, "fraction": 0.3}))[0] == 1
    assert "another agent" in verify(row(**same | {"entry": {"digest": "b"}}))[1]
    for digest in (None, "d" * 64):
        assert "another version of ou_mid" in verify(row(**same | {"digest": digest}))[1]
    none = row(**same | {"fraction": None, "curve": [], "complaint": "goes bankrupt"})
    assert verify(none)[0] == 2
    assert "no fraction of 'x'; give --name, one of mlp" in verify(row(**same), name="x")[1]


def test_our_own_rows_agree_with_themselves(root):
    """Those of agents that we train agree; a few vary too much to tell."""
    verdicts = []
    for entry in board.entries_of(board.read_rows([root / "benchmarks/results/board.jsonl"])):
        if entry.name.startswith("nca_trader") and len(entry.fractions):
            again = [one | {"fraction": entry.summary()["fraction"]} for one in entry.rows[:3]]
            verdicts.append(board.repeated(entry, again).verdict)
    assert len(verdicts) == 12 and verdicts.count("agrees") == 9, verdicts


@pytest.mark.heavy
def test_a_large_file_of_rows_is_one_line_at_once(root, tmp_path):
    """Too large, too many rows, or at the bound: within 10 seconds and .5 GiB."""
    points = [[0, 0, 0, 0]] * 330_000
    short = '{"market":"%d","name":"%d","seed":1,"fraction":null,"steps":0,"curve":[],"entry":{}}\n'
    texts = {
        "huge": "[" * (1 << 23),
        "many": "\n" * (1 << 22),
        "rows": "".join(short % (k, k) for k in range(10_001)),
        "nested": json.dumps(row())[:-1] + ', "x": [' + "[]," * 1_390_000 + "[]]}",
        "deep": '{"x":' * 900 + "1" + "}" * 900,
        "deep entry": json.dumps(row())[:-1] + ',"entry":{"name":' + "[" * 900 + "]" * 900 + "}}",
        "at the bound": "".join(short % (k, k) for k in range(10_000)),
        "long": json.dumps(row(curve=[*points, row()["curve"][-1]])),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 3 << 30)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *texts, "sparse"],
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    for name, said, grown, seconds in json.loads(done.stdout):
        assert grown < 0.5 and seconds < 10.0, (name, grown, seconds)
        assert "\n" not in said and (said == "read" or name in said), said
        if name in ("huge", "many", "rows", "sparse"):
            assert "more than 10,000 rows or 4 MiB; give fewer rows." in said


CHILD = """
import json, resource, sys, time
from nca_trader.errors import NcaTraderError
from nca_trader.optimum import board
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
out = []
for path in sys.argv[1:]:
    before, begin = peak(), time.process_time()
    try:
        board.entries_of(board.read_rows([path]))
        said = "read"
    except NcaTraderError as error:
        said = str(error)
    out.append((path, said, peak() - before, time.process_time() - begin))
print(json.dumps(out))
"""


def test_a_market_of_a_row_loads_no_file_and_is_of_this_version(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "boom.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    (tmp_path / "m.toml").write_text('market = "ou(phi=0.9)"\nfeatures = ["boom.py:f"]\n')
    (tmp_path / "mine.py").write_text("def f(seen):\n    return [1] * len(seen)\n")
    verify = ["board", "verify", "rows.jsonl", "--agent", "mine.py:f", "--name", "a"]
    written(tmp_path / "rows.jsonl", [row(market="./m.toml")])
    assert main(verify) == 2 and not (tmp_path / "ran").exists()
    assert "which may name code" in capsys.readouterr().err
    written(tmp_path / "rows.jsonl", [row()])
    assert main(verify) == 1 and "another version of ou_mid" in capsys.readouterr().err


RULE = """
import numpy as np

def revert(seen):
    return np.select([seen[:, 1] < -0.8, seen[:, 1] > 0.8], [2, 0], seen[:, 3].astype(int) + 1)

def idle(seen):
    return np.ones(len(seen), int)
"""


@pytest.mark.heavy
def test_a_row_is_repeated_on_new_draws_and_a_made_up_one_is_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paths, "CELLS", 2**15)
    draws = itertools.count(2**62)  # one in some hundred pairs of draws differs by chance
    monkeypatch.setattr(outside.secrets, "randbits", lambda bits: next(draws))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(RULE)
    # Below the market's bar, which is no fault of the row.
    assert main(["prove", "ou_mid", "--agent", "mine.py:revert", "--out", "rows.jsonl"]) == 1
    assert main(["board", "verify", "rows.jsonl", "--agent", "mine.py:revert"]) == 0
    assert "agrees" in capsys.readouterr().out
    line = json.loads((tmp_path / "rows.jsonl").read_text())
    better = {"fraction": line["fraction"] + 0.2}
    better["curve"] = [[None, None, better["fraction"], line["error"]]]
    written(tmp_path / "better.jsonl", [line | better])
    verify = ["board", "verify", "better.jsonl", "--agent", "mine.py:revert"]
    assert main(verify) == 1
    said = capsys.readouterr()
    assert "differs" in said.out and "not repeated; ou_mid: differs" in said.err
    assert main([*verify, "--out", "x.html"]) == 2  # it compares, and writes no board
    other = ["board", "verify", "rows.jsonl", "--agent", "mine.py:idle"]
    assert main(other) == 2
    assert "no fraction of" in capsys.readouterr().err


def test_a_preset_is_verified_with_the_steps_that_were_asked(tmp_path, monkeypatch):
    """A run's last update may pass them, and the digest of its row is of those asked."""
    trial = prove_runs.prepare("ou_mid", nca.load_agent("mlp"), 10_000)
    about = prove_runs.described(trial)
    assert about["steps"] == 10_000
    asked = []

    def prove(markets, agent, steps, **_):
        asked.append((markets, agent, steps))
        return [types.SimpleNamespace(row=lambda: row(entry=about))]

    monkeypatch.setattr(prove_runs, "prove", prove)
    rows = [row(name="mlp", entry=about, steps=10_240, digest=prove_runs.FROZEN["ou_mid"])]
    file = written(tmp_path / "rows.jsonl", rows)
    assert main(["board", "verify", file, "--agent", "mlp"]) == 0
    assert asked == [(["ou_mid"], "mlp", 10_000)]


def test_the_batch_is_smaller_where_steps_are_few_and_as_it_was_where_not():
    learner = nca.load_agent("nano").learner
    assert prove_runs.batched(learner, learner.steps) == learner
    few = prove_runs.batched(learner, 131_072)
    size = few.num_segments * few.segment_length * few.envs_per_segment
    assert few.steps == 131_072 and size * 64 <= 131_072
    least = prove_runs.batched(learner, 100)
    assert (least.envs_per_segment, least.segment_length, least.num_segments) == (1, 64, 32)
