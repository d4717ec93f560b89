"""`train`, `backtest` and `paper` do their work, say what they did, and take the next command."""

import json
import re
import shlex

import numpy as np
import pandas as pd
import pytest
from tiny import STEPS_PER_UPDATE, TRAINING_ROWS

from nca_trader.evaluate.backtest import backtest
from nca_trader.optimum.optima import synthetic
from nca_trader.runs import trials
from nca_trader.types import Costs

METRICS = (
    "update steps loss policy_loss value_loss entropy approx_kl clip_fraction "
    "explained_variance grad_norm skipped steps_per_s"
).split()


@pytest.fixture(scope="module")
def mine(tiny, tmp_path_factory):
    return tiny.copy(tmp_path_factory.mktemp("commands") / "with a space")


@pytest.mark.heavy
def test_train_makes_a_run_and_says_what_to_do_next(command, mine):
    bounded = ("--set", "learner.memory_gb=1")
    said = command(*mine.train_command(mine.runs / "new", steps=200), *bounded, "--json")
    assert said.code == 0
    # What is needed is printed, and stands in every row.
    (needs,) = re.findall(r"^memory: an update needs (\S+) GB of a device$", said.out, re.M)
    assert 1e-5 < float(needs) < 1.0 and said.json["memory_gb"] == pytest.approx(float(needs), 0.01)
    assert said.json["run"] == str(mine.runs / "new") and said.json["complete"] is True
    assert said.json["update"] == 2 and said.json["steps"] == 2 * STEPS_PER_UPDATE
    rows = (mine.runs / "new" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["update"] for row in rows] == [1, 2]
    assert all(set(METRICS) <= set(json.loads(row)) for row in rows)
    last = json.loads(rows[-1])
    assert last.pop("checksum") and last.items() <= said.json.items()
    assert "checksum" not in said.json
    assert trials.count(mine.runs, "train") == 2
    # The command that it names works as it stands.
    (named,) = re.findall(r"`nca-trader (.*)`", said.out)
    assert command(*shlex.split(named)).code == 0
    again = command(*mine.train_command(mine.runs / "new", steps=200), *bounded)
    assert "nothing was left to do: it had been trained for 256 steps; see" in again.out


def test_backtest_of_a_rule_pays_the_costs_that_are_given(command, mine, tmp_path):
    options = ["--strategy", "momentum", "--data", mine.data, "--order", "rebalance", "--json"]
    free = command("backtest", *options)
    dear = command("backtest", *options, "--commission", "0.01", "--fill", "close")
    assert free.code == dear.code == 0 and free.json["in_sample"] is None
    assert free.json["total_return"] > dear.json["total_return"]
    assert "fills at the close, rebalance" in dear.out


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_backtest_writes_both_kinds_of_table(command, mine, tmp_path, suffix):
    out = tmp_path / f"r.{suffix}"
    said = command("backtest", "--strategy", "buy_and_hold", "--data", mine.data, "--out", out)
    assert said.code == 0
    read = pd.read_csv if suffix == "csv" else pd.read_parquet
    assert len(read(out)) == len(mine.bars)


ABOVE = """
import numpy as np

def above(bars, level=100.0):
    return np.where(bars.close > level, 0.5, 0.0)
"""


def test_paper_trades_a_strategy_of_a_file(command, mine, tmp_path):
    (tmp_path / "mine.py").write_text(ABOVE)
    name, costs = f"{tmp_path}/mine.py:above", ["--commission", "0.0005"]
    level = float(np.median(mine.bars.close))
    options = ["--strategy", name, "--param", f"level={level}", *costs]
    feed = ["--feed", f"replay:{mine.data}", "--journal", tmp_path / "paper.db"]
    said = command("paper", *options, *feed, "--json")
    result = backtest(
        mine.bars, lambda bars: np.where(bars.close > level, 0.5, 0.0), Costs(commission=5e-4)
    )
    assert said.code == 0 and said.json["fills"] > 10
    assert said.json["equity"] == pytest.approx(result.equity.iloc[-1], rel=1e-13)
    # The code is part of the session: a journal does not resume with another file.
    (tmp_path / "mine.py").write_text(ABOVE + "# changed\n")
    said = command("paper", *options, *feed)
    assert said.code == 2 and "journal of another session (strategy_source" in said.err
    said = command("paper", "--strategy", name, "--seed", "1", *feed)
    assert said.code == 2 and "--seed has no effect without --run" in said.err


@pytest.mark.heavy
def test_paper_over_bars_that_trained_the_agent_is_in_sample(command, mine, tmp_path):
    options = ["--feed", f"replay:{mine.data}", "--journal"]
    said = command("paper", "--run", mine.path, *options, tmp_path / "all", "--json")
    trained = TRAINING_ROWS - mine.run.policy.first_decision
    assert said.code == 0 and said.json["in_sample"] == trained > 0
    assert f"IN SAMPLE: {trained} of these {said.json['decisions']} bars" in said.out
    late = ("--start", "2020-07-18")
    said = command("paper", "--run", mine.path, *options, tmp_path / "late", *late, "--json")
    assert said.json["in_sample"] == 1 and "IN SAMPLE: 1 of these" in said.out
    late = ("--start", "2020-07-19")
    said = command("paper", "--run", mine.path, *options, tmp_path / "after", *late, "--json")
    assert said.json["in_sample"] == 0 and "IN SAMPLE" not in said.out


@pytest.mark.heavy
def test_the_command_line_trains_what_python_trains(command, mine):
    command(*mine.train_command(mine.runs / "again"))
    there = json.loads((mine.runs / "again" / "metrics.jsonl").read_text().splitlines()[-1])
    here = mine.run.metrics()[-1]
    assert there.pop("checksum")
    assert {**there, "steps_per_s": 0} == {**here, "steps_per_s": 0}


@pytest.mark.slow
def test_a_seed_draws_its_own_path_of_a_synthetic_market(command, tiny, tmp_path):
    agent = tiny.folder / "agent.toml"
    options = ("--env=ou_mid", f"--agent={agent}", "--set=env.market_bars=400")
    digests = {}
    for seed in (0, 6):
        run = tmp_path / f"ou{seed}"
        assert command("train", *options, f"--run={run}", f"--seed={seed}").code == 0
        data = json.loads((run / "run.json").read_text())["data"]
        path = synthetic.make("ou", num_bars=400, seed=seed).bars
        assert data["sha256"] == path.digest()
        digests[seed] = data["sha256"]
        # The same command resumes on the same path; a backtest judges on none that was trained on.
        assert command("train", *options, f"--run={run}", f"--seed={seed}").code == 0
        judged = tmp_path / "judged.csv"
        said = command("backtest", f"--run={run}", f"--out={judged}", "--json")
        assert said.code == 0 and said.json["in_sample"] == 0
    assert digests[0] != digests[6]
    other = command("train", *options, f"--run={run}", "--seed=7")
    assert other.code == 2 and "seed was 6 there and is 7 now" in other.err
