"""The guide's own code: a feature, a reward, a policy and the rest, from training to a session.

`docs/guides/extend.md` is the only source of that code: each block begins with the file it is of.
"""

import json
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import ROOT

import nca_trader as nca
from nca_trader.cli import main
from nca_trader.config.extensions import load
from nca_trader.learner.ppo import gae
from nca_trader.learner.update import ALGORITHMS
from nca_trader.markets import task_of
from nca_trader.watch.alerts import Notification, read_rules
from nca_trader.watch.sinks import sink_of

pytestmark = pytest.mark.usefixtures("quick_compile")

GUIDE = ROOT / "docs/guides/extend.md"
SMALL = "--steps 64 --set learner.num_segments=8 --set learner.segment_length=8".split()
SMALL += "--set learner.envs_per_segment=1 --set learner.num_minibatches=1".split()
SMALL += "--set policy.window=4 --set policy.hidden=4 --set policy.channels=4".split()


def blocks(text):
    """The files of a guide by name, and the code that is of none."""
    files, rest = {}, ""
    for language, code in re.findall(r"```(python|toml)\n(.*?)```", text, re.DOTALL):
        name = re.match(r"# (\w+\.\w+)\n", code)
        if name:
            files[name[1]] = files.get(name[1], "") + code + "\n"
        elif language == "python":
            rest += code
    return files, rest


@pytest.fixture(scope="module")
def folder(tmp_path_factory, quick_compile):
    """A folder with the guide's files."""
    path = tmp_path_factory.mktemp("extend")
    for name, text in blocks(GUIDE.read_text())[0].items():
        (path / name).write_text(text)
    code = "import nca_trader as nca\ndef bars():\n    return nca.sample_bars('sp500')[:120]\n"
    (path / "few.py").write_text(code)
    before = os.getcwd()
    os.chdir(path)
    yield path
    os.chdir(before)
    sys.modules.pop("mine", None)


@pytest.fixture(scope="module")
def trained(folder):
    """The folder with a run that was trained there in this process."""
    words = "train --env my_env.toml --agent my_agent.toml --run runs/mine --until 2001-01-01"
    assert main([*words.split(), *SMALL]) == 0
    return folder


FEW = ["--data", "few:bars", "--cases", "12"]


@pytest.mark.slow
def test_the_guides_checks_pass(folder):
    exec(compile(blocks(GUIDE.read_text())[1], "extend.md", "exec"), {})


@pytest.mark.heavy
def test_the_guides_market_turns_around_and_trains_by_its_name(folder):
    (folder / "my_agent_here.toml").write_text("[policy]\nkind = 'mlp'\n")
    words = (
        "train --env regimes.toml --agent my_agent_here.toml --run runs/regimes --seed 3".split()
    )
    assert main([*words, *SMALL, "--set", "policy.neighbours=none"]) == 0
    manifest = json.loads((folder / "runs/regimes/run.json").read_text())
    assert manifest["code"]["markets:regimes(stay=0.95)"]["kind"] == "markets"
    assert manifest["data"]["source"] == "synthetic markets:regimes(stay=0.95), seed 3"
    assert main("backtest --run runs/regimes".split()) == 0  # another draw of the same market
    # The draw that trained it is known by its bars, also where Python makes it under another name.
    again, other = (load("markets", "markets:regimes")(1000, seed, stay=0.95) for seed in (3, 4))
    run = nca.Run("runs/regimes", allow_code=True)
    assert again.bars.source != run.manifest.data.source
    assert nca.backtest(again, run, look=False).in_sample == 1000
    assert nca.backtest(other, run, look=False).in_sample == 0
    config = nca.EnvConfig(market="markets:regimes(drift=0.1, stay=0.9)", market_bars=20_000)
    assert 0.09 < (np.diff(np.sign(task_of(config).returns[:, 0])) != 0).mean() < 0.11


@pytest.mark.heavy
def test_the_policy_head_of_an_own_policy_reads_the_cells_that_it_makes(trained):
    run = nca.Run("runs/mine")
    names = {f"{module}.{name}" for module, leaves in run.params().items() for name in leaves}
    assert {"encoder.first/kernel", "encoder.second/bias", "head.logits"} <= names
    drawn = run.each.init(jax.random.key(run.manifest.seed))
    for name, leaf in run.params()["encoder"].items():  # every matrix was trained
        assert (np.asarray(leaf) != np.asarray(drawn["encoder"][name])).any(), name


