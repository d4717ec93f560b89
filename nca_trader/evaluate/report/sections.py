"""The sections of the report, each a function of the `Report`, from top to bottom of the page."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from nca_trader.evaluate import metrics
from nca_trader.evaluate.report import plots as report_plots
from nca_trader.evaluate.report.html import Html, facts, items, join, section, table, tag
from nca_trader.evaluate.report.plots import Line
from nca_trader.evaluate.report.repeat import data_and_rules, how_to_repeat
from nca_trader.evaluate.statistics import Interval
from nca_trader.evaluate.verdict import (
    COPY_SHARE,
    Scored,
    copy_sentence,
    count,
    decimal,
    in_sample_sentence,
    percent,
    times,
)

if TYPE_CHECKING:
    from nca_trader.evaluate.report.page import Parity, Report

# What a learner writes, in the order shown; what a run did not write is left out.
TRAINING = {
    "reward": "mean reward a bar",
    "mean_reward": "mean reward a bar",
    "equity": "equity",
    "entropy": "entropy of the policy",
    "approx_kl": "approximate KL an update",
    "explained_variance": "explained variance of the value",
    "clip_fraction": "share of ratios clipped",
    "loss": "loss",
}


# What a reader may take for modelled and is not, where the cost is zero.
NOT_CHARGED = {
    "half_spread": "a spread beside the slippage and the bars' own quotes",
    "impact": "market impact",
    "borrow_fee": "borrowing fees",
    "interest_lend": "interest on cash",
}


def all_sections(report: Report) -> list[Html]:
    """The page's body; a section with nothing to say is not in it."""
    return [
        _header(report),
        _tiles(report),
        _scope(report),
        _results(report),
        _positions(report),
        *([_seeds(report)] if report.seeds else []),
        *([_training(report)] if report.training else []),
        *([_parity(report.parity)] if report.parity else []),
        data_and_rules(report),
        how_to_repeat(report),
        tag("footer", "Past results of a simulation; nothing on this page is advice to trade."),
    ]


def _header(report: Report) -> Html:
    evidence = report.evidence
    span = f"{evidence.standing} {evidence.start:%Y-%m-%d} to {evidence.stop:%Y-%m-%d}".lstrip()
    kind, heading = "verdict", "Verdict"
    if evidence.in_sample:
        kind, heading = "verdict warning", "Verdict: IN SAMPLE"
    return join(
        [
            tag(
                "header",
                tag("p", "nca_trader report", class_="kind"),
                tag("h1", report.title),
                tag(
                    "p",
                    f"{', '.join(report.symbols)}, {span}; made {report.created}",
                    class_="lead",
                ),
            ),
            tag("div", tag("h2", heading), tag("p", report.verdict), class_=kind),
        ]
    )


def _tiles(report: Report) -> Html:
    evidence = report.evidence
    ours, theirs = evidence.agent.metrics, evidence.baselines[evidence.best].metrics
    shown = [
        ("Total return", percent, "total_return"),
        ("Sharpe ratio", decimal, "sharpe"),
        ("Max drawdown", percent, "max_drawdown"),
    ]
    tiles = [
        tag(
            "div",
            tag("span", name),
            tag("b", write(ours[key])),
            tag("span", f"{evidence.best}: {write(theirs[key])}"),
            class_="tile",
        )
        for name, write, key in shown
    ]
    share = percent(evidence.nearest_share)
    tiles.append(
        tag(
            "div",
            tag("span", "Same weights as a baseline"),
            tag("b", share),
            tag("span", f"of bars: {evidence.nearest}"),
            class_="tile",
        )
    )
    return tag("div", *tiles, class_="tiles")


