"""A run is a folder: configuration, data record, versions, metrics and checkpoints.

run.json          format, name, seed, command, data, versions, commit, device
env.toml agent.toml    the resolved configuration, every field
metrics.jsonl     one object per update, each with the checksum of its own text
checkpoints/      Orbax, by number of updates
selected/         the states of the update that was selected, and of the one before
selection.json    the scores of the agents on the selection span
selection.parquet the mean agent's returns there, by update
features.json     how its features are distributed over the training bars, see `runs.reference`
deployment.json   what trades: the agent where a gate passed it, else its base or a baseline
train.lock        which process trains into it now, see `runs.folder`

All these JSON files carry the SHA-256 of their own text, run.json those of the TOML files.
In an object store these are objects below a key, and metrics.jsonl is in parts, see `runs.folder`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np

from nca_trader.agents.base import base_of, spec_on_base
from nca_trader.cloud import CloudPath, Place, place
from nca_trader.config import AccountConfig, AgentConfig, EnvConfig
from nca_trader.config.account import complete_account
from nca_trader.config.agent import KINDS, num_slots
from nca_trader.config.extensions import origin_of
from nca_trader.config.records import (
    RESTORE,
    open_record,
    plain,
    record,
    seal_record,
    show,
)
from nca_trader.config.toml import from_toml_text
from nca_trader.data.time_frames import refuse_other_length
from nca_trader.envs.account.risk import bars_of_size
from nca_trader.envs.market import feature_set_of, spec_of
from nca_trader.errors import BarError, ConfigError, RunError, StateError
from nca_trader.machine import run_file, write_atomically
from nca_trader.runs.checkpoint import Checkpoints, shapes_of
from nca_trader.runs.consent import SIGNATURE, OwnCode, admit, own_names, refuse_uninstalled
from nca_trader.runs.deciding import deciding, inputs_of
from nca_trader.runs.folder import Lines, read_rows
from nca_trader.runs.reference import FILE as REFERENCE_FILE
from nca_trader.runs.reference import Reference
from nca_trader.runs.trials import DataRecord
from nca_trader.strategies.baselines import baseline_rules
from nca_trader.strategies.strategy import Strategy
from nca_trader.types import Bars, EnvSpec

if TYPE_CHECKING:
    # Flax is imported where a policy is made, and not for a rule.
    from nca_trader.agents.policy import Params, Policy

T = TypeVar("T")
FORMAT = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The inputs and versions of a run, as run.json and an exported file hold them.

    Attributes:
      spec: an `EnvSpec`. config: SHA-256 of each TOML file, by name.
      code: of your own features, reward and so on, by name; None where all are built in.
    """

    name: str
    seed: int
    command: str
    data: DataRecord
    spec: dict[str, Any]
    config: dict[str, str]
    versions: dict[str, str]
    commit: str
    device: str
    code: dict[str, OwnCode] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunManifest(Manifest):
    """The whole of run.json."""

    format: int
    created: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """selection.json: what was selected, by which scores, and on which bars.

    Attributes:
      selected: the agent that acts; None where the mean of all does.
      sharpe: annualised Sharpe ratio of each agent on the selection span.
      data: the selection span.
      update: the agents act as after so many updates; None is the newest checkpoint.
      score: annualised Sharpe ratio of the mean agent then.
      scored: the number of updates among which it was the best.
      ended: whether training ended early, because no better score came.
    """

    selected: int | None = None
    sharpe: list[float | None] | None = None
    data: DataRecord | None = None
    update: int | None = None
    score: float | None = None
    scored: int | None = None
    ended: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
    """deployment.json: what trades in the place of a run's agent, see `evaluate.deploy`.

    Attributes:
      baseline: the rule that trades, the base of its policy or a baseline; "" where the agent does.
      year: bars that the baselines' trend looks back.
      sentence: what was found, in words.
      data: the bars that decided it.
    """

    baseline: str
    year: int
    sentence: str
    data: DataRecord


