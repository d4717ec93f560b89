"""Who may import whom, and what no file may do; kept by reading the sources, importing nothing."""

import ast
import functools
import graphlib
import pathlib
import re

import pytest
from sources import parsed

from nca_trader.config import EnvConfig, LearnerConfig, PolicyConfig
from nca_trader.config.account import Costs

PACKAGE = "nca_trader"
FOUNDATION = {"errors", "types", "cloud", "machine", "numerics", "progress", "config"}
ENVS = FOUNDATION | {"data", "markets", "envs"}
AGENTS = ENVS | {"strategies", "agents"}
LEARNER = AGENTS | {"parallel", "runs", "learner"}
EVALUATE = (LEARNER | {"evaluate"}) - {"learner"}
MAY_IMPORT = {
    "errors": set(),
    "progress": set(),
    "types": {"errors", "config"},
    "numerics": {"errors", "types"},
    "cloud": {"errors", "config"},
    "machine": {"errors", "cloud"},
    "config": {"errors"},
    "data": FOUNDATION,
    "markets": FOUNDATION | {"data"},
    "envs": ENVS,
    "strategies": ENVS | {"strategies"},
    "agents": AGENTS,
    "parallel": FOUNDATION,
    "runs": AGENTS | {"parallel"},
    "learner": LEARNER,
    "evaluate": EVALUATE,
    "evaluate.tune": EVALUATE | {"learner"},
    "evaluate.walkforward": EVALUATE | {"learner"},
    "paper": AGENTS | {"runs", "evaluate.metrics"},
    "paper.loaded": AGENTS | {"runs", "paper", "evaluate.simulate"},
    "optimum": EVALUATE | {"learner"},
    "scale": EVALUATE | {"learner"},
    "watch": FOUNDATION | {"runs", "paper"},
    "cli": EVALUATE | {"learner", "optimum", "paper", "scale", "watch"},
}
# The only imports against the order: a result prints and reports itself by what stands on results.
OPENED_LATE = {"evaluate.result": {"evaluate.report.page", "evaluate.report.summary"}}
# Running code that came in a file: a bar file or a run folder may be a stranger's.
UNSAFE = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# The messages between a caller and workers of its own, where nothing comes from a file; and the
# process of its own that plays an agent from outside, whose files were allowed by --allow-code.
MAY_UNPICKLE = {"parallel/jobs.py": {"cloudpickle"}, "optimum/outside/player.py": {"pickle"}}
# Packages that reach the network, and the call by which processes of a run meet.
NETWORK = {"socket", "ssl", "http", "urllib", "requests", "httpx", "aiohttp", "websockets"}
NETWORK |= {
    "yfinance",
    "wandb",
    "distributed",
    "alpaca",
    "ccxt",
    "urllib3",
    "uvicorn",
    "starlette",
    "apprise",
}
NETWORK |= {"obstore", "prometheus_client", "fsspec", "etils", "gcsfs", "boto3", "jax.distributed"}
UNSAFE_CALLS = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "read_pickle", "to_pickle"}


@functools.lru_cache(maxsize=1)  # the package's first, which most tests read
def read(root):
    """Each file below a folder by its path there: its module, its package, and all its nodes."""
    return {
        path.relative_to(root).as_posix(): (*module_of(path, root), [*ast.walk(parsed(path))])
        for path in sorted(root.rglob("*.py"))
    }


def module_of(path, root):
    """The dotted module below the package that `path` is, and its own package, e.g. for `.`."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    parts = parts[:-1] if is_package else parts
    return parts, parts if is_package else parts[:-1]


def imported_modules(nodes, own_package):
    """Every module below the package that `nodes` import, as lists of parts."""
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            here = [PACKAGE, *own_package]
            base = here[: len(here) - node.level + 1] + (node.module or "").split(".")
            names = [[p for p in base if p] + [alias.name] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [[*(node.module or "").split("."), alias.name] for alias in node.names]
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            constant = isinstance(first, ast.Constant) and str(first.value)
            names = [str(constant or "").split(".")]
        else:
            continue
        yield from (name[1:] for name in names if name[0] == PACKAGE)


def called(node):
    """The name that a call calls: "f" for `f()` and `m.f()`."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def allowed(here, there):
    rules = MAY_IMPORT.get(".".join(here[:2]), MAY_IMPORT.get(here[0]))
    if rules is None:
        raise AssertionError(f"{'.'.join(here)} has no place in MAY_IMPORT")
    return here[0] == there[0] or bool({there[0], ".".join(there[:2])} & rules)


