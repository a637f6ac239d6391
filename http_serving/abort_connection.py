"""Abort a request's connection, which ASGI does not offer.

When an answer ends while its client does not read, the server only flushes it, and a flush waits
for the client without a limit. Code that cannot wait that long aborts the connection instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any, cast
from weakref import ref

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_EXTENSION = "pdserve.connection"


def offer_abort(scope: MutableMapping[str, Any], abort: Callable[[], None]) -> None:
    """Put `abort` into the scope of a request that begins, for `abort_connection` to find."""
    scope["extensions"] = {_EXTENSION: {"abort": abort}}


def offer_abort_of(cycle: RequestResponseCycle) -> None:
    """Offer to the request that `cycle` answers to abort its connection."""
    transport: asyncio.Transport = cycle.transport
    # The answer holds the scope: held in return, every request would be the garbage collector's.
    answer = ref(cycle)

    def abort() -> None:
        now = answer()
        if now is None or now.response_complete:
            return
        # As if the connection were lost already, which the server is told of only later: an
        # answer that is not complete would be logged as an error of the application.
        now.disconnected = True
        transport.abort()

    offer_abort(cast(dict[str, Any], cycle.scope), abort)


def abort_connection(scope: MutableMapping[str, Any]) -> None:
    """Close the request's connection at once; data that was not sent yet is lost.

    Does nothing when the answer is complete, or under a server that does not offer it.
    """
    connection = (scope.get("extensions") or {}).get(_EXTENSION)
    if connection is not None:
        cast(Callable[[], None], connection["abort"])()
