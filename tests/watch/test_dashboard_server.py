"""Who may ask the dashboard, what it answers, and the one file that it writes."""

import asyncio
import contextlib
import io
import json
import logging
import math
import os
import re
import socket
import threading
import time
from unittest import mock

import pytest

from nca_trader.cli import main
from nca_trader.errors import ConfigError
from nca_trader.paper.journal.chain import writer_of
from nca_trader.paper.journal.halting import request_halt
from nca_trader.paper.journal.journal import Journal
from nca_trader.watch.dashboard.sources import FollowedSessions

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
import http
import subprocess
import sys

from uvicorn.server import ServerState

from nca_trader.watch.dashboard import server as module
from nca_trader.watch.dashboard.server import (
    HEADERS,
    access,
    listen,
    make_app,
    read_token,
)

HOST, PORT = "127.0.0.1", 8321
HOME = f"http://{HOST}:{PORT}"
TOKEN = "a-token-of-enough-characters"


@pytest.fixture
def journal(tmp_path):
    path = tmp_path / "root" / "mine.sqlite"
    path.parent.mkdir()
    with Journal(path, lambda: 0) as opened:
        opened.record("r", "run_started", "", {"symbols": ["<b>X</b>"], "capital": 1.0}, 0)
        opened.record("r", "decision", "1", {"target": [0.5]}, 10**9)
        opened.record("r", "bar", "1", {"<b>X</b>": [1.0, 1.0, 1.0, 1.0, 1.0]}, 10**9)
    return path


@pytest.fixture
def app(journal):
    sources = FollowedSessions(root=str(journal.parent))
    yield make_app(sources, access(HOST, PORT))
    sources.close()


def ask(app, path="/", method="GET", body=b"", events=0, kind="http", after=None, **headers):
    """One request; (status, headers, body). Of a stream as many events as asked for.

    `after` is called once the first of them has come.
    """
    given = {"host": f"{HOST}:{PORT}", **{k.replace("_", "-"): v for k, v in headers.items()}}
    path, _, query = path.partition("?")
    scope = {
        "type": kind, "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "method": method, "path": path, "raw_path": path.encode(), "root_path": "",
        "query_string": query.encode(), "scheme": "http", "server": (HOST, PORT),
        "headers": [(k.encode(), v.encode()) for k, v in given.items() if v is not None],
        "client": ("127.0.0.1", 5),
    }  # fmt: skip
    sent, incoming = [], [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if incoming:
            return incoming.pop(0)
        while sum(m.get("body", b"").startswith(b"data") for m in sent) < events:
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(message):
        nonlocal after
        sent.append(message)
        if after and message.get("body", b"").startswith(b"data"):
            after()
            after = None

    asyncio.run(asyncio.wait_for(app(scope, receive, send), 30))
    if kind == "websocket":
        return sent
    found = [(k.decode(), v.decode()) for k, v in sent[0]["headers"]]
    return sent[0]["status"], dict(found), b"".join(m.get("body", b"") for m in sent[1:]).decode()


def halted(journal):
    return journal.with_name(journal.name + ".halt")


@pytest.mark.parametrize("host", ["evil.example:8321", "127.0.0.1:9", "127.0.0.1", "", None])
@pytest.mark.parametrize("path", ["/", "/events", "/s/mine.sqlite/halt", "/static/dashboard.js"])
def test_another_host_name_is_refused_everywhere(app, journal, host, path):
    method = "POST" if path.endswith("halt") else "GET"
    status, headers, _ = ask(app, path, method, b"reason=x", host=host, origin=HOME)
    assert status == 421 and "content-security-policy" in headers
    assert not halted(journal).exists()


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9", None])
def test_a_form_of_another_page_halts_nothing(app, journal, origin):
    status, _, _ = ask(app, "/s/mine.sqlite/halt", "POST", b"reason=x", origin=origin)
    assert status == 403 and not halted(journal).exists()


def test_a_page_elsewhere_reads_no_stream_and_opens_no_websocket(app):
    assert ask(app, "/events", origin="http://evil.example")[0] == 403
    for origin in ("http://evil.example", HOME):
        sent = ask(app, "/events", kind="websocket", origin=origin)
        assert sent == [{"type": "websocket.close", "code": 1008}]


def test_every_answer_has_the_security_headers_and_no_inline_code(app):
    for path in ("/", "/s/mine.sqlite", "/nowhere", "/static/dashboard.js", "/login"):
        status, headers, body = ask(app, path)
        assert {k: headers[k] for k in HEADERS if k != "cache-control"} == {
            k: v for k, v in HEADERS.items() if k != "cache-control"
        }
        if status == 200 and path.startswith(("/s/", "/login")):
            assert not re.search(r"<script(?! src=)|\son\w+=|\sstyle=|<style", body)
    assert "unsafe" not in HEADERS["content-security-policy"]


def test_scripts_of_the_page_make_no_markup(root):
    text = (root / "nca_trader/watch/dashboard/static/dashboard.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_a_name_from_a_journal_is_text(app):
    _, _, body = ask(app, "/s/mine.sqlite")
    assert "&lt;b&gt;X" in body and "<b>X" not in body


def test_halt_writes_its_file_once_and_nothing_else(app, journal):
    before = {p.name: p.read_bytes() for p in journal.parent.iterdir()}
    for reason in (b"reason=too+hot%0Anow", b"reason=later"):
        status, headers, _ = ask(app, "/s/mine.sqlite/halt", "POST", reason, origin=HOME)
        assert (status, headers["location"]) == (303, "/s/mine.sqlite")
    assert halted(journal).read_text() == "too hot now (dashboard)\n"
    assert halted(journal).stat().st_mode & 0o777 == 0o600
    after = {p.name: p.read_bytes() for p in journal.parent.iterdir()}
    assert after.pop(halted(journal).name) and after == before
    _, _, body = ask(app, "/s/mine.sqlite")
    assert "Halt requested" in body and "too hot now (dashboard)" in body
    assert "nca-trader resume --journal" in body


def test_reading_changes_no_file(app, journal):
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in journal.parent.iterdir()}
    for path in ("/", "/s/mine.sqlite", "/s/mine.sqlite?x=../../etc"):
        assert ask(app, path)[0] == 200
    for method in ("POST", "PUT", "DELETE"):
        assert ask(app, "/s/mine.sqlite", method, origin=HOME)[0] == 405
    after = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in journal.parent.iterdir()}
    assert after == before


