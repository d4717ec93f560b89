"""Opens a run folder to train into it: a new one, or one of the same experiment."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator

import jax
import numpy as np

from nca_trader.cloud import CloudPath, Place
from nca_trader.config import AgentConfig
from nca_trader.config.records import difference, plain, seal_record
from nca_trader.config.toml import to_toml
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import ConfigError, RunError, argument
from nca_trader.machine import write_atomically
from nca_trader.parallel import hosts
from nca_trader.runs import trials
from nca_trader.runs.consent import codes_of, own_names
from nca_trader.runs.folder import check_shared, commit, make_folder, now, training_in, versions
from nca_trader.runs.manifest import FORMAT, Run, RunManifest
from nca_trader.runs.reference import FILE as REFERENCE_FILE
from nca_trader.runs.reference import reference_of
from nca_trader.runs.trials import entry_of, record_of_env


@contextlib.contextmanager
def training_run(env: TradingEnv, agent: AgentConfig, path: Place, seed: int) -> Iterator[Run]:
    """Open the run folder at `path`; no other process trains into it until the block ends.

    Raises:
      RunError: another process trains there; and as `open_run`.
      StateError: the folder cannot be locked.
    """
    texts = _texts(env, agent)
    with training_in(path, texts):
        yield open_run(env, agent, path, seed)


def open_run(env: TradingEnv, agent: AgentConfig, path: Place, seed: int) -> Run:
    """Open the run folder at `path`: make a new one, or check that it is the same experiment.

    If there are several processes, the first one does that and the others open the folder.

    Raises:
      RunError: the folder holds something else, or a run of other bars, agent, environment or
        seed. Only `learner.steps` (how far to go), `[checkpoint]` and `[mesh]` may differ. Or
        some process sees another folder at `path` than the first one.
      ConfigError: `path` is a bucket and not a folder in it.
    """
    if not path.name and isinstance(path, CloudPath):
        raise ConfigError(f"{path}: is a bucket; name a folder in it, e.g. {path}/runs/a.")
    if hosts.count() > 1:
        check_shared(path)
    # Its names of own code, which the caller gave itself.
    names = own_names(env.config, agent)
    # Two processes that make the folder at once would each find files of the other.
    hosts.on_first(lambda: _begin_run(env, agent, path, seed, names))
    return Run(path, allow_code=names)


def _texts(env: TradingEnv, agent: AgentConfig) -> dict[str, str]:
    return {"env.toml": to_toml(env.config), "agent.toml": to_toml(agent)}


def _begin_run(
    env: TradingEnv, agent: AgentConfig, path: Place, seed: int, names: dict[str, str]
) -> None:
    """Make the folder, or check the one that is there."""
    data = record_of_env(env)
    # Written last, so without it the folder does not hold a run yet.
    if (path / "run.json").exists():
        run = Run(path, allow_code=None)
        there, here = (
            {"seed": number, "data symbols": tuple(bars.symbols), "data rows": bars.rows}
            | {"data sha256": bars.sha256, "env": plain(config), "agent": plain(kept)}
            for number, bars, config, kept in (
                (run.manifest.seed, run.manifest.data, run.env_config, run.agent_config),
                (seed, data, env.config, agent),
            )
        )
        # How often a run is saved, and on which devices it trains, may change between starts.
        for one in (there["agent"], here["agent"]):
            del one["checkpoint"], one["mesh"]
            if agent.optimizer.schedule in ("constant", "sgdr"):  # no rate depends on the end
                del one["learner"]["steps"]
        changed = difference(there, here)
        if changed is not None:
            name, was, asked = changed
            raise RunError(
                f"{run.path}: a run of something else: {name} was {was!r} there and is {asked!r} "
                f"now; choose another {argument('run_dir')}, or ask for the same."
            )
        return
    texts = _texts(env, agent)
    code = codes_of(names)
    make_folder(path, texts)
    manifest = RunManifest(
        format=FORMAT,
        name=path.resolve().name,
        created=now(),
        command=" ".join(sys.argv),
        seed=seed,
        data=data,
        spec=plain(env.spec),
        versions=versions(),
        commit=commit(),
        device=jax.devices()[0].device_kind,
        code=code,
        config={name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()},
    )
    for file, text in texts.items():
        write_atomically(path / file, text)
    # Logged before the run exists: no agent trains without being counted.
    counted = {"trials": agent.num_seeds, "time": manifest.created}
    entry = entry_of("train", manifest.name, data, **counted)
    trials.record(path.resolve().parent, entry)
    if env.shards is None:
        present, features = np.asarray(env.bars.present), np.asarray(env.features)
        measured = reference_of(features, present, tuple(env.spec.features), env.spec.warmup)
        if measured is not None:
            write_atomically(path / REFERENCE_FILE, seal_record(plain(measured)))
    # Last: a folder with run.json is whole.
    write_atomically(path / "run.json", seal_record(plain(manifest)))
