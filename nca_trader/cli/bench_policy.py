"""`nca-trader bench policy`: lattice, windows, remat, a stream's latency, a peer's automaton."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

from nca_trader.cli.bench import SECONDS, Timing, beside, compared, measure

SEGMENTS, LENGTH = 16, 128  # of the lattice; a step is a decision of a segment
LONG = 4  # times as long are the segments of a second lattice: the bars before them weigh less
BARS = 2000  # that are streamed
REMAT = ("step", "every:2", "dots")


def bench_policy(
    args: argparse.Namespace,
    segments: int = SEGMENTS,
    length: int = LENGTH,
    bars: int = BARS,
    seconds: float = SECONDS,
) -> Iterator[dict[str, Any]]:
    """Rows of a policy for two assets; with peers, an automaton of CAX's on the same cells."""
    from nca_trader.agents.presets import load_agent
    from nca_trader.envs.presets import load_env
    from nca_trader.envs.trading import spec_of

    agent = load_agent(args.agent)
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
    first.in_turn(*others)
    rows = [each.row() for each in windows]
    yield from rows
    for lattice in lattices:
        for peer, row in zip(("windows", "cut windows"), rows, strict=True):
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

    The lattice is encoded as a learner does it, without the cells of the bars before a segment,
    or, with `whole`, with them.
    """

    def __init__(self, agent: Any, spec: Any, segments: int, length: int, whole: bool = False):
        import jax
        import jax.numpy as jnp

        from nca_trader.agents.policy import make_policy

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
        import jax

        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, jax.grad(self.loss)(params))

    def windows(self, params: Any) -> Any:
        """Every decision from a window of its own, as a network of observations has it."""
        return _fed_back(params, self.loss_of_windows(params, 0))

    def cut_windows(self, params: Any) -> Any:
        """The same without the updates of cells that the last cell does not see."""
        return _fed_back(params, self.loss_of_windows(params, self.policy.receptive_field - 1))

    def loss_of_windows(self, params: Any, halo: int) -> Any:
        """What `loss` is, of the same cells, a segment at a time."""
        import jax
        import jax.numpy as jnp

        field = self.policy.receptive_field
        rows = jnp.arange(self.length)[:, None] + jnp.arange(field)[None]

        def segment(bars: Any) -> Any:
            x, present = (array[rows] for array in bars)
            return (self.policy.encode(params, x, present, halo=halo)[:, -1] ** 2).mean()

        return jax.lax.map(segment, (self.x, self.present)).mean()


class _Timed:
    """A call of a case, compiled, and timed by whoever says when."""

    def __init__(self, name: str, case: _Case, call: Callable[[Any], Any]):
        import jax

        self._name, self._case, self._call = name, case, jax.jit(call)
        self.timing = Timing(self._call, case.params)

    def row(self) -> dict[str, Any]:
        """What was measured; `temp_mb` is what the program needs beside what goes in and out.

        On the CPU, XLA merges what remat computes again with what was there; see
        docs/concepts/policy.md.
        """
        case = self._case
        needed = self._call.lower(case.params).compile().memory_analysis()
        megabytes = needed.temp_size_in_bytes / 1e6 if needed else None
        return self.timing.row(self._name, case.segments * case.length, temp_mb=megabytes)


def _fed_back(params: Any, result: Any) -> Any:
    """Parameters that depend on the result, so that no call can be skipped."""
    import jax

    return jax.tree.map(lambda p: p + 0.0 * result, params)


def _latency(name: str, case: _Case, bars: int) -> dict[str, Any]:
    """One bar after the other through the stream and the readout, as a live loop would."""
    import jax
    import numpy as np

    from nca_trader.agents.policy import read_out
    from nca_trader.envs.account.state import open_account
    from nca_trader.envs.rewards import begun

    policy, params = case.policy, case.params
    account = begun(policy.spec, open_account(np.zeros(policy.spec.num_assets, np.float32)))

    @jax.jit
    def decide(state: Any, x: Any, present: Any) -> Any:
        state, cells = policy.stream(params, state, x, present)
        return state, read_out(policy, params, cells, account)

    x, present = np.asarray(case.x[0, 0]), np.asarray(case.present[0, 0])
    state, spent = policy.begin(), []

    def many(state: Any) -> Any:
        for _ in range(bars):
            began = time.perf_counter()
            state, logits = decide(state, x, present)
            np.asarray(logits)
            spent.append(time.perf_counter() - began)
        return state

    row = measure(f"{name} stream and readout, a bar a call", many, state, bars, envs=1)
    p50, p99 = np.percentile(spent[bars:], [50, 99]) * 1e6
    return row | {"p50_us": float(p50), "p99_us": float(p99)}


def _beside_cax(
    args: argparse.Namespace, agent: Any, spec: Any, segments: int, length: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """One asset, as many cells, channels and hidden units; steps are cells encoded.

    CAX's perception has no dilation: of as many updates its automaton sees fewer bars, and to see
    what ours sees it needs more. Both are measured, built as CAX's own example in one dimension
    and fused, see `benchmarks/peers/cax_nca.py`.
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
        row = case.row(f"{args.agent} lattice of one asset, {what}, cells; beside {rival}", call)
        row["steps_per_s"] *= cells / (segments * length)
        given = options | {"updates": updates, "fused": fused, "backward": backward}
        yield beside(row, args.peers, "cax_nca", given)
