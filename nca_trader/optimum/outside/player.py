"""The program of the process in which `nca-trader prove --agent` plays an agent from outside.

`PYTHON player.py DESCRIPTOR` also runs with another Python than ours, e.g. one that has torch: it
needs numpy, and what the agent itself needs. Messages are bytes over a connection of its own, and
the caller unpickles none of them:

caller                                                  answer
JSON: what to load, see `entry.OutsideAgent`                   JSON of facts, or {"error": text}
4 bytes, not 0: forget; then float32 `[B, D]`           b"A" and int32 or float32 `[B]` or `[B, A]`,
                                                        or b"E" and a text
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import os
import pickle
import runpy
import signal
import sys
import time
import traceback
import zipfile
from collections.abc import Callable
from importlib import import_module, metadata
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

Act = Callable[[np.ndarray, Any], tuple[Any, Any]]  # (observations, memory) -> (actions, memory)
Facts = dict[str, Any]
DIE_WITH_PARENT, ADOPT, GAIN_NOTHING = 1, 36, 38  # of prctl on Linux
LOOK, PATIENCE = 0.05, 8.0  # seconds between two looks, and to end what it started
LONGEST = 4_000  # characters of an error
# By its path: this Python may lack the package.
SB3_MODEL = os.path.join(os.path.dirname(__file__), "..", "..", "envs", "sb3_model.py")
MASKED = "sb3_contrib.common.maskable.policies"
# Classes of Stable-Baselines3 and sb3-contrib by the module of their policies.
OF_POLICIES = {
    "stable_baselines3.common.policies": "stable_baselines3:PPO",
    "stable_baselines3.dqn.policies": "stable_baselines3:DQN",
    "stable_baselines3.sac.policies": "stable_baselines3:SAC",
    "stable_baselines3.td3.policies": "stable_baselines3:TD3",
    "sb3_contrib.common.recurrent.policies": "sb3_contrib:RecurrentPPO",
    "sb3_contrib.qrdqn.policies": "sb3_contrib:QRDQN",
    "sb3_contrib.tqc.policies": "sb3_contrib:TQC",
}


def load_function(entry: dict[str, Any]) -> tuple[Act, Facts]:
    """Load `FILE.py:NAME`, a function of observations `[B, D]`, and of `memory` where it asks."""
    (file,), member = entry["files"], entry["member"]
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    # From its source: bytecode next to it may be of other code.
    names = runpy.run_path(file, run_name="agent")
    if member not in names:
        raise LookupError(f"{file} has no function {member!r}; check the name")
    if not callable(function := names[member]):
        kind = type(function).__name__
        raise LookupError(f"{member!r} of {file} is of type {kind}; name a function")
    if "memory" not in inspect.signature(function).parameters:
        return lambda seen, memory: (function(seen), None), {"memory": False}

    def act(seen: np.ndarray, memory: Any) -> tuple[Any, Any]:
        answer = function(seen, memory)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise TypeError(f"{member} takes a memory; return actions and memory")
        return answer

    return act, {"memory": True}


def load_run(entry: dict[str, Any]) -> tuple[Act, Facts]:
    """Load a run folder or an exported file of this package."""
    # jax and this package, which the Python of another kind of agent may lack.
    from nca_trader.errors import options_named
    from nca_trader.optimum.outside.run_player import load

    # Its refusals are read where the caller's are.
    with options_named() if entry["in_a_command"] else contextlib.nullcontext():
        return load(entry["files"][0], entry["allow_code"])


def load_sb3(entry: dict[str, Any]) -> tuple[Act, Facts]:
    """Load a model of Stable-Baselines3 or sb3-contrib, and the VecNormalize that it saw through.

    Its class is found from the JSON in the file, before anything is unpickled.
    """
    with zipfile.ZipFile(entry["files"][0]) as archive:
        about = json.loads(archive.read("data"))
    module = about["policy_class"]["__module__"]
    if module == MASKED:
        raise LookupError(
            "its file does not hold the masks of its actions; give FILE.py:NAME, a function that "
            "loads the model and gives its predict the action_masks"
        )
    known = OF_POLICIES.get(module)
    if known == "stable_baselines3:PPO" and "n_epochs" not in about:
        known = None if "cg_damping" in about else "stable_baselines3:A2C"  # TRPO has the same one
    if known is None:
        names = ", ".join(name.partition(":")[2] for name in OF_POLICIES.values())
        raise LookupError(f"its policy is of {module}; give a model of A2C, {names}")
    package, name = known.split(":")
    library = imported(package, package.replace("_", "-"))
    imported("torch", "torch").set_num_threads(1)  # for networks of this size more are slower
    model = getattr(library, name).load(entry["files"][0], device="cpu")
    normalised = None
    if len(entry["files"]) > 1:
        with open(entry["files"][1], "rb") as file:
            normalised = pickle.load(file)
    play, size = runpy.run_path(SB3_MODEL), entry["observation"]
    frames = play["frames_of"](model, size, entry["assets"])
    give = f"give {os.path.basename(entry['files'][0])},VECNORMALIZE.pkl, which its save writes"
    # Of other observations than the market's it plays nothing, and the caller says so.
    act = play["act_of"](model, size, frames, normalised, give) if frames else model.predict
    return act, {
        "library": package,
        "version": library.__version__,
        "name": name,
        "observation": size if frames else int(np.prod(model.observation_space.shape or 0)),
        "space": str(model.action_space),
        "memory": name == "RecurrentPPO" or frames > 1,
        "steps": int(model.num_timesteps),
    }


def load_rejax(entry: dict[str, Any]) -> tuple[Act, Facts]:
    """Load the pickled `(algorithm, train_state)` of rejax; it acts greedily where it can."""
    imported("rejax", "rejax")
    jax = imported("jax", "jax")
    with open(entry["files"][0], "rb") as file:
        algorithm, state = pickle.load(file)
    space = algorithm.env.action_space(algorithm.env_params)
    shown = algorithm.env.observation_space(algorithm.env_params)
    discrete = hasattr(space, "n")
    actor: Any = getattr(algorithm, "actor", None)
    # PPO draws its actions. Its most probable one is the mode of the same distribution, within the
    # bounds to which it clips; policies that squash have none.
    most_probable = hasattr(actor, "_action_dist") and type(algorithm).__name__ == "PPO"

    def best(seen: Any, key: Any) -> Any:
        if algorithm.normalize_observations:
            seen = algorithm.normalize_obs(state.obs_rms_state, seen)
        found = actor.apply(state.actor_ts.params, seen[None], method="_action_dist").mode()[0]
        return found if discrete else jax.numpy.clip(found, space.low, space.high)

    one = best if most_probable else algorithm.make_act(state)
    step = jax.jit(jax.vmap(one))

    def act(seen: np.ndarray, memory: Any) -> tuple[Any, Any]:
        key, now = jax.random.split(jax.random.key(0) if memory is None else memory)
        actions = np.asarray(step(seen, jax.random.split(now, len(seen))))
        return actions.reshape(len(seen), -1), key

    if not discrete:  # in float32, as Gymnasium writes its spaces: 9.1 and not 9.100000381469727
        low, high = (str(np.float32(edge)) for edge in (np.min(space.low), np.max(space.high)))
    return act, {
        "library": "rejax",
        "version": metadata.version("rejax"),
        "name": type(algorithm).__name__,
        "observation": int(np.prod(shown.shape)),
        "space": f"Discrete({space.n})"
        if discrete
        else f"Box({low}, {high}, {space.shape}, float32)",
        "memory": False,
        "greedy": most_probable or type(algorithm).__name__ == "TD3",
        "steps": int(state.global_step),
    }


def imported(name: str, package: str) -> Any:
    """Import a library that the agent needs.

    Raises:
      LookupError: this Python does not have it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise LookupError(
            f"needs {error.name}, which {sys.executable} does not have; pip install {package}, or "
            "give another Python (option python)"
        ) from None


