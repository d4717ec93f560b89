"""Agents from outside: what they see, what they answer, and that who cheats gains nothing."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile

import gymnasium
import jax
import numpy as np
import pytest
from documents import blocks
from tiny import AGENT
from windowed import decide_on_window

import nca_trader as nca
from nca_trader import load_agent
from nca_trader.envs import FROZEN
from nca_trader.envs.account.state import open_account
from nca_trader.errors import ConfigError
from nca_trader.optimum import prove as prove_runs
from nca_trader.optimum.frozen import frozen, spec_of_frozen
from nca_trader.optimum.measure import COUNTED, WARM, greedy_positions
from nca_trader.optimum.outside import outside, paths, run_player
from nca_trader.optimum.rows import Point, Score

GP = "garleanu_pedersen"
# Of ou_mid, with hysteresis: far from the best thresholds, and the base of every cheat.
TWIN = """
    import numpy as np

    def honest(seen):
        level, held = seen[:, 1], seen[:, 3]
        return np.select([level < -0.8, level > 0.8], [2, 0], held.astype(int) + 1)
"""


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """32 paths of one piece each; each market is solved, and each seed's paths are drawn, once."""
    monkeypatch.setattr(paths, "CELLS", 2**15)
    monkeypatch.setattr(prove_runs, "known_market", known_market)
    monkeypatch.setattr(outside, "draw_paths", drawn_once)


known_market = functools.cache(prove_runs.known_market)
DRAWN = {}


def drawn_once(market, config, seed):
    if (market.name, seed) not in DRAWN:
        DRAWN[market.name, seed] = paths.draw_paths(market, config, seed)
    return DRAWN[market.name, seed]


@pytest.fixture
def proven(tmp_path, monkeypatch):
    """Proves a function of a file, on paths that are the same for all agents of a test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(outside.secrets, "randbits", lambda bits: 2**62 + 5)

    def prove(text, name="act", market="ou_mid", **given):
        file = tmp_path / "mine.py"
        file.write_text(textwrap.dedent(text))
        (proof,) = nca.prove([market], f"{file}:{name}", **given)
        return proof

    return prove


def test_the_optimal_rule_reaches_the_optimum_and_a_constant_nothing(proven):
    """Its rate and aim by the docstring's formula; the predictor is read off the volume."""
    g, cost, decay, sigma, sig_f = 5.0, 20.0, 0.1, 0.01, 0.0005
    rate = 2 * g / (g + math.sqrt(g * g + 4 * g * cost))
    aim = 1 / (g * sigma**2) / (1 + decay * rate * cost / g)
    deviation = sig_f / math.sqrt(1 - (1 - decay) ** 2)
    text = f"""
        import numpy as np

        def best(seen):
            return (1 - {rate}) * seen[:, 4:5] + {rate * aim * deviation} * seen[:, 2:3]
    """
    best = proven(text, "best", GP)
    assert best.passed and best.reached.fraction > 0.97, best
    row = best.row()
    assert row["seed"] == 2**62 + 5 and row["seed_given"] is False and row["steps"] is None
    assert row["entry"]["kind"] == "function" and row["entry"]["name"] == "best"
    assert row["curve"] == [[None, None, row["fraction"], row["error"]]]
    assert row["no_history"] is row["no_neighbours"] is row["untrained"] is None
    assert row["random"] < row["constant"] <= 0.05 and abs(row["cash"]) < 0.05


@pytest.mark.heavy
def test_a_memory_is_carried_and_the_control_without_history_forgets_it(proven):
    """`lag` trades one bar late; forgotten at every bar, it never trades."""
    text = """
        import numpy as np

        def lag(seen, memory):
            last = np.zeros(len(seen)) if memory is None else memory
            return np.select([last < -0.8, last > 0.8], [2, 0], 1), seen[:, 1].copy()
    """
    proof = proven(text, "lag")
    assert proof.reached.fraction > 0.4
    assert proof.without["no_history"] == pytest.approx(proof.without["cash"], abs=1e-12)
    assert proven(text, "lag", controls=False).without["no_history"] is None


