"""One stream per router: what a step has for a router leaves in one message, replies first.

The step thread adds outputs and flushes; the event loop's side hands each router a batch as fast as
it reads. What a router has not read yet waits for its next batch, up to a bound; a router that
lets more than that pile up is cut off, which aborts what it asked for.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from common.ids import Incarnation
from common.request import RequestOutput
from protos import pdserve_node_pb2 as pb

log = logging.getLogger("pdserve.node")

MAX_PENDING = 65536
"""Replies and outputs."""
HEARTBEAT_S = 1.0

OnGone = Callable[[Incarnation], None]


class Batch(NamedTuple):
    """What a router reads next; empty: a heartbeat."""

    replies: list[pb.Reply]
    outputs: list[RequestOutput]


class RouterStream:
    """What waits for one router. On the event loop alone."""

    def __init__(self, router: Incarnation) -> None:
        self.router = router
        self.replies: list[pb.Reply] = []
        self.outputs: list[RequestOutput] = []
        self.wake = asyncio.Event()
        self.is_cut = False

    @property
    def num_pending(self) -> int:
        """Replies and outputs that were not read yet."""
        return len(self.replies) + len(self.outputs)

    def take(self) -> Batch:
        """Everything that waits."""
        batch = Batch(self.replies, self.outputs)
        self.replies, self.outputs = [], []
        return batch


class OutputStreams:
    """Open streams by router. `on_gone` is called once for each stream that ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_gone: OnGone) -> None:
        self._loop = loop
        self._on_gone = on_gone
        self._streams: dict[Incarnation, RouterStream] = {}
        self._lock = threading.Lock()
        self._unflushed: list[tuple[Incarnation, RequestOutput]] = []
        self._in_transit: list[tuple[Incarnation, RequestOutput]] = []
        self._is_stopping = False

    # --- the step thread's side ---------------------------------------------------------------

    def add(self, router: Incarnation, output: RequestOutput) -> None:
        """Keep an output for the next `flush`."""
        self._unflushed.append((router, output))

    def flush(self) -> None:
        """Hand over everything added since the last flush."""
        if not self._unflushed:
            return
        with self._lock:
            is_scheduled = bool(self._in_transit)
            self._in_transit += self._unflushed
        self._unflushed = []
        if not is_scheduled:
            self._loop.call_soon_threadsafe(self._deliver)

    # --- the event loop's side ----------------------------------------------------------------

    def open(self, router: Incarnation) -> RouterStream:
        """A stream for this router; it ends the one that it has, if any."""
        self._end(self._streams.get(router))
        stream = self._streams[router] = RouterStream(router)
        return stream

    def reply(self, stream: RouterStream, reply: pb.Reply) -> None:
        """Answer a call that came on this stream."""
        if not stream.is_cut:
            stream.replies.append(reply)
            self._on_added(stream)

    def close(self, stream: RouterStream) -> None:
        """Its router is gone, or to be let go: `read` ends, and nothing more is sent."""
        self._end(stream)

    def stop(self) -> None:
        """Let every stream send what it has and end."""
        self._is_stopping = True
        for stream in self._streams.values():
            stream.wake.set()

    async def read(self, stream: RouterStream) -> AsyncIterator[Batch]:
        """What a router gets, until its stream ends; it has ended when this has."""
        try:
            yield stream.take()  # at once: a router chooses only nodes that it has heard
            while not stream.is_cut:
                if not stream.num_pending:
                    # Even then the loop gets its turn: the last outputs may be on their way.
                    await _wait(stream.wake, 0.0 if self._is_stopping else HEARTBEAT_S)
                stream.wake.clear()
                yield stream.take()
                if self._is_stopping and not stream.num_pending and not self._in_transit:
                    return
        finally:
            self._end(stream)

    def _deliver(self) -> None:
        with self._lock:
            delivered, self._in_transit = self._in_transit, []
        for router, output in delivered:
            stream = self._streams.get(router)
            if stream is not None:
                stream.outputs.append(output)
                self._on_added(stream)

    def _on_added(self, stream: RouterStream) -> None:
        stream.wake.set()
        if stream.num_pending > MAX_PENDING:
            log.warning("router %s does not read its tokens and is cut off", stream.router)
            self._end(stream)

    def _end(self, stream: RouterStream | None) -> None:
        """Cut a stream off, once: a later stream of the same router is another one."""
        if stream is None or stream.is_cut:
            return
        stream.is_cut = True
        stream.wake.set()
        stream.take()
        del self._streams[stream.router]
        self._on_gone(stream.router)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
