"""Reading what a generator pushes, as tests want to: one push after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from common.request import SamplingParams
from router.core.generation import Generator, TokenChunk


class QueueSink:
    """Keeps every push until it is read."""

    def __init__(self) -> None:
        self._pushes: asyncio.Queue[Sequence[TokenChunk] | Exception] = asyncio.Queue()
        self.is_accepted = False

    def on_accepted(self) -> None:
        assert not self.is_accepted, "accepted twice"
        self.is_accepted = True

    def on_chunks(self, chunks: Sequence[TokenChunk]) -> None:
        self._pushes.put_nowait(chunks)

    def send_now(self) -> None:
        """What was pushed can be read already."""

    def on_failed(self, error: Exception) -> None:
        self._pushes.put_nowait(error)

    @property
    def is_empty(self) -> bool:
        return self._pushes.empty()

    async def next(self) -> Sequence[TokenChunk]:
        """Return what was pushed together; raise the error that ended the answer."""
        push = await self._pushes.get()
        if isinstance(push, Exception):
            raise push
        return push


async def read(
    generator: Generator,
    prompt_token_ids: tuple[int, ...],
    sampling: SamplingParams,
    **options: Any,
) -> AsyncGenerator[Sequence[TokenChunk], None]:
    """Run one answer and yield each push; closed early, it aborts the answer."""
    sink = QueueSink()
    abort = generator.generate(prompt_token_ids, sampling, sink, **options)
    try:
        while True:
            chunks = await sink.next()
            yield chunks
            if chunks[-1].finish_reason is not None:
                assert sink.is_empty, "a push behind the end"
                return
    finally:
        abort()