def violations(root):
    for file, (here, own_package, nodes) in read(root).items():
        if not here or here == ["__main__"]:
            continue
        for there in imported_modules(nodes, own_package):
            # `from nca_trader import __version__` takes a name of the package, not a module.
            if there and not there[0].startswith("__") and not allowed(here, there):
                module = ".".join(there[:2])
                yield f"{file}: {here[0]} may not import {module}"


def circle(root):
    """Some files that import each other in a circle, at whatever depth; none: an empty list."""
    files = {".".join(here): (nodes, package) for here, package, nodes in read(root).values()}
    imports = {}
    for name, each in files.items():
        named = {".".join(parts) for parts in imported_modules(*each)}
        # `from a.b import c` is of the file a/b/c.py, or of a/b.py. The package itself, "", lists
        # the names of all files, and gives its version to some.
        imports[name] = {x if x in files else x.rpartition(".")[0] for x in named} - {name, ""}
        imports[name] -= OPENED_LATE.get(name, set())
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def late(root):
    """Imports of the package's own modules inside functions that say no reason.

    A comment on the line, or above a row of imports, gives it: an optional package, or start-up
    time. The files of cli import inside the functions that run a command, all for one reason:
    `nca-trader --help` and a refused option shall answer without jax, in a fifth of a second.
    """
    for file, (here, own_package, nodes) in read(root).items():
        if here[:1] == ["cli"]:
            continue
        lines = (root / file).read_text().splitlines()
        for function in nodes:
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for node in ast.walk(function):
                if not isinstance(node, ast.Import | ast.ImportFrom):
                    continue
                above = reversed(lines[: node.lineno - 1])
                # A row goes on over blank lines; a comment above its first line is of all.
                row = ("from ", "import ")
                first = next(x for x in map(str.strip, above) if x and not x.startswith(row))
                said = "#" in lines[(node.end_lineno or 0) - 1] or first.startswith("#")
                if any(imported_modules([node], own_package)) and not said:
                    yield f"{file}:{node.lineno}"


def unsafe(root):
    ends = {name.rpartition(".")[2] for name in UNSAFE_CALLS}
    for file, (*_, nodes) in read(root).items():
        for node in nodes:
            found = set()
            if isinstance(node, ast.Import):
                found = {alias.name.split(".")[0] for alias in node.names} & UNSAFE
            elif isinstance(node, ast.ImportFrom):
                found = {(node.module or "").split(".")[0]} & UNSAFE
            elif isinstance(node, ast.Call):
                if called(node) in ends:
                    found = {ast.unparse(node.func), called(node)} & UNSAFE_CALLS
                if any(
                    k.arg == "allow_pickle" and ast.unparse(k.value) != "False"
                    for k in node.keywords
                ):
                    found = {"allow_pickle"}
            for name in sorted(found - MAY_UNPICKLE.get(file, set())):
                yield f"{file}:{node.lineno}: {name}"


def test_every_part_imports_only_what_lies_below_it(root):
    assert list(violations(root / PACKAGE)) == []


