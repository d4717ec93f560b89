"""`backtest --out FILE.html`: one page for a run or a rule, honest about what it was judged on."""

import html
import re
import shlex

import pytest
from tiny import NUM_BARS, TRAINING_ROWS, UNTIL

import nca_trader as nca
from nca_trader.evaluate.backtest import backtest
from nca_trader.runs import trials
from nca_trader.strategies import rules
from nca_trader.types import Costs

AFTER = NUM_BARS - TRAINING_ROWS


def words(path):
    """The page's text without its style, scripts, tags and plots."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"<(style|svg|script).*?</\1>", " ", text, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


@pytest.mark.heavy
def test_a_run_after_its_training_is_out_of_sample_and_the_look_is_counted(own, command):
    page = own.folder / "run.html"
    said = command("backtest", "--run", own.path, "--data", own.data, "--out", page, "--json")
    assert said.code == 0, said.err
    assert (said.json["in_sample"], said.json["bars"], said.json["looks"]) == (0, AFTER, 1)
    seen = words(page)
    assert f"Out of sample, {UNTIL}" in seen and "IN SAMPLE" not in seen
    assert "Training and test are separate bars" in seen and "evaluated once" in seen
    assert f"training 2020-01-01 2020-07-18 {TRAINING_ROWS}" in seen
    assert re.search(rf"test {UNTIL} \d{{4}}-\d\d-\d\d {AFTER}", seen)
    assert "update" in seen and "Line: seed 0." in seen  # it was trained, and that is shown
    assert "selected agent" not in seen and "paper replay" not in seen and "Seeds" not in seen
    again = command("backtest", "--run", own.path, "--data", own.data, "--json")
    assert again.json["looks"] == 2 and "after training so far: 2," in again.out
    entry = trials.entries(own.run.root)[-1]
    judged = own.bars[TRAINING_ROWS:]
    assert (entry.kind, entry.run, entry.data) == ("test", "tiny", judged.digest())
    assert entry.symbols == list(judged.symbols) and entry.first == str(judged.time[0])


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("options", "in_sample", "bars", "looks"),
    [
        (("--start=2020-01-01", f"--stop={UNTIL}"), TRAINING_ROWS, TRAINING_ROWS, None),
        (("--start=2020-07-18",), 1, AFTER + 1, 1),
    ],
)
@pytest.mark.few(1)
def test_bars_that_the_run_saw_are_said_loudly(own, command, options, in_sample, bars, looks):
    page = own.folder / "run.html"
    given = ("--run", own.path, "--data", own.data, *options, "--out", page, "--json")
    said = command("backtest", *given)
    sentence = f"IN SAMPLE: {in_sample} of these {bars} bars"
    assert said.out.index(sentence) < said.out.index("total_return")
    assert (said.json["in_sample"], said.json["looks"]) == (in_sample, looks)
    seen = words(page)
    assert f"IN SAMPLE {sentence}" in seen.partition("Verdict")[0]  # at the top of the page
    assert "out of sample" not in seen.lower() and "Deflated" not in seen
    assert trials.count(own.run.root, "test") == (looks or 0)


def test_the_command_and_its_page_say_that_nothing_was_filled(tiny, tmp_path, command):
    page = tmp_path / "page.html"
    words = ("--strategy=always_flat", f"--data={tiny.data}", f"--out={page}", "--quiet")
    said = command("backtest", *words)
    assert said.code == 0 and said.err == ""
    for text in (said.out, page.read_text()):
        assert text.count("NO FILLS: nothing was ever bought or sold") >= 1


@pytest.mark.heavy
def test_a_rule_stands_beside_the_baselines_on_its_own_bars_and_costs(tiny, tmp_path, command):
    page = tmp_path / "rule.html"
    options = ("--commission=0.002", "--slippage=0.001", "--fill=close", "--order=rebalance")
    span = ("--start=2020-03-01", f"--stop={UNTIL}")
    given = ("--strategy=momentum", f"--data={tiny.data}", *options, *span)
    said = command("backtest", *given, f"--out={page}", "--json")
    assert said.code == 0, said.err
    seen = words(page)
    expected = {
        name: backtest(
            tiny.bars,
            rule,
            Costs(commission=2e-3, slippage=1e-3),
            "close",
            "rebalance",
            start="2020-03-01",
            stop=UNTIL,
        )
        for name, rule in {
            "strategy": rules.momentum(),
            "buy and hold": rules.buy_and_hold(),
            "SMA cross 50/200": rules.sma_cross(50, 200),
            "always flat": rules.always_flat(),
        }.items()
    }
    for name, result in expected.items():
        assert f" {name} {result.equity.iloc[-1] - 1:z.1%} " in seen, name
    assert said.json["total_return"] == pytest.approx(expected["strategy"].equity.iloc[-1] - 1)
    assert said.json["in_sample"] is None and said.json["looks"] is None
    assert "0.2% of traded notional" in seen and "idealised" in seen
    assert "1, by the trial log" in seen and "strategy less buy and hold" in seen
    assert not re.search("out of sample|in sample|agent|trained|seed|select", seen, re.IGNORECASE)
    # The command on the page is the one that was given.
    shown = shlex.split(re.search(r"Command: (nca-trader backtest .*?\.html)", seen)[1])
    assert set(zip(shown[2::2], shown[3::2], strict=True)) == {
        tuple(option.split("=", 1)) for option in (*given, f"--out={page}")
    }


@pytest.mark.heavy
@pytest.mark.parametrize("own", [False, True])
def test_the_page_of_a_sweep_is_that_of_its_best_combination(command, tmp_path, own):
    page, name = tmp_path / "sweep.html", "sma_cross"
    if own:  # a function of bars and parameters
        (tmp_path / "mine.py").write_text(
            "import pandas as pd\n\n\n"
            "def cross(bars, fast=5, slow=40):\n"
            "    close = pd.DataFrame(bars.close)\n"
            "    more = close.rolling(fast).mean() > close.rolling(slow).mean()\n"
            "    return more.to_numpy() / 2\n"
        )
        name = f"{tmp_path / 'mine.py'}:cross"
    bars = nca.sample_bars("sp500")[-700:]
    nca.write_bars(bars, tmp_path / "bars.parquet")
    given = ("--strategy", name, "--grid=fast=5,10", "--grid=slow=40,60", "--commission=1e-3")
    files = ("--data", tmp_path / "bars.parquet", "--trials", tmp_path)
    said = command("sweep", *given, *files, "--out", page, "--json")
    assert said.code == 0, said.err
    best = max(said.json["rows"], key=lambda row: row["sharpe"])
    seen = words(page)
    earned = f"total return {best['total_return']:.1%} against"
    assert "Chosen as the best of 4 combinations: from 20" in seen and earned in seen
    assert f"Sharpe ratio {best['sharpe']:.2f}" in seen and said.json["verdict"][:60] in seen
    assert "The best 4 of 4 combinations by sharpe" in seen and "Equity and drawdown" in seen


@pytest.mark.heavy
@pytest.mark.parametrize("stop", ["2020-07-20", "2020-07-21", "2020-07-23"])
@pytest.mark.few(1)
def test_a_span_of_a_few_bars_makes_a_page_without_nan(own, command, stop):
    page = own.folder / "run.html"
    given = ("--run", own.path, "--data", own.data, "--stop", stop, "--out", page)
    assert command("backtest", *given).code == 0
    assert not re.search(r"\bnan\b|\binf\b", words(page), re.IGNORECASE)
