"""What follows from a compiler's answer: arithmetic, searches and advice, with no compiler."""

import dataclasses

import numpy as np
import pytest
from drawn import random_bars

from nca_trader.agents import load_agent
from nca_trader.config import MeshConfig
from nca_trader.scale.chips import GIB, slice_of
from nca_trader.scale.compiled import Needs, Question, said_bytes
from nca_trader.scale.hlo import Collective, Part, ProgramCost
from nca_trader.scale.plan import described, estimate, on_slice, width_audit

V5E = slice_of("v5e-8")
BARS = random_bars(np.random.default_rng(0), 3, 1)
COST = ProgramCost(
    parts={"collect: encoder": Part(3_000_000, 131_072 * 2_000_000), "other": Part(1_500_000, 0)},
    collectives={"all-reduce": Collective(4, 800_000, ("f32",), 8)},
    hbm_bytes=819_000_000,
)
ANSWER = Needs(
    fits=True,
    limit=V5E.of.hbm_usable,
    needed=2**30,
    kinds={"params": 400, "temporaries": 2**29},
    cost=COST,
    unknown_loops=0,
    parameters=1_000,
    bars=500,
    steps=90_000,
    seconds=12.0,
)


def model(limit, per_segment, cycles=lambda segments: 1_000 * segments):
    """An `ask` whose memory and time follow a rule, and the questions that it was asked."""
    asked = []

    def ask(question: Question) -> Needs:
        asked.append(question)
        segments = question.agent.learner.num_segments
        needed = 1_000 + per_segment * segments
        cost = COST._replace(
            parts={"other": Part(cycles(segments), 0)}, hbm_bytes=0, collectives={}
        )
        return ANSWER._replace(
            fits=needed <= limit,
            limit=limit,
            needed=needed,
            kinds={"temporaries": needed - 1_000},
            cost=cost,
            steps=segments * 16,
        )

    return ask, asked


def test_seconds_are_cycles_at_the_clock_bytes_at_the_rates_and_the_wait_for_the_links():
    found = estimate(ANSWER, V5E.of)
    # 4.5e6 cycles at 1.5 GHz; 819 MB at 819 GB/s; 2 * 7/8 of 800 kB at 200 GB/s one way.
    assert found["seconds"]["compute"] == pytest.approx(3e-3, rel=2e-3)
    assert found["seconds"]["memory"] == pytest.approx(1e-3)
    assert found["seconds"]["communication"] == pytest.approx(7e-6)
    assert found["bound"] == "compute"
    assert found["step_s"] == pytest.approx(3.007e-3, rel=2e-3)
    assert found["steps_per_s"] == pytest.approx(90_000 / 3.007e-3, rel=2e-3)
    # The units could have done it in 2e6 of the 4.5e6 cycles.
    assert found["matrix_units_busy"] == pytest.approx(2e6 / 4.51e6, rel=2e-3)


def test_more_traffic_than_cycles_is_bound_by_memory():
    found = estimate(ANSWER._replace(cost=COST._replace(hbm_bytes=8_190_000_000)), V5E.of)
    assert found["bound"] == "memory" and found["step_s"] == pytest.approx(10.007e-3, rel=1e-3)


def test_cycles_are_held_against_the_floor_of_the_matrix_units():
    report = described(ANSWER, V5E.of)
    assert report["cycles_over_floor"] == {
        "collect: encoder": pytest.approx(1.5), "update": pytest.approx(2.25)
    }  # fmt: skip
    assert report["cycles"] == {
        "collect: encoder": 3_000_000, "other": 1_500_000, "update": 4_500_000
    }  # fmt: skip
    assert report["bars_per_parameter"] == 0.5


def test_a_chip_of_two_devices_has_the_bytes_of_both():
    there = slice_of("tpu7x")
    report = described(ANSWER._replace(limit=there.of.hbm_usable / 2), there.of)
    assert report["hbm_bytes_per_chip"] == 2 * 2**30
    assert report["hbm_limit"] == int(2 * 94.74 * GIB)
    assert report["bytes_by_kind"] == {"params": 800, "temporaries": 2**30}


def test_an_agent_gets_as_many_shards_and_segments_as_devices_can_share():
    nano = load_agent("nano")  # 64 segments in 8 minibatches, 8 logical shards
    assert on_slice(nano, V5E)[1] == {"mesh.devices": 8}
    agent, changes = on_slice(nano, slice_of("v5e-256"))
    assert changes == {
        "mesh.devices": 256, "mesh.fsdp": 4,
        "learner.logical_shards": 256, "learner.num_segments": 1024
    }  # fmt: skip
    assert (agent.mesh.axes, agent.learner.num_segments) == ((64, 4, 1), 1024)
    # What the file says of the mesh stands.
    own = dataclasses.replace(nano, mesh=MeshConfig(fsdp=2, model=2))
    agent, changes = on_slice(own, V5E)
    assert (agent.mesh.axes, changes) == ((2, 2, 2), {"mesh.devices": 8})
    own = dataclasses.replace(nano, mesh=MeshConfig(data=8))
    assert on_slice(own, V5E) == (own, {})
    # One device of a chip alone: what the file says stays.
    assert on_slice(nano, slice_of("v5e-1")) == (nano, {})


def test_widths_are_held_against_the_matrix_units_of_the_chip():
    base = load_agent("base")
    on_v5e = {w["name"]: w for w in width_audit(base, V5E.of)}
    assert on_v5e["policy.channels"]["fills"] == 1.0
    assert on_v5e["policy.head_hidden"] == {
        "name": "policy.head_hidden", "width": 64, "fills": 0.5, "full_width": 128
    }  # fmt: skip
    on_v6e = {w["name"]: w["fills"] for w in width_audit(base, slice_of("v6e-8").of)}
    assert on_v6e == {"policy.channels": 0.5, "policy.hidden": 0.5, "policy.head_hidden": 0.25}
    wide = dataclasses.replace(base, policy=dataclasses.replace(base.policy, channels=129))
    assert {w["name"]: w["full_width"] for w in width_audit(wide, V5E.of)}["policy.channels"] == 256


def test_what_the_compiler_gave_up_on_has_no_cost_and_says_so():
    refused = ANSWER._replace(fits=False, needed=None, cost=None, kinds={"params": 1})
    report = described(refused, V5E.of)
    assert report["estimate"] is None and report["hbm_bytes_per_chip"] is None
    assert report["cycles_over_floor"] == {} and report["fits"] is False


@pytest.mark.parametrize(
    ("error", "size"),
    [
        ("E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
         "temporaries (600.00G) exceeds available HBM (15.75G).", 600 * 2**30),
        ("Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. Exceeded hbm capacity "
         "by 4.75G.", int(20.5 * 2**30)),
        ("RESOURCE_EXHAUSTED: of another kind", None),
    ],
)  # fmt: skip
def test_the_size_in_a_refusal_is_read(error, size):
    assert said_bytes(error) == size
