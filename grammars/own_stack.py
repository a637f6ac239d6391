"""Work on a stack of a known size: compiling a grammar takes stack as its chains are long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
_LOCK = threading.Lock()
"""The size is that of all threads that start meanwhile."""


def on_own_stack(stack_bytes: int, work: Callable[[], T]) -> T:
    """Return or raise what `work` does, on a thread that ends with it and has such a stack."""
    result = Future[T]()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="pdserve-compile")
    with _LOCK:
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return result.result()