@pytest.mark.heavy
def test_an_agent_sees_what_the_gymnasium_environment_shows():
    """Bar by bar, of one path, with actions that move its account."""
    market, config = known_market(GP)
    drawn = paths.draw_paths(market, config, 5)
    seen, rng = [], np.random.default_rng(0)
    actions = rng.uniform(-9, 9, (40, drawn.features.shape[1], 1)).astype(np.float32)

    def decide(observations):
        seen.append(observations[3].copy())
        return actions[len(seen) - 1] if len(seen) <= 40 else 0 * actions[0]

    paths.play(drawn, decide)
    length = paths.HISTORY + WARM + COUNTED + 1
    seed = int((np.random.SeedSequence(5).generate_state(32, np.uint64) >> 1)[3])
    env = nca.TradingEnv(
        nca.synthetic.make(GP, num_bars=length, seed=seed),
        dataclasses.replace(config, market_bars=length, random_start=False),
    )
    gym = gymnasium.make("nca_trader/Trading-v0", env=env)
    observation, _ = gym.reset(seed=0, options={"start": paths.HISTORY})
    for bar in range(40):
        np.testing.assert_allclose(seen[bar], observation, rtol=1e-6, atol=1e-6)
        observation = gym.step(actions[bar, 3])[0]
    assert len(seen) == WARM + COUNTED


@pytest.mark.heavy
def test_paths_are_draws_of_their_own_and_no_piece_shares_a_bar():
    market, config = known_market("ring_hop3")
    drawn = paths.draw_paths(market, config, 1)
    assert drawn.features.shape == (WARM + COUNTED, paths.LEAST, 16 * 3)
    assert len(np.unique(drawn.features[0, :, 0])) == paths.LEAST
    counted = drawn.rows[:, WARM:]
    assert len(np.unique(counted)) == counted.size and counted.max() < len(drawn.task.returns) - 1


def test_without_neighbours_each_asset_is_seen_among_those_of_another_path():
    """Against a loop over paths and assets."""
    rng = np.random.default_rng(0)
    seen = rng.normal(size=(3, 2 * 4 + 2 * 2 + 1)).astype(np.float32)  # 2 assets, 4 features
    rows = []
    act = paths.alone(lambda mixed: rows.append(mixed) or np.arange(12).reshape(6, 2), 2, 4)
    np.testing.assert_array_equal(act(seen), [[0, 3], [4, 7], [8, 11]])
    for path in range(3):
        for asset in range(2):
            other = seen[(path + 1) % 3].copy()
            own = [*range(4 * asset, 4 * asset + 4), 8 + asset, 10 + asset]
            other[own] = seen[path][own]
            other[12] = 1 - other[8] - other[9]
            np.testing.assert_allclose(rows[0][2 * path + asset], other, rtol=1e-6)


CHEATS = {
    "looks at the file system": """
        import os, time

        BEGAN = time.time()

        def act(seen):
            for folder in (".", "/dev/shm", "/proc/self/fd"):
                for file in os.scandir(folder):
                    try:
                        fresh = file.is_file() and file.stat().st_mtime > BEGAN
                    except OSError:
                        continue
                    if fresh and file.name != "mine.py" and os.getcwd() in file.path:
                        raise SystemExit("found")
            return honest(seen)
    """,
    "guesses the seed": """
        import glob, os, re

        def act(seen):
            text = ""
            for name in [f"/proc/self/{part}" for part in ("cmdline", "environ")] + [
                f"/proc/{os.getppid()}/cmdline", f"/proc/{os.getppid()}/environ"
            ]:
                try:
                    text += open(name, errors="replace").read()
                except OSError:
                    pass
            found = {int(x) for x in re.findall("[0-9]+", text)}
            if 2**62 + 5 in found:  # the seed of this test
                raise SystemExit("found")
            return honest(seen)
    """,
    "keeps state over resets": """
        TABLE, LAST = {}, []

        def act(seen, memory):
            if memory is None and LAST:
                LAST.clear()
            if LAST:
                for before, now in zip(LAST[-1], seen[:, 0]):
                    TABLE[before.tobytes()] = 2 if now > 0 else 0
            LAST.append(seen[:, :2].copy())
            known = [TABLE.get(now.tobytes(), -1) for now in seen[:, :2]]
            return np.where(np.array(known) >= 0, known, honest(seen)), True
    """,
}


