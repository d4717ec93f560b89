"""Measures an exported agent against the agent it was made from: decisions, equity, latency."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd

from nca_trader.agents.policy import Params, Policy, decide, decide_next, num_parameters
from nca_trader.config.extensions import is_source
from nca_trader.data.bars import read_bars, sample_bars
from nca_trader.envs.account.state import open_account
from nca_trader.envs.market import features_of, observed_states
from nca_trader.envs.rewards import begin_account
from nca_trader.errors import BarError, ConfigError, argument
from nca_trader.evaluate import simulate
from nca_trader.evaluate.backtest import count_look
from nca_trader.evaluate.wording import few
from nca_trader.markets import Task, seed_of, task_of
from nca_trader.numerics import float64_on_cpu
from nca_trader.progress import track
from nca_trader.runs.exported import Coding, compact
from nca_trader.runs.manifest import Run, has_trained, seen_rows
from nca_trader.runs.portable import Portable, portable
from nca_trader.runs.trials import DataRecord
from nca_trader.types import COLUMN, EXTRAS, Bars, fields_of

COSTS = ("commission", "slippage", "half_spread")
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
        f"from bar {run.policy.first_decision + 1} on; {env.order}, filled at the "
        f"{'next open' if env.fill == 'next_open' else 'same close'}",
        "Trades": run.tradable,
        "Costs of training": ", ".join(f"{name} {getattr(env.costs, name):g}" for name in COSTS),
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
    known = f"{data.rows:,} bars of {few(data.symbols)}"
    return f"{known}, {data.first[:10]} to {data.last[:10]} (SHA-256 {data.sha256[:12]})"


CALLS = 300  # whose median is a latency


class Measured(NamedTuple):
    """An exported agent, and how it compares with the run's own weights.

    Attributes:
      first: date of the first bar. last: date of the last bar.
      weights: what `write_exported` or `write_portable` writes.
      found: decisions that agree, and the equity of both.
      evaluations: test-set evaluations so far; None if the run has seen all bars.
      rows: weights, bytes, agreement, equity and latencies of the run's weights and of these.
    """

    first: datetime.date
    last: datetime.date
    weights: Any
    found: simulate.Agreement
    evaluations: int | None
    rows: list[dict[str, Any]]


def measure(
    run: Run, coding: Coding, source: Bars | Task | None = None, codebook_seed: int = 0
) -> Measured:
    """Encode the agent of a run in few bits, and measure what that changes.

    Args:
      run: the run, opened with the seed of the agent.
      coding: bits, codebook and activations.
      source: bars to measure on; by default those that trained the run. An evaluation on bars
        that the run has not seen is counted in its trial log.
      codebook_seed: of a codebook's training.

    Raises:
      ConfigError: the bars that trained the run are needed and not there.
      BarError: bars of symbols that the run does not trade, or too few for a decision.
    """
    # By default seen bars are used, which show agreement as well as others and spend no test set.
    source = training_bars(run) if source is None else source
    bars = source.bars if isinstance(source, Task) else source
    params = run.params()
    weights = compact(run, params, coding, *_calibration(run, source, coding), codebook_seed)
    other = weights.params(run.each, run.num_acting)
    found = simulate.agreement(source, run, params, other)
    if coding.codebook != "none":
        name = f"{coding.codebook} codebook, {2**coding.bits} entries of {coding.group}"
    else:
        name = f"{coding.bits} bits" + (", activations too" if coding.activations else "")
    # As they are kept in a checkpoint, to compare with the size of the file.
    full = sum(leaf.nbytes for part in params.values() for leaf in part.values())
    shares = (("float32", full, 1.0), (name, weights.nbytes, found.share))
    rows = [
        {"weights": title, "bytes": size, "agreement": share, "equity": equity} | spent
        for (title, size, share), equity, spent in zip(
            shares, found.equity, latencies(run.policy, params, other), strict=True
        )
    ]
    return _measured(run, bars, weights, found, rows)


def _measured(
    run: Run, bars: Bars, made: Any, found: simulate.Agreement, rows: list[dict[str, Any]]
) -> Measured:
    """Return what was measured on these bars, and count the look."""
    seen = seen_rows(bars, run)
    # A measurement on bars that the run has not seen is an evaluation like any other.
    evaluations = count_look(run, bars[seen:]) if seen < len(bars) else None
    return Measured(bars.index[0].date(), bars.index[-1].date(), made, found, evaluations, rows)


def measure_portable(run: Run, source: Bars | Task | None = None) -> Measured:
    """Compile the agent of a run for other processes, and measure whether it decides alike.

    Args:
      run: the run, opened with the seed of the agent.
      source: bars to measure on, as in `measure`.

    Raises:
      ConfigError: the agent cannot be compiled so, see `portable`; the bars that trained the run
        are needed and not there.
      BarError: bars of symbols that the run does not trade, or too few for a decision.
    """
    source = training_bars(run) if source is None else source
    bars = source.bars if isinstance(source, Task) else source
    run = run.on(bars)
    made = portable(run, [name for name in bars.fields if name.startswith((*EXTRAS, COLUMN))])
    # Filled at the next open, an account is held at a close as it was before the decision there.
    rules = dataclasses.replace(run.account, fill="next_open")
    with_weights = (run.params(),), rules, 0, len(bars)
    trace, *_ = simulate.simulate_agent(source, run, *with_weights)
    ready = np.arange(len(bars)) >= run.policy.first_decision
    ordered = pd.DataFrame(trace.target).ffill().shift().fillna(0.0).to_numpy()
    found = _targets(made, bars, np.asarray(trace.weight), ordered)
    low, high = run.spec.bounds
    off = np.abs(found - np.asarray(trace.target))[ready]
    share = float((off <= simulate.NEAR * (high - low)).mean())
    equity = float(np.exp(np.asarray(trace.log_equity)[-1]))
    same = simulate.Agreement(share, off.size, (equity, equity))
    return _measured(run, bars, made, same, [{"furthest": float(off.max())}])


def _targets(made: Portable, bars: Bars, weight: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Return the targets `[N, A]` of a compiled agent that is shown these accounts, `[N, A]`."""
    fields = fields_of(bars.as_bar())
    given = tuple(fields[name] for name in made.fields)
    with float64_on_cpu():

        def see(memory: Any, bar: Any) -> Any:
            memory, *seen = made.observe.call(memory, *bar)
            return memory, tuple(seen)

        _, seen = jax.jit(functools.partial(jax.lax.scan, see))(made.begin["observe"], given)
    row, size, base = (np.asarray(x) for x in seen)

    def act(memory: Any, bar: Any) -> Any:
        memory, _, target = made.decide.call(memory, *bar)
        return memory, target

    account = (x.astype(np.float32) for x in (weight, ordered))
    xs = (row, bars.present, *account, size, base)
    return np.asarray(jax.jit(functools.partial(jax.lax.scan, act))(made.begin["decide"], xs)[1])


