"""A run is a folder: what was done, with what, and all that is needed to do it again.

run.json          format, name, seed, command, data, versions, commit, device
env.toml agent.toml    the resolved configuration, every field
metrics.jsonl     one object an update
checkpoints/      Orbax, by number of updates
selection.json    which seed was selected, on what, and all the scores
train.lock        who trains into it now, see `runs.folder`

run.json and selection.json carry the SHA-256 of their own text, run.json those of the TOML files.
In an object store it is what lies below a key; there metrics.jsonl is in parts, see `runs.folder`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NotRequired, TypedDict, TypeVar, cast

import jax
import numpy as np

from nca_trader import __version__
from nca_trader.agents.policy import Params, Policy, make_policy, with_steps
from nca_trader.cloud import CloudPath, Place, place
from nca_trader.config import AgentConfig, EnvConfig
from nca_trader.config.records import RESTORE, read_json, record, sealed, shown, unsealed
from nca_trader.config.toml import from_toml_text, to_toml
from nca_trader.disk import run_file, write_atomically
from nca_trader.envs.market import spec_of
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import ConfigError, RunError, StateError, argument
from nca_trader.parallel import hosts
from nca_trader.runs import trials
from nca_trader.runs.checkpoint import Checkpoints
from nca_trader.runs.folder import Lines, check_shared, make_folder, training_in
from nca_trader.runs.trials import DataRecord, record_of_env
from nca_trader.types import Bars, EnvSpec

T = TypeVar("T")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pandas")


FORMAT = 4
UNSEALED = 3  # the format before run.json and selection.json had a checksum
M = TypeVar("M", bound="Manifest")


class Manifest(TypedDict):
    """What a run was made with, in run.json and in an exported file. config: SHA-256 by file."""

    name: str
    seed: int
    command: str
    data: DataRecord
    spec: dict[str, Any]
    config: dict[str, str]
    versions: dict[str, str]
    commit: str
    device: str


class RunManifest(Manifest):
    """The whole of run.json."""

    format: int
    created: str


class Selection(TypedDict):
    """selection.json: which agent was selected, the Sharpe ratio of each, and on which bars."""

    selected: int
    sharpe: NotRequired[list[float | None]]
    data: NotRequired[DataRecord]


class Row(TypedDict):
    """What a row of metrics.jsonl has in addition to numbers by name."""

    update: NotRequired[int]
    steps: NotRequired[int]
    seeds: NotRequired[dict[str, list[float | None]]]
    fitness_correlation: NotRequired[dict[str, float | None]]


def row_of(value: Any, source: str) -> dict[str, Any]:
    """Returns parsed JSON as a row of metrics; see `manifest_of`."""
    row = record(dict[str, Any], value, source)
    named = {name: number for name, number in row.items() if name in Row.__annotations__}
    record(Row, named, source)
    record(dict[str, float | None], {k: v for k, v in row.items() if k not in named}, source)
    return row


def manifest_of(kind: type[M], value: Any, source: str) -> M:
    """Returns parsed JSON as a manifest.

    Raises:
      StateError: a key is unknown or missing, or a value has another type.
    """
    found = record(kind, value, source)
    _refuse_no_span(found["data"], source)
    return found


def selection_of(value: Any, source: str) -> dict[str, Any]:
    """Returns parsed JSON as a `Selection`; see `manifest_of`."""
    found = dict(record(Selection, value, source))
    if "data" in found:
        _refuse_no_span(cast(DataRecord, found["data"]), source)
    return found


def _refuse_no_span(data: DataRecord, source: str) -> None:
    for end in (data["first"], data["last"]):
        try:
            with warnings.catch_warnings(action="error"):  # of a UTC offset, which is ours never
                np.datetime64(end, "ns")
        except (ValueError, UserWarning):
            raise StateError(f"{source}: {end!r} is not a time; {RESTORE}.") from None


def read_spec(manifest: Manifest, config: EnvConfig, source: str, *, exact: bool) -> EnvSpec:
    """Rebuilds the `EnvSpec` of a manifest, every field of it.

    Args:
      exact: whether the record has a checksum. Without one, an older version wrote the record:
        what it lacks follows from `config`, and must agree with `config` where it has it.

    Raises:
      StateError: a field is unknown or missing, or has another type or value.
    """
    given, where = manifest["spec"], f"{source}: spec"
    if exact:
        return record(EnvSpec, given, where)
    features = record(list[str], given.get("features", []), f"{where}.features")
    symbols = given.get("symbols", manifest["data"]["symbols"])
    symbols = record(tuple[str, ...], symbols, f"{where}.symbols")
    states = tuple(name for name in features if name.startswith("state:"))
    try:
        derived = spec_of(config, symbols, states)
    except ConfigError as error:  # a feature that this version does not have
        raise StateError(f"{source}: env.toml: {error}") from None
    # Agents of older versions were not shown what the reward remembers.
    spec = record(EnvSpec, _as_json(derived) | {"memory": "", "decay": 0.0} | given, where)
    for name in ("features", "targets", "actions", "constant_size"):
        there, here = getattr(spec, name), getattr(derived, name)
        if there != here:
            raise StateError(
                f"{source}: spec.{name} is {there}, but env.toml gives {here}; {RESTORE}."
            )
    return spec


def _as_json(value: Any) -> dict[str, Any]:
    """The fields of a dataclass in the types that JSON reads back."""
    return json.loads(json.dumps(dataclasses.asdict(value)))


class Run:
    """A run folder that exists.

    Raises:
      RunError: `path` is not a run folder, or one of a format that this version does not read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | CloudPath,
        seed: int | None = None,
        steps: int | None = None,
    ):
        """Reads the manifest and the configuration; the checkpoints wait until asked for.

        `seed` is the index of the agent to act as, None is the selected one. `steps` is the K that
        its automaton acts with, None is what it was trained with; see `with_steps`.
        """
        self.path = place(path)
        self.lines = Lines(self.path / "metrics.jsonl")
        file = run_file(self.path)
        manifest, checked = unsealed(file.read_bytes(), str(file))
        known = manifest.get("format") if isinstance(manifest, dict) else FORMAT
        if known not in (UNSEALED, FORMAT):
            raise RunError(
                f"{file}: format {shown(known)}, this version reads {FORMAT}; "
                "use the version that wrote it."
            )
        self.manifest: Manifest = manifest_of(RunManifest, manifest, str(file))
        self._sealed = known == FORMAT
        self._refuse_unsealed(file, checked)
        self.env_config = self._config(EnvConfig, "env.toml")
        self.agent_config = self._config(AgentConfig, "agent.toml")
        self.spec = read_spec(self.manifest, self.env_config, str(file), exact=self._sealed)
        self._seed = seed
        agent = self.agent_config
        self._acting = agent if steps is None else with_steps(agent, steps)
        chosen = self._chosen
        if chosen is not None and not 0 <= chosen < agent.num_seeds:
            raise RunError(
                f"{self.path}: has no agent {chosen}; it trained {agent.num_seeds}, numbered "
                "from 0."
            )

    def _refuse_unsealed(self, file: Place, checked: bool) -> None:
        if self._sealed and not checked:
            raise StateError(f"{file}: has no 'checksum'; restore it from a copy.")

    def _config(self, cls: type[T], name: str) -> T:
        file = self.path / name
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            raise RunError(f"{file}: is missing; restore it from a copy.") from None
        # Dilations or costs, once changed, would still fit the parameters: only this shows it.
        if hashlib.sha256(content).hexdigest() != self.manifest["config"].get(name):
            raise RunError(
                f"{file}: was changed after the run was made, so it is another agent's; restore "
                "it, or train the changed one into another folder."
            )
        return from_toml_text(cls, content.decode(), str(file), recorded=True)

    @property
    def name(self) -> str:
        """The folder's name when the run was made."""
        return self.manifest["name"]

    @property
    def root(self) -> Place:
        """The folder of the run folders, where the ledger of trials is."""
        return self.path.resolve().parent

    @property
    def _chosen(self) -> int | None:
        if self._seed is not None:
            return self._seed
        only = 0 if self.agent_config.num_seeds == 1 else None
        return self.selection.get("selected", only)

    @property
    def selected(self) -> int:
        """Index of the agent that acts: the one asked for, else the selected, else the only one.

        Raises:
          RunError: there are several agents, and none of them was asked for or selected.
        """
        chosen = self._chosen
        if chosen is None:
            last = self.agent_config.num_seeds - 1
            raise RunError(
                f"{self.path}: trained {last + 1} agents and none was selected; choose one of 0 "
                f"to {last}, e.g. {argument('seed', 0)}."
            )
        return chosen

    @property
    def described(self) -> str:
        """The agent that acts and the others, in words; "" where there is only one."""
        several = self.agent_config.num_seeds
        if several == 1:
            return ""
        scores = dict(enumerate(self.selection.get("sharpe", [])))

        def named(i: int) -> str:
            score = scores.get(i)
            return f"{i} (Sharpe ratio {score:.2f})" if score is not None else str(i)

        span = self.selection.get("data")
        how = "as asked for"
        if self.selection.get("selected") == self.selected:
            how = f"selected on {span['first'][:10]} to {span['last'][:10]}" if span else "selected"
        others = ", ".join(named(i) for i in range(several) if i != self.selected)
        return f"agent {named(self.selected)} of {several}, {how}; the others: {others}"

    @property
    def selection(self) -> dict[str, Any]:
        """The contents of selection.json, or {}; see `Selection`.

        Raises:
          StateError: the file was changed since it was written.
        """
        file = self.path / "selection.json"
        if not file.is_file():
            return {}
        value, checked = unsealed(file.read_bytes(), str(file))
        found = selection_of(value, str(file))
        self._refuse_unsealed(file, checked)
        return found

    @functools.cached_property
    def policy(self) -> Policy:
        """The policy, as pure functions."""
        return make_policy(self._acting, self.spec)

    def params(self) -> Params:
        """Parameters of the seed that acts, from the newest checkpoint that verifies.

        Raises:
          RunError: the run has no checkpoint yet, or one of another agent.
          StateError: there are checkpoints, and none of them verifies.
        """
        folder = self.path / "checkpoints"
        found = None
        if folder.is_dir():
            with Checkpoints(folder) as checkpoints:
                found = checkpoints.newest()
        if found is None:
            raise RunError(
                f"{self.path}: no checkpoint yet; give the command that began it again: "
                f"{self.manifest['command']}"
            )
        like = jax.eval_shape(self.policy.init, jax.random.key(0))
        several = self.agent_config.num_seeds > 1

        def pick(path: Any, leaf: jax.ShapeDtypeStruct) -> Any:
            name = ".params" + jax.tree_util.keystr(path)
            value = found[1].get(name)
            shape = (self.agent_config.num_seeds, *leaf.shape) if several else leaf.shape
            if value is None or value.shape != shape:
                there = "missing" if value is None else f"{list(value.shape)}"
                raise RunError(
                    f"{folder}: the checkpoint is of another agent: {name} is {there} there and "
                    f"{list(shape)} by agent.toml; restore the folder from a copy."
                )
            return value[self.selected] if several else value

        return jax.tree_util.tree_map_with_path(pick, like)

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl."""
        rows = []
        for number, line in enumerate(self.lines.read().splitlines(), 1):
            where = f"{self.lines.path} line {number}"
            row = row_of(read_json(line, where), where)
            missing = [name for name in ("update", "steps") if name not in row]
            if missing:
                raise StateError(f"{where}: has no {missing[0]!r}; {RESTORE}.")
            rows.append(row)
        return rows

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes a JSON file of the run with its checksum, whole or not at all."""
        write_atomically(self.path / name, sealed(value))


