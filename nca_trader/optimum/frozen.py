"""Markets whose optimum is known as frozen environments: `gymnasium.make("nca_trader/ou_mid-v1")`.

A version fixes what an environment shows, allows and pays, so that agents of any library can be
compared on it. The observation is one bar's features and the account, one vector; an agent that
needs older bars stacks observations or has a memory. The digest in an id's spec is of all of it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode

from nca_trader.config import AccountConfig, EnvConfig
from nca_trader.config.extensions import FORGET
from nca_trader.config.ranges import expect, nearest
from nca_trader.config.records import plain
from nca_trader.envs import FROZEN, FROZEN_ID, ID, load_env
from nca_trader.envs.gym.environment import GymEnv, kernel_of, refuse_fork
from nca_trader.envs.gym.packed import Kernel
from nca_trader.envs.gym.vector import GymVectorEnv
from nca_trader.envs.market import spec_of
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import ConfigError
from nca_trader.markets import market_of, task_of
from nca_trader.markets.market import PriceOutOfRange, check
from nca_trader.types import EnvSpec

# What an agent observes of every market. All of it comes from bars up to the decision; the market's
# own state is not part of it. The levels are measured from an average of 4,096 bars: measured from
# the whole past, agents memorised the few excursions of a price that wanders.
FEATURES = ("return_1", "price_level", "volume_level")
# Bars times assets of a path. On two busy cores `make` and the first step took 2 to 3 s and 170 MB
# with 2**18, 4 to 7 s and 290 MB with 2**20. `nano` ended on `ou_mid` at 98.8% and 99.0%, on
# `ar1_weak`, whose signal is 1% of the variance, at 95.8% and 98.3%.
CELLS = 2**18
WINDOW = 1  # bars in an observation
HORIZON = 1_024  # steps of an episode
# Fields of `EnvConfig` and `Costs` that were added after version 1: no part of a digest while they
# have their default, so that a new field leaves the digests as they are.
ADDED = ("correlation_span", "shrinkage", "costs.quote_scale")
# What each version does, see `trajectory`; `pytest tests/optimum/test_frozen.py --rewrite-golden`
# adds a new id.
STORED = pathlib.Path(__file__).with_name("frozen.json")
START, STEPS, WITHIN = 5_000, 8, 1e-5


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen environment.

    Attributes:
      market: name of the preset.
      config: of the environment; `market_bars` is that of a path to train on.
      digest: SHA-256 of all that the version fixes.
    """

    market: str
    config: EnvConfig
    digest: str

    @property
    def id(self) -> str:
        """The id in Gymnasium."""
        return FROZEN_ID.format(self.market)


def frozen(market: str) -> Frozen:
    """Return the frozen environment of a market.

    Args:
      market: the name of a preset, e.g. "ou_mid", or the id, "nca_trader/ou_mid-v1".

    Raises:
      ConfigError: there is no such id, or its preset was edited.

    Example:
      >>> frozen("ou_mid").id, frozen("ou_mid").config.costs.commission
      ('nca_trader/ou_mid-v1', 0.002)
    """
    name = {FROZEN_ID.format(known): known for known in FROZEN}.get(str(market), str(market))
    if name not in FROZEN:
        raise ConfigError(
            f"no frozen environment {market!r}; {nearest(str(market), FROZEN)}There are "
            f"{', '.join(FROZEN)}."
        )
    config = show_features(load_env(name))
    config = dataclasses.replace(
        config,
        market_bars=CELLS // market_of(config).num_assets,
        episode_bars=HORIZON,
        random_start=False,
    )
    found = Frozen(name, config, digest_of(name, config))
    if found.digest != FROZEN[name]:
        raise ConfigError(
            f"envs/{name}.toml was edited: its digest is {found.digest[:12]} where {found.id} has "
            f"{FROZEN[name][:12]}; restore the file, and name an edited copy by its path."
        )
    return found


def show_features(config: EnvConfig) -> EnvConfig:
    """Return the environment in which an agent observes `FEATURES`, not the market's state.

    What else the config names follows them: `moving_volatility` is about the size of returns, which
    `FEATURES` divide by a recent one.
    """
    features = tuple(dict.fromkeys((*FEATURES, *config.features)))
    return dataclasses.replace(config, features=features, market_state=False)


def digest_of(market: str, config: EnvConfig) -> str:
    """Compute the digest of an environment: SHA-256 of one JSON text of all fields."""
    fields = {
        name: value
        for name, value in fields_of(config).items()
        if name not in ADDED or value != fields_of(EnvConfig())[name]
    }
    facts = {"id": FROZEN_ID.format(market), "window": WINDOW, **plain(fields)}
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def fields_of(config: EnvConfig) -> dict[str, Any]:
    """Return the fields of an environment by name, and those of its costs as "costs.NAME"."""
    costs = {f"costs.{name}": value for name, value in vars(config.costs).items()}
    return {name: value for name, value in vars(config).items() if name != "costs"} | costs


