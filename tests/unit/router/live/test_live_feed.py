"""`GET /` and `GET /v1/live`: one encoding for all viewers, none for nobody, no viewer for ever."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import socket
import tomllib
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from common.errors import NodeLost
from router.live import feed as live_feed
from router.live import page as page_module
from router.live.feed import MAX_BEHIND, MAX_VIEWERS, MAX_VIEWERS_PER_KEY, LiveFeed
from router.live.history import COLUMNS
from router.live.page import live_page
from tests.support.clocks.manual_clock import ManualClock
from tests.support.http.http_edge import FakeCluster, events, make_edge
from tests.support.http.http_server import eventually, served
from tests.support.http.scripted_generator import fails

AT_S = COLUMNS.index("at_s")
FOLDER = Path(page_module.__file__).parent


class Viewer:
    """A client of the feed by ASGI; `reads` lets what is sent to it go out."""

    def __init__(self, feed: LiveFeed, **state: Any) -> None:
        self.body = b""
        self.status = 0
        self.reads = asyncio.Event()
        self.reads.set()
        self.gone = asyncio.Event()
        self.num_cuts = 0
        cut = {"pdserve.connection": {"abort": self._cut}}
        scope = {"type": "http", "extensions": cut, "state": state}
        self.task = asyncio.create_task(feed.serve(scope, self._receive, self._send))

    def events(self) -> list[Any]:
        return events(self.body)

    def _cut(self) -> None:
        self.num_cuts += 1

    async def _receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        self.body += message.get("body", b"")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def feed(clock: ManualClock) -> LiveFeed:
    return LiveFeed(FakeCluster(), clock)


@asynccontextmanager
async def watching(feed: LiveFeed, count: int = 1, **state: Any) -> AsyncIterator[list[Viewer]]:
    num_others = feed.num_viewers
    viewers = [Viewer(feed, **state) for _ in range(count)]
    await eventually(lambda: all(v.body for v in viewers))
    try:
        yield viewers
    finally:
        for viewer in viewers:
            viewer.reads.set()
            viewer.gone.set()
        await asyncio.gather(*(viewer.task for viewer in viewers))
        assert feed.num_viewers == num_others


async def test_nothing_is_encoded_while_nobody_watches(feed: LiveFeed) -> None:
    for _ in range(20):
        feed.sample()
    assert feed.num_encoded == 0


async def test_a_viewer_gets_the_history_and_then_each_second(
    feed: LiveFeed, clock: ManualClock
) -> None:
    for _ in range(3):
        feed.sample()
        clock.advance(1.0)
    async with watching(feed) as (viewer,):
        feed.sample()
        await eventually(lambda: len(viewer.events()) == 3)
        history, latest, new = viewer.events()
        assert (history["kind"], latest["kind"], new["kind"]) == ("history", *["snapshot"] * 2)
        place = history["columns"].index("at_s")
        assert [row[place] for row in history["samples"]] == [0.0, 1.0, 2.0]
        assert latest["sample"] == history["samples"][-1]
        assert new["sample"][place] == 3.0


async def test_a_late_viewer_gets_what_happened_meanwhile(
    feed: LiveFeed, clock: ManualClock
) -> None:
    async with watching(feed):
        clock.advance(1.0)
        feed.sample()
        async with watching(feed) as (late,):
            history, latest = late.events()
            assert len(history["samples"]) == 2
            assert latest["sample"] == history["samples"][-1]
            assert latest["sample"][AT_S] == 1.0


async def test_a_snapshot_is_encoded_once_for_all(feed: LiveFeed) -> None:
    async with watching(feed, 5) as viewers:
        greeting = feed.num_encoded
        assert greeting == 2
        feed.sample()
        feed.sample()
        assert feed.num_encoded == greeting + 2
        await eventually(lambda: all(len(v.events()) == 4 for v in viewers))
    feed.sample()
    assert feed.num_encoded == greeting + 2


async def test_a_viewer_that_leaves_is_forgotten(feed: LiveFeed) -> None:
    async with watching(feed, 2) as (one, _):
        one.gone.set()
        await one.task
        assert feed.num_viewers == 1
        assert one.num_cuts == 0


async def test_a_viewer_that_does_not_read_is_cut_off(feed: LiveFeed, clock: ManualClock) -> None:
    async with watching(feed, 2) as (slow, quick):
        slow.reads.clear()
        for second in range(1, MAX_BEHIND + 3):
            clock.advance(1.0)
            feed.sample()
            await shows_sample_of(second, quick)
        await slow.task
        assert slow.num_cuts == 1
        assert feed.num_viewers == 1
        clock.advance(1.0)
        feed.sample()
        await shows_sample_of(MAX_BEHIND + 3, quick)
        assert quick.num_cuts == 0


async def shows_sample_of(second: int, viewer: Viewer) -> None:
    await eventually(lambda: viewer.events()[-1]["sample"][AT_S] == second)


async def test_only_so_many_may_watch(feed: LiveFeed) -> None:
    async with watching(feed, MAX_VIEWERS):
        more = Viewer(feed)
        await more.task
        assert more.status == 503
        assert json.loads(more.body)["error"]["code"] == "too_many_viewers"


async def refused(feed: LiveFeed, **state: Any) -> str:
    """Why one more viewer is refused; '' when it is not."""
    viewer = Viewer(feed, **state)
    await eventually(lambda: viewer.body)
    viewer.gone.set()
    await viewer.task
    return "" if viewer.status == 200 else str(json.loads(viewer.body)["error"]["message"])


async def test_a_key_has_a_part_of_the_viewers(feed: LiveFeed) -> None:
    user = {"api_key_name": "user", "is_admin": False}
    async with watching(feed, MAX_VIEWERS_PER_KEY, **user):
        wanted = f"{MAX_VIEWERS_PER_KEY} live pages of the API key 'user' are open"
        assert wanted in await refused(feed, **user)
        assert not await refused(feed, api_key_name="other", is_admin=False)
        assert not await refused(feed, api_key_name="admin", is_admin=True)
    assert not await refused(feed, **user)


async def test_one_place_is_kept_for_administrators(feed: LiveFeed) -> None:
    async with AsyncExitStack() as stack:
        for number in range(4):
            count = MAX_VIEWERS_PER_KEY - (number == 3)
            user = watching(feed, count, api_key_name=f"user-{number}", is_admin=False)
            await stack.enter_async_context(user)
        assert feed.num_viewers == MAX_VIEWERS - 1
        assert "31 live pages" in await refused(feed, api_key_name="user-4", is_admin=False)
        admin = {"api_key_name": "admin", "is_admin": True}
        await stack.enter_async_context(watching(feed, 1, **admin))
        assert "32 live pages" in await refused(feed, **admin)


async def test_a_stream_ends_so_that_the_key_is_asked_for_again(
    feed: LiveFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_feed, "SNAPSHOTS_PER_STREAM", 3)
    async with watching(feed) as (viewer,):
        feed.sample()
        feed.sample()
        await viewer.task
        assert viewer.num_cuts == 0
        assert len(viewer.events()) == 4


async def test_the_end_of_the_router_ends_every_stream(feed: LiveFeed) -> None:
    stop = asyncio.Event()
    running = asyncio.create_task(feed.run(stop))
    async with watching(feed, 3) as viewers:
        stop.set()
        await running
        await asyncio.gather(*(viewer.task for viewer in viewers))
        assert all(not viewer.num_cuts for viewer in viewers)
    late = Viewer(feed)
    await late.task
    assert (late.status, feed.num_viewers) == (503, 0)


async def test_a_bug_in_a_sample_stops_the_page_and_nothing_else(
    feed: LiveFeed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with watching(feed) as (viewer,):

        def fail() -> None:
            raise KeyError("broken")

        monkeypatch.setattr(feed, "sample", fail)
        await feed.run(asyncio.Event())
        await viewer.task
    assert "the live page is not updated any more" in caplog.text


async def test_a_connection_that_is_not_read_is_closed_for_good(
    caplog: pytest.LogCaptureFixture,
) -> None:
    edge = make_edge()
    edge.cluster.wrong = ("x" * 400_000,)  # fills what the sockets buffer
    async with served(edge.app) as port:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /v1/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await eventually(lambda: edge.live.num_viewers == 1)
            with once_per_turn(edge.live):
                await eventually(lambda: edge.live.num_viewers == 0)
            body = await asyncio.to_thread(read_rest, client)
        assert body.startswith(b"HTTP/1.1 200 OK")
        assert not body.endswith(b"0\r\n\r\n")
    assert "without completing" not in caplog.text


def read_rest(client: socket.socket) -> bytes:
    """Read to the end."""
    client.settimeout(60.0)
    body = b""
    while data := client.recv(1 << 20):
        body += data
    return body


@contextmanager
def once_per_turn(feed: LiveFeed) -> Iterator[None]:
    """A second passes with every turn of the event loop."""
    loop, is_over = asyncio.get_running_loop(), False

    def sample() -> None:
        if not is_over:
            feed.sample()
            loop.call_soon(sample)

    sample()
    try:
        yield
    finally:
        is_over = True


async def test_the_page_is_one_document_that_runs_nothing_else() -> None:
    edge = make_edge()
    async with edge.client() as client:
        response = await client.get("/")
        assert (await client.head("/")).status_code == 200
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["x-content-type-options"] == "nosniff"
    rules = dict(
        rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; ")
    )
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert rules["connect-src"] == "'self'"
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        hashes = [hashlib.sha256(part.encode()).digest() for part in found]
        assert rules[rule].split() == [f"'sha256-{base64.b64encode(h).decode()}'" for h in hashes]
    assert not re.search(r"\bsrc=\"|<link[^>]* href=\"(?!data:)", response.text)
    assert set(re.findall(r"<a href=\"([^\"]*)\"", response.text)) == {
        "/docs",
        "/v1/cluster",
        "/metrics",
    }
    assert "://" not in response.text.replace("http://www.w3.org/", "")


def test_every_part_of_the_page_is_in_it() -> None:
    names = {path.name for path in FOLDER.iterdir() if path.suffix in (".css", ".js")}
    html = (FOLDER / "index.html").read_text()
    assert set(re.findall(r'(?:href|src)="([\w.-]+)"', html)) == names
    for name in names:
        assert (FOLDER / name).read_text() in live_page().body.decode()


def test_a_wheel_holds_every_part() -> None:
    project = tomllib.loads((FOLDER.parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["router.live.page"]
    parts = [path.name for path in FOLDER.iterdir() if path.is_file() and path.suffix != ".py"]
    assert len(parts) > 2
    assert [name for name in parts if not any(fnmatch(name, one) for one in patterns)] == []


def test_no_script_reads_text_as_html() -> None:
    for path in FOLDER.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(",
            path.read_text(),
        )


async def test_with_keys_a_stranger_gets_the_page_and_nothing_that_it_shows() -> None:
    edge = make_edge(api_key="secret")
    async with edge.client() as client:
        page = await client.get("/")
        assert (page.status_code, page.content) == (401, live_page().body)
        assert "content-security-policy" in page.headers
        assert (await client.get("/v1/live")).status_code == 401
        wrong = {"authorization": "Bearer wrong"}
        assert (await client.get("/v1/live", headers=wrong)).status_code == 401
        right = {"authorization": "Bearer secret"}
        assert (await client.get("/", headers=right)).status_code == 200


async def test_the_edge_counts_for_the_page() -> None:
    """A failure is one of the server: a client's mistake is none."""
    edge = make_edge()
    async with edge.client() as client:
        body = {"model": "tiny", "prompt": "Hi"}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert (await client.post("/v1/completions", json={})).status_code == 400
        edge.generator.script = fails(NodeLost("gone"))
        assert (await client.post("/v1/completions", json=body)).status_code == 502
    counters = edge.live.edge
    assert (counters.num_requests, counters.num_failed, counters.num_refused) == (3, 1, 1)
    assert [(error.status, error.text) for error in counters.errors] == [
        (400, "prompt is missing"),
        (502, "gone"),
    ]
    assert counters.num_tokens == edge.metric("pdserve_output_tokens_total") > 1
    assert counters.ttft.percentiles_s(0.5) != [None]
    assert counters.tpot.percentiles_s(0.5) != [None]
