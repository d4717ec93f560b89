"""The report page: whole, self-contained, escaped, and saying what it must."""

import dataclasses
import functools
import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from made_up import made_up_result, rules_of
from markupsafe import Markup

from nca_trader.evaluate import wording
from nca_trader.evaluate.evidence.verdict import weigh
from nca_trader.evaluate.figures import Curve
from nca_trader.evaluate.report import plots
from nca_trader.evaluate.report.contents import ReportPage, Section
from nca_trader.evaluate.report.page import write_report
from nca_trader.evaluate.report.plots import equity_plot, per_seed

HOSTILE = "<script>alert(1)</script>&\"'$x$"


def made_up_report(
    symbols=("SP500", "NASDAQ"), agent_follows=None, source="arch.data.sp500", **changes
):
    """A whole report from seeded random walks; `agent_follows` names a baseline to copy."""
    rng = np.random.default_rng(7)
    bars = 600
    market = rng.normal(0.0004, 0.009, (bars, 2)) + rng.normal(0, 0.004, (bars, 1))
    fake = functools.partial(made_up_result, market=market, symbols=symbols)
    trend = np.cumsum(market, axis=0)
    lagged = np.vstack([np.zeros((50, 2)), trend[:-50]])
    rules = {
        "buy and hold": np.full((bars, 2), 0.5),
        "SMA cross": np.where(trend > lagged, 0.5, 0.0),
        "always flat": np.zeros((bars, 2)),
    }
    baselines = {name: fake(name, w) for name, w in rules.items()}

    def wander():
        return np.repeat(rng.choice([-0.5, 0.0, 0.5, 0.5], (bars // 25, 2)), 25, axis=0)

    weights = wander() if agent_follows is None else rules[agent_follows].copy()
    agent = fake("nca", weights)
    agent = dataclasses.replace(agent, bars=dataclasses.replace(agent.bars, source=source))
    u = np.arange(60.0)
    metrics = {
        "reward": 2e-4 * (1 - np.exp(-u / 20)),
        "entropy": 1.09 - 0.006 * u,
        "approx_kl": 0.01,
        "explained_variance": np.tanh(u / 30),
        "clip_fraction": 0.1,
        "loss": 0.5 * np.exp(-u / 15),
    }
    drawn = {name: (x + 0.01 * rng.normal(size=(3, 60))).T for name, x in metrics.items()}
    training = [
        {"update": k, "steps": k * 4096, **{name: list(x[k]) for name, x in drawn.items()}}
        for k in range(60)
    ]
    fields = {
        "title": "NCA agent on S&P 500 and NASDAQ, daily",
        "evidence": weigh(agent, baselines, 252.0),
        "other_seeds": [fake(f"seed {k}", wander()) for k in (0, 2)],
        "sections": [
            Section(
                "Training and test",
                "Mostly noise. The spread is chance.",
                facts=[("Wall time", "61.2 s")],
                caption="Sharpe ratios",
                headers=["Seed", "Training", "Test"],
                rows=[("seed 1", ["1.80", "0.35"])],
            )
        ],
        "seed": 1,
        "training": training,
        "spans": [
            ("training", "1999-01-04", "2010-12-31", 3019),
            ("selection", "2011-01-03", "2012-12-31", 502),
            ("test", "2013-01-02", "2018-12-31", 1510),
        ],
        "features": ("return_1", "rsi", "macd"),
        "note": "Price indexes are not tradable as such and leave out dividends.",
        "trials": 3,
        "test_touched": 1,
        "selected": True,
        "configs": {
            "Environment (TOML)": 'fill = "next_open"\n',
            "Agent (TOML)": "num_seeds = 3\n[policy]\nchannels = 16\n",
        },
        "versions": {
            "python": "3.11.9",
            "jax": "0.10.0",
            "nca_trader": "0.1.0",
            "commit": "abc1234",
        },
        "device": "cpu, 2 cores",
        "command": "nca-trader demo --out runs/demo",
        "created": "2026-01-02 03:04 UTC",
    }
    return ReportPage(**{**fields, **changes})


def with_agent(report, **changes):
    """The report of an agent that differs in some fields of its backtest."""
    agent = dataclasses.replace(report.evidence.agent, **changes)
    return dataclasses.replace(report, evidence=dataclasses.replace(report.evidence, agent=agent))


@pytest.fixture(scope="module")
def report():
    return made_up_report()


@pytest.fixture(scope="module")
def text(report, tmp_path_factory):
    path = write_report(tmp_path_factory.mktemp("page") / "new" / "report.html", report)
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def seen(text):
    return Page(text).seen


class Page(HTMLParser):
    """Counts what a browser would see: tags, attributes and visible text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.words = [], [], []
        self.open = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag not in ("meta", "path", "use", "rect", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, key, value or "") for key, value in attrs]

    def handle_endtag(self, tag):
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def seen(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture
def seen_on(tmp_path, monkeypatch):
    """Returns the words of a page; without its plots, which take most of the time."""
    monkeypatch.setattr(plots, "svg", lambda *_: Markup(""))

    def seen(report):
        path = write_report(tmp_path / "r.html", report)
        return Page(path.read_text(encoding="utf-8")).seen

    return seen


def without_scripts(text):
    return re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


@pytest.mark.heavy
def test_every_id_is_unique_and_every_reference_finds_its_id(text):
    page = Page(text)
    ids = [value for _, key, value in page.attributes if key == "id"]
    assert len(ids) == len(set(ids)) > 0
    of_plots = {each for each in ids if not each.startswith(("price-", "trades"))}  # of the scripts
    text = without_scripts(text)
    used = set(re.findall(r"url\(#(.*?)\)", text)) | set(re.findall(r'href="#(.*?)"', text))
    assert used == of_plots


SAID = (
    "NCA agent on S&P 500 and NASDAQ, daily",
    "What this shows, and what it does not",
    "selected agent",
    "always flat",
    "Total return CAGR Volatility Sharpe ratio Max drawdown Turnover per year Exposure",
    "Costs paid",
    "approximate KL",
    "Training and test Mostly noise. What this means The spread is chance. Wall time 61.2 s",
    "Sharpe ratios Seed Training Test seed 1 1.80 0.35",
    "see the other seeds above",
    "selection 2011-01-03 2012-12-31 502",
    "arch.data.sp500",
    "not tradable",
    "SHA-256 of the bars",
    "0.05% of traded notional",
    "at the next bar's open",
    "on_change",
    "return_1, rsi, macd",
    "channels = 16",
    "python 3.11.9, jax 0.10.0",
    "abc1234",
    "Deflated Sharpe ratio",
    "Trials in the trial log 3",
    "Test years evaluated once",
    "cpu, 2 cores",
    "nca-trader demo --out runs/demo",
)


def test_the_page_says(seen):
    assert not [words for words in SAID if words not in seen]


def test_one_sentence_stands_at_the_top_and_the_rest_of_the_verdict_behind_it(seen, report):
    equity = report.evidence.agent.equity
    start, stop = (str(equity.index[end].date()) for end in (0, -1))
    first, rest = wording.first_sentence(report.verdict)
    assert first.startswith(f"Out of sample, {start} to {stop}, the agent ")
    assert f"total return {equity.iloc[-1] - 1:.1%} against" in first and first.endswith(".")
    assert seen.index(first) < seen.index("Total return") < seen.index(rest)


@pytest.mark.parametrize(("write", "value", "text"), [
    (wording.listed, "a", "a"), (wording.listed, "ab", "a and b"),
    (wording.listed, "abc", "a, b and c"),
    (wording.few, "abcd", "a, b, c, d"), (wording.few, "abcde", "a, b, c, d and 1 more"),
    (wording.money, 1e3, "1k"), (wording.money, 1e6, "1M"), (wording.money, -2e9, "-2B"),
    (wording.money, 1e12, "1T"), (wording.money, 999.0, "999"), (wording.whole, 1234.0, "1,234"),
    (wording.times, 1, "once"), (wording.times, 2, "2 times"), (wording.percent, -1e-9, "0.0%"),
    (wording.percent, 0.1234, "12.3%"), (wording.decimal, 1.234, "1.23"),
])  # fmt: skip
def test_names_and_numbers_are_written_in_few_words(write, value, text):
    assert write(value) == text


def test_always_flat_has_no_sharpe_ratio_and_nothing_reads_nan(seen):
    assert re.search(r"always flat 0\.0% 0\.0% 0\.0% n/a 0\.0% 0\.0x 0\.0% 0\.00 0\.00%", seen)
    assert not re.search(r"\bnan\b|\binf\b", seen, re.IGNORECASE)


def test_numbers_in_the_table_are_those_of_the_backtest(seen, report):
    equity = report.evidence.agent.equity
    growth = equity.iloc[-1] ** (252 / len(equity)) - 1
    depth = (equity / equity.cummax().clip(lower=1.0) - 1).min()
    row = re.search(r"selected agent (-?[\d.]+)% (-?[\d.]+)% ", seen)
    assert row is not None
    assert float(row[1]) == pytest.approx(100 * (equity.iloc[-1] - 1), abs=0.051)
    assert float(row[2]) == pytest.approx(100 * growth, abs=0.051)
    assert f"{100 * depth:.1f}%" in seen


def test_shares_of_positions_are_counted_from_held_weights(seen, report):
    held = report.evidence.agent.weights["NASDAQ"]
    counts = [(held < 0).mean(), (held == 0).mean(), (held > 0).mean()]
    shares = " ".join(f"{share:.1%}" for share in counts)
    assert re.search(rf"NASDAQ [\d,]+ [\d.]+% -?[\d.]+% {re.escape(shares)}", seen)


def test_plots_and_tables_can_be_read_without_eyes(text):
    page = Page(text)
    plots = page.tags.count("svg")
    roles = [v for tag, key, v in page.attributes if tag == "svg" and key == "role"]
    labels = [v for tag, key, v in page.attributes if tag == "svg" and key == "aria-label"]
    assert plots == 2 * 5 + 6 and roles == ["img"] * plots
    assert all(len(label) > 20 for label in labels)
    assert page.tags.count("th") == sum(
        tag == "th" and key == "scope" for tag, key, _ in page.attributes
    )
    assert page.tags.count("table") == page.tags.count("caption")
    assert ("html", "lang", "en") in page.attributes


@pytest.mark.heavy
def test_a_hostile_name_stays_text(tmp_path):
    hostile = made_up_report(
        symbols=(HOSTILE, "B"),
        title=HOSTILE,
        source=HOSTILE,
        configs={HOSTILE: HOSTILE},
        command=HOSTILE,
        versions={HOSTILE: HOSTILE, "commit": HOSTILE},
    )
    text = write_report(tmp_path / "r.html", hostile).read_text(encoding="utf-8")
    page = Page(text)
    assert "<script>alert(1)" not in text
    assert page.seen.count(HOSTILE) >= 7


def test_a_hostile_baseline_name_stays_text_in_plots_and_their_descriptions():
    time = pd.date_range("2020-01-01", periods=30, tz="UTC")
    drawn = equity_plot([Curve(HOSTILE, pd.Series(np.linspace(1, 2, 30), time), "baseline")])
    page = Page(drawn)
    assert "script" not in page.tags
    assert HOSTILE in page.seen
    assert any(HOSTILE in value for _, key, value in page.attributes if key == "aria-label")


@pytest.mark.heavy
def test_an_agent_that_copies_a_baseline_is_named_so(seen_on):
    copy = made_up_report(agent_follows="buy and hold")
    sentence = "This agent copies buy and hold: 100.0% of its bars hold the same weights."
    assert sentence in copy.verdict
    seen = seen_on(copy)
    assert seen.count(sentence) == 3  # verdict, what this shows, what it holds


def test_fills_at_the_close_are_called_idealised(report, seen_on):
    seen = seen_on(with_agent(report, rules=rules_of(fill="close")))
    assert "at the close that was seen: idealised" in seen
    assert "next bar's open" not in seen


def test_spans_that_overlap_are_not_called_separate(report, seen_on):
    late = ("training", "1999-01-04", "2011-06-30", 3100)
    overlapping = dataclasses.replace(report, spans=[late, *report.spans[1:]])
    seen = seen_on(overlapping)
    assert "they are not; the spans overlap" in seen
    assert "chosen without the test years" not in seen


def test_one_seed_without_training_metrics_still_makes_a_page(report, seen_on):
    seen = seen_on(dataclasses.replace(report, other_seeds=(), sections=(), training=[]))
    assert "Line: " not in seen and "Wall time" not in seen and "other seeds" not in seen


def test_training_metrics_may_be_one_number_or_one_a_seed():
    assert per_seed([{"loss": 1.0}, {"loss": 2.0}], "loss").tolist() == [[1.0], [2.0]]
    assert per_seed([{"loss": [1.0, 3.0]}], "loss").tolist() == [[1.0, 3.0]]


def luminance(colour):
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def test_colours_have_contrast_by_day_and_by_night(text):
    style = text[text.index("<style>") : text.index("</style>")]
    by_day, by_night = style.split("@media (prefers-color-scheme: dark)")[:2]
    for theme in (by_day, by_night):
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", theme.partition("* {")[0]))
        named = ("muted", "good", "bad", "agent", *(f"baseline-{k}" for k in range(4)))
        for name, least in {"ink": 7.0, "seed": 3.0, **dict.fromkeys(named, 4.5)}.items():
            for behind in ("card", "wash") if name in ("ink", "muted") else ("card",):
                pair = sorted((luminance(colours[name]), luminance(colours[behind])))
                assert (pair[1] + 0.05) / (pair[0] + 0.05) >= least, (name, behind)


def judged(report, in_sample, **changes):
    """The report as of one backtest that saw `in_sample` of its bars before, None for a rule."""
    whole = {"other_seeds": (), "sections": ()} | changes
    return dataclasses.replace(with_agent(report, in_sample=in_sample), **whole)


@pytest.fixture(scope="module")
def of_a_rule(report):
    none = dict(trials=None, selected=False, training=(), features=(), configs={}, device="")
    spans = [("backtest", "2013-01-02", "2018-12-31", 1500)]
    return judged(report, None, spans=spans, **none)


def test_the_page_of_a_rule_claims_nothing_that_only_an_agent_has(of_a_rule, seen_on):
    seen = seen_on(of_a_rule)
    claims = (
        "out of sample|in sample|agent|trained|training|seed|selected|selection|ledger|deflated"
    )
    assert not re.findall(claims, seen.replace("NCA agent on", ""), re.IGNORECASE)
    for words in (
        "Next to the baselines",
        "Result by asset",
        "strategy less buy and hold",
        "Rules and parameters tried not counted in a trial log",
        "no trial log counts how many were tried before",
        "backtest 2013-01-02 2018-12-31 1,500",
        "Probabilistic Sharpe ratio",
    ):
        assert words in seen, words


def test_the_page_of_a_rule_has_the_count_of_the_trial_log_everywhere(of_a_rule, seen_on):
    seen = seen_on(with_agent(of_a_rule, tried=1234))
    assert "one of 1,234 trials that the trial log counts on this market" in seen
    assert "one rule, after 1,234 trials on this market, by the trial log" in seen
    assert "Rules and parameters tried 1,234, by the trial log" in seen
    assert "No trial log" not in seen and "no trial log" not in seen and "not counted" not in seen


def test_an_agent_on_bars_that_it_saw_is_in_sample_at_the_top_and_everywhere(report, seen_on):
    seen = seen_on(judged(report, 300))
    sentence = "IN SAMPLE: 300 of these 600 bars are not later than the last that the agent was"
    assert seen.count(sentence) == 2  # verdict, what it does not show
    assert seen.index("IN SAMPLE IN SAMPLE: 300 of") < seen.index("Total return")
    assert "Verdict: IN SAMPLE" in seen
    assert "IN SAMPLE, next to the baselines" in seen
    for claim in ("out of sample", "separate years", "Deflated", "Test years evaluated"):
        assert claim.lower() not in seen.lower(), claim


def test_an_agent_that_nothing_selected_is_not_called_selected(report, seen_on):
    spans = [report.spans[0], report.spans[2]]
    seen = seen_on(judged(report, 0, trials=4, test_touched=2, selected=False, spans=spans))
    assert "selected" not in seen and "selection" not in seen and "chosen" not in seen
    assert "one period and one of 4 trials." in seen and "Line: seed 1." in seen
    assert (
        "Training and test are separate years, one after the other; the agent was trained" in seen
    )
    assert "the test years have now been evaluated 2 times" in seen
    assert "this page is of one seed alone" in seen


def test_a_short_span_is_of_bars_and_not_of_years(report, seen_on):
    equity = report.evidence.agent.equity
    hours = pd.date_range(equity.index[0], periods=len(equity), freq="h")
    seen = seen_on(judged(with_agent(report, equity=equity.set_axis(hours)), 0))
    assert "Metrics on the test bars" in seen and "years" not in seen.partition("Verdict")[2]


@pytest.mark.heavy
def test_the_page_needs_nothing_from_elsewhere(text):
    page = Page(text)
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    for tag, key, value in page.attributes:
        assert not key.startswith("on")
        if key in ("src", "href", "xlink:href", "action") and tag != "a":
            assert value.startswith("#")
    text = without_scripts(text)
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\((.*?)\)", text))
    assert "http:" not in text
    assert set(re.findall(r"https:[^<\"]*", text)) == {
        "https://www.tradingview.com/"
    }  # its licence
    assert len(text) < 2_000_000


@pytest.mark.heavy
def test_the_same_report_is_the_same_bytes(report, text, tmp_path):
    assert write_report(tmp_path / "again.html", report).read_text(encoding="utf-8") == text
    assert report.evidence.agent.bars.digest()[:16] in text
