"""Drift is found where it was put, not where there is none, and said once."""

import collections
import dataclasses
import json

import numpy as np
import pytest
from made_up import rules_of
from untrained import untrained_run

from nca_trader.config import AgentConfig, EnvConfig, PolicyConfig
from nca_trader.config.records import plain
from nca_trader.data.bars import write_bars
from nca_trader.envs.account.state import Quote
from nca_trader.errors import StateError
from nca_trader.evaluate.backtest import backtest
from nca_trader.paper.journal.journal import read_events
from nca_trader.paper.session.core import Usual
from nca_trader.paper.session.drift import UNKNOWN, DriftWatch, usual_turnover
from nca_trader.paper.session.trade import paper_trade
from nca_trader.runs.exported import (
    KIND,
    VERSION,
    Coding,
    Exported,
    compact,
    read_tensors,
    write_exported,
    write_tensors,
)
from nca_trader.runs.manifest import Run
from nca_trader.runs.reference import (
    MAJOR,
    WINDOW,
    counts_of,
    psi,
    reference_of,
    schema_of,
)
from nca_trader.types import Costs

NAMES = ("return_1", "rsi")


def walk(rng, rows, memory=0.9, assets=2):
    """`[N, A, F]` values that follow each other, of variance 1."""
    out = np.empty((rows, assets, len(NAMES)), np.float32)
    value = rng.standard_normal(out.shape[1:])
    for row in range(rows):
        noise = rng.standard_normal(value.shape)
        value = memory * value + np.sqrt(1 - memory**2) * noise
        out[row] = value
    return out


@pytest.fixture(scope="module")
def usual():
    trained = walk(np.random.default_rng(0), 3000)
    return Usual(reference_of(trained, np.ones(trained.shape[:2], bool), NAMES, 10))


def watch(usual, names=NAMES, **costs):
    return DriftWatch(usual, names, rules_of(Costs(**costs)))


def said(usual, rows, present=None):
    seen, found = watch(usual), []
    for i, row in enumerate(rows):
        here = np.ones(2, bool) if present is None else present[i]
        found += [(i, body["code"], body["feature"]) for body in seen.decided(row, here)]
    return found


def test_what_is_not_watched_is_said_with_its_reason(usual):
    status = watch(usual).status
    assert (status["features"], status["schema"]) == ("", "")
    assert status["turnover"] == "no saved backtest to compare with"
    assert watch(usual, ()).status["features"] == "a rule sees no features"
    other = watch(usual, NAMES[::-1]).status["features"]
    assert other == "the features are not those of training"


def test_the_index_is_that_of_its_formula():
    share = np.array([0.05, 0.15] * 5)
    counts = np.arange(1.0, 11.0)
    p = [(c + 0.5) / (55.0 + 5.0) for c in counts]
    by_hand = sum((a - b) * np.log(a / b) for a, b in zip(p, share, strict=True))
    assert psi(counts, share) == pytest.approx(by_hand, rel=1e-12)
    edges = np.arange(1.0, 10.0)
    np.testing.assert_array_equal(counts_of(np.array([0.5, 1.0, 9.5, 9.0]), edges),
                                  [1, 1, 0, 0, 0, 0, 0, 0, 0, 2])  # fmt: skip


def test_the_same_market_is_quiet_and_another_one_is_named(usual):
    """24 markets of 500 bars like that of training: at most one in ten may warn by chance."""
    alarms = sum(bool(said(usual, walk(np.random.default_rng(s), 500))) for s in range(1, 25))
    assert alarms <= 2  # of 24
    rows = walk(np.random.default_rng(30), 900)
    rows[400:, :, 1] += 2.0
    found = said(usual, rows)
    assert [name for _, _, name in found] == ["rsi"]  # once, and not the other feature
    assert 400 < found[0][0] < 400 + WINDOW
    wide = walk(np.random.default_rng(31), 600)
    wide[:, :, 0] *= 4.0
    assert {name for _, _, name in said(usual, wide)} == {"return_1"}


def test_a_feature_that_follows_itself_slowly_has_a_wider_limit(usual):
    trained = walk(np.random.default_rng(0), 3000, memory=0.995)
    slow = reference_of(trained, np.ones(trained.shape[:2], bool), NAMES, 10)
    assert min(slow.threshold) > 2.0 * max(usual.features.threshold) >= 2.0 * MAJOR


def test_it_warns_again_after_it_came_back(usual):
    rows = walk(np.random.default_rng(5), 1800)
    for first in (300, 1200):
        rows[first : first + 300, :, 1] += 3.0
    found = said(usual, rows)
    assert [name for _, _, name in found] == ["rsi", "rsi"]


def test_absent_assets_are_not_counted(usual):
    rows = walk(np.random.default_rng(6), 500)
    rows[:, 1] += 5.0
    assert said(usual, rows)
    present = np.tile([True, False], (500, 1))
    assert not said(usual, rows, present)


def test_too_little_training_says_nothing():
    short = walk(np.random.default_rng(0), 900)
    assert reference_of(short, np.ones(short.shape[:2], bool), NAMES, 10) is None
    assert DriftWatch(Usual(), NAMES, rules_of()).decided(short[0], np.ones(2, bool)) == []


def test_other_features_are_said_once(usual):
    seen = watch(usual, ("rsi", "return_1"))
    found = [seen.decided(np.zeros((2, 2)), np.ones(2, bool)) for _ in range(3)]
    assert [len(x) for x in found] == [1, 0, 0] and found[0][0]["code"] == "drift-schema"
    assert schema_of(NAMES) == usual.features.schema != schema_of(("rsi", "return_1"))


