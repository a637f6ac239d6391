"""Feeds the live page: a sample every second, and the same bytes for every viewer. A minute of
samples is a line of the log.

Without viewers a second costs one sample and nothing is encoded. A viewer has a short queue. If it
is full when the next snapshot comes, the viewer does not read, and its connection is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from typing import Protocol

from starlette.types import Receive, Scope, Send

from common.observing.clock import Clock
from common.observing.logs import log_fields
from http_serving.abort_connection import abort_connection
from router.http.errors import ApiError
from router.http.exchange import ClientClosed, Reply, while_client_waits
from router.http.sse import event, to_json
from router.live.history import LiveHistory
from router.live.reading import Reading
from router.live.shapes import Serving
from router.live.snapshot import SnapshotJson
from router.watch.edge_counters import EdgeCounters, RequestError
from router.watch.minute_line import MinuteCounts
from router.watch.recent_placements import RecentPlacement

logger = logging.getLogger("pdserve.router.live")
minute_logger = logging.getLogger("pdserve.router.minute")

INTERVAL_S = 1.0
MAX_VIEWERS = 32
MAX_VIEWERS_PER_KEY = 8
VIEWERS_KEPT_FOR_ADMINS = 1
MAX_BEHIND = 5
"""The most snapshots that wait for a viewer, besides those in its connection's buffers."""
SNAPSHOTS_PER_STREAM = 300
"""Snapshots of one stream; then the page must connect again, with a key that is still valid."""


class LiveSource(Protocol):
    """The source of the readings."""

    def read_live(self) -> Reading:
        """Return the cluster's present state, from memory."""


