"""The Python of every page runs, block after block, as a reader would paste it: slow, in CI.

Only sizes are made small: training takes one update. What a page calls its own (a broker, a market
of the page before) is put there first.
"""

import contextlib
import inspect
import pathlib
import re
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import pandas as pd
import pytest
from documents import ROOT, blocks, with_python
from fake_yahoo import FakeYahoo, Listing, days_from
from tiny import AGENT

import nca_trader as nca
from nca_trader.cli import main

pytestmark = pytest.mark.heavy


def bars_and_costs():
    return {"nca": nca, "bars": nca.sample_bars("sp500"), "costs": nca.Costs(commission=5e-4)}


def devices(tiny, monkeypatch):
    env = nca.TradingEnv(nca.sample_bars("sp500").select("SP500")[:400])
    policy = nca.make_policy("nano", env.spec)
    x = jnp.broadcast_to(env.market.features[-128:], (8, 128, 1, env.spec.num_features))
    params, present = policy.init(jax.random.key(0)), jnp.ones((8, 128, 1), bool)
    return {"nca": nca, "policy": policy, "params": params, "x": x, "present": present,
            "account": jnp.zeros((8, 1, 3))}  # fmt: skip


def messy(tiny, monkeypatch):
    pathlib.Path("data").mkdir()
    days = pd.date_range("2020-01-01", periods=20).strftime("%d.%m.%Y")
    frame = pd.DataFrame({"Trade Date": days, "Last": range(10, 30)})
    frame.drop(4).to_csv("messy.csv", sep=";", index=False)
    return {}


def risk(tiny, monkeypatch):
    pathlib.Path("data").mkdir()
    nca.write_bars(nca.sample_bars("sp500")[:400], "data/mine.csv")
    return bars_and_costs() | {"rule": nca.rules.momentum(20)}


def paper(tiny, monkeypatch):
    # Its two checks wait for a venue and a market of the reader's own: here they are only called.
    called = types.SimpleNamespace(raise_if_failed=lambda: None)
    for name in ("check_broker", "check_feed"):
        monkeypatch.setattr(nca, name, bound(getattr(nca, name), called))
    for folder in ("data", "runs"):
        pathlib.Path(folder).mkdir()
    shutil.copy(tiny.data, "data/mine.csv")
    shutil.copytree(tiny.path, "runs/mine")
    return {"nca": nca, "account": None}


def strategies(tiny, monkeypatch):
    shutil.copytree(tiny.path, "runs/mine")
    return {}


def training(tiny, monkeypatch):
    return bars_and_costs() | {"agent": AGENT}


def served(tiny, monkeypatch):
    shutil.copy(tiny.data, "bars.csv")
    assert main(["export", "--run", str(tiny.path), "--out", "agent.nca", "--force-agent"]) == 0
    return {}


def streaming(tiny, monkeypatch):
    nca.write_bars(nca.sample_bars("sp500").select("SP500")[:400], "SP500.csv")
    paths = [f"S{n}.csv" for n in range(5)]
    for path in paths:
        pd.read_csv("SP500.csv").assign(symbol=path[:2]).to_csv(path, index=False)
    return {"paths": paths, "learn": lambda arrays: None}


def cluster(tiny, monkeypatch):
    # Neither cluster is here: the options of both calls are compared with the function's.
    made = types.SimpleNamespace(
        scale=lambda jobs: None,
        scheduler_address="tcp://host:1",
        wait_for_workers=lambda n: None,
    )
    for module, name in (
        ("dask_jobqueue", "SLURMCluster"),
        ("dask_kubernetes", None),
        ("dask_kubernetes.operator", "KubeCluster"),
    ):
        monkeypatch.setitem(
            sys.modules, module, types.SimpleNamespace(**{str(name): lambda **options: made})
        )
    monkeypatch.setattr(nca, "walk_forward", bound(nca.walk_forward, None))
    return bars_and_costs()


def bound(function, answer):
    """A function that checks its arguments against another's, and returns `answer`."""

    def call(*args, **options):
        inspect.signature(function).bind(*args, **options)
        return answer

    return call


def venues(tiny, monkeypatch):
    prices = {day: (9.0, 11.0, 8.0, 10.0, 1.0) for day in days_from("2024-01-02", 30)}
    listings = dict.fromkeys(("SPY", "QQQ"), Listing(prices))
    FakeYahoo(monkeypatch, pathlib.Path.cwd(), **listings)
    return {}


PREPARE = {
    "docs/guides/devices.md": devices,
    "docs/guides/bars.md": messy,
    "docs/guides/risk.md": risk,
    "docs/guides/paper.md": paper,
    "docs/guides/strategies.md": strategies,
    "docs/guides/training.md": training,
    "docs/guides/serve.md": served,
    "docs/guides/streaming.md": streaming,
    "docs/guides/cluster.md": cluster,
    "docs/guides/live.md": venues,
}


# The example of a leak ends as its page says.
RAISES = {"docs/guides/leakcheck.md": AssertionError}


@pytest.mark.parametrize("page", with_python())
def test_the_python_of_a_page_runs_from_its_text(page, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    space = PREPARE[page](tiny, monkeypatch) if page in PREPARE else {}
    train = nca.train
    monkeypatch.setattr(nca, "train", lambda *a, **kw: train(*a, **kw | {"steps": 1}))
    monkeypatch.syspath_prepend(tmp_path)
    prompt = []
    for block in blocks((ROOT / page).read_text(), "toml"):
        if name := re.match(r"# (\w+\.toml)\n", block):  # a file of the reader's own
            pathlib.Path(name[1]).write_text(block, encoding="utf-8")
    for block in blocks((ROOT / page).read_text(), "python"):
        name = re.match(r"# (\w+)\.py\n", block)
        if name:  # a block of the reader's own file, which the others import
            with open(f"{name[1]}.py", "a", encoding="utf-8") as file:
                file.write(block)
            monkeypatch.delitem(sys.modules, name[1], raising=False)
        else:
            prompt.append(block)
    for number, block in enumerate(prompt):
        for needed in ("stable_baselines3", "gymnax"):
            if re.search(rf"from (\w+\.)*{needed}\b", block):
                pytest.importorskip(needed)
        code = compile(block, f"{page}, block {number}", "exec")
        with pytest.raises(RAISES[page]) if page in RAISES else contextlib.nullcontext():
            exec(code, space)
