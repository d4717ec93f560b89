"""An agent as two compiled functions that need jax alone: `nca-trader export --format stablehlo`.

The file is a zip archive: `observe.bin` and `decide.bin`, serialised by `jax.export` with the
weights in them; `begin.npz`, the memories before the first bar; `about.json`, what the functions
take and return; `README.md`, the model card with the lines that run them. It holds no code of
Python, so that own features and policies travel as the operations that they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import pathlib
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export

from nca_trader.agents.policy import decide_next
from nca_trader.config.extensions import own_code
from nca_trader.envs.account.risk import Joint, alone_of, apply_size, before_sizes, update_size
from nca_trader.envs.account.state import open_account
from nca_trader.errors import ConfigError, argument, extra
from nca_trader.machine import write_atomically
from nca_trader.numerics import float64_on_cpu
from nca_trader.runs.deciding import inputs_of
from nca_trader.runs.manifest import Run
from nca_trader.types import PRICES, Bar, split_columns

VERSION = 1
PLATFORMS = ("cpu", "cuda", "tpu")  # of `decide`; `observe` is float64, which a TPU has not
BAR = ("time", *PRICES, "volume", "present")
# The whole of what a process needs to run the file.
USE = """
import io, json, zipfile
import jax, numpy as np
from jax import export  # and flatbuffers: pip install jax flatbuffers

jax.config.update("jax_enable_x64", True)
with zipfile.ZipFile("agent.zip") as file:
    about = json.loads(file.read("about.json"))
    arrays = np.load(io.BytesIO(file.read("begin.npz")), allow_pickle=False)
    programs = [
        export.deserialize(bytearray(file.read(f"{name}.bin"))) for name in ("observe", "decide")
    ]
