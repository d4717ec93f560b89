"""Sinks get exactly what there is to tell, and none of them can stop the watching."""

import http.server
import json
import logging
import threading
import time

import pytest

from nca_trader.errors import ConfigError
from nca_trader.watch import alerts as module
from nca_trader.watch.alerts import Alerts, Rule, Sinks, Webhook, Worker, sink_of


class Server:
    """A local server that keeps what is posted, and answers with the codes given, then 200."""

    def __init__(self):
        self.posted, self.codes, self.delay = [], [], 0.0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.posted.append((self.path, self.headers["Content-Type"], json.loads(body)))
                time.sleep(outer.delay)
                self.send_response(outer.codes.pop(0) if outer.codes else 200)
                self.end_headers()

            def log_message(self, *args):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    opened = Server()
    yield opened
    opened.close()


def rule(*sinks, name="kl"):
    return Rule(name=name, metric="x", comparison=">", threshold=1.0, for_seconds=10, sinks=sinks)


def notices(*rules):
    alerts = Alerts(rules, "runs/x")
    looks = ((0, 2.0), (5, 2.0), (10, 2.0), (11, 2.0), (12, 0.0), (13, 0.0))
    for now, value in looks:
        yield from alerts.update({"x": value}, now)


def test_a_webhook_gets_one_post_to_fire_and_one_to_resolve(server):
    kl = rule(f"webhook:{server.url}")
    opened = Sinks(kl.sinks)
    opened.tell(notices(kl))
    opened.close()
    assert [(path, kind) for path, kind, _ in server.posted] == [("/hook", "application/json")] * 2
    firing, resolved = (body for *_, body in server.posted)
    assert (firing["status"], firing["value"], firing["at"][-14:-6]) == ("firing", 2.0, "00:00:10")
    assert (resolved["status"], resolved["value"]) == ("resolved", 0.0)
    assert firing["rule"] == resolved["rule"] == "kl" and firing["source"] == "runs/x"


@pytest.mark.parametrize("code", [500, 503, 429])
def test_a_server_that_fails_is_asked_again(server, code):
    server.codes = [code, code]
    first, *_ = notices(rule())
    Webhook(server.url, waits=(0.0, 0.0))(first)
    assert len(server.posted) == 3


def test_a_server_that_refuses_is_not_asked_again(server):
    server.codes = [400]
    first, *_ = notices(rule())
    with pytest.raises(OSError, match="400"):
        Webhook(server.url, waits=(0.0, 0.0))(first)
    assert len(server.posted) == 1


def test_a_webhook_that_stays_away_is_logged_and_stops_nothing(server, monkeypatch, caplog):
    monkeypatch.setattr(module, "WAITS", (0.0,))
    secret = "webhook:http://127.0.0.1:1/secret"
    both = rule(secret, "log")
    with caplog.at_level(logging.INFO):
        opened = Sinks(both.sinks)
        opened.tell(notices(both))
        opened.close()
    said = [record.getMessage() for record in caplog.records]
    assert sum("failed" in line for line in said) == 2  # fire, resolve
    assert any(line.startswith("runs/x: kl firing: x > 1 for 10 s; now 2") for line in said)
    assert any(line.startswith("runs/x: kl resolved") for line in said)
    assert not any("secret" in line for line in said)


def test_a_slow_sink_does_not_hold_up_the_caller(server):
    server.delay = 0.4
    kl = rule(f"webhook:{server.url}")
    opened = Sinks(kl.sinks)
    told = list(notices(kl))
    began = time.monotonic()
    opened.tell(told)
    took = time.monotonic() - began
    opened.close()
    assert took < 0.35 and len(server.posted) == 2


def test_a_full_queue_drops_with_a_word_and_an_end_that_hangs_is_left(caplog, monkeypatch):
    monkeypatch.setattr(module, "WAITING", 1)
    gate = threading.Event()
    worker = Worker("slow", lambda notice: gate.wait(30))
    first, *_ = notices(rule())
    for _ in range(4):
        worker.tell(first)
    worker.close(0.05)
    gate.set()
    said = [record.getMessage() for record in caplog.records]
    assert sum("too slow; dropped" in line for line in said) in (2, 3)
    assert said[-1] == "sink slow: not done in 0.05 s; what waited is lost"


def test_a_function_of_the_users_is_called_and_may_fail(tmp_path, monkeypatch, caplog):
    (tmp_path / "my_own_alerts.py").write_text(
        "told = []\n"
        "def tell(notice):\n"
        "    told.append((notice.status, notice.rule.name))\n"
        "    if notice.status == 'firing': raise ValueError('mine')\n"
    )
    monkeypatch.chdir(tmp_path)
    own = rule("call:my_own_alerts:tell")
    opened = Sinks(own.sinks)
    opened.tell(notices(own))
    opened.close()
    import my_own_alerts  # pyright: ignore[reportMissingImports]

    assert my_own_alerts.told == [("firing", "kl"), ("resolved", "kl")]
    assert "failed (mine)" in caplog.text


@pytest.mark.parametrize(
    ("sink", "says"),
    [
        ("call:no_such_module_here:f", "No module named"),
        ("call:json:no_such", "no attribute"),
        ("call:json:__doc__", "is not a function"),
        ("webhook:$NO_SUCH_VARIABLE", "set the variable"),
    ],
)
def test_a_sink_that_is_not_there_is_refused_before_watching(sink, says):
    with pytest.raises(ConfigError, match=says) as error:
        sink_of(sink)
    assert len(str(error.value).splitlines()) == 1


def test_a_url_can_stand_in_a_variable(server, monkeypatch):
    monkeypatch.setenv("ALERT_URL", server.url)
    first, *_ = notices(rule())
    sink_of("webhook:$ALERT_URL")(first)
    assert len(server.posted) == 1
