"""The symbols that a run trades: those that trained it, or any where assets share its policy."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nca_trader.agents.nca import num_slots
from nca_trader.data.time_frames import refuse_other_length
from nca_trader.envs.market import spec_of
from nca_trader.errors import BarError
from nca_trader.types import Bars

if TYPE_CHECKING:
    from nca_trader.runs.manifest import Run


def trained_symbols(run: Run) -> list[str]:
    """Return the symbols that trained the agent; of a run on shards, those of all shards."""
    data = run.manifest.data
    return list(dict.fromkeys([*data.symbols, *itertools.chain(*(data.universes or []))]))


def trades(run: Run) -> str:
    """Say which symbols the run's policy can trade, e.g. "any symbols"."""
    if (reason := _tie(run)) is not None:
        return f"the symbols that trained it alone, in their order ({reason})"
    if run.agent_config.policy.neighbours == "none":
        return "any symbols"
    # Weights for neighbours are there or not: the policy cannot begin or cease to see others.
    return "any one symbol" if run.spec.num_assets == 1 else "any two or more symbols"


def trades_others(run: Run) -> bool:
    """Whether the policy can trade symbols that did not train it."""
    return _tie(run) is None


def run_on(run: Run, bars: Bars) -> Run:
    """Return the run as it trades the symbols of `bars`.

    Args:
      run: the run. Of a run on shards, the symbols of each shard are its own.
      bars: any bars of the symbols, in their order.

    Returns:
      `run` itself for its own symbols. For others a run of the same parameters, whose full position
      is that of as many assets: `size` of the environment, or 1 / number of assets.

    Raises:
      BarError: the policy is tied to the symbols that trained it; or a feature of a slower time
        frame to the length of the bars.
    """
    if isinstance(bars, Bars):
        refuse_other_length(bars, run.spec.bar_seconds)
    symbols, own = bars.symbols, run.spec.symbols
    if symbols == own:
        return run
    config = run.agent_config.policy
    targets = spec_of(run.env_config, symbols, run.spec.states, run.spec.bar_seconds).targets
    # The ranking of the training bars holds for the symbols of another shard as well: "nearest"
    # trains on shards of one universe alone.
    spec = dataclasses.replace(run.spec, symbols=symbols, targets=targets)
    universes = run.manifest.data.universes or []
    fits = num_slots(spec, config) == num_slots(run.spec, config)
    if list(symbols) not in universes and (_tie(run) is not None or not fits):
        more = f" (or {len(universes) - 1} other choices)" if len(universes) > 1 else ""
        tie = _tie(run)
        what = trades(run) if tie is None else f"{', '.join(own)}{more}, in this order ({tie})"
        raise BarError(
            f"{bars.source or 'bars'}: symbols {', '.join(symbols)}, but the run {run.name} trades "
            f"{what}; select those, or train with policy.neighbours = 'none', which trades any."
        )
    other = copy.copy(run)
    for cached in ("policy", "each"):  # made for the other symbols
        other.__dict__.pop(cached, None)
    other.spec = spec
    return other


def others_sentence(run: Run, symbols: Sequence[str]) -> str:
    """Name the `symbols` that did not train the agent, in words; "" if there are none."""
    trained = trained_symbols(run)
    others = [symbol for symbol in symbols if symbol not in trained]
    if not others:
        return ""
    return (
        f"{len(others)} of {len(symbols)} symbols did not train it: {_listed(others)}; it was "
        f"trained on {_listed(trained)}."
    )


def _listed(symbols: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(symbols[:most])
    return shown + (f" and {len(symbols) - most} more" if len(symbols) > most else "")


def _tie(run: Run) -> str | None:
    """Return what ties the policy to the symbols that trained it; None if nothing does."""
    config, spec = run.agent_config.policy, run.spec
    # Neighbours by place in a ring or by a ranking are those of these symbols; a mean is of any.
    if config.neighbours in ("ring", "nearest") and num_slots(spec, config):
        return f"policy.neighbours = {config.neighbours!r}"
    if spec.memory:
        return f"reward = {spec.memory!r}, whose memory is in units of their variance"
    if spec.states:
        return "it sees the state of its market"
    return None
