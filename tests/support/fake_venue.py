"""A local HTTP server that speaks a venue's protocol and breaks as it is told.

`fail("POST", "/v2/orders", "504-after")` breaks the next such call. The name's end says whether the
call takes effect: -before is not heard, -after is.
"""

import contextlib
import http.server
import json
import socket
import struct
import threading
import time
import urllib.parse

KEY, CANARY = "PKCANARYKEY7", "CANARY-9f3e1c-secret"  # made up; no output may hold them
# Of an order: the fault, the reason that a client gives, and whether the order arrived.
UNCLEAR = [
    ("504-after", "http-504", True), ("504-before", "http-504", False),
    ("500-after", "http-500", True), ("409-before", "http-409", False),
    ("hang-after", "timeout", True), ("hang-before", "timeout", False),
    ("reset-after", "connection", True), ("reset-before", "connection", False),
    ("html-after", "unreadable-body", True), ("empty-after", "unreadable-body", True),
    ("deep-after", "unreadable-body", True), ("deep500-after", "unreadable-body", True),
    ("drip", "timeout", True), ("redirect-before", "redirected", False),
]  # fmt: skip
UNREAD = [
    "500",
    "hang-before",
    "reset-before",
    "html",
    "empty",
    "429",
    "deep",
    "deep500",
]  # of a question
HTML = b"<html><body>Bad gateway</body></html>"
DEEP = b"[" * 50_000 + b"]" * 50_000
HANG = 1.5  # seconds, longer than the clients of the tests wait


class Made:
    """A made-up clock of a feed, which the feed's waits move; `tell` hears each time."""

    def __init__(self, feed, time, tell=lambda time: None):
        self.time, self.tell, feed._clock, feed._get = time, tell, self, self.get
        tell(time)

    def now(self):
        return int(self.time * 1e9)

    def get(self, seconds):
        self.time += seconds
        self.tell(self.time)


class FakeVenue:
    """Serves `answer(method, path, query, body, headers) -> (status, object)` on loopback."""

    def __init__(self):
        self.calls, self.faults, self.lock = [], [], threading.RLock()
        self.over = threading.Event()
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

            def log_message(self, *_):
                pass

            def handle_one_request(self):
                with contextlib.suppress(ConnectionError, BrokenPipeError):
                    super().handle_one_request()
                    return
                self.close_connection = True

            def serve(self):
                fake.handle(self)

            do_GET = do_POST = do_DELETE = do_PUT = serve

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.over.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def fail(self, method, path, *faults):
        """Break the next calls of `method` whose path begins with `path`, in this order."""
        self.faults += [(method, path, fault) for fault in faults]

    def count(self, method, path):
        return sum(call[0] == method and call[1].startswith(path) for call in self.calls)

    def _fault(self, method, path):
        with self.lock:
            for item in self.faults:
                if item[0] == method and path.startswith(item[1]):
                    self.faults.remove(item)
                    return item[2]
        return ""

    def handle(self, request):
        parts = urllib.parse.urlsplit(request.path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        with self.lock:
            self.calls.append((request.command, parts.path, query, body, dict(request.headers)))
        fault = self._fault(request.command, parts.path)
        status, found, headers = 200, None, {}
        if not fault.endswith("-before"):
            with self.lock:
                status, found = self.answer(request.command, parts.path, query, body)
        kind = fault.rpartition("-")[0] if fault.endswith(("-before", "-after")) else fault
        raw = b"" if found is None else json.dumps(found).encode()
        if kind == "hang":
            self.over.wait(HANG)
            request.close_connection = True
            return
        if kind == "reset":  # no time to linger: the peer gets RST
            linger = struct.pack("ii", 1, 0)
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            request.close_connection = True
            request.connection.close()
            return
        if kind == "html":
            status, raw = 200, HTML
        elif kind == "empty":
            raw = b""
        elif kind.startswith("deep"):
            status, raw = int(kind.removeprefix("deep") or 200), DEEP
        elif kind == "html404":
            status, raw = 404, HTML
        elif kind == "429":
            status, raw, headers = (
                429,
                b'{"message": "too many requests"}',
                {"Retry-After": self.retry_after},
            )
        elif kind == "redirect":
            status, raw, headers = 307, b"", {"Location": self.elsewhere + request.path}
        elif kind.isdigit():
            status, raw = int(kind), HTML
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(raw)))
        request.end_headers()
        if kind == "drip":
            for i in range(len(raw)):
                if self.over.is_set():
                    break
                request.wfile.write(raw[i : i + 1])
                request.wfile.flush()
                time.sleep(0.05)
            return
        request.wfile.write(raw)

    elsewhere, retry_after = "http://127.0.0.1:9", "7"

    def answer(self, method, path, query, body):
        raise NotImplementedError
