"""A known shift is found, none is not, and the rank test is the textbook's."""

import json

import numpy as np
import pytest
from scipy import stats

from benchmarks import compare
from benchmarks.compare import fewest_rounds, judge, report, rounds, signed_rank


def sample(rng, shift, noise=0.03, count=8):
    """Rates of a machine that drifts, the same for both, and noise of their own."""
    drift = np.cumsum(rng.normal(0, 0.05, count))
    before = np.exp(10.0 + drift + rng.normal(0, noise, count))
    return before, np.exp(10.0 + drift + np.log(shift) + rng.normal(0, noise, count))


def test_p_is_that_of_scipys_exact_test():
    rng = np.random.default_rng(0)
    for count in (6, 9, 14):
        differences = rng.normal(0.3, 1.0, count)
        exact = stats.wilcoxon(differences, method="exact").pvalue
        assert signed_rank(differences, rng) == pytest.approx(exact, abs=1e-12)


def test_p_of_many_rounds_is_near_scipys():
    rng = np.random.default_rng(1)
    differences = rng.normal(0.2, 1.0, 40)
    expected = stats.wilcoxon(differences, method="approx").pvalue
    assert signed_rank(differences, rng) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(("shift", "verdict"), [(0.9, "slower"), (1.1, "faster")])
def test_a_known_shift_is_found_through_noise_and_drift(shift, verdict):
    found = [judge(*sample(np.random.default_rng(seed), shift)) for seed in range(100)]
    assert sum(each.verdict == verdict for each in found) >= 95
    assert np.median([each.change for each in found]) == pytest.approx(shift, rel=0.01)


@pytest.mark.parametrize("confidence", [0.95, 0.8])
def test_no_shift_is_taken_for_one_no_more_often_than_stated(confidence):
    tries = 200
    found = [
        judge(*sample(np.random.default_rng(1000 + seed), 1.0), confidence) for seed in range(tries)
    ]
    wrong = sum(each.verdict != "no evidence" for each in found) / tries
    rate = 1.0 - confidence
    assert wrong <= rate + 3.0 * np.sqrt(rate * confidence / tries)
    assert wrong > rate / 4  # a test that never says anything would also be below


def test_equal_rates_are_no_evidence():
    assert judge([5.0] * 8, [5.0] * 8).verdict == "no evidence"


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_with_fewer_rounds_than_the_fewest_nothing_can_be_found(confidence):
    least = fewest_rounds(confidence)
    for count, found in ((least, "faster"), (least - 1, "no evidence")):
        before = np.linspace(1.0, 2.0, count)
        assert judge(before, 3.0 * before, confidence).verdict == found


def test_the_one_that_begins_takes_turns():
    order = []

    def measure(which):
        order.append(which)
        return {"row": float(len(order))}

    pairs = list(rounds(measure, "a", "b", 3))
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert pairs[1] == ({"row": 4.0}, {"row": 3.0})


def test_one_slower_row_is_the_exit_code_and_many_rows_need_more_evidence(capsys):
    def pairs(worse, rows):
        return [
            (
                {f"row {i}": 100.0 + r for i in range(rows)},
                {f"row {i}": (100.0 + r) * (worse if i == 0 else 1.0) for i in range(rows)},
            )
            for r in range(8)
        ]

    assert report(pairs(0.5, 1), 0.95) == 1
    assert "slower       x0.500 [0.500, 0.500]" in capsys.readouterr().out
    assert report(pairs(0.5, 6), 0.95) == 1
    # 8 rounds give 2 / 256 at best: over the 0.05 / 7 that each of 7 rows may be wrong.
    assert report(pairs(0.5, 7), 0.95) == 0
    assert "fewer than 9 rounds" in capsys.readouterr().out


def test_two_checkouts_are_run_and_compared(tmp_path, capsys):
    for name, rate in (("before", 100.0), ("after", 50.0)):
        package = tmp_path / name / "benchmarks"
        package.mkdir(parents=True)
        row = {"bench": "env", "name": "x", "envs": 4, "steps_per_s": rate}
        (package / "__main__.py").write_text(
            f"import sys\nassert sys.argv[1:] == ['env', '--json']\nprint({json.dumps(row)!r})\n"
        )
        (package / "__init__.py").write_text("")
    paths = [str(tmp_path / name) for name in ("before", "after")]
    assert compare.main([*paths, "--rounds", "6", "--", "env"]) == 1
    assert capsys.readouterr().out.startswith("env x, 4 envs ")
    with pytest.raises(SystemExit, match="failed"):
        compare.main([*paths, "--rounds", "6", "--", "ppo"])


@pytest.mark.parametrize("args", [["--rounds", "5"], ["--confidence", "1"]])
def test_too_few_rounds_for_the_confidence_are_refused(args, capsys):
    with pytest.raises(SystemExit):
        compare.main([".", ".", *args, "--", "env"])
    assert args[0] in capsys.readouterr().err
