"""Abort a request's connection, which ASGI does not offer.

When an answer ends while its client does not read, the server only flushes it, and a flush waits
for the client without a limit. Code that cannot wait that long aborts the connection instead.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, cast

_EXTENSION = "pdserve.connection"


def offer_abort(scope: MutableMapping[str, Any], abort: Callable[[], None]) -> None:
    """Put `abort` into the scope of a request that begins, for `abort_connection` to find."""
    scope["extensions"] = {_EXTENSION: {"abort": abort}}


def abort_connection(scope: MutableMapping[str, Any]) -> None:
    """Close the request's connection at once; data that was not sent yet is lost.

    Does nothing under a server that does not offer it.
    """
    connection = (scope.get("extensions") or {}).get(_EXTENSION)
    if connection is not None:
        cast(Callable[[], None], connection["abort"])()