def test_every_part_of_the_package_has_its_place(root):
    children = (root / PACKAGE).iterdir()
    parts = {p.stem for p in children if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert parts - {"__init__", "__main__"} <= set(MAY_IMPORT)


def test_no_file_can_run_code_that_came_in_data(root):
    assert list(unsafe(root / PACKAGE)) == []


def reaching(root):
    """Files that import what reaches the network; to ask for this machine's name is not that."""
    for file, (*_, nodes) in read(root).items():
        found, used = set(), set()
        for node in nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found |= {(node.module or "").split(".")[0]}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "socket":
                    used |= {node.attr}
                found |= {f"{node.value.id}.{node.attr}"} & {"jax.distributed"}
        found &= NETWORK
        if found - {"socket"} or ("socket" in found and used - {"gethostname"}):
            yield f"{PACKAGE}/{file}"


def test_security_names_every_file_that_reaches_the_network_and_no_other(root):
    text = (root / "SECURITY.md").read_text()
    assert set(re.findall(rf"`({PACKAGE}/[\w/]+\.py)`", text)) == {*reaching(root / PACKAGE)}


def test_security_says_what_runs_code(root):
    """The sources that import a module by a name from a file are the ones that it speaks of."""
    running = set()
    for file, (*_, nodes) in read(root / PACKAGE).items():
        for node in nodes:
            if isinstance(node, ast.Call) and called(node) in (
                "import_module", "__import__", "exec_module", "run_path", "run_module"
            ):  # fmt: skip
                given = ast.unparse(node.args[0])
                if PACKAGE not in given and "__name__" not in given:
                    running.add(file)
    assert running == {"config/extensions.py", "optimum/outside/player.py"}
    text = (root / "SECURITY.md").read_text()
    options = ("`--strategy`", "`--data`", "`--feed`", "`--broker`", "`call:`", "`--workers`")
    assert [option for option in options if option not in text] == []
    fields = {
        "": EnvConfig.OWN, "costs.": Costs.OWN, "policy.": PolicyConfig.OWN,
        "learner.": LearnerConfig.OWN,
    }  # fmt: skip
    keys = [f"`{table}{key}`" for table, own in fields.items() for key in own]
    assert len(keys) == 9 and [key for key in keys if key not in text] == []


def test_no_files_import_each_other_in_a_circle(root):
    assert circle(root / PACKAGE) == []


def test_an_import_inside_a_function_says_why(root):
    assert list(late(root / PACKAGE)) == []


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("from nca_trader.envs import other", ["envs/one.py:2"]),
        ("from nca_trader.envs import other  # imports jax", []),
        ("# imports jax\n    import jax\n\n    from nca_trader.envs import other", []),
        ("x = 1  # a comment\n    from . import other", ["envs/one.py:3"]),
        ("import jax", []),
    ],
)
def test_a_planted_import_without_a_reason_is_found(tmp_path, lines, found):
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs/one.py").write_text(f"def f():\n    {lines}\n")
    assert list(late(tmp_path)) == found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from nca_trader.envs.other import f", True),
        ("def f():\n    from nca_trader.envs import other", True),
        ("from .other import f", True),
        ("if TYPE_CHECKING:\n    from nca_trader.envs.other import f", True),
        ("from nca_trader.envs.third import f", False),
    ],
)
def test_a_planted_circle_is_found(tmp_path, line, found):
    (tmp_path / "envs").mkdir()
    for name, text in {"one": line, "other": "from nca_trader.envs.middle import f",
                       "middle": "import nca_trader.envs.one", "third": ""}.items():  # fmt: skip
        (tmp_path / f"envs/{name}.py").write_text(text)
    assert {*circle(tmp_path)} == ({"envs.one", "envs.other", "envs.middle"} if found else set())


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("envs/trading.py", "from nca_trader.agents import nca", "envs may not import agents.nca"),
        ("envs/trading.py", "import nca_trader.learner.ppo", "envs may not import learner.ppo"),
        ("envs/trading.py", "from ..agents.nca import encode", "envs may not import agents.nca"),
        ("envs/trading.py", "from .. import agents", "envs may not import agents"),
        ("envs/deep/er.py", "from ...agents import nca", "envs may not import agents.nca"),
        ("envs/deep/__init__.py", "from ...runs import x", "envs may not import runs.x"),
        ("data/bars.py", "def f():\n  from nca_trader import envs", "data may not import envs"),
        ("data/bars.py", "import_module('nca_trader.envs')", "data may not import envs"),
        ("types.py", "from nca_trader.data import A", "types may not import data.A"),
        ("paper/session/trade.py", "from nca_trader.evaluate import backtest",
         "paper may not import evaluate.backtest"),
    ],
)  # fmt: skip
def test_a_planted_violation_is_found(tmp_path, file, line, found):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line)
    assert list(violations(tmp_path)) == [f"{file}: {found}"]


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "x = eval('1')",
        "import yaml\nyaml.load(text)",
        "pd.read_pickle(path)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_planted_code_that_could_run_data_is_found(tmp_path, line):
    path = pathlib.Path(tmp_path) / "runs.py"
    path.write_text(line)
    assert len(list(unsafe(tmp_path))) == 1
