"""Compiled programs: sizes that fit the memory of a device, and a count of compilations."""

from __future__ import annotations

import logging
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
from nca_trader.errors import ConfigError, out_of_memory
from nca_trader.parallel import hosts
from nca_trader.parallel.mesh import is_described

log = logging.getLogger(__name__)
UNCOMPILED = "jax_disable_jit"  # a setting that pyright does not find on jax.config
LESS = "lower learner.num_segments, learner.segment_length or policy.channels"


def memory_limit(memory_gb: float | None, mesh: Mesh, held: int = 0) -> float | None:
    """Bytes of a device that an update may need, with all that it holds; None is no bound.

    Args:
      memory_gb: what a user allows, in 1e9 bytes; None is what the device reports, if it does, and
        of a CPU an equal share of the memory that is free.
      held: bytes of each device that are held for the update already, and so are not free.
    """
    if memory_gb is not None:
        return memory_gb * 1e9
    if is_described(mesh):
        return None  # whoever describes them knows what they have
    device = mesh.local_devices[0]
    if device.platform == "cpu":
        reported = machine.memory().free / len(mesh.local_devices) + held
    else:
        reported = (device.memory_stats() or {}).get("bytes_limit", 0)
    # Hosts may differ a little, and must choose the same sizes.
    return float(hosts.of_each(np.float32(reported)).min()) or None


def bytes_needed(compiled: Any) -> int:
    """Bytes a device needs to run a compiled program, its arguments included."""
    sizes = compiled.memory_analysis()
    held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return held + sizes.temp_size_in_bytes + sizes.generated_code_size_in_bytes


def piece_counts(first: int, items: int) -> list[int]:
    """Numbers of pieces to try for `items`: `first`, then each at least twice the one before."""
    counts = [first]
    for count in range(first, items + 1):
        if count >= 2 * counts[-1] and items % count == 0:
            counts.append(count)
    return counts


class Sizes(NamedTuple):
    """How an update is cut: agents that move at once, and micro-batches of each minibatch."""

    agents: int
    micro_batches: int

    def __str__(self) -> str:
        """As the log and the command line say it."""
        agents = "1 agent" if self.agents == 1 else f"{self.agents} agents"
        return f"{agents} at once, learner.micro_batches = {self.micro_batches}"


