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

QUEUED_GROUPS = 8
"""Groups of deltas, of all choices together, that may wait for a slow client."""


async def choice_deltas(
    groups: AsyncGenerator[Sequence[TokenChunk], None],
    text: ChoiceText,
    on_deltas: Callable[[Sequence[Delta]], object],
) -> AsyncGenerator[Sequence[Delta], None]:
    """The deltas of one choice up to the one with a `finish_reason`; those that came together
    leave together.

    `groups` is closed before the last delta is handed out, so a stop string frees the nodes at
    once, however slowly the client reads.
    """
    async with aclosing(groups):
        async for chunks in groups:
            deltas = text.push_all(chunks)
            on_deltas(deltas)
            if deltas[-1].finish_reason is not None:
                await groups.aclose()
                yield deltas
                return
            yield deltas
    raise InternalError("the generator ended without a finish reason")


async def merged(
    choices: Sequence[AsyncGenerator[Sequence[Delta], None]],
) -> AsyncGenerator[tuple[int, Sequence[Delta]], None]:
    """Deltas of every choice with its index, in the order they come. Close it when done early."""
    if len(choices) == 1:
        async with aclosing(choices[0]) as only:
            async for deltas in only:
                yield 0, deltas
        return
    queue: asyncio.Queue[tuple[int, Sequence[Delta]] | Exception | None]
    queue = asyncio.Queue(QUEUED_GROUPS)
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
    choice: AsyncGenerator[Sequence[Delta], None],
    queue: asyncio.Queue[tuple[int, Sequence[Delta]] | Exception | None],
) -> None:
    try:
        async with aclosing(choice):
            async for deltas in choice:
                await queue.put((index, deltas))
    except Exception as error:  # handed to the reader, which raises it
        await queue.put(error)
    else:
        await queue.put(None)
