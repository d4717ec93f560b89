"""The sections that the demo adds to the page of its agent, which it prints too."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import numpy as np
import pandas as pd

from nca_trader.agents import load_agent
from nca_trader.agents.policy import num_parameters
from nca_trader.cli.demo_bars import DemoJob
from nca_trader.cli.options import write_command
from nca_trader.config.ranges import switch
from nca_trader.evaluate.evidence.inference import sharpe_difference_interval
from nca_trader.evaluate.report.contents import Section
from nca_trader.evaluate.wording import decimal, percent
from nca_trader.optimum.prove import prove
from nca_trader.strategies.baselines import MATCHED

YEAR = 252  # bars
# A market whose optimum is known, and what trains the demo's network on it in a few seconds.
KNOWN = "ou_mid"
QUICK = {
    "advantages": "exact", "steps": 100_000, "num_segments": 32, "segment_length": 64,
    "envs_per_segment": 1, "num_epochs": 2, "num_minibatches": 2,
}  # fmt: skip


def learnt_section(run: Any, seed: int) -> Section:
    """Train the network of a run on a market whose optimum is known."""
    quick = load_agent("nano")
    agent = dataclasses.replace(
        quick,
        policy=switch(run.agent_config.policy, base="none"),
        learner=switch(quick.learner, **QUICK),
        optimizer=dataclasses.replace(quick.optimizer, learning_rate=1e-2),
    )
    found = prove([KNOWN], agent, seeds=[seed], controls=False)[0].row()
    return Section(
        "Can it learn?",
        f"On {KNOWN}, a drawn market whose best policy is known exactly, the same network reached "
        f"{percent(found['fraction'])} of the optimum in {max(found['seconds'], 1.0):.0f} s of "
        f"training, on a draw that it had not seen; untrained {percent(found['untrained'])}. Real "
        "bars cannot tell: nobody knows what could have been earned on them.",
    )


def tilt_section(agent: Any, rule: Any) -> Section:
    """Return what the agent changed of its base, and what that earned."""
    ours, theirs = (np.asarray(each.weights) for each in (agent, rule))
    gross = np.abs(theirs).sum(axis=1).mean()
    moved = np.abs(ours - theirs).sum(axis=1).mean() / gross if gross else 0.0
    a, b = (each.excess_returns for each in (agent, rule))
    ends = sharpe_difference_interval(a, b, agent.bars_per_year)
    years = len(agent.equity) / agent.bars_per_year
    gain = np.log(agent.equity.iloc[-1] / rule.equity.iloc[-1]) / years
    differ = agent.metrics["sharpe"] - rule.metrics["sharpe"]
    facts = {
        "Positions": f"{moved:.1%} of its base's gross position was moved, on average.",
        "Turnover": f"{agent.metrics['turnover']:.1f} times equity a year; "
        f"its base {rule.metrics['turnover']:.1f} times.",
        "Return over its base": f"{gain:+.2%} a year, in logs and net of costs.",
        "Sharpe ratio less its base's": f"{differ:+.3f}, 95% interval {ends.low:+.2f} to "
        f"{ends.high:+.2f}.",
    }
    about = f"The agent tilts its base, {rule.name}."
    return Section("What the tilt changed, and what it earned", about, facts=[*facts.items()])


def seeds_section(run: Any, *spans: list[Any]) -> Section:
    """Return the Sharpe ratios of every seed, and last their mean agent, on each of the spans."""
    names = [*(f"seed {i}" for i in range(run.agent_config.num_seeds)), "mean of all"]
    headers = ["Training", "Selection", "Test"]
    of_spans = [[result.metrics["sharpe"] for result in span] for span in spans]
    table = pd.DataFrame(dict(zip(headers, of_spans, strict=True)), names)
    trained, _, tested = table.iloc[-1]
    each = table["Test"][:-1]  # seeds that never traded have no ratio, and are left out
    text = (
        f"Generalisation gap: the Sharpe ratio of the mean agent was {decimal(trained)} in "
        f"training and {decimal(tested)} on the test span. "
    )
    if trained > 2.0 * max(tested, 0.0):
        text += "Most of what it learnt in training is noise of those years: it is overfit. "
    text += (
        f"Out of sample over the seeds: mean {decimal(each.mean())}, standard deviation "
        f"{decimal(each.std())}, which is what chance in training does. No seed was selected: the "
        "mean of their orders is traded."
    )
    if run.selection.scored > 1:
        text += (
            " The agents are of the update that scored highest on the selection span, of "
            f"{run.selection.scored} scored: that score is too good."
        )
    return Section(
        "Training, selection and test",
        text,
        caption="Sharpe ratio of every seed that was trained",
        headers=["Seed", *headers],
        rows=[
            (name, [*map(decimal, row)]) for name, row in zip(names, table.to_numpy(), strict=True)
        ],
    )


def checks_section(run: Any, agent: Any, baselines: dict[str, Any]) -> Section:
    """Return what else a reader should know of the mean agent."""
    ours, held = (decimal(each.metrics["sharpe"]) for each in (agent, baselines[MATCHED]))
    rows, parameters = run.manifest.data.rows, num_parameters(run.each)
    # Seeds see the same bars: they count once.
    warning = "" if rows >= parameters else " WARNING: below 1, it can memorise the noise."
    facts = {
        "Evaluations on the test span": f"{agent.evaluations}, by the trial log.",
        "The same exposure without its timing": f"Sharpe ratio {held}, and {ours} with it.",
        "Independent bars per parameter": f"{rows / parameters:.2g} ({rows:,} bars, "
        f"{parameters:,} parameters).{warning}",
    }
    return Section("Is it more than exposure and luck?", facts=[*facts.items()])


def advice_section(args: argparse.Namespace, run: Any, job: DemoJob, data: Any) -> Section:
    """Return what a user should try next where the gate says no; `data` is the demo's bar file."""
    # Folds over all bars before the test span, on the demo's own file: it runs as it is printed.
    spans = {"train": job.bars.row(job.select_until, "start") // 2, "test": YEAR}
    files = {"data": str(data), "until": job.select_until, "deploy": str(run.path)}
    walk = write_command("walkforward", agent=args.agent, env=args.env, **files, **spans)
    factor = " to ".join(f"{x:g}" for x in run.env_config.random_costs or (1.0, 1.0))
    more = {
        "More years": f"Judge the recipe on more years than one span has: {walk}",
        "Other costs": f"Train at other costs than {factor} times the true ones (random_costs of "
        "the environment), and select on the same span. The more often a test span is used, the "
        "luckier is its best.",
        "Trade what is deployed": "a rule that no agent was shown to beat is a result.",
    }
    if args.panel is None:
        panel = "Give one policy the bars of more assets: nca-trader demo --panel, and "
        more = {"More assets": panel + "docs/guides/panels.md."} | more
    return Section("What to try next", facts=[*more.items()])
