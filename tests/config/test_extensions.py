"""Names of the user's own code: what they load, what a run records of them, what is refused."""

import dataclasses
import importlib.util
import py_compile
import re
import sys
import textwrap
import types

import numpy as np
import pytest

import nca_trader as nca
from nca_trader import ConfigError, EnvConfig, RunError
from nca_trader.config import AgentConfig, LearnerConfig, PolicyConfig, extensions
from nca_trader.config.extensions import load, name_of, origin_of, parse_name
from nca_trader.config.modules import digest_of_files
from nca_trader.config.toml import to_toml
from nca_trader.data.feature_sets import feature_set
from nca_trader.data.features import FEATURES
from nca_trader.envs.gym import GymEnv
from nca_trader.envs.rewards import SCHEMES
from nca_trader.markets import seed_of, task_of
from nca_trader.optimum.prove import known_market
from nca_trader.runs.consent import codes_of, own_names, refuse_changed

CODE = """
'''Words.'''
import os
from near import GAIN

LIMIT = 3  # a comment
TABLE = {}
TABLE["a"] = 1

def helper(x):
    '''Adds.'''
    return x + LIMIT

def unused():
    return 7

def momentum(period=20):
    return helper(period) * GAIN * len(TABLE)

if __name__ == "__main__":
    print(unused())
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Write modules into the current folder, and forget them afterwards."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return tmp_path / f"{name}.py"

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("mine:f", ("mine", "f", None)),
        ("a.b:f()", ("a.b", "f", "")),
        ("lib/my code.py:f(x=[1, 2])", ("lib/my code.py", "f", "x=[1, 2]")),
    ],
)
def test_a_name_of_own_code_has_a_module_a_member_and_values(text, parts):
    assert parse_name(text) == parts


@pytest.mark.parametrize(
    "text", ["rsi", "mine:", ":f", "a b:f", "state:price", "mine:f(", "C:/x.csv"]
)
def test_other_texts_are_no_names_of_own_code(text):
    assert parse_name(text) is None


def test_a_name_with_values_calls_what_it_names(own):
    own("ext_called", "def f(a=1, b='x'):\n    return (a, b)\n")
    assert load("features", "ext_called:f")() == (1, "x")
    assert load("features", "ext_called:f(a=2, b='y')") == (2, "y")
    with pytest.raises(ConfigError, match=r"ext_called:f\(c=1\): TypeError.*correct that"):
        load("features", "ext_called:f(c=1)")
    with pytest.raises(ConfigError, match=r"write values as in ext_called:f\(a=1\)"):
        load("features", "ext_called:f(1)")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ext_absent:f", None, "no module named 'ext_absent' here; install its package, or go to"),
        ("ext_absent.py:f", None, "ext_absent.py: no such file; check the path"),
        ("ext_m:fn", "def fun():\n    pass\n", "ext_m has no 'fn'; did you mean 'fun'"),
        ("ext_m:f", "import ext_other_absent\n", "importing it raises ModuleNotFoundError"),
        ("ext_m:f", "x = 1 / 0\n", r"importing it raises ZeroDivisionError at ext_m.py line 1"),
        ("ext_m:f", "def f(:\n", r"ext_m.py line 1: .*SyntaxError"),
        ("ext_m:f", "raise SystemExit(3)\n", "importing it raises SystemExit"),
    ],
)
def test_code_that_cannot_be_loaded_is_refused_in_one_line(own, name, text, message):
    if text is not None:
        own("ext_m", text)
    with pytest.raises(ConfigError, match=message) as refused:
        load("features", name)
    assert len(str(refused.value).splitlines()) == 1


def test_the_digest_is_of_the_file_and_of_the_own_files_that_it_imports(own, tmp_path):
    def now(code=CODE, near="GAIN = 2.0\n", other="X = 1\n"):
        own("ext_print", code)
        own("near", near)
        own("other", other)
        return digest_of_files("ext_print")

    first = now()
    assert now(other="X = 2\n") == first  # a file that it does not import
    # Whatever runs at an import is in a file, so every change of a file counts.
    changes = {
        now(CODE.replace("# a comment", "# another")),
        now(CODE + "_ = open\n"),
        now(CODE.replace("'__main__'", "'elsewhere'").replace('"__main__"', '"elsewhere"')),
        now(CODE + "import other\n"),
        now(CODE + "import other\n", other="X = 2\n"),
        now(near="GAIN = 3.0\n"),
    }
    assert len(changes) == 6 and first not in changes
    assert now() == first
    # Python takes a package before a file of the same name.
    (tmp_path / "near").mkdir()
    (tmp_path / "near/__init__.py").write_text("GAIN = 5.0\n")
    assert digest_of_files("ext_print") != first


def test_the_digest_reaches_through_a_package(own, tmp_path):
    (tmp_path / "ext_pack").mkdir()
    files = {
        "__init__": "from .inner import f\n",
        "inner": "from . import constants\ndef f():\n    return constants.C\n",
        "constants": "C = 1\n",
    }

    def now(module="ext_pack", **changes):
        for name, text in (files | changes).items():
            (tmp_path / "ext_pack" / f"{name}.py").write_text(text)
        return digest_of_files(module)

    first, inner = now(), now("ext_pack.inner")
    assert now(constants="C = 2\n") != first
    assert now(inner=files["inner"] + "\n") != first
    assert now("ext_pack.inner", __init__=files["__init__"] + "X = 1\n") != inner  # it runs first
    assert now() == first


def test_own_code_is_loaded_from_its_source(own, tmp_path):
    """Bytecode next to a file may be of other code, and nothing would check it."""
    file = own("ext_fresh", "import ext_near\ndef f():\n    return ext_near.X\n")
    near = own("ext_near", "X = 1\n")
    for path in (file, near):
        evil = tmp_path / "evil.py"
        evil.write_text("raise SystemExit('bytecode ran')\n")
        py_compile.compile(
            str(evil), cfile=importlib.util.cache_from_source(str(path)),
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )  # fmt: skip
    assert load("features", "ext_fresh:f")() == 1
    sys.modules.pop("ext_near")
    assert load("features", "ext_fresh.py:f")() == 1


def test_what_own_code_imports_is_never_of_the_folder_of_the_command(own, tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    text = "try:\n    import ext_third\nexcept ImportError:\n    ext_third = None\n"
    (tmp_path / "lib/ext_mine.py").write_text(f"{text}def f():\n    return ext_third\n")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    own("ext_third", "X = 1\n")
    assert load("features", "ext_mine:f")() is None


def test_names_below_a_package_without_a_file_are_refused_in_one_line(own):
    with pytest.raises(ConfigError, match="no module named 'ext_ns' here"):
        load("features", "ext_ns.sub.m:f")


def test_a_run_refuses_changed_missing_and_planted_code(own, tmp_path):
    own("near", "GAIN = 2.0\n")
    file = own("ext_run", CODE)
    codes = codes_of({"ext_run:momentum(period=3)": "features", "rsi": "features"})
    assert list(codes) == ["ext_run:momentum(period=3)"]
    refuse_changed(codes, "runs/a")
    for name in ("run.json", "env.toml"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"is code inside the run folder .*, which is never run"):
        load("features", "ext_run:momentum(period=3)")
    file.write_text(CODE.replace("LIMIT = 3", "LIMIT = 4"))
    with pytest.raises(RunError, match=r"^runs/a: ext_run:momentum\(period=3\) was changed in"):
        refuse_changed(codes, "runs/a")
    file.unlink()
    with pytest.raises(RunError, match=r"^runs/a: .*: no module named 'ext_run' here"):
        refuse_changed(codes, "runs/a")
    assert "ext_run" not in sys.modules  # none of this has run it


def test_an_entry_point_is_a_name_and_its_package_is_named_when_missing(own, tmp_path, monkeypatch):
    own(
        "ext_entry",
        "from nca_trader.data.features import rsi\ndef mine(period=5):\n    return rsi(period)\n",
    )
    about = tmp_path / "lib" / "ext_dist-1.2.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ext-dist\nVersion: 1.2\n")
    (about / "entry_points.txt").write_text("[nca_trader.features]\next_mine = ext_entry:mine\n")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    extensions.installed_points.cache_clear()
    try:
        assert "ext_mine" in FEATURES and "ext_mine" in list(FEATURES)
        bars = nca.sample_bars("sp500")[:60]
        np.testing.assert_array_equal(
            feature_set(("ext_mine(period=14)",)).batch(bars), feature_set(("rsi",)).batch(bars)
        )
        codes = codes_of({"ext_mine": "features"})
        assert codes["ext_mine"].package == "ext-dist 1.2"
        (about / "entry_points.txt").unlink()
        extensions.installed_points.cache_clear()
        with pytest.raises(RunError, match=r"ext_mine is of the package ext-dist 1\.2, which is"):
            refuse_changed(codes, "runs/a")
    finally:
        extensions.installed_points.cache_clear()


def test_an_entry_point_in_the_folder_of_the_command_is_not_installed(own, tmp_path, monkeypatch):
    """`python -m` looks into the current folder for packages, and it may be a stranger's."""
    about = tmp_path / "ext_here-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ext-here\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[nca_trader.features]\next_planted = numpy:load\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    caches = (extensions.installed_points, extensions._extending)
    for cache in caches:
        cache.cache_clear()
    try:
        assert "ext_planted" not in FEATURES
        with pytest.raises(ConfigError, match="an installed package without an entry point"):
            load("features", "numpy:load(file='x')")
        monkeypatch.chdir(tmp_path.parent)  # the same package, installed elsewhere, is found
        extensions.installed_points.cache_clear()
        assert "ext_planted" in FEATURES
    finally:
        for cache in caches:
            cache.cache_clear()


