"""Programs: traced once for all processes, a bound on a device's memory, a count of compilations.

One bound, `learner.memory_gb`, is for everything that a device holds in an update: parameters and
moments of every agent, the market, the replay ring and intermediate results. An update that needs
more is refused, with the number that would fit.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import math
import os
import pathlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export
from jax.core import Tracer
from jax.sharding import Mesh

from nca_trader import machine
from nca_trader.config.modules import PACKAGE
from nca_trader.errors import ConfigError, StateError, logger, out_of_memory
from nca_trader.parallel import hosts
from nca_trader.parallel.mesh import compiler_options, is_described, replicate
from nca_trader.runs.folder import versions

log = logger(__name__)
UNCOMPILED = "jax_disable_jit"  # a setting that pyright does not find on jax.config
LESS = "learner.num_segments, learner.segment_length or policy.channels"
COMPILED = "/jax/core/compile/backend_compile_duration"
MOST_TRACED = 64  # programs of 0.1 to 0.5 MB


def memory_limit(memory_gb: float | None, mesh: Mesh, held: int = 0) -> float | None:
    """Return the bytes of a device that an update may need, arguments included.

    Args:
      memory_gb: the user's bound in 1e9 bytes. None is what the device reports; on a CPU, each
        device's share of the free memory.
      mesh: the devices.
      held: bytes of each device that the update's arguments take already, so they are not free.

    Returns:
      Bytes, the same on every process; None means unbounded.
    """
    if memory_gb is not None:
        return memory_gb * 1e9
    if is_described(mesh):
        return None  # an AOT topology reports nothing; `scale.plan` knows its chips
    device = mesh.local_devices[0]
    if device.platform == "cpu":
        # The arguments are allocated already, so free memory does not include them.
        reported = machine.memory().free / len(mesh.local_devices) + held
    else:
        reported = (device.memory_stats() or {}).get("bytes_limit", 0)
    # Hosts may differ a little, and must choose the same sizes.
    return float(hosts.all_gather(np.float32(reported)).min()) or None


def bytes_needed(compiled: Any) -> int:
    """Return the bytes a device needs to run a compiled program, arguments included."""
    sizes = compiled.memory_analysis()
    # An output in the memory of a donated argument is counted in both sizes, hence the aliases.
    held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return held + sizes.temp_size_in_bytes + sizes.generated_code_size_in_bytes


class Held(NamedTuple):
    """Memory of a replay ring on a device: `slots` times `slot` bytes."""

    slots: int = 0
    slot: float = 0.0

    @property
    def bytes(self) -> float:
        """Bytes of all slots."""
        return self.slots * self.slot

    def remedy(self, room: float) -> str:
        """Describe how many slots fit into `room` bytes; "" if two do not, or without a ring."""
        # A ring needs two slots: one is read while the other is written.
        fit = room // self.slot if self.slot else 0.0
        if not fit >= 2:  # also where `room` is not known, NaN
            return ""
        return (
            f"; the replay ring takes {self.bytes / 1e9:.3g} GB of it, and "
            f"learner.replay_slots = {fit:.0f} would fit"
        )


@dataclasses.dataclass
class Bounded:
    """A jitted step that is refused at its first call where it needs more than a device has.

    Attributes:
      program: the jitted step.
      traced: the same, without compiler options, for calls within another program.
      build: `(micro_batches) -> jitted step`.
      larger: numbers of micro-batches to name if one of them would fit, in order.
      limit: bytes of a device; None means unbounded.
      ring: what the state holds for replay.
      less: what to lower, in words.
      facts: of all settings that `program` is traced with; None where it has own code.
      needed: bytes that a device needs for `program`; None before the first call.
    """

    program: Any
    traced: Any
    build: Callable[[int], Any]
    larger: Sequence[int]
    limit: float | None
    ring: Held
    less: str
    facts: tuple[Any, ...] | None = None
    needed: float | None = None

    def __post_init__(self):
        if self.limit is not None and self.ring.bytes > self.limit:
            raise ConfigError(
                f"learner.replay_slots = {self.ring.slots}: the ring takes "
                f"{self.ring.bytes / 1e9:.3g} GB, and a device has {self.limit / 1e9:.3g} GB for "
                "an update; lower it, or raise learner.memory_gb."
            )
        self._ready = False

    def __call__(self, *args: Any) -> Any:
        """Run the step.

        Raises:
          ConfigError: at the first call, if it does not fit.
        """
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args)):
            return self.traced(*args)  # part of another program, which has the bound
        # With UNCOMPILED nothing is compiled, so needs are not known.
        if self._ready or getattr(jax.config, UNCOMPILED):
            return self.program(*args)
        if self.facts is not None and machine.PROGRAMS in os.environ and hosts.count() == 1:
            self.program = trace_once(self.program, self.traced, args, self.facts)
        limit = math.inf if self.limit is None else self.limit
        needed = _needs(self.program, args)
        if not needed <= limit:
            raise ConfigError(self._refusal(needed, limit, args))
        # A process that has compiled waits for the others here. Inside the program it would give
        # up after a minute, and a host may compile for longer than another by that.
        hosts.barrier()
        try:
            # jit finds what was compiled just now. A device reports only while it computes that
            # it could not allocate.
            result = jax.block_until_ready(self.program(*args))
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            raise ConfigError(
                f"an update needs {needed / 1e9:.3g} GB, and a device could not allocate it; raise "
                f"learner.micro_batches, or {self.less}."
            ) from None
        self._ready, self.needed = True, needed
        return result

    def _refusal(self, needed: float, limit: float, args: Any) -> str:
        """Say how much is needed of how much, and the number that fits."""
        found = bisect.bisect_left(
            self.larger, True, key=lambda count: _needs(self.build(count), args) <= limit
        )
        if found < len(self.larger):
            remedy = f"; learner.micro_batches = {self.larger[found]} would fit"
        else:
            remedy = self.ring.remedy(limit - (needed - self.ring.bytes))
        much = "more than" if math.isnan(needed) else f"{needed / 1e9:.3g} GB of"
        has = "a device has" if math.isinf(limit) else f"{limit / 1e9:.3g} GB"
        return f"an update needs {much} {has}{remedy}; raise learner.memory_gb, or {self.less}."


class StoredStep(NamedTuple):
    """A jitted step that was traced by this process or an earlier one, see `trace_once`.

    Attributes:
      step: jitted `(*leaves of the arguments) -> (leaves of the state, metrics)`.
      state: structure of the state.
    """

    step: Any
    state: Any

    def __call__(self, *args: Any) -> Any:
        """Run the step."""
        leaves, metrics = self.step(*jax.tree.leaves(args))
        return jax.tree.unflatten(self.state, leaves), metrics

    def lower(self, *args: Any) -> Any:
        """Lower the step for these arguments."""
        return self.step.lower(*jax.tree.leaves(args))


def trace_once(program: Any, inner: Any, args: Any, facts: tuple[Any, ...]) -> Any:
    """Return a step that is traced by the first process alone; the next ones read what it wrote.

    Tracing and lowering an update takes 2 s, reading it 0.3 s. A file belongs to everything that
    the trace depends on: this package's source, versions, settings of jax, the facts, shapes and
    placements. What is read was written by `jax.export`, and nothing is unpickled.

    Args:
      program: the jitted step, returned as it is if jax cannot export it.
      inner: the same, without compiler options.
      args: of the step, on the mesh; the first is the state, which is donated.
      facts: of all settings that the step is traced with.
    """
    leaves, tree = jax.tree.flatten(args)
    state, of_state = jax.tree.structure(args[0]), len(jax.tree.leaves(args[0]))
    placed = [leaf.sharding for leaf in leaves]
    shapes = [(jax.typeof(leaf), place) for leaf, place in zip(leaves, placed, strict=True)]
    mesh, found = placed[0].mesh, jax.config.values.items()
    device = mesh.devices.flat[0]
    settings = {k: getattr(jax.config, k, value) for k, value in found if "cache" not in k}
    there = (device.platform, device.device_kind, os.environ.get("XLA_FLAGS"))
    key = repr((_digest_code(), there, facts, tree, shapes, settings))
    file = pathlib.Path(os.environ[machine.PROGRAMS], hashlib.sha256(key.encode()).hexdigest())

    def flat(*leaves: Any) -> Any:
        after, metrics = inner(*jax.tree.unflatten(tree, leaves))
        return jax.tree.leaves(after), metrics

    content = _read_program(file)
    if content is None:
        try:
            content = bytes(export.export(jax.jit(flat, in_shardings=placed))(*leaves).serialize())
        except (NotImplementedError, ValueError):
            return program
        _write_program(file, content)
    exported = export.deserialize(bytearray(content))

    def call(*leaves: Any) -> Any:
        return exported.call(*leaves)

    # Compilations are counted by the name of the program.
    call.__name__ = program.__name__
    step = jax.jit(
        call,
        donate_argnums=range(of_state),
        out_shardings=(placed[:of_state], replicate(mesh)),
        compiler_options=compiler_options(mesh),
    )
    return StoredStep(step, state)


@functools.cache
def _digest_code() -> str:
    """Return the digest of this package's source and of the versions that decide a result."""
    found = hashlib.sha256(repr(versions()).encode())
    for file in sorted(PACKAGE.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()


def _read_program(file: pathlib.Path) -> bytes | None:
    """Return what `_write_program` wrote; None where it is not there, or not as it was written."""
    with contextlib.suppress(OSError):
        content = file.read_bytes()
        os.utime(file)  # the oldest are deleted
        if hashlib.sha256(content[32:]).digest() == content[:32]:
            return content[32:]
    return None


def _write_program(file: pathlib.Path, content: bytes) -> None:
    # Training goes on without it, e.g. where the disk is full.
    with contextlib.suppress(OSError, StateError):
        file.parent.mkdir(parents=True, exist_ok=True)
        machine.write_atomically(file, hashlib.sha256(content).digest() + content)
        for old in sorted(file.parent.iterdir(), key=os.path.getmtime)[:-MOST_TRACED]:
            old.unlink()


def _needs(program: Any, args: Any) -> float:
    """Return the bytes a device needs for a jitted step; NaN if the compiler gives up on them."""
    try:
        return bytes_needed(program.lower(*args).compile())
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        return math.nan


class Compilations:
    """Counts what jax compiles between entering and leaving a `with`.

    Attributes:
      count: programs that were compiled or found in the cache on disk.
      seconds: time that tracing, lowering and compiling took.
      hits: programs found on disk.
    """

    def __init__(self, watched: Iterable[str] = ()):
        """Count nothing yet; `watched` are the names of jitted functions for `again`."""
        self.count, self.seconds, self.hits = 0, 0.0, 0
        self._watched = frozenset(watched)
        self._of: Counter[str] = Counter()
        self._warm: int | None = None
        self._reported = 0

    def __enter__(self) -> Compilations:
        jax.monitoring.register_event_duration_secs_listener(self._timed)
        jax.monitoring.register_event_listener(self._happened)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._timed)
        jax.monitoring.unregister_event_listener(self._happened)

    def again(self) -> int:
        """Return how often a watched program was compiled since the first call of `again`.

        The first call ends the warm-up. A warning is logged whenever the number has risen.
        """
        compiled = sum(self._of[name] for name in self._watched)
        if self._warm is None:
            self._warm = compiled
        more, self._reported = compiled - self._warm - self._reported, compiled - self._warm
        if more:
            log.warning(
                "the learner was compiled again after its first update (%d times so far): a "
                "shape, a type or a sharding changed; jax.log_compiles shows which",
                self._reported,
            )
        return self._reported

    def _timed(self, event: str, duration_secs: float, **facts: object) -> None:
        # Tracing, lowering and compiling are separate events below this name.
        if event.startswith("/jax/core/compile/"):
            self.seconds += duration_secs
        if event == COMPILED:
            self.count += 1
            # A function may be named as jit(NAME).
            self._of[str(facts.get("fun_name", "")).removeprefix("jit(").removesuffix(")")] += 1

    def _happened(self, event: str, **_: object) -> None:
        self.hits += event == "/jax/compilation_cache/cache_hits"
