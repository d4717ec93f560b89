"""The learner's own step, compiled for a slice that is not here, and what that says.

Runs in a process of its own (`compiler`): the TPU compiler is loaded once a process, writes to
its standard error as it likes, and may end it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import math
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from nca_trader.config import AgentConfig, EnvConfig
from nca_trader.disk import scratch
from nca_trader.errors import ConfigError, RunError, argument
from nca_trader.scale.chips import Slice
from nca_trader.scale.hlo import Cost, cost_of, read_module, unknown_loops
from nca_trader.types import Bars

# The compiler without a chip: the CPU computes, nobody asks a metadata server for one, and a
# training run on this machine may hold the lock. What it compiles is not kept: the seconds that
# are printed are those of a compilation.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}


class Question(NamedTuple):
    """What is to be compiled. bars: None where the environment draws its own.

    search: whether micro-batches are doubled, as `train` does, until the program fits.
    """

    env: EnvConfig
    agent: AgentConfig
    bars: Bars | None
    there: Slice
    search: bool = True


class Answer(NamedTuple):
    """What the compiler says. Bytes are of one device.

    Attributes:
      fits: whether the program does, into `limit` bytes. needed: bytes, None if not said.
      kinds: bytes by kind. micro_batches: with which it was compiled.
      cost: None where the compiler gave up. unknown_loops: counted once in it.
      parameters: of the policy. bars: at which a decision can be learnt from.
      steps: environment steps of an iteration. seconds: the compilation, the last of several.
    """

    fits: bool
    limit: float
    needed: int | None
    kinds: dict[str, int]
    micro_batches: int
    cost: Cost | None
    unknown_loops: int
    parameters: int
    bars: int
    steps: int
    seconds: float


Ask = Callable[[Question], Answer]


@contextlib.contextmanager
def compiler() -> Iterator[Ask]:
    """Starts the process, and gives the function that asks it.

    Raises:
      ConfigError: the compiler is not installed. RunError: when asked, if its process ended.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            "plan needs the TPU compiler, which is not installed; "
            "pip install 'nca-trader[tpu-plan]' (Linux on x86-64, no TPU needed)."
        )
    with scratch() as folder, open(folder / "said", "w+") as log:
        process = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(
            1, process, initializer=_into, initargs=(log.name,)
        ) as pool:

            def ask(question: Question) -> Answer:
                try:
                    with _environment():
                        return pool.submit(answer, question).result()
                except concurrent.futures.process.BrokenProcessPool:
                    said = [line for line in log.read().splitlines() if line.strip()][-1:]
                    raise RunError(
                        f"the TPU compiler ended its process: {' '.join(said) or 'no word'}; try "
                        "another topology, or look for memory that ran out."
                    ) from None

            yield ask


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _into(log: str) -> None:
    """Sends what this process says on standard error, the compiler's own lines, into a file."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 2)
    os.close(file)


def devices_of(there: Slice) -> list[Any]:
    """The devices of a slice as the compiler describes them, in the order that JAX lists them.

    Raises:
      ConfigError: the compiler knows no such slice.
    """
    from jax.experimental import topologies

    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=there.name).devices
    except Exception as error:  # of several classes, by what is wrong
        why = str(error).splitlines()[0]
        raise ConfigError(f"{argument('topology', there.name)}: the compiler says: {why}") from None
    return list(devices)


def answer(question: Question) -> Answer:
    """Compiles the step of the learner that `question` describes, and reads what it needs."""
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
    limit = there.of.hbm_usable / there.of.devices
    if agent.learner.memory_gb is not None:
        limit = min(limit, agent.learner.memory_gb * 1e9)
    kinds = {
        "params": _bytes(state.params),
        "optimiser": _bytes(state.opt_state),
        "replay": _bytes(state.replay),
        "rollout": _rollout_bytes(env, policy, agent, learner.market, state) // batch_shards(mesh),
    }
    known = Answer(
        fits=False,
        limit=limit,
        needed=None,
        kinds=kinds,
        micro_batches=0,
        cost=None,
        unknown_loops=0,
        parameters=num_parameters(policy),
        bars=len(env) - policy.first_decision,
        steps=learner.steps_per_update,
        seconds=0.0,
    )
    programs, least = list(learner.programs.items()), 0.0
    for sizes, program in programs if question.search else programs[:1]:
        pieces = sizes.micro_batches
        if pieces < least:
            continue
        began = known._replace(micro_batches=pieces)
        found = _compiled(began, program, (state, learner.market), mesh.size)
        if found.fits:
            break
        # n times as many pieces save at most all but an n-th: fewer cannot do.
        least = pieces * (found.needed or 0) / limit
    return found


def _compiled(known: Answer, program: Any, args: Any, devices: int) -> Answer:
    """What is known, and what compiling the program says."""
    import jax

    from nca_trader.errors import out_of_memory
    from nca_trader.learner.memory import bytes_needed

    began = time.perf_counter()
    try:
        with scratch() as folder:
            # Not `as_text()`: it fails for some programs of TPU7x, which the compiler can print.
            options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
            compiled = program.lower(*args).compile(compiler_options=options)
            (path,) = folder.glob("*.after_codegen.txt")
            text = path.read_text()
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            said = str(error).splitlines()[0]
            raise RunError(f"the TPU compiler says: {said}; try another topology.") from None
        seconds = time.perf_counter() - began
        return known._replace(needed=said_bytes(str(error)), seconds=seconds)
    seconds = time.perf_counter() - began
    sizes, needed = compiled.memory_analysis(), bytes_needed(compiled)
    module = read_module(text)
    return known._replace(
        fits=needed <= known.limit,
        needed=needed,
        kinds=known.kinds
        | {
            "arguments": sizes.argument_size_in_bytes,
            "temporaries": sizes.temp_size_in_bytes,
            "code": sizes.generated_code_size_in_bytes,
        },
        cost=cost_of(module, devices),
        unknown_loops=unknown_loops(module),
        seconds=seconds,
    )


def said_bytes(error: str) -> int | None:
    """The bytes that a program would need, as the compiler's refusal says."""
    found = re.search(r"(?:total memory required[^(]*\(|Used )([\d.]+)([KMGT])", error)
    return int(float(found[1]) * 1024 ** (" KMGT".index(found[2]))) if found else None


def _bytes(tree: Any) -> int:
    """Of one device's part of abstract arrays."""
    import jax

    leaves = jax.tree.leaves(tree)
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in leaves)


def _rollout_bytes(env: Any, policy: Any, agent: AgentConfig, market: Any, state: Any) -> int:
    """Of what all devices collect in an iteration, before they learn from it."""
    import jax

    from nca_trader.learner.rollout import Draw
    from nca_trader.learner.setup import setup_of
    from nca_trader.learner.update import ALGORITHMS

    algorithm = ALGORITHMS[agent.learner.advantages]
    setup = setup_of(policy, agent)

    def gather(params: Any, market: Any, segments: Any, key: Any) -> Any:
        keys = jax.random.split(key, segments.index.shape[0])
        draw = Draw(keys, segments.episode)
        return algorithm.collect(setup, params, market, segments, draw)[1]

    params, segments, key = state.params, state.segments, state.key
    if agent.num_seeds > 1:  # one agent's, times their number
        params, segments, key = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), (params, segments, key)
        )
    shapes = jax.eval_shape(gather, params, market, segments, key)
    return agent.num_seeds * sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes))
