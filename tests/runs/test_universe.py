"""One policy over panels: other symbols, other numbers of assets, assets that come and go."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from drawn import random_bars
from tiny import AGENT, ENV
from untrained import untrained_run

import nca_trader as nca
from nca_trader.cli import main
from nca_trader.data.bars import write_bars
from nca_trader.errors import BarError
from nca_trader.evaluate.export import measure
from nca_trader.evaluate.report.summary import caveats
from nca_trader.paper.session.parity import compare
from nca_trader.paper.session.trade import paper_trade
from nca_trader.runs.exported import Coding, read_run, write_exported

FIRST = "2020-01-01"
SIZED = dataclasses.replace(ENV, size=0.1, actions="weights", short=True)


def panel(names, num_bars=240, seed=0, missing=0.05):
    bars = random_bars(np.random.default_rng(seed), num_bars, len(names), missing)
    return dataclasses.replace(bars, symbols=tuple(names))


def without(bars, symbol, first, last):
    """The same bars, in which `symbol` has none from row `first` to row `last`."""
    here = bars.symbols.index(symbol)
    fields = {n: getattr(bars, n).copy() for n in ("open", "high", "low", "close")}
    present, volume = bars.present.copy(), bars.volume.copy()
    present[first:last, here], volume[first:last, here] = False, 0.0
    for values in fields.values():  # NaN before the first bar, then the last close
        values[first:last, here] = bars.close[first - 1, here] if first else np.nan
    return dataclasses.replace(bars, **fields, present=present, volume=volume)


def made(path, bars, env=ENV, params=None, **policy):
    agent = dataclasses.replace(AGENT, policy=dataclasses.replace(AGENT.policy, **policy))
    return untrained_run(path, bars, env, agent, params)


def equal(one, other, atol=0.0):
    np.testing.assert_allclose(one.targets, other.targets, rtol=0, atol=atol)
    np.testing.assert_allclose(one.log_equity, other.log_equity, rtol=0, atol=atol)


@pytest.mark.heavy
@pytest.mark.parametrize("neighbours", ["none", "all"])
@pytest.mark.parametrize("names", ["XY", "ABCDE", "CAB"])
def test_it_trades_other_symbols_as_a_run_of_them_with_the_same_parameters(
    tmp_path, neighbours, names
):
    run = made(tmp_path / "abc", panel("ABC"), neighbours=neighbours)
    others = panel(names, seed=3)
    native = made(tmp_path / "native", others, params=run.params(), neighbours=neighbours)
    result = nca.backtest(others, run, start=FIRST, look=False)
    equal(result, nca.backtest(others, native, start=FIRST, look=False))
    assert result.num_fills > 50
    # A full position is one part of as many as there are now.
    assert np.nanmax(result.targets) == 1 / len(names)


def test_an_asset_that_starts_late_and_ends_early_is_as_if_absent_outside_its_span(tmp_path):
    bars = panel("ABC", missing=0.0)
    run = made(tmp_path / "abc", bars, env=SIZED)
    gappy = without(without(bars, "C", 0, 90), "C", 180, 240)
    gappy = without(gappy, "A", 120, 124)
    whole, pair = (
        nca.backtest(x, run, start=FIRST, look=False) for x in (gappy, gappy.select("A", "B"))
    )
    own = whole.weights["C"].to_numpy()
    # What was ordered before there was a price fills at the first open.
    assert (own[:90] == 0.0).all() and (own[90:180] != 0.0).all()
    # Before it starts it moves nothing in the others, nor in the account.
    np.testing.assert_allclose(whole.targets[["A", "B"]][:90], pair.targets[:90], atol=1e-7)
    np.testing.assert_allclose(whole.equity[:90], pair.equity[:90], rtol=1e-7)
    # After its end nothing fills, and what is left of it is worth the same at every bar.
    worth = (own * whole.equity.to_numpy())[180:]
    assert np.ptp(worth) < 1e-12 < abs(worth[0])


def test_a_policy_that_is_tied_to_its_symbols_is_refused_in_one_line(tmp_path):
    ring = made(tmp_path / "ring", panel("ABC"), neighbours="ring")
    assert ring.tie
    with pytest.raises(BarError) as caught:
        nca.backtest(panel("XYZ"), ring, start=FIRST, look=False)
    assert str(caught.value) == (
        "random: symbols X, Y, Z, but the run ring trades A, B, C, in this order "
        "(policy.neighbours = 'ring'); select those, or train with policy.neighbours = 'none', "
        "which trades any."
    )
    memory = dataclasses.replace(ENV, reward="drawdown")
    said = made(tmp_path / "memory", panel("ABC"), env=memory).tradable
    assert "in their order (reward = 'drawdown'" in said
    # Of one asset it has no weights for neighbours.
    alone = made(tmp_path / "alone", panel("A"), neighbours="ring")
    assert alone.tradable == "any one symbol" and alone.on(panel("B")).spec.symbols == ("B",)
    several = made(tmp_path / "several", panel("ABC"), neighbours="all")
    assert several.tradable == "any two or more symbols"
    for run, names in ((alone, "BC"), (several, "B")):
        with pytest.raises(BarError, match=f"the run {run.name} trades {run.tradable}; select"):
            run.on(panel(names))


def test_the_backtest_names_the_symbols_that_did_not_train_the_agent(tmp_path, capsys):
    run = made(tmp_path / "abc", panel("ABC"))
    assert run.tradable == "any symbols"
    write_bars(panel("AXY"), tmp_path / "others.parquet")
    args = ["backtest", f"--run={run.path}", f"--data={tmp_path}/others.parquet", "--start", FIRST]
    assert main([*args, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["symbols"], found["trained_symbols"]) == (list("AXY"), list("ABC"))
    assert main(args) == 0
    said = "2 of 3 symbols did not train it: X, Y; it was trained on A, B, C."
    assert said in capsys.readouterr().out


@pytest.mark.heavy
def test_the_order_of_symbols_changes_nothing(tmp_path):
    run = made(tmp_path / "abc", panel("ABC"))
    others = panel("VWXYZ", seed=4)
    one = nca.backtest(others, run, start=FIRST, look=False)
    turned = nca.backtest(others.select(*"ZXVYW"), run, start=FIRST, look=False)
    np.testing.assert_array_equal(one.targets[list("ZXVYW")], turned.targets)


@pytest.mark.slow
@pytest.mark.parametrize("neighbours", ["none", "all"])
def test_training_learns_from_assets_of_different_spans(tmp_path, neighbours):
    bars = without(without(panel("ABCD"), "C", 0, 150), "D", 60, 240)
    agent = dataclasses.replace(
        AGENT, policy=dataclasses.replace(AGENT.policy, neighbours=neighbours)
    )
    env = nca.TradingEnv(bars, dataclasses.replace(SIZED, random_costs=(5.0, 10.0)))
    run = nca.train(env, agent, tmp_path / "run")
    rows = run.metrics()
    assert all(row["skipped"] == 0 and np.isfinite(row["loss"]) for row in rows)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.params()))
    result = nca.backtest(bars, run, start=FIRST, look=False)
    assert np.isfinite(result.equity).all() and result.num_fills > 20
    assert (result.weights["C"][:150] == 0.0).all() and (result.weights["C"][150:] != 0.0).all()


@pytest.mark.slow
def test_an_exported_panel_agent_trades_others_on_paper_as_in_its_backtest(tmp_path):
    run = made(tmp_path / "abc", panel("ABC"))
    others = without(panel("VWXY", seed=5), "Y", 0, 70)
    measured = measure(run, Coding(bits=16), others)
    assert measured.found.decisions == 4 * (240 - run.policy.first_decision)
    file = tmp_path / "agent.nca"
    write_exported(file, run, measured.weights)
    write_bars(others, tmp_path / "others.parquet")
    exported = read_run(file)
    assert list(exported.spec.symbols) == list("ABC")
    for subject in (run.path, file):
        journal = tmp_path / f"{subject.name}.db"
        result = paper_trade(subject, f"replay:{tmp_path}/others.parquet", journal)
        assert (result["symbols"], result["trained_symbols"]) == (list("VWXY"), list("ABC"))
        assert result["fills"] > 20
        table = nca.backtest(others, read_run(subject), start=FIRST, look=False)
        table.save(run.path / "backtest.parquet")
        parity = compare(run.path, journal)
        assert parity.ok, parity.sentence


@pytest.mark.slow
def test_the_example_of_the_guide_runs(root, tmp_path, monkeypatch, capsys):
    text = (root / "docs/guides/panels.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    monkeypatch.chdir(tmp_path)
    exec(code, names := {})
    result = names["result"]
    assert "1 of 2 symbols did not train it" in " ".join(caveats(result))
    assert result.in_sample == 0 and result.num_fills > 10
    assert (result.weights.abs().sum() > 0.0).all()
