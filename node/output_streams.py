"""One token stream per router: what a step has for a router leaves in one message.

The step thread adds outputs and flushes; the event loop's side hands each router a batch as fast as
it reads. Outputs that a router has not read yet wait for its next batch, up to a bound; a router
that lets more than that pile up is cut off, which aborts what it asked for.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable

from common.ids import Incarnation
from common.request import RequestOutput

log = logging.getLogger("pdserve.node")

MAX_PENDING_OUTPUTS = 65536
HEARTBEAT_S = 1.0

OnGone = Callable[[Incarnation], None]


class _Stream:
    def __init__(self) -> None:
        self.pending: list[RequestOutput] = []
        self.wake = asyncio.Event()
        self.is_cut = False


class OutputStreams:
    """Open streams by router. `on_gone` is called once for each stream that ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_gone: OnGone) -> None:
        self._loop = loop
        self._on_gone = on_gone
        self._streams: dict[Incarnation, _Stream] = {}
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

    def is_open(self, router: Incarnation) -> bool:
        """Whether this router reads what it asks for."""
        return router in self._streams

    def stop(self) -> None:
        """Let every stream send what it has and end."""
        self._is_stopping = True
        for stream in self._streams.values():
            stream.wake.set()

    async def read(self, router: Incarnation) -> AsyncIterator[list[RequestOutput]]:
        """Batches for one router; an empty one is a heartbeat. A second reader ends the first."""
        stream = _Stream()
        self._end(router, self._streams.get(router))
        self._streams[router] = stream
        try:
            yield []  # at once: a router chooses only nodes that it has heard
            while not stream.is_cut:
                if not stream.pending:
                    # Even then the loop gets its turn: the last outputs may be on their way.
                    await _wait(stream.wake, 0.0 if self._is_stopping else HEARTBEAT_S)
                stream.wake.clear()
                batch, stream.pending = stream.pending, []
                yield batch
                if self._is_stopping and not stream.pending and not self._in_transit:
                    return
        finally:
            self._end(router, stream)

    def _deliver(self) -> None:
        with self._lock:
            delivered, self._in_transit = self._in_transit, []
        for router, output in delivered:
            stream = self._streams.get(router)
            if stream is None:
                continue
            stream.pending.append(output)
            stream.wake.set()
            if len(stream.pending) > MAX_PENDING_OUTPUTS:
                log.warning("router %s does not read its tokens and is cut off", router)
                self._end(router, stream)

    def _end(self, router: Incarnation, stream: _Stream | None) -> None:
        """Cut a stream off, once: a later stream of the same router is another one."""
        if stream is None or stream.is_cut:
            return
        stream.is_cut = True
        stream.wake.set()
        stream.pending = []
        del self._streams[router]
        self._on_gone(router)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
