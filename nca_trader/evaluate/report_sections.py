"""The sections of the report, each a function of the `Report`, from top to bottom of the page."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from nca_trader.evaluate import metrics, report_plots, statistics
from nca_trader.evaluate.report_html import Html, facts, items, join, section, table, tag
from nca_trader.evaluate.report_plots import Line
from nca_trader.evaluate.statistics import Interval
from nca_trader.evaluate.verdict import COPY_SHARE, Scored, copy_sentence, decimal, percent

if TYPE_CHECKING:
    from nca_trader.evaluate.report import Report

AGENT = "selected agent"
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


def all_sections(report: Report) -> list[Html]:
    """The page's body."""
    return [
        _header(report),
        _tiles(report),
        _scope(report),
        _results(report),
        _positions(report),
        _seeds(report),
        _training(report),
        _parity(report),
        _rules(report),
        _reproduce(report),
        tag("footer", "Past results of a simulation; nothing on this page is advice to trade."),
    ]


def _header(report: Report) -> Html:
    evidence = report.evidence
    span = f"{evidence.start:%Y-%m-%d} to {evidence.stop:%Y-%m-%d}"
    return join(
        [
            tag(
                "header",
                tag("p", "nca_trader report", class_="kind"),
                tag("h1", report.title),
                tag(
                    "p",
                    f"{', '.join(report.symbols)}, out of sample {span}; made {report.created}",
                    class_="lead",
                ),
            ),
            tag("div", tag("h2", "Verdict"), tag("p", report.verdict), class_="verdict"),
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
    evidence, seeds = report.evidence, report.seeds
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
        "That it would have been found in advance: this is one market, one period and "
        f"{_count(report.trials.count, 'trial')}.",
        f"More than the intervals say: {_count(evidence.moments.num_bars, 'bar')} bound what can "
        "be known of a Sharpe ratio.",
        "Anything on fresh years from here on: the test years have now been evaluated "
        f"{_times(report.trials.test_touched)}.",
        "Market impact, taxes, borrowing fees, dividends and interest: they are not modelled.",
    ]
    apart = "Training, selection and test are separate years, one after the other"
    if report.spans_apart:
        shows.insert(0, f"{apart}; the agent was chosen without the test years.")
    else:
        silent.insert(0, f"{apart}: they are not; the spans overlap or are out of order.")
    if len(seeds) > 1:
        silent.append(f"What one more seed would do: see the spread over {len(seeds)} seeds below.")
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


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


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
    rows = [_metrics_row(AGENT, evidence.agent)]
    rows += [_metrics_row(name, evidence.baselines[name]) for name in report.baselines]
    headers = ["", "Total return", "CAGR", "Volatility", "Sharpe ratio", "Max drawdown"]
    headers += ["Turnover a year", "Exposure", "Costs paid"]
    differences = [
        [
            f"agent less {name}",
            join([percent(d.mean_return), _interval(d.mean_return_interval, percent)]),
            join([decimal(d.sharpe), _interval(d.sharpe_interval)]),
        ]
        for name, d in ((name, evidence.differences[name]) for name in report.baselines)
    ]
    lines = [Line(AGENT, report.agent.equity, "agent")]
    lines += [Line(name, b.equity, "baseline") for name, b in report.baselines.items()]
    lines += [Line("other seeds", seed.equity, "seed") for seed in report.other_seeds]
    return section(
        "Out of sample, beside the baselines",
        table("Metrics on the test years", headers, rows, marked=[0]),
        tag(
            "p",
            "Below a Sharpe ratio: its 95% interval by stationary bootstrap. No rate is subtracted "
            "from returns. Exposure: share of bars with a position. Costs: sum over bars, as a "
            "fraction of equity. An account that is always flat has no Sharpe ratio (n/a).",
            class_="note",
        ),
        tag("figure", tag("figcaption", "Equity"), report_plots.equity_plot(lines)),
        tag("figure", tag("figcaption", "Drawdown"), report_plots.drawdown_plot(lines)),
        table(
            "Differences, paired by bar, with 95% intervals",
            ["", "Mean return a year", "Sharpe ratio"],
            differences,
        ),
    )


def _positions(report: Report) -> Html:
    weights = report.agent.weights
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
        "What the agent holds",
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
            f"An agent is said to copy a baseline where both have the same target weights on "
            f"{COPY_SHARE:.0%} of the bars or more.",
            class_="note",
        ),
    )


