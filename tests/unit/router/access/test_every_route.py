"""Rights follow the route: every route, every caller, every other way to write its path.

The answer is that of the plain path, or a refusal; what a caller may not do is never done.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

import pytest
from fastapi import FastAPI
from starlette.types import Message, Scope

from common.ids import Incarnation
from common.nodes import Role
from router.access.api_key_book import ApiKeyBook
from router.access.api_keys import add_api_key
from router.cluster.drain import DrainingNode
from router.cluster.role import MovedNode
from router.http.routes import Access, RouteTable, open_to
from tests.support.clocks.manual_clock import ManualClock
from tests.support.examples import everyday
from tests.support.http.http_edge import Edge, declared_routes, make_edge
from tests.support.http.http_server import served
from tests.support.http.other_paths import WAYS

CALLERS = ("nobody", "wrong", "user", "admin", "metrics")
REFUSED = {400, 401, 403, 404, 405}
ENDS_S = 60.0
BODIES = {
    "/v1/chat/completions": b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}',
    "/v1/completions": b'{"prompt": "Hi", "max_tokens": 1}',
    "/v1/responses": b'{"input": "Hi", "max_output_tokens": 16}',
    "/v1/messages": b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}',
    "/v1/messages/count_tokens": b'{"messages": [{"role": "user", "content": "Hi"}]}',
    "/tokenize": b'{"prompt": "Hi"}',
    "/detokenize": b'{"tokens": [2]}',
    "/v1/cluster/drain": b'{"node_id": "d1"}',
    "/v1/cluster/role": b'{"node_id": "d1", "role": "mixed"}',
}
NAMES = {"{name:path}": "tiny", "{name}": "swagger-ui.css"}


METHODS = ("HEAD", "OPTIONS", "GET", "POST", "PUT", "DELETE", "PATCH", "TRACE")


@dataclass
class World:
    """An edge with keys, where a user's limits are used up, and what was done in it."""

    edge: Edge
    keys: dict[str, str]
    drained: list[str] = field(default_factory=list)

    def headers(self, caller: str) -> list[tuple[bytes, bytes]]:
        given = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        if caller != "nobody":
            given.append((b"authorization", f"Bearer {self.keys[caller]}".encode()))
        return given

    @property
    def done(self) -> tuple[int, int]:
        return len(self.edge.generator.calls), len(self.drained)


@pytest.fixture
def world(tmp_path: Path) -> World:
    file, drained = tmp_path / "api_keys.json", list[str]()
    keys = {
        "user": add_api_key(file, "user", requests_per_minute=1),
        "admin": add_api_key(file, "admin", is_admin=True),
        "metrics": "prometheus",
        "wrong": "pds_wrong",
    }

    async def drain(node_id: str) -> DrainingNode:
        drained.append(node_id)
        return DrainingNode(Incarnation(node_id, 1), 1.0)

    book = ApiKeyBook(ManualClock(), path=file, metrics_token="prometheus")

    async def give_role(node_id: str, role: Role) -> MovedNode:
        drained.append(node_id)
        return MovedNode(Incarnation(node_id, 1), role, role)

    edge = make_edge(keys=book, drain_node=drain, give_role=give_role)
    made = World(edge, keys, drained)
    used = book.find(keys["user"].encode())
    assert used is not None
    assert book.take(used) is None
    used.limits.release()
    return made


def routes(edge: Edge) -> list[tuple[str, str]]:
    """Every route of the application: its method and a path that it has."""
    found = []
    for route, _ in declared_routes(edge):
        path = route.path
        for name, value in NAMES.items():
            path = path.replace(name, value)
        methods = set(route.methods or ())
        if "GET" in methods:
            methods.add("HEAD")  # rights are those of the GET
        found += [(method, path) for method in sorted(methods)]
    return found


def body_of(method: str, path: str) -> bytes:
    return BODIES[path] if method == "POST" and path in BODIES else b""


Ask = Callable[[World, str, str, str, bytes], Awaitable[int]]