def sizes_to_try(agents: int, micro_batches: int, items: int) -> list[Sizes]:
    """From the fastest to the smallest: fewer agents at once first, then more micro-batches.

    Args:
      agents: that may move at once. micro_batches: to begin with. items: of a minibatch.
    """
    sizes = [Sizes(agents, micro_batches)]
    while sizes[-1].agents > 1:
        sizes.append(Sizes(-(-sizes[-1].agents // 2), micro_batches))
    return sizes + [Sizes(1, count) for count in piece_counts(micro_batches, items)[1:]]


class Held(NamedTuple):
    """What a replay ring takes: `slots` of `slot` bytes of a device each."""

    slots: int = 0
    slot: float = 0.0

    @property
    def bytes(self) -> float:
        """Of all slots."""
        return self.slots * self.slot

    def remedy(self, room: float) -> str:
        """How many slots do fit into `room` bytes; "" where two do not, or there is no ring."""
        fit = int(room // self.slot) if self.slot else 0
        if fit < 2:
            return ""
        return (
            f"; the replay ring takes {self.bytes / 1e9:.3g} GB of it, and "
            f"learner.replay_slots = {fit} would fit"
        )


NO_RING = Held()


class Fitting:
    """A jitted step in the sizes that fit into `limit` bytes of a device, found at the first call.

    Other sizes than the first are logged: they cost time, and the result is the same.

    Attributes:
      limit: bytes of a device; None is no bound. needed: bytes that a device needs for the chosen
        program; None before the first call, and where nothing is bounded.
    """

    def __init__(
        self,
        build: Callable[[Sizes], Any],
        sizes: Sequence[Sizes],
        limit: float | None,
        ring: Held = NO_RING,
        called: Callable[[Sizes], Any] | None = None,
    ):
        """Compiles nothing yet.

        Args:
          build: `(sizes) -> jitted step`. sizes: as in `sizes_to_try`. limit: None is no bound.
          ring: what a step's state holds for replay. called: as `build`, with options of the
            compiler, which a program that others trace cannot have; None is `build`.

        Raises:
          ConfigError: the ring alone does not fit.
        """
        self._build, self._remaining, self.limit, self._ring = build, list(sizes), limit, ring
        self._called = build if called is None else called
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
        """What was chosen, or will be tried next."""
        return self._remaining[0]

    @property
    def program(self) -> Any:
        """The jitted step that a call runs, in the sizes that were chosen or will be tried next."""
        return self._called(self.sizes)

    @property
    def figures(self) -> dict[str, float]:
        """What a row of metrics says of memory: nothing where nothing is bounded."""
        if self.needed is None:
            return {}
        return {"memory_gb": self.needed / 1e9, "agents_at_once": self.sizes.agents}

    def __call__(self, *args: Any) -> Any:
        """The step.

        Raises:
          ConfigError: at the first call, if not even the smallest sizes fit.
        """
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args)):
            return self._build(self.sizes)(*args)  # someone else compiles: they ask what it needs
        if self._chosen is not None:
            return self._chosen(*args)
        if getattr(jax.config, UNCOMPILED):  # nothing is compiled whose needs could be known
            return self.program(*args)
        while True:
            donated = self._smallest(math.inf if self.limit is None else self.limit, args)
            chosen = self.program  # which finds what was compiled just now
            # A process that has compiled waits for the others here: inside the program it would
            # wait a minute, and one host may compile for longer than that after another.
            hosts.meet()
            # Of several processes one cannot try again while the others wait for what it left.
            last = len(self._remaining) == 1 or hosts.count() > 1
            taken = _where(donated, args)
            last = last or not self._room_for(taken)
            spare = [] if last else [_spare(leaf) for leaf in taken]
            try:
                # A device says only when it computes that it could not allocate.
                result = jax.block_until_ready(chosen(*args))
            except jax.errors.JaxRuntimeError as error:
                if not out_of_memory(error):
                    raise
                if last:
                    raise ConfigError(f"{self.sizes}: allocation failed; {LESS}.") from None
                self._go_on("allocation failed")
                args = _with(donated, args, [again() for again in spare])
            else:
                self._chosen = chosen
                return result

    def _room_for(self, leaves: Sequence[Array]) -> bool:
        """Whether a host that is the device as well has room for a copy of `leaves`."""
        if self.limit is None or self.needed is None or jax.default_backend() != "cpu":
            return True
        copied = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        return self.needed + copied <= self.limit

    def _smallest(self, limit: float, args: Any) -> list[bool]:
        """Takes out the sizes before the first that fit, whose step is compiled then.

        Returns:
          Of each leaf of `args`, whether that step takes it over.
        """
        while True:
            needed = None
            try:
                lowered = self._called(self.sizes).lower(*args)
                compiled = lowered.compile()
                needed = bytes_needed(compiled)
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
            self._go_on(why)

    def _go_on(self, why: str) -> None:
        before = self._remaining.pop(0)
        log.warning("%s: %s; trying %s, with the same result", before, why, self.sizes)


def _spare(leaf: Array) -> Callable[[], Array]:
    """Gives `leaf` again after a step took it over; kept on the host meanwhile."""
    sharding = leaf.sharding
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        impl, data = jax.random.key_impl(leaf), np.array(jax.random.key_data(leaf))
        again = lambda: jax.random.wrap_key_data(jnp.asarray(data), impl=impl)  # noqa: E731
        return lambda: jax.device_put(again(), sharding)
    value = np.array(leaf)
    return lambda: jax.device_put(value, sharding)


def _where(chosen: Sequence[bool], tree: Any) -> list[Any]:
    return [leaf for leaf, take in zip(jax.tree.leaves(tree), chosen, strict=True) if take]


def _with(chosen: Sequence[bool], tree: Any, leaves: Sequence[Any]) -> Any:
    """`tree` with `leaves` where `chosen`."""
    old, structure = jax.tree.flatten(tree)
    new = iter(leaves)
    pairs = zip(old, chosen, strict=True)
    return jax.tree.unflatten(structure, [next(new) if take else leaf for leaf, take in pairs])


log = logging.getLogger(__name__)
COMPILED = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Listens from `with` to its end.

    Attributes:
      count: programs that were compiled, or found in the cache on disk. seconds: that tracing,
        lowering and compiling took. hits: of the programs, those found on disk.
    """

    def __init__(self, watched: Iterable[str] = ()):
        """Hears nothing yet. watched: names of the jitted functions that `again` is about."""
        self.count, self.seconds, self.hits = 0, 0.0, 0
        self._watched = frozenset(watched)
        self._of: Counter[str] = Counter()
        self._warm: int | None = None
        self._said = 0

    def __enter__(self) -> Compilations:
        jax.monitoring.register_event_duration_secs_listener(self._timed)
        jax.monitoring.register_event_listener(self._happened)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._timed)
        jax.monitoring.unregister_event_listener(self._happened)

    def again(self) -> int:
        """How often a watched program was compiled since the first call, which ends the warm-up.

        Each time it is more than at the last call, a warning says so.
        """
        compiled = sum(self._of[name] for name in self._watched)
        if self._warm is None:
            self._warm = compiled
        more, self._said = compiled - self._warm - self._said, compiled - self._warm
        if more:
            log.warning(
                "the learner was compiled again after its first update (%d times so far): a "
                "shape, a type or a sharding changed; jax.log_compiles tells which",
                self._said,
            )
        return self._said

    def _timed(self, event: str, duration_secs: float, **facts: object) -> None:
        if event.startswith("/jax/core/compile/"):
            self.seconds += duration_secs
        if event == COMPILED:
            self.count += 1
            self._of[str(facts.get("fun_name", "")).removeprefix("jit(").removesuffix(")")] += 1

    def _happened(self, event: str, **_: object) -> None:
        self.hits += event == "/jax/compilation_cache/cache_hits"