class LiveFeed:
    """`run` takes the samples, `serve` answers `GET /v1/live`."""

    def __init__(self, source: LiveSource, clock: Clock, *, quotes_requests: bool = True) -> None:
        """Show `source`. With `quotes_requests` the texts of clients' errors are shown."""
        self.edge = EdgeCounters()
        self._source = source
        self._clock = clock
        self._began_at_s = clock.now_s()
        self._history = LiveHistory(self.edge)
        self._minute = MinuteCounts(self.edge, 0.0)
        self._json = SnapshotJson(self._history, self._began_at_s, quotes_requests=quotes_requests)
        self._last_change = 0
        self._num_errors = 0
        self._viewers: set[_Viewer] = set()
        self._is_over = False
        self._greeting: bytes | None = None
        self._reading = source.read_live()
        self.num_encoded = 0

    @property
    def num_viewers(self) -> int:
        """Pages that are open."""
        return len(self._viewers)

    async def run(self, stop: asyncio.Event) -> None:
        """Sample until `stop` is set, or a bug ends it; then end all viewers' streams."""
        try:
            while not stop.is_set():
                self.sample()
                with suppress(TimeoutError):
                    async with asyncio.timeout(INTERVAL_S):
                        await stop.wait()
        except Exception:
            logger.exception("the live page is not updated any more: a sample failed")
        finally:
            self._is_over = True
            for viewer in self._viewers:
                viewer.end()

    def sample(self) -> None:
        """Take one sample, and send it to all viewers."""
        now_s = self._clock.now_s() - self._began_at_s
        self._reading = self._source.read_live()
        self._log_minute(now_s)
        self._history.add(self._reading, now_s)
        self._greeting = None
        placements, errors = self._changed_placements(), self._new_errors()
        if self._viewers:
            content = self._json.snapshot(self._reading, placements, errors)
            snapshot = self._encode("snapshot", content)
            for viewer in self._viewers:
                viewer.offer(snapshot)

    def serving(self) -> Serving:
        """Return how this router has served in the last seconds, and since when, for people."""
        if not self._history.samples:
            self.sample()
        last = self._history.samples[-1]
        return {
            "uptime_s": round(self._clock.now_s() - self._began_at_s, 3),
            "in_progress": len(self._reading.requests),
            "tokens_per_s": last.tokens_per_s,
            "requests_per_s": last.requests_per_s,
            "failures_per_s": last.failures_per_s,
            "ttft_p50_s": last.ttft_p50_s,
            "tpot_p50_s": last.tpot_p50_s,
        }

    def _log_minute(self, now_s: float) -> None:
        """Log what happened in a minute that is over; nothing where nothing did."""
        minute = self._minute.on_second(len(self._reading.requests), now_s)
        if minute is not None and not minute.is_empty:
            minute_logger.info("the last minute", extra=log_fields(**minute.fields()))

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one viewer, from its first event to its end."""
        reply = Reply(send)
        state = scope.get("state", {})
        key_name, is_admin = state.get("api_key_name", ""), state.get("is_admin", True)
        refusal = self._refusal(key_name, is_admin=is_admin)
        if refusal is not None:
            await reply.send_error(refusal)
            return
        viewer = _Viewer(self._greet(), key_name)
        self._viewers.add(viewer)
        try:
            async with viewer.until_dropped:
                await while_client_waits(receive, self._show(viewer, reply))
        except ClientClosed:
            pass
        except TimeoutError:
            logger.info("closed the connection of a live page that does not read")
            abort_connection(scope)
        finally:
            self._viewers.discard(viewer)

    def _refusal(self, key_name: str, *, is_admin: bool) -> ApiError | None:
        """Return why there is no place for one more viewer of this key; without keys it is ''."""
        if self._is_over:
            return _stands_still()
        limit = MAX_VIEWERS - (0 if is_admin else VIEWERS_KEPT_FOR_ADMINS)
        if len(self._viewers) >= limit:
            return _too_many(f"{limit} live pages of this router are open")
        num_own = sum(viewer.key_name == key_name for viewer in self._viewers)
        if key_name and num_own >= MAX_VIEWERS_PER_KEY:
            return _too_many(f"{num_own} live pages of the API key {key_name!r} are open")
        return None

    async def _show(self, viewer: _Viewer, reply: Reply) -> None:
        await reply.start_stream()
        for _ in range(SNAPSHOTS_PER_STREAM):
            snapshot = await viewer.next()
            if snapshot is None:
                break
            await reply.send_part(snapshot)
        await reply.end_stream(b"")

    def _greet(self) -> bytes:
        """Return the history and the latest snapshot; made once between two samples."""
        if not self._history.samples:
            self.sample()
        if self._greeting is None:
            history = self._json.history(self._reading, self.edge.errors)
            snapshot = self._json.snapshot(self._reading)
            self._greeting = self._encode("history", history) + self._encode("snapshot", snapshot)
        return self._greeting

    def _encode(self, kind: str, content: dict[str, object]) -> bytes:
        self.num_encoded += 1
        return event(to_json({"kind": kind, **content}))

    def _changed_placements(self) -> list[RecentPlacement]:
        placements = self._reading.placements
        changed = placements.changed_since(self._last_change)
        self._last_change = placements.num_changes
        return changed

    def _new_errors(self) -> list[RequestError]:
        edge = self.edge
        count = edge.num_failed + edge.num_refused - self._num_errors
        self._num_errors += count
        return list(edge.errors)[-count:] if count else []


class _Viewer:
    """A page's queue. `until_dropped` ends by a timeout as soon as the queue overflows."""

    def __init__(self, greeting: bytes, key_name: str) -> None:
        self.key_name = key_name
        self._snapshots = deque([greeting])
        self._is_over = False
        self._has_news = asyncio.Event()
        self.until_dropped = asyncio.timeout(None)

    def offer(self, snapshot: bytes) -> None:
        """Queue the next snapshot."""
        if self._is_over:
            return
        if len(self._snapshots) >= MAX_BEHIND:
            self._is_over = True
            self.until_dropped.reschedule(0)
            return
        self._snapshots.append(snapshot)
        self._has_news.set()

    def end(self) -> None:
        """End the stream after the queued snapshots."""
        self._is_over = True
        self._has_news.set()

    async def next(self) -> bytes | None:
        """Return the next snapshot; None after the last one."""
        while not self._snapshots:
            if self._is_over:
                return None
            self._has_news.clear()
            await self._has_news.wait()
        return self._snapshots.popleft()


def _stands_still() -> ApiError:
    return ApiError(503, "this router is stopping, or its log says why not", code="live_page_over")


def _too_many(open_pages: str) -> ApiError:
    return ApiError(
        503,
        f"{open_pages}, the most it serves",
        code="too_many_viewers",
        headers={"retry-after": "5"},
    )
