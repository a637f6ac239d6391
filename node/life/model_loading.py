"""Waits of a starting node that do not delay its end: for a model to load, for its store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


async def load_unless_stopped(load: Callable[[], T], *stops: asyncio.Event) -> T | None:
    """Return or raise what `load` does; return None when one of `stops` is set before it ends.

    Loading cannot be interrupted, and an event loop joins its own threads when it closes. So a
    daemon thread loads, and a stop abandons it.
    """
    loaded: Future[T] = Future()
    loaded.set_running_or_notify_cancel()

    def body() -> None:
        try:
            loaded.set_result(load())
        except BaseException as error:
            loaded.set_exception(error)

    threading.Thread(target=body, name="pdserve-load", daemon=True).start()
    return await wait_unless_stopped(asyncio.wrap_future(loaded), *stops)


async def wait_unless_stopped(
    what: Coroutine[Any, Any, T] | asyncio.Future[T], *stops: asyncio.Event
) -> T | None:
    """Return or raise what `what` does; cancel it and return None when one of `stops` is set."""
    waiting = asyncio.ensure_future(what)
    stopping = [asyncio.create_task(stop.wait()) for stop in stops]
    try:
        either: tuple[asyncio.Future[Any], ...] = (waiting, *stopping)
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return None if any(stop.is_set() for stop in stops) else waiting.result()
    finally:
        for task in (waiting, *stopping):
            task.cancel()
