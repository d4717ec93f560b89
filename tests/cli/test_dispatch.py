"""The command line itself: help at once, one line for what it does not know."""

import ast
import logging
import os
import subprocess
import sys

import pytest
from sources import parsed

import nca_trader
from nca_trader.cli import COMMANDS, main, print_json, use_compile_cache
from nca_trader.errors import (
    BarError,
    CheckFailed,
    ConfigError,
    HaltError,
    NcaTraderError,
    RunError,
    StateError,
    logger,
)
from nca_trader.machine import processor

IMPORTS = """
import sys
from nca_trader.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert end.code == 0
heavy = {"jax", "numpy", "pandas", "orbax", "matplotlib"} & set(sys.modules)
sys.exit(f"imported {sorted(heavy)}" if heavy else 0)
"""


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["train", "--help"]])
def test_help_imports_nothing_that_is_slow(args, root):
    env = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", IMPORTS, *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr


def test_help_lists_every_command(command):
    said = command("--help")
    assert said.code == 0 and all(name in said.out for name in COMMANDS)


def test_the_version_is_the_packages(command):
    assert command("--version").out.strip() == nca_trader.__version__


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "required: --env, --agent, --run"),
        (["train", "--env=e", "--agent=a", "--run=r", "--stpes=3"], "arguments: --stpes=3"),
        (
            ["train", "--env=e", "--agent=a", "--run=r", "--steps=many"],
            "--steps: many is not a whole number",
        ),
        (["backtest"], "one of the arguments --run --strategy is required"),
        (["backtest", "--run=r", "--strategy=momentum"], "not allowed with"),
        (["backtest", "--run=r", "--fill=vwap"], "--fill: invalid choice: 'vwap'"),
        (["paper", "--run=r"], "required: --feed, --journal"),
        (["journal"], "arguments are required"),
        (["backtests", "--run=r"], "did you mean 'backtest'? see `nca-trader --help`"),
        (
            ["backtest", "--strategy=momentum", "--stoploss", "0.1"],
            "backtest: unrecognized arguments: --stoploss 0.1; did you mean '--stop-loss'? see "
            "`nca-trader backtest --help`",
        ),
        (["train", "--agnet=nano"], "--run; did you mean '--agent'? see `nca-trader train --help`"),
        (["backtest", "--strategy=momentum", "more"], "arguments: more; see `nca-trader backtest"),
        (["train", "--qqq"], "--run; see `nca-trader train --help`"),
    ],
)
def test_what_the_command_line_does_not_know_is_one_line_and_exit_2(command, args, says):
    said = command(*args)
    assert said.code == 2 and said.out == ""
    assert len(said.err.splitlines()) == 1 and says in said.err and "--help`." in said.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CheckFailed("it does not hold"), 1),
        (BarError("bad bars"), 2),
        (ConfigError("bad option"), 2),
        (RunError("bad run"), 2),
        (NcaTraderError("bad"), 2),
        (HaltError("halted"), 3),
        (StateError("damaged"), 4),
        (OSError(28, "No space left on device", "run/x"), 4),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_kind_of_end_has_its_exit_code_and_its_line(command, monkeypatch, error, code):
    def fail(args):
        raise error

    monkeypatch.setattr("nca_trader.cli.paper.run_journal", fail)
    said = command("journal", "verify", "file", "--json")
    assert said.code == code and said.out == "" and len(said.err.splitlines()) == 1
    if isinstance(error, NcaTraderError):
        assert said.err == f"nca-trader journal: {error}\n"
    if isinstance(error, OSError):
        assert said.err == "nca-trader journal: run/x: No space left on device\n"


def test_a_fault_of_the_program_is_not_hidden(monkeypatch):
    monkeypatch.setattr("nca_trader.cli.paper.run_journal", lambda args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["journal", "verify", "file"])


def test_json_has_null_for_what_is_no_number(capsys):
    nan, inf = float("nan"), float("inf")
    print_json({"sharpe": nan, "ratio": -inf, "deep": {"list": [1.0, nan]}, "n": 3})
    line = '{"sharpe": null, "ratio": null, "deep": {"list": [1.0, null]}, "n": 3}\n'
    assert capsys.readouterr().out == line


