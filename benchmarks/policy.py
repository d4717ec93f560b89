"""Speed of the policy: lattice, windows, remat, latency of the stream, the NCA of a peer."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nca_trader import agents
from nca_trader.agents.policy import decide_next, make_policy
from nca_trader.envs import load_env
from nca_trader.envs.account.state import open_account
from nca_trader.envs.market import spec_of
from nca_trader.envs.rewards import begin_account

from .timing import SECONDS, Timing, compared, measure, measured_by

SEGMENTS, LENGTH = 16, 128  # of the lattice; a step is a decision of a segment
LONG = 4  # times longer segments of a second lattice: its warm-up bars weigh less
BARS = 2000  # streamed
REMAT = ("step", "every:2", "dots")


def rows(
    args: argparse.Namespace,
    segments: int = SEGMENTS,
    length: int = LENGTH,
    bars: int = BARS,
    seconds: float = SECONDS,
) -> Iterator[dict[str, Any]]:
    """Yields rows of a policy for two assets; with peers, also of an NCA of CAX."""
    agent = agents.load_agent(args.agent)
    spec = spec_of(load_env("index_daily"), ("SP500", "NASDAQ"))
    case = _Case(agent, spec, segments, length)
    longer = _Case(agent, spec, max(1, segments // LONG), length * LONG)
    windows = [
        _Timed(f"{args.agent} windows, forward", case, case.windows),
        _Timed(f"{args.agent} windows cut to the last cell, forward", case, case.cut_windows),
    ]
    lattices = [
        _Timed(f"{args.agent} lattice of {each.length} bars, forward", each, each.forward)
        for each in (case, longer)
    ]
    first, *others = (each.timing for each in windows + lattices)
    first.rounds(lambda: [each.round() for each in others])
    alone = [each.row() for each in windows]
    yield from alone
    for lattice in lattices:
        for peer, row in zip(("windows", "cut windows"), alone, strict=True):
            yield compared(lattice.row(), row | {"peer": peer})
    yield case.row(f"{args.agent} lattice, forward and backward", case.backward)
    if agent.policy.kind == "nca":
        for remat in REMAT:
            changed = dataclasses.replace(agent.policy, remat=remat)
            again = _Case(dataclasses.replace(agent, policy=changed), spec, segments, length)
            yield again.row(f"{args.agent} remat {remat}, forward and backward", again.backward)
    yield _latency(args.agent, case, bars)
    if args.peers and agent.policy.kind == "nca":
        yield from _beside_cax(args, agent, spec, segments, length, seconds)


class _Case:
    """A policy with parameters and bars, and the calls that are timed.

    The lattice is encoded as a learner does it, without the cells of the bars before a segment.
    With `whole`, those cells are computed too.
    """

    def __init__(self, agent: Any, spec: Any, segments: int, length: int, whole: bool = False):
        self.policy = make_policy(agent, spec)
        self.params = self.policy.init(jax.random.key(0))
        self.segments, self.length = segments, length
        self._halo = 0 if whole else self.policy.receptive_field - 1
        shape = (segments, self.policy.receptive_field - 1 + length, spec.num_assets)
        self.x = jax.random.normal(jax.random.key(1), (*shape, spec.num_features))
        self.present = jnp.ones(shape, bool)

    def row(self, name: str, call: Callable[[Any], Any]) -> dict[str, Any]:
        """Times `call` by itself."""
        timed = _Timed(name, self, call)
        timed.timing.rounds()
        return timed.row()

    def loss(self, params: Any) -> Any:
        cells = self.policy.encode(params, self.x, self.present, halo=self._halo)
        return (cells**2).mean()

    def forward(self, params: Any) -> Any:
        return _fed_back(params, self.loss(params))

    def backward(self, params: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, jax.grad(self.loss)(params))

    def windows(self, params: Any) -> Any:
        """Encodes one window per decision, as a network of observations does."""
        return _fed_back(params, self.loss_of_windows(params, 0))

    def cut_windows(self, params: Any) -> Any:
        """Leaves out the cell updates that the last cell does not see."""
        return _fed_back(params, self.loss_of_windows(params, self.policy.receptive_field - 1))

    def loss_of_windows(self, params: Any, halo: int) -> Any:
        """Computes `loss` from windows, one segment at a time."""
        field = self.policy.receptive_field
        rows = jnp.arange(self.length)[:, None] + jnp.arange(field)[None]

        def segment(bars: Any) -> Any:
            x, present = (array[rows] for array in bars)
            return (self.policy.encode(params, x, present, halo=halo)[:, -1] ** 2).mean()

        return jax.lax.map(segment, (self.x, self.present)).mean()


class _Timed:
    """A compiled call of a case with its `Timing`."""

    def __init__(self, name: str, case: _Case, call: Callable[[Any], Any]):
        self._name, self._case, self._call = name, case, jax.jit(call)
        self.timing = Timing(self._call, case.params)

    def row(self) -> dict[str, Any]:
        """Returns the row; `temp_mb` is the memory of temporaries.

        On the CPU, XLA merges what remat recomputes with the first result; see
        docs/concepts/policy.md.
        """
        case = self._case
        needed = self._call.lower(case.params).compile().memory_analysis()
        megabytes = needed.temp_size_in_bytes / 1e6 if needed else None
        return self.timing.row(self._name, case.segments * case.length, temp_mb=megabytes)


def _fed_back(params: Any, result: Any) -> Any:
    """Returns parameters that depend on the result, so that no call can be skipped."""
    return jax.tree.map(lambda p: p + 0.0 * result, params)


def _latency(name: str, case: _Case, bars: int) -> dict[str, Any]:
    """Measures a live loop: one bar per call through the stream and the policy head."""
    policy, params = case.policy, case.params
    account = begin_account(policy.spec, open_account(np.zeros(policy.spec.num_assets, np.float32)))

    @jax.jit
    def decide(state: Any, x: Any, present: Any) -> Any:
        return decide_next(policy, params, state, x, present, account)[:2]

    x, present = np.asarray(case.x[0, 0]), np.asarray(case.present[0, 0])
    state, spent = policy.begin(), []

    def many(state: Any) -> Any:
        for _ in range(bars):
            began = time.perf_counter()
            state, logits = decide(state, x, present)
            np.asarray(logits)
            spent.append(time.perf_counter() - began)
        return state

    row = measure(f"{name} stream and policy head, one bar per call", many, state, bars, envs=1)
    p50, p99 = np.percentile(spent[bars:], [50, 99]) * 1e6
    return row | {"p50_us": float(p50), "p99_us": float(p99)}


def _beside_cax(
    args: argparse.Namespace, agent: Any, spec: Any, segments: int, length: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Compares one asset with CAX at equal cells, channels and hidden units; a step is a cell.

    CAX's perception has no dilation: with as many updates its NCA sees fewer bars, and to see as
    many it needs more updates. Both are measured, as in CAX's one-dimensional example and fused;
    see `benchmarks/peers/cax_nca.py`.
    """
    one = dataclasses.replace(spec, symbols=spec.symbols[:1])
    case = _Case(agent, one, segments, length, whole=True)
    cells = case.present.size
    config = agent.policy
    options = {"segments": segments, "bars": case.present.shape[1], "channels": config.channels}
    options |= {"hidden": config.hidden, "seconds": seconds}
    pairs = (("forward", case.forward), ("forward and backward", case.backward))
    field = case.policy.receptive_field
    sees = ((config.steps, "as many updates"), (field // 2, f"sees {field} cells"))
    forms = enumerate(("CAX's own", "a fused one"))
    rivals = itertools.product(forms, sees, enumerate(pairs))
    for (fused, form), (updates, sight), (backward, (what, call)) in rivals:
        rival = f"{form}, {sight}"
        row = case.row(f"{args.agent} lattice of one asset, {what}, cells; next to {rival}", call)
        row["steps_per_s"] *= cells / (segments * length)
        given = options | {"updates": updates, "fused": fused, "backward": backward}
        yield compared(row, measured_by(args.peers, "cax_nca", given))