def test_an_object_is_kept_by_its_name_and_found_again(own):
    own("ext_object", "from nca_trader.data.features import rsi\nquick = rsi(3)\n")
    module = extensions.module_of("ext_object")
    config = EnvConfig(features=(module.quick, "rsi"))
    assert config.features == ("ext_object:quick", "rsi")
    assert load("features", config.features[0]) is module.quick
    assert name_of(paid, "reward") == f"{paid.__module__}:paid"
    with pytest.raises(ConfigError, match=r"reward: a function .* has no name that another"):
        EnvConfig(reward=lambda config, spec, step: step.log_return)


def paid(config, spec, step):
    return step.log_return


def test_configs_take_names_of_own_code_and_refuse_other_words():
    env = EnvConfig(
        reward="mine:paid",
        features=("rsi", "mine:f(n=2)"),
        costs=nca.Costs(own=("mine:fee",)),
        actions="mine:steps",
        market="mine:drawn(phi=0.9)",
    )
    agent = AgentConfig(
        policy=PolicyConfig(kind="mine:P", hidden=3, leak=0.5),
        learner=LearnerConfig(advantages="mine:a"),
    )
    assert own_names(env, agent) == {
        "mine:f(n=2)": "features",
        "mine:paid": "rewards",
        "mine:fee": "costs",
        "mine:steps": "actions",
        "mine:drawn(phi=0.9)": "markets",
        "mine:P": "policies",
        "mine:a": "advantages",
    }
    with pytest.raises(
        ConfigError, match=r"reward='pln' .*did you mean 'pnl'.*'module:name' of your"
    ):
        EnvConfig(reward="pln")
    with pytest.raises(ConfigError, match=r"kind='ncaa' is not known; did you mean 'nca'"):
        PolicyConfig(kind="ncaa")
    assert origin_of("features", "rsi") is None
    with pytest.raises(ConfigError, match=r"^Own: is a subclass of EnvConfig, .* a function"):
        type("Own", (EnvConfig,), {})


