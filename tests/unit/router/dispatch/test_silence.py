"""How long a peer may be silent, by the time in which somebody listened."""

from __future__ import annotations

import asyncio

from router.dispatch.silence import SilenceTimer
from tests.fakes.stopped_time import StoppedTime


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_it_ends_after_the_limit_and_not_before() -> None:
    time = StoppedTime()
    waiting = asyncio.create_task(SilenceTimer(5.0).wait_too_long())
    for _ in range(5):
        await turns()
        assert not waiting.done()
        time.advance(1.0)
    await turns()
    assert not waiting.done(), "5 s, of which the first may be one in which something was heard"
    time.advance(1.0)
    await waiting


async def test_every_word_begins_it_anew() -> None:
    time = StoppedTime()
    silence = SilenceTimer(5.0)
    waiting = asyncio.create_task(silence.wait_too_long())
    for _ in range(30):
        for _ in range(5):
            await turns()
            time.advance(1.0)
        silence.heard()
    await turns()
    assert not waiting.done()
    waiting.cancel()


async def test_a_process_that_stood_still_listens_before_it_judges() -> None:
    time = StoppedTime()
    silence = SilenceTimer(5.0)
    waiting = asyncio.create_task(silence.wait_too_long())
    await turns()
    time.advance(3600.0)
    await turns()
    assert not waiting.done()
    waiting.cancel()
