"""A policy in one small file, which `nca-trader export` writes and `backtest` and `paper` read.

It holds the agent's and the environment's configuration, the record of its training bars, and
its weights in few bits. It has no optimiser state, no metrics and no code.

The layout is that of safetensors, which other tools read: 8 bytes of header length (little
endian), a JSON header, the bytes of the arrays. The header's metadata hold the kind of file, the
version of its format, and the SHA-256 of all bytes, computed with zeros in its own place. The
safetensors library checks no sum: version 0.8.0 loaded a file after any one bit of its arrays was
flipped. So this module has its own reader; a test flips a bit in every byte of a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import struct
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from nca_trader.agents import quantise
from nca_trader.agents.policy import Params, Policy, build_policy, stack, unstack
from nca_trader.agents.quantise import Layout, Leaves
from nca_trader.cloud import CloudPath, Place, place
from nca_trader.config import AgentConfig, EnvConfig
from nca_trader.config.agent import MAX_AGENTS
from nca_trader.config.records import BLANK, is_whole, plain, read_json, record, seal, show
from nca_trader.config.toml import from_toml_text, to_toml
from nca_trader.errors import ConfigError, RunError, StateError, argument, system_errors
from nca_trader.machine import write_atomically
from nca_trader.runs.consent import admit, own_names, refuse_uninstalled, signature_of
from nca_trader.runs.manifest import Manifest, Run, Selection, stored_spec
from nca_trader.runs.reference import Reference

T = TypeVar("T")
KIND, VERSION = "nca_trader policy", 2
AGAIN = "restore it from a copy, or export it again"
DTYPES = {
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LARGEST, RANK = 1 << 30, 8  # bytes of a file and axes of an array, at most
MEAN = "mean"  # in the place of an agent's number
REFERENCE = "features"  # a text of the metadata
SIGNED = "signature"  # a text of files with own code, see `runs.consent`
UNSIGNED = ("kind", "version", "sha256", SIGNED)
TEXTS = ("manifest", "selection", "coding", "steps", REFERENCE, "agent.toml", "env.toml", "seed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coding:
    """The encoding of weights.

    Attributes:
      bits: 4, 8 or 16 of a weight; of an index, where there is a codebook.
      codebook: "none", "euclidean" or "cosine". group: weights that share an index.
      activations: whether the inputs of the encoder's matrices are rounded to as many bits, by
        steps that were measured on the training span.
    """

    bits: int = 8
    codebook: str = "none"
    group: int = 1
    activations: bool = False

    def __post_init__(self):
        if self.bits not in quantise.BITS:
            raise ConfigError(f"{argument('bits', self.bits)}: give 4, 8 or 16.")
        if self.codebook not in ("none", *quantise.KINDS):
            known = ", ".join(quantise.KINDS)
            raise ConfigError(f"{argument('codebook', self.codebook)}: there are {known}.")
        if self.codebook == "none" and self.group != 1:
            raise ConfigError(
                f"{argument('group', self.group)} is of a codebook; give "
                f"{argument('codebook')} with it."
            )
        if self.group < 1:
            raise ConfigError(f"{argument('group', self.group)}: a group has at least 1 weight.")
        if self.activations and self.codebook != "none":
            raise ConfigError(
                f"{argument('activations')} rounds to steps, not to a codebook; leave one out."
            )


class Compact(NamedTuple):
    """Weights as a file holds them.

    tensors: by name. steps: of the inputs of matrices, by name. The names of several agents, whose
    orders are averaged, begin with the agent's number and a dot.
    """

    coding: Coding
    tensors: Leaves
    steps: dict[str, float]

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, their steps or codebooks, and the steps of inputs."""
        return sum(tensor.nbytes for tensor in self.tensors.values()) + 4 * len(self.steps)

    def params(self, policy: Policy, num_agents: int = 1) -> Params:
        """Return the parameters, as the policy's functions take them.

        Args:
          policy: of each agent.
          num_agents: S; for several the result is of `mean_policy`.

        Raises:
          ValueError: the tensors are not those of this policy, or not finite.
        """
        if num_agents > 1:
            if unknown := [name for name in self.tensors if _agent_of(name) >= num_agents]:
                raise ValueError(f"tensor {unknown[0]!r} is unknown")
            return stack([self._of(agent).params(policy) for agent in range(num_agents)])
        # Shapes alone: no parameters are drawn.
        like = jax.eval_shape(policy.init, jax.random.key(0))
        shapes = {
            f"{module}.{name}": leaf.shape
            for module, leaves in like.items()
            for name, leaf in leaves.items()
        }
        coding = self.coding
        for name, step in self.steps.items():
            # Only matrices have steps; and a file may hold any text here.
            if len(shapes.get(name, ())) != 2 or not (math.isfinite(step) and step > 0.0):
                raise ValueError(f"the step {step} of {name!r} is not a number above 0 of a matrix")
        if coding.codebook == "none":
            refuse_other(self.tensors, quantise.layout(shapes, coding.bits))
            leaves = quantise.widened(self.tensors, shapes, coding.bits)
        else:
            other = quantise.coded_layout(shapes, coding.codebook, coding.bits, coding.group)
            refuse_other(self.tensors, other)
            leaves = quantise.decoded(self.tensors, shapes, coding.codebook, coding.bits)
        return quantise.params_of(quantise.gauged(leaves, self.steps, coding.bits))

    def _of(self, agent: int) -> Compact:
        """Return what one of several agents has, by its own names."""

        def own(named: Mapping[str, T]) -> dict[str, T]:
            return {k.partition(".")[2]: v for k, v in named.items() if _agent_of(k) == agent}

        return Compact(self.coding, own(self.tensors), own(self.steps))


