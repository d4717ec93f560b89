"""What may be your own code inside a compiled step: a reward, a cost, an action scheme.

Such a function runs inside the training program, so it must be a pure function of its arguments.
`examined` traces it, twice and without data, and refuses what is not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from nca_trader.config.extensions import own_code
from nca_trader.errors import ConfigError

LEAST_TABLE = 64  # numbers; smaller constants are parameters, such as the steps of a fee schedule
ADDRESS = re.compile(r"0x[0-9a-f]+")  # of a function, other in each trace


def examined(where: str, function: Callable, *args: Any, rows: int | None = None) -> Any:
    """Trace a function of your own, and check that it is pure and holds no bars.

    Args:
      where: what it is called in messages, e.g. "reward mine:paid".
      function: of `args`.
      args: pytrees of arrays or of `jax.ShapeDtypeStruct`.
      rows: bars of the data. A constant of as many numbers may hold the future; None allows any.

    Returns:
      What the function returns, in shapes and types alone.

    Raises:
      ConfigError: it raises, keeps state, leaves the compiled program, or holds such a constant.
    """
    with own_code(where):
        # A lambda each time: jax remembers the trace of a function, and would not call it again.
        first, again = (
            jax.make_jaxpr(lambda *xs: function(*xs), return_shape=True)(*args) for _ in range(2)
        )
    (program, result), other = first, again[0]
    same = all(np.array_equal(a, b, equal_nan=True) for a, b in _pairs(program, other))
    if not same or ADDRESS.sub("", str(program)) != ADDRESS.sub("", str(other)):
        raise ConfigError(
            f"{where}: is another function at each call, so it keeps state or draws numbers; let "
            "it depend on its arguments alone."
        )
    for name, constants in _parts(program):
        if name in ("pure_callback", "io_callback"):
            raise ConfigError(
                f"{where}: calls Python from inside the compiled program ({name}); write it in "
                "jax.numpy."
            )
        largest = max((np.size(x) for x in constants), default=0)
        if rows is not None and largest >= max(rows, LEAST_TABLE):
            raise ConfigError(
                f"{where}: holds a table of {largest:,} numbers for {rows:,} bars, in which later "
                "bars may be; let it depend on its arguments alone."
            )
    return result


def _pairs(one: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    constants = ([np.asarray(x) for _, parts in _parts(p) for x in parts] for p in (one, other))
    yield from zip(*constants, strict=False)


def _parts(program: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield each operation's name and its constants, of inner programs as well."""
    yield "", list(getattr(program, "consts", []))
    for equation in getattr(program, "jaxpr", program).eqns:
        literals = [x.val for x in equation.invars if hasattr(x, "val")]
        yield equation.primitive.name, literals
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(inner, "eqns"):
                yield from _parts(inner)
