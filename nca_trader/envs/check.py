"""Checks of the properties that every environment has: `nca.check_env(env_or_config)`.

The first half also serves `agents.check` and `paper.check`: reports, comparisons of pytrees, and
what every jitted function has to be: pure, of stable types, and traced once.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.config import EnvConfig
from nca_trader.config.extensions import split_frame
from nca_trader.data.bars import sample_bars
from nca_trader.envs import load_env
from nca_trader.envs.actions import every_action, to_target
from nca_trader.envs.trading import EnvState, TimeStep, TradingEnv, episode_length, expect_env
from nca_trader.errors import CheckFailed
from nca_trader.types import Bars, EnvSpec

NUM_BARS = 400  # of the sample, where no bars are given
CLOSE = 1e-5  # float32 results of one formula, compiled in two ways


class Check(NamedTuple):
    """The result of one check.

    name: the property. fault: what was seen instead; "" where the property holds.
    skipped: why it does not apply here; "" where it was checked.
    """

    name: str = ""
    fault: str = ""
    skipped: str = ""


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """The checks of one environment or policy; `str` gives one line per check."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every property that was checked holds."""
        return not any(check.fault for check in self.checks)

    @property
    def faults(self) -> tuple[str, ...]:
        """The names of the checks that failed."""
        return tuple(check.name for check in self.checks if check.fault)

    def raise_if_failed(self) -> None:
        """Raise `CheckFailed` with one line per fault."""
        if not self.passed:
            lines = (f"{check.name}: {check.fault}" for check in self.checks if check.fault)
            raise CheckFailed(*lines)

    def __str__(self) -> str:
        lines = []
        for name, fault, skipped in self.checks:
            word = "skipped" if skipped else "FAILED" if fault else "ok"
            reason = skipped or fault
            lines.append(f"{word:<8} {name}" + (f": {reason}" if reason else ""))
        return "\n".join(lines)


class EnvTrace(NamedTuple):
    """An episode of L steps: actions `[L, A]`, time steps `[L]`, and the first time step."""

    first: TimeStep
    actions: Array
    steps: TimeStep


def check_env(
    env: TradingEnv | EnvConfig | str | pathlib.Path,
    bars: Bars | None = None,
    seed: int = 0,
    only: Collection[str] | None = None,
) -> CheckReport:
    """Run an environment with random actions and check the properties of every environment.

    Args:
      env: an environment; or a config, a preset's name, or the path of a TOML file.
      bars: for a config; None draws the market that it names, or takes some of the sample bars.
      seed: of the keys and actions.
      only: names of the checks to run; None runs all.

    Returns:
      A `CheckReport`; `report.raise_if_failed()` raises `CheckFailed`.

    Raises:
      BarError, ConfigError: the config and these bars do not make an environment.

    Example:
      >>> import nca_trader as nca
      >>> config = nca.EnvConfig(features=("return_1",), episode_bars=16)
      >>> bars = nca.sample_bars("sp500")[:200]
      >>> print(nca.check_env(config, bars, only=["a window is what was seen"]))
      ok       a window is what was seen
    """
    if not isinstance(env, TradingEnv):
        env = load_env(env)
        if bars is None and not env.market:
            bars = sample_bars("sp500")[:NUM_BARS]
        env = TradingEnv(bars, env)
    expect_env(env)
    return report_of(CHECKS, _Run(env, seed), only)