def _scope(report: Report) -> Html:
    evidence = report.evidence
    shows = [
        "Every account here pays the same costs and is filled by the same rule.",
        copy_sentence(evidence),
    ]
    if report.parity is not None and report.parity.holds:
        shows.append(
            "The paper loop, one closed bar at a time in a process of its own, made the same "
            "decisions as the backtest: no decision needed a bar that had not closed."
        )
    silent = [
        _foreseen(report),
        f"More than the intervals say: {count(evidence.moments.num_bars, 'bar')} bound what can "
        "be known of a Sharpe ratio.",
    ]
    if report.trials is not None and not evidence.in_sample:
        silent.append(
            f"Anything on fresh {report.unit} from here on: the test {report.unit} have now been "
            f"evaluated {times(report.trials.test_touched)}."
        )
    absent = [text for name, text in NOT_CHARGED.items() if not getattr(report.agent.charged, name)]
    silent.append(f"What was not charged here: {', '.join([*absent, 'taxes'])}.")
    if evidence.in_sample:
        silent.insert(0, in_sample_sentence(evidence.in_sample, evidence.moments.num_bars))
    elif report.trials is not None:
        *earlier, last = (span.name for span in report.spans)
        apart = f"{', '.join(earlier)} and {last} are separate {report.unit}, one after the other"
        apart = apart[0].upper() + apart[1:]
        if report.spans_apart:
            made = "chosen" if report.trials.selected else "trained"
            shows.insert(0, f"{apart}; the agent was {made} without the test {report.unit}.")
        else:
            silent.insert(0, f"{apart}: they are not; the spans overlap or are out of order.")
    if len(report.seeds) > 1:
        silent.append(
            f"What one more seed would do: see the spread over {len(report.seeds)} seeds below."
        )
    elif report.trials is not None:
        silent.append("What one more seed would do: this page is of one seed alone.")
    if report.data_note:
        silent.append(report.data_note)
    if report.idealised:
        silent.append(
            "Tradable fills: orders fill at the close they were decided on, which is idealised."
        )
    return section(
        "What this shows, and what it does not",
        tag(
            "div",
            tag("div", tag("h3", "It shows"), items(shows)),
            tag("div", tag("h3", "It does not show"), items(silent)),
            class_="pair",
        ),
    )


def _foreseen(report: Report) -> str:
    """Why the result might not have been found in advance."""
    found = "That it would have been found in advance: this is one market, one period and"
    if report.trials is None:
        return (
            f"{found} one rule, whose parameters its user chose. How many rules and parameters "
            "were tried before, and on which of these bars, nobody counted."
        )
    return f"{found} {count(report.trials.count, 'trial')}."


def _interval(interval: Interval, write=decimal) -> Html:
    if math.isnan(interval.low):
        return Html("")
    ends = f"{write(interval.low)} to {write(interval.high)}"
    return tag("span", ends, class_="sub")


def _metrics_row(name: str, scored: Scored) -> list[object]:
    m = scored.metrics
    return [
        name,
        percent(m["total_return"]),
        percent(m["cagr"]),
        percent(m["annual_volatility"]),
        join([decimal(m["sharpe"]), _interval(scored.sharpe_interval)]),
        percent(m["max_drawdown"]),
        f"{m['turnover']:.1f}x",
        percent(m["exposure"]),
        percent(scored.costs_paid, 2),
    ]


def _results(report: Report) -> Html:
    evidence = report.evidence
    standing, label = evidence.standing, report.label
    rows = [_metrics_row(label, evidence.agent)]
    rows += [_metrics_row(name, evidence.baselines[name]) for name in report.baselines]
    headers = ["", "Total return", "CAGR", "Volatility", "Sharpe ratio", "Max drawdown"]
    headers += ["Turnover a year", "Exposure", "Costs paid"]
    differences = [
        [
            f"{evidence.noun} less {name}",
            join([percent(d.mean_return), _interval(d.mean_return_interval, percent)]),
            join([decimal(d.sharpe), _interval(d.sharpe_interval)]),
        ]
        for name, d in ((name, evidence.differences[name]) for name in report.baselines)
    ]
    lines = [Line(label, report.agent.equity, "agent")]
    lines += [Line(name, b.equity, "baseline") for name, b in report.baselines.items()]
    lines += [Line("other seeds", seed.equity, "seed") for seed in report.other_seeds]
    where = f"the test {report.unit}" if standing == "out of sample" else "these bars"
    heading = f"{standing}, beside the baselines" if standing else "Beside the baselines"
    return section(
        heading[0].upper() + heading[1:],
        table(f"Metrics on {where}", headers, rows, marked=[0]),
        tag(
            "p",
            "Below a Sharpe ratio: its 95% interval by stationary bootstrap. No rate is subtracted "
            "from returns. Exposure: share of bars with a position. Costs: sum over bars, as a "
            "fraction of equity. An account that is always flat has no Sharpe ratio (n/a).",
            class_="note",
        ),
        tag("figure", tag("figcaption", "Equity"), report_plots.equity_plot(lines, standing)),
        tag("figure", tag("figcaption", "Drawdown"), report_plots.drawdown_plot(lines, standing)),
        table(
            "Differences, paired by bar, with 95% intervals",
            ["", "Mean return a year", "Sharpe ratio"],
            differences,
        ),
    )