@pytest.mark.heavy
@pytest.mark.parametrize("cheat", CHEATS)
@pytest.mark.few(1)
def test_who_cheats_gains_nothing(proven, cheat):
    """Each decides as its honest twin where its trick finds nothing, and the fraction is the same.

    The cheat that finds a seed, or a file, ends its process instead.
    """
    honest = proven(TWIN, "honest", controls=False).reached
    assert 0.3 < honest.fraction < 0.95
    forgets = "memory" in CHEATS[cheat]
    cheated = proven(textwrap.dedent(TWIN) + textwrap.dedent(CHEATS[cheat]), controls=forgets)
    assert cheated.reached.fraction == honest.fraction
    assert not cheated.reached.looks_ahead


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("body", "market", "says"),
    [
        (
            "np.full(len(seen), np.nan)",
            GP,
            "mine.py:act on garleanu_pedersen, step 1: returned NaN",
        ),
        ("np.zeros(3)", GP, r"returned float64 \[3\]; return numbers \[32\]"),
        ("np.zeros(len(seen))", "ou_mid", r"returned float64 \[32\]; return whole numbers \[32\]"),
        ("np.full(len(seen), 3)", "ou_mid", "returned 3; return 0 to 2"),
        ("None", "ou_mid", r"returned object \[\]"),
        ("1 // 0", "ou_mid", r"ZeroDivisionError at line 3 \(`.*`\): integer"),
        ("os._exit(7)", "ou_mid", "step 1: its process ended"),
        ("exit(7)", "ou_mid", "SystemExit at line 3"),
    ],
)
def test_an_answer_that_is_none_is_refused_in_a_line(proven, body, market, says):
    with pytest.raises(ConfigError, match=says) as caught:
        proven(f"import os, numpy as np\ndef act(seen):\n    return {body}\n", market=market)
    assert len(str(caught.value).splitlines()) == 1


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the process group ends")
DAEMON = """
    import os, signal, sys, time

    if not os.fork():
        os.setsid()
        if not os.fork():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with open("part", "w") as file:
                file.write(str(os.getpid()))
            os.rename("part", "daemon")
            os.execvp("sleep", ["sleep", "600"])
        os._exit(0)
    os.wait()
    while not os.path.exists("daemon"):
        time.sleep(0.01)
"""
# Each starts the next one and ends, for some seconds.
CHAIN = """
        if not os.fork():
            end = time.monotonic() + 20
            while time.monotonic() < end and not os.fork():
                pass
            os._exit(0)
        time.sleep(600)
"""
LATE = "is not done after 4 s; give more time, e.g. agent_seconds=8"


@ON_LINUX
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return np.ones((len(seen), 1), np.float32)", ""),
        ("time.sleep(600)", LATE),
        ("os.kill(os.getppid(), signal.SIGSTOP), time.sleep(600)", LATE),
        pytest.param(CHAIN.strip(), LATE, marks=pytest.mark.heavy),
        ("os._exit(3)", "its process ended"),
        ("1 // 0", "ZeroDivisionError"),
    ],
)
def test_what_an_agent_starts_ends_with_it_also_what_left_its_session(proven, tmp_path, body, says):
    text = f"{DAEMON}\n    import numpy as np\n\n    def act(seen):\n        {body}\n"
    with pytest.raises(ConfigError, match=says) if says else contextlib.nullcontext():
        proven(text, market=GP, controls=False, agent_seconds=4 if says == LATE else 600)
    assert (tmp_path / "daemon").exists()
    assert not [pid for pid in os.listdir("/proc") if works_in(tmp_path, pid)]  # at once