# Agents that are tried one after the other, and copies of an environment, share the bars.
@functools.lru_cache(maxsize=4)
def env_of(config: EnvConfig, seed: int, halvings: int = 2) -> TradingEnv:
    """Return an environment of the draw, of fewer bars where its price leaves the floats.

    Raises:
      PriceOutOfRange: a quarter of the bars is too long as well.
    """
    try:
        return TradingEnv(task_of(config, seed), config)
    except PriceOutOfRange:
        # A coin that is thrown two million times leaves the range for one seed in ten, so half of
        # the bars are tried. A price that drifts leaves it early: what would remain of the path,
        # once 32,768 bars, is short enough to be memorised. So there are two halvings at most.
        if not halvings:
            raise
        shorter = dataclasses.replace(config, market_bars=config.market_bars // 2)
        return env_of(shorter, seed, halvings - 1)


FORGET.append(env_of.cache_clear)


def opened(market: str, digest: str, draw: int, given: Mapping[str, Any]) -> Frozen:
    """Return the frozen environment behind an id; nothing is drawn yet.

    Args:
      market: of the id.
      digest: of the id's spec.
      draw: seed of the path.
      given: other keywords of `gymnasium.make`; each is refused.

    Raises:
      ConfigError: a keyword that would change what is frozen, or the spec of another version.
    """
    expect("draw", draw, Integral, "a whole number, the seed of a path")
    found = frozen(market)
    if given:
        raise ConfigError(
            f"{found.id} is frozen and takes no {', '.join(given)}; give draw=SEED for another "
            f"path, or make {ID!r} with config={market!r}."
        )
    if digest != found.digest:
        raise ConfigError(
            f"{found.id} has the digest {found.digest[:12]}, the spec {str(digest)[:12]}: it is of "
            "another environment; make it by its id."
        )
    check({"draw": draw}, {"draw": 0})
    return found


def spec_of_frozen(found: Frozen) -> EnvSpec:
    """Describe a frozen environment without drawing it, so that no thread of JAX is started."""
    return spec_of(found.config, tuple(map(str, range(market_of(found.config).num_assets))))


def kernel_of_frozen(market: str, draw: int, on_device: bool) -> Kernel:
    """Return the compiled steps of a frozen environment.

    Raises:
      ConfigError: it does something else than its version fixed, see `verify`.
      StateError: as `refuse_fork`.
    """
    refuse_fork()
    return kernel_of(None, "", drawn(market, draw), WINDOW, on_device, AccountConfig())


def drawn(market: str, draw: int) -> TradingEnv:
    """Return a draw of a frozen environment, as `env_of`, once `verify` has passed."""
    found = frozen(market)
    verify(found.market)
    return env_of(found.config, draw)


def trajectory(market: str) -> dict[str, list[Any]]:
    """Step draw 0 of a frozen environment from a fixed bar by fixed actions.

    Returns:
      "observations", `STEPS + 1` of them, and "rewards", as they are stored in `STORED`.
    """
    env = GymEnv(env=env_of(frozen(market).config, 0), window=WINDOW)
    space, seen = env.action_space, [env.reset(options={"start": START})[0]]
    rewards = []
    for k in range(STEPS):
        part = 0.2 + (3 * k + 5 * np.arange(env.trading.spec.num_assets)) % 7 / 10.0
        if isinstance(space, Box):
            action = space.low + part * (space.high - space.low)
        else:
            action = (part * env.trading.spec.num_actions).astype(int)
            action = action if space.shape else int(action[0])
        observation, reward, *_ = env.step(action)
        seen.append(observation)
        rewards.append(reward)
    return {"observations": [row.tolist() for row in seen], "rewards": rewards}


@functools.cache
def verify(market: str) -> None:
    """Compare what a frozen environment does with what its version did; once a process.

    The digest is of its settings alone: this finds a feature, an account or a generator that
    computes something else.

    Raises:
      ConfigError: an observation or a reward differs by more than `WITHIN` of the largest.
    """
    found, stored = frozen(market), json.loads(STORED.read_text())[market]
    for name, now in trajectory(market).items():
        then, now = np.asarray(stored[name]), np.asarray(now)
        apart = np.abs(now - then) / np.maximum(1e-3, np.abs(then).max(0))
        if apart.max() <= WITHIN:  # not of NaN
            continue
        place = tuple(map(int, np.argwhere(~(apart <= WITHIN))[0]))
        column = "".join(f", number {at}" for at in place[1:])
        raise ConfigError(
            f"{found.id} is no longer what its version fixed: {name[:-1]} {place[0]}{column} is "
            f"{now[place]:.6g} where {then[place]:.6g} is stored; install this package again."
        )


class FrozenEnv(GymEnv):
    """One account in a frozen environment, for Gymnasium; its path is drawn at the first reset."""

    def __init__(
        self,
        market: str,
        digest: str,
        draw: int = 0,
        render_mode: str | None = None,
        **given: Any,
    ):
        """Make the environment.

        Args:
          market: of the id.
          digest: of the id's spec.
          draw: seed of the path to train on.
          render_mode: as `GymEnv`.
          **given: nothing; see `opened`.

        Raises:
          ConfigError: as `opened` and `GymEnv`.
        """
        found = opened(market, digest, draw, given)
        source = functools.partial(kernel_of_frozen, market, draw, False)
        self._describe(source, spec_of_frozen(found), WINDOW, True, render_mode)


class FrozenVectorEnv(GymVectorEnv):
    """`num_envs` accounts in a frozen environment, stepped by one compiled call."""

    def __init__(
        self,
        num_envs: int,
        market: str,
        digest: str,
        draw: int = 0,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
        **given: Any,
    ):
        """Make the environments; arguments as those of `FrozenEnv` and `GymVectorEnv`.

        Raises:
          ConfigError: as these two.
        """
        found = opened(market, digest, draw, given)
        source = functools.partial(kernel_of_frozen, market, draw, True)
        spec = spec_of_frozen(found)
        self._describe(source, spec, num_envs, WINDOW, True, autoreset_mode, render_mode)