def _positions(report: Report) -> Html:
    weights, noun = report.agent.weights, report.evidence.noun
    rows = []
    for number, symbol in enumerate(report.symbols):
        held = metrics.positions(weights.iloc[:, number])
        shares = [float(np.mean(held == side)) for side in (-1, 0, 1)]
        bar = tag(
            "div",
            *(
                tag("i", class_=name, style=f"width:{share:.2%}")
                for name, share in zip(("short", "flat", "long"), shares, strict=True)
            ),
            class_="bar",
            aria_hidden="true",
        )
        rows.append([symbol, *(percent(share) for share in shares), bar])
    headers = ["Asset", "Short", "Flat", "Long", "Share of bars"]
    return section(
        f"What the {noun} holds",
        tag("p", copy_sentence(report.evidence)),
        table("Share of bars per position, by the weight held at the close", headers, rows),
        tag(
            "p",
            *(join([tag("i", class_=name), name]) for name in ("short", "flat", "long")),
            class_="note key",
            aria_hidden="true",
        ),
        tag(
            "p",
            f"{'An' if noun == 'agent' else 'A'} {noun} is said to copy a baseline where both have "
            f"the same target weights on "
            f"{COPY_SHARE:.0%} of the bars or more.",
            class_="note",
        ),
    )


def _seeds(report: Report) -> Html:
    rows, marked = [], []
    for number, row in enumerate(report.seeds):
        chosen = row.seed == report.seed
        marked += [number] if chosen else []
        name = f"seed {row.seed}" + (" (selected)" if chosen else "")
        rows.append([name, decimal(row.selection), decimal(row.out_of_sample)])
    mean, deviation, least, most = report.seed_spread()
    spread = (
        f"Out of sample over the seeds: mean {decimal(mean)}, standard deviation "
        f"{decimal(deviation)}, least {decimal(least)}, greatest {decimal(most)}. The seed was "
        "selected by the selection years alone; the spread is what chance in training does."
    )
    headers = ["Seed", "Sharpe ratio, selection years", "Sharpe ratio, test years"]
    return section(
        "Seeds", table("Every seed that was trained", headers, rows, marked), tag("p", spread)
    )


def _training(report: Report) -> Html:
    rows = report.training
    selected = report.trials is not None and report.trials.selected
    who = "the selected seed" if selected else f"seed {report.seed}"
    keys = [key for key in TRAINING if all(key in row for row in rows)]
    plots = [
        tag("figure", report_plots.training_plot(rows, key, TRAINING[key], report.seed, who))
        for key in keys
    ]
    told = f"{count(len(rows), 'update')}. Line: {who}."
    if any(report_plots.per_seed(rows, key).shape[1] > 1 for key in keys):
        told += " Band: from the least to the greatest of the seeds."
    return section(
        "Training", tag("p", told, class_="note"), tag("div", *plots, class_="multiples")
    )


def _parity(parity: Parity) -> Html:
    found = (
        tag("span", "The two agree.", class_="good")
        if parity.holds
        else tag(
            "span", "The two do not agree: trust neither before it is known why.", class_="bad"
        )
    )
    logits = parity.max_logit_difference
    return section(
        "Backtest against paper replay",
        tag("p", found),
        facts(
            {
                "Decisions equal": f"{parity.equal:,} of {parity.decisions:,}",
                "Largest equity difference": f"{parity.max_equity_difference:.2e} (relative)",
                "Largest logit difference": "not compared" if logits is None else f"{logits:.2e}",
            }
        ),
    )