def test_a_long_form_is_refused(app, journal):
    body = b"reason=" + b"x" * 5000
    assert ask(app, "/s/mine.sqlite/halt", "POST", body, origin=HOME)[0] == 413
    assert not halted(journal).exists()


def test_a_form_of_many_fields_is_refused(app, journal):
    for body in (b"&".join(b"reason=x" for _ in range(9)), b"reason=x" + b"&" * 4000):
        status = ask(app, "/s/mine.sqlite/halt", "POST", body, origin=HOME)[0]
        assert status == 400 and not halted(journal).exists()


def test_two_places_are_kept_for_halt(app, journal):
    app.running = module.RUNNING
    assert ask(app, "/")[0] == ask(app, "/s/mine.sqlite/events")[0] == 503
    assert ask(app, "/s/mine.sqlite/halt", "POST", b"reason=x", origin=HOME)[0] == 303
    assert halted(journal).exists() and app.running == module.RUNNING
    app.running += module.HALTING
    assert ask(app, "/s/mine.sqlite/halt", "POST", b"reason=x", origin=HOME)[0] == 503


def test_serving_closes_no_log_of_its_process(app, monkeypatch):
    """A handler may end with the file it writes to: so ended what pytest had captured."""
    monkeypatch.setattr(module.uvicorn.Server, "run", lambda self, sockets: None)
    with mock.patch.object(logging.Handler, "close") as closed:
        handler = logging.StreamHandler(io.StringIO())
        module.serve(app, None)
    assert not closed.called and handler.stream is not None


@pytest.fixture
def guarded(journal, monkeypatch):
    """A dashboard with a token, in a thread; its port and the cookie of who has logged in."""
    servers = []

    class Recorded(module.uvicorn.Server):
        def __init__(self, *args):
            servers.append(self)
            super().__init__(*args)

    monkeypatch.setattr(module.uvicorn, "Server", Recorded)
    sources, listener = FollowedSessions(root=str(journal.parent)), listen(HOST, 0)
    port = listener.getsockname()[1]
    app = make_app(sources, access(HOST, port, (HOST,), TOKEN))
    thread = threading.Thread(target=module.serve, args=(app, listener))
    thread.start()
    yield port, f"{module.COOKIE}={app._cookie}"
    servers[0].should_exit = True
    thread.join()
    sources.close()


