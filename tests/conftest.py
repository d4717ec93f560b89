"""What every test shares: devices, compile cache, strictness, and where to find big data."""

import collections
import functools
import gc
import importlib.metadata
import importlib.util
import os
import pathlib
import random
import subprocess
import zlib

from rounding import AS_USERS_COMPILE

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Before jax is imported anywhere: eight devices on one CPU, so that a mesh is a mesh in tests. And
# tests are mostly compilation, which takes a third of the time without LLVM's optimisation, without
# the emitters that fuse loops for speed, and in one part. The learner's program sets its own level,
# see `nca_trader.parallel.mesh.compiler_options`. Programs round otherwise then: what is promised
# to the bit is tested as users compile it by a slow test, see tests/test_rounding.py.
FLAGS = {"--xla_force_host_platform_device_count": "8"}
if not AS_USERS_COMPILE:
    FLAGS |= {
        "--xla_backend_optimization_level": "0",
        "--xla_cpu_parallel_codegen_split_count": "1",
    }
    # The compiler for TPUs reads them too. It and jax 0.11 end the process at a flag that they do
    # not know.
    old = importlib.metadata.version("jaxlib").startswith("0.10.")
    if old and importlib.util.find_spec("libtpu") is None:
        FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
for flag, value in FLAGS.items():
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={value}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiled programs are kept between runs; through the environment, so that commands started by
# tests find them as well.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("MPLBACKEND", "agg")
# Small solves cost a third less without a second thread that waits for them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Runs with own code are signed with a key of the tests, and never with the user's.
os.environ["XDG_CONFIG_HOME"] = str(ROOT / ".pytest_cache" / "config")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

# A process holds millions of objects of jax, and a full collection looks into each of them: with
# Python's own thresholds that is a twentieth of the time.
gc.set_threshold(200_000, 50, 100)

# No deadline: the first example compiles. The same examples every time, so that a suite that
# passed here passes for strangers; `--hypothesis-seed` draws others, and more of them.
hypothesis.settings.register_profile(
    "same", deadline=None, derandomize=True, database=None, max_examples=40
)
hypothesis.settings.register_profile("fresh", deadline=None, print_blob=True)
hypothesis.settings.load_profile("same")


def pytest_addoption(parser):
    parser.addoption(
        "--sample",
        type=int,
        metavar="N",
        help="run N of the tests that are chosen, drawn by the tree of files or by SAMPLE_SEED",
    )
    parser.addoption(
        "--due",
        action="store_true",
        help="run those of the tests that are chosen whose turn it is, see .ci/turn",
    )
    parser.addoption(
        "--rewrite-golden",
        action="store_true",
        help="write the figures of tests/test_golden.py again in place of comparing them",
    )


def pytest_configure(config):
    """Load the profile that the command line asks for; workers get the same one."""
    if _fresh_seed(config) is not None:
        hypothesis.settings.load_profile("fresh")


def pytest_report_header(config):
    """Print the seed of fresh draws, which repeats them."""
    seed = _fresh_seed(config)
    return None if seed is None else f"property tests: fresh draws, --hypothesis-seed={seed}"


def _fresh_seed(config):
    return config.getoption("hypothesis_seed", None)


@pytest.hookimpl(wrapper=True)  # `-m` and `-k` choose inside it
def pytest_collection_modifyitems(config, items):
    """Mark cases slow, refuse parameters without an order, and draw the sample."""
    cases, table = collections.defaultdict(list), collections.defaultdict(list)
    for item in items:
        # Two test processes must collect the same tests.
        for mark in item.iter_markers("parametrize"):
            if isinstance(mark.args[1], (set, frozenset)):
                raise pytest.UsageError(f"{item.nodeid}: its parameters are a set; give a tuple.")
        if item.get_closest_marker("heavy"):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
        if item.get_closest_marker("drawn"):
            table[item.nodeid.partition("[")[0]].append(item)
    for found in cases.values():
        (kept,) = found[0].get_closest_marker("few").args
        spread = {round(k * (len(found) - 1) / max(kept - 1, 1)) for k in range(kept)}
        for place, item in enumerate(found):
            if place not in spread:
                item.add_marker(pytest.mark.slow)
    for found in table.values():
        (number,) = found[0].get_closest_marker("drawn").args
        chosen = random.Random(_seed()).sample(range(len(found)), number)
        for place, item in enumerate(found):
            if place not in chosen:
                item.add_marker(pytest.mark.heavy)
                item.add_marker(pytest.mark.slow)
    items.sort(key=place_of)
    yield
    number = config.getoption("--sample")
    if number is not None:
        chosen = random.Random(_seed()).sample(items, min(number, len(items)))
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    if config.getoption("--due"):
        turn = int((ROOT / ".ci/turn").read_text())
        waits = {item: waited(item, turn) for item in items}
        late = [item for item in items if waits[item]]
        WAITS.extend((waits[item], item.nodeid) for item in late)
        config.hook.pytest_deselected(items=late)
        items[:] = [item for item in items if not waits[item]]


