"""Compiled programs: sizes that fit the memory of a device, and a count of compilations.

One bound, `learner.memory_gb`, is for everything that a device holds in an update: parameters and
moments of every agent, the market, the replay ring and intermediate results. Two sizes that do not
change the result are reduced automatically: first the agents of a population that move at once,
then the segments of a micro-batch. The size of the replay ring does change the result, so a ring
that leaves no room is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import Mesh

from nca_trader import machine
from nca_trader.errors import ConfigError, logger, out_of_memory
from nca_trader.parallel import hosts
from nca_trader.parallel.mesh import is_described

log = logger(__name__)
UNCOMPILED = "jax_disable_jit"  # a setting that pyright does not find on jax.config
LESS = "lower learner.num_segments, learner.segment_length or policy.channels"
COMPILED = "/jax/core/compile/backend_compile_duration"


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


def piece_counts(first: int, items: int) -> list[int]:
    """Return numbers of pieces to try: `first`, then divisors of `items` that at least double."""
    counts = [first]
    for count in range(first, items + 1):
        if count >= 2 * counts[-1] and items % count == 0:
            counts.append(count)
    return counts


class Sizes(NamedTuple):
    """Sizes of an update: agents computed at once, and micro-batches of each minibatch."""

    agents: int
    micro_batches: int

    def __str__(self) -> str:
        """Return the sizes as the log and the command line print them."""
        agents = "1 agent" if self.agents == 1 else f"{self.agents} agents"
        return f"{agents} at once, learner.micro_batches = {self.micro_batches}"


def sizes_to_try(agents: int, micro_batches: int, items: int) -> list[Sizes]:
    """List sizes from the fastest to the smallest: fewer agents first, then more micro-batches.

    Args:
      agents: the most that may move at once.
      micro_batches: the fewest.
      items: segments of a minibatch.
    """
    sizes = [Sizes(agents, micro_batches)]
    while sizes[-1].agents > 1:
        # Halved, rounded up: `lax.map` takes a last batch that is smaller.
        sizes.append(Sizes(-(-sizes[-1].agents // 2), micro_batches))
    return sizes + [Sizes(1, count) for count in piece_counts(micro_batches, items)[1:]]


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
        fit = int(room // self.slot) if self.slot else 0
        if fit < 2:
            return ""
        return (
            f"; the replay ring takes {self.bytes / 1e9:.3g} GB of it, and "
            f"learner.replay_slots = {fit} would fit"
        )


NO_RING = Held()


class Fitting:
    """A jitted step in the first sizes that fit into a device, found at the first call.

    Other sizes than the first are logged: they take longer, with the same result.

    Attributes:
      limit: bytes of a device; None means unbounded.
      needed: bytes that a device needs for the chosen program; None before the first call, and
        without a bound.
    """

    def __init__(
        self,
        build: Callable[[Sizes], Any],
        sizes: Sequence[Sizes],
        limit: float | None,
        ring: Held = NO_RING,
        called: Callable[[Sizes], Any] | None = None,
    ):
        """Compile nothing yet.

        Args:
          build: `(sizes) -> jitted step`.
          sizes: those to try, see `sizes_to_try`.
          limit: bytes of a device; None means unbounded.
          ring: what the state holds for replay.
          called: as `build`, with compiler options, for calls outside of another program; None is
            `build`.

        Raises:
          ConfigError: the ring alone does not fit.
        """
        self._build, self._remaining, self.limit, self._ring = build, list(sizes), limit, ring
        self._called = build if called is None else called
        # Without a bound there is nothing to choose. Several processes still have to wait for each
        # other after compiling.
        at_once = limit is None and hosts.count() == 1
        self._chosen: Any = self._called(self._remaining[0]) if at_once else None
        self.needed: int | None = None
        if limit is not None and ring.bytes > limit:
            raise ConfigError(
                f"learner.replay_slots = {ring.slots}: the ring takes {ring.bytes / 1e9:.3g} GB, "
                f"and a device has {limit / 1e9:.3g} GB for an update; lower it, or raise "
                "learner.memory_gb."
            )

    @property
    def sizes(self) -> Sizes:
        """The sizes that were chosen, or will be tried next."""
        return self._remaining[0]

    @property
    def program(self) -> Any:
        """The jitted step in `sizes`."""
        return self._called(self.sizes)

    def built(self, sizes: Sizes) -> Any:
        """Return the jitted step in other sizes."""
        return self._called(sizes)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of memory; {} without a bound."""
        if self.needed is None:
            return {}
        return {"memory_gb": self.needed / 1e9, "agents_at_once": self.sizes.agents}

    def __call__(self, *args: Any) -> Any:
        """Run the step.

        Raises:
          ConfigError: at the first call, if not even the smallest sizes fit.
        """
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args)):
            return self._build(self.sizes)(*args)  # part of another program, which has the bound
        if self._chosen is not None:
            return self._chosen(*args)
        if getattr(jax.config, UNCOMPILED):  # nothing is compiled, so needs are not known
            return self.program(*args)
        while True:
            donated = self._compile_first_that_fits(args)
            chosen = self.program  # jit finds what was compiled just now
            # A process that has compiled waits for the others here. Inside the program it would
            # give up after a minute, and a host may compile for longer than another by that.
            hosts.barrier()
            leaves, structure = jax.tree.flatten(args)
            # The step takes over (donates) leaves. A second try needs them again, so copies are
            # kept on the host. A CPU's host is the device: there they must fit as well.
            copied = sum(
                leaf.size * leaf.dtype.itemsize
                for leaf, taken in zip(leaves, donated, strict=True)
                if taken
            )
            room = (
                self.limit is None
                or self.needed is None
                or jax.default_backend() != "cpu"
                or self.needed + copied <= self.limit
            )
            # One of several processes cannot try again while the others wait inside the program.
            last = len(self._remaining) == 1 or hosts.count() > 1 or not room
            again = [
                _spare(leaf) if taken and not last else lambda leaf=leaf: leaf
                for leaf, taken in zip(leaves, donated, strict=True)
            ]
            try:
                # A device reports only while it computes that it could not allocate.
                result = jax.block_until_ready(chosen(*args))
            except jax.errors.JaxRuntimeError as error:
                if not out_of_memory(error):
                    raise
                if last:
                    raise ConfigError(f"{self.sizes}: allocation failed; {LESS}.") from None
                self._next("allocation failed")
                args = jax.tree.unflatten(structure, [leaf() for leaf in again])
            else:
                self._chosen = chosen
                return result

    def _compile_first_that_fits(self, args: Any) -> list[bool]:
        """Drop the sizes before the first that fit; return which leaves of `args` it donates."""
        limit = math.inf if self.limit is None else self.limit
        while True:
            needed = None
            try:
                lowered = self.program.lower(*args)
                needed = bytes_needed(lowered.compile())
                if needed <= limit:
                    self.needed = None if self.limit is None else needed
                    return [info.donated for info in jax.tree.leaves(lowered.args_info)]
                why = f"an update needs {needed / 1e9:.3g} GB of {limit / 1e9:.3g} GB"
            except jax.errors.JaxRuntimeError as error:
                if not out_of_memory(error):
                    raise
                why = f"the compiler says that an update does not fit into {limit / 1e9:.3g} GB"
            if len(self._remaining) == 1:
                room = 0.0 if needed is None else limit - (needed - self._ring.bytes)
                raise ConfigError(
                    f"{self.sizes}: {why}, and a micro-batch is one segment already"
                    f"{self._ring.remedy(room)}; raise learner.memory_gb, or {LESS}."
                )
            self._next(why)

    def _next(self, why: str) -> None:
        before = self._remaining.pop(0)
        log.warning("%s: %s; trying %s, with the same result", before, why, self.sizes)


def _spare(leaf: Array) -> Callable[[], Array]:
    """Copy `leaf` to the host; return a function that puts the copy back where it was."""
    sharding = leaf.sharding
    # numpy has no type for keys, so their data are copied.
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        impl, data = jax.random.key_impl(leaf), np.array(jax.random.key_data(leaf))
        wrap = jax.random.wrap_key_data
        return lambda: jax.device_put(wrap(jnp.asarray(data), impl=impl), sharding)
    value = np.array(leaf)
    return lambda: jax.device_put(value, sharding)


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