def works_in(folder, pid):
    """Whether another process works in a folder."""
    with contextlib.suppress(OSError):
        there = pid.isdigit() and os.readlink(f"/proc/{pid}/cwd") == str(folder)
        return there and int(pid) != os.getpid()


@pytest.mark.parametrize("wrong", [0, -1, math.nan, math.inf, "9"])
def test_a_time_that_is_none_is_refused_in_a_line(proven, wrong):
    with pytest.raises(ConfigError, match=r"agent_seconds=.*: give a number above 0, e.g. 600"):
        proven(TWIN, "honest", agent_seconds=wrong)


SPY = """
    import ctypes, json, os

    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()
    while not open(f"/proc/{parent}/cmdline").read().endswith("the prover\\0"):
        parent = int(open(f"/proc/{parent}/stat").read().rpartition(")")[2].split()[1])
    found = {}
    for name in ("mem", "environ", "maps"):
        try:
            open(f"/proc/{parent}/{name}", "rb").close()
            found[name] = True
        except OSError:
            found[name] = False
    word = (ctypes.c_size_t * 2)(id(found), 8)
    read = libc.process_vm_readv(parent, word, 1, word, 1, 0) != -1
    found["process_vm_readv"] = read or ctypes.get_errno() != 1  # not permitted
    found["pidfd_getfd"] = libc.syscall(438, libc.syscall(434, parent, 0), 0, 0) != -1
    if os.getuid():  # root owns what is not to be read
        found["fd"] = os.access(f"/proc/{parent}/fd", os.R_OK)
    with open("found", "w") as file:
        json.dump(found, file)
"""
WITHOUT_RIGHTS = """
import ctypes, os, sys

for right in range(64):  # root without its rights reads no more than another user
    ctypes.CDLL(None).prctl(24, right, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@ON_LINUX
@pytest.mark.heavy
def test_the_memory_of_the_prover_is_closed_before_an_agent_loads(root, tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(SPY))
    program = f"import nca_trader as nca; nca.prove(['{GP}'], 'mine.py:act')"
    words = [sys.executable, "-c", program, "the prover"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RIGHTS, *words], cwd=tmp_path, stderr=subprocess.PIPE,
        text=True, env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    assert "has no function 'act'" in done.stderr
    found = json.loads((tmp_path / "found").read_text())
    assert len(found) >= 5 and not any(found.values()), found


def test_who_knows_later_states_earns_more_than_is_possible_and_fails():
    """Its returns are no better than the optimal policy's, but it saves costs."""
    market, config = known_market("ou_mid")
    drawn, cost = drawn_once(market, config, 5), market.costs.commission
    length, count = drawn.features.shape[:2]
    rows = drawn.rows[:: len(drawn.rows) // count, 0][:, None] + np.arange(length)
    mean = drawn.task.expected_return(drawn.task.states[rows])[..., 0]
    held = np.array([-1.0, 0.0, 1.0])
    worth, best = np.zeros((count, 3)), np.empty((length, count, 3), int)
    for bar in range(length - 1, -1, -1):
        each = mean[:, bar, None, None] * held - cost * abs(held[:, None] - held)
        each = each + worth[:, None]
        best[bar], worth = each.argmax(-1), each.max(-1)
    now, ordered = np.ones(count, int), np.empty((length, count, 1))
    for bar in range(length):
        now = best[bar][np.arange(count), now]
        ordered[bar, :, 0] = held[now]
    reached = paths.judge(drawn, ordered)
    assert reached.fraction > 1.01 and reached.excess < 0.0
    proof = Score(market="ou_mid", seed=5, curve=[Point(math.nan, None, reached)], given=True)
    assert proof.complaint == "earns more than is possible: it looks ahead" and not proof.passed
    assert proof.row()["seed_given"] is True


@pytest.mark.few(1)
@pytest.mark.parametrize("first", [300, 0])
def test_an_account_that_loses_all_is_bankrupt_and_no_cash(proven, first):
    """Kelly's coin pays a fifth of the bet: five times equity is lost at its first tails."""
    text = f"""
        import numpy as np

        bar = 0

        def act(seen):
            global bar
            bar += 1
            return np.full((len(seen), 1), 1e30 if bar > {first} else 0.0, np.float32)
    """
    proof = proven(text, market="kelly", controls=False)
    row = proof.row()
    assert row["complaint"] == "goes bankrupt" and row["fraction"] is None and not proof.passed
    assert "goes bankrupt" in str(proof) and "nan" not in str(proof)
    assert row["cash"] == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize(
    "said", [b"\\xff{", b"[]", b'{"error": {"a": 1}}', b"3", b'{"x": 1}', b'{"memory": "no"}']
)
@pytest.mark.few(3)
def test_facts_of_another_kind_are_one_line(proven, said):
    text = f"""
        import sys
        from multiprocessing.connection import Connection

        Connection(int(sys.argv[1])).send_bytes({said!r})

        def act(seen):
            return seen
    """
    with pytest.raises(ConfigError, match="its process does not say what"):
        proven(text)


def test_a_function_cannot_say_that_it_is_another_agent(proven):
    text = """
        import json, sys
        from multiprocessing.connection import Connection
        import numpy as np

        facts = {"memory": False, "digest": "f" * 64, "library": "stable_baselines3", "steps": 9}
        link = Connection(int(sys.argv[1]))
        link.send_bytes(json.dumps(facts).encode())
        while True:  # as the program that loads it would
            message = link.recv_bytes()
            link.send_bytes(b"A" + np.ones(32, np.int32).tobytes())
    """
    row = proven(text, controls=False).row()
    assert row["entry"]["library"] is None and row["steps"] is None
    assert len(row["entry"]["digest"]) == 64 and row["entry"]["digest"] != "f" * 64


@pytest.mark.parametrize("seeds", [[], [-1], [1.5], ["x"], [None]])
def test_seeds_that_are_none_are_refused_in_a_line(proven, seeds):
    with pytest.raises(ConfigError, match="give whole numbers of at least 0"):
        proven(TWIN, "honest", seeds=seeds)


@ON_LINUX
@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.few(1)
def test_a_command_that_is_stopped_leaves_no_process(root, tmp_path, number):
    text = f"{DAEMON}\n    open('loading', 'w').close()\n    time.sleep(600)\n"
    (tmp_path / "mine.py").write_text(textwrap.dedent(text))
    # What starts the tests may ignore Ctrl-C, e.g. a shell's background.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        f"from nca_trader.cli import main; sys.exit(main(['prove', '{GP}', '--agent=mine.py:act']))"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    wait_until((tmp_path / "loading").exists)
    command.send_signal(number)
    _, said = command.communicate(timeout=30)
    wait_until(lambda: not any(works_in(tmp_path, pid) for pid in os.listdir("/proc")))
    if number != signal.SIGKILL:
        assert command.returncode == 130 and said.endswith("what was saved before stays\n")


def test_stacked_observations_that_no_file_explains_name_the_remedy():
    """Stable-Baselines3 says how its stack is filled; a wrapper of rejax or gymnax does not."""
    spec, mismatch = spec_of_frozen(frozen("ou_mid")), outside.mismatch
    said = mismatch({"observation": 18}, spec, 6)
    assert said.startswith("it observes numbers: 18, and the market has 6; its file does not say")
    assert (
        "how 3 bars are stacked: give FILE.py:NAME, a function of observations and memory" in said
    )
    assert mismatch({"observation": 7}, spec, 6) == "it observes numbers: 7, and the market has 6"
    assert not mismatch({"observation": 6}, spec, 6)


def wait_until(done):
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("def f(: pass", "f", "invalid syntax"),
        ("import nothing_of_that_name", "f", "ModuleNotFoundError at line 1"),
        ("x = 3", "y", "has no function 'y'; check the name"),
        ("x = 3", "x", "'x' of .*mine.py is of type int; name a function"),
        ("import sys; sys.exit(3)", "f", "SystemExit at line 1"),
        ("def f(seen, memory): return 1", "f", "takes a memory; return actions and memory"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_refused_in_a_line(proven, text, name, says):
    with pytest.raises(ConfigError, match=says) as caught:
        proven(text, name)
    assert len(str(caught.value).splitlines()) == 1


def test_pickled_objects_and_other_pythons_need_their_options(tmp_path):
    for name in ("model.zip", "state.pkl"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(ConfigError, match=r"pickled objects.*allow_code=True"):
            nca.prove(["ou_mid"], tmp_path / name)
    with zipfile.ZipFile(tmp_path / "odd.zip", "w") as archive:
        archive.writestr("data", "{}")
    with pytest.raises(ConfigError, match="KeyError: 'policy_class'"):
        nca.prove(["ou_mid"], f"{tmp_path}/odd.zip", allow_code=True)
    with pytest.raises(ConfigError, match=r"name a function of it, .*/mine\.py:NAME"):
        nca.prove(["ou_mid"], f"{tmp_path}/mine.py")
    with pytest.raises(ConfigError, match=r"no file .*none.pkl; check the path"):
        nca.prove(["ou_mid"], f"{tmp_path}/model.zip,{tmp_path}/none.pkl", allow_code=True)
    (tmp_path / "f.py").write_text("def f(seen): return seen")
    with pytest.raises(ConfigError, match=r"cannot be started \(No such file"):
        nca.prove(["ou_mid"], f"{tmp_path}/f.py:f", python="/none/python")
    with pytest.raises(ConfigError, match="not trained here; give no steps"):
        nca.prove(["ou_mid"], f"{tmp_path}/f.py:f", steps=5)
    with pytest.raises(ConfigError, match="takes no values"):
        nca.prove(["ou_mid"], f"{tmp_path}/f.py:f(a=1)")


@pytest.mark.heavy
@pytest.mark.parametrize("seeds", [1, 2])
def test_a_run_streams_what_it_decides_of_whole_windows(tiny, tmp_path, seeds):
    """Of two accounts with other weights; the window is as long as its receptive field."""
    agent = dataclasses.replace(AGENT, num_seeds=seeds)
    run = tiny.run if seeds == 1 else nca.train(tiny.env, agent, tmp_path / "run")
    act, facts = run_player.load(str(run.path), allow_code=False)
    policy, params, env = run.policy, run.params(), tiny.env
    assert facts["observation"] == 2 * 2 + 2 * 2 + 1 and facts["memory"]
    last, span = 150, policy.receptive_field
    held = np.float32([[0.2, -0.3], [0.5, 0.5]])
    memory = None
    for bar in range(last - span + 1, last + 1):
        features = np.tile(env.features[bar].ravel(), (2, 1))
        seen = np.concatenate([features, held, held, 1 - held.sum(1, keepdims=True)], axis=1)
        targets, memory = act(seen.astype(np.float32), memory)
    window = env.features[last - span + 1 : last + 1]
    for row in range(2):
        account = open_account(jax.numpy.asarray(held[row]))
        logits = decide_on_window(policy, params, window, np.ones((span, 2), bool), account)
        expected = policy.target(logits, account)
        np.testing.assert_allclose(targets[row], expected, atol=1e-6)


@pytest.mark.heavy
def test_a_run_that_observes_something_else_is_not_applicable(tiny):
    """With one market that is an error; with several a row, and the others go on."""
    says = r"it observes \['return_1', 'return_5'\], and the market has \['return_1', 'price"
    with pytest.raises(ConfigError, match=says):
        nca.prove([GP], tiny.path)
    lines = []
    with pytest.raises(ConfigError, match="can play none of these markets"):
        nca.prove([GP, "ou_mid"], tiny.path, say=lines.append)
    assert len(lines) == 2 and all("n/a: it observes" in line for line in lines)


def test_the_function_of_the_guide_plays_and_what_its_process_prints_is_not_ours(
    root, proven, capfd
):
    (text,) = blocks((root / "docs/guides/prove.md").read_text(), "python")
    proof = proven(f"print('loud')\n{text}", "revert", controls=False)
    assert 0.5 < proof.reached.fraction < 1.0 and proof.row()["digest"] == FROZEN["ou_mid"]
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("assets", [3, 2])
@pytest.mark.few(1)
def test_paths_hold_whole_pieces_for_any_number_of_assets(monkeypatch, assets):
    """`CELLS` bars of three assets are no multiple of the number of paths."""
    monkeypatch.setattr(paths, "CELLS", 5 * COUNTED * assets)
    monkeypatch.setattr(paths, "LEAST", 2)
    monkeypatch.setattr(paths, "PATHS", 3)
    _, config = known_market("factor_panel")
    market = nca.synthetic.market("factor_panel", assets=assets)
    config = dataclasses.replace(market.config, features=config.features, market_state=False)
    drawn = paths.draw_paths(market, config, 1)
    assert drawn.rows.shape == (3, WARM + COUNTED)
    best = paths.optimal_positions(drawn.task, drawn.rows)
    assert paths.judge(drawn, np.moveaxis(best, 0, 1)).fraction == pytest.approx(1.0)


@pytest.mark.heavy
def test_a_cheat_that_is_given_the_seed_looks_ahead(proven):
    """A planted one: it draws the paths itself. The row says that the seed was given."""
    text = f"""
        import numpy as np
        import nca_trader as nca
        from nca_trader.optimum.outside import paths

        seeds = np.random.SeedSequence(5).generate_state({paths.LEAST}, np.uint64) >> 1
        length = {paths.HISTORY + WARM + COUNTED + 1}
        returns = np.stack([
            nca.synthetic.make("ou", num_bars=length, seed=int(s)).returns[:, 0] for s in seeds
        ])
        bar = {paths.HISTORY}

        def act(seen):
            global bar
            bar += 1
            return np.where(returns[:, bar] > 0, 2, 0)
    """
    proof = proven(text, seeds=[5], controls=False)
    assert proof.reached.looks_ahead and "looks ahead" in proof.complaint
    assert proof.row()["seed_given"] is True and not proof.passed


@pytest.mark.heavy
def test_the_control_without_neighbours_shows_what_they_are_worth(proven):
    """In `ring_hop3` an asset follows the one three places before it."""
    text = """
        import numpy as np

        def follow(seen):
            last = seen[:, :48].reshape(-1, 16, 3)[..., 0]
            return np.where(np.roll(last, 3, axis=1) > 0, 2, 0)
    """
    proof = proven(text, "follow", "ring_hop3")
    assert proof.reached.fraction > 0.95 and abs(proof.without["no_neighbours"]) < 0.15


@pytest.mark.heavy
def test_a_run_plays_as_it_does_in_this_process(tmp_path):
    """Bar by bar in another process, and along the whole paths in this one."""
    market, config = known_market("ou_mid")
    env = nca.TradingEnv(config=dataclasses.replace(config, market_bars=20_000))
    nano = load_agent("nano", ["learner.steps=64"])  # hardly trained, it trades all the time
    run = nca.train(env, nano, tmp_path / "run", seed=0)
    (proof,) = nca.prove(["ou_mid"], tmp_path / "run", seeds=[9])
    drawn = paths.draw_paths(market, config, 9)
    length = paths.HISTORY + WARM + COUNTED + 1
    config, rows = dataclasses.replace(config, market_bars=length), np.arange(length - 1)
    each = []
    for seed in np.random.SeedSequence(9).generate_state(32, np.uint64) >> 1:
        path = nca.TradingEnv(nca.synthetic.make("ou", num_bars=length, seed=int(seed)), config)
        given = (path, run.policy, run.params(), rows[None, paths.HISTORY :])
        each.append(greedy_positions(*given)[0])
    expected = paths.judge(drawn, np.stack(each, axis=1))
    assert proof.reached.fraction == pytest.approx(expected.fraction, abs=1e-3)
    assert proof.reached.turnover == pytest.approx(expected.turnover, abs=1e-3)
    assert expected.turnover > 0.005 and proof.row()["steps"] >= 64