# Each merge into main raises the number in .ci/turn. A test that is off by default has its turn at
# every fifteenth, and one of minutes at every thirtieth: which, its name says.
TURNS, TURNS_OF_MINUTES = 15, 30
WAITS = []


def waited(item, turn: int) -> int:
    """How many merges ago a test had its turn; 0 where it has it now."""
    minutes = item.get_closest_marker("slow") and not item.get_closest_marker("heavy")
    turns = TURNS_OF_MINUTES if minutes else TURNS
    return (turn - zlib.crc32(item.nodeid.encode())) % turns


def pytest_report_collectionfinish(config, items):
    """Print how many tests have their turn, and which of the others has waited longest."""
    if WAITS:
        wait, name = max(WAITS)
        many = f"{len(items)} of {len(items) + len(WAITS)} tests have their turn"
        return f"{many}; the longest wait is {wait} merges, of {name}"
    return None


# Two processes share the files, see `IN_PARALLEL` in the Makefile: the longest come first, so that
# none is left alone with one at the end. The seconds of each file are in the cache of pytest.
LONGEST = (
    "optimum/test_outside.py",
    "learner/test_traced.py",
    "parallel/test_distributed.py",
    "cli/test_demo.py",
    "paper/session/test_live.py",
    "evaluate/sweep/test_sweep.py",
    "strategies/test_rules.py",
    "runs/test_links.py",
    "optimum/test_markets.py",
    "agents/test_base.py",
    "envs/test_gym.py",
    "cli/test_commands.py",
    "test_golden.py",
    "evaluate/test_judge.py",
    "paper/session/test_parity.py",
    "watch/test_dashboard_server.py",
    "agents/test_memory.py",
    "runs/test_packed.py",
    "runs/test_consent.py",
    "config/test_every_setting.py",
    "evaluate/lookahead/test_leakcheck.py",
    "agents/test_nca.py",
)


def place_of(item) -> int:
    """Where the file of a test comes: the longest in their order, and then the others."""
    name = item.nodeid.partition("::")[0].removeprefix("tests/")
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


MOST_MAPS = 20_000


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """Free the compiled programs between two test files, where there are many.

    Linux gives a process 65,530 memory maps, and each compiled program takes some. A process that
    kept those of two thousand tests ended with a segmentation fault inside the compiler.
    """
    yield
    if nextitem is None or nextitem.path != item.path:
        with open("/proc/self/maps", "rb") as maps:
            held = sum(1 for _ in maps)
        if held > MOST_MAPS:
            jax.clear_caches()
            gc.collect()


SECONDS = collections.Counter()


def pytest_runtest_logreport(report):
    """Add up the seconds of each test file."""
    SECONDS[report.nodeid.partition("::")[0]] += report.duration


def pytest_sessionfinish(session):
    """Record the seconds for `tools/affected.py`; the most, as a run may choose a few tests."""
    cache = getattr(session.config, "cache", None)
    if cache is not None and not hasattr(session.config, "workerinput"):
        known = cache.get("nca_trader/seconds", {})
        cache.set(
            "nca_trader/seconds", known | {k: max(v, known.get(k, 0)) for k, v in SECONDS.items()}
        )


@functools.cache
def _seed() -> str:
    """The seed of a sample: what the user gives, or the tree of files."""
    if seed := os.environ.get("SAMPLE_SEED"):
        return seed
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD^{tree}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """The folder of large reference data beside the checkout; tests that need it skip without."""
    folder = ROOT.parent / "shared"
    if not (folder / "data").is_dir():
        pytest.skip("no reference data: there is no ../shared/data beside the checkout")
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tiny agent, trained once for all tests; `tiny.copy(folder)` is one to change."""
    from tiny import Tiny

    # A module that compiles quickly may ask for it first; others compare to the bit with it.
    quick = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        return Tiny.train(tmp_path_factory.mktemp("tiny"))
    finally:
        jax.config.update("jax_disable_most_optimizations", quick)


@pytest.fixture(scope="module")
def quick_compile():
    """Compiles in half the time, into slower programs, for modules that compare programs.

    What they compare agrees to rounding, or to the bit, whatever the compiler's optimisations; it
    runs for milliseconds. Never for what is timed, or compared with another process.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def objects(monkeypatch):
    """The objects of the bucket `gs://b` or `s3://b`, by key; see `objects.Objects`."""
    from objects import stored

    return stored(monkeypatch)