LOADERS: dict[str, Callable[[dict[str, Any]], tuple[Act, Facts]]] = {
    "function": load_function,
    "run": load_run,
    "sb3": load_sb3,
    "rejax": load_rejax,
}


def as_array(actions: Any, rows: int, entry: dict[str, Any]) -> np.ndarray:
    """Return actions as int32 or float32 of the shape that the market takes.

    Raises:
      ValueError: they are of another shape or type.
    """
    assets, whole = entry["assets"], entry["whole"]
    found = np.asarray(actions)
    shapes = [(rows, assets)] if assets > 1 else [(rows,), (rows, 1)]
    if found.dtype.kind not in ("iu" if whole else "iuf") or found.shape not in shapes:
        kind = "whole numbers" if whole else "numbers"
        raise ValueError(
            f"returned {found.dtype} {list(found.shape)}; return {kind} {list(shapes[0])}"
        )
    if whole and found.size and not -(2**31) <= found.min() <= found.max() < 2**31:
        raise ValueError(f"returned an action of {found.max()}, which does not exist")
    return np.ascontiguousarray(found.reshape(rows, assets), np.int32 if whole else np.float32)


def described(error: BaseException, files: list[str]) -> str:
    """Return an error in one line, with the line of the agent's own file that it is from."""
    try:
        text = " ".join(str(error).split())[:LONGEST] or "no message"
    except Exception:
        text = "its message cannot be read"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in files:
            return f"{type(error).__name__} at line {frame.lineno} (`{frame.line}`): {text}"
    plain = isinstance(error, ValueError | LookupError) and not isinstance(error, KeyError)
    return text if plain else f"{type(error).__name__}: {text}"