def sent(port, path, *headers, method="POST", body=b""):
    """The bytes of a request."""
    home = f"{HOST}:{port}"
    lines = [f"{method} {path} HTTP/1.1", f"Host: {home}", f"Origin: http://{home}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def answer_of(client, seconds=2.0):
    client.settimeout(seconds)
    return int(client.recv(4096).split()[1])


BODIES = {"a wrong token": b"token=x", "half a login, in pieces": b"5\r\ntoken\r\n"}
ATTACKS = {
    "half a login": ("/login", "Content-Length: 100"),
    "half a login, in pieces": ("/login", "Transfer-Encoding: chunked"),
    "half a halt": ("/s/mine.sqlite/halt", "Content-Length: 100", "COOKIE"),
    "a wrong token": ("/login", "Content-Length: 7"),
    "a WebSocket": ("/login", "Upgrade: websocket", "Connection: Upgrade"),
    "an idle client": ("/static/dashboard.css",),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.few(3)
def test_any_number_of_clients_that_hold_on_denies_nothing_to_others(guarded, journal, attack):
    port, cookie = guarded
    path, *headers = ATTACKS[attack]
    headers = [f"Cookie: {cookie}" if header == "COOKIE" else header for header in headers]
    method = "GET" if path.startswith("/static") else "POST"
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            client = stack.enter_context(socket.create_connection((HOST, port)))
            with contextlib.suppress(ConnectionError):
                body = BODIES.get(attack, b"")
                client.sendall(sent(port, path, *headers, method=method, body=body))
        mine = [f"Cookie: {cookie}", "Content-Length: 0"]
        for request in (
            sent(port, "/s/mine.sqlite/halt", *mine),
            sent(port, "/", *mine, method="GET"),
            sent(port, "/login", method="GET"),
        ):
            with socket.create_connection((HOST, port)) as client:
                client.sendall(request)
                assert answer_of(client) in (200, 303)
        assert halted(journal).exists()
        with socket.create_connection((HOST, port)) as client:
            body = f"token={TOKEN}".encode()
            client.sendall(sent(port, "/login", f"Content-Length: {len(body)}", body=body))
            assert answer_of(client) == 303


def test_what_one_host_holds_takes_no_connection_of_another(guarded, journal):
    port, cookie = guarded
    halt = sent(port, "/s/mine.sqlite/halt", f"Cookie: {cookie}", "Content-Length: 10")
    with contextlib.ExitStack() as stack:
        # Half of the halt, and more connections than are kept before its other half.
        client = socket.create_connection((HOST, port), source_address=("127.0.0.2", 0))
        stack.enter_context(client).sendall(halt)
        for _ in range(300):
            other = stack.enter_context(socket.create_connection((HOST, port)))
            with contextlib.suppress(ConnectionError):
                other.sendall(sent(port, "/login", "Content-Length: 100"))
        client.sendall(b"reason=now")
        assert answer_of(client) == 303 and halted(journal).exists()


def test_a_form_that_says_that_it_is_long_is_not_waited_for(guarded):
    port, _ = guarded
    with socket.create_connection((HOST, port)) as client:
        client.sendall(sent(port, "/login", "Content-Length: 5000"))
        assert answer_of(client) == 413


def test_a_client_that_reads_slowly_makes_way(monkeypatch):
    """A kernel takes megabytes for a client on the same machine, so uvicorn is told of it here."""
    monkeypatch.setattr(module.Connection, "waiting", {})

    async def hold():
        config, state = module.uvicorn.Config(None, ws="none", lifespan="off"), ServerState()
        made = []
        for number in range(module.WAITING + 2):
            connection = module.Connection(config, state, {})
            made.append((connection, mock.Mock(get_extra_info=lambda name, n=number: None)))
            connection.connection_made(made[-1][1])
            connection._end_wait()  # as of a request under way
            connection.pause_writing()
        assert [transport.abort.called for _, transport in made][:3] == [True, True, False]
        connection, _ = made[-1]
        connection.cycle = mock.Mock(response_complete=False, more_body=False)
        connection.resume_writing()
        assert connection not in module.Connection.waiting and connection._timer.cancelled()

    asyncio.run(hold())


@pytest.mark.parametrize("path", ["/s/nobody", "/s/..%2Fetc", "/static/../server.py", "/static/x"])
def test_what_is_not_listed_is_not_there(app, path):
    assert ask(app, path)[0] == 404


def test_the_stream_sends_the_view_and_follows_the_journal(app, journal):
    _, headers, body = ask(app, "/s/mine.sqlite/events", events=1)
    assert headers["content-type"].startswith("text/event-stream")
    model = json.loads(body.split("data: ")[1].split("\n")[0])
    assert model["state"]["word"] == "Gone" and model["nav"][0]["name"] == "mine.sqlite"
    with Journal(journal, lambda: 2 * 10**9) as opened:  # a replay's clock
        opened.record("r", "bar", "2", {"<b>X</b>": [1.0, 1.0, 1.0, 1.0, 1.0]}, 2 * 10**9)
        time.sleep(0.6)
        _, _, body = ask(app, "/s/mine.sqlite/events", events=1)
        model = json.loads(body.split("data: ")[1].split("\n")[0])
        assert model["state"]["word"] == "Running"
        assert f"process {os.getpid()}" in model["state"]["sentence"]
        assert model["tiles"][4]["note"].startswith("2 bars")


def test_a_stream_sends_a_part_again_only_if_it_changed(app, journal):
    with Journal(journal, lambda: 2 * 10**9) as opened:

        def record():
            opened.record("r", "decision", "2", {"target": [0.25]}, 2 * 10**9)

        _, _, body = ask(app, "/s/mine.sqlite/events", events=2, after=record)
        parts = [json.loads(text.split("\n")[0]) for text in body.split("data: ")[1:]]
    whole = {"name", "label", "nav", "state", "tiles", "charts", "tables", "halt", "path"}
    assert parts[0].keys() == whole
    assert "tables" in parts[1] and "charts" not in parts[1] and "path" not in parts[1]


def test_the_page_waits_for_a_journal_that_is_yet_to_come(tmp_path):
    path = tmp_path / "later" / "mine.sqlite"
    sources = FollowedSessions(journals=[str(path)])
    (source,) = sources.all()
    assert source.view()["state"]["word"] == "Waiting"
    path.parent.mkdir()
    with Journal(path, lambda: 0) as opened:
        opened.record("r", "run_started", "", {"symbols": ["X"], "capital": 1.0}, 0)
        source._at = -math.inf
        assert source.view()["state"]["word"] == "Running"
    sources.close()


def test_a_token_is_asked_for_and_kept_in_a_strict_cookie(journal):
    sources = FollowedSessions(root=str(journal.parent))
    app = make_app(sources, access("0.0.0.0", PORT, ("box.lan",), TOKEN))
    home = {"host": f"box.lan:{PORT}", "origin": f"http://box.lan:{PORT}"}
    assert ask(app, "/", host=home["host"])[1]["location"] == "/login"
    assert ask(app, "/s/mine.sqlite/events", host=home["host"])[0] == 403
    assert ask(app, "/s/mine.sqlite/halt", "POST", b"reason=x", **home)[0] == 403
    assert ask(app, "/", cookie=f"nca_dashboard={TOKEN}", host=home["host"])[0] == 303
    assert ask(app, "/login", "POST", b"token=wrong", **home)[0] == 403
    status, headers, _ = ask(app, "/login", "POST", f"token={TOKEN}".encode(), **home)
    cookie = headers["set-cookie"]
    assert status == 303 and TOKEN not in cookie
    assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
    kept = cookie.split(";")[0]
    assert ask(app, "/", cookie=kept, host=home["host"])[0] == 200
    assert ask(app, "/s/mine.sqlite/halt", "POST", b"reason=x", cookie=kept, **home)[0] == 303
    assert halted(journal).exists()
    sources.close()


def test_other_machines_need_a_name_and_a_token(tmp_path):
    with pytest.raises(ConfigError, match="opens the page to other machines"):
        access("0.0.0.0", PORT)
    with pytest.raises(ConfigError, match="needs token_file"):
        access("0.0.0.0", PORT, ("box.lan",))
    made = read_token(tmp_path / "token")
    assert len(made) > 30 and read_token(tmp_path / "token") == made
    os.chmod(tmp_path / "token", 0o644)
    with pytest.raises(ConfigError, match="others may read"):
        read_token(tmp_path / "token")


def test_links_and_paths_outside_the_root_are_refused(journal, tmp_path):
    outside = tmp_path / "other.sqlite"
    with Journal(outside, lambda: 0):
        pass
    link = journal.parent / "link.sqlite"
    link.symlink_to(outside)
    (journal.parent / "folder").symlink_to(tmp_path)
    sources = FollowedSessions(root=str(journal.parent))
    assert [source.name for source in sources.all()] == ["mine.sqlite"]
    sources.close()
    with pytest.raises(ConfigError, match="outside the root"):
        FollowedSessions(journals=[str(outside)], root=str(journal.parent))
    with pytest.raises(ConfigError, match="outside the root"):
        FollowedSessions(
            journals=[str(journal.parent / "folder/other.sqlite")], root=str(journal.parent)
        )
    with pytest.raises(ConfigError, match="is a link"):
        FollowedSessions(journals=[str(link)])


def test_a_halt_file_is_no_way_out_of_the_folder(journal, tmp_path):
    victim = tmp_path / "victim"
    halted(journal).symlink_to(victim)
    assert not request_halt(journal, "x") and not victim.exists()


def test_a_damaged_journal_shows_its_damage(app, journal):
    import sqlite3

    db = sqlite3.connect(journal)
    db.execute("UPDATE event SET body = replace(body, '1.0', '2.0') WHERE seq = 3")
    db.commit()
    db.close()
    deadline = time.monotonic() + 20
    while "Damaged" not in (body := ask(app, "/s/mine.sqlite")[2]):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert "damaged at seq 3" in body
    journal.write_bytes(b"nothing like a database" * 100)
    time.sleep(0.6)
    assert "Damaged" in ask(app, "/s/mine.sqlite")[2]


def test_the_process_that_writes_is_seen_and_a_session_starts_all_the_same(journal):
    assert writer_of(journal) == ""
    with Journal(journal, lambda: 0):
        assert writer_of(journal).startswith(f"process {os.getpid()} on ")
        journal.with_name(journal.name + ".lock").unlink()
        assert writer_of(journal) == "a process without a lock file"
    assert writer_of(journal) == writer_of(journal.with_name("none")) == ""
    stop = threading.Event()
    looks = [threading.Thread(target=look, args=(journal, stop)) for _ in range(4)]
    for each in looks:
        each.start()
    try:
        for _ in range(50):
            Journal(journal, lambda: 0).close()
    finally:
        stop.set()
        for each in looks:
            each.join()


def look(journal, stop):
    while not stop.wait(0.0005):  # a thread that spins keeps the others from running
        writer_of(journal)


def test_the_command_refuses_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["dashboard", "--root", "none"]) == 2
    assert main(["dashboard", "--root", ".", "--host", "0.0.0.0"]) == 2
    with listen(HOST, 0) as taken:
        port = str(taken.getsockname()[1])
        assert main(["dashboard", "--root", ".", "--port", port]) == 4
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3 and "--expose" in said[1] and "give another port" in said[2]


@pytest.fixture
def served(journal):
    """A dashboard in a process of its own; its port."""
    command = [sys.executable, "-m", "nca_trader", "dashboard", "--root", str(journal.parent)]
    with subprocess.Popen([*command, "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        yield int(re.search(r":(\d+)/", process.stdout.readline())[1])
        process.terminate()


@pytest.mark.heavy
def test_half_sent_headers_block_nothing_and_end(served, journal):
    """More of them than the server keeps, each of which a plain server waits for without end."""
    home = f"{HOST}:{served}"
    with contextlib.ExitStack() as stack:
        held = []
        for _ in range(300):
            client = stack.enter_context(socket.create_connection((HOST, served)))
            client.sendall(b"GET / HTTP/1.1\r\nHost: " + home.encode())
            held.append(client)
        began = time.monotonic()
        page = http.client.HTTPConnection(HOST, served, timeout=20)
        page.request("POST", "/s/mine.sqlite/halt", "reason=now", {"Origin": f"http://{home}"})
        assert page.getresponse().status == 303 and halted(journal).exists()
        page.close()
        page.request("GET", "/")
        assert page.getresponse().status == 200
        page.close()
        for client in held:
            client.settimeout(4 * module.HEADER_SECONDS)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
        assert time.monotonic() - began < 6 * module.HEADER_SECONDS
