"""Many accounts as one Gymnasium vector environment, stepped by one compiled call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from jax import Array

from nca_trader.config import AccountConfig
from nca_trader.config.account import gather_account
from nca_trader.config.ranges import expect
from nca_trader.envs.gym.environment import (
    DEFAULT_CONFIG,
    NAMES,
    Source,
    action_space,
    checked_actions,
    kernel_of,
    observation_space,
    refuse_fork,
    seed_words,
    split_observation,
    start_row,
    unchanged,
)
from nca_trader.envs.gym.packed import DRAWN, Kernel, account_size
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import ConfigError
from nca_trader.types import EnvSpec


class Batch:
    """A kernel's steps for `n` rows at once; each is one compiled call with one array to read.

    The words that callers read `[n, S]` and the carried ones `[n, C]` are separate arrays, so that
    only the first leaves the device.
    """

    def __init__(self, kernel: Kernel, mode: AutoresetMode):
        self.kernel, self.mode = kernel, mode
        self._reset, self._step = jax.jit(self._reset_rows), jax.jit(self._step_rows)

    def reset(self, *given: Any) -> tuple[Array, Array]:
        """Return read and carried words of episodes `seed` `[n, 2]`, `count`, `start` `[n]`."""
        return self._reset(self.kernel.market, *given)

    def step(self, carried: Array, actions: np.ndarray) -> tuple[Array, Array, Array]:
        """Step with `actions` `[n, A]`.

        Returns:
          The words of the step, the words to act on next, and the carried words. The first two
          differ where an episode ends and another begins in the same step.
        """
        return self._step(self.kernel.market, carried, actions)

    def _begin(self, market: list[Array], seed: Array, count: Array, start: Array) -> Array:
        return jax.vmap(functools.partial(self.kernel.begin_row, market))(seed, count, start)

    def _reset_rows(self, market: list[Array], *given: Array) -> tuple[Array, Array]:
        rows = self._begin(market, *given)
        return rows[:, : self.kernel.seen], rows[:, self.kernel.seen :]

    def _step_rows(
        self, market: list[Array], carried: Array, actions: Array
    ) -> tuple[Array, Array, Array]:
        # `market` is the same for all rows and is not mapped over: one copy serves every account.
        size, unpack = self.kernel.seen, jax.vmap(self.kernel.unpack)
        stepped = jax.vmap(functools.partial(self.kernel.step_row, market))(carried, actions)
        rows = stepped

        def renewed() -> Array:
            # A start that `reset` was given is for its own episode; later ones are drawn.
            start = jnp.full(ended.shape, DRAWN, jnp.int32)
            fresh = self._begin(market, before.seed, before.count + 1, start)
            return jnp.where(ended[:, None], fresh, stepped)

        if self.mode is not AutoresetMode.DISABLED:
            before = unpack(carried)
            # With "NextStep" an episode that ended one step ago is started again and not stepped.
            at_once = self.mode is AutoresetMode.SAME_STEP
            ended = unpack(stepped[:, size:]).over if at_once else before.over
            # A branch, not a selection: most steps end no episode, and a reset costs ten steps.
            rows = jax.lax.cond(ended.any(), renewed, lambda: stepped)
        # "NextStep" shows the first row of the next episode, "SameStep" the row of the step itself.
        saw = rows if self.mode is AutoresetMode.NEXT_STEP else stepped
        return saw[:, :size], rows[:, :size], rows[:, size:]


class GymVectorEnv(VectorEnv):
    """`num_envs` accounts in one market; each equals `GymEnv` of its seed, to rounding.

    After the end of an episode the next one starts in the next step, whose action is ignored and
    whose reward is 0 ("NextStep", Gymnasium's default); or in the same step, with the final
    observation in `info["final_obs"]` ("SameStep", for Stable-Baselines3 and CleanRL's older code);
    or at `reset(options={"reset_mask": [n] bool})` ("Disabled"). `metadata` names the mode. Seed s
    gives environment i the seed s + i. Features are gathered on the device.
    """

    def __init__(
        self,
        num_envs: int = 1,
        bars: Source = None,
        config: Any = DEFAULT_CONFIG,
        window: int = 1,
        flatten: bool = True,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
        env: TradingEnv | None = None,
        account: AccountConfig | None = None,
        **settings: Any,
    ):
        """Make the environments; arguments as those of `GymEnv`.

        Raises:
          ConfigError, BarError: as `GymEnv`; also for a render mode, which batches do not have.
        """
        expect("num_envs", num_envs, Integral, "a whole number", bars=bars, config=config)
        given = gather_account(account, settings, NAMES)
        found = functools.partial(kernel_of, bars, config, env, window, True, given)
        kernel = found()
        self._describe(
            found, kernel.env.spec, num_envs, window, flatten, autoreset_mode, render_mode
        )
        self._batch = Batch(kernel, self.mode)

    def _describe(
        self, source: Callable[[], Kernel], spec: EnvSpec, num_envs: int, window: int,
        flatten: bool, autoreset_mode: AutoresetMode | str, render_mode: str | None,
    ) -> None:  # fmt: skip
        """Set what is known without bars, as `GymEnv._describe`."""
        if render_mode is not None:
            raise ConfigError(
                f"render_mode={render_mode!r}: a batch is not drawn; draw one environment made "
                "with gymnasium.make."
            )
        expect("num_envs", num_envs, Integral, "a whole number")
        if num_envs < 1:
            raise ConfigError(f"num_envs={num_envs} is below 1.")
        self._source: Callable[[], Kernel] | None = source
        self.window, self.flatten = window, flatten
        self.num_envs, self.mode = num_envs, AutoresetMode(autoreset_mode)
        self.metadata = {"render_modes": [], "autoreset_mode": self.mode}
        self.single_action_space = action_space(spec)
        self.single_observation_space = observation_space(spec, window, flatten)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self._batch: Batch | None = None
        self._digest: str | None = None  # of the bars, once it was pickled
        self._shape = (num_envs, *(self.single_action_space.shape or ()))
        self._seeds: np.ndarray | None = None  # [n, 2], and the episodes' numbers in each [n]
        self._counts = np.zeros(num_envs, np.uint32)
        self._carried: Array | None = None
        self._words: np.ndarray | None = None
        self._over = np.zeros(num_envs, bool)

    @property
    def trading(self) -> TradingEnv:
        """The environment that is stepped."""
        return self._open().kernel.env

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle holds: the arguments, and the episodes where they stand."""
        carried = None if self._carried is None else np.asarray(self._carried)
        known = self._batch.kernel.env.bars.digest() if self._batch else self._digest
        return vars(self) | {"_batch": None, "_carried": carried, "_digest": known}

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Start all episodes, or those of `options["reset_mask"]` `[n]` bool."""
        batch, options = self._open(), dict(options or {})  # a copy: the mask is taken out of it
        mask = options.pop("reset_mask", None)
        which = np.ones(self.num_envs, bool) if mask is None else np.asarray(mask)
        if which.shape != (self.num_envs,) or which.dtype != bool or not which.any():
            raise ConfigError(
                f"reset_mask={mask!r} is not an array [{self.num_envs}] of bool with one True."
            )
        if self._carried is None and not which.all():
            raise ResetNeeded("reset all environments before some of them.")
        start = np.full(self.num_envs, start_row(self.trading, options), np.int32)
        self._draw(seed, which)
        seen, carried = batch.reset(self._seeds, self._counts, start)
        if self._carried is not None and not which.all():
            # All rows are begun and some are kept: another shape would compile another program.
            carried = jnp.where(which[:, None], carried, self._carried)
        self._carried = carried
        seen = np.asarray(seen)
        self._words = seen if self._words is None else np.where(which[:, None], seen, self._words)
        self._over = self._over & ~which
        return self._observed(self._words), self._info(self._words, which)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Move every environment to its next bar, in one compiled call."""
        batch = self._open()
        if self._carried is None:
            raise ResetNeeded("call reset() before the first step().")
        if self.mode is AutoresetMode.DISABLED and self._over.any():
            raise ResetNeeded(
                f"episodes of environments {np.flatnonzero(self._over).tolist()} are over; call "
                "reset(options={'reset_mask': ...})."
            )
        given = checked_actions(actions, self.trading.spec, self._shape)
        saw, next_, self._carried = batch.step(self._carried, given.reshape(self.num_envs, -1))
        saw, before = np.asarray(saw), self._over
        terminated, truncated = saw[:, 1] != 0, saw[:, 2] != 0
        self._over, self._words = terminated | truncated, saw
        info = {}
        if self.mode is AutoresetMode.NEXT_STEP:
            self._counts += before  # the device has begun these episodes in this step
        if self.mode is AutoresetMode.SAME_STEP and self._over.any():
            info = self._final(saw, self._over)
            self._counts += self._over
            self._words = np.asarray(next_)
        info |= self._info(self._words, np.ones(self.num_envs, bool))
        # float64, like the rewards of Gymnasium's own vector environments.
        reward = saw[:, 3].view(np.float32).astype(np.float64)
        return self._observed(self._words), reward, terminated, truncated, info

    def close_extras(self, **_: Any) -> None:
        """Free the environments, unless others share them; they cannot be stepped again."""
        self._batch = self._source = self._carried = None

    def _open(self) -> Batch:
        """Return the compiled steps, which are made where they are first needed."""
        if self._source is None:
            raise ClosedEnvironmentError("the environment was closed; make another.")
        refuse_fork()
        if self._batch is None:
            self._batch = Batch(unchanged(self._source(), self._digest), self.mode)
        return self._batch

    def _draw(self, seed: int | Sequence[int | None] | None, which: np.ndarray) -> None:
        """Move the environments in `which` to their next episode, or to new seeds."""
        one = int(seed) if isinstance(seed, Integral) else None
        # Seeds `np_random`, from which environments without a seed of their own draw theirs.
        super().reset(seed=one)
        seeds: Any = seed if one is None else range(one, one + self.num_envs)
        if seeds is not None and len(seeds) != self.num_envs:
            raise ConfigError(f"{len(seeds)} seeds for {self.num_envs} environments.")
        first = self._seeds is None
        if self._seeds is None:
            draws = [seed_words(self.np_random) for _ in range(self.num_envs)]
            self._seeds = np.stack(draws)
        # On the CPU a device array may be the host's own memory: never write into what was given.
        self._seeds, self._counts = self._seeds.copy(), self._counts + (which & (not first))
        for i, own in enumerate(() if seeds is None else seeds):
            if which[i] and own is not None:
                self._seeds[i], self._counts[i] = seed_words(seeding.np_random(int(own))[0]), 0

    def _observed(self, words: np.ndarray) -> Any:
        assert self._batch is not None
        # A copy: the caller may keep or change it, and the words are this environment's own.
        flat = words[:, self._batch.kernel.observation].view(np.float32).copy()
        return flat if self.flatten else split_observation(flat, self.trading.spec, self.window)

    def _info(self, words: np.ndarray, which: np.ndarray) -> dict[str, Any]:
        """Return the entries of `GymEnv`'s info, each with a mask of its environments."""
        rows, num = words[:, 0].astype(np.int64), self.trading.spec.num_assets
        account = words[:, -account_size(self.trading.spec) :].view(np.float32)
        values = {
            "equity": words[:, 4].view(np.float32).astype(np.float64),
            "time": self.trading.bars.time[rows],
            "row": rows,
            "weights": account[:, :num].copy(),
        }
        info = {}
        for name, value in values.items():
            # Gymnasium's form: every entry has all environments, and a mask says which are given.
            value[~which] = np.array("NaT", value.dtype) if value.dtype.kind == "M" else 0
            info |= {name: value, f"_{name}": which.copy()}
        return info

    def _final(self, words: np.ndarray, ended: np.ndarray) -> dict[str, Any]:
        """Return the final observations and infos of episodes that `ended` `[n]` in this step."""
        observations = self._observed(words)
        final = np.full(self.num_envs, None, dtype=object)
        for i in np.flatnonzero(ended):
            final[i] = jax.tree.map(lambda x, i=i: x[i].copy(), observations)
        masks = {"_final_obs": ended.copy(), "_final_info": ended.copy()}
        return {"final_obs": final, "final_info": self._info(words, ended), **masks}
