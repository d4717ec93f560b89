"""The model card of an exported agent: what it is, what trained it, and what is known of it."""

from __future__ import annotations

from nca_trader.agents.policy import num_parameters
from nca_trader.config import EnvConfig
from nca_trader.runs.manifest import Run
from nca_trader.runs.trials import DataRecord
from nca_trader.runs.universe import trades
from nca_trader.types import Costs

INTENDED = (
    "For research, backtests and paper trading. It is not advice: anyone who trades by it answers "
    "for the orders, the limits and the data that it is given."
)


def card_of(run: Run, facts: dict[str, str], use: str) -> str:
    """Return the model card of a run's agent in Markdown.

    Args:
      run: the run, with the agent that acts.
      facts: of the file, by name, e.g. its format and how many decisions agree.
      use: the code that loads it.
    """
    env, policy, manifest = run.env_config, run.agent_config.policy, run.manifest
    selection, base = run.selection, policy.base
    kind = f"{policy.kind}, {num_parameters(run.each):,} parameters"
    rows = {
        "Agent": run.described or f"agent {run.selected} of 1",
        "Policy": kind + ("" if base == "none" else f", tilts of {base}"),
        "Sees": f"{', '.join(run.spec.features)}; the last {run.policy.receptive_field} bars",
        "Orders": f"{env.actions}, weights from {run.spec.bounds[0]:g} to {run.spec.bounds[1]:g}, "
        f"from bar {run.policy.first_decision + 1} on; {env.order}, filled at the {_fill(env)}",
        "Trades": trades(run),
        "Costs of training": _costs(env.costs),
        "Trained on": _span(manifest.data),
        "Seed": str(manifest.seed),
        "Selected on": "nothing" if selection is None or selection.data is None
        else _span(selection.data),
        "Gate": "has not decided" if run.deployment is None else run.deployment.sentence,
        "Made with": ", ".join(f"{name} {number}" for name, number in manifest.versions.items()),
        **facts,
    }  # fmt: skip
    if manifest.data.note:
        rows["Data"] = manifest.data.note
    table = "".join(f"| {name} | {value.replace('|', '/')} |\n" for name, value in rows.items())
    code = f"```python\n{use.strip()}\n```\n"
    return f"# {run.name}\n\n| | |\n|-|-|\n{table}\n{INTENDED}\n\n{code}"


def _span(data: DataRecord) -> str:
    known = f"{data.rows:,} bars of {', '.join(data.symbols[:8])}"
    more = f" and {len(data.symbols) - 8} more" if len(data.symbols) > 8 else ""
    return f"{known}{more}, {data.first[:10]} to {data.last[:10]} (SHA-256 {data.sha256[:12]})"


def _fill(env: EnvConfig) -> str:
    return "next open" if env.fill == "next_open" else "same close"


def _costs(costs: Costs) -> str:
    names = ("commission", "slippage", "half_spread")
    return ", ".join(f"{name} {getattr(costs, name):g}" for name in names)
