"""The installed package as a type checker sees it from outside."""

import os
import re
import subprocess
import sys
import venv
import zipfile

import pytest

import nca_trader

pytestmark = pytest.mark.slow
# What a user writes, under strict rules: each annotation is the type that the package must say.
PROGRAM = """
from pathlib import Path

import nca_trader as nca

bars: nca.Bars = nca.sample_bars("sp500").select("SP500")
costs = nca.Costs(commission=5e-4, slippage=2e-4)
rule: nca.Strategy = nca.rules.sma_cross(fast=10, slow=30).with_stop(0.05)
result: nca.Result = nca.backtest(bars, rule, costs, start="2013-01-01")
sharpe: float = result.metrics["sharpe"]
page: Path = result.report("page.html", indicators={"close": bars.close})
final = float(result.equity.iloc[-1])
best: float = nca.compare([result]).table["sharpe"].max()
table = nca.sweep(bars, nca.rules.sma_cross, {"fast": [5, 10]}, costs, trials=None)
walk: nca.WalkForward = nca.walk_forward(bars, nca.rules.sma_cross, costs, grid={"fast": [5]})
env = nca.TradingEnv(bars, nca.EnvConfig(costs=costs))
run: nca.Run = nca.train(env, nca.load_agent("nano"), "runs/a", steps=1000, seed=0)
agent: nca.LoadedAgent = nca.load("agent.nca")
live: nca.AgentStream = agent.stream()
mixed = nca.blend({"trend": (rule, 0.5), "agent": (run, 0.5)})
try:
    nca.read_bars("mine.csv")
except nca.NcaTraderError as error:
    print(error, sharpe, page, final, best, table, walk, live, mixed)
"""
# Of all symbols of all modules; most of the rest are arrays whose shape has no type.
LEAST_COMPLETE = 83.0


@pytest.fixture(scope="module")
def check(root, tmp_path_factory):
    """Runs pyright in an environment that has the package as a wheel."""
    folder = tmp_path_factory.mktemp("typed")
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*wheel, "--wheel-dir", folder, root], check=True)
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv").glob("lib/python3*/site-packages")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as built:
        built.extractall(site)
    # Its dependencies are those of the tests.
    own = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "others.pth").write_text(own)
    rules = '{"typeCheckingMode": "strict", "pythonVersion": "3.11"}'
    (folder / "pyrightconfig.json").write_text(rules)
    path = f"{folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"

    def check(*arguments, program=None):
        if program is not None:
            (folder / "use.py").write_text(program)
        done = subprocess.run(
            [os.path.join(os.path.dirname(sys.executable), "pyright"), *arguments],
            cwd=folder,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout.replace(str(site), "SITE")

    check.site = site
    return check


def test_the_wheel_says_that_it_is_typed(check):
    assert (check.site / "nca_trader" / "py.typed").read_bytes() == b""
    (metadata,) = check.site.glob("nca_trader-*.dist-info/METADATA")
    assert "Classifier: Typing :: Typed\n" in metadata.read_text()


def test_a_strict_program_has_no_error(check):
    code, said = check("use.py", program=PROGRAM)
    assert code == 0, said
    wrong = PROGRAM.replace("sharpe: float", "sharpe: str")
    assert check("use.py", program=wrong)[0] == 1  # the types are known, and not just anything


def test_every_public_name_has_a_known_type(check):
    names = nca_trader.__all__
    shown = "".join(f"reveal_type(nca.{name})\n" for name in names)
    code, said = check("use.py", program=f"import nca_trader as nca\n{shown}")
    assert code == 0 and "Unknown" not in said, said
    assert len(re.findall(r'Type of "nca\.', said)) == len(names)


def test_types_stay_as_complete_as_they_are(check):
    _, said = check("--verifytypes", "nca_trader", "--ignoreexternal")
    assert 'Path of py.typed file: "SITE/nca_trader/py.typed"' in said
    score = re.search(r"Type completeness score: ([\d.]+)%", said)
    assert score is not None and float(score[1]) >= LEAST_COMPLETE, said[-600:]
