"""An object in a process of its own, called over a pipe."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_ANSWER_WITHIN_S = 300.0
_END_WITHIN_S = 20.0


class Remote:
    """The object that `make(*arguments)` returns, in a new process that `call` makes it in.

    Its methods and attributes are reached with `call`, or with `ask` and later `answer`, in order.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, name: str, *arguments: Any) -> Any:
        """Return the method's result. Raises as `answer` does."""
        self.ask(name, *arguments)
        return self.answer()

    def ask(self, name: str, *arguments: Any) -> None:
        """Call a method, whose result `answer` returns."""
        self._pipe.send((name, arguments))

    def answer(self) -> Any:
        """Return the result of the oldest call.

        Raises `RuntimeError` with the text of what it raised, and `TimeoutError` without an answer.
        """
        if not self._pipe.poll(_ANSWER_WITHIN_S):
            raise TimeoutError(f"no answer within {_ANSWER_WITHIN_S:g} s")
        is_good, value = self._pipe.recv()
        if not is_good:
            raise RuntimeError(value)
        return value

    def close(self) -> None:
        """Wait for its end, and kill it if it does not end in time."""
        self._pipe.close()
        self._process.join(_END_WITHIN_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    target: Any = None
    while True:
        try:
            name, given = pipe.recv()
        except (EOFError, ConnectionError, KeyboardInterrupt):
            break
        try:
            if target is None:
                target = make(*arguments)
            found = getattr(target, name)
            pipe.send((True, found(*given) if callable(found) else found))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))
    if target is not None:
        target.close()
