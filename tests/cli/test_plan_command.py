"""`nca-trader plan` as a user meets it, a compiler that answers at once in the true one's place."""

import contextlib
import importlib.util
import multiprocessing
import os
import shlex
import signal
import threading
import time

import pytest
import yaml

import nca_trader as nca
from nca_trader import progress
from nca_trader.agents import load_agent
from nca_trader.cli import build_parser
from nca_trader.scale import compiled
from nca_trader.scale.compiled import Needs
from nca_trader.scale.hlo import Collective, Part, ProgramCost

CONTRACT = {
    "fits", "hbm_bytes_per_chip", "hbm_limit", "bytes_by_kind", "collectives",
    "cycles_over_floor", "parameters", "compile_s",
}  # fmt: skip


@pytest.fixture
def answers(monkeypatch):
    """Puts an answer in the compiler's place; the questions that are asked come back."""

    def put(**changes):
        asked = []
        found = Needs(
            fits=True, limit=15.75 * 2**30, needed=12 * 2**20,
            kinds={"params": 28_932, "optimiser": 57_876, "replay": 0, "rollout": 230_208,
                   "arguments": 992_768, "temporaries": 4_571_136, "code": 6_144_000},
            cost=ProgramCost({"collect: accounts": Part(3_000_000, 0),
                       "learn: encoder forward": Part(1_000_000, 131_072 * 800_000)},
                      {"all-reduce": Collective(18, 231_716, ("f32", "s32"), 8)}, 10**6),
            unknown_loops=0, parameters=7_233, bars=4_895, steps=32_768, seconds=20.0,
        )._replace(**changes)  # fmt: skip

        @contextlib.contextmanager
        def compiler():
            yield lambda question: asked.append(question) or found

        monkeypatch.setattr(compiled, "compiler", compiler)
        return asked

    return put


@pytest.mark.parametrize("kind", ["jobset", "slurm"])
def test_a_manifest_starts_the_training_that_was_planned(
    command, answers, tmp_path, monkeypatch, kind
):
    asked = answers()
    monkeypatch.chdir(tmp_path)
    run = "/shared/my runs/$(a)"
    given = ("--agent", "base", "--topology", "v5e-256", "--set", "policy.remat=step")
    job = ("--manifest", kind, "--run", run, "--image", "europe-docker.pkg.dev/mine/nca:1")
    said = command("plan", *given, *job, "--json")
    assert said.code == 0, said.err
    path = tmp_path / {"jobset": "train.yaml", "slurm": "train.sh"}[kind]
    assert said.json["manifest"] == path.name and f"the job: {path.name}" in said.out
    if kind == "jobset":
        jobs = yaml.safe_load(path.read_text())["spec"]["replicatedJobs"]
        (pod,) = jobs[0]["template"]["spec"]["template"]["spec"]["containers"]
        words = [word.replace("$$(", "$(") for word in pod["command"]]
    else:
        line = next(x for x in path.read_text().splitlines() if x.startswith("srun"))
        words = shlex.split(line)[2:]
    args = build_parser().parse_args(words[1:])
    assert words[0] == "nca-trader" and args.command == "train"
    assert args.run_dir == run and args.distributed
    assert "policy.remat=step" in args.set
    # With these keys the agent is the one that was compiled for the slice.
    trained, (question, *_) = load_agent("base", args.set), asked
    assert trained.mesh == question.agent.mesh and trained.learner == question.agent.learner


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--manifest", "slurm"], "--manifest needs --run DIR"),
        (["--manifest", "jobset", "--run", "a"], "needs --image"),
        (["--run", "a"], "--run has no effect without --manifest; leave it out"),
        (["--manifest", "slurm", "--run", "a", "--topology", "v5e:1x2"], "no machine has 2 chips"),
    ],
)
def test_half_a_job_is_refused_before_it_is_compiled(command, answers, given, words):
    asked = answers()
    said = command("plan", "--agent", "nano", "--topology", "v5e-8", *given)
    assert said.code == 2 and words in said.err and not asked


