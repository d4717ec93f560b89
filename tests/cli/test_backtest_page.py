"""`backtest --out FILE.html`: one page for a run or a rule, honest about what it was judged on."""

import html
import re

import pytest
from tiny import NUM_BARS, TRAINING_ROWS, UNTIL

from nca_trader.runs import trials

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
