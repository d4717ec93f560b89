"""Compiles the learner's own update for a slice that is not here, and reads what it needs.

The compiler runs in its own process (`compiler`): it can be loaded once per process, writes to
standard error, and may end the process.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib.util
import itertools
import math
import multiprocessing
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from nca_trader.config import AgentConfig, EnvConfig
from nca_trader.errors import ConfigError, RunError, out_of_memory
from nca_trader.machine import SAFE, environment, killed_after, scratch
from nca_trader.scale.chips import Slice
from nca_trader.scale.hlo import ProgramCost, cost_of, read_module, unknown_loops
from nca_trader.types import Bars

# The CPU computes, no metadata server is asked for a chip, and a training run on this machine may
# hold the lock. Programs are not cached, so that `compile_s` is the time of a compilation.
# Without a path libtpu sets its own, in place of that of `avoid_tpu`.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_ENABLE_COMPILATION_CACHE": "false", "TPU_LIBRARY_PATH": "",
}  # fmt: skip


# Of the memory, left to the code where only the arrays were placed. On v5e a 64th is 252 MiB, and
# the code of the largest batch of `nano` takes 170.
CODE = 1 / 64


class Question(NamedTuple):
    """What to compile.

    bars: None if the environment draws its own. memory_only: whether the compilation ends once
    every array has its place: seconds for any batch, where the code of a large one takes many
    minutes.
    """

    env: EnvConfig
    agent: AgentConfig
    bars: Bars | None
    there: Slice
    memory_only: bool = False


class Needs(NamedTuple):
    """What the compiler reports. Bytes are those of one device.

    Attributes:
      fits: whether the program fits into `limit` bytes.
      limit: what a program may use.
      needed: what it needs, None if the compiler does not say; of `memory_only` without its code.
      kinds: bytes by kind.
      cost: None where the compiler gave up, or placed the arrays alone.
      unknown_loops: loops that are counted once in it.
      parameters: of the policy.
      bars: at which a decision can be learnt from.
      steps: environment steps per update.
      seconds: duration of the compilation.
    """

    fits: bool
    limit: float
    needed: int | None
    kinds: dict[str, int]
    cost: ProgramCost | None
    unknown_loops: int
    parameters: int
    bars: int
    steps: int
    seconds: float


Ask = Callable[[Question], Needs]


@contextlib.contextmanager
def compiler() -> Iterator[Ask]:
    """Yield the function that asks the compiler, each time in a process of its own.

    Raises:
      ConfigError: the compiler is not installed.
      RunError: when asked, if its process ended.
    """
    # Not imported here: it loads once per process, and the compiler has its own.
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            "plan needs the TPU compiler, which is not installed; "
            "pip install libtpu==0.0.51 (Linux on x86-64, no TPU needed)."
        )
    with environment(**SAFE), scratch() as folder, open(folder / "said", "w+") as log:
        # Not forked: that process would have a jax that has read its variables already.
        process, numbers = multiprocessing.get_context("spawn"), itertools.count()

        def ask(question: Question) -> Needs:
            # The process inherits what stands here when it starts. Later is too late: jax reads
            # its variables when it is imported.
            with environment(**ENVIRONMENT):
                pool = concurrent.futures.ProcessPoolExecutor(
                    1, process, initializer=_send_stderr, initargs=(log.name,)
                )
                # A compilation goes on for minutes, after an interrupt and after an answer about
                # memory alone.
                with pool, killed_after():
                    dumps = folder / str(next(numbers))
                    dumps.mkdir()
                    try:
                        return pool.submit(answer, question, dumps).result()
                    except concurrent.futures.process.BrokenProcessPool:
                        said = [line for line in log.read().splitlines() if line.strip()][-1:]
                        raise RunError(
                            "the TPU compiler ended its process: "
                            f"{' '.join(said) or 'without a message'}; try another topology, or "
                            "look for memory that ran out."
                        ) from None

        yield ask


def _send_stderr(log: str) -> None:
    """Send what this process writes to standard error, also in C++, into a file."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    # The descriptor and not `sys.stderr`, because C++ writes to it.
    os.dup2(file, 2)
    os.close(file)


def devices_of(there: Slice) -> list[Any]:
    """Return the devices of a slice as the compiler describes them, in JAX's order.

    Raises:
      ConfigError: the compiler does not know the slice.
    """
    from jax.experimental import topologies

    # That a name is accepted does not prove that a cloud rents such a slice out.
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=there.name).devices
    except Exception as error:  # the class depends on what is wrong
        why = str(error).splitlines()[0]
        # Not as an argument: this process does not know how its user writes one.
        raise ConfigError(f"the topology {there.name}: the compiler says: {why}") from None
    return list(devices)


