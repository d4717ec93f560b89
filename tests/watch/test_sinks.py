"""Notices arrive, or the log says that they did not; and no secret is in it."""

import http.server
import json
import logging
import pathlib
import re
import socketserver
import sys
import threading
import time

import pytest

from nca_trader import machine
from nca_trader.errors import ConfigError
from nca_trader.paper.journal.journal import Journal
from nca_trader.watch import sinks as module
from nca_trader.watch.alerts import Alerts, Rule, read_rules
from nca_trader.watch.metrics import Watched
from nca_trader.watch.sinks import Sinks, named, open_sinks, sink_of


class Quiet(socketserver.ThreadingTCPServer):
    """A server of this machine in a thread of its own, until it is closed."""

    daemon_threads = True

    def __init__(self, handler):
        super().__init__(("127.0.0.1", 0), handler)
        self.port = self.server_address[1]
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self._thread.start()

    def handle_error(self, request, client_address):
        pass  # a client that hangs up

    def close(self):
        self.shutdown()
        self.server_close()
        self._thread.join()


class Server:
    """A local server that keeps what is posted, and answers with the codes given, then 200."""

    def __init__(self):
        self.posted, self.codes, self.delay = [], [], 0.0
        self.asked, self.location = [], None
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.posted.append((self.path, self.headers["Content-Type"], json.loads(body)))
                time.sleep(outer.delay)
                self.send_response(outer.codes.pop(0) if outer.codes else 200)
                if outer.location:
                    self.send_header("Location", outer.location)
                self.end_headers()

            def do_GET(self):
                outer.asked.append(self.path)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args):
                pass

        served = Quiet(Handler)
        self.http, self.close = f"http://127.0.0.1:{served.port}", served.close
        self.url = f"json://127.0.0.1:{served.port}/hook"


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    opened = Server()
    yield opened
    opened.close()


def rule(*sinks, name="kl"):
    sinks = sinks or ("log",)
    return Rule(name=name, metric="x", comparison=">", threshold=1.0, for_seconds=10, sinks=sinks)


def notices(*rules):
    alerts = Alerts(rules, "runs/x")
    looks = ((0, 2.0), (5, 2.0), (10, 2.0), (11, 2.0), (12, 0.0), (13, 0.0))
    for now, value in looks:
        yield from alerts.update({"x": value}, now)


def said(body):
    """The lines `key: value` of a notice that was sent."""
    return dict(re.findall(r"^(\w+): (.*)$", body["message"], re.M))


def test_a_service_gets_one_post_to_fire_and_one_to_resolve(server):
    kl = rule(f"apprise:{server.url}")
    opened = Sinks(open_sinks(kl.sinks))
    opened.tell(notices(kl))
    opened.close()
    assert [(path, kind) for path, kind, _ in server.posted] == [("/hook", "application/json")] * 2
    firing, resolved = (body for *_, body in server.posted)
    assert (firing["title"], firing["type"]) == ("[nca_trader] kl firing", "failure")
    assert (resolved["title"], resolved["type"]) == ("[nca_trader] kl resolved", "success")
    assert firing["message"].startswith("runs/x: kl firing: x > 1 for 10 s; now 2\n")
    found, after = said(firing), said(resolved)
    assert (found["status"], found["value"], found["at"][-14:-6]) == ("firing", "2.0", "00:00:10")
    assert (after["status"], after["value"]) == ("resolved", "0.0")
    assert found["rule"] == after["rule"] == "kl" and found["source"] == "runs/x"


@pytest.mark.parametrize("code", [500, 503, 429])
def test_a_server_that_fails_is_asked_again(server, monkeypatch, code):
    monkeypatch.setattr(module, "WAITS", (0.0, 0.0))
    server.codes = [code, code]
    first, *_ = notices(rule())
    sink_of(f"apprise:{server.url}")(first)
    assert len(server.posted) == 3


def test_a_service_that_stays_away_is_logged_and_stops_nothing(server, monkeypatch, caplog):
    monkeypatch.setattr(module, "WAITS", (0.0,))
    secret = "apprise:json://127.0.0.1:1/secret"
    both = rule(secret, "log")
    with caplog.at_level(logging.DEBUG):
        opened = Sinks(open_sinks(both.sinks))
        opened.tell(notices(both))
        opened.close()
    lines = [record.getMessage() for record in caplog.records if "nca_trader" in record.name]
    assert sum("failed" in line for line in lines) == 2  # fire, resolve
    assert any(line.startswith("runs/x: kl firing: x > 1 for 10 s; now 2") for line in lines)
    assert any(line.startswith("runs/x: kl resolved") for line in lines)
    assert not any("secret" in line for line in lines)
    assert any("sink apprise:json: failed" in line for line in lines)


