"""An agent that is compiled for other processes decides there as it does here, with jax alone."""

import dataclasses
import io
import json
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from drawn import random_bars
from tiny import AGENT
from untrained import untrained_run

import nca_trader as nca
from nca_trader.config import EnvConfig
from nca_trader.evaluate.export import card_of, measure_portable
from nca_trader.runs.portable import USE, portable, write_portable

SCORE = np.random.default_rng(6).normal(size=(160, 2)).cumsum(axis=0)
BARS = dataclasses.replace(random_bars(np.random.default_rng(5), 160, 2), columns={"score": SCORE})
BASE = dataclasses.replace(AGENT.policy, base="half_and_half(lookback=30)", tilt_limit=0.5)
CASES = {
    "tilts, filled at the close": ({"actions": "weights", "fill": "close"}, {"policy": BASE}),
    "directions": ({"features": ("return_1", "rsi")}, {}),
    "sized weights": ({"actions": "weights", "sizing": "volatility"}, {}),
    "weights that share a risk": ({"actions": "weights", "sizing": "covariance"}, {}),
    "a column of your own": ({"features": ("return_1", "column:score")}, {}),
    "the mean of three": ({}, {"num_seeds": 3}),
}


def made(tmp_path, env, agent):
    agent = dataclasses.replace(AGENT, **agent)
    return untrained_run(tmp_path / "runs" / "a", BARS, EnvConfig(**env), agent)


# Runs what the model card says at each bar; every package but jax and numpy is barred.
OTHER = """
import sys
for name in ("nca_trader", "flax", "pandas", "optax", "orbax", "gymnasium", "chex", "arch"):
    sys.modules[name] = None
use, data, out = sys.argv[1:]
import numpy as np
begin, each = open(use).read().split("# At each closed bar")
exec(begin)
bars, targets = dict(np.load(data)), []
each = "\\n".join(line for line in each.splitlines()[1:] if not line.startswith("#"))
for row_ in range(len(bars["time"])):
    globals().update({name: values[row_] for name, values in bars.items()})
    exec(each)
    targets.append(np.asarray(target))
np.save(out, targets)
"""


def elsewhere(tmp_path, **arrays):
    """The targets `[N, A]` of a process that has the file, the card and jax."""
    (tmp_path / "use.py").write_text(USE)
    (tmp_path / "other.py").write_text(OTHER)
    np.savez(tmp_path / "bars.npz", **arrays)
    subprocess.run(
        [sys.executable, "other.py", "use.py", "bars.npz", "out.npy"], cwd=tmp_path, check=True,
        env={"PATH": "", "JAX_PLATFORMS": "cpu"}, timeout=240,
    )  # fmt: skip
    return np.load(tmp_path / "out.npy")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.few(1)
def test_it_decides_as_the_backtest(tmp_path, case):
    found = measure_portable(made(tmp_path, *CASES[case]), BARS)
    assert found.found.share == 1.0 and found.found.decisions > 150
    assert found.rows[0]["furthest"] < 2e-6


@pytest.mark.heavy
def test_another_process_with_jax_alone_decides_the_same(tmp_path):
    run = made(tmp_path, *CASES["sized weights"])
    result = nca.backtest(BARS, run)
    card = card_of(run, {"File": "stablehlo"}, USE)
    size = write_portable(tmp_path / "agent.zip", run, portable(run), card)
    assert size == (tmp_path / "agent.zip").stat().st_size
    fields = dataclasses.replace(BARS, columns={}).as_bar()._asdict()
    given = {name: x for name, x in fields.items() if x is not None}
    ordered = result.targets.ffill().shift().fillna(0.0).to_numpy(np.float32)
    weight = result.weights.to_numpy(np.float32)
    found = elsewhere(tmp_path, weight=weight, ordered=ordered, **given)
    first = run.policy.first_decision
    np.testing.assert_allclose(found[first:], result.targets.to_numpy()[first:], rtol=0, atol=1e-5)
    assert len(np.unique(found[first:])) > 100


def test_the_file_says_what_it_takes_and_names_no_folder_of_this_machine(tmp_path, root):
    run = made(tmp_path, *CASES["directions"])
    path = tmp_path / "agent.zip"
    write_portable(path, run, portable(run, ["dividend"]), "the card")
    first = path.read_bytes()
    write_portable(path, run, portable(run, ["dividend"]), "the card")
    assert path.read_bytes() == first  # the same agent is the same file
    with zipfile.ZipFile(path) as file:
        about = json.loads(file.read("about.json"))
        members = {name: file.read(name) for name in file.namelist()}
    assert about["symbols"] == list(BARS.symbols) and about["platforms"] == ["cpu", "cuda", "tpu"]
    assert about["bar"][0] == "time" and about["bar"][-1] == "dividend"
    assert about["first_decision"] == run.policy.first_decision
    assert np.load(io.BytesIO(members["begin.npz"]), allow_pickle=False).files
    folders = (str(root).encode(), sys.prefix.encode(), b"site-packages")
    assert not [name for name, data in members.items() if any(x in data for x in folders)]


def test_what_two_functions_cannot_say_is_refused(tmp_path, monkeypatch):
    run = made(tmp_path, {"reward": "drawdown"}, {})
    with pytest.raises(nca.ConfigError, match=r"observes what it earned.*give format"):
        portable(run)
    other = made(tmp_path / "other", {}, {})
    two = portable(other)
    monkeypatch.setitem(sys.modules, "jax._src.export.serialization", None)
    with pytest.raises(nca.ConfigError, match="pip install flatbuffers"):
        write_portable(tmp_path / "agent.zip", other, two, "")
    assert not (tmp_path / "agent.zip").exists()


def test_a_card_says_what_is_known(tmp_path):
    run = made(tmp_path, {"actions": "weights"}, {"policy": BASE})
    card = card_of(run, {"Agreement": "100% | all"}, "use it")
    for part in (
        "# a\n", "tilts of half_and_half(lookback=30)", "2020-01-01", "160 bars of",
        BARS.digest()[:12], "Gate | has not decided", "100% / all", "commission", "not advice",
        "```python\nuse it\n```",
    ):  # fmt: skip
        assert part in card, part