def _agent_of(name: str) -> float:
    """Return the number that a name begins with; infinity where it begins with none."""
    number = name.partition(".")[0]
    return int(number) if number in map(str, range(MAX_AGENTS)) else math.inf


def compact(
    run: Run,
    params: Params,
    coding: Coding,
    features: np.ndarray,
    present: np.ndarray,
    seed: int = 0,
) -> Compact:
    """Return the parameters in few bits.

    Args:
      run: the run of the agent.
      params: of `run.policy`.
      coding: the encoding of the weights.
      features: `[N, A, F]` of the training span and not of later bars, read where `coding` has
        `activations`.
      present: `[N, A]` bool, whether a bar exists, of the same rows.
      seed: of the training of a codebook.

    Raises:
      ConfigError: too few weights for a codebook of that size.
    """
    if run.num_acting > 1:
        joined = Compact(coding, {}, {})
        for agent, one in enumerate(unstack(params, run.num_acting)):
            part = _compact(run, one, coding, features, present, seed)
            joined.tensors.update({f"{agent}.{name}": x for name, x in part.tensors.items()})
            joined.steps.update({f"{agent}.{name}": x for name, x in part.steps.items()})
        return joined
    return _compact(run, params, coding, features, present, seed)


def _compact(
    run: Run, params: Params, coding: Coding, features: np.ndarray, present: np.ndarray, seed: int
) -> Compact:
    """Return the parameters of one agent in few bits."""
    leaves = quantise.leaves_of(params)
    if coding.codebook != "none":
        tensors = quantise.coded(leaves, coding.codebook, coding.bits, coding.group, seed)
        return Compact(coding, tensors, {})
    # A codebook, which returned above, has no steps.
    steps = {}
    if coding.activations:
        # Steps under `remat` are traced and show no numbers; without a gradient it changes nothing.
        shown_steps = dataclasses.replace(run.agent_config.policy, remat="none")
        agent = dataclasses.replace(run.agent_config, policy=shown_steps)
        policy = build_policy(agent, run.spec, stored=True)
        found = quantise.ranges(policy, params, features, present)
        steps = quantise.steps_of(found, coding.bits)
    return Compact(coding, quantise.quantised(leaves, coding.bits), steps)


def write_exported(path: pathlib.Path, run: Run, weights: Compact) -> int:
    """Write the agent of `run` with these weights into one file; return its size in bytes.

    Raises:
      StateError: it cannot be written.
    """
    # Without `format` and `created`, which are of the run folder.
    manifest, fields = plain(run.manifest), (f.name for f in dataclasses.fields(Manifest))
    about = {
        "coding": json.dumps(plain(weights.coding)),
        "steps": json.dumps(weights.steps),
        "manifest": json.dumps({key: manifest[key] for key in fields if key in manifest}),
        "selection": json.dumps(plain(run.selection) if run.selection else {}),
        "seed": MEAN if run.selected is None else str(run.selected),
        "agent.toml": to_toml(run.agent_config),
        "env.toml": to_toml(run.env_config),
        # What its features are usually like, so that a session of the file is watched for drift.
        REFERENCE: json.dumps(plain(run.reference) if run.reference else {}),
    }
    if own_names(run.env_config, run.agent_config):
        about[SIGNED] = signature_of(_signed(weights.tensors, about), make=True)
    return write_tensors(path, weights.tensors, about, KIND, VERSION)