def test_a_slow_sink_does_not_hold_up_the_caller(server):
    server.delay = 0.4
    kl = rule(f"apprise:{server.url}")
    opened = Sinks(open_sinks(kl.sinks))
    told = list(notices(kl))
    began = time.monotonic()
    opened.tell(told)
    took = time.monotonic() - began
    opened.close()
    assert took < 0.35 and len(server.posted) == 2


def test_a_full_queue_drops_with_a_word_and_an_end_that_hangs_is_left(caplog, monkeypatch):
    monkeypatch.setattr(machine, "WAITING", 1)
    monkeypatch.setattr(module, "CLOSING", 0.05)
    gate = threading.Event()
    monkeypatch.setattr(module, "sink_of", lambda name: lambda notice: gate.wait(30))
    slow = rule("log")
    first, *_ = notices(slow)
    opened = Sinks(open_sinks(slow.sinks))
    opened.tell([first] * 4)
    opened.close()
    gate.set()
    said = [record.getMessage() for record in caplog.records]
    assert sum("sink log: failed (too slow); lost" in line for line in said) in (2, 3)
    assert said[-1] == "sink log: not done in 0.05 s; what waited is lost"


def test_a_function_of_the_users_is_called_and_may_fail(tmp_path, monkeypatch, caplog):
    (tmp_path / "my_own_alerts.py").write_text(
        "told = []\n"
        "def tell(notice):\n"
        "    told.append((notice.status, notice.rule.name))\n"
        "    if notice.status == 'firing': raise ValueError('mine')\n"
    )
    monkeypatch.chdir(tmp_path)
    own = rule("call:my_own_alerts:tell")
    opened = Sinks(open_sinks(own.sinks))
    opened.tell(notices(own))
    opened.close()
    import my_own_alerts  # pyright: ignore[reportMissingImports]

    assert my_own_alerts.told == [("firing", "kl"), ("resolved", "kl")]
    assert "failed (mine)" in caplog.text


@pytest.mark.parametrize(
    ("sink", "says"),
    [
        ("call:no_such_module_here:f", "no module named"),
        ("call:json:dump", "is a module of Python itself"),
        ("call:made_up:no_such", "made_up has no 'no_such'"),
        ("call:made_up:__doc__", "is not a function"),
        ("apprise:$NO_SUCH_VARIABLE", "set the variable"),
        ("apprise:nowhere://x", "give an address as Apprise writes it"),
        ("apprise:json://x/a b", "give an address as Apprise writes it"),
        ("apprise:me", "give an address as Apprise writes it"),
        ("apprise:", "give an address as Apprise writes it"),
        ("call:os", "os: is not a name; give module:name"),
        ("call:", "is not a name; give module:name"),
    ],
)
def test_a_sink_that_is_not_there_is_refused_before_watching(sink, says):
    with pytest.raises(ConfigError, match=says) as error:
        open_sinks(["log", sink])
    assert len(str(error.value).splitlines()) == 1


def test_all_sinks_that_are_not_there_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        open_sinks(["apprise:$NO_SUCH_VARIABLE", "log", "call:made_up:no_such"])
    said = str(error.value).splitlines()
    assert [line.partition(": ")[0] for line in said] == [
        "sink apprise:$NO_SUCH_VARIABLE", "sink call:made_up:no_such",
    ]  # fmt: skip


def test_a_url_can_stand_in_a_variable(server, monkeypatch):
    monkeypatch.setenv("ALERT_URL", server.url)
    first, *_ = notices(rule())
    sink_of("apprise:$ALERT_URL")(first)
    assert len(server.posted) == 1


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_a_failure_and_goes_nowhere(server, monkeypatch, code):
    monkeypatch.setattr(module, "WAITS", ())
    server.codes, server.location = [code], f"{server.http}/elsewhere"
    first, *_ = notices(rule())
    with pytest.raises(OSError, match="did not take it"):
        sink_of(f"apprise:{server.url}")(first)
    assert len(server.posted) == 1 and server.asked == []