def training_bars(run: Run) -> Bars | Task:
    """Return the bars that trained a run, or the draw of its synthetic market.

    Raises:
      ConfigError: its file does not have them any longer.
    """
    record, config = run.manifest.data, run.env_config
    if config.market:
        return task_of(config, seed_of(record.source))
    try:
        # The run may be a stranger's: what it says of its bars runs no code and calls no host.
        if is_source(record.source) or "//" in record.source:
            raise BarError(f"{record.source} is not a file.")
        name = record.source.removeprefix("sample bars ")
        sample = name != record.source
        bars = sample_bars(name) if sample else read_bars(record.source)
        # The run may have been trained on some of its assets.
        if sample and list(bars.symbols) != record.symbols:
            bars = bars.select(*record.symbols)
        if has_trained(run, bars):
            # The file may have grown since, so only its first rows are the same bars.
            return bars[: record.rows]
    except BarError:
        pass  # the file has gone or changed: the remedy below holds for both
    raise ConfigError(
        f"{run.path}: the bars that trained it are not in {record.source} as it is now; give "
        f"them by {argument('data')}, with the options that read them."
    )


def _calibration(run: Run, source: Bars | Task, coding: Coding) -> tuple[Any, Any]:
    """Return features and presence of the training span, on which activations are measured."""
    if not coding.activations:
        return None, None
    bars = source.bars if isinstance(source, Task) else source
    if not isinstance(source, Task) and not has_trained(run, bars):
        raise ConfigError(
            f"{argument('activations')}: the first bars of {argument('data')} are not those that "
            f"trained {run.path}, and steps are measured on no others; give that file."
        )
    rows = len(bars) if isinstance(source, Task) else run.manifest.data.rows
    # Cut before anything is computed: later bars must not reach the steps.
    states = observed_states(source, run.env_config, run.spec.states)[:rows]
    bars = bars[:rows]
    return features_of(bars, run.env_config, states, run.spec.bar_seconds), bars.present


def latencies(policy: Policy, *several: Params) -> list[dict[str, float]]:
    """Return median microseconds per decision with each of `several` parameters.

    `stream_us` is that of a new bar of a stream, `window_us` that of a whole window.
    """
    spec, rows = policy.spec, policy.receptive_field
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, spec.num_assets, spec.num_features)).astype(np.float32)
    present = np.ones(x.shape[:2], bool)
    account = begin_account(spec, open_account(np.zeros(spec.num_assets, np.float32)))
    state = policy.begin()

    @jax.jit
    def stream(params: Any, state: Any, x: Any, present: Any) -> Any:
        return decide_next(policy, params, state, x, present, account)

    @jax.jit
    def window(params: Any, x: Any, present: Any) -> Any:
        # All bars but the last are a halo, whose cells are not needed.
        cells = policy.encode(params, x[None], present[None], halo=len(x) - 1)[0, 0]
        return decide(policy, params, cells, account).logits

    # `p=p`: a closure over `p` would use the last parameters in every call. They are arguments
    # because XLA folds the constants of a program.
    streams = [lambda p=p: stream(p, state, x[0], present[0]) for p in several]
    windows = [lambda p=p: window(p, x, present) for p in several]
    medians = zip(_medians_us(streams, "stream"), _medians_us(windows, "window"), strict=True)
    return [{"stream_us": one, "window_us": two} for one, two in medians]


def _medians_us(calls: Sequence[Callable[[], Any]], label: str) -> list[float]:
    # In turns, so that a slow spell of the machine slows all of them.
    spent: list[list[float]] = [[] for _ in calls]
    for turn in track(range(CALLS + 1), f"time {label}", "calls", compiles=True, ticks=False):
        for call, times in zip(calls, spent, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(call())
            if turn:  # the first compiles
                times.append(time.perf_counter() - began)
    return [1e6 * sorted(times)[CALLS // 2] for times in spent]
