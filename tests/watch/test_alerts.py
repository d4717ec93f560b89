"""Rules fire once and are resolved once, at the time that a hand ledger says."""

import http.server
import json
import logging
import math
import threading
import time

import pytest

from nca_trader.errors import ConfigError
from nca_trader.watch import alerts as module
from nca_trader.watch.alerts import Alerts, Rule, Sinks, Webhook, Worker, read_rules, sink_of

KL = Rule(name="kl", metric="approx_kl", comparison=">", threshold=0.05, for_seconds=10.0)


def told(rule, course):
    """(time, status) of every notice, looking at (time, value) of the course."""
    alerts, found = Alerts([rule], "runs/x"), []
    for now, value in course:
        samples = {} if value is None else {rule.metric: value}
        found += [(notice.at, notice.status) for notice in alerts.update(samples, now)]
    return found


AT_ONCE = Rule(name="x", metric="x", comparison=">=", threshold=1.0)
COURSES = {
    "fires after its time and is resolved once": (
        KL, [(0, .01), (1, .1), (6, .1), (10, .1), (11, .1), (20, .1), (21, .01), (22, .01)],
        [(11, "firing"), (21, "resolved")],
    ),
    "ends before its time, and nothing is notified": (
        KL, [(0, .1), (9, .1), (9.5, 0), (10, .1), (19, .1), (19.9, 0)], [],
    ),
    "comes back and waits its time again": (
        KL, [(0, .1), (10, .1), (11, 0), (12, .1), (21, .1), (22, .1)],
        [(10, "firing"), (11, "resolved"), (22, "firing")],
    ),
    "without a time it fires at once": (
        AT_ONCE, [(0, .5), (1, 1), (2, 1), (3, 0)], [(1, "firing"), (3, "resolved")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COURSES)
def test_a_rule_is_notified_as_the_ledger_says(name):
    rule, course, expected = COURSES[name]
    assert told(rule, course) == expected


def test_a_metric_that_is_missing_meets_absent_alone():
    absent = Rule(name="x", metric="x", comparison="absent", for_seconds=5.0)
    course = [(0, 1.0), (1, None), (6, math.nan), (7, 2.0)]
    assert told(absent, course) == [(6, "firing"), (7, "resolved")]
    for comparison in (">", "<", "!=", "=="):
        rule = Rule(name="x", metric="x", comparison=comparison, threshold=0.0)
        assert not rule.holds({}) and not rule.holds({"x": math.nan})


@pytest.mark.parametrize(
    ("comparison", "expected"),
    [
        (">", [0, 0, 1]),
        (">=", [0, 1, 1]),
        ("<", [1, 0, 0]),
        ("<=", [1, 1, 0]),
        ("==", [0, 1, 0]),
        ("!=", [1, 0, 1]),
    ],
)
def test_every_comparison_is_of_the_metric_with_the_threshold(comparison, expected):
    rule = Rule(name="x", metric="x", comparison=comparison, threshold=2.0)
    assert [rule.holds({"x": value}) for value in (1.0, 2.0, 3.0)] == [bool(e) for e in expected]


def test_states_are_told_and_rules_do_not_mix():
    other = Rule(name="other", metric="loss", comparison="<", threshold=0.0)
    alerts = Alerts([KL, other], "runs/x")
    assert [alerts.state(rule) for rule in (KL, other)] == ["inactive", "inactive"]
    alerts.update({"approx_kl": 1.0, "loss": -1.0}, 0.0)
    assert [alerts.state(rule) for rule in (KL, other)] == ["pending", "firing"]
    (notice,) = alerts.update({"approx_kl": 1.0, "loss": 1.0}, 10.5)[1:]
    assert (notice.rule, notice.status) == (other, "resolved")
    assert alerts.state(KL) == "firing"


def test_a_notice_says_all_that_a_reader_needs():
    (notice,) = Alerts([KL], "runs/x").update({"approx_kl": 1.0}, 0.0) or [None]
    assert notice is None
    alerts = Alerts([KL], "runs/x")
    alerts.update({"approx_kl": 1.0}, 86400.0)
    (notice,) = alerts.update({"approx_kl": 0.5}, 86410.0)
    assert notice.as_json() == {
        "status": "firing", "rule": "kl", "metric": "approx_kl", "comparison": ">",
        "threshold": 0.05, "for_seconds": 10.0, "value": 0.5,
        "since": "1970-01-02T00:00:00+00:00", "at": "1970-01-02T00:00:10+00:00",
        "source": "runs/x",
    }  # fmt: skip
    assert str(notice) == "runs/x: kl firing: approx_kl > 0.05 for 10 s; now 0.5"


GOOD = """
[[rule]]
name = "kl"
metric = "approx_kl"
comparison = ">"
threshold = 0.05
for = "5m"
sinks = ["log", "webhook:https://example.org/x", "call:mine.alerts:tell"]

[[rule]]
name = "stalled"
metric = "row_age_seconds"
comparison = ">"
threshold = 600

[[rule]]
name = "gone"
metric = "reward"
comparison = "absent"
for = 90
"""


def write(tmp_path, text):
    path = tmp_path / "rules.toml"
    path.write_text(text)
    return path


def test_rules_are_read_as_they_are_written(tmp_path):
    kl, stalled, gone = read_rules(write(tmp_path, GOOD))
    sinks = ("log", "webhook:https://example.org/x", "call:mine.alerts:tell")
    assert kl == Rule(
        name="kl", metric="approx_kl", comparison=">", threshold=0.05, for_seconds=300.0,
        sinks=sinks,
    )  # fmt: skip
    assert (stalled.threshold, stalled.for_seconds, stalled.sinks) == (600.0, 0.0, ("log",))
    assert (gone.threshold, gone.for_seconds) == (None, 90.0)


ROW = '[[rule]]\nname = "a"\nmetric = "b"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = ", "not valid TOML"),
        ("", "holds no rule; write rows of [[rule]]"),
        ("[rule]\nname = 'a'", "holds no rule"),
        ("rules = 1\n" + ROW, "rules is not a known key"),
        (ROW + 'comparison = "=>"\nthreshold = 1', "rule 1 (a): comparison = '=>' is not known"),
        (ROW + 'comparison = ">"', "rule 1 (a): threshold = None: give a finite number"),
        (ROW + 'comparison = ">"\nthreshold = nan', "threshold = nan"),
        (ROW + 'comparison = ">"\nthreshold = true', "threshold = True"),
        (ROW + 'comparison = "absent"\nthreshold = 1', "leave it out"),
        (ROW + 'comparison = ">"\nthreshold = 1\nfor = "5 fortnights"', "not a length of time"),
        (ROW + 'comparison = ">"\nthreshold = 1\nfor = -1', "not a length of time"),
        (ROW + 'comparison = ">"\nthreshold = 1\ntreshold = 1', "did you mean 'threshold'?"),
        (ROW + 'comparison = ">"\nthreshold = 1\nsinks = []', "give a list"),
        (ROW + 'comparison = ">"\nthreshold = 1\nsinks = ["mail:me"]', "'mail:me' is not known"),
        (ROW + 'comparison = ">"\nthreshold = 1\nsinks = ["webhook:ftp://x"]', "http(s)"),
        (ROW + 'comparison = ">"\nthreshold = 1\nsinks = ["call:os"]', "package.module:function"),
        ('[[rule]]\nname = "a"\ncomparison = ">"\nthreshold = 1', "metric = None: give a text"),
        ((ROW + 'comparison = ">"\nthreshold = 1\n') * 2, "rule 2 (a): the name is another"),
    ],
)
def test_a_faulty_row_is_one_line_with_its_number_and_the_remedy(tmp_path, text, says):
    with pytest.raises(ConfigError) as error:
        read_rules(write(tmp_path, text))
    assert says in str(error.value) and str(error.value).startswith(str(tmp_path))
    assert len(str(error.value).splitlines()) == 1


def test_all_faults_are_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as error:
        read_rules(write(tmp_path, '[[rule]]\nname = "a"\n\n[[rule]]\nname = "b"\n'))
    assert len(str(error.value).splitlines()) == 6  # metric, comparison, threshold, of both


def test_a_rules_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rules(tmp_path / "none.toml")


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
