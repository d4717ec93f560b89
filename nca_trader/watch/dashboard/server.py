"""Serves the pages of a dashboard: HTML, a stream of view models, and the HALT button.

Every request passes `Guard`, which checks its Host, its Origin and, where there is a token, its
cookie. Only the HALT form writes anything, and only a halt file.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import hmac
import json
import os
import pathlib
import secrets
import socket
import urllib.parse
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar, NamedTuple

import jinja2
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from nca_trader.config.records import finite
from nca_trader.errors import ConfigError, StateError, argument, system_errors
from nca_trader.machine import read_private, write_once
from nca_trader.watch.dashboard.sources import FollowedSession, FollowedSessions

FOLDER = pathlib.Path(__file__).parent
# Each file that is served, and its type: no name of a request reaches the disk.
STATIC = {
    "dashboard.css": "text/css",
    "dashboard.js": "text/javascript",
    "uplot/uPlot.iife.min.js": "text/javascript",
    "uplot/uPlot.min.css": "text/css",
    "uplot/LICENSE": "text/plain",
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not "no-referrer": a browser then sends the Origin "null" with our own forms.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}
COOKIE = "nca_dashboard"
LONGEST_BODY = 4096  # bytes of a form
BODY_SECONDS = 5.0
HEADER_SECONDS = 5.0  # that a connection may take to send a request
SLOW_SECONDS = 30.0  # that a client may take to read what was sent
STREAMS = 48  # at once
RUNNING = 192  # requests at once, and two more that halt
HALTING = 2
GUESSES = 16  # wrong tokens at once
WAITING = 64  # connections without a whole request, or whose client does not read
LEAST_TOKEN = 16  # characters
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Access(NamedTuple):
    """Who may ask.

    hosts: values of the Host header. origins: of the Origin header. token: that the login form
    asks for, "" for none.
    """

    hosts: frozenset[str]
    origins: frozenset[str]
    token: str = ""


def access(host: str, port: int, names: tuple[str, ...] = (), token: str = "") -> Access:
    """Return who may ask a server at `host` and `port`.

    Args:
      host: that it is bound to.
      port: that it is bound to.
      names: by which other machines reach it; none keeps it to this machine.
      token: of the login form.

    Raises:
      ConfigError: the host is not this machine's loopback, and there are no names or no token.
    """
    if host not in LOOPBACK and not names:
        raise ConfigError(
            f"{argument('host', host)} opens the page to other machines; say so with "
            f"{argument('expose')} and the name by which they reach this one, or leave it out."
        )
    if names and not token:
        raise ConfigError(
            f"{argument('expose')} needs {argument('token_file')}: anyone who reaches the page can "
            "see the strategy and halt it."
        )
    known = ["127.0.0.1", "localhost", "[::1]", *names]
    # Browsers send the port where it is not 80 or 443.
    hosts = {f"{name.lower()}:{port}" for name in known}
    # Without a port where a proxy with a certificate stands before it.
    hosts |= {name.lower() for name in names}
    origins = {f"{scheme}://{name}" for name in hosts for scheme in ("http", "https")}
    return Access(frozenset(hosts), frozenset(origins), token)


def read_token(path: str | os.PathLike[str]) -> str:
    """Return the token in a file of mode 0600; make the file where there is none.

    Raises:
      ConfigError: others may read the file, or the token is short.
      StateError: it cannot be read or made.
    """
    with system_errors(StateError, f"{path}: the token cannot be read"):
        write_once(pathlib.Path(path), secrets.token_urlsafe(32) + "\n")
        token = read_private(path, "this token").strip()
    if len(token) < LEAST_TOKEN:
        raise ConfigError(f"{path}: the token has fewer than {LEAST_TOKEN} characters; delete it.")
    return token


class Guard:
    """Lets a request pass to `app` if it may ask, and adds the security headers to any answer."""

    def __init__(self, app: Any, allowed: Access, cookie: str):
        self._app, self._allowed, self._cookie = app, allowed, cookie
        self.running = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        # The server's own start and end, which no client can send.
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = [(name.lower(), value) for name, value in scope["headers"]]
        refused = self._refusal(scope, headers)
        if scope["type"] != "http":  # no page has a WebSocket
            return await send({"type": "websocket.close", "code": 1008})

        async def secured(message: Any) -> None:
            if message["type"] == "http.response.start":
                # A page may set its own value, e.g. static files their cache-control.
                added = {name.encode(): value.encode() for name, value in HEADERS.items()}
                message["headers"] = [*(added | dict(message["headers"])).items()]
            await send(message)

        posts = scope["method"] == "POST"
        # Before it is counted: what a client does not send takes no place from others.
        if refused is None and posts:
            refused = await read_form(scope, receive)
        halts = posts and scope["path"].endswith("/halt")
        if refused is None and self.running >= RUNNING + HALTING * halts:
            refused = PlainTextResponse("Too many requests at once.", 503)
        app = self._app if refused is None else refused
        self.running += 1
        try:
            await app(scope, receive, secured)
        finally:
            self.running -= 1

    def _refusal(self, scope: Any, headers: list[tuple[bytes, bytes]]) -> Response | None:
        """Return the answer to a request that may not ask; None where it may."""
        hosts = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
        origins = [value.decode("latin-1").lower() for name, value in headers if name == b"origin"]
        # A page elsewhere whose name was pointed at this machine has another Host.
        if len(hosts) != 1 or hosts[0] not in self._allowed.hosts:
            return PlainTextResponse("This host name is not allowed.", 421)
        method = scope.get("method", "GET")
        if any(origin not in self._allowed.origins for origin in origins):
            return PlainTextResponse("This origin is not allowed.", 403)
        # A form of another site sends its own origin, and a script of no site sends none.
        if method not in ("GET", "HEAD") and len(origins) != 1:
            return PlainTextResponse("A form of this page has an origin.", 403)
        path = scope.get("path", "")
        # The login page and its style must be reachable without a cookie.
        if not self._allowed.token or path == "/login" or path == "/static/dashboard.css":
            return None
        found = Request({**scope, "type": "http"}).cookies.get(COOKIE, "")
        # The time of the comparison says nothing of how much of a guess was right.
        if hmac.compare_digest(found.encode(), self._cookie.encode()):
            return None
        # A stream cannot show a form, and a POST must not be repeated after a login.
        if method == "GET" and not path.endswith("/events"):
            return RedirectResponse("/login", 303)
        return PlainTextResponse("Log in first.", 403)


def make_app(sources: FollowedSessions, allowed: Access, every: float = 1.0) -> Guard:
    """Return the ASGI application of a dashboard.

    Args:
      sources: what it shows.
      allowed: who may ask.
      every: seconds between two looks of a stream.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER / "templates"),
        autoescape=True,  # names of runs, symbols and reasons are anybody's text
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Read once: a request chooses among these names and opens no file.
    files = {name: (FOLDER / "static" / name).read_bytes() for name in STATIC}
    # A new cookie at each start, so that a restart logs everybody out.
    cookie, streams, guesses = secrets.token_urlsafe(32), 0, asyncio.Semaphore(GUESSES)

    def page(template: str, status: int = 200, **shown: Any) -> HTMLResponse:
        return HTMLResponse(environment.get_template(template).render(shown), status)

    def model_maker(request: Request) -> Callable[[], dict[str, Any]]:
        """Return what makes the view model of a page: of one session, or of all of them."""
        if "name" not in request.path_params:
            return functools.partial(overview_of, sources)
        return functools.partial(model_of, source_of(request), sources)

    def source_of(request: Request) -> FollowedSession:
        found = sources.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404, "There is no such session.")
        return found

    async def shown(request: Request) -> Response:
        # Reading journals blocks, and this loop serves every page.
        model = await run_in_threadpool(model_maker(request))
        return page("overview.html" if "cards" in model else "session.html", model=model)

    async def stream(request: Request) -> Response:
        nonlocal streams
        # Each stream reads journals every second; a client that opens many must not stop others.
        if streams >= STREAMS:
            return PlainTextResponse("Too many pages are open.", 503)
        make = model_maker(request)

        async def events() -> AsyncIterator[str]:
            nonlocal streams
            streams += 1
            sent: dict[str, str] = {}
            try:
                while not await request.is_disconnected():
                    made = finite(await run_in_threadpool(make))
                    texts = {name: json.dumps(part, allow_nan=False) for name, part in made.items()}
                    # Only what changed: a chart of years does not change between two bars.
                    new = {name: text for name, text in texts.items() if sent.get(name) != text}
                    body = ", ".join(f'"{name}": {text}' for name, text in new.items())
                    # A comment keeps the connection and finds out that it is gone.
                    yield f"data: {{{body}}}\n\n" if new else ": the same\n\n"
                    sent = texts
                    await asyncio.sleep(every)
            finally:
                streams -= 1

        return StreamingResponse(events(), media_type="text/event-stream")

    async def halt(request: Request) -> Response:
        source = source_of(request)
        # Not in the pool of threads that read journals, which may all be at work.
        await asyncio.to_thread(source.halt, request.scope["form"].get("reason", ""))
        return RedirectResponse(f"/s/{source.name}", 303)

    async def login(request: Request) -> Response:
        if not allowed.token:
            return RedirectResponse("/", 303)
        if request.method == "GET":
            return page("login.html", wrong=False)
        given = request.scope["form"].get("token", "")
        if not hmac.compare_digest(given.encode(), allowed.token.encode()):
            # A guess costs half a second, which ends a search through tokens. Few wait for it at
            # once, so that they take no place from others.
            if guesses.locked():
                return PlainTextResponse("Too many wrong tokens at once.", 429)
            async with guesses:
                await asyncio.sleep(0.5)
            return page("login.html", 403, wrong=True)
        answer = RedirectResponse("/", 303)
        # `strict`: a link on another site does not bring the cookie along.
        answer.set_cookie(COOKIE, cookie, httponly=True, samesite="strict", path="/")
        return answer

    async def static(request: Request) -> Response:
        name = request.path_params["file"]
        if name not in files:
            raise HTTPException(404, "There is no such file.")
        return Response(files[name], media_type=STATIC[name], headers={"cache-control": "no-cache"})

    routes = [
        Route("/", shown),
        Route("/events", stream),
        Route("/login", login, methods=["GET", "POST"]),
        Route("/s/{name}", shown),
        Route("/s/{name}/events", stream),
        Route("/s/{name}/halt", halt, methods=["POST"]),
        Route("/static/{file:path}", static),
    ]
    app = Starlette(routes=routes, exception_handlers={StateError: tell_error})
    return Guard(app, allowed, cookie)