observe, decide = (jax.jit(program.call) for program in programs)
seen, memory = (
    tuple(arrays[key] for key in arrays.files if key.startswith(name))
    for name in ("observe", "decide")
)
# At each closed bar: [A] arrays in the order of about["bar"], time in seconds since 1970 UTC;
# weight is what is held at its close, ordered the last target, both float32. Decide from bar
# about["first_decision"] + 1 on.
seen, row, size, base = observe(seen, time, open, high, low, close, volume, present)
memory, logits, target = decide(memory, row, present, weight, ordered, size, base)
"""


class Portable(NamedTuple):
    """Two functions of plain tuples and arrays, and the memories that they begin with.

    observe: `(memory, *bar) -> memory, row, size, base`: a closed bar, of fields `[A]`, to the
      features `[A, F]` float32, the size of targets and the target of the base rule, `[A]` each; a
      size by covariance is `[1 + A, A]`, see `account.risk.Joint`.
    decide: `(memory, row, present, weight, ordered, size, base) -> memory, logits, target`, all
      float32 but for `present`; target is `[A]`.
    begin: the memories, of arrays, by the name of their function.
    fields: names of what `observe` takes of a bar, in order.
    """

    observe: export.Exported
    decide: export.Exported
    begin: dict[str, tuple[np.ndarray, ...]]
    fields: tuple[str, ...]


def portable(run: Run, extras: Sequence[str] = ()) -> Portable:
    """Compile the agent of a run into two functions.

    Args:
      run: the run.
      extras: fields of bars that its features may read, next to prices and volume: "dividend".

    Raises:
      ConfigError: it observes what neither bars nor weights show, or calls code of Python.
    """
    policy, spec, params = run.policy, run.spec, run.params()
    if spec.memory or spec.states:
        what = f"what it earned (reward = {spec.memory!r})" if spec.memory else "a market's state"
        raise ConfigError(
            f"{run.path}: its agent observes {what}, which a bar and weights do not show; give "
            f"{argument('format', 'nca')}, whose file `paper` and nca.load read."
        )
    inputs, count = inputs_of(run.env_config, spec), spec.num_assets
    rules, fields, based = run.account, (*BAR, *extras), spec.base != "none"

    def observe(memory: tuple[Array, ...], *given: Array) -> tuple[Any, ...]:
        close, count_state, inner = seen_tree.unflatten(memory)
        bar = Bar(**split_columns(dict(zip(fields, given, strict=True))))
        # As bar files do: an asset without a bar has its last close.
        prices = {name: jnp.where(bar.present, getattr(bar, name), close) for name in PRICES}
        bar = bar._replace(volume=jnp.where(bar.present, bar.volume, 0.0), **prices)
        inner, row, base = inputs.update(inner, bar)
        target = base if based else jnp.zeros(count)
        factor = jnp.ones(count)
        if rules.sizes is not None:
            count_state, found = update_size(count_state, bar, rules.sizes)
            factor = jnp.vstack(found) if isinstance(found, Joint) else found
        after = jax.tree.leaves((bar.close, count_state, inner))
        return tuple(after), row, *(x.astype(jnp.float32) for x in (factor, target))

    def decide(
        memory: tuple[Array, ...],
        row: Array,
        present: Array,
        weight: Array,
        ordered: Array,
        factor: Array,
        target: Array,
    ) -> tuple[Any, ...]:
        found = factor if factor.ndim == 1 else Joint(factor[0], factor[1:])
        account = open_account(weight)._replace(
            ordered=ordered,
            size=() if rules.sizes is None else alone_of(found),
            base=target if based else (),
        )
        stream = stream_tree.unflatten(memory)
        stream, logits, chosen = decide_next(policy, params, stream, row, present, account)
        after = tuple(jax.tree.leaves(stream))
        sized = apply_size(chosen, found, rules.size_cap)
        return after, logits, sized.astype(jnp.float32)

    with float64_on_cpu():
        sizing: Any = () if rules.sizes is None else before_sizes(count, rules.sizes)
        begun = (np.full(count, np.nan), sizing, inputs.init(count))
        seen, seen_tree = jax.tree.flatten(jax.tree.map(np.asarray, begun))
        kinds = {"time": np.int64, "present": bool}
        bar = [jax.ShapeDtypeStruct((count,), kinds.get(name, np.float64)) for name in fields]
        observed = _exported(run, observe, ("cpu", "cuda"), (tuple(seen), *bar))
    stream, stream_tree = jax.tree.flatten(jax.tree.map(np.asarray, policy.begin()))
    row = jax.ShapeDtypeStruct((count, spec.num_features), np.float32)
    present, number = (jax.ShapeDtypeStruct((count,), kind) for kind in (bool, np.float32))
    rows = (1 + count, count) if rules.covariance else (count,)
    sized = jax.ShapeDtypeStruct(rows, np.float32)
    taken = (tuple(stream), row, present, number, number, sized, number)
    decided = _exported(run, decide, PLATFORMS, taken)
    begin = {"observe": tuple(seen), "decide": tuple(stream)}
    return Portable(observed, decided, begin, fields)


def _exported(run: Run, function: Any, platforms: Sequence[str], like: Any) -> export.Exported:
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
    with own_code(str(run.path)), _without_paths():
        try:
            return export.export(jax.jit(function), platforms=platforms)(*like)
        except (NotImplementedError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"{run.path}: cannot be compiled for another process ({reason}); give "
                f"{argument('format', 'nca')}."
            ) from None


@contextlib.contextmanager
def _without_paths() -> Iterator[None]:
    """Leave out the source lines that programs carry, with this machine's folders."""
    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, before)


def write_portable(path: pathlib.Path, run: Run, made: Portable, card: str) -> int:
    """Write the file; return its size in bytes.

    Args:
      path: the file.
      run: the run.
      made: its two functions.
      card: the model card, in Markdown.

    Raises:
      ConfigError: flatbuffers is not installed.
      StateError: the file cannot be written.
    """
    members = {}
    with extra(
        f"{argument('format', 'stablehlo')} needs flatbuffers, which is not installed; pip "
        "install flatbuffers."
    ):
        for name in ("observe", "decide"):
            members[f"{name}.bin"] = bytes(getattr(made, name).serialize())
    arrays: dict[str, Any] = {
        f"{k}_{i}": x for k, leaves in made.begin.items() for i, x in enumerate(leaves)
    }
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    members["begin.npz"] = buffer.getvalue()
    members["README.md"] = card.encode()
    spec = run.spec
    about = {
        "format": VERSION,
        "agent": run.name,
        "symbols": spec.symbols,
        "features": spec.features,
        "first_decision": run.policy.first_decision,
        "bar": made.fields,
        "observe": f"(memory, {', '.join(made.fields)}) -> memory, row, size, base",
        "decide": "(memory, row, present, weight, ordered, size, base) -> memory, logits, target",
        "platforms": made.decide.platforms,
        "jax": jax.__version__,
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in members.items()},
    }
    members["about.json"] = json.dumps(about, indent=1).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            # A fixed date: the same agent is the same file.
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    write_atomically(path, buffer.getvalue())
    return buffer.getbuffer().nbytes
