"""The program that is planned is the one that trains; what the compiler says of a tiny one."""

import concurrent.futures
import ctypes
import dataclasses
import functools
import importlib.util
import json
import multiprocessing
import os
import re
import threading

import jax
import numpy as np
import pytest
from drawn import random_bars
from tiny import AGENT, ENV, MLP

from nca_trader.agents import load_agent
from nca_trader.agents.policy import make_policy, num_parameters
from nca_trader.cli import main
from nca_trader.config import MeshConfig, PrecisionConfig
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import ConfigError, RunError
from nca_trader.learner.learner import make_learner
from nca_trader.parallel import mesh
from nca_trader.parallel.mesh import make_mesh
from nca_trader.scale import compiled
from nca_trader.scale.chips import slice_of
from nca_trader.scale.compiled import Question, answer, compiler, devices_of

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the extra tpu-plan is not installed"
)
BARS = random_bars(np.random.default_rng(0), 120, 2)
REPLAY = dataclasses.replace(
    AGENT,
    learner=dataclasses.replace(AGENT.learner, replay_slots=2),
    optimizer=dataclasses.replace(AGENT.optimizer, ema_decay=0.9),
)
BF16 = PrecisionConfig(matmul="bfloat16", compute="bfloat16")
HERE = slice_of("v5e:2x2")


def on_it(agent):
    """The agent on all chips of `HERE`."""
    return dataclasses.replace(agent, mesh=MeshConfig(devices=4))


def made(mesh, agent=REPLAY, bars=BARS):
    env = TradingEnv(bars, ENV)
    return make_learner(env, make_policy(agent, env.spec), agent, mesh)


def in_words(program):
    """A jaxpr in words; and the devices it is for, apart."""
    kinds, text = r"device_kind=.*?, platform=\w+", str(program)
    return re.sub(kinds, "", text), re.findall(kinds, text)


def trained(learner, state):
    """The program that a step calls, as `train` calls it."""
    (call,) = jax.make_jaxpr(learner.step)(state).eqns
    return in_words(call.params["jaxpr"])


def full(name):
    """A preset with all that changes the program: replay, an average of weights and bfloat16."""
    agent = load_agent(name)
    learner = dataclasses.replace(agent.learner, replay_slots=2)
    return dataclasses.replace(agent, learner=learner, optimizer=REPLAY.optimizer, precision=BF16)


@pytest.fixture
def planned(monkeypatch):
    """What a plan hands to the compiler, in words. Nothing is compiled."""
    seen = []

    def instead(known, program, args, devices, folder, memory_only):
        assert not memory_only
        seen.append(in_words(program.trace(*args).jaxpr))
        return known._replace(fits=True)

    monkeypatch.setattr(compiled, "_compiled", instead)
    return seen


def test_a_plan_compiles_the_program_that_trains(monkeypatch, planned, tmp_path):
    monkeypatch.setattr(compiled, "devices_of", lambda there: jax.devices()[:4])
    monkeypatch.setattr(mesh, "arrange", lambda there, axes: np.reshape(there, axes))
    agent = on_it(dataclasses.replace(AGENT, policy=MLP))
    found = answer(Question(ENV, agent, BARS, HERE), tmp_path)
    learner = made(make_mesh(4), agent)
    state = learner.init(jax.random.key(0))
    assert planned == [trained(learner, state)]
    # What is counted before is what one device of the state holds.
    for kind, tree in {"params": state.params, "optimiser": state.opt_state}.items():
        on_one = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
        assert found.kinds[kind] == on_one, kind


@needs_compiler
@pytest.mark.parametrize(
    ("name", "topology", "axes"),
    [
        ("tiny", "v5e:2x2", (4, 1, 1)),
        ("nano", "v5e:2x2", (2, 2, 1)),
        ("base", "v5e:2x4", (2, 2, 2)),
    ],
)
def test_a_described_slice_gets_the_program_that_devices_get(
    environment, planned, tmp_path, name, topology, axes
):
    agent = REPLAY if name == "tiny" else full(name)
    agent = dataclasses.replace(agent, mesh=MeshConfig(data=axes[0], fsdp=axes[1], model=axes[2]))
    bars = random_bars(np.random.default_rng(0), 500, 2)
    learner = made(make_mesh(*axes), agent, bars)
    text, here = trained(learner, jax.eval_shape(learner.init, jax.random.key(0)))
    assert answer(Question(ENV, agent, bars, slice_of(topology)), tmp_path).fits
    ((same, there),) = planned
    assert same == text and len(text) > 10_000
    assert set(here) != set(there)


