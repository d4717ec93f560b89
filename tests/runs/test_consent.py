"""Own code that a file names loads by consent alone: a corpus of forged files, and a marker."""

import contextlib
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import ROOT
from tiny import SMALL
from untrained import untrained_run

import nca_trader as nca
from nca_trader import ConfigError, RunError, load_agent, load_env
from nca_trader.cli import main
from nca_trader.config.extensions import load, receive, sources_of
from nca_trader.config.records import open_record, plain, seal_record
from nca_trader.paper.journal.journal import Journal, read_events, verify
from nca_trader.runs import consent, exported, trials
from nca_trader.runs.consent import codes_of, key_file, signature_of
from nca_trader.runs.exported import Exported, read_run, read_tensors, write_tensors
from nca_trader.runs.listing import compare_runs, runs_in
from nca_trader.watch.dashboard.sources import FollowedSession

# A module that leaves a marker when it is imported, and again when one of its members is called.
EVIL = """
import pathlib
MARKER = pathlib.Path({marker!r})
MARKER.write_text("imported")
def run(*args, **kwargs):
    MARKER.write_text("called")
"""
# Every key of a config that takes a name of own code: the file, the table, the key.
KEYS = [
    ("env.toml", "", "features"),
    ("env.toml", "", "reward"),
    ("env.toml", "", "actions"),
    ("env.toml", "", "market"),
    ("agent.toml", "policy", "base"),
    ("env.toml", "costs", "own"),
    ("agent.toml", "policy", "kind"),
    ("agent.toml", "learner", "advantages"),
]
SYMBOLS = nca.sample_bars("sp500").symbols
SEVERAL = ("features", "own")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of built-in names alone, an exported file of it, a journal, and bars."""
    folder = tmp_path_factory.mktemp("consent")
    nca.write_bars(nca.sample_bars("sp500")[:160], folder / "bars.csv")
    bars, agent = nca.read_bars(folder / "bars.csv"), load_agent("nano", SMALL)
    run = untrained_run(folder / "runs/plain", bars, load_env("index_daily"), agent)
    run.append({"update": 1, "steps": 64})
    export = f"export --run {folder}/runs/plain --data {folder}/bars.csv --out {folder}/plain.nca"
    assert main([*export.split(), "--min-agreement", "0"]) == 0
    return folder


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    """A fresh folder with copies, in which `evil.py` lies; its marker must not appear."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "marker"
    (tmp_path / "evil.py").write_text(EVIL.format(marker=str(marker)))
    (tmp_path / "good.py").write_text("def paid(config, spec, step):\n    return step.log_return\n")
    (tmp_path / "runs/plain/inside.py").write_text(EVIL.format(marker=str(marker)))
    yield tmp_path
    for name in ("evil", "good", "inside", "strategy_evil", "strategy_inside"):
        sys.modules.pop(name, None)


def with_name(text, table, key, name):
    """The TOML text with the value of one key replaced by a name."""
    lines, now = [], ""
    for line in text.splitlines():
        if line.startswith("["):
            now = line.strip("[]")
        if now == table and line.startswith(f"{key} ="):
            value = json.dumps(name)
            line = f"{key} = [{value}]" if key in SEVERAL else f"{key} = {value}"
        lines.append(line)
    changed = "\n".join(lines) + "\n"
    assert changed != text
    return changed


def code_record(name, kind="features"):
    """What a forger writes about the code: right for what lies there, and else made up."""
    try:
        found = codes_of({name: kind})
    except ConfigError:
        return {name: {"kind": kind, "package": "", "files": "0" * 64}}
    return {text: plain(code) for text, code in (found or {}).items()}


KINDS = {
    "features": "features", "reward": "rewards", "actions": "actions", "own": "costs",
    "market": "markets", "kind": "policies", "base": "strategies", "advantages": "advantages",
}  # fmt: skip


