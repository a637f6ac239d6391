"""The router's HTTP edge on a thread of its own, over a cluster that a test makes up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from router.live.reading import Reading
from router.watch.edge_counters import RequestError
from tests.support.http.http_edge import make_edge
from tests.support.http.http_server import served


class ServedEdge:
    """What runs on the thread; `url` leads to it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, url: str, edge: Any) -> None:
        self._loop = loop
        self._edge = edge
        self.url = url

    def show(self, reading: Reading) -> None:
        """The cluster is like that from now on; it is sampled at once."""

        async def change() -> None:
            self._edge.cluster.live = reading
            self._edge.live.sample()

        self._run(change())

    def fail(self, *, endpoint: str = "completions", **error: Any) -> None:
        """A request has ended with this error; the next sample shows it."""

        async def end() -> None:
            counters = self._edge.live.edge
            counters.on_request_end(RequestError(at_s=0.0, endpoint=endpoint, **error))

        self._run(end())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)


@contextmanager
def served_edge(**api: Any) -> Iterator[ServedEdge]:
    """An edge with these settings, sampled every second, on a free loopback port."""
    ready: list[ServedEdge] = []
    is_ready, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        edge = make_edge(**api)
        feeding = asyncio.create_task(edge.live.run(stop))
        async with served(edge.app) as port:
            url = f"http://127.0.0.1:{port}"
            ready.append(ServedEdge(asyncio.get_running_loop(), url, edge))
            is_ready.set()
            await stop.wait()
            await feeding

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert is_ready.wait(30.0), "the edge did not start"
    try:
        yield ready[0]
    finally:
        ready[0]._loop.call_soon_threadsafe(stop.set)
        thread.join()