def test_the_report_has_the_names_that_are_promised_and_reads_as_prose(command, answers):
    asked = answers()
    said = command("plan", "--agent", "nano", "--topology", "v5e-8", "--json", "--quiet")
    assert said.code == 0 and said.err == ""
    assert said.json.keys() >= CONTRACT
    assert said.json["bytes_by_kind"].keys() >= {
        "params", "optimiser", "replay", "rollout", "arguments", "temporaries"
    }  # fmt: skip
    assert said.json["fits"] is True and said.json["hbm_limit"] == int(15.75 * 2**30)
    assert said.json["cycles_over_floor"]["learn: encoder forward"] == 1.25
    for words in (
        "nano in index_daily on v5e:2x4: 8 chips, mesh data = 8, fsdp = 1, model = 1",
        "train it with --set mesh.devices=8",
        "memory: fits: 12 MiB of 15.75 GiB per chip",
        "18 x all-reduce over 8 devices, 226 KiB in all (f32, s32)",
        "nothing was run",
        "bound by compute",
        "1.25 x the floor of the matrix units",
        "batch: 75% of the cycles are accounts",
        "policy.channels = 16 fills 12% of its matrix units; 128 fills them",
        "independent bars per parameter: 0.68  WARNING",
    ):
        assert words in said.out, words
    assert [question.there.name for question in asked] == ["v5e:2x4"]
    assert asked[0].agent.mesh.devices == 8 and len(asked[0].bars) > 4_000


def test_what_does_not_fit_ends_with_1_after_the_json_and_has_no_job(command, answers, tmp_path):
    answers(fits=False, needed=20 * 2**30)
    job = ("--manifest", "slurm", "--run", "a")
    said = command("plan", "--agent", "nano", "--topology", "v5e-8", *job, "--json")
    assert said.code == 1 and "memory: DOES NOT FIT: 20 GiB of 15.75 GiB per chip" in said.out
    assert said.json["fits"] is False
    assert said.err == "nca-trader plan: nano does not fit on a chip of v5e:2x4; see above.\n"
    assert not [*tmp_path.iterdir()]


def test_a_program_that_the_compiler_gave_up_on_is_reported_without_times(command, answers):
    answers(fits=False, needed=None, cost=None, kinds={"params": 28_932})
    said = command("plan", "--agent", "nano", "--topology", "v5e-8", "--json")
    assert said.code == 1 and "more than it has" in said.out and "bound by" not in said.out
    assert said.json["estimate"] is None


def test_a_pod_has_the_tables_mesh_and_says_what_to_set(command, answers):
    asked = answers()
    said = command("plan", "--agent", "nano", "--topology", "v5p-768", "--json")
    assert "on v5p:4x8x12: 384 chips, mesh data = 96, fsdp = 4, model = 1\n" in said.out
    assert asked[0].agent.mesh.axes == (96, 4, 1)
    assert said.json["set"] == {
        "mesh.devices": 384, "mesh.fsdp": 4,
        "learner.logical_shards": 384, "learner.num_segments": 1536
    }  # fmt: skip


def test_a_market_that_is_drawn_needs_no_bars_and_settings_reach_the_compiler(command, answers):
    asked = answers()
    args = ("--env", "ou_mid", "--set", "learner.segment_length=64", "--set", "env.fill=close")
    assert command("plan", "--agent", "nano", "--topology", "v6e", *args).code == 0
    (question,) = asked
    assert question.bars is None and question.there.name == "v6e:2x4"
    assert question.agent.learner.segment_length == 64 and question.env.fill == "close"


def up_to_a_thousand(question):
    """An answer by which 1,000 segments fit."""
    count = question.agent.learner.num_segments
    cost = ProgramCost({"other": Part(10_000 + 1_000 * count, 0)}, {}, 0)
    return Needs(count <= 1_000, 1e9, count * 10**6, {"temporaries": 0}, cost, 0,
                  7_233, 4_895, count * 512, 1.0)  # fmt: skip


LARGEST = ("plan", "--agent", "nano", "--topology", "v5e-8", "--largest", "--json")


