"""What jax compiles, counted: programs, seconds, those found in the cache, those made again."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

import jax

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