REWARD = """
from nca_trader.envs.rewards import Below, Reward

def twice(config, spec, step):
    return step.log_return - config.drawdown_penalty * step.kept.after(spec, step.log_return).depth
deep = Reward(twice, Below)
"""


def test_a_reward_with_a_memory_of_the_users_is_the_built_in_that_it_copies(own):
    import jax

    own("ext_reward", REWARD)
    bars = nca.sample_bars("sp500")[:100]
    rewards = []
    for name in ("drawdown", "ext_reward:deep"):
        env = nca.TradingEnv(bars, EnvConfig(features=("return_1",), reward=name))
        assert env.spec.memory == name and SCHEMES[name].memory is SCHEMES["drawdown"].memory
        run = jax.jit(lambda key, a, e=env: jax.lax.scan(e.step, e.reset(key)[0], a))
        actions = np.random.default_rng(1).integers(0, 3, (20, 2), np.int32)
        rewards.append(np.asarray(run(jax.random.key(0), actions)[1].reward))
    np.testing.assert_array_equal(*rewards)
    assert (rewards[0] != 0.0).any()


def test_a_feature_whose_first_state_is_made_by_jax_is_updated_like_one_of_numpy(own):
    """`init` is called where `update` is traced, too, for the layout of the state."""
    text = """
        import jax.numpy as jnp
        import numpy as np
        from nca_trader.data.features import make_feature

        def moved(zeros):
            def update(mean, bar, count):
                return mean + bar.close / (1.0 + count), mean
            return make_feature(lambda: zeros(()), update, 2)

        def of_jax():
            return moved(lambda shape: jnp.zeros(shape, jnp.float64))

        def of_numpy():
            return moved(np.zeros)
        """
    own("statemade", text)
    bars = nca.sample_bars("sp500")[:30]
    both = feature_set(("statemade:of_jax", "statemade:of_numpy")).batch(bars)
    np.testing.assert_array_equal(both[..., 0], both[..., 1])
    assert both[5:].all()