def supervise(descriptor: int) -> None:
    """Play in a child; once it ends or the caller does, end all that it started (Linux).

    A daemon, which has left its session and its parent, becomes a child of this process. Elsewhere
    the caller ends the process group alone.
    """
    if sys.platform != "linux":
        return main(descriptor)
    prctl, asked, own = ctypes.CDLL(None).prctl, [], os.getpid()
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    prctl(ADOPT, 1, 0, 0, 0)
    prctl(DIE_WITH_PARENT, signal.SIGTERM, 0, 0, 0)  # a caller that is killed cannot end us
    if not (played := os.fork()):
        prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        prctl(GAIN_NOTHING, 1, 0, 0, 0)  # of other rights, with which it could not be killed
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return main(descriptor)
    os.close(descriptor)
    # Not waited for: a thread of numpy's may receive the signal, which interrupts no wait here.
    while not asked and not os.waitpid(played, os.WNOHANG)[0]:
        time.sleep(LOOK)
    until = time.monotonic() + PATIENCE
    with contextlib.suppress(ChildProcessError):  # none is left
        # Again and again, since the children of a child that ends become ours.
        while time.monotonic() < until:
            with contextlib.suppress(OSError), open(f"/proc/self/task/{own}/children") as file:
                for child in file.read().split():
                    os.kill(int(child), signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def main(descriptor: int) -> None:
    """Load what the caller names, then answer its observations until it closes the connection."""
    link = Connection(descriptor)
    os.dup2(2, 1)  # what the agent prints must not mix with the caller's output
    entry = json.loads(link.recv_bytes())
    try:
        act, facts = LOADERS[entry["kind"]](entry)
    except BaseException as error:  # a file may end with `sys.exit`
        link.send_bytes(json.dumps({"error": described(error, entry["files"])}).encode())
        return
    answer, memory = json.dumps(facts).encode(), None
    while True:
        try:
            link.send_bytes(answer)
            message = link.recv_bytes()
        except (EOFError, OSError):  # the caller has enough
            return
        # A copy: the agent may write into what it sees.
        seen = np.frombuffer(message, np.float32, offset=4).reshape(-1, entry["observation"]).copy()
        try:
            actions, memory = act(seen, None if any(message[:4]) else memory)
            answer = b"A" + as_array(actions, len(seen), entry).tobytes()
        except BaseException as error:
            answer = b"E" + described(error, entry["files"]).encode(errors="backslashreplace")


if __name__ == "__main__":
    supervise(int(sys.argv[1]))