def forge_run(folder, file, table, key, name, recorded=True):
    """Write a name into a run folder, and make every checksum in it right again."""
    text = with_name((folder / file).read_text(), table, key, name)
    (folder / file).write_text(text)
    about, _ = open_record((folder / "run.json").read_bytes(), "run.json")
    about["config"][file] = hashlib.sha256(text.encode()).hexdigest()
    about["code"] = code_record(name, KINDS[key]) if recorded else None
    (folder / "run.json").write_text(seal_record(about))


def forge_export(path, file, table, key, name, recorded=True):
    """Write a name into an exported file, and make its SHA-256 right again."""
    tensors, about = read_tensors(path, exported.KIND, exported.VERSION)
    about = dict(about)
    about[file] = with_name(about[file], table, key, name)
    manifest = json.loads(about["manifest"])
    manifest["code"] = code_record(name, KINDS[key]) if recorded else None
    about["manifest"] = json.dumps({k: v for k, v in manifest.items() if v is not None})
    tensors = {name: np.array(tensor) for name, tensor in tensors.items()}
    write_tensors(path, tensors, about, exported.KIND, exported.VERSION)


NAMES = [
    "os:system(command='touch marker')",
    "subprocess:check_output(args=['touch', 'marker'])",
    "evil:run",
    "evil:run(x=1)",
    "evil.py:run",
    "runs/plain/inside.py:run",
    "pathlib:Path(x='marker')",
]


@pytest.mark.heavy
def test_code_that_a_caller_sent_is_no_consent_to_a_run_that_names_it(here):
    """A worker holds the files of its caller; a stranger's run that names them stays refused."""
    with pytest.raises(ConfigError, match="is code inside the run folder"):
        sources_of(["runs/plain/inside.py:run"])
    receive(sources_of(["evil:run", "evil.py:run"]))
    try:
        (here / "evil.py").rename(here / "moved")
        for name in ("evil:run", "evil.py:run"):
            run = here / "runs" / name.partition(":")[0]
            shutil.copytree(here / "runs/plain", run)
            forge_run(run, "env.toml", "", "reward", name)
            with pytest.raises(RunError, match="own code that you have not signed"):
                nca.Run(run)
        assert not (here / "marker").exists()
        load("rewards", "evil:run")  # which is found, where the caller's own config names it
        assert (here / "marker").exists()
    finally:
        receive(sources_of([]))


def scans(folder):
    """Everything that looks at files which merely lie there."""
    assert list(runs_in("runs").index) == ["plain"]
    compare_runs(["runs/plain", "runs/plain"])
    nca.trials("runs")
    for words in ("runs list runs", "trials runs", "watch --run runs/plain --once"):
        assert main(words.split()) == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("file", "table", "key"), KEYS)
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.few(5)
def test_no_forged_file_runs_code(here, capsys, name, file, table, key, recorded):
    place = (file, table, key, name, recorded)
    forge_run(here / "runs/plain", *place)
    forge_export(here / "plain.nca", *place)
    (here / "runs/plain/signature").write_text("0" * 64)
    capsys.readouterr()
    for run in ("runs/plain", "plain.nca"):
        for words in (
            f"backtest --run {run} --data bars.csv",
            f"paper --run {run} --feed replay:bars.csv --journal {here}/j.db",
        ):
            assert main(words.split()) == 2
            said = capsys.readouterr().err
            assert len(said.splitlines()) == 1 and run in said, said
            reasons = ("--allow-code", "never run", "of Python itself", "without a record of it")
            assert any(reason in said for reason in reasons), said
        with pytest.raises(RunError):
            read_run(run)
    scans(here)
    assert not (here / "marker").exists() and not (here / "j.db").exists()
    assert "evil" not in sys.modules


def test_the_same_files_without_the_change_load(here, capsys):
    for run in ("runs/plain", "plain.nca"):
        read_run(run).params()
        assert main(f"backtest --run {run} --data bars.csv --start 1999-07-01".split()) == 0
    scans(here)
    assert not (here / "runs/plain/signature").exists()  # nothing of its own: nothing is signed


