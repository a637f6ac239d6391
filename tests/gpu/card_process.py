"""The process that holds the card: what goes wrong in it ends with it, and another one goes on.

After an error in a kernel every later call of a process fails, and a call of the driver that does
not return is reached by no signal. So stages run in a process that is forked before the driver is
opened, and after one that failed the others run in a new one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NoReturn

from common.child_process import end_with_parent

GRACE_S = 5.0
"""A stage that is interrupted says what it found within this time, or its process is killed."""
_KILLED_S = 5.0
"""Seconds in which a process that was killed has ended, unless the driver's part of the kernel
holds it."""
_OPEN = "open"

Work = Callable[[Any, Any], object]


class StageFailed(Exception):
    """A stage raised, or its process ended. The text has the traceback."""


class CardProcess:
    """A process that opens a card and runs stages on it, one at a time, in the thread that asks.

    What stages find is added to `found` as each ends, in whichever way.
    """

    def __init__(
        self, open_card: Callable[[], Any], stages: Mapping[str, Work], found: dict[str, Any]
    ) -> None:
        """Start the process, which opens nothing yet. `open_card` and `stages` are called there."""
        self._found = found
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        work = (theirs, self._pipe, open_card, stages, found)
        self._process = context.Process(target=_serve, args=work, daemon=True)
        self._process.start()
        theirs.close()

    def open(self) -> dict[str, Any]:
        """Open the card; return its name. Raises `StageFailed`."""
        self._ask(_OPEN)
        return {"card": self._found["card"]}

    def run(self, stage: str) -> None:
        """Run a stage. Raises `StageFailed`; whatever else ends the wait ends the process too."""
        self._ask(stage)

    def _ask(self, what: str) -> None:
        try:
            self._pipe.send(what)
            found, error = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_KILLED_S)
            raise StageFailed(f"its process ended with {self._process.exitcode}") from None
        except BaseException:  # out of time, or interrupted
            signal.setitimer(signal.ITIMER_REAL, 0)  # once is enough
            self._interrupt()
            raise
        self._found.update(found)
        if error:
            raise StageFailed(f"in its process:\n{error}")

    def _interrupt(self) -> None:
        """Interrupt the stage, keep what it has found, and end the process."""
        try:
            self._process.terminate()
            with suppress(Exception):  # what was on its way may have been cut
                if self._pipe.poll(GRACE_S):
                    self._found.update(self._pipe.recv()[0])
        finally:
            self.close()

    def close(self) -> None:
        """Kill the process, with all that it has on the card."""
        self._process.kill()
        self._process.join(_KILLED_S)
        self._pipe.close()


def _serve(
    pipe: Connection, others: Connection, open_card: Callable[[], Any],
    stages: Mapping[str, Work], found: dict[str, Any],
) -> NoReturn:  # fmt: skip
    """Open the card and run stages, as asked, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent tells
    signal.signal(signal.SIGTERM, _raise_once)
    others.close()
    end_with_parent()
    card: Any = None
    with suppress(EOFError, OSError):
        while True:
            what, error = pipe.recv(), ""
            try:
                if what == _OPEN:
                    card = open_card()
                    found["card"] = card.device.properties.name
                else:
                    stages[what](card, found)
            except BaseException:  # whatever it was: it is told
                error = traceback.format_exc()
            try:
                pipe.send((dict(found), error))
            except Exception:  # what cannot be sent
                pipe.send(({}, error or traceback.format_exc()))
    os._exit(0)


def _raise_once(number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt(signal.Signals(number).name)
