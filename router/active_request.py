"""One choice in progress, between the flow that decides and the client that reads."""

from __future__ import annotations

import asyncio
from collections import deque

from common.errors import PdserveError
from router.core.policies.query import Query
from router.core.request_flow import RequestFlow
from router.core.ttft_stages import StageWatch
from router.generation import TokenChunk


class ActiveRequest:
    """The flow, its deadline timer, and the chunks that the client has not read yet.

    The buffer holds each token index at most once, so `max_tokens` bounds it.
    """

    def __init__(
        self, flow: RequestFlow, query: Query, deadline_at_s: float, stages: StageWatch
    ) -> None:
        self.flow = flow
        self.stages = stages
        self.query = query
        self.deadline_at_s = deadline_at_s
        self.timer: asyncio.TimerHandle | None = None
        self._chunks: deque[TokenChunk] = deque()
        self._error: PdserveError | None = None
        self._has_news = asyncio.Event()

    @property
    def request_id(self) -> str:
        return self.flow.attempt.request_id

    def put(self, chunk: TokenChunk) -> None:
        """Tokens for the client."""
        self._chunks.append(chunk)
        self._has_news.set()

    def fail(self, error: PdserveError) -> None:
        """Raised to the client once it has read what came before."""
        self._error = error
        self._has_news.set()

    async def next_chunk(self) -> TokenChunk:
        """The next chunk; raises the error that ended the request."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            self._has_news.clear()
            await self._has_news.wait()
        return self._chunks.popleft()