class Exported(Run):
    """A run whose agents are in one file. Which act was chosen, and their steps are as trained.

    Raises:
      RunError: there is no such file of this kind and format. StateError: it is damaged.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | CloudPath,
        allow_code: bool | Collection[str] | None = False,
    ):
        """Read the whole file."""
        self.path = place(path)
        tensors, about = read_tensors(self.path, KIND, VERSION)
        texts = record(dict[str, str], about, str(path), AGAIN)
        missing = [name for name in TEXTS if name not in texts]
        if missing:
            raise StateError(f"{path}: has no {missing[0]!r}; {AGAIN}.")
        parsed = {name: read_json(texts[name], f"{path}: {name}", AGAIN) for name in TEXTS[:5]}
        self.manifest = record(Manifest, parsed["manifest"], f"{path}: manifest", AGAIN)
        refuse_uninstalled(self.manifest.code, str(path))
        self._records: dict[type, Any] = {
            kind: record(kind, parsed[name], f"{path}: {name}", AGAIN) if parsed[name] else None
            for kind, name in ((Selection, "selection"), (Reference, REFERENCE))
        }
        env, agent = texts["env.toml"], texts["agent.toml"]
        self.env_config = from_toml_text(EnvConfig, env, f"{path}: env.toml", stored=True)
        self.agent_config = from_toml_text(AgentConfig, agent, f"{path}: agent.toml", stored=True)
        if names := self._own_code(allow_code):
            content, signed = _signed(tensors, about), texts.get(SIGNED, "").encode()
            made = admit(names, self.manifest.code, content, signed, allow_code, str(path))
            # Where it cannot be written, this process remembers it.
            if made and isinstance(self.path, pathlib.Path):
                with contextlib.suppress(StateError):
                    write_tensors(self.path, tensors, about | {SIGNED: made}, KIND, VERSION)
        where = f"{path}: manifest: spec"
        self.spec = stored_spec(self.manifest, self.agent_config, where, AGAIN)
        # The number of steps cannot change: the weights were measured with this one.
        self._acting = self.agent_config
        number = texts["seed"]
        # As text: `int` takes other spellings of a number, and fails on thousands of digits.
        if number not in map(str, range(self.agent_config.num_seeds)) and number != MEAN:
            raise StateError(f"{path}: seed = {show(number)} is not one of its agents; {AGAIN}.")
        self._seed = None if number == MEAN else int(number)
        self._forced = True  # `export` refuses an agent that is not deployed
        coding = record(Coding, parsed["coding"], f"{path}: coding", AGAIN)
        steps = record(dict[str, float], parsed["steps"], f"{path}: steps", AGAIN)
        self.weights = Compact(coding, tensors, steps)

    def _read(self, cls: type[T], name: str) -> T | None:
        """Return what the run's folder had in a file when it was exported; None where none."""
        return self._records.get(cls)

    def params(self) -> Params:
        """Return the parameters, widened to float32."""
        try:
            return self.weights.params(self.each, self.num_acting)
        except ValueError as error:
            # The file was read whole, but its tensors are of another policy or not finite.
            raise StateError(f"{self.path}: {error}; export it again from its run.") from None

    def metrics(self) -> list[dict[str, Any]]:
        """Return []: the metrics stay in the run folder."""
        return []


def _signed(tensors: Mapping[str, np.ndarray], about: Mapping[str, str]) -> bytes:
    """Return what the signature of a file covers: all that it holds but its own digests."""
    texts = {name: text for name, text in about.items() if name not in UNSIGNED}
    sums = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in tensors.items()}
    return json.dumps([texts, sums], sort_keys=True).encode()


def read_run(
    path: str | os.PathLike[str] | CloudPath,
    steps: int | None = None,
    seed: int | None = None,
    force_agent: bool = False,
    allow_code: bool | Collection[str] | None = False,
) -> Run:
    """Open the run of a folder, or of a file that `nca-trader export` wrote.

    Args:
      path: the run folder, or the exported file.
      steps: the agent's K, see `Run`.
      seed: the agent that acts, see `Run`.
      force_agent: see `Run`.
      allow_code: see `Run`.

    Raises:
      RunError, StateError: see `Run` and `Exported`.
      ConfigError: `steps` for a file, which was measured with its own; a `seed` that the file does
        not hold.
    """
    # A run is a folder, so a file can only be an exported agent.
    if not place(path).is_file():
        return Run(path, seed=seed, steps=steps, force_agent=force_agent, allow_code=allow_code)
    if steps is not None:
        raise ConfigError(
            f"{argument('steps', steps)}: {path} was measured with its own; give the run folder."
        )
    run = Exported(path, allow_code)
    if seed not in (None, run.selected):
        held = f"agent {run.selected}" if run.selected is not None else run.described
        raise ConfigError(
            f"{argument('seed', seed)}: {path} holds {held} alone; give the run folder."
        )
    return run


