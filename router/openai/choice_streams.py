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
from router.core.generation import TokenChunk
from router.text.choice_text import ChoiceText, Delta

QUEUED_GROUPS = 8
"""Groups of deltas, of all choices together, that may wait for a slow client."""


Group = tuple[int, Sequence[Delta]]
"""Deltas that came together, and the index of their choice."""


async def choice_deltas(
    index: int,
    groups: AsyncGenerator[Sequence[TokenChunk], None],
    text: ChoiceText,
    on_deltas: Callable[[Sequence[Delta]], object],
) -> AsyncGenerator[Group, None]:
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
                yield index, deltas
                return
            yield index, deltas
    raise InternalError("the generator ended without a finish reason")


def merged(choices: Sequence[AsyncGenerator[Group, None]]) -> AsyncGenerator[Group, None]:
    """The groups of every choice, in the order they come. Close it when done early."""
    return choices[0] if len(choices) == 1 else _merged(choices)


async def _merged(choices: Sequence[AsyncGenerator[Group, None]]) -> AsyncGenerator[Group, None]:
    queue: asyncio.Queue[Group | Exception | None] = asyncio.Queue(QUEUED_GROUPS)
    pumps = [asyncio.create_task(_pump(choice, queue)) for choice in choices]
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
    choice: AsyncGenerator[Group, None], queue: asyncio.Queue[Group | Exception | None]
) -> None:
    try:
        async with aclosing(choice):
            async for group in choice:
                await queue.put(group)
    except Exception as error:  # handed to the reader, which raises it
        await queue.put(error)
    else:
        await queue.put(None)