def test_own_estimators_are_what_gae_is_at_a_lambda_of_0(folder):
    rng = np.random.default_rng(0)
    r, d, v0, v1, lam = rng.normal(size=(5, 12)).astype(np.float32)
    own = load("advantages", "mine:one_step")
    np.testing.assert_allclose(own(r, d, v0, v1, lam), gae(r, d, v0, v1, 0.0 * lam), atol=1e-6)
    assert ALGORITHMS["mine:one_step"].replay is None
    with pytest.raises(nca.ConfigError, match=r"mine:bars: TypeError"):
        ALGORITHMS["mine:bars"]


def test_the_indicators_of_the_guide_are_those_of_ta_lib(folder, capsys):
    talib = pytest.importorskip("talib", reason="TA-Lib is not installed")
    assert main(["leakcheck", "feature:indicators:rsi(period=3)", *FEW]) == 0
    assert "no look-ahead found" in capsys.readouterr().out
    bars = nca.sample_bars("sp500")[:260]
    windows = load("features", "indicators:macd")().column
    np.testing.assert_array_equal(
        windows(bars)[199:, 0],
        [talib.MACD(bars.close[i : i + 200, 0])[2][-1] for i in range(61)],
    )


@pytest.mark.parametrize("subject", ["feature:mine:momentum", "feature:mine:momentum(period=3)"])
def test_the_guides_feature_has_no_look_ahead(folder, subject):
    assert main(["leakcheck", subject, *FEW]) == 0


def test_leakcheck_finds_a_feature_that_reads_ahead(folder, capsys):
    (folder / "ahead.py").write_text(
        "import nca_trader as nca\ndef last(bars):\n    return bars.close - bars.close[-1]\n"
    )
    assert main(["leakcheck", "ahead:last", *FEW]) == 1
    assert "looks ahead through close" in capsys.readouterr().out


def test_a_data_source_gives_bars_by_name(folder):
    bars = nca.read_bars("mine:bars(symbol='NASDAQ')")
    expected = nca.sample_bars("sp500").select("NASDAQ")
    assert bars.digest() == expected.digest() and bars.source == "mine:bars(symbol='NASDAQ')"
    (folder / "frames.py").write_text(
        "import pandas as pd\n"
        "def frame():\n"
        "    days = pd.date_range('2024-01-02', periods=2, tz='UTC')\n"
        "    return pd.DataFrame({'time': days, 'close': [10.0, 10.5]})\n"
        "def wrong():\n"
        "    return 3\n"
    )
    bars = nca.read_bars("frames:frame", "A", repair="close-only,no-volume")
    np.testing.assert_array_equal(bars.close, [[10.0], [10.5]])
    with pytest.raises(nca.BarError, match="D0"):  # checked like a file
        nca.read_bars("frames:frame", "A")
    with pytest.raises(nca.ConfigError, match="frames:wrong: returned the number 3; return Bars"):
        nca.read_bars("frames:wrong")


def test_an_alert_goes_to_a_function_by_name(folder):
    (rule,) = read_rules("rules.toml")
    sink = sink_of(rule.sinks[1])
    sink(Notification("firing", rule, 0.1, 0.0, 1.0, "runs/mine"))
    assert "runs/mine: kl firing" in (folder / "alerts.txt").read_text()


def command(folder, *words):
    """Run a command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "nca_trader", *words],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.mark.heavy
def test_a_run_records_its_code_and_another_process_trades_as_this_one(trained):
    manifest = json.loads((trained / "runs/mine/run.json").read_text())
    assert sorted((code["kind"], name) for name, code in manifest["code"].items()) == [
        ("actions", "mine:steps"),
        ("advantages", "mine:one_step"),
        ("costs", "mine:stamp_duty"),
        ("features", "mine:momentum(period=10)"),
        ("policies", "mine:Convolution"),
        ("rewards", "mine:downside"),
    ]
    words = "backtest --run runs/mine --start 2013-01-01 --stop 2013-06-01 --json".split()
    there = command(trained, *words)
    assert there.returncode == 0, there.stderr
    found = json.loads(there.stdout.splitlines()[-1])
    run, bars = nca.Run("runs/mine"), nca.sample_bars("sp500")
    here = nca.backtest(bars, run, start="2013-01-01", stop="2013-06-01")
    assert found["total_return"] == pytest.approx(here.metrics["total_return"], rel=1e-9)
    assert found["costs"]["mine:stamp_duty"] == here.costs.amount["mine:stamp_duty"] < 0.0