class Run:
    """A run folder that exists.

    Args:
      path: the folder, also as a `gs://` or `s3://` URL.
      seed: index of the agent that acts; None is the mean of all (`mean_policy`), or the one that
        selection.json names.
      steps: K, the steps of its NCA; None is the number of training, see `with_steps`.
      force_agent: whether the agent acts also where deployment.json names another rule.
      allow_code: whether own code that it names may load, though you have not signed the run: True
        loads it, and signs the run; or the names that you know. None never loads it, signed or not,
        and reads the rest of the run.

    Raises:
      RunError: `path` is not a run folder, or one of a format that this version does not read; it
        names own code that you have not signed.
      StateError: a file of it was changed or is damaged.

    Example:
      >>> import nca_trader as nca
      >>> run = nca.Run("runs/first")  # doctest: +SKIP
      >>> nca.backtest(nca.sample_bars("sp500"), run).metrics["sharpe"]  # doctest: +SKIP
      0.41
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | CloudPath,
        seed: int | None = None,
        steps: int | None = None,
        force_agent: bool = False,
        allow_code: bool | Collection[str] | None = False,
    ):
        """Read the manifest and the configuration; `params` reads the checkpoints."""
        self.path = place(path)
        self.lines = Lines(self.path / "metrics.jsonl")
        file = run_file(self.path)
        content = file.read_bytes()
        manifest, checked = open_record(content, str(file))
        # What is not an object passes here, and `record` below reports it.
        known: Any = manifest.get("format") if isinstance(manifest, dict) else FORMAT
        if known != FORMAT:
            raise RunError(
                f"{file}: format {show(known)}, this version reads {FORMAT}; "
                "use the version that wrote it."
            )
        # After the format: another one may lack fields, which is not damage.
        self.manifest: Manifest = record(RunManifest, manifest, str(file))
        _refuse_unsealed(file, checked)
        refuse_uninstalled(self.manifest.code, str(self.path))
        self.env_config = self._config(EnvConfig, "env.toml")
        self.agent_config = self._config(AgentConfig, "agent.toml")
        if names := self._own_code(allow_code):
            signature = self.path / SIGNATURE
            signed = signature.read_bytes() if signature.is_file() else b""
            made = admit(names, self.manifest.code, content, signed, allow_code, str(self.path))
            # Where it cannot be written, this process remembers it.
            if made:
                with contextlib.suppress(StateError):
                    write_atomically(signature, made)
        # As it was written, even where this version would derive another from env.toml.
        self.spec = stored_spec(self.manifest, self.agent_config, f"{file}: spec")
        self._seed, self._forced = seed, force_agent
        agent = self.agent_config
        if steps is not None:
            from nca_trader.agents.policy import with_steps  # imports Flax, 0.3 s

            agent = with_steps(agent, steps)
        self._acting = agent
        chosen = self.selected
        # Negative numbers too, which would index from the end.
        if chosen is not None and not 0 <= chosen < agent.num_seeds:
            raise RunError(
                f"{self.path}: has no agent {chosen}; it trained {agent.num_seeds}, numbered "
                "from 0."
            )

    def _own_code(self, allow: bool | Collection[str] | None) -> dict[str, str]:
        """Return the names of own code that need consent; with None none is ever loaded."""
        names = own_names(self.env_config, self.agent_config)
        self._barred = next(iter(names), "") if allow is None else ""
        return {} if allow is None else names

    def _refuse_barred(self) -> None:
        if self._barred:
            raise RunError(f"{self.path}: names own code {self._barred}, which is not loaded here.")

    def _config(self, cls: type[T], name: str) -> T:
        file = self.path / name
        if not file.is_file():  # a pipe of that name would wait without end
            raise RunError(f"{file}: is missing; {RESTORE}.")
        content = file.read_bytes()
        # Changed dilations or costs would still fit the parameters: only the checksum shows them.
        if hashlib.sha256(content).hexdigest() != self.manifest.config.get(name):
            raise RunError(
                f"{file}: was changed after the run was made, so it is another agent's; restore "
                "it, or train the changed one into another folder."
            )
        return from_toml_text(cls, content.decode(), str(file), stored=True)

    @property
    def name(self) -> str:
        """The folder's name when the run was made."""
        return self.manifest.name

    @property
    def root(self) -> Place:
        """The folder of the run folders, where the trial log is."""
        return self.path.resolve().parent

    @property
    def selected(self) -> int | None:
        """Index of the agent that acts; None where the mean of all agents does."""
        if self._seed is not None:
            return self._seed
        selection = self.selection
        if selection is not None and selection.selected is not None:
            return selection.selected
        return 0 if self.agent_config.num_seeds == 1 else None

    @property
    def num_acting(self) -> int:
        """S, the number of agents whose orders are averaged."""
        return self.agent_config.num_seeds if self.selected is None else 1

    @property
    def described(self) -> str:
        """The agent that acts and the others, in words; "" where there is only one."""
        several = self.agent_config.num_seeds
        if several == 1:
            return ""
        selection, acting = self.selection, self.selected
        scores = dict(enumerate((selection.sharpe if selection else None) or []))

        def named(i: int) -> str:
            if i not in scores:
                return str(i)
            # An account that never trades has no Sharpe ratio.
            score = scores[i]
            return f"{i} (no trade)" if score is None else f"{i} (Sharpe ratio {score:.2f})"

        span = selection.data if selection else None
        where = f" on {span.first[:10]} to {span.last[:10]}" if span else ""
        if acting is None:
            known = f"; each{where}: {', '.join(map(named, range(several)))}" if scores else ""
            cut = ", cut where they disagree" * (self.agent_config.ensemble == "agreement")
            return f"the mean of {several} agents{cut}{known}"
        how = "as asked for"
        # --seed may name another agent than the selected one.
        if selection is not None and selection.selected == acting:
            how = f"selected{where}"
        others = ", ".join(named(i) for i in range(several) if i != acting)
        return f"agent {named(acting)} of {several}, {how}; the others: {others}"

    @property
    def selection(self) -> Selection | None:
        """The contents of selection.json; None where no agent was selected.

        Raises:
          StateError: the file was changed since it was written.
        """
        return self._read(Selection, "selection.json")

    @property
    def deployment(self) -> Deployment | None:
        """The contents of deployment.json; None where nothing was decided.

        Raises:
          StateError: the file was changed since it was written.
        """
        return self._read(Deployment, "deployment.json")

    @property
    def reference(self) -> Reference | None:
        """The contents of features.json; None where training had too few bars.

        Raises:
          StateError: the file was changed since it was written.
        """
        return self._read(Reference, REFERENCE_FILE)

    @property
    def replacement(self) -> Strategy | None:
        """The base or baseline that trades in the place of the agent; None where the agent does.

        Raises:
          StateError: deployment.json was changed, or names a rule that this version lacks.
        """
        found = None if self._forced else self.deployment
        if found is None or not found.baseline:
            return None
        known = baseline_rules(found.year, self.env_config.sizing != "fixed", self.base)
        if found.baseline not in known:
            raise StateError(
                f"{self.path}/deployment.json: baseline = {found.baseline!r} is not one of "
                f"{', '.join(known)}; {RESTORE}, or let a gate decide again."
            )
        return known[found.baseline]

    @property
    def base(self) -> Strategy | None:
        """The rule that the policy tilts on; None without one.

        Raises:
          RunError: it is own code, and the run was opened with `allow_code=None`.
        """
        if origin_of("strategies", self.spec.base) is not None:
            self._refuse_barred()
        base = base_of(self.spec)
        return None if base is None else base.strategy

    @property
    def history(self) -> int:
        """Bars of each asset on which its decision depends, as far as its features and base say."""
        base = base_of(self.spec)
        memory = None if base is None else base.strategy.memory
        seen = feature_set_of(self.env_config, self.spec.bar_seconds).memory
        field = self.policy.receptive_field
        return max(self.policy.first_decision + 1, seen + field - 1, memory or 0)

    @property
    def account(self) -> AccountConfig:
        """What an account was given that trained the agent, complete."""
        return self.env_config.account

    def as_strategy(self, given: AccountConfig) -> Strategy:
        """Return what acts as a strategy with an account of its own, a part of `nca.blend`.

        A baseline that trades in the agent's place is the strategy itself.

        Args:
          given: of its account, in the place of the run's.

        Raises:
          ConfigError: it observes the state of a synthetic market, which no bars have.
        """
        if self.replacement is not None:
            return self.replacement
        if self.spec.states:
            raise ConfigError(
                f"{self.path}: its agent observes the state of the market "
                f"{self.env_config.market}, which bars do not have; blend one that was trained on "
                "bars alone."
            )
        rules = complete_account(given, self)

        @functools.lru_cache(maxsize=8)
        def policy_of(num_assets: int) -> Policy:
            # A strategy knows the number of assets alone; their names are checked with the bars.
            own = self.spec.num_assets == num_assets
            return (self if own else self._of(tuple(map(str, range(num_assets))), "bars")).policy

        memory = max(self.history, bars_of_size(rules))
        inputs = inputs_of(self.env_config, self.spec)
        return deciding(self.name, inputs, policy_of, self.params(), rules, memory)

    @property
    def trained_symbols(self) -> list[str]:
        """The symbols that trained the agent; of a run on shards, those of all shards."""
        data = self.manifest.data
        return list(dict.fromkeys([*data.symbols, *itertools.chain(*(data.universes or []))]))

    @property
    def tradable(self) -> str:
        """The symbols that the policy can trade, in words, e.g. "any symbols"."""
        if self.tie is not None:
            return f"the symbols that trained it alone, in their order ({self.tie})"
        if self.agent_config.policy.neighbours == "none":
            return "any symbols"
        # Weights for neighbours are there or not: the policy cannot begin or cease to see others.
        return "any one symbol" if self.spec.num_assets == 1 else "any two or more symbols"

    @property
    def tie(self) -> str | None:
        """What ties the policy to the symbols that trained it; None if nothing does."""
        config, spec = self.agent_config.policy, self.spec
        # Neighbours by place in a ring or by a ranking are those of these symbols; a mean is of
        # any.
        if config.neighbours in ("ring", "nearest") and num_slots(spec.num_assets, config):
            return f"policy.neighbours = {config.neighbours!r}"
        if spec.memory:
            return f"reward = {spec.memory!r}, whose memory is in units of their variance"
        return "it sees the state of its market" if spec.states else None

    def on(self, bars: Bars) -> Run:
        """Return the run as it trades the symbols of `bars`.

        Args:
          bars: any bars of the symbols, in their order. Of a run on shards, the symbols of each
            shard are its own.

        Returns:
          The run itself for its own symbols. For others a run of the same parameters, whose full
          position is that of as many assets: `size` of the environment, or 1 / number of assets.

        Raises:
          BarError: the policy is tied to the symbols that trained it; or a feature of a slower time
            frame to the length of the bars.
        """
        refuse_other_length(bars, self.spec.bar_seconds)
        return self._of(bars.symbols, bars.source or "bars")

    def refuse(self, bars: Bars) -> None:
        """Raise BarError where the bars are of symbols that the run does not trade."""
        self.on(bars)

    def _of(self, symbols: tuple[str, ...], where: str) -> Run:
        """Return the run as it trades `symbols`, which `where` names in an error."""
        own, config, tie = self.spec.symbols, self.agent_config.policy, self.tie
        if symbols == own:
            return self
        spec = self.spec
        targets = spec_of(self.env_config, symbols, spec.states, spec.bar_seconds).targets
        # The ranking of the training bars holds for the symbols of another shard as well: "nearest"
        # trains on shards of one universe alone.
        spec = dataclasses.replace(spec, symbols=symbols, targets=targets)
        universes = self.manifest.data.universes or []
        fits = num_slots(spec.num_assets, config) == num_slots(self.spec.num_assets, config)
        if list(symbols) not in universes and (tie is not None or not fits):
            more = f" (or {len(universes) - 1} other choices)" if len(universes) > 1 else ""
            what = f"{', '.join(own)}{more}, in this order ({tie})" if tie else self.tradable
            raise BarError(
                f"{where}: symbols {', '.join(symbols)}, but the run {self.name} trades {what}; "
                "select those, or train with policy.neighbours = 'none', which trades any."
            )
        other = copy.copy(self)
        for cached in ("policy", "each"):  # made for the other symbols
            other.__dict__.pop(cached, None)
        other.spec = spec
        return other

    def _read(self, cls: type[T], name: str) -> T | None:
        file = self.path / name
        if not file.is_file():
            return None
        value, checked = open_record(file.read_bytes(), str(file))
        found = record(cls, value, str(file))
        _refuse_unsealed(file, checked)
        return found

    @functools.cached_property
    def policy(self) -> Policy:
        """The policy of what acts, as pure functions."""
        from nca_trader.agents.policy import mean_policy  # imports Flax, 0.3 s

        if self.selected is not None:
            return self.each
        return mean_policy(self.each, self.num_acting, self.agent_config.ensemble)

    @functools.cached_property
    def each(self) -> Policy:
        """The policy of each agent.

        Raises:
          RunError: it was opened with `allow_code=None`, and names own code.
          ConfigError: `steps` was given, and its own encoder does not read it.
        """
        from nca_trader.agents.policy import build_policy, check_steps  # imports Flax, 0.3 s

        self._refuse_barred()
        kind, steps = self._acting.policy.kind, self._acting.policy.steps
        policy = build_policy(self._acting, self.spec, stored=True)
        if kind not in KINDS and steps != self.agent_config.policy.steps:
            check_steps(kind, policy, build_policy(self.agent_config, self.spec, stored=True))
        return policy

    def params(self) -> Params:
        """Return the parameters of `policy`.

        They are of the update that selection.json names, else of the newest checkpoint that
        verifies.

        Raises:
          RunError: the run has no checkpoint yet, or one of another agent.
          StateError: there are checkpoints, and none of them verifies.
        """
        update = self.selection.update if self.selection else None
        folder = self.path / ("checkpoints" if update is None else "selected")
        # As the training state names its field.
        part, several = ".params", self.agent_config.num_seeds > 1
        # Shapes alone: no parameters are drawn.
        drawn = jax.eval_shape(self.each.init, jax.random.key(0))
        leading = (self.agent_config.num_seeds,) if several else ()
        of_all = jax.tree.map(lambda x: jax.ShapeDtypeStruct(leading + x.shape, x.dtype), drawn)
        found = None
        if folder.is_dir():
            with Checkpoints(folder) as checkpoints:
                found = checkpoints.newest(update, shapes_of(of_all, part), part)
        if found is None:
            raise RunError(
                f"{self.path}: no checkpoint yet; by its record it was begun with this command, "
                f"which resumes it: {self.manifest.command}"
            )
        leaves, acting = found[1], self.selected

        def pick(path: Any, _: Any) -> Any:
            value = leaves[part + jax.tree_util.keystr(path)]
            return value if not several or acting is None else value[acting]

        return jax.tree_util.tree_map_with_path(pick, drawn)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl; a damaged one is left out, and a warning names it.

        Raises:
          StateError: the last row was not written whole.
        """
        return [row for row in self._rows(self.lines.split()) if row is not None]

    def _rows(self, lines: Sequence[bytes]) -> list[dict[str, Any] | None]:
        return read_rows(lines, self.lines.path, keys=("update", "steps"))

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row to metrics.jsonl, with its checksum."""
        self.lines.append(seal_record(row, indent=None).removesuffix("\n"))

    def cut(self, done: int) -> None:
        """Delete the rows after those of `done` updates, and a last one that has no end."""
        kept = at = last = 0
        for row in self._rows([line for line in self.lines.split() if line.endswith(b"\n")]):
            # A damaged row may be a part of one, or two, so the next good one gives the number.
            at = at + 1 if row is None else row["update"]
            if at > done or (row is not None and at <= last):
                break
            last = last if row is None else at
            kept += 1
        self.lines.cut(kept)

    def write_json(self, name: str, value: Any) -> None:
        """Write a record as a JSON file of the run with its checksum, whole or not at all."""
        write_atomically(self.path / name, seal_record(plain(value)))