@needs_compiler
def test_the_compilers_answer_about_a_tiny_agent(environment, tmp_path):
    found = answer(Question(ENV, on_it(REPLAY), BARS, HERE), tmp_path)
    policy = make_policy(REPLAY, TradingEnv(BARS, ENV).spec)
    count = num_parameters(policy)
    assert found.fits and found.parameters == count
    assert found.bars == 120 - policy.first_decision and found.steps == 8 * 16
    kinds = found.kinds
    assert kinds["params"] == 4 * count
    # Two moments and the average, float32, and a few counters.
    assert 12 * count < kinds["optimiser"] <= 12 * count + 64
    # Two segments a device: of each transition 3 features an asset and one action an asset, and
    # log-probability, value, reward, discount, advantage and value target.
    per_step = 4 * (2 * 3 + 2 + 6)
    assert kinds["rollout"] == pytest.approx(2 * 16 * per_step, rel=0.25)
    held = kinds["params"] + kinds["optimiser"] + kinds["replay"]
    assert held < kinds["arguments"] <= found.needed <= found.limit
    assert found.unknown_loops == 0
    # Gradients and metrics of the fresh and of the replayed minibatch, and the statistics.
    of = found.cost.collectives
    assert set(of) == {"all-reduce"} and of["all-reduce"].group == 4
    assert of["all-reduce"].bytes > 2 * 4 * count and "bf16" not in of["all-reduce"].dtypes
    parts = found.cost.parts
    for part in ("collect: encoder", "learn: encoder backward", "replay: encoder forward"):
        assert parts[part].cycles > 0, part
    # A gradient is at least once, at most three times the forward products again.
    forward, backward = parts["learn: encoder forward"], parts["learn: encoder backward"]
    assert forward.flops <= backward.flops <= 3 * forward.flops


@needs_compiler
@pytest.mark.slow
def test_the_compiler_splits_the_hidden_width_of_the_form_for_a_tpu(environment, tmp_path):
    agent = dataclasses.replace(AGENT, mesh=MeshConfig(data=2, model=2))
    found = answer(Question(ENV, agent, BARS, HERE), tmp_path)
    count = num_parameters(make_policy(agent, TradingEnv(BARS, ENV).spec))
    assert found.fits and found.unknown_loops == 0
    assert 0.5 * 4 * count <= found.kinds["params"] < 0.9 * 4 * count  # of a device
    # A step's update is summed over what each half of the hidden layer adds to it.
    assert found.cost.collectives["all-reduce"].count > agent.policy.steps
    assert found.cost.parts["learn: encoder backward"].cycles > 0


@needs_compiler
def test_the_bound_of_an_agents_file_is_that_of_a_plan(environment, tmp_path):
    learner = dataclasses.replace(AGENT.learner, memory_gb=1e-6)
    agent = dataclasses.replace(AGENT, learner=learner)
    found = answer(Question(ENV, on_it(agent), BARS, HERE), tmp_path)
    assert not found.fits and found.limit == 1e3 < found.needed


@needs_compiler
def test_a_slice_that_no_hosts_make_is_refused_in_the_compilers_words(environment):
    words = r"the topology v5e:3x3: the compiler says: .* not divisible"
    with pytest.raises(ConfigError, match=words):
        devices_of(slice_of("v5e:3x3"))


@needs_compiler
@pytest.mark.slow
def test_memory_alone_is_that_of_the_whole_compilation():
    question = Question(ENV, on_it(REPLAY), BARS, HERE)
    with compiler() as ask:
        alone, whole = ask(question._replace(memory_only=True)), ask(question)
        assert not multiprocessing.active_children()  # the compiler has ended
    assert alone.fits and whole.fits and alone.cost is None
    assert alone.needed == pytest.approx(whole.needed - whole.kinds["code"], rel=0.1)
    assert alone._replace(fits=True, needed=0, seconds=0.0, cost=None) == whole._replace(
        fits=True, needed=0, seconds=0.0, cost=None, kinds=alone.kinds, unknown_loops=0
    )


REPORT = (
    "Memory Space: default (color=0)\nTotal bytes: 4321 (4.2KiB)\nMemory Space: vmem (color=1)\n"
)


def test_memory_is_read_while_the_compilation_goes_on(tmp_path):
    compiling = concurrent.futures.Future()

    def write():  # the report first, as the compiler does
        (tmp_path / "a.after_optimizations-memory-usage-report.txt").write_text(
            REPORT + "Total bytes: 99 (99B)\n"
        )
        (tmp_path / "a.after_optimizations_after_buffer_assignment.txt").touch()

    threading.Timer(0.2, write).start()
    assert compiled._placed(compiling, tmp_path) == 4321 and not compiling.done()


def test_memory_that_is_refused_is_the_compilations_error(tmp_path):
    compiling = concurrent.futures.Future()
    compiling.set_exception(jax.errors.JaxRuntimeError("Used 20.5G of 15.75G hbm"))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"20\.5G"):
        compiled._placed(compiling, tmp_path)


@pytest.mark.slow
def test_a_compiler_that_crashes_ends_in_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    # A segmentation fault: the text at address 0, its first argument.
    monkeypatch.setattr(compiled, "answer", functools.partial(max, key=ctypes.string_at))
    before = dict(os.environ)
    with compiler() as ask, pytest.raises(RunError, match="the TPU compiler ended its process"):
        ask(0)
    assert dict(os.environ) == before


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e-8", "v5e-256", "v6e-256", "v5p-768", "tpu7x"])
def test_a_pod_is_planned_in_a_process_of_its_own(capsys, name):
    assert main(["plan", "--agent", "nano", "--topology", name, "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["fits"] and said["compile_s"] < 600 and said["loops_counted_once"] == 0
    assert said["collectives"]["all-reduce"]["group"] == said["devices"]
