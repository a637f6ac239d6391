"""Calls that wait for replies on the virtual clock, of code that awaits them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any

from common.errors import InternalError, PdserveError
from router.cluster.admin_calls import UnknownNode
from router.http.errors import ApiError


class AwaitedReply:
    """What a coroutine waits for, until `end` is called; what comes after that is too late."""

    def __init__(self) -> None:
        self.on_end: Callable[[Any], object] = lambda _: None
        self._is_over = False

    def end(self, found: object) -> None:
        """Let the coroutine go on with what was found, or with an error."""
        if not self._is_over:
            self._is_over = True
            self.on_end(found)

    def __await__(self) -> Generator[AwaitedReply, Any, Any]:
        found = yield self
        if isinstance(found, PdserveError):
            raise found
        return found


def drive(
    call: Coroutine[Any, Any, object],
    found: object = None,
    *,
    on_end: Callable[[], object] = lambda: None,
) -> None:
    """Run a call until it waits for an answer, and on when that has come; then call `on_end`.

    Raises `InternalError` where something must not be; an administrator is told of other errors.
    """
    try:
        reply: AwaitedReply = call.send(found)
    except StopIteration:
        on_end()
    except InternalError:
        raise
    except (ApiError, UnknownNode, PdserveError):
        on_end()
    else:
        reply.on_end = partial(drive, call, on_end=on_end)