def stored_spec(
    manifest: Manifest, agent: AgentConfig, where: str, remedy: str = RESTORE
) -> EnvSpec:
    """Return the spec of a manifest, with the base that the agent's own file names.

    Consent to load code is asked for what that file names. A base that the spec cannot have is
    refused where the policy is made, so that the rest of the run can be read.

    Raises:
      StateError: the spec is not one.
    """
    spec = dataclasses.replace(record(EnvSpec, manifest.spec, where, remedy), base="none")
    return spec_on_base(spec, agent.policy) if spec.actions == "weights" else spec


def _refuse_unsealed(file: Place, checked: bool) -> None:
    # Someone who edits a file may also take out its checksum.
    if not checked:
        raise StateError(f"{file}: has no 'checksum'; {RESTORE}.")


def has_trained(run: Run, bars: Bars) -> bool:
    """Whether the first of `bars` are those that trained the run."""
    rows = run.manifest.data.rows
    return len(bars) >= rows and bars[:rows].digest() == run.manifest.data.sha256


def seen_rows(bars: Bars, run: Run) -> int:
    """Return how many rows of `bars` are not after the last that trained or chose the agent."""
    # Another draw of a synthetic market has the same times and none of the same bars. A market of
    # your own that is called in Python names its draw otherwise.
    same = bars.source == run.manifest.data.source
    if run.env_config.market and not same and not has_trained(run, bars):
        return 0
    spans = [run.manifest.data, run.selection and run.selection.data]
    last = max(np.datetime64(span.last) for span in spans if span)
    # "right": the last bar itself was seen.
    return int(np.searchsorted(bars.time, last, "right"))