def answer(question: Question, dumps: pathlib.Path) -> Needs:
    """Compile the update of the learner that `question` describes, and read its needs.

    Args:
      question: what to compile.
      dumps: folder that the compiler writes into.
    """
    # jax takes seconds to import, and a process that only asks does without.
    import jax

    from nca_trader.agents.policy import make_policy, num_parameters
    from nca_trader.envs.trading import TradingEnv
    from nca_trader.learner.learner import make_learner
    from nca_trader.parallel.mesh import arrange, batch_shards, mesh_of

    agent, there = question.agent, question.there
    mesh = mesh_of(arrange(devices_of(there), agent.mesh.axes))
    env = TradingEnv(question.bars, question.env)
    policy = make_policy(agent, env.spec)
    learner = make_learner(env, policy, agent, mesh)
    state = jax.eval_shape(learner.init, jax.random.key(0))
    # From the table: a program that fits is compiled without a word about what there is.
    limit = there.of.hbm_usable / there.of.devices
    if agent.learner.memory_gb is not None:
        limit = min(limit, agent.learner.memory_gb * 1e9)
    kinds = {"params": state.params, "optimiser": state.opt_state, "replay": state.replay}
    bytes_of = {
        kind: sum(
            math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
            for a in jax.tree.leaves(tree)
        )
        for kind, tree in kinds.items()
    }
    rollout = _rollout_bytes(env, policy, agent, learner.market, state) // batch_shards(mesh)
    known = Needs(
        fits=False,
        limit=limit,
        needed=None,
        kinds=bytes_of | {"rollout": rollout},
        cost=None,
        unknown_loops=0,
        parameters=num_parameters(policy),
        bars=len(env) - policy.first_decision,
        steps=learner.steps_per_update,
        seconds=0.0,
    )
    args = (state, learner.market, learner.course)
    return _compiled(known, learner.bounded.program, args, mesh.size, dumps, question.memory_only)


def _compiled(
    known: Needs,
    program: Any,
    args: Any,
    devices: int,
    folder: pathlib.Path,
    memory_only: bool = False,
) -> Needs:
    """Compile the program; return `known` with the sizes and costs that the compiler reports."""
    # As in `answer`.
    import jax

    from nca_trader.learner.programs import bytes_needed

    began = time.perf_counter()
    try:
        # Not `as_text()`: it fails for some programs of TPU7x, which the compiler can print.
        options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
        lowered = program.lower(*args)
        if memory_only:
            # It cannot be stopped: it goes on in its thread until this process is killed.
            compiling = concurrent.futures.ThreadPoolExecutor(1).submit(
                lowered.compile, compiler_options=options
            )
            needed = _placed(compiling, folder)
            fits, seconds = needed <= known.limit * (1 - CODE), time.perf_counter() - began
            return known._replace(fits=fits, needed=needed, seconds=seconds)
        compiled = lowered.compile(compiler_options=options)
        (path,) = folder.glob("*.after_codegen.txt")
        text = path.read_text()
    except jax.errors.JaxRuntimeError as error:
        # Too much memory is the one refusal that is an answer; it comes within a second.
        if not out_of_memory(error):
            said = str(error).splitlines()[0]
            raise RunError(f"the TPU compiler says: {said}; try another topology.") from None
        seconds = time.perf_counter() - began
        return known._replace(needed=said_bytes(str(error)), seconds=seconds)
    seconds = time.perf_counter() - began
    sizes, needed = compiled.memory_analysis(), bytes_needed(compiled)
    kinds = {
        "arguments": sizes.argument_size_in_bytes,
        "temporaries": sizes.temp_size_in_bytes,
        "code": sizes.generated_code_size_in_bytes,
    }
    module = read_module(text)
    return known._replace(
        fits=needed <= known.limit,
        needed=needed,
        kinds=known.kinds | kinds,
        cost=cost_of(module, devices),
        unknown_loops=unknown_loops(module),
        seconds=seconds,
    )


def _placed(compiling: concurrent.futures.Future[Any], folder: pathlib.Path) -> int:
    """Return the bytes of main memory that a program's arrays take, as soon as they have places.

    Raises:
      jax.errors.JaxRuntimeError: what the compilation raises.
    """
    # Written after the report, which is whole then.
    while not any(folder.glob("*.after_optimizations_after_buffer_assignment.txt")):
        if compiling.done():
            compiling.result()
            break
        time.sleep(0.05)
    (path,) = folder.glob("*-memory-usage-report.txt")
    found = re.search(r"Memory Space: default .*\nTotal bytes: (\d+)", path.read_text())
    if found is None:
        raise RunError(f"the TPU compiler's report of memory has another form: {path.name}.")
    return int(found[1])


def said_bytes(error: str) -> int | None:
    """Return the bytes that a program would need, as the compiler's error says."""
    found = re.search(r"(?:total memory required[^(]*\(|Used )([\d.]+)([KMGT])", error)
    return int(float(found[1]) * 1024 ** (" KMGT".index(found[2]))) if found else None


def _rollout_bytes(env: Any, policy: Any, agent: AgentConfig, market: Any, state: Any) -> int:
    """Bytes that all devices together collect in an update, before they learn from it."""
    # As in `answer`.
    import jax

    from nca_trader.learner.ppo import setup_of
    from nca_trader.learner.rollout import Draw
    from nca_trader.learner.update import ALGORITHMS

    # Shapes alone, by tracing: the rollout is a temporary of the program, which it does not return.
    params, segments = state.params, state.segments
    if agent.num_seeds > 1:  # one agent's, times their number
        params, segments = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), (params, segments)
        )
    count = segments.index.shape[0]
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), count))
    algorithm = ALGORITHMS[agent.learner.advantages]
    collect = functools.partial(algorithm.collect, setup_of(policy, agent))
    batch = jax.eval_shape(collect, params, market, segments, Draw(keys, segments.episode))[1]
    return agent.num_seeds * sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(batch))
