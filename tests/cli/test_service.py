"""A session as a service: its files are what they say, and a killed one converges."""

import configparser
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from drawn import bars_of

from nca_trader.cli import build_parser
from nca_trader.data.bars import write_bars
from nca_trader.paper.journal.journal import read_events, verify
from nca_trader.scale.chips import slice_of
from nca_trader.scale.manifest import manifest
from nca_trader.watch.alerts import read_rules

UNITS = ("nca-trader-paper@.service", "nca-trader-watch@.service", "nca-trader-train@.service")


@pytest.fixture
def service(root):
    return root / "tools" / "service"


def settings(path):
    """Names and values of a unit or of a file of its environment."""
    lines = [line for line in path.read_text().splitlines() if "=" in line and line[0] != "#"]
    return dict(line.split("=", 1) for line in lines)


SECTIONS = {
    "Unit": {"Description", "Wants", "After", "StartLimitIntervalSec", "StartLimitBurst"},
    "Service": {
        "Type", "User", "EnvironmentFile", "Environment", "StateDirectory", "StateDirectoryMode",
        "CacheDirectory", "WorkingDirectory", "UMask", "ExecStart", "KillSignal", "TimeoutStopSec",
        "Restart", "SuccessExitStatus", "RestartSec", "RestartPreventExitStatus",
        "NoNewPrivileges", "ProtectSystem", "ProtectHome", "PrivateTmp", "PrivateDevices",
        "ProtectKernelTunables", "ProtectControlGroups", "RestrictAddressFamilies",
    },
    "Install": {"WantedBy"},
}  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_every_line_of_a_unit_is_a_setting_of_its_section(service, unit):
    """What systemd itself would warn of and then leave out, where it is not installed."""
    parser = configparser.ConfigParser(strict=True, interpolation=None, delimiters="=")
    parser.optionxform = str
    parser.read_string((service / unit).read_text())
    assert parser.sections() == list(SECTIONS)
    for section, known in SECTIONS.items():
        assert set(parser[section]) <= known
        assert all(parser[section].values())


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_accepts_the_units(service, tmp_path, unit):
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze here")
    text = (service / unit).read_text()
    # The program is not installed here, and systemd asks for one that is.
    (tmp_path / unit).write_text(text.replace("/opt/nca-trader/bin/nca-trader", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit)],
        capture_output=True, text=True, env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if unit.split("@")[0] in line]
    assert said == []


def test_a_service_is_started_again_unless_a_person_has_to_decide(service):
    for name in UNITS[::2]:
        unit = settings(service / name)
        assert unit["Restart"] == "on-failure" and unit["RestartPreventExitStatus"] == "2 3 4"
        assert unit["SuccessExitStatus"] == "130"
        assert "MemoryDenyWriteExecute" not in unit  # XLA could not run what it compiles
    assert settings(service / UNITS[0])["StartLimitIntervalSec"] == "0"


def test_the_training_unit_starts_a_command_that_trains(service):
    unit = settings(service / UNITS[2])
    options = "--env equity_daily --agent nano --distributed"
    words = shlex.split(unit["ExecStart"].replace("$TRAIN_OPTIONS", options))
    assert words[0] == "/opt/nca-trader/bin/nca-trader"
    args = build_parser().parse_args(words[1:])
    assert args.command == "train" and args.run_dir == "/var/lib/nca-trader/%i"


def test_the_guides_have_the_exit_codes_of_the_units(root):
    service = (root / "docs/guides/service.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| [^|]+ \| (yes|no)", service, re.M))
    assert {code: rows[code] for code in ("0", "130", "2", "3", "4")} == dict.fromkeys(
        ("0", "130", "2", "3", "4"), "no"
    )
    assert rows["1, or a signal"] == "yes"
    # SLURM gets the same.
    assert "0|2|3|4|130)" in manifest("slurm", slice_of("v5e-16"), ["nca-trader"], "runs/a")


def test_the_alerts_are_rules_that_can_be_read(service):
    metrics = {rule.metric for rule in read_rules(service / "alerts.toml")}
    names = ("halted", "failed_bars", "feed_age_seconds", "drawdown", "running")
    paper = {f"paper_{name}" for name in names}
    assert metrics == {*paper, "skipped"}


def test_what_the_container_copies_is_in_the_checkout(service, root):
    text = (service / "Containerfile").read_text()
    copied = [w for line in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.M) for w in line.split()]
    assert copied and all((root / name).exists() for name in copied)


def command(service, folder):
    """The words that the unit starts, in a folder of the test."""
    said = settings(service / "spy.env")["PAPER_OPTIONS"]
    words = shlex.split(settings(service / UNITS[0])["ExecStart"].replace("$PAPER_OPTIONS", said))
    assert words[0] == "/opt/nca-trader/bin/nca-trader"
    moved = [w.replace("/var/lib/nca-trader", str(folder)).replace("%i", "spy") for w in words[1:]]
    return [sys.executable, "-m", "nca_trader", *moved]


@pytest.mark.slow
def test_a_session_whose_every_process_is_killed_converges_when_the_unit_starts_again(
    service, root, tmp_path
):
    rng = np.random.default_rng(0)
    close = 100.0 * np.exp(np.cumsum(0.01 * rng.standard_normal((4000, 2)), axis=0))
    bars = bars_of(close, start="2000-01-01", symbols=("AAA", "BBB"))
    folders = [tmp_path / "whole", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
        write_bars(bars, folder / "bars.parquet")

    def start(folder):
        words = command(service, folder)
        null = subprocess.DEVNULL
        return subprocess.Popen(words, cwd=root, stdout=null, stderr=null, start_new_session=True)

    assert start(folders[0]).wait(300) == 0
    journal, sizes = folders[1] / "spy.db", []
    for wanted in (300, 3000, 6000):
        process = start(folders[1])
        while process.poll() is None:
            if journal.exists() and last(journal) >= wanted:
                os.killpg(process.pid, signal.SIGKILL)
                break
            time.sleep(0.01)
        assert process.wait() == -signal.SIGKILL
        sizes.append(verify(journal).seq)
    assert sizes == sorted(sizes) and sizes[0] >= 300
    assert start(folders[1]).wait(300) == 0
    assert verify(journal) == verify(folders[0] / "spy.db")
    assert next(read_events(journal, "run_ended")).body["bars"] == 4000


def last(journal):
    """Events on disk, 0 while the journal is being made."""
    try:
        return max((event.seq for event in read_events(journal)), default=0)
    except Exception:
        return 0