MARKET = """
import dataclasses
import nca_trader as nca

def drawn(num_bars, seed, period=16):
    return nca.synthetic.make("sine", num_bars=num_bars, seed=seed, period=period, cost=0.0)
def unsolved(num_bars, seed):
    return dataclasses.replace(drawn(num_bars, seed), optimal_policy=None, problem=None)
def bars(num_bars, seed):
    return nca.sample_bars("sp500")
def short(num_bars, seed):
    return drawn(num_bars - 1, seed)
def unmeasured(num_bars, seed):
    return dataclasses.replace(drawn(num_bars, seed), moments=((), ()))
def raises(num_bars, seed):
    raise ValueError("no luck")
def fixed():
    return drawn(50, 0)
task = drawn(50, 0)
"""


def test_a_market_of_the_users_is_drawn_by_name_and_from_its_own_record(own):
    own("ext_market", MARKET)
    module = extensions.module_of("ext_market")
    assert EnvConfig(market=module.drawn).market == "ext_market:drawn"
    config = EnvConfig(features=(), market="ext_market:drawn(period=8)", market_bars=50)
    drawn, built_in = task_of(config, 3), nca.synthetic.make("sine", num_bars=50, seed=3, period=8)
    np.testing.assert_array_equal(drawn.states, built_in.states)
    assert drawn.config.market == config.market and seed_of(drawn.bars.source) == 3
    env, gym = nca.TradingEnv(None, config), GymEnv(config=config).trading
    assert env.spec.features == gym.spec.features == ("state:phase",)
    np.testing.assert_array_equal(env.features, gym.features)
    code = codes_of(own_names(config, AgentConfig()))
    assert code is not None and code[config.market].kind == "markets"


def test_a_market_that_is_defined_again_is_drawn_again(own):
    own("ext_again", MARKET)
    module = extensions.module_of("ext_again")
    first = GymEnv(config=EnvConfig(features=(), market=module.drawn, market_bars=50))
    again = types.FunctionType(module.drawn.__code__, vars(module), "drawn", (8,))
    again.__module__ = "ext_again"
    module.drawn = again
    second = GymEnv(config=EnvConfig(features=(), market=again, market_bars=50))
    assert (first.trading.features != second.trading.features).any()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bars", "returned a Bars; give a function of num_bars and seed that returns a Task"),
        ("task", "is a Task; give a function of num_bars and seed that returns a Task"),
        ("short", r"bars, .* are of shapes \(\(49, 1\), .*; return \(\(50, 1\), "),
        ("unmeasured", r"moments are of shapes .*\(0,\), \(0,\)\); return .*\(1,\), \(1,\)\)"),
        ("raises", "ValueError at ext_wrong.py line 16 .*: no luck"),
        ("fixed", r"TypeError.* unexpected keyword argument 'num_bars'"),
        ("drawn(perio=8)", r"TypeError.* unexpected keyword argument 'perio'"),
        ("drawn(seed=1)", r"TypeError.* multiple values for keyword argument 'seed'"),
        ("nothing", "ext_wrong has no 'nothing'"),
    ],
)
def test_a_market_of_the_users_that_is_none_is_refused_in_one_line(own, name, message):
    own("ext_wrong", MARKET)
    config = EnvConfig(market=f"ext_wrong:{name}", market_bars=50)
    with pytest.raises(ConfigError, match=f"^ext_wrong:{re.escape(name)}: .*{message}") as refused:
        nca.TradingEnv(None, config)
    assert len(str(refused.value).splitlines()) == 1


