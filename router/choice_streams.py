"""Running the choices of one request and reading them as one stream.

Nothing is pulled from a generator faster than its deltas are taken: one choice is read directly,
several through a small queue. Whatever ends the reading (the end, an error, a client that left)
closes every generator.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from common.errors import InternalError
from router.core.choice_text import ChoiceText, Delta
from router.generation import TokenChunk

QUEUED_DELTAS = 8
"""Deltas of all choices together that may wait for a slow client."""


async def choice_deltas(
    chunks: AsyncGenerator[TokenChunk, None],
    text: ChoiceText,
    on_delta: Callable[[Delta], None],
) -> AsyncGenerator[Delta, None]:
    """The deltas of one choice up to the one with a `finish_reason`.

    `chunks` is closed before the last delta is handed out, so a stop string frees the nodes at
    once, however slowly the client reads.
    """
    async with aclosing(chunks):
        async for chunk in chunks:
            delta = text.push(chunk)
            on_delta(delta)
            if delta.finish_reason is not None:
                await chunks.aclose()
                yield delta
                return
            yield delta
    raise InternalError("the generator ended without a finish reason")


async def merged(
    choices: Sequence[AsyncGenerator[Delta, None]],
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Deltas of every choice with its index, in the order they come. Close it when done early."""
    if len(choices) == 1:
        async with aclosing(choices[0]) as only:
            async for delta in only:
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue(QUEUED_DELTAS)
    pumps = [asyncio.create_task(_pump(i, choice, queue)) for i, choice in enumerate(choices)]
    try:
        num_running = len(pumps)
        while num_running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int,
    choice: AsyncGenerator[Delta, None],
    queue: asyncio.Queue[tuple[int, Delta] | Exception | None],
) -> None:
    try:
        async with aclosing(choice):
            async for delta in choice:
                await queue.put((index, delta))
    except Exception as error:  # handed to the reader, which raises it
        await queue.put(error)
    else:
        await queue.put(None)
