"""Cutting a request's connection, which ASGI does not offer.

An answer that ends while its client does not read is only flushed, which waits for that client for
ever. Whoever may be held up that way needs a way out that does not ask the client.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, cast

_EXTENSION = "pdserve.connection"


def offer_cut(scope: MutableMapping[str, Any], cut: Callable[[], None]) -> None:
    """Name the way out in the scope of a request that begins."""
    scope["extensions"] = {_EXTENSION: {"cut": cut}}


def cut_connection(scope: MutableMapping[str, Any]) -> None:
    """Close the request's connection at once; what was not sent yet is lost.

    Nothing happens under a server that does not offer it.
    """
    connection = (scope.get("extensions") or {}).get(_EXTENSION)
    if connection is not None:
        cast(Callable[[], None], connection["cut"])()