def _seeds(report: Report) -> Html:
    rows, marked = [], []
    for number, row in enumerate(report.seeds):
        chosen = row.seed == report.selected_seed
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
    if not rows:
        return section("Training", tag("p", "No training metrics were given."))
    order = [row.seed for row in report.seeds]
    column = order.index(report.selected_seed)
    keys = [key for key in TRAINING if all(key in row for row in rows)]
    plots = [
        tag("figure", report_plots.training_plot(rows, key, TRAINING[key], column)) for key in keys
    ]
    told = f"{_count(len(rows), 'update')}. Line: the selected seed."
    if len(order) > 1:
        told += " Band: from the least to the greatest of the seeds."
    return section(
        "Training", tag("p", told, class_="note"), tag("div", *plots, class_="multiples")
    )


def _parity(report: Report) -> Html:
    heading = "Backtest against paper replay"
    parity = report.parity
    if parity is None:
        return section(heading, tag("p", "No paper replay was made, so nothing is claimed."))
    found = (
        tag("span", "The two agree.", class_="good")
        if parity.holds
        else tag(
            "span", "The two do not agree: trust neither before it is known why.", class_="bad"
        )
    )
    logits = parity.max_logit_difference
    return section(
        heading,
        tag("p", found),
        facts(
            {
                "Decisions equal": f"{parity.equal:,} of {parity.decisions:,}",
                "Largest equity difference": f"{parity.max_equity_difference:.2e} (relative)",
                "Largest logit difference": "not compared" if logits is None else f"{logits:.2e}",
            }
        ),
    )


def _rules(report: Report) -> Html:
    agent, costs = report.agent, report.agent.costs
    spans = [[s.name, s.start, s.stop, f"{s.bars:,}"] for s in report.spans]
    fill = "at the next bar's open"
    if report.idealised:
        fill = "at the close that was seen: idealised, no one can trade it"
    order = {
        "on_change": "when the ordered target changes (on_change)",
        "rebalance": "every bar, back to the target (rebalance)",
    }.get(agent.order, agent.order)
    return section(
        "Data and trading rules",
        table("Spans of the data", ["Span", "First bar", "Last bar", "Bars"], spans),
        facts(
            {
                "Source": report.data_source,
                "Note": report.data_note or "none",
                "SHA-256 of the bars": tag("code", report.data_digest[:16]),
                "Assets": ", ".join(report.symbols),
                "Commission": f"{100 * costs.commission:g}% of traded notional",
                "Slippage": f"{100 * costs.slippage:g}% of price",
                "Orders fill": fill,
                "Orders are placed": order,
                "Features": ", ".join(report.features),
            }
        ),
    )


def _reproduce(report: Report) -> Html:
    m, trials = report.evidence.moments, report.trials
    times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.wall_times.items())
    deflated = statistics.deflated_sharpe(m, trials.count, trials.sharpe_variance)
    return section(
        "Trials, and how to make this page again",
        facts(
            {
                "Trials in the ledger": f"{trials.count:,}",
                "Test years evaluated": _times(trials.test_touched),
                "Probabilistic Sharpe ratio": decimal(statistics.probabilistic_sharpe(m), 3),
                "Deflated Sharpe ratio": f"{decimal(deflated, 3)} after "
                f"{_count(trials.count, 'trial')}: the probability that the true Sharpe ratio is "
                "above 0",
                "Seeds": ", ".join(str(row.seed) for row in report.seeds),
                "Device": report.device,
                "Wall time": times or "not recorded",
                "Versions": ", ".join(f"{k} {v}" for k, v in report.versions.items()),
                "Commit": tag("code", report.commit),
            }
        ),
        tag("p", "Command:"),
        tag("pre", tag("code", report.command)),
        _details("Environment (TOML)", report.env_toml),
        _details("Agent (TOML)", report.agent_toml),
    )


def _details(summary: str, text: str) -> Html:
    return tag("details", tag("summary", summary), tag("pre", tag("code", text)))
