"""Tests of many strategies against published values, arch, and plain loops."""

import itertools
import json

import numpy as np
import pandas as pd
import pytest

from nca_trader.errors import ConfigError
from nca_trader.evaluate import multiple


def noise(seed, edge=0.0, shape=(1600, 50)):
    r = np.random.default_rng(seed).standard_normal(shape)
    r[:, 7] += edge
    return r


@pytest.mark.parametrize(
    "name",
    ["noise_seed0", "noise_seed1", "one_true_SR0.10_per_period", "one_true_SR0.20_per_period"],
)
def test_pbo_equals_the_published_values(shared, name):
    expected = json.loads((shared / "expected/stats_and_published.json").read_text())
    expected = expected["pbo_cscv"][name]
    found = multiple.overfit_probability(noise(expected["seed"], expected["edge"]), expected["S"])
    assert found.probability == expected["pbo"]
    assert found.logits.mean() == pytest.approx(expected["mean_logit"], abs=1e-12)
    assert len(found.logits) == expected["combinations"]


def test_pbo_equals_a_loop_over_splits():
    r = noise(3, 0.1, (130, 9))
    parts = np.array_split(r[:128], 8)
    logits = []
    for chosen in itertools.combinations(range(8), 4):
        inside = np.concatenate([parts[k] for k in chosen])
        outside = np.concatenate([parts[k] for k in range(8) if k not in chosen])
        best = (inside.mean(0) / inside.std(0, ddof=1)).argmax()
        w = pd.Series(outside.mean(0) / outside.std(0, ddof=1)).rank()[best] / 10
        logits.append(np.log(w / (1 - w)))
    found = multiple.overfit_probability(r, 8)
    np.testing.assert_allclose(np.sort(found.logits), np.sort(logits), atol=1e-12)
    assert found.probability == np.mean(np.array(logits) <= 0)


def test_pbo_of_identical_strategies_is_chance():
    one = np.random.default_rng(0).standard_normal((160, 1))
    found = multiple.overfit_probability(np.repeat(one, 5, axis=1), 8)
    np.testing.assert_allclose(found.logits, 0.0, atol=1e-12)


@pytest.mark.parametrize("seed", [0, 1234])
@pytest.mark.parametrize("edge", [0.0, 0.15])
def test_spa_equals_arch_on_the_same_indices(seed, edge):
    from arch.bootstrap import SPA

    r = noise(seed, edge, (501, 30)) + np.linspace(-0.3, 0.02, 30)
    benchmark = 0.3 * np.random.default_rng(9).standard_normal(501)
    theirs = SPA(-benchmark, -r, block_size=10, reps=400, seed=seed)
    theirs.compute()
    ours = multiple.superior_ability(r, benchmark, block=10, repetitions=400, seed=seed)
    assert ours == tuple(theirs.pvalues)
    transformed = np.fft.rfft(r - benchmark[:, None], axis=0)
    variance = multiple._variance_of_mean(transformed, 501, 10) * 501
    np.testing.assert_allclose(variance, theirs._loss_diff_var, rtol=1e-9)


def test_spa_in_pieces_is_the_same(monkeypatch):
    r, benchmark = noise(5, 0.05, (400, 30)), np.zeros(400)
    whole = multiple.superior_ability(r, benchmark, repetitions=200)
    monkeypatch.setattr(multiple, "COLUMNS", 7)
    assert multiple.superior_ability(r, benchmark, repetitions=200) == whole


def test_spa_finds_an_edge_and_no_luck():
    assert multiple.superior_ability(noise(0, 0.15), np.zeros(1600)).consistent < 0.01
    rejected = sum(
        multiple.superior_ability(noise(k, shape=(300, 20)), np.zeros(300), None, 200).consistent
        < 0.1
        for k in range(40)
    )
    # 4 of 40 are expected at this size; 11 or more have a probability of 0.1%.
    assert rejected <= 10


def test_confidence_set_drops_what_is_worse():
    r = pd.DataFrame(noise(2, 0.3, (600, 9)), columns=list("abcdefghi")).assign(cash=0.0)
    p = multiple.confidence_set(r)
    assert p.attrs["included"] == ["h"] and p.index[0] == "h" and p["cash"] < 0.1
    alike = multiple.confidence_set(r.drop(columns="h"))
    assert "cash" in alike.attrs["included"]


def test_blocks_keep_the_sum():
    r = noise(0, shape=(4999, 8))
    blocks = multiple.block_returns(r)
    assert len(blocks) <= 2000 and blocks[0] == pytest.approx(r[:3].sum(0))
    np.testing.assert_allclose(blocks.sum(0), r.sum(0))


def test_refusals_are_one_line():
    for call in (
        lambda: multiple.overfit_probability(noise(0), 7),
        lambda: multiple.overfit_probability(noise(0)[:, :1]),
        lambda: multiple.superior_ability(noise(0), np.zeros(3)),
        lambda: multiple.superior_ability(np.full((50, 2), np.nan), np.zeros(50)),
    ):
        with pytest.raises(ConfigError) as raised:
            call()
        assert "\n" not in str(raised.value)