async def tell_error(request: Request, error: Exception) -> Response:
    """Answer with the line of an error."""
    return PlainTextResponse(str(error), 500)


def model_of(source: FollowedSession, sources: FollowedSessions) -> dict[str, Any]:
    """Return the view model of the page of one session: its own, and the list of all."""
    about = {"name": source.name, "label": source.label}
    return {**about, **source.view(), "nav": overview_of(sources)["nav"]}


def overview_of(sources: FollowedSessions) -> dict[str, Any]:
    """Return the view model of the page of all sessions: a card of each, and the list of all."""
    cards, nav = [], []
    for source in sources.all():
        about, view = {"name": source.name, "label": source.label}, source.view()
        state = view["state"]
        cards.append({**about, "state": state, "tiles": view["tiles"][:4]})
        nav.append({**about, "word": state["word"], "tone": state["tone"]})
    return {"cards": cards, "nav": nav}


async def read_form(scope: Any, receive: Any) -> Response | None:
    """Read the fields of a short form into `scope["form"]`; return the refusal of another body."""
    request, body = Request(scope, receive), b""
    long = PlainTextResponse("The form is too long.", 413)
    try:
        if int(request.headers.get("content-length", 0)) > LONGEST_BODY:
            return long
        async with asyncio.timeout(BODY_SECONDS):
            # Counted as it comes, too: a client may send another length in its header, or none.
            async for part in request.stream():
                body += part
                if len(body) > LONGEST_BODY:
                    return long
        fields = urllib.parse.parse_qsl(body.decode("utf-8", "replace"), max_num_fields=8)
    except (TimeoutError, ClientDisconnect):
        return PlainTextResponse("The form did not come to its end.", 408)
    except ValueError:
        return PlainTextResponse("The form has too many fields.", 400)
    scope["form"] = dict(fields)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at `host` and `port`; 0 is any port that is free.

    Raises:
      ConfigError: the host is not an address of this machine. StateError: the port is taken.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=64)
    except socket.gaierror as error:
        raise ConfigError(
            f"{argument('host', host)}: is not an address of this machine ({error.strerror})."
        ) from None
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise StateError(
            f"{argument('port', port)}: cannot be listened on ({why}); give another port."
        ) from None