def write_tensors(
    path: pathlib.Path,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str],
    kind: str,
    version: int,
) -> int:
    """Write a file completely or not at all.

    Args:
      path: the file.
      tensors: arrays of float32, int32, int16, int8 or uint8, by name.
      metadata: texts by name, other than "kind", "version" and "sha256".
      kind: the kind of file, e.g. "nca_trader policy".
      version: of its format.

    Returns:
      The size of the file in bytes.

    Raises:
      StateError: it cannot be written.
    """
    about = {**metadata, "kind": kind, "version": str(version), "sha256": BLANK}
    header: dict[str, object] = {"__metadata__": about}
    pieces, end = [], 0
    for name, array in tensors.items():
        # The format has row-major arrays only.
        piece = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": NAMES[array.dtype.newbyteorder("<")],
            "shape": list(array.shape),
            "data_offsets": [end, end + len(piece)],
        }
        pieces.append(piece)
        end += len(piece)
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the arrays
    # The first match is in the header, which comes before the arrays.
    content = seal(struct.pack("<Q", len(text)) + text + b"".join(pieces), "sha256")
    write_atomically(path, content)
    return len(content)


def refuse_other(tensors: Mapping[str, np.ndarray], layout: Layout) -> None:
    """Validate that arrays have the names, types and shapes of `layout` and are finite.

    Raises:
      ValueError: the first that is missing, unknown, of another type or shape, or not finite.
    """
    for name in [*layout, *tensors]:
        if name not in tensors or name not in layout:
            raise ValueError(f"tensor {name!r} is {'missing' if name in layout else 'unknown'}")
        found, (dtype, shape) = tensors[name], layout[name]
        if found.dtype != dtype or found.shape != shape:
            there, here = f"{found.dtype} {found.shape}", f"{np.dtype(dtype)} {shape}"
            raise ValueError(f"tensor {name!r} is {there} where its agent has {here}")
        if found.dtype.kind == "f" and not np.isfinite(found).all():
            raise ValueError(f"tensor {name!r} holds a number that is not finite")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Entry:
    """A tensor in the header. dtype: of `DTYPES`; data_offsets: where its bytes begin and end."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


def read_tensors(
    path: Place, kind: str, version: int
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read a file that `write_tensors` wrote; the arrays are views of its bytes.

    Returns:
      The arrays by name, and the metadata.

    Raises:
      StateError: it was damaged or changed.
      RunError: there is no such file, it is of another kind, or of a version that is not read.
    """
    with system_errors(RunError, f"{path}: cannot be read", f"give a {kind} file"):
        # Before reading: a wrong file must not fill the memory.
        if isinstance(path, pathlib.Path) and path.stat().st_size > LARGEST:
            raise RunError(f"{path}: is larger than {LARGEST:,} bytes; give a {kind} file.")
        content = path.read_bytes()
    try:
        (length,) = struct.unpack("<Q", content[:8])
        header = read_json(content[8 : 8 + length], str(path))
        about = header.pop("__metadata__")
        there, number, digest = about["kind"], int(about["version"]), about["sha256"]
    except (StateError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        raise _damaged(path, "its header cannot be read") from None
    if not is_whole(content, "sha256", digest):
        raise _damaged(path, "its SHA-256 differs from the one it was written with")
    # After the digest, so a damaged name is called damage and not another kind.
    if there != kind:
        raise RunError(f"{path}: is a {there} file, not a {kind} file.")
    if number != version:
        raise RunError(
            f"{path}: format {number}, this version reads {version}; write it again from its run."
        )
    # A forged file has a valid digest too, so every entry is validated before it is read.
    entries, arrays, end = record(dict[str, _Entry], header, str(path), AGAIN), {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        dtype, begin, shape = DTYPES.get(entry.dtype), end, entry.shape
        size = math.prod(shape)  # of Python's integers: it cannot overflow
        end += size * (dtype.itemsize if dtype else 0)
        known = dtype is not None and len(shape) <= RANK and all(0 <= n <= LARGEST for n in shape)
        # One after the other, without a gap.
        if not known or entry.data_offsets != [begin, end] or 8 + length + end > len(content):
            raise _damaged(path, f"the entry of tensor {name!r} is not that of its bytes")
        arrays[name] = np.frombuffer(content, dtype, size, 8 + length + begin).reshape(shape)
    if 8 + length + end != len(content):
        raise _damaged(path, f"{len(content) - 8 - length - end:,} bytes belong to no tensor")
    # In the order of the header, not of the bytes.
    return {name: arrays[name] for name in entries}, about


def _damaged(path: Place, what: str) -> StateError:
    return StateError(f"{path}: damaged: {what}; restore it from a copy, or export it again.")