@pytest.mark.heavy
def test_a_process_of_a_command_asks_for_consent_as_its_user_writes_it(here, capsys):
    """`prove` opens a run in a process of its own, and Python's caller reads Python."""
    forge_run(here / "runs/plain", "env.toml", "", "reward", "evil.py:run")
    assert main("prove garleanu_pedersen --agent runs/plain".split()) == 2
    said = capsys.readouterr().err
    assert "give --allow-code once" in said and "allow_code" not in said, said
    with pytest.raises(ConfigError, match="allow_code=True once"):
        nca.prove(["garleanu_pedersen"], "runs/plain")
    assert not (here / "marker").exists()


@pytest.mark.heavy
@pytest.mark.parametrize("allowed", [True, ["evil:run"]])
def test_consent_is_asked_once_and_loads_what_it_names(here, allowed, caplog):
    forge_run(here / "runs/plain", "env.toml", "", "reward", "evil:run")
    said = r"not signed: rewards evil:run of evil .*evil.py.*allow_code=True once"
    with pytest.raises(RunError, match=said):
        nca.Run("runs/plain")
    with pytest.raises(RunError, match="not signed"):
        nca.Run("runs/plain", allow_code=["evil:other"])
    run = nca.Run("runs/plain", allow_code=allowed)
    assert ("evil.py" in caplog.text) == (allowed is True)  # names that the caller gave are known
    assert not (here / "marker").exists()  # it may load now, and nothing has asked for it
    assert load("rewards", run.env_config.reward) and (here / "marker").exists()
    # Another process needs no word, and neither does a copy; a changed copy does.
    shutil.copytree("runs/plain", "elsewhere")
    shutil.copytree("runs/plain", "changed")
    forge_run(here / "changed", "env.toml", "", "reward", "evil:run(x=2)")
    copied, changed = opened("elsewhere", "changed")
    assert copied == "" and "not signed" in changed


