"""One choice in progress, between the flow that decides and the client that reads."""

from __future__ import annotations

import asyncio

from common.errors import PdserveError
from router.core.generation import TakeChunks, TokenChunk
from router.core.policies.query import Query
from router.core.request_flow import RequestFlow
from router.core.ttft_stages import StageWatch
from router.watch.choice_watch import ChoiceWatch


class ActiveRequest:
    """The flow, its deadline timer, and the chunks that the client has not read yet.

    The buffer holds each token index at most once, so `max_tokens` bounds it.
    """

    def __init__(
        self,
        flow: RequestFlow,
        query: Query,
        deadline_at_s: float,
        stages: StageWatch,
        watch: ChoiceWatch,
        take_now: TakeChunks | None = None,
    ) -> None:
        self.flow = flow
        self.stages = stages
        self.watch = watch
        self.query = query
        self.deadline_at_s = deadline_at_s
        self.timer: asyncio.TimerHandle | None = None
        self._take_now = take_now
        self._chunks: list[TokenChunk] = []
        self._error: PdserveError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def request_id(self) -> str:
        return self.flow.attempt.request_id

    def put(self, chunk: TokenChunk) -> bool:
        """Tokens for the client, which hears of them by `pass_on`. Whether nothing else waits."""
        self._chunks.append(chunk)
        return len(self._chunks) == 1

    def pass_on(self) -> None:
        """To the client, if it waits: directly where it can take all that came, as waking its task
        for each token costs more than the rest of a token."""
        reader = self._reader
        if reader is None or reader.done() or not self._chunks:
            return
        if self._take_now is not None:
            try:
                is_taken = self._take_now(self._chunks)
            except Exception as error:
                self._reader = None
                reader.set_exception(error)
                return
            if is_taken:
                self._chunks = []
                return
        self._wake_reader()

    def fail(self, error: PdserveError) -> None:
        """Raised to the client once it has read what came before."""
        self._error = error
        self._wake_reader()

    async def next_chunks(self) -> list[TokenChunk]:
        """What came since the last call, at least one; raises the error that ended the request."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            self._reader = self._loop.create_future()
            await self._reader
        chunks, self._chunks = self._chunks, []
        return chunks

    def _wake_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():  # it is when its task was cancelled
            reader.set_result(None)