@pytest.mark.parametrize(("extra", "warns"), [(0.0, 0), (3e-5, 0), (1e-3, 1)])
def test_fills_that_cost_more_than_modelled(extra, warns):
    rng = np.random.default_rng(0)
    seen, found = watch(Usual(), slippage=2e-4, half_spread=3e-4), []
    for _ in range(80):
        side, price = rng.choice([-1.0, 1.0]), np.array([50.0, rng.uniform(50, 150)])
        slip = 5e-4 + extra + 2e-4 * rng.standard_normal()
        quote = Quote(np.ones(2, bool), price)
        found += seen.filled(1, side * 10, price[1] * (1 + side * slip), quote, 1e5)
    assert [body["code"] for body in found] == ["drift-slippage"] * warns
    if warns:
        assert found[0]["excess"] == pytest.approx(1e-3, abs=2e-4)


def test_turnover_against_the_backtest():
    rng = np.random.default_rng(0)
    low, high = usual_turnover(rng.uniform(0.0, 0.2, 1000))
    assert 0.08 < low < 0.1 < high < 0.12
    for mean, warns in ((0.1, 0), (0.19, 0), (0.03, 1), (0.3, 1)):
        seen = watch(Usual(None, (low, high)))
        found = [b for _ in range(400) for b in seen.turned(rng.uniform(0, 2 * mean))]
        assert [b["code"] for b in found] == ["drift-turnover"] * warns, mean
    assert usual_turnover(np.zeros(10)) is None


def test_a_session_tells_the_turnover_of_its_fills(stage, path, monkeypatch):
    monkeypatch.setattr("nca_trader.paper.session.drift.WINDOW", 20)
    agent = stage.agent()._replace(usual=Usual(None, (1e-6, 1e-6)))
    stage.replay(path, stage.bars(), agent)
    (told,) = (e.body for e in read_events(path, "risk"))
    traded = collections.Counter()
    for event in read_events(path, "fill"):
        traded[event.ts_event] += abs(event.body["units"] * event.body["price"])
    turnover = [traded[e.ts_event] / e.body["value"] for e in read_events(path, "snapshot")]
    assert told["code"] == "drift-turnover"
    assert told["per_bar"] == pytest.approx(np.mean(turnover[:20]), rel=1e-9)


@pytest.mark.heavy
def test_a_run_keeps_its_reference_and_a_session_warns(stage, tmp_path):
    bars = stage.bars(num_bars=1200)
    config = EnvConfig(features=("return_1",), short=False, costs=Costs(slippage=2e-4))
    agent = AgentConfig(policy=PolicyConfig(channels=8, hidden=8, steps=2, dilations=(1, 2)))
    run = untrained_run(tmp_path / "agent", bars, config, agent)
    reference = Run(run.path).reference
    assert reference.names == ["return_1"] and len(reference.edges[0]) == 9
    assert sum(reference.share[0]) == pytest.approx(1.0)
    backtest(bars, run, start=str(bars.time[0])).save(run.path / "backtest.parquet")
    write_bars(bars[:400], tmp_path / "same.csv")
    paper_trade(run.path, f"replay:{tmp_path}/same.csv", tmp_path / "same.db")
    assert not list(read_events(tmp_path / "same.db", "risk"))
    # A market that trends up by 1 % a bar, as much as its moves, was never seen in training.
    trend = 1.01 ** np.arange(330)[:, None]
    other = {n: getattr(bars, n)[:330] * trend for n in ("open", "high", "low", "close")}
    write_bars(dataclasses.replace(bars[:330], **other), tmp_path / "other.csv")
    paper_trade(run.path, f"replay:{tmp_path}/other.csv", tmp_path / "other.db")
    codes = [e.body["code"] for e in read_events(tmp_path / "other.db", "risk")]
    assert codes.count("drift-feature") == 1 and "drift-slippage" not in codes
    before = (tmp_path / "other.db").read_bytes()
    paper_trade(run.path, f"replay:{tmp_path}/other.csv", tmp_path / "other.db")
    assert (tmp_path / "other.db").read_bytes() == before
    # An exported file carries the distribution, where the run had one.
    file, coded = tmp_path / "agent.nca", compact(run, run.params(), Coding(bits=16), *[None] * 2)
    write_exported(file, run, coded)
    assert Exported(file).reference == reference
    paper_trade(file, f"replay:{tmp_path}/other.csv", tmp_path / "file.db")
    codes = [e.body["code"] for e in read_events(tmp_path / "file.db", "risk")]
    assert codes.count("drift-feature") == 1
    tensors, about = read_tensors(file, KIND, VERSION)
    write_tensors(file, tensors, about | {"features": "null"}, KIND, VERSION)
    paper_trade(file, f"replay:{tmp_path}/same.csv", tmp_path / "old.db")
    (watched,) = read_events(tmp_path / "old.db", "watched")
    assert watched.body == {
        "features": UNKNOWN, "schema": UNKNOWN, "slippage": "",
        "turnover": "no saved backtest to compare with",
    }  # fmt: skip
    for wrong in ('{"names": []}', json.dumps(plain(reference) | {"edges": []})):
        write_tensors(file, tensors, about | {"features": wrong}, KIND, VERSION)
        with pytest.raises(StateError, match=r"agent\.nca: features: .*export it again") as caught:
            Exported(file)
        assert "\n" not in str(caught.value)
    text = (run.path / "features.json").read_text()
    (run.path / "features.json").write_text(text.replace('"return_1"', '"return_5"'))
    with pytest.raises(StateError, match=r"features\.json"):
        Run(run.path).reference  # noqa: B018