class _Run:
    """An environment and its episodes, computed once and shared by the checks."""

    def __init__(self, env: TradingEnv, seed: int):
        self.env, self.length = env, episode_length(env.market)
        # Programs are compiled once here: every check would compile the step again.
        self.keys = jax.random.split(jax.random.key(seed), 3)
        (self.reset, self.begun), (self.step, self.stepped) = (
            count_traces(env.reset),
            count_traces(env.step),
        )

    @functools.cached_property
    def start(self) -> tuple[EnvState, TimeStep]:
        return self.reset(self.keys[0])

    @functools.cached_property
    def action(self) -> Array:
        """`[A]` a random action."""
        return random_actions(self.env, self.keys[1], 1)[0]

    def episode(self, key: Array) -> EnvTrace:
        """Return a whole episode of random actions; traced."""
        reset_key, action_key = jax.random.split(key)
        state, first = self.env.reset(reset_key)
        actions = random_actions(self.env, action_key, self.length)
        _, steps = jax.lax.scan(self.env.step, state, actions)
        return EnvTrace(first, actions, steps)

    @functools.cached_property
    def traces(self) -> EnvTrace:
        """Episodes of three keys, batched."""
        return jax.tree.map(np.asarray, jax.jit(jax.vmap(self.episode))(self.keys))


def random_actions(env: TradingEnv, key: Array, num: int) -> Array:
    """Draw `[num, A]` actions, uniformly."""
    shape, spec = (num, env.spec.num_assets), env.spec
    if not spec.num_actions:
        low, high = spec.action_bounds
        return jax.random.uniform(key, shape, minval=low, maxval=high)
    return jax.random.randint(key, shape, 0, spec.num_actions)


def report_of(
    checks: Sequence[Callable[[Any], str | Check | None]], run: Any, only: Collection[str] | None
) -> CheckReport:
    """Run the checks of these names on `run`, or all of them where `only` is None."""
    chosen = (check for check in checks if only is None or name_of(check) in only)
    return CheckReport(tuple(checked(check, run) for check in chosen))


def name_of(check: Callable) -> str:
    """Return the name of a check: its function's name in words."""
    return check.__name__.replace("_", " ")