@pytest.mark.parametrize(
    "url", ["json://127.0.0.1:1/a secret", "json://host/\x1bsecret", "secret",
            "json://h\u00f6st/secret"],
)  # fmt: skip
def test_an_address_that_cannot_be_one_is_refused_without_being_repeated(monkeypatch, caplog, url):
    monkeypatch.setenv("ALERT_URL", url)
    with pytest.raises(ConfigError, match=r"sink apprise:\$ALERT_URL: give an address") as error:
        sink_of("apprise:$ALERT_URL")
    assert "secret" not in str(error.value) + caplog.text


def test_nothing_of_an_address_but_its_service_is_in_the_log(server, monkeypatch, caplog):
    """Whatever fails, and whatever Apprise itself would log of it."""
    monkeypatch.setattr(module, "WAITS", ())
    port = server.url.split(":")[2].split("/")[0]
    monkeypatch.setenv("ALERT_URL", "json://127.0.0.1:1/secret")
    names = [
        f"apprise:json://me:secret@127.0.0.1:{port}/secret?token=secret#secret",
        "apprise:json://127.0.0.1:1?secret", "apprise:slack://secretA/secretB/secretC",
        "apprise:$ALERT_URL",
    ]  # fmt: skip
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")  # nothing leaves this machine
    with caplog.at_level(logging.INFO):
        for name in names[:2] + names[3:]:
            server.codes = [500]
            opened = Sinks(open_sinks([name]))
            opened.tell(notices(rule(name)))
            opened.close()
    assert caplog.text.count("failed") >= 5
    assert "secret" not in caplog.text and "secret" not in "".join(map(named, names))


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(ConfigError, match="needs apprise; pip install apprise"):
        sink_of("apprise:$ALERT_URL")


def test_a_sink_that_ends_the_process_does_not_end_its_thread(caplog, monkeypatch):
    def leave(notice):
        raise SystemExit(1)

    monkeypatch.setattr(module, "sink_of", lambda name: leave)
    opened = Sinks(open_sinks(["log"]))
    first, *_ = notices(rule("log"))
    opened.tell([first, first])
    opened.close()
    assert caplog.text.count("sink log: failed") == 2


def test_a_halt_reaches_every_sink_with_its_reason(tmp_path, server, monkeypatch, caplog):
    """By the rules that are shipped."""
    path = tmp_path / "book.db"
    monkeypatch.setenv("ALERT_URL", server.url)
    monkeypatch.setenv("ALERT_MAIL", f"{server.url}/mail")
    shipped = pathlib.Path(__file__).parents[2] / "tools/service/alerts.toml"
    rules = [rule for rule in read_rules(shipped) if rule.name == "halted"]
    alerts, opened = (
        Alerts(rules, "book.db"),
        Sinks(open_sinks(sink for rule in rules for sink in rule.sinks)),
    )
    watched = Watched(None, path)
    story = [
        ("run_started", "", {}),
        ("bar", "1", {}),
        ("halt", "1", {"code": "max-drawdown", "detail": {"loss": 0.1234567}}),
        ("resume", "2", {"reason": "too tight"}),
        ("halt", "3", {"code": "asked", "detail": {"by": "file", "reason": "news"}}),
    ]
    with caplog.at_level(logging.INFO), Journal(path, lambda: 0) as journal:
        for now, (kind, key, body) in enumerate(story):
            journal.record("r", kind, key, body, 0)
            opened.tell(alerts.update(watched.look(), now, watched.why))
        opened.close()
    expected = [
        ("firing", {}, "max-drawdown, loss 0.1235"),
        ("resolved", {}, "too tight"),
        ("firing", {}, "asked, by file, reason news"),
    ]
    for way in ("/hook", "/hook/mail"):
        sent = [body for path, _, body in server.posted if path == way]
        told = [said(body) for body in sent]
        assert [(t["status"], t["labels"], t.get("why", "")) for t in told] == [
            (status, str(labels), why) for status, labels, why in expected
        ]
        words = ("firing", "resolved", "firing")
        assert [body["title"] for body in sent] == [f"[nca_trader] halted {w}" for w in words]
    first, *_ = (r.getMessage() for r in caplog.records)
    assert first.startswith("book.db: halted firing: paper_halted == 1; now 1 (max-")