def test_a_reader_that_goes_away_is_no_error(root):
    env = {**os.environ, "PYTHONPATH": str(root)}
    program = """
import nca_trader.cli as cli, nca_trader.cli.paper as paper, sys
def chatter(args):
    while True:
        print("and another line", flush=True)
paper.run_journal = chatter
sys.exit(cli.main(["journal", "verify", "file"]))
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as talker:
        talker.stdout.readline()
        talker.stdout.close()
        assert talker.stderr.read() == ""
        assert talker.wait(timeout=500) == 0


KEPT = ("JAX_COMPILATION_CACHE_DIR", "NCA_TRADER_PROGRAMS")


@pytest.mark.parametrize(
    ("env", "folder"),
    [
        ({"XDG_CACHE_HOME": "/caches"}, "/caches/nca_trader"),
        ({"HOME": "/home/someone"}, "/home/someone/.cache/nca_trader"),
        ({"JAX_COMPILATION_CACHE_DIR": "/mine"}, "/mine"),
        ({"NCA_TRADER_NO_CACHE": "1", "HOME": "/home/someone"}, None),
    ],
)
def test_compiled_programs_are_kept_where_the_user_wants_them(monkeypatch, env, folder):
    for name in ("XDG_CACHE_HOME", *KEPT, "NCA_TRADER_NO_CACHE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    use_compile_cache()
    # What is compiled belongs to this kind of processor, what is traced to any.
    ours = folder is not None and folder != "/mine"
    compiled = f"{folder}/jax-{processor()}" if ours else folder
    traced = f"{folder}/traced" if ours else None
    assert [os.environ.get(name) for name in KEPT] == [compiled, traced]


def test_every_public_name_is_there_for_people_and_for_type_checkers(root):
    for name in nca_trader.__all__:
        assert getattr(nca_trader, name) is not None
    assert callable(nca_trader.train) and callable(nca_trader.backtest)
    assert nca_trader.rules.sma_cross(2, 3).name == "SMA cross 2/3"
    assert set(nca_trader.__all__) <= set(dir(nca_trader))
    tree = parsed(root / "nca_trader" / "__init__.py")
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(seen) == sorted(nca_trader.__all__)
    for name, module in seen.items():
        found = getattr(__import__(module, fromlist=[name]), name)
        assert getattr(nca_trader, name) is found, name


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'nca_trader' has no attribute 'tain'"):
        _ = nca_trader.tain


def test_a_warning_of_the_package_is_a_plain_line_whoever_set_up_logging(monkeypatch, capsys):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    assert main(["presets", "list"]) == 0
    logging.basicConfig()  # as jax and its friends do
    logging.getLogger("nca_trader.evaluate.backtest").warning("begins later")
    assert capsys.readouterr().err.splitlines()[-1] == "begins later"


def script(tmp_path, text, **more):
    """What Python says when it runs a script of a user."""
    path = tmp_path / "mine.py"
    path.write_text(text)
    env = {**os.environ, **more}
    return subprocess.run([sys.executable, path], capture_output=True, text=True, env=env)


ENDS = "import nca_trader as nca\n\ndef mine():\n    nca.load_agent('nanno')\n\nmine()\n"


def test_an_error_in_a_script_ends_with_the_users_own_lines_and_the_sentence(tmp_path):
    ran = script(tmp_path, ENDS)
    lines = ran.stderr.splitlines()
    assert ran.returncode == 1 and lines[-1].startswith("nca_trader.errors.ConfigError: 'nanno' is")
    files = [line.split('"')[1] for line in lines if line.startswith("  File")]
    assert files == [str(tmp_path / "mine.py")] * 2
    whole = script(tmp_path, ENDS, NCA_TRADER_TRACEBACK="1").stderr
    assert "toml.py" in whole and whole.splitlines()[-1] == lines[-1]
    # Another error, and a hook that another package has set, stay as they are.
    other = script(tmp_path, "import nca_trader, json\njson.loads('{')\n").stderr
    assert "decoder.py" in other
    hook = "import sys\nsys.excepthook = lambda *error: print('theirs')\n"
    assert script(tmp_path, hook + ENDS).stdout == "theirs\n"


def test_a_notebook_shows_the_same_lines():
    try:
        nca_trader.load_agent("nanno")
    except nca_trader.ConfigError as error:
        lines = error._render_traceback_()
    assert len([line for line in lines if line.startswith("  File")]) == 1
    assert lines[-1].startswith("nca_trader.errors.ConfigError: 'nanno' is not a preset")


def test_a_warning_is_its_sentence_unless_the_user_chose_another_form(monkeypatch, capsys):
    root, log = logging.getLogger(), logger("nca_trader.learner.train")
    monkeypatch.setattr(root, "handlers", [])
    logging.basicConfig()  # as a package does when it is imported
    log.warning("ends early")
    monkeypatch.setattr(root, "handlers", [])
    logging.basicConfig(format="%(name)s: %(message)s")
    log.warning("ends early")
    assert capsys.readouterr().err == "ends early\nnca_trader.learner.train: ends early\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_takes_json(command, name):
    said = command(name, "--help")
    assert said.code == 0 and "--json" in said.out and said.err == ""


@pytest.mark.heavy
def test_a_backtest_without_a_page_needs_no_library_of_pages_or_agents(root):
    """Each of these takes 0.2 to 0.4 s to import, of 2 s in all."""
    words = ["backtest", "--strategy", "sma_cross", "--quiet"]
    barred = ["matplotlib", "scipy", "orbax", "flax", "optax", "chex"]
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({barred}))\n"
        f"from nca_trader.cli import main; sys.exit(main({words}))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