def seen_rows(bars: Bars, run: Run) -> int:
    """Rows of `bars` that are not after the last bar that trained the run or selected its seed.

    Another draw of a synthetic market has the same times and none of the same bars.
    """
    if run.env_config.market and bars.source != run.manifest["data"]["source"]:
        return 0
    spans = [run.manifest["data"], run.selection.get("data")]
    last = max(np.datetime64(span["last"]) for span in spans if span)
    return int(np.searchsorted(bars.time, last, "right"))


def now() -> str:
    """The time as a manifest or a ledger writes it: UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a result."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "nca-trader": __version__} | found


def commit() -> str:
    """The commit of the source tree this package runs from, "+dirty" if changed; or "unknown"."""
    here = pathlib.Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return "unknown"

    def git(*args: str) -> str:
        command = ["git", "-C", str(here), *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return head + "+dirty" if head and git("status", "--porcelain") else head or "unknown"
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def open_run(env: TradingEnv, agent: AgentConfig, path: Place, seed: int) -> Run:
    """The run folder at `path`: made if it is new, else checked to be the same experiment.

    Of several processes the first one does that, and the others open what it left there.

    Raises:
      RunError: the folder holds something else, or a run of other bars, agent, environment or
        seed. Only `learner.steps` (how far to go), `[checkpoint]` and `[mesh]` may differ. Or
        some process sees another folder at `path` than the first one.
      ConfigError: `path` is a bucket and no folder in it.
    """
    if not path.name and isinstance(path, CloudPath):
        raise ConfigError(f"{path}: is a bucket; name a folder in it, e.g. {path}/runs/a.")
    if hosts.count() > 1:
        check_shared(path)
    run = hosts.on_first(lambda: _open_run(env, agent, path, seed))
    return Run(path) if run is None else run


@contextlib.contextmanager
def training_run(env: TradingEnv, agent: AgentConfig, path: Place, seed: int) -> Iterator[Run]:
    """Opens the run folder at `path`; no other process trains into it until the block ends.

    Raises:
      RunError: another process trains there; and as `open_run`.
      StateError: the folder cannot be locked.
    """
    with training_in(path):
        yield open_run(env, agent, path, seed)


def _open_run(env: TradingEnv, agent: AgentConfig, path: Place, seed: int) -> Run:
    if (path / "run.json").exists():
        run = Run(path)
        _check_same(run, env, agent, seed)
        return run
    make_folder(path)
    name = path.resolve().name
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "name": name,
        "created": now(),
        "command": " ".join(sys.argv),
        "seed": seed,
        "data": record_of_env(env),
        "spec": dataclasses.asdict(env.spec),
        "versions": versions(),
        "commit": commit(),
        "device": jax.devices()[0].device_kind,
    }
    texts = {"env.toml": to_toml(env.config), "agent.toml": to_toml(agent)}
    for file, text in texts.items():
        write_atomically(path / file, text)
    manifest["config"] = {
        file: hashlib.sha256(text.encode()).hexdigest() for file, text in texts.items()
    }
    entry = {"kind": "train", "run": name, "trials": agent.num_seeds}
    entry |= trials.named(manifest["data"]) | {"time": manifest["created"]}
    trials.record(path.resolve().parent, entry)
    # Last: a folder with run.json is whole.
    write_atomically(path / "run.json", sealed(manifest))
    return Run(path)


def _check_same(run: Run, env: TradingEnv, agent: AgentConfig, seed: int) -> None:
    """Refuses to go on with a run that began as something else; names the first difference."""
    there, here = run.manifest["data"], record_of_env(env)
    pairs = [("seed", run.manifest["seed"], seed)]
    pairs += [(f"data {key}", there[key], here[key]) for key in ("symbols", "rows", "sha256")]
    pairs += _fields("env", run.env_config, env.config)
    constant = agent.optimizer.schedule in ("constant", "sgdr")  # they know of no end
    pairs += [
        pair
        for pair in _fields("agent", run.agent_config, agent)
        if not pair[0].startswith(("agent.checkpoint", "agent.mesh"))
        and not (pair[0] == "agent.learner.steps" and constant)
    ]
    for name, was, asked in pairs:
        if was != asked:
            raise RunError(
                f"{run.path}: a run of something else: {name} was {was!r} there and is {asked!r} "
                f"now; choose another {argument('run_dir')}, or ask for the same."
            )


def _fields(name: str, was: Any, asked: Any) -> list[tuple[str, Any, Any]]:
    """Every leaf field of two dataclasses of one type, as (dotted name, was, asked)."""
    if not hasattr(was, "__dataclass_fields__"):
        return [(name, was, asked)]
    found = []
    for field in was.__dataclass_fields__:
        found += _fields(f"{name}.{field}", getattr(was, field), getattr(asked, field))
    return found