def opened(*runs):
    """What another process says that opens each of some runs; "" where it does."""
    code = (
        "import sys, nca_trader as nca; from nca_trader.runs.exported import read_run\n"
        "for run in sys.argv[1:]:\n  try:\n    read_run(run); print()\n"
        "  except nca.NcaTraderError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *runs],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


@pytest.mark.heavy
def test_an_exported_file_is_signed_inside_and_its_copy_is_too(here):
    forge_export(here / "plain.nca", "env.toml", "", "reward", "good:paid")
    with pytest.raises(RunError, match="not signed"):
        Exported("plain.nca")
    weights = Exported("plain.nca", allow_code=True).params()
    shutil.copy("plain.nca", "copy.nca")
    jax.tree.map(np.testing.assert_array_equal, Exported("copy.nca").params(), weights)
    shutil.copy("plain.nca", "named.nca")  # another name under the old signature
    forge_export(here / "named.nca", "env.toml", "", "reward", "good:paid()")
    tensors, about = read_tensors(here / "plain.nca", exported.KIND, exported.VERSION)
    tensors = {name: np.array(tensor) for name, tensor in tensors.items()}
    next(iter(tensors.values())).flat[0] ^= 1  # other weights under the old signature
    write_tensors(here / "plain.nca", tensors, about, exported.KIND, exported.VERSION)
    copied, named, changed = opened("copy.nca", "named.nca", "plain.nca")
    assert copied == "" and "not signed" in named and "not signed" in changed


@pytest.mark.heavy
def test_a_run_that_is_trained_with_own_code_is_signed_and_so_is_its_export(here):
    words = "--env own.toml --agent nano --data bars.csv --steps 64 --run runs/own"
    text = (here / "runs/plain/env.toml").read_text()
    (here / "own.toml").write_text(with_name(text, "", "reward", "good:paid"))
    assert main(["train", *words.split(), *(x for s in SMALL for x in ("--set", s))]) == 0
    out = "export --run runs/own --data bars.csv --out own.nca --min-agreement 0"
    assert main(out.split()) == 0
    shutil.copytree("runs/own", "signed")
    # The folder of another machine: its user resumes the run, by the same files.
    (here / "runs/own/signature").unlink()
    shutil.copytree("runs/own", "unsigned")
    assert main(["train", *words.split(), *(x for s in SMALL for x in ("--set", s))]) == 0
    of_others = opened("signed", "own.nca", "runs/own", "unsigned")
    assert of_others[:3] == ["", "", ""] and "not signed" in of_others[3]


@pytest.mark.parametrize("source", ["evil:run", "evil.py:run()", "http://127.0.0.1:9/bars.csv"])
def test_what_a_run_says_of_its_bars_runs_no_code_and_calls_no_host(here, capsys, source):
    about, _ = open_record((here / "runs/plain/run.json").read_bytes(), "run.json")
    about["data"]["source"] = source
    (here / "runs/plain/run.json").write_text(seal_record(about))
    capsys.readouterr()
    assert main("export --run runs/plain --out other.nca --min-agreement 0".split()) == 2
    assert "give them by --data" in capsys.readouterr().err
    assert not (here / "marker").exists()


@pytest.mark.heavy
def test_python_itself_and_installed_packages_never_load(here):
    for name in ("os:system(command='touch marker')", "numpy:fromfile(file='x')", "nca_trader:f"):
        forge_run(here / "runs/plain", "env.toml", "", "reward", name)
        with pytest.raises(RunError, match=r"Python itself|installed package|is of nca_trader"):
            nca.Run("runs/plain", allow_code=True)
        shutil.copy(here / "bars.csv", here / "x")
    library = pathlib.Path(os.__file__)
    for name in (f"{library}:system", f"{pathlib.Path(np.__file__)}:save"):
        with pytest.raises(ConfigError, match=r"Python itself|installed package"):
            load("rewards", name)
    (here / "mine.py").write_text("from os import system\nfrom subprocess import Popen\n")
    for member in ("system(command='touch marker')", "Popen(args=['touch', 'marker'])"):
        with pytest.raises(ConfigError, match=r"a module of Python itself"):
            load("rewards", f"mine:{member}")
    with pytest.raises(ConfigError, match="x is not a number, text, truth value or list"):
        load("rewards", "good:paid(x={a=1})")
    sys.modules.pop("mine", None)
    assert not (here / "marker").exists()


def test_code_without_a_record_is_refused_even_where_it_is_allowed(here):
    forge_run(here / "runs/plain", "env.toml", "", "reward", "evil:run", recorded=False)
    with pytest.raises(RunError, match="without a record of it"):
        nca.Run("runs/plain", allow_code=True)
    assert not (here / "marker").exists()


def test_the_key_is_the_users_alone(here, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    forge_run(here / "runs/plain", "env.toml", "", "reward", "evil:run")
    with pytest.raises(RunError, match="not signed"):
        nca.Run("runs/plain")
    assert not key_file().exists()  # asking makes none
    nca.Run("runs/plain", allow_code=True)
    assert stat.S_IMODE(key_file().stat().st_mode) == 0o600
    key = key_file().read_text()
    held = [path for path in tmp_path.rglob("*") if path.is_file() and path != key_file()]
    assert held and not any(key.encode() in path.read_bytes() for path in held)
    nca.Run("runs/plain")
    # Another user's signature is none of ours, and a key that others read is no key.
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    with pytest.raises(RunError, match="not signed"):
        nca.Run("runs/plain")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    key_file().chmod(0o644)
    with pytest.raises(ConfigError, match="is not a key of yours alone"):
        nca.Run("runs/plain")


def test_a_key_is_made_in_a_folder_that_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    first = signature_of(b"content", make=True)
    assert signature_of(b"content") == first
    key_file().unlink()
    assert signature_of(b"content", make=True) != first and key_file().exists()


@pytest.mark.heavy
def test_a_folder_that_cannot_be_signed_is_remembered_by_this_process(here, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/nowhere")
    forge_run(here / "runs/plain", "env.toml", "", "reward", "evil:run")
    nca.Run("runs/plain", allow_code=True)
    nca.Run("runs/plain")
    assert "not signed" in opened("runs/plain")[0]


def test_a_refusal_names_all_code_and_a_name_of_two_kinds_is_one(here, monkeypatch):
    forge_run(here / "runs/plain", "env.toml", "", "features", "good:paid")
    forge_run(here / "runs/plain", "env.toml", "", "reward", "evil:run")
    about, _ = open_record((here / "runs/plain/run.json").read_bytes(), "run.json")
    about["code"] |= code_record("good:paid")
    (here / "runs/plain/run.json").write_text(seal_record(about))
    with pytest.raises(RunError, match=r"features good:paid of good .*; rewards evil:run of evil"):
        nca.Run("runs/plain")
    # Built in as a reward, and the name of a feature that a package brings.
    named = lambda kind, text: kind == "features" and text == "log_return"  # noqa: E731
    monkeypatch.setattr(consent, "origin_of", lambda kind, text: named(kind, text) or None)
    env = nca.EnvConfig()
    object.__setattr__(env, "features", ("log_return",))
    assert consent.own_names(env, nca.AgentConfig()) == {"log_return": "features"}


def test_a_refused_resume_signs_nothing(here):
    forge_run(here / "runs/plain", "env.toml", "", "reward", "good:paid")
    (here / "own.toml").write_text((here / "runs/plain/env.toml").read_text())
    words = "train --env own.toml --agent nano --data bars.csv --steps 64 --run runs/plain --seed 9"
    assert main([*words.split(), *(x for s in SMALL for x in ("--set", s))]) == 2
    assert not (here / "runs/plain/signature").exists()


def test_no_write_follows_a_link(here, capsys):
    """A stranger's folder may hold links to the user's own files in the place of ours."""
    victim = here / "profile"
    victim.write_text("mine\n")
    for name in ("runs/trials.jsonl", "runs/plain/train.lock", "runs/plain/signature.part"):
        (here / name).unlink(missing_ok=True)
        (here / name).symlink_to(victim)
    assert main("backtest --run runs/plain --data bars.csv --start 1999-07-01".split()) in (0, 4)
    main("train --env index_daily --agent nano --data bars.csv --run runs/plain".split())
    forge_run(here / "runs/plain", "env.toml", "", "reward", "good:paid")
    nca.Run("runs/plain", allow_code=True)
    with pytest.raises(nca.StateError, match="the trial log cannot be written"):
        trials.record(here / "runs", trials.Entry(kind="test", run="x", data=""))
    (here / "runs/plain/metrics.jsonl").unlink()
    (here / "runs/plain/metrics.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        nca.Run("runs/plain").lines.append("x")
    assert victim.read_text() == "mine\n"


def test_a_pipe_in_a_run_folder_is_no_file(here):
    (here / "runs/plain/metrics.jsonl").unlink()
    os.mkfifo(here / "runs/plain/metrics.jsonl")
    assert nca.Run("runs/plain", allow_code=None).metrics() == []
    (here / "runs/plain/env.toml").unlink()
    os.mkfifo(here / "runs/plain/env.toml")
    with pytest.raises(RunError, match=r"env.toml: is missing"):
        nca.Run("runs/plain", allow_code=None)


def test_names_of_a_strangers_folder_do_not_steer_the_screen(here, capsys):
    shutil.copytree(here / "runs/plain", here / "runs/\x1b[2Jplain")
    capsys.readouterr()
    assert main("runs list runs".split()) == 0
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err and r"\x1b[2Jplain" in said.out


@pytest.mark.heavy
def test_children_import_nothing_from_the_folder_of_the_command(here):
    """A folder of bars may hold a file that is named as a module of Python."""
    (here / "socket.py").write_text(f"open({str(here / 'marker')!r}, 'w')\n")
    script = (
        "import nca_trader as nca\n"
        "if __name__ == '__main__':\n"
        "    nca.walk_forward(nca.read_bars('bars.csv'), nca.rules.sma_cross, train=60, test=30,"
        " grid={'fast': [2], 'slow': [10]}, workers=2, check=False)\n"
    )
    (here / "there").mkdir()
    (here / "there/walk.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for words in (["there/walk.py"], ["-P", "-m", "nca_trader", "doctor"]):
        done = subprocess.run(
            [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=300
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert not (here / "marker").exists(), words


def test_a_member_that_a_module_only_imported_never_loads(here):
    (here / "good.py").write_text("from pandas import read_pickle\n")
    with pytest.raises(ConfigError, match=r"pandas.*, an installed package"):
        load("rewards", "good:read_pickle(filepath_or_buffer='e.pkl')")
    sys.modules.pop("good")
    (here / "runs/plain/link.py").symlink_to(here / "evil.py")
    with pytest.raises(ConfigError, match="inside the run folder"):
        load("rewards", "runs/plain/link.py:run")
    assert not (here / "marker").exists()


def test_a_key_in_the_folder_of_the_command_is_none_of_ours(here, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", ".")
    assert key_file().is_absolute() and key_file().parent.parent.name == ".config"


def evil(value):
    """The value with every text in it replaced by a name of own code."""
    if isinstance(value, dict):
        return {key: evil(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [evil(inner) for inner in value]
    return "evil:run(x=1)" if isinstance(value, str) and value not in SYMBOLS else value


@pytest.mark.heavy
def test_a_forged_journal_runs_no_code(here):
    paper = "paper --run runs/plain --feed replay:bars.csv --journal good.db"
    assert main(paper.split()) == 0
    with contextlib.closing(Journal(here / "evil.db", clock=lambda: 0)) as journal:
        for event in read_events(here / "good.db"):
            journal.record(event.run, event.kind, event.key, evil(event.body), event.ts_event)
    verify(here / "evil.db")  # the chain is right: whoever writes it can compute it
    for words in (
        "journal replay evil.db --run runs/plain",
        "watch --journal evil.db --once",
        paper.replace("good", "evil"),
    ):
        main(words.split())
    source = FollowedSession(here / "evil.db", "evil", Now())
    with contextlib.suppress(nca.NcaTraderError):
        source.view()
    assert not (here / "marker").exists() and "evil" not in sys.modules


class Now:
    """A pool that does its work at once."""

    def submit(self, function, *args):
        function(*args)


@pytest.mark.heavy
def test_a_forged_walk_forward_runs_no_code(here):
    bars = nca.read_bars("bars.csv")

    def walk():
        return nca.walk_forward(
            bars, nca.rules.sma_cross, train=60, test=30, grid={"fast": [2, 5], "slow": [10]},
            folder="walk", check=False,
        )  # fmt: skip

    walk()
    for file in (here / "walk").glob("*.npz"):
        with np.load(file, allow_pickle=False) as arrays:
            held = dict(arrays)
        held["facts"] = np.array(json.dumps(evil(json.loads(str(held["facts"])))))
        np.savez(file, **held)
    with contextlib.suppress(nca.NcaTraderError):
        walk()
    assert not (here / "marker").exists() and "evil" not in sys.modules


def test_a_forged_checkpoint_runs_no_code(here):
    """Every text in what describes a checkpoint is the name of own code."""
    changed = 0
    for file in (here / "runs/plain/checkpoints").rglob("*"):
        with contextlib.suppress(ValueError, OSError):
            value = json.loads(file.read_text())
            file.write_text(json.dumps(evil(value)))
            changed += evil(value) != value
    assert changed > 1
    with contextlib.suppress(Exception):  # whatever Orbax raises for what it cannot read
        nca.Run("runs/plain").params()
    assert not (here / "marker").exists() and "evil" not in sys.modules


@pytest.mark.heavy
def test_a_forged_store_of_a_sweep_runs_no_code(here):
    bars, grid = nca.read_bars("bars.csv"), {"fast": [2, 5], "slow": [10]}
    nca.sweep(bars, nca.rules.sma_cross, grid, resume="parts")
    for file in (here / "parts").glob("*.json"):
        about, _ = open_record(file.read_bytes(), "parts")
        file.write_text(seal_record(evil(about)))
    with pytest.raises(nca.NcaTraderError):
        nca.sweep(bars, nca.rules.sma_cross, grid, resume="parts")
    assert not (here / "marker").exists() and "evil" not in sys.modules


def test_arrays_of_a_store_are_never_unpickled(here):
    """A sweep's store and the folds of a walk-forward are npz files; a pickle in one stays shut."""

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {here}/marker",)

    buffer = io.BytesIO()
    np.savez(buffer, x=np.array([Evil()], dtype=object))
    with np.load(io.BytesIO(buffer.getvalue()), allow_pickle=True) as arrays:
        arrays["x"]
    assert (here / "marker").exists()  # the pickle works, so that what follows can fail
    (here / "marker").unlink()
    texts = [path.read_text() for path in (ROOT / "nca_trader").rglob("*.py")]
    calls = [call for text in texts for call in re.findall(r"np\.load\((.*)", text)]
    assert calls and all("allow_pickle=False" in call for call in calls)


# What a stranger puts next to copies of the user's files: it leaves a marker when it is imported.
PLANTED = {
    "sqlite3.py": "import sqlite3",  # of Python
    "_ossaudiodev.py": "import ossaudiodev",  # of Python, on another system
    "winreg.py": "import winreg",
    "xdrlib.py": "import xdrlib",
    "numexpr.py": "__import__('numexpr')",  # of an installed package, or of none
    "dynamic.py": "import importlib; importlib.import_module('dynamic')",
    "pkg/dynamic.py": "import importlib; importlib.import_module('pkg.dynamic')",
    "pkg/dynamic/__init__.py": "import importlib; importlib.import_module('pkg.dynamic')",
}
OWN = "def paid(config, spec, step):\n    return step.log_return\n"
CHILD = """
import sys
sys.path[:] = [x for x in sys.path if x]  # as a command has it; `python -m` is tried below
import nca_trader as nca
nca.Run("runs/plain").env_config
from nca_trader.config.extensions import load
paid = load("rewards", "mine:paid")
assert sys.modules["mine"].later() == 1
"""


# PYTHONPATH=. shows the folder to Python and to other packages too, and is what the user wished.
CASES = [
    (file, way)
    for file in PLANTED
    for way in ("library", "PYTHONPATH", "python -m", "python -um", "python -m ...__main__")
    if way != "PYTHONPATH" or file not in ("winreg.py", "numexpr.py", "dynamic.py")
]


@pytest.mark.heavy
@pytest.mark.parametrize(("file", "way"), CASES)
def test_signed_code_imports_no_file_that_was_not_signed(here, file, way):
    """The folder of the command holds copies of the user's own files, and one of a stranger."""
    home, there = here / "home", here / "there"
    home.mkdir()
    (home / "pkg").mkdir()
    (home / "pkg/__init__.py").write_text("")
    (home / "near.py").write_text("import pkg\nNEAR = 1\n")
    trial = f"try:\n    {PLANTED[file]}\nexcept ImportError:\n    pass\n"
    later = "".join(
        f"    {line}\n" for line in f"import late\n{trial}return late.LATE".splitlines()
    )
    (home / "late.py").write_text("LATE = 1\n")  # found inside of a function, too
    (home / "mine.py").write_text(f"import near\n{trial}def later():\n{later}{OWN}")
    (home / "runs").mkdir()
    shutil.move(here / "runs/plain", home / "runs/plain")
    os.chdir(home)
    forge_run(home / "runs/plain", "env.toml", "", "reward", "mine:paid")
    nca.Run("runs/plain", allow_code=True)
    shutil.copytree(home, there)
    (there / file).parent.mkdir(parents=True, exist_ok=True)
    (there / file).write_text(EVIL.format(marker=str(here / "marker")))
    words = ["-c", CHILD]
    if way.startswith("python"):
        how = {"python -m": "-m nca_trader", "python -um": "-umnca_trader"}
        module = how.get(way, "-m nca_trader.__main__")
        words = f"{module} backtest --run runs/plain --data {here}/bars.csv --seed 0".split()
    path = os.pathsep.join([str(ROOT), "."] if way == "PYTHONPATH" else [str(ROOT)])
    done = subprocess.run(
        [sys.executable, *words],
        cwd=there,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert not (here / "marker").exists(), done.stderr