def test_largest_prints_both_batches(command, monkeypatch):
    monkeypatch.setattr(compiled, "compiler", lambda: contextlib.nullcontext(up_to_a_thousand))
    said = command(*LARGEST)
    assert said.code == 0
    largest, efficient = said.json["largest"]["largest"], said.json["largest"]["efficient"]
    assert 940 <= largest["num_segments"] <= 1_000
    rates = [n / (10 + n) for n in (largest["num_segments"], efficient["num_segments"])]
    assert (
        rates[1] >= 0.95 * rates[0] > efficient["num_segments"] / (20 + efficient["num_segments"])
    )
    assert f"learner.num_segments = {largest['num_segments']}" in said.out
    assert f"as fast, to 5%: learner.num_segments = {efficient['num_segments']}" in said.out


@pytest.mark.parametrize("compilations", [1, 2])
def test_an_interrupted_search_prints_the_best_so_far(command, monkeypatch, compilations):
    asked = []

    def ask(question):
        if len(asked) == compilations:
            raise KeyboardInterrupt
        asked.append(question.agent.learner.num_segments)
        return up_to_a_thousand(question)

    monkeypatch.setattr(compiled, "compiler", lambda: contextlib.nullcontext(ask))
    said = command(*LARGEST)
    assert said.code == 130 and "the largest batch is the best so far" in said.err
    assert said.json["largest"]["largest"]["num_segments"] == asked[-1]
    assert f"largest batch that fits: learner.num_segments = {asked[-1]}" in said.out


def test_an_interrupt_before_the_first_answer_says_no_more(command, monkeypatch):
    def ask(question):
        raise KeyboardInterrupt

    monkeypatch.setattr(compiled, "compiler", lambda: contextlib.nullcontext(ask))
    said = command(*LARGEST)
    assert said.code == 130 and said.out == "" and said.err.startswith("interrupted; ")


def test_a_long_compilation_says_how_long_it_takes(command, monkeypatch):
    monkeypatch.setattr(progress, "QUIET", 0.02)
    monkeypatch.setattr(progress, "TICK", 0.02)
    monkeypatch.setattr(progress, "LINE_EVERY", 0.1)

    def ask(question):
        time.sleep(1.5)
        return up_to_a_thousand(question)

    monkeypatch.setattr(compiled, "compiler", lambda: contextlib.nullcontext(ask))
    said = command("plan", "--agent", "nano", "--topology", "v5e-8", "--json")
    lines = [line for line in said.err.splitlines() if "compilation 1, num_segments = 64" in line]
    assert len(lines) >= 2 and "0:01" in lines[-1], said.err


class Endless:
    """A question whose process never answers: it sleeps where it is read."""

    def __reduce__(self):
        return time.sleep, (300,)


def test_an_interrupt_does_not_wait_for_the_compiler(monkeypatch, heard):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: True)
    before = multiprocessing.active_children()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        with compiled.compiler() as ask:
            # Once its process is there.
            threading.Thread(target=interrupt_after, args=(before,), daemon=True).start()
            ask(Endless())
    assert time.monotonic() - began < 100
    assert set(multiprocessing.active_children()) <= set(before)


def interrupt_after(before):
    while not set(multiprocessing.active_children()) - set(before):
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--topology", "h100:8"), "--topology h100:8: plan is of TPU slices"),
        (("--topology", "v5e-8", "--set", "learner.sgements=8"), "sgements"),
    ],
)
def test_wrong_input_is_one_line_and_2(command, answers, args, said):
    asked = answers()
    found = command("plan", "--agent", "nano", *args)
    assert found.code == 2 and said in found.err and len(found.err.splitlines()) == 1
    assert asked == []


def test_without_the_compiler_it_ends_in_one_line_that_names_the_extra(command, monkeypatch):
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "libtpu" else there(name)
    )
    said = command("plan", "--agent", "nano", "--topology", "v5e-8")
    assert said.code == 2 and len(said.err.splitlines()) == 1
    assert "pip install libtpu==" in said.err


def test_python_gets_the_same_report(command, answers):
    answers()
    said = command("plan", "--agent", "nano", "--topology", "v5e-8", "--json").json
    report = nca.plan("nano", "v5e-8")
    assert report == {name: said[name] for name in report}
