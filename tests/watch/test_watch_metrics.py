"""The figures of a run by name, and the same as Prometheus scrapes them."""

import json
import math
import socket
import urllib.request

import pytest

from nca_trader.errors import ConfigError, RunError, StateError
from nca_trader.watch.metrics import Collector, Watched, exporter, flat


def test_a_row_is_flattened_and_what_is_no_number_left_out():
    row = {
        "update": 3, "reward": 0.5, "loss": None, "note": "text", "ok": True,
        "seeds": {"reward": [0.25, None], "parent": [0, 1]},
        "fitness_correlation": {"learning_rate": 0.5},
    }  # fmt: skip
    found = flat(row)
    assert math.isnan(found.pop("loss")) and math.isnan(found.pop('seed_reward{seed="1"}'))
    assert found == {
        "update": 3.0, "reward": 0.5, "ok": 1.0, 'seed_reward{seed="0"}': 0.25,
        'seed_parent{seed="0"}': 0.0, 'seed_parent{seed="1"}': 1.0,
        "fitness_correlation_learning_rate": 0.5,
    }  # fmt: skip


def test_the_age_of_the_newest_row_grows_until_another_comes(tmp_path):
    import os

    now = [1000.0]
    path = tmp_path / "metrics.jsonl"
    watched = Watched(tmp_path, clock=lambda: now[0])
    assert watched.look() == {"rows": 0.0, "restarts": 0.0, "row_age_seconds": 0.0}
    now[0] = 1060.0  # a run that never begins stalls too
    assert watched.look()["row_age_seconds"] == 60.0
    path.write_text(json.dumps({"update": 1}) + "\n" + '{"upd')
    now[0] = 1100.0
    assert watched.look() == {"update": 1.0, "rows": 1.0, "restarts": 0.0, "row_age_seconds": 0.0}
    now[0] = 1130.0
    assert watched.look()["row_age_seconds"] == 30.0  # half a row is none
    # One who comes later knows the age from the file.
    os.utime(path, (1100.0, 1100.0))
    assert Watched(tmp_path, clock=lambda: now[0]).look()["row_age_seconds"] == 30.0


def test_a_run_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(RunError, match="no such folder"):
        Watched(tmp_path / "none")


def test_prometheus_scrapes_what_the_last_look_saw(monkeypatch):
    pytest.importorskip("prometheus_client", reason="needs the extra `prometheus`")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    collector = Collector('runs/"x"')
    with exporter("0", collector) as port:
        collector.samples = {
            "reward": 0.5, "loss": math.nan, 'seed_reward{seed="0"}': 1.0,
            'seed_reward{seed="1"}': -2.0,
        }  # fmt: skip
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    said = [line for line in lines if not line.startswith("#")]
    run = 'run="runs/\\"x\\""'
    assert said == [
        f"nca_trader_reward{{{run}}} 0.5",
        f"nca_trader_loss{{{run}}} NaN",
        f'nca_trader_seed_reward{{{run},seed="0"}} 1.0',
        f'nca_trader_seed_reward{{{run},seed="1"}} -2.0',
    ]
    assert lines.count("# TYPE nca_trader_seed_reward gauge") == 1
    with pytest.raises(OSError, match="refused"):  # it has ended
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_a_port_that_is_taken_is_one_line():
    pytest.importorskip("prometheus_client", reason="needs the extra `prometheus`")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StateError, match="give another port"):
            with exporter(str(port), Collector("x")):
                pass


@pytest.mark.parametrize("address", ["", "x", "70000", "host:"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match="give a port"):
        with exporter(address, Collector("x")):
            pass