def test_prove_takes_a_market_of_the_users_with_its_optimum_and_no_other(own, tmp_path):
    own("ext_proved", MARKET)
    config = task_of(EnvConfig(market="ext_proved:drawn(period=8)", market_bars=50)).config
    (tmp_path / "a.toml").write_text(to_toml(config))
    market, shown = known_market("a.toml")
    assert market.optimum == nca.synthetic.market("sine", period=8, cost=0.0).optimum
    assert shown.market == "ext_proved:drawn(period=8)"
    (tmp_path / "b.toml").write_text(
        to_toml(dataclasses.replace(config, market="ext_proved:unsolved"))
    )
    with pytest.raises(
        ConfigError, match=r"^b.toml: no optimum of its market, ext_proved:unsolved"
    ):
        known_market("b.toml")


def test_a_file_named_as_a_module_of_python_is_never_imported_by_own_code(own, tmp_path):
    """Whoever names the own code: what it imports of Python is Python's."""
    shadow = "raise SystemExit('a shadow')\n"
    (tmp_path / "sqlite3.py").write_text(shadow)
    (tmp_path / "winreg.py").write_text(shadow)
    (tmp_path / "numbers").mkdir()  # a folder, which could pose as a package
    (tmp_path / "optax").mkdir()
    (tmp_path / "ext_near.py").write_text("NEAR = 3\n")
    own(
        "ext_shadowed",
        "import importlib, numbers, sqlite3\nimport optax\nfrom ext_near import NEAR\n"
        "ext_dynamic = importlib.import_module('ext_near')\n"
        "try:\n    import winreg\nexcept ModuleNotFoundError:\n    winreg = None\n"
        "def mine(period=5):\n    return sqlite3, optax, NEAR\n",
    )
    dropped = {name: sys.modules.pop(name, None) for name in ("sqlite3", "numbers", "optax")}
    try:
        found = extensions.module_of("ext_shadowed")
        assert found.sqlite3.connect and found.optax.adam and found.numbers.Number
        assert found.winreg is None and found.NEAR == 3
    finally:
        sys.modules.update({k: v for k, v in dropped.items() if v is not None})
        for name in ("ext_near", "ext_shadowed"):
            sys.modules.pop(name, None)


def test_a_function_of_own_code_finds_its_neighbours_when_it_runs(own, tmp_path):
    (tmp_path / "ext_lazy.py").write_text("LAZY = 7\n")
    (tmp_path / "ext_pack").mkdir()
    (tmp_path / "ext_pack/__init__.py").write_text("")
    (tmp_path / "ext_pack/part.py").write_text("PART = 8\n")
    own(
        "ext_later",
        "def mine():\n    import ext_lazy\n    from ext_pack import part\n"
        "    return ext_lazy.LAZY + part.PART\n",
    )
    try:
        for name in ("ext_later", str(tmp_path / "ext_later.py")):
            before = len(sys.meta_path)
            extensions.module_of(name)
            assert extensions.module_of(name).mine() == 15  # again: nothing grows
            assert len(sys.meta_path) <= before + 1
    finally:
        for name in ("ext_lazy", "ext_pack", "ext_pack.part", "ext_later"):
            sys.modules.pop(name, None)


def test_a_signature_restricts_own_files_and_no_installed_package(tmp_path, monkeypatch):
    """What a package imports was installed with it, and lies in the folder of all packages."""
    site = tmp_path / "site-packages"
    about = site / "ext_dist-1.2.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ext-dist\nVersion: 1.2\n")
    (about / "entry_points.txt").write_text("[nca_trader.rewards]\next_paid = ext_point:paid\n")
    (site / "ext_beside.py").write_text("HERE = 5\n")
    code = "import importlib\nHERE = importlib.import_module('ext_beside').HERE\n"
    (site / "ext_point.py").write_text(f"{code}def paid(config, spec, step):\n    return HERE\n")
    monkeypatch.syspath_prepend(str(site))
    caches = (extensions.installed_points, extensions._extending)
    for cache in caches:
        cache.cache_clear()
    try:
        extensions.restrict_imports({"ext_paid": "rewards"})
        assert load("rewards", "ext_paid")(None, None, None) == 5
    finally:
        for cache in caches:
            cache.cache_clear()
        for name in ("ext_point", "ext_beside"):
            sys.modules.pop(name, None)
