"""Notices arrive, or the log says that they did not; and no secret is in it."""

import base64
import email
import http.server
import json
import logging
import pathlib
import shutil
import socketserver
import ssl
import subprocess
import threading
import time

import pytest

from nca_trader import machine
from nca_trader.errors import ConfigError
from nca_trader.paper.journal import Journal
from nca_trader.watch import sinks as module
from nca_trader.watch.alerts import Alerts, Rule, read_rules
from nca_trader.watch.metrics import Watched
from nca_trader.watch.sinks import Email, Sinks, Webhook, sink_of
from nca_trader.watch.sinks import Server as MailServer


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
        self.url, self.close = f"http://127.0.0.1:{served.port}/hook", served.close


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
    assert any("sink webhook:127.0.0.1: failed" in line for line in said)


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
    monkeypatch.setattr(machine, "WAITING", 1)
    monkeypatch.setattr(module, "CLOSING", 0.05)
    gate = threading.Event()
    monkeypatch.setattr(module, "sink_of", lambda name: lambda notice: gate.wait(30))
    slow = rule("log")
    first, *_ = notices(slow)
    opened = Sinks(slow.sinks)
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
    opened = Sinks(own.sinks)
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


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_a_failure_and_goes_nowhere(server, code):
    server.codes, server.location = [code], f"{server.url}/elsewhere"
    first, *_ = notices(rule())
    with pytest.raises(OSError, match=f"HTTP {code}: it redirects"):
        Webhook(server.url, waits=(0.0,))(first)
    assert len(server.posted) == 1 and server.asked == []


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/a secret", "https://host/\x1bsecret", "secret", "https:///secret",
            "http://h\u00f6st/secret"],
)  # fmt: skip
def test_an_address_that_cannot_be_one_is_refused_without_being_repeated(monkeypatch, url):
    monkeypatch.setenv("ALERT_URL", url)
    with pytest.raises(ConfigError, match=r"sink \$ALERT_URL: set the variable") as error:
        sink_of("webhook:$ALERT_URL")
    assert "secret" not in str(error.value)


def test_nothing_of_an_address_but_its_host_is_in_the_log(server, monkeypatch, caplog):
    """Whatever fails: an address that urllib refuses quotes itself in the error."""
    monkeypatch.setattr(module, "WAITS", ())
    port = server.url.split(":")[2].split("/")[0]
    for url in (
        f"http://me:secret@127.0.0.1:{port}/secret?token=secret#secret",
        "http://127.0.0.1:1?secret",
        "http://127.0.0.1:99999/secret",
    ):
        server.codes = [500]
        opened = Sinks([f"webhook:{url}"])
        opened.tell(notices(rule(f"webhook:{url}")))
        opened.close()
    monkeypatch.setenv("ALERT_URL", "http://127.0.0.1:1/secret")
    opened = Sinks(["webhook:$ALERT_URL"])
    opened.tell(notices(rule("webhook:$ALERT_URL")))
    opened.close()
    assert caplog.text.count("failed") >= 6
    assert "secret" not in caplog.text


def test_a_sink_that_ends_the_process_does_not_end_its_thread(caplog, monkeypatch):
    def leave(notice):
        raise SystemExit(1)

    monkeypatch.setattr(module, "sink_of", lambda name: leave)
    opened = Sinks(["log"])
    first, *_ = notices(rule("log"))
    opened.tell([first, first])
    opened.close()
    assert caplog.text.count("sink log: failed") == 2


class Mailbox:
    """A mail server of this machine, with STARTTLS where it has a certificate."""

    def __init__(self, certificate=None, answers=()):
        self.mails, self.logins, self.answers = [], [], list(answers)
        outer = self

        class Handler(socketserver.StreamRequestHandler):
            def say(self, text):
                self.wfile.write(text.encode() + b"\r\n")

            def handle(self):
                secure = False
                self.say("220 here")
                while line := self.rfile.readline().decode().strip():
                    word = line.split()[0].upper()
                    if word == "EHLO":
                        more = certificate and not secure
                        self.say("250-here")
                        if more:
                            self.say("250-STARTTLS")
                        self.say("250 AUTH PLAIN")
                    elif word == "STARTTLS":
                        self.say("220 go")
                        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                        context.load_cert_chain(*certificate)
                        try:
                            self.request = context.wrap_socket(self.request, server_side=True)
                        except ssl.SSLError:
                            return
                        self.rfile = self.request.makefile("rb")
                        self.wfile = self.request.makefile("wb", buffering=0)
                        secure = True
                    elif word == "AUTH":
                        outer.logins.append((secure, base64.b64decode(line.split()[2])))
                        self.say("235 in")
                    elif word == "DATA":
                        self.say("354 go")
                        lines = []
                        while (row := self.rfile.readline()) != b".\r\n":
                            lines.append(row)
                        outer.mails.append((secure, email.message_from_bytes(b"".join(lines))))
                        self.say("250 kept")
                    elif word == "QUIT":
                        return self.say("221 bye")
                    else:
                        reply = (
                            outer.answers.pop(0) if outer.answers and word == "MAIL" else "250 ok"
                        )
                        self.say(reply)

            def finish(self):
                self.request.close()

        served = Quiet(Handler)
        self.port, self.close = served.port, served.close