async def ask_app(world: World, caller: str, method: str, target: str, body: bytes) -> int:
    """The status of an answer of the application; the client leaves once it began."""
    if "://" in target:
        target = "/" + target.partition("://")[2].partition("/")[2]
    raw = target.partition("#")[0].partition("?")[0]
    scope: Scope = {
        "type": "http",
        "method": method,
        "scheme": "http",
        "http_version": "1.1",
        "path": unquote(raw),
        "raw_path": raw.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": world.headers(caller),
        "client": ("127.0.0.1", 1),
        "server": ("h", 1),
    }
    status: list[int] = []
    has_begun, parts = asyncio.Event(), [body]

    async def receive() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        await has_begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            status.append(message["status"])
        has_begun.set()

    async with asyncio.timeout(ENDS_S):
        await world.edge.app(scope, receive, send)
    return status[0]


@asynccontextmanager
async def asking_a_socket(world: World) -> AsyncIterator[Ask]:
    """Ask a server on a real socket, with the bytes of the target as they are."""
    async with served(world.edge.app) as port:

        async def ask(world: World, caller: str, method: str, target: str, body: bytes) -> int:
            head = b"%b %b HTTP/1.1\r\ncontent-length: %d\r\n" % (
                *(method.encode(), target.encode("latin-1")),
                len(body),
            )
            head += b"".join(b"%b: %b\r\n" % header for header in world.headers(caller))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                async with asyncio.timeout(ENDS_S):
                    writer.write(head + b"\r\n" + body)
                    line = await reader.readline()
            finally:
                writer.transport.abort()
            return int(line.split()[1])

        yield ask


async def check_all(world: World, caller: str, ask: Ask, one_in: int = 1) -> None:
    """Every route by this caller, as it is and in every other way, or in one way of so many."""
    num = 0
    for number, (method, path) in enumerate(routes(world.edge)):
        body, before = body_of(method, path), world.done
        plain = await ask(world, caller, method, path, body)
        is_done = plain < 300
        assert is_done or world.done == before, (method, path)
        for name, way in list(WAYS.items())[number % one_in :: one_in]:
            target, before = way(path), world.done
            status = await ask(world, caller, method, target, body)
            where = f"{caller}: {method} {target} ({name}): {status}, and {plain} as it is"
            assert status == plain or status in REFUSED, where
            assert is_done or world.done == before, where
            num += 1
        for other in METHODS:
            before = world.done
            status = await ask(world, caller, other, path, body)
            where = f"{caller}: {other} {path}: {status}"
            if (other, path) not in routes(world.edge):
                assert status in REFUSED, where
                assert world.done == before, where
    assert num * one_in > 1000


@pytest.mark.parametrize("caller", CALLERS)
async def test_every_route_in_the_application(world: World, caller: str) -> None:
    await check_all(world, caller, ask_app)
    assert bool(world.drained) == (caller == "admin")
    assert bool(world.edge.generator.calls) == (caller == "admin")


@pytest.mark.parametrize("caller", CALLERS)
async def test_every_route_through_a_socket(world: World, caller: str) -> None:
    async with asking_a_socket(world) as ask:
        await check_all(world, caller, ask, one_in=everyday(10, of=1))
    assert bool(world.drained) == (caller == "admin")
    assert bool(world.edge.generator.calls) == (caller == "admin")


@pytest.mark.covers("V05")
async def test_what_each_caller_may_do(world: World) -> None:
    """The plain answers, so that the walks above compare with the right ones."""
    wanted = {
        "nobody": (401, 200, 401, 401, 401, 401),
        "wrong": (401, 200, 401, 401, 401, 401),
        "user": (200, 200, 200, 200, 429, 403),
        "admin": (200, 200, 200, 200, 200, 200),
        "metrics": (401, 200, 200, 401, 401, 401),
    }
    asked = ("/", "/health", "/metrics", "/v1/models", "/v1/completions", "/v1/cluster/drain")
    for caller, statuses in wanted.items():
        for path, status in zip(asked, statuses, strict=True):
            method = "POST" if path in BODIES else "GET"
            found = await ask_app(world, caller, method, path, body_of(method, path))
            assert found == status, (caller, path)