class Connection(H11Protocol):
    """A client's connection, which is closed where it holds on to a place and does not use it.

    uvicorn itself waits for the headers of a request, and for a reader, as long as they take.
    """

    waiting: ClassVar[dict[Connection, None]] = {}  # for their client, the oldest first

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._timer = None
        self._wait(HEADER_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Take bytes; with the end of its body the request is under way."""
        super().data_received(data)
        if self._under_way():
            self._end_wait()

    def on_response_complete(self) -> None:
        """Wait for another request, or for the client to read the answer and go."""
        super().on_response_complete()
        if not self._under_way():  # no other request has come in the meantime
            self._wait(SLOW_SECONDS if self.flow.write_paused else HEADER_SECONDS)

    def pause_writing(self) -> None:
        """Give a client that does not read some time."""
        super().pause_writing()
        self._wait(SLOW_SECONDS)

    def resume_writing(self) -> None:
        """Go on: the client has read."""
        super().resume_writing()
        if self._under_way():
            self._end_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._end_wait()
        super().connection_lost(exc)

    def _under_way(self) -> bool:
        return bool(self.cycle and not self.cycle.response_complete and not self.cycle.more_body)

    def _wait(self, seconds: float) -> None:
        self._end_wait()
        # `abort` and not `close`, which would wait until the client has read.
        self._timer = self.loop.call_later(seconds, self.transport.abort)
        self.waiting[self] = None
        if len(self.waiting) > WAITING:
            # Of the host that has most: what it does takes no place from others.
            most = collections.Counter(each.client and each.client[0] for each in self.waiting)
            oldest = max(self.waiting, key=lambda each: most[each.client and each.client[0]])
            oldest._end_wait()
            oldest.transport.abort()

    def _end_wait(self) -> None:
        self.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()


def serve(app: Guard, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,  # uvicorn's own closes every log of the process, pytest's and the user's
        log_level="critical",
        server_header=False,
        timeout_graceful_shutdown=1,
        proxy_headers=False,
    )
    uvicorn.Server(config).run(sockets=[listener])
