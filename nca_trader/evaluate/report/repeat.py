"""The report's last sections: what a reader needs to check the result, or to make it again."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from nca_trader.evaluate import statistics
from nca_trader.evaluate.report.html import Html, facts, section, table, tag
from nca_trader.evaluate.verdict import count, decimal, times

if TYPE_CHECKING:
    from nca_trader.evaluate.report.page import Report


def data_and_rules(report: Report) -> Html:
    """Which bars, at what costs, filled how."""
    agent, costs = report.agent, report.agent.charged
    spans = [[s.name, s.start, s.stop, f"{s.bars:,}"] for s in report.spans]
    fill = "at the next bar's open"
    if report.idealised:
        fill = "at the close that was seen: idealised, no one can trade it"
    order = {
        "on_change": "when the ordered target changes (on_change)",
        "rebalance": "every bar, back to the target (rebalance)",
    }.get(agent.order, agent.order)
    told = {
        "Source": report.data_source,
        "Note": report.data_note or "none",
        "SHA-256 of the bars": tag("code", report.data_digest[:16]),
        "Assets": ", ".join(report.symbols),
        "Commission": f"{100 * costs.commission:g}% of traded notional",
        "Slippage": f"{100 * costs.slippage:g}% of price",
        **{
            field.name.replace("_", " ").capitalize(): f"{getattr(costs, field.name):g}"
            for field in dataclasses.fields(costs)
            if getattr(costs, field.name) and field.name not in ("commission", "slippage")
        },
        "Orders fill": fill,
        "Orders are placed": order,
    }
    if report.features:
        told["Features"] = ", ".join(report.features)
    return section(
        "Data and trading rules",
        table("Spans of the data", ["Span", "First bar", "Last bar", "Bars"], spans),
        facts(told),
        _where_equity_went(report),
    )


def _where_equity_went(report: Report) -> Html:
    """A row an item of `Result.costs` that is not zero, and their sum."""
    went = report.agent.costs
    rows = [
        [item.replace("_", " "), f"{100 * amount:+.3f}%", f"{100 * a_year:+.3f}%"]
        for item, amount, a_year in went.itertuples()
        if amount or item == "total"
    ]
    headers = ["Item", "Of the capital", "A year"]
    caption = f"Where the equity of {report.label} went"
    return table(caption, headers, rows, marked=[len(rows) - 1])


def how_to_repeat(report: Report) -> Html:
    """Trials, versions, command and configuration."""
    stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.wall_times.items())
    made = {
        "Seeds": ", ".join(str(row.seed) for row in report.seeds),
        "Device": report.device,
        "Wall time": stages,
        "Versions": ", ".join(f"{k} {v}" for k, v in report.versions.items()),
    }
    configs = {"Environment (TOML)": report.env_toml, "Agent (TOML)": report.agent_toml}
    return section(
        "Trials, and how to make this page again",
        facts(
            _trials(report)
            | {name: value for name, value in made.items() if value}
            | {"Commit": tag("code", report.commit)}
        ),
        tag("p", "Command:"),
        tag("pre", tag("code", report.command)),
        *(_details(summary, text) for summary, text in configs.items() if text),
    )


def _trials(report: Report) -> dict[str, str]:
    """How much was tried, and what that leaves of the Sharpe ratio."""
    m, trials = report.evidence.moments, report.trials
    probabilistic = {"Probabilistic Sharpe ratio": decimal(statistics.probabilistic_sharpe(m), 3)}
    if trials is None:
        return {"Rules and parameters tried": "nobody counted"} | probabilistic
    told = {"Trials in the ledger": f"{trials.count:,}"}
    if report.evidence.in_sample:
        return told  # no ratio of bars that it was fitted to says how likely it is to be good
    deflated = statistics.deflated_sharpe(m, trials.count, trials.sharpe_variance)
    return (
        told
        | {f"Test {report.unit} evaluated": times(trials.test_touched)}
        | probabilistic
        | {
            "Deflated Sharpe ratio": f"{decimal(deflated, 3)} after "
            f"{count(trials.count, 'trial')}: the probability that the true Sharpe ratio is "
            "above 0"
        }
    )


def _details(summary: str, text: str) -> Html:
    return tag("details", tag("summary", summary), tag("pre", tag("code", text)))