def checked(check: Callable[[Any], str | Check | None], run: Any) -> Check:
    """Run a check, which returns or raises a fault, or returns "" or a `Check` without a name."""
    name = name_of(check)
    try:
        found = check(run)
    except CheckFailed as error:
        return Check(name, str(error))
    except Exception as error:  # an environment that raises has failed the check
        return Check(name, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    return found._replace(name=name) if isinstance(found, Check) else Check(name, found or "")


def difference(one: Any, other: Any, tolerance: float = 0.0) -> str:
    """Return where two pytrees of arrays differ by more than `tolerance`; "" where they do not."""
    if jax.tree.structure(one) != jax.tree.structure(other):
        return "the results have different fields"
    for name, a, b in _leaves(one, other):
        a, b = _plain(a), _plain(b)
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {a.dtype}{a.shape}, then {b.dtype}{b.shape}"
        # NaN equals NaN here: whether numbers are finite is a check of its own.
        near = np.isclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
        if not near.all():
            at = tuple(np.argwhere(~near)[0])
            return f"{name} is {a[at]}, then {b[at]}"
    return ""


def _leaves(one: Any, other: Any) -> list[tuple[str, Any, Any]]:
    """Return the name and both leaves of each place of two pytrees of one structure."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True)
    return [(jax.tree_util.keystr(path), a, b) for (path, a), b in pairs]


def retyped(before: Any, after: Any) -> str:
    """Return where a pytree cannot be the carry of a scan that returns `after`; "" where it can."""
    if jax.tree.structure(before) != jax.tree.structure(after):
        return "the state has another structure afterwards"
    for name, a, b in _leaves(before, after):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"state{name} is {a.dtype}{a.shape}, then {b.dtype}{b.shape}"
    return ""


def impure(function: Callable, *args: Any) -> str:
    """Return where two calls of a function differ; "" where they do not."""
    # Not compiled: a trace would freeze the state of an impure function.
    return difference(function(*args), function(*args))


def count_traces(function: Callable) -> tuple[Callable, list[Any]]:
    """Return the jitted function, and a list with the shapes of its arguments at each trace."""
    traces = []

    def call(*args: Any) -> Any:
        # Under `jit` this runs once for each trace, not for each call.
        traces.append(jax.tree.map(jnp.shape, args))
        return function(*args)

    return jax.jit(call), traces


def retraced(name: str, traces: Sequence[Any], most: int = 1) -> str:
    """Return that a function `name` was traced more than `most` times; "" where it was not."""
    return f"{name} is traced {len(traces)} times, not {most}" if len(traces) > most else ""


def _plain(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # numpy cannot hold a typed key
        return np.asarray(jax.random.key_data(x))
    return np.asarray(x)


def shapes_and_types_are_as_documented(run: _Run) -> str:
    """Check the shapes and types of a time step, and that `reset` gives no reward."""
    _, timestep = run.start
    num, observation = run.env.spec.num_assets, timestep.observation
    account = observation.account
    for name, value, shape, kind in (
        ("observation.index", observation.index, (), "i"),
        ("reward", timestep.reward, (), "f"),
        ("discount", timestep.discount, (), "f"),
        ("truncated", timestep.truncated, (), "b"),
        ("account.log_equity", account.log_equity, (), "f"),
        ("account.weight", account.weight, (num,), "f"),
        ("account.ordered", account.ordered, (num,), "f"),
    ):
        if value.shape != shape or value.dtype.kind != kind:
            return f"{name} is {value.dtype}{value.shape} where kind {kind!r} {shape} is expected"
    if timestep.reward != 0.0 or timestep.discount != 1.0 or timestep.truncated:
        return "reset gives a reward, or an episode that has ended"
    window = run.env.window(observation, 3)
    expected = (3, num, run.env.spec.num_features)
    return "" if window.shape == expected else f"window is {window.shape}, not {expected}"


def steps_keep_every_shape_and_type(run: _Run) -> str:
    """Check that a state can be the carry of a scan."""
    before = jax.eval_shape(run.env.reset, run.keys[0])
    return retyped(before, jax.eval_shape(run.env.step, before[0], run.action))


def the_same_call_gives_the_same_result(run: _Run) -> str:
    """Check that `reset` and `step` are pure."""
    return impure(run.env.step, run.start[0], run.action) or impure(run.env.reset, run.keys[0])


def nothing_is_traced_twice(run: _Run) -> str:
    """Check that an episode's steps, and resets with several keys, compile one program each."""
    for key in run.keys:
        state, _ = run.reset(key)
        for _ in range(2):  # the second takes a state that a step returned
            state, _ = run.step(state, run.action)
    return retraced("reset", run.begun) or retraced("step", run.stepped)


def compiled_equals_not_compiled(run: _Run) -> str:
    """Check that `jax.jit` does not change a step."""
    state, _ = run.start
    return difference(run.step(state, run.action), run.env.step(state, run.action), CLOSE)


def batched_equals_one_by_one(run: _Run) -> str:
    """Check that `jax.vmap` and `jax.lax.scan` do not change an episode."""
    trace = jax.tree.map(lambda x: x[0], run.traces)
    reset_key, _ = jax.random.split(run.keys[0])  # as `_Run.episode` does
    state, _ = run.reset(reset_key)
    for t in range(min(run.length, 20)):
        state, timestep = run.step(state, trace.actions[t])
        if fault := difference(timestep, jax.tree.map(lambda x, t=t: x[t], trace.steps), CLOSE):
            return f"step {t}: {fault}"
    return ""


def a_key_decides_the_episode(run: _Run) -> str:
    """Check that equal keys give equal episodes, and different keys different ones."""
    if fault := difference(run.reset(run.keys[0]), run.reset(run.keys[0])):
        return f"the same key gives two episodes: {fault}"
    # An environment of one full-length episode without draws has only one: nothing to compare.
    config, env = run.env.config, run.env
    draws = episode_length(env.market) < len(env) - 1 - env.spec.warmup or config.random_start
    if not (draws or config.feature_dropout or config.random_costs):
        return ""
    keys = jax.random.split(run.keys[1], 16)
    states, _ = jax.jit(jax.vmap(env.reset))(keys)
    drawn = states._replace(key=None)  # the next episode's key always differs
    same = [(_plain(x) == _plain(x)[:1]).all() for x in jax.tree.leaves(drawn)]
    return "16 keys give the same episode" if all(same) else ""


def rewards_and_equity_are_finite(run: _Run) -> str:
    """Check for NaN and infinity."""
    steps = run.traces.steps
    for name, values in (
        ("reward", steps.reward),
        ("log_equity", steps.observation.account.log_equity),
        ("weight", steps.observation.account.weight),
    ):
        if not np.isfinite(values).all():
            return f"{name} is not finite at step {np.argwhere(~np.isfinite(values))[0][1]}"
    return ""


def reward_is_the_difference_of_log_equity(run: _Run) -> str | Check:
    """Check the reward "log_return" against the account."""
    if run.env.config.reward != "log_return":
        return Check(skipped=f"the reward is {run.env.config.reward!r}")
    first, steps = run.traces.first, run.traces.steps
    before, after = _log_equity(first)[:, None], _log_equity(steps)
    expected = np.diff(np.concatenate([before, after], axis=1), axis=1)
    wrong = ~np.isclose(steps.reward, expected, rtol=0, atol=CLOSE)
    if not wrong.any():
        return ""
    at = tuple(np.argwhere(wrong)[0])
    return f"step {at[1]} paid {steps.reward[at]:.6g}, equity moved {expected[at]:.6g}"


def _log_equity(timestep: TimeStep) -> np.ndarray:
    """Return log-equity in float64, from the pair of `Account`: `exp(high) (1 + low)`."""
    account = timestep.observation.account
    high, low = (np.asarray(x, np.float64) for x in (account.log_equity, account.log_equity_low))
    return high + np.log1p(low)


def an_episode_goes_bar_by_bar_to_its_last(run: _Run) -> str:
    """Check the rows of an episode and where it is truncated."""
    first, steps = run.traces.first.observation.index, run.traces.steps
    if (steps.observation.index != first[:, None] + 1 + np.arange(run.length)).any():
        return "the index does not move one bar per step"
    if first.min() < run.env.spec.warmup or (first + run.length).max() > len(run.env) - 1:
        return f"an episode leaves rows {run.env.spec.warmup} to {len(run.env) - 1}"
    ended, bankrupt = steps.truncated, steps.discount == 0.0
    if (ended & bankrupt).any():
        return "a step both ruins and truncates"
    if ended[:, :-1].any():
        return f"truncated after {np.argwhere(ended)[0][1] + 1} steps of {run.length}"
    late = ~ended[:, -1] & ~bankrupt.any(1)
    return f"not truncated at the last of {run.length} steps" if late.any() else ""


def a_window_is_what_was_seen(run: _Run) -> str | Check:
    """Check that a window ends at the bar of its observation."""
    if run.env.config.feature_dropout:
        return Check(skipped="every episode hides other features")
    observation, length = run.start[1].observation, 5
    row = int(observation.index)
    rows = np.arange(row - length + 1, row + 1)
    # From the host's features and not through the market: a second derivation of the same window.
    expected = np.where((rows >= 0)[:, None, None], run.env.features[np.maximum(rows, 0)], 0.0)
    return difference(np.asarray(run.env.window(observation, length)), expected)


def ruin_ends_an_account_for_good(run: _Run) -> str | Check:
    """Check, in a crash, that a bankrupt account stops without being truncated."""
    config, spec = run.env.config, run.env.spec
    # A price cannot fall below 0, so only a short or a borrowed position loses more than equity.
    short = spec.bounds[0] < 0.0
    gross = min(abs(spec.bounds[1]) * spec.num_assets, config.max_gross or np.inf)
    least = 1e-6  # of the price before; a price cannot fall to nothing
    if not short and (
        gross < 1.0 - config.ruin_floor or (gross <= 1.0 and config.ruin_floor < least)
    ):
        return Check(skipped="long without borrowing, this account cannot fall to its floor")
    # The bars below are of a day, which no slower time frame is longer than.
    features = tuple(name for name in config.features if not split_frame(name)[0]) or ("return_1",)
    # Bars of our own take the place of the market, so the settings of the market must be defaults:
    # a config refuses what has no effect.
    changes = {"market": "", "market_bars": type(config).market_bars, "features": features}
    changes |= {"sessions": type(config).sessions, "random_start": False, "episode_bars": None}
    config = dataclasses.replace(config, **changes, feature_dropout=0.0)
    price = 100.0
    if config.capital is not None and config.lot:  # at which the position is a hundred lots
        price = min(price, config.capital * spec.bounds[1] / (100.0 * config.lot))
    # Prices hardly move, then crash (or soar, for shorts) over a gap 20 bars before their end.
    rows = spec.warmup + 130
    close = np.full((rows, len(spec.symbols)), price)
    close *= 1.0 + 1e-4 * (np.arange(rows)[:, None] % 2)
    close[-20:] *= 1.0 / least if short else 0.1 * max(config.ruin_floor, least)
    bars = Bars(
        time=np.datetime64("2000-01-01", "ns") + np.arange(rows) * np.timedelta64(1, "D"),
        symbols=spec.symbols,
        open=close,
        high=close,
        low=close,
        close=close,
        volume=np.full(close.shape, 1e12),  # so that no usual participation limit binds
        present=np.ones(close.shape, bool),
        source="a crash",
    )
    env = TradingEnv(bars, config)
    action = _most_extreme(spec, short)
    if action is None:
        return Check(skipped="no action orders the whole position from flat")
    actions = jnp.full((len(env) - 1 - env.spec.warmup, spec.num_assets), action)
    state, _ = env.reset(run.keys[0])
    _, steps = jax.jit(lambda s, a: jax.lax.scan(env.step, s, a))(state, actions)
    bankrupt = np.asarray(steps.discount) == 0.0
    equity = np.exp(_log_equity(steps))
    if not bankrupt.any():
        return f"equity fell to {equity.min():.3g}, and the discount stays 1"
    after = np.flatnonzero(bankrupt)[0]
    if not bankrupt[after:].all() or np.ptp(equity[after:]) > 0.0:
        return "an account trades after its bankruptcy"
    return "a bankrupt account is truncated" * bool(steps.truncated[after:].any())


def _most_extreme(spec: EnvSpec, short: bool) -> Array | None:
    """Return `[]` the action that reaches the lowest or highest weight from flat; None without."""
    for action in every_action(spec):
        ordered, each = jnp.zeros(spec.num_assets), jnp.full(spec.num_assets, action)
        for _ in range(20):
            ordered = to_target(spec, each, ordered)
        if np.allclose(ordered, spec.bounds[0 if short else 1]):
            return action
    return None


def gymnasium_takes_it(run: _Run) -> str:
    """Run the checks of Gymnasium itself."""
    # Gymnasium takes 0.2 s to import, which other checks need not.
    from gymnasium.utils.env_checker import check_env as check_gymnasium

    from nca_trader.envs.gym.environment import GymEnv

    # Gymnasium only warns of most faults, so a warning is a fault here. Bounds beyond 1 come from
    # the config and are not one.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*For Box action spaces, we recommend")
        warnings.filterwarnings("ignore", ".*Not able to test alternative render modes")
        check_gymnasium(GymEnv(env=run.env), skip_render_check=True)
    return ""


CHECKS = (
    shapes_and_types_are_as_documented,
    steps_keep_every_shape_and_type,
    the_same_call_gives_the_same_result,
    nothing_is_traced_twice,
    compiled_equals_not_compiled,
    batched_equals_one_by_one,
    a_key_decides_the_episode,
    rewards_and_equity_are_finite,
    reward_is_the_difference_of_log_equity,
    an_episode_goes_bar_by_bar_to_its_last,
    a_window_is_what_was_seen,
    ruin_ends_an_account_for_good,
    gymnasium_takes_it,
)