async def test_bytes_that_no_client_sends(world: World) -> None:
    """What the parser refuses: raw control characters, spaces and other bytes in a path."""
    async with asking_a_socket(world) as ask:
        for odd in ("\n", "\r", "\t", "\0", "\x0b", "\x7f", "\x80", "\xe9", " x"):
            target = f"/v1/cluster/drain{odd}"
            assert await ask(world, "user", "POST", target, BODIES["/v1/cluster/drain"]) in REFUSED
        for target in ("*", "http://localhost", "localhost:80", "drain", "?x", "//", "x"):
            for method in ("GET", "POST", "OPTIONS", "CONNECT"):
                assert await ask(world, "admin", method, target, b"") in REFUSED, target
    assert world.drained == []


async def test_a_refusal_names_the_path_and_what_is_wrong(world: World) -> None:
    async with world.edge.client(headers=_bearer(world, "user")) as client:
        answer = await client.post("/v1/cluster/drain%0A", json={"node_id": "d1"})
        messages = await client.post("/v1/messages%0A", json={})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "bad_path")
    assert "'/v1/cluster/drain\\n' has a character that cannot be shown" in error["message"]
    assert "x-request-id" in answer.headers
    assert messages.json()["type"] == "error"


async def test_a_model_is_found_by_a_name_with_an_escaped_slash(tmp_path: Path) -> None:
    """As OpenAI's client writes it."""
    async with make_edge().client() as client:
        answer = await client.get("/v1/models/org%2Ftiny")
        assert answer.status_code == 404
        assert "'org/tiny' is not served" in answer.json()["error"]["message"]
        assert (await client.get("/v1%2Fcluster")).status_code == 400


async def test_an_error_names_the_path_whatever_the_host_header_is(world: World) -> None:
    """The framework's URL of a request is the Host header with the path behind it."""
    async with world.edge.client(headers=_bearer(world, "admin")) as client:
        for host in ("[", "[x", "a/b?c", "a#", "a\\b", "", "a@b"):
            answer = await client.get("/nothing", headers={"host": host})
            assert answer.status_code == 404, host
            assert answer.json()["error"]["message"] == "GET /nothing: Not Found"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", ": wanted /v1/chat/completions"),
        ("/v1/v1/chat/completions", ": wanted /v1/chat/completions"),
        ("/v1/chat/completions/", ": wanted /v1/chat/completions"),
        ("/v1/tokenize", ": wanted /tokenize"),
        ("/v1/chat", ""),
        ("/v1/", ""),
    ],
)
async def test_a_path_of_another_base_url_is_told_the_right_one(
    world: World, path: str, meant: str
) -> None:
    async with world.edge.client(headers=_bearer(world, "admin")) as client:
        answer = await client.post(path, json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"POST {path}: Not Found{meant}"


@pytest.mark.covers("W14")
async def test_a_list_with_a_slash_too_many_is_not_taken_for_a_model_without_a_name(
    world: World,
) -> None:
    async with world.edge.client(headers=_bearer(world, "admin")) as client:
        answer = await client.get("/v1/models/")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "not_found")
    assert error["message"] == "GET /v1/models/: Not Found: wanted /v1/models"


async def test_nothing_is_redirected(world: World) -> None:
    for path in ("/health/", "/v1/completions/", "/docs/"):
        assert await ask_app(world, "admin", "GET", path, b"") in REFUSED


def _bearer(world: World, caller: str) -> dict[str, str]:
    return {"authorization": f"Bearer {world.keys[caller]}"}


def test_a_route_without_declared_rights_is_refused() -> None:
    app = FastAPI(openapi_url=None)

    @app.get("/declared")
    @open_to(Access.KEY)
    async def declared() -> None: ...

    RouteTable(app, {})

    @app.get("/undeclared")
    async def undeclared() -> None: ...

    with pytest.raises(TypeError, match=r"undeclared.*does not declare who may call it"):
        RouteTable(app, {})