@pytest.fixture
def mailbox():
    opened = []

    def make(*args, **kwargs):
        opened.append(Mailbox(*args, **kwargs))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    if not shutil.which("openssl"):
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
             "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout",
             folder / "key.pem", "-out", folder / "cert.pem"]  # fmt: skip
    subprocess.run(words, check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


def mail(port, password="", host="127.0.0.1"):
    return Email("you@example.org", MailServer(host, port, "me", password, "me@here"), (0.0,))


def test_an_email_arrives_over_tls_after_a_login(mailbox, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    box = mailbox(certificate)
    first, *_ = notices(rule())
    mail(box.port, "canary")(first)
    ((secure, found),) = box.mails
    assert secure and box.logins == [(True, b"\0me\0canary")]
    assert (found["To"], found["From"]) == ("you@example.org", "me@here")
    assert found["Subject"] == "[nca_trader] kl firing"
    assert (
        "x > 1 for 10 s; now 2" in found.get_payload() and "source: runs/x" in found.get_payload()
    )


def test_a_password_is_not_sent_without_tls_nor_to_a_stranger(mailbox, certificate):
    first, *_ = notices(rule())
    plain = mailbox()
    with pytest.raises(OSError, match="does not offer STARTTLS"):
        mail(plain.port, "canary")(first)
    strange = mailbox(certificate)  # nobody vouches for its certificate
    with pytest.raises(OSError, match="certificate or TLS failed"):
        mail(strange.port, "canary")(first)
    assert plain.logins == strange.logins == plain.mails == strange.mails == []


def test_a_mail_server_that_is_busy_is_asked_again_and_one_that_refuses_is_not(mailbox):
    first, *_ = notices(rule())
    busy = mailbox(answers=["451 later"])
    mail(busy.port)(first)
    assert len(busy.mails) == 1
    no = mailbox(answers=["550 no", "550 no"])
    with pytest.raises(OSError, match=r"^the mail server answered 550$"):
        mail(no.port)(first)
    assert no.mails == [] and no.answers == ["550 no"]
    with pytest.raises(OSError, match="no answer: Connection refused"):
        mail(1)(first)


def test_a_name_with_a_line_break_adds_no_header(mailbox):
    box = mailbox()
    first, *_ = notices(rule(name="kl\r\nBcc: other@example.org"))
    mail(box.port)(first)
    ((_, found),) = box.mails
    assert found["Bcc"] is None and "\\n" in found["Subject"]


def test_the_mail_server_stands_in_the_environment(monkeypatch):
    monkeypatch.setenv("NCA_TRADER_SMTP", "me@there.org@mail.there.org:2525")
    monkeypatch.setenv("NCA_TRADER_SMTP_PASSWORD", "canary")
    found = MailServer.of_environment()
    assert found == ("mail.there.org", 2525, "me@there.org", "canary", "me@there.org")
    for text, says in (("", "HOST"), ("host:x", "HOST"), ("host", "NCA_TRADER_SMTP_FROM")):
        monkeypatch.setenv("NCA_TRADER_SMTP", text)
        with pytest.raises(ConfigError, match=says):
            sink_of("email:you@example.org")


def test_a_halt_of_one_sleeve_reaches_every_sink_with_its_name_and_reason(
    tmp_path, server, mailbox, monkeypatch, caplog
):
    """By the rules that are shipped: nobody has to write one for sleeves."""
    box, path = mailbox(), tmp_path / "book.db"
    for name, value in (("ALERT_URL", server.url), ("NCA_TRADER_SMTP", f"me@127.0.0.1:{box.port}"),
                        ("NCA_TRADER_SMTP_FROM", "me@here.org")):  # fmt: skip
        monkeypatch.setenv(name, value)
    shipped = pathlib.Path(__file__).parents[2] / "tools/service/alerts.toml"
    rules = [rule for rule in read_rules(shipped) if rule.name == "halted"]
    alerts, opened = Alerts(rules, "book.db"), Sinks(sink for rule in rules for sink in rule.sinks)
    watched = Watched(None, path)
    halt = {"code": "sleeve-halted", "sleeve": "trend", "limit": "max-drawdown"}
    halt |= {"on_halt": "flatten", "loss": 0.1234567}
    story = [
        ("run_started", "", {"sleeves": {"trend": {}, "agent": {}}}),
        ("bar", "1", {}),
        ("risk", "1:trend:sleeve-halted", halt),
        ("halt", "2", {"code": "asked", "detail": {"by": "file", "reason": "news"}}),
        # It lifts the sleeve's halt, and not that of the session.
        ("resume", "3", {"reason": "too tight", "sleeve": "trend"}),
    ]
    with caplog.at_level(logging.INFO), Journal(path, lambda: 0) as journal:
        for now, (kind, key, body) in enumerate(story):
            journal.record("r", kind, key, body, 0)
            opened.tell(alerts.update(watched.look(), now, watched.why))
        opened.close()
    expected = [
        ("firing", {"sleeve": "trend"}, "max-drawdown, loss 0.1235, on_halt flatten"),
        ("firing", {}, "asked, by file, reason news"),
        ("resolved", {"sleeve": "trend"}, "too tight"),
    ]
    assert [(b["status"], b["labels"], b["why"]) for *_, b in server.posted] == expected
    subjects = [mail["Subject"] for _, mail in box.mails]
    assert subjects == [
        "[nca_trader] halted, sleeve trend firing", "[nca_trader] halted firing",
        "[nca_trader] halted, sleeve trend resolved",
    ]  # fmt: skip
    assert "max-drawdown, loss 0.1235" in box.mails[0][1].get_payload()
    first, *_ = (r.getMessage() for r in caplog.records)
    assert first.startswith("book.db: halted, sleeve trend firing: paper_halted == 1; now 1 (max-")
