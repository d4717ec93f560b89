"""The environment for Gymnasium: `gymnasium.make("nca_trader/Trading-v0", ...)`.

Gymnasium 1 has no plugins that register on installation. The name exists once `nca_trader` and
gymnasium, or this module, are imported; the id
`"nca_trader.envs.gym.environment:nca_trader/Trading-v0"` imports it.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from numbers import Integral
from typing import Any

import gymnasium
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError, ResetNeeded

from nca_trader.cloud import CloudPath, place
from nca_trader.config import AccountConfig, EnvConfig
from nca_trader.config.account import gather_account
from nca_trader.config.extensions import FORGET
from nca_trader.config.ranges import expect
from nca_trader.data.bars import SAMPLES, read_bars, sample_bars
from nca_trader.envs import ID as ID
from nca_trader.envs import load_env, register
from nca_trader.envs.gym.packed import DRAWN, Kernel, account_size
from nca_trader.envs.trading import TradingEnv, expect_env
from nca_trader.errors import ConfigError, StateError
from nca_trader.markets import Task
from nca_trader.numerics import STARTED
from nca_trader.types import Bars, EnvSpec

DEFAULT_CONFIG, DEFAULT_BARS = "index_daily", "sp500"
NAMES = ("bars", "config", "window", "flatten", "render_mode", "env", "account")  # of arguments
LARGEST = float(np.finfo(np.float32).max)  # finite: Gymnasium's checker warns of infinite bounds

Path = str | os.PathLike[str]
Source = Bars | Task | Path | None

# Copies of an environment share bars, features and compiled steps, and free them with the last.
_ENVS: weakref.WeakValueDictionary[tuple, TradingEnv] = weakref.WeakValueDictionary()
_KERNELS: weakref.WeakValueDictionary[tuple, Kernel] = weakref.WeakValueDictionary()
FORGET.append(_ENVS.clear)


def refuse_fork() -> None:
    """Refuse to go on in a process that was forked from one in which this package used JAX.

    Raises:
      StateError: it was. JAX would wait there without end for threads that a fork does not copy.
    """
    if STARTED and STARTED[0] != os.getpid():
        raise StateError(
            "this process is a fork of one that has used JAX, which does not run in a fork; start "
            "it without one: AsyncVectorEnv(..., context='spawn')."
        )


def unchanged(kernel: Kernel, digest: str | None) -> Kernel:
    """Return a kernel whose bars have the digest of when an environment was pickled, if it was.

    Raises:
      StateError: its file was written again.
    """
    if digest is not None and kernel.env.bars.digest() != digest:
        raise StateError(
            f"{kernel.env.bars.source or 'the bars'} changed since this environment was pickled, "
            "so its episode cannot go on; make it again."
        )
    return kernel


def kernel_of(
    bars: Source, config: EnvConfig | Path, env: TradingEnv | None, window: int,
    on_device: bool, given: AccountConfig,
) -> Kernel:  # fmt: skip
    """Return the compiled steps for these arguments, shared by all callers with the same ones.

    Args:
      bars: as in `GymEnv`.
      config: as in `GymEnv`.
      env: as in `GymEnv`.
      window: T, bars of features in an observation.
      on_device: whether windows are gathered on the device.
      given: of the account, in the place of the environment's own.

    Raises:
      ConfigError, BarError: as `load_env`, `read_bars` and `TradingEnv`; a window below 1.
      StateError: as `refuse_fork`.
    """
    refuse_fork()
    if jnp.result_type(float) == np.float64:
        raise ConfigError(
            "environments of Gymnasium step in float32; unset JAX_ENABLE_X64 (the package computes "
            "in float64 by itself where it counts)."
        )
    expect("window", window, Integral, "a whole number of bars")
    if env is not None:
        expect_env(env, bars=bars, config=config)
    sources = Bars | Task | str | os.PathLike | CloudPath | None
    accepted = "Bars, a synthetic Task, a path, a sample's name or None"
    expect("bars", bars, sources, accepted)
    if window < 1:
        raise ConfigError(f"window={window} is below 1 bar; give at least 1.")
    if env is None:
        config = load_env(config, name="config").with_account(given)
        name = (_name_of(bars, config), config)
        env = _ENVS.get(name)
        if env is None:
            if bars is None:
                bars = None if config.market else sample_bars(DEFAULT_BARS)
            elif not isinstance(bars, Bars | Task):
                bars = sample_bars(str(bars)) if bars in SAMPLES else read_bars(bars)
            env = _ENVS[name] = TradingEnv(bars, config)
    elif given.given:
        what = ", ".join(given.given)
        raise ConfigError(f"env has an account of its own; leave out {what}, or give no env.")
    # The dropout mask is drawn on the device, so the host cannot gather these windows.
    on_device = on_device or env.config.feature_dropout > 0.0
    key = (id(env), window, on_device)  # the kernel keeps `env`, so that its id stays its own
    kernel = _KERNELS.get(key)
    if kernel is None:
        kernel = _KERNELS[key] = Kernel(env, window, on_device)
    return kernel


def _name_of(bars: Source, config: EnvConfig) -> tuple:
    if isinstance(bars, Task):
        return ("task", id(bars))
    if isinstance(bars, Bars):
        # By contents: equal bars that were read twice share one environment.
        return ("bars", bars.digest())
    if bars is None:
        return ("market",) if config.market else ("sample", DEFAULT_BARS)
    if bars in SAMPLES:
        return ("sample", bars)
    path = place(bars).resolve()
    if isinstance(path, CloudPath):
        return ("url", path, path.version() if path.is_file() else None)
    # Time and size are part of the name: a file that was written again is read again.
    stat = path.stat() if path.exists() else None
    return ("file", path, stat and (stat.st_mtime_ns, stat.st_size))


def action_space(spec: EnvSpec) -> spaces.Space:
    """Return `Discrete` for one asset, `MultiDiscrete` for several, `Box` for numbers."""
    if not spec.num_actions:
        low, high = spec.action_bounds
        return spaces.Box(low, high, (spec.num_assets,), np.float32)
    if spec.num_assets == 1:
        return spaces.Discrete(spec.num_actions)
    return spaces.MultiDiscrete([spec.num_actions] * spec.num_assets)


def observation_space(spec: EnvSpec, window: int, flatten: bool) -> spaces.Space:
    """Return a flat `Box`, or a `Dict` of "window" `[T, A, F]` and "account" `[2 A + 1 + M]`.

    M is the number of values of the reward's memory, 0 for most rewards (`rewards.num_shown`).
    Features have no bounds of their own, so the bounds are float32's.
    """
    shapes = {
        "window": (window, spec.num_assets, spec.num_features),
        "account": (account_size(spec),),
    }
    if flatten:
        size = sum(int(np.prod(shape)) for shape in shapes.values())
        return spaces.Box(-LARGEST, LARGEST, (size,), np.float32)
    boxes = ((name, spaces.Box(-LARGEST, LARGEST, shape)) for name, shape in shapes.items())
    return spaces.Dict(dict(boxes))


def split_observation(flat: np.ndarray, spec: EnvSpec, window: int) -> dict[str, np.ndarray]:
    """Split `[..., D]` into "window" `[..., T, A, F]` and "account" `[..., 2 A + 1 + M]`."""
    account = account_size(spec)
    shape = (*flat.shape[:-1], window, spec.num_assets, spec.num_features)
    return {
        "window": flat[..., :-account].reshape(shape),
        "account": flat[..., -account:].copy(),
    }


def checked_actions(action: Any, spec: EnvSpec, shape: tuple[int, ...]) -> np.ndarray:
    """Return `action` as an array of `shape` that the environment accepts.

    Raises:
      ConfigError: another shape, an action that does not exist, or a weight that is not finite.
    """
    if not spec.num_actions:
        # NaN means "no order" to the account; from an agent it is a fault, as infinity is. Bounds
        # are not checked, because weights beyond them are clipped.
        weights = np.asarray(action, np.float32)
        if weights.shape != shape or not np.isfinite(weights).all():
            raise ConfigError(f"action {action!r} is not an array {list(shape)} of finite numbers.")
        return weights
    actions = np.asarray(action)
    # Floats are refused: 1.7 cut to 1 would hide that an agent gives weights.
    if actions.shape != shape or actions.dtype.kind not in "iu":
        raise ConfigError(f"action {action!r} is not an array {list(shape)} of whole numbers.")
    if actions.min() < 0 or actions.max() >= spec.num_actions:
        raise ConfigError(
            f"action {action!r} is not in 0 to {spec.num_actions - 1}; see `action_space`."
        )
    return actions.astype(np.int32)


def start_row(env: TradingEnv, options: dict[str, Any] | None) -> int:
    """Return the row of `options["start"]`, a row or a date; `DRAWN` where there is none.

    Raises:
      ConfigError: an unknown option, or a start that leaves no warm-up or no bar to trade.
    """
    expect("options", options, dict | None, "a dict, e.g. {'start': 100}")
    options = options or {}
    if unknown := options.keys() - {"start"}:
        raise ConfigError(f"reset has no option {sorted(unknown)}; there is 'start'.")
    start = options.get("start")
    if start is None:
        return DRAWN
    row = int(start) if isinstance(start, int | np.integer) else env.bars.row(start, "start")
    first, last = env.spec.warmup, len(env) - 2  # the bar after the last start pays its reward
    if not first <= row <= last:
        time = env.bars.time.astype("datetime64[m]")
        raise ConfigError(
            f"start={start!r} is row {row}, outside rows {first} ({time[first]}, when the "
            f"features are warm) to {last} ({time[last]}); give a row or date between them."
        )
    return row


class GymEnv(gymnasium.Env):
    """One account in a market, for Gymnasium.

    The observation is the features of the last `window` bars `[T, A, F]`, flattened, then the
    account: weight held `[A]`, weight ordered `[A]`, cash `[1]`, as fractions of equity, and the
    reward's memory. `terminated` is bankruptcy, `truncated` the end of the data or of the episode:
    bootstrap there. The reward is that of `EnvConfig.reward`. `info` has "equity" (float, 1.0 at
    the episode's start), "time" (of the bar whose close was just seen), its "row", and "weights"
    `[A]`.

    `reset(seed=s)` is reproducible, `reset()` continues the same stream of episodes, and
    `reset(options={"start": row or date})` starts there.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(
        self,
        bars: Source = None,
        config: EnvConfig | Path = DEFAULT_CONFIG,
        window: int = 1,
        flatten: bool = True,
        render_mode: str | None = None,
        env: TradingEnv | None = None,
        account: AccountConfig | None = None,
        **settings: Any,
    ):
        """Make the environment; environments of the same arguments share bars and programs.

        Args:
          bars: bars, a path of a bar file, a sample's name ("sp500"), or a synthetic task; None is
            the market that `config` names, and the sample where it names none.
          config: an `EnvConfig`, a preset's name, or the path of a .toml file.
          window: T, bars of features in an observation.
          flatten: False gives a dict of "window" and "account" in place of one vector.
          render_mode: "rgb_array" keeps the episode's history, for `render`.
          env: a `TradingEnv` to step in place of one made from `bars` and `config`.
          account: what the account is given, in the place of the environment's own; an environment
            has neither `delay` nor `risk`.
          **settings: fields of `nca.AccountConfig` by name, in the place of the record.

        Raises:
          ConfigError, BarError: an argument is not valid.
          StateError: as `refuse_fork`.
        """
        given = gather_account(account, settings, NAMES)
        found = functools.partial(kernel_of, bars, config, env, window, False, given)
        kernel = found()
        self._describe(found, kernel.env.spec, window, flatten, render_mode)
        self._fill(kernel)

    def _describe(
        self, source: Callable[[], Kernel], spec: EnvSpec, window: int, flatten: bool,
        render_mode: str | None,
    ) -> None:  # fmt: skip
        """Set what is known without bars; `source` makes the kernel, here or in another process."""
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ConfigError(f"render_mode={render_mode!r} is not offered; take 'rgb_array'.")
        self._source: Callable[[], Kernel] | None = source
        self.kernel: Kernel | None = None
        self._digest: str | None = None  # of the bars, once it was pickled
        self.window, self.flatten, self.render_mode = window, flatten, render_mode
        self.action_space = action_space(spec)
        self.observation_space = observation_space(spec, window, flatten)
        self._shape = () if isinstance(self.action_space, spaces.Discrete) else (spec.num_assets,)
        self._row_size = spec.num_assets * spec.num_features
        self._windows = None
        self._seed, self._count = None, 0
        self._words = None
        self._over = False
        self._orders = None  # for one asset: an array on the device for each action
        self._history: list[tuple[int, float, np.ndarray]] = []

    @property
    def trading(self) -> TradingEnv:
        """The environment that is stepped."""
        return self._open().env

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle holds: the arguments, and the episode where it stands."""
        words = None if self._words is None else np.asarray(self._words)
        known = self.kernel.env.bars.digest() if self.kernel else self._digest
        made = dict.fromkeys(("kernel", "_windows", "_orders"))
        return vars(self) | made | {"_words": words, "_digest": known}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; see the class."""
        # Gymnasium takes no whole number of numpy's.
        super().reset(seed=None if seed is None else int(seed))
        kernel = self._open()
        start = start_row(kernel.env, options)
        # The number of the episode and not a state of a generator: episode n of a seed is the same
        # however long the ones before it were.
        if seed is not None or self._seed is None:
            self._seed, self._count = seed_words(self.np_random), 0
        else:
            self._count += 1
        self._words = kernel.reset(self._seed, self._count, start)
        self._history = []
        observation, _, _, _, info = self._read()
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Order the target of `action` and move to the next bar; see the class."""
        if self._over or self._words is None:
            raise ResetNeeded("the episode is over; call reset() before the next step().")
        kernel, known = self._open(), isinstance(action, int | np.integer)
        if known and self._orders is not None and 0 <= action < len(self._orders):
            order = self._orders[action]  # without the 5 us of a check of arrays
        else:
            spec = kernel.env.spec
            order = checked_actions(action, spec, self._shape).reshape(spec.num_assets)
        self._words = kernel.step(self._words, order)
        return self._read()

    def render(self) -> np.ndarray | None:
        """Return `[H, W, 3]` uint8: prices, weights held, and equity next to buy and hold."""
        if self.render_mode is None:
            gymnasium.logger.warn("render() without render_mode; make it with 'rgb_array'.")
            return None
        if not self._history:
            raise ResetNeeded("call reset() before render().")
        rows, equity, weights = zip(*self._history, strict=True)
        return picture(self.trading.bars, np.array(rows), np.array(equity), np.array(weights))

    def close(self) -> None:
        """Free the environment, unless others share it; it cannot be stepped again."""
        self.kernel = self._source = self._words = self._windows = None
        self._history = []

    def _open(self) -> Kernel:
        """Return the kernel, which is made where it is first needed."""
        if self._source is None:
            raise ClosedEnvironmentError("the environment was closed; make another.")
        refuse_fork()
        return self.kernel or self._fill(unchanged(self._source(), self._digest))

    def _fill(self, kernel: Kernel) -> Kernel:
        self.kernel = kernel
        # `[(T - 1 + N) A F]` features of all bars, zeros before the first: a window is one slice.
        if not kernel.on_device:
            features, before = kernel.env.features, self.window - 1
            if before:
                zeros = np.zeros((before, *features.shape[1:]), np.float32)
                features = np.concatenate([zeros, features])
            self._windows = features.ravel()
        if isinstance(self.action_space, spaces.Discrete):
            self._orders = list(jnp.arange(kernel.env.spec.num_actions, dtype=jnp.int32)[:, None])
        return kernel

    def _read(self) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Return the newest row's words in the form of Gymnasium's `step`."""
        assert self.kernel is not None
        # One read of the device for everything: the time of a step is that of calls and reads.
        words = np.asarray(self._words)
        row, terminated, truncated = words[:3].tolist()
        floats = words[: self.kernel.seen].view(np.float32)
        reward, equity = floats[3:5].tolist()
        seen = floats[self.kernel.observation]
        if self._windows is not None:
            size = self._row_size
            window = self._windows[row * size : (row + self.window) * size]
            flat = np.concatenate((window, seen))
        else:
            flat = seen.copy()  # the words are read-only, and callers may write into observations
        env = self.kernel.env
        spec = env.spec
        # The account ends the observation, and begins with the weights held.
        weights = flat[-account_size(spec) :][: spec.num_assets].copy()
        info = {
            "equity": equity, "time": env.bars.time[row], "row": row, "weights": weights
        }  # fmt: skip
        self._over = bool(terminated or truncated)
        if self.render_mode is not None:
            self._history.append((row, equity, weights))
        seen = flat if self.flatten else split_observation(flat, spec, self.window)
        return seen, reward, bool(terminated), bool(truncated), info


def seed_words(generator: np.random.Generator) -> np.ndarray:
    """Draw `[2]` uint32, the seed of a stream of episodes."""
    return generator.integers(0, 2**32, 2, dtype=np.uint32)


WIDTH, HEIGHT, DPI = 960, 640, 100  # pixels
BARS_BEFORE = 60  # shown before an episode's first bar, so that its start has a past
AGENT, MARKET, LONG, SHORT = "#1f5fbf", "#8a8f98", "#2a9d5c", "#d1495b"


def picture(bars: Bars, rows: np.ndarray, equity: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Draw an episode: prices, the weights held, and equity next to buy and hold.

    Args:
      bars: of the environment.
      rows: `[n]` bars whose closes were seen, in order.
      equity: `[n]`, 1 at the first.
      weights: `[n, A]` held at those closes.

    Returns:
      `[HEIGHT, WIDTH, 3]` uint8; the same episode gives the same pixels.
    """
    # Here and not at the top: matplotlib takes a second, and few callers draw.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
    from matplotlib.figure import Figure

    # Not through pyplot, which would open a window toolkit and keep every figure.
    figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [3, 1.2, 2]})
    prices, held, result = panels
    one = bars.num_assets == 1

    seen = slice(max(int(rows[0]) - BARS_BEFORE, 0), int(rows[-1]) + 1)
    # Several assets are drawn relative to the episode's start: the dearest would hide the others.
    close = bars.close[seen] if one else bars.close[seen] / bars.close[rows[0]]
    for i, symbol in enumerate(bars.symbols):
        color = MARKET if one else f"C{i % 10}"
        prices.plot(bars.time[seen], close[:, i], color=color, linewidth=1.2, label=symbol)
    start = float(date2num(bars.time[rows[0]]))
    prices.axvline(start, color="black", linewidth=0.8, linestyle=":")
    prices.set_ylabel("close" if one else "close / first")
    prices.set_title(f"{bars.time[rows[-1]].astype('datetime64[m]')} UTC", loc="left", fontsize=10)
    if bars.num_assets <= 10:
        prices.legend(loc="upper left", fontsize=8, frameon=False, ncols=5)

    time = bars.time[rows]
    for i in range(bars.num_assets):
        if one:
            for side, color in ((np.maximum, LONG), (np.minimum, SHORT)):
                area = side(weights[:, 0], 0.0)
                held.fill_between(time, area, step="post", color=color, linewidth=0)
        else:
            held.step(time, weights[:, i], where="post", color=f"C{i % 10}", linewidth=1.2)
    held.axhline(0.0, color="black", linewidth=0.6)
    held.set_ylabel("weight held")

    # Equal weights, bought at the first close and held.
    bought = np.nanmean(bars.close[rows] / bars.close[rows[0]], axis=1)
    label = f"buy and hold, no costs: {bought[-1] - 1:+.1%}"
    result.plot(time, bought, color=MARKET, linewidth=1.2, label=label)
    result.plot(time, equity, color=AGENT, linewidth=1.6, label=f"agent: {equity[-1] - 1:+.1%}")
    result.axhline(1.0, color="black", linewidth=0.6)
    result.set_ylabel("equity")
    result.legend(loc="upper left", fontsize=8, frameon=False)

    for axes in panels:
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    locator = AutoDateLocator()
    result.xaxis.set_major_locator(locator)
    result.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


register()
