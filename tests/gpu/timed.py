"""Phases with their own time limits, and an end that says what was found however they end.

A phase that fails does not stop the rest. One that is interrupted (Ctrl-C, SIGTERM) does, but for
those that close what was started. One that waits where no signal reaches it, as in a driver's call,
ends the program, after its last lines.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

AGAIN_S = 5.0
"""The alarm rings again: an event loop may take the first one for an error of a callback."""
_GRACE_S = 15.0
"""A phase that has not ended so long after its limit is stuck."""
_STUCK = 100


class OutOfTime(Exception):
    """A phase took longer than it may."""


@contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Raise `OutOfTime` in the main thread, whatever it waits for, after `limit_s`."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise OutOfTime(f"not within {limit_s:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, limit_s), AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Phases:
    """Runs phases one after the other, and prints a line as each ends.

    All that is in `found` is written into `out` then, where that is given.
    """

    def __init__(
        self,
        total_s: float,
        found: dict[str, Any],
        out: Path | None = None,
        summary: Callable[[], Mapping[str, Any]] | None = None,
        grace_s: float = _GRACE_S,
    ) -> None:
        """`summary` is what the end shows of `found`; None: all."""
        self._ends_at_s = time.monotonic() + total_s
        self._found, self._out, self._grace_s = found, out, grace_s
        self._summary = summary or (lambda: found)
        self._is_interrupted = self._can_be_interrupted = False
        self.passed = 0
        self.failed: list[str] = []

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let Ctrl-C and SIGTERM end the phase that runs, unless it closes, and begin no other.

        Whoever limits the program's time sends SIGTERM.
        """

        def stop(number: int, _frame: FrameType | None) -> None:
            self._is_interrupted = True
            if self._can_be_interrupted:
                raise KeyboardInterrupt(signal.Signals(number).name)

        before = {one: signal.signal(one, stop) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def run(
        self,
        name: str,
        limit_s: float,
        work: Callable[[], Mapping[str, Any] | None],
        *,
        is_closing: bool = False,
    ) -> bool:
        """Run one within its limit and what is left of the whole; return whether it passed.

        One that closes has its limit however late it is, and is run after an interruption too.
        """
        begun_s = time.monotonic()
        if not is_closing:
            limit_s = min(limit_s, max(0.0, self._ends_at_s - begun_s))
        watch = threading.Timer(limit_s + self._grace_s, self._end_stuck, (name, begun_s))
        watch.daemon = True
        watch.start()
        found: Mapping[str, Any] | None = None
        problem = ""
        try:
            self._can_be_interrupted = not is_closing  # from here on, so that none is missed
            if self._is_interrupted and not is_closing:
                problem = "FAILED: interrupted before it began"
            else:
                with limited(limit_s):
                    found = work()
            self._can_be_interrupted = False
        except BaseException:  # whatever it was: the other phases go on
            self._can_be_interrupted = False
            problem = f"FAILED\n{traceback.format_exc()}"
        watch.cancel()
        return self._note(name, begun_s, problem, found)

    def _note(
        self, name: str, begun_s: float, problem: str, found: Mapping[str, Any] | None = None
    ) -> bool:
        """Count and show a phase that has ended, and write what is found; return if it passed."""
        if problem:
            self.failed.append(name)
        else:
            self.passed += 1
        took_s = time.monotonic() - begun_s
        print(f"== {name}: {problem or 'ok'} ({took_s:.1f} s) {found or ''}".rstrip(), flush=True)
        self._write()
        return not problem

    def _write(self) -> None:
        """Write what is found. What cannot be written is on the last line but one all the same."""
        if self._out is None:
            return
        try:
            self._out.write_text(as_json({**self._found, "failed": self.failed}))
        except OSError as error:
            print(f"{self._out} cannot be written: {error}", flush=True)

    def end(self) -> int:
        """Print what is found, how many phases passed, and which failed; return how many."""
        print(as_json(self._summary()))
        names = f": {', '.join(self.failed)}" if self.failed else ""
        print(f"{self.passed} passed, {len(self.failed)} failed{names}", flush=True)
        return len(self.failed)

    def _end_stuck(self, name: str, begun_s: float) -> None:
        """End the program: the main thread is where no signal reaches it."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        where = "".join(traceback.format_stack(frame))
        self._note(name, begun_s, f"FAILED\nit does not end; the program does\n{where}")
        self.end()
        os._exit(_STUCK)


def as_json(found: Mapping[str, Any]) -> str:
    """Return an object on one line; what JSON does not know are plain numbers, or else texts."""
    try:
        return json.dumps(found, default=_plain)
    except (TypeError, ValueError):  # keys that are no texts, or something that has itself
        return json.dumps({str(key): repr(value) for key, value in found.items()})


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else str(value)
