"""Trials of grammars, from a router or a node: the side that starts their process and asks it.

The process is started for the first grammar, without a fork handler of any library: those of gRPC
end a child at its birth. When it ends, whatever ended it, another one is started and everything
that waited is asked once more.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import select
import socket
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from common.child_process import module_command, start_helper
from common.errors import CheckpointError, Overloaded, PdserveError
from common.files.kept_files import KeptFiles
from common.files.tokenizer_files import TOKENIZER_FILES
from common.grammar import Grammar
from grammars.trying.messages import Trial, Verdict, packed, trial_fields, unpacked, verdict_of
from grammars.trying.server import MAX_TRIAL_S
from grammars.trying.trial import TrialLimits

log = logging.getLogger("pdserve.grammars")

MAX_SILENCE_S = 2 * MAX_TRIAL_S
"""A process that answers nothing for so long, while something waits, is ended."""
_MAX_ENDS = 2
_CLOSING = "the server is shutting down"
_NO_ROOM = "no room to compile a grammar now: try again"
_READ_BYTES = 1 << 16


@dataclass(slots=True)
class _Asked:
    """A trial that waits; `num_ends` counts the processes that ended meanwhile."""

    message: bytes
    verdict: Future[Verdict]
    num_ends: int = 0


class GrammarTrials:
    """Tries grammars for one model. Any thread may call it; its owner closes it."""

    def __init__(
        self,
        folder: Path,
        model: str,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        limits: TrialLimits,
        files: KeptFiles | None = None,
    ) -> None:
        """Try for the tokenizer in `folder`; `model` is for messages. Starts nothing yet.

        `files` keep what is read of the folder. Raises `CheckpointError` where it cannot be read.
        """
        self._files = KeptFiles() if files is None else files
        for name in TOKENIZER_FILES:
            try:
                self._files.read(folder / name)
            except OSError as error:
                raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
        settings = {
            "folder": str(folder),
            "model": model,
            "vocab_size": vocab_size,
            "eos_token_ids": sorted(eos_token_ids),
            "limits": asdict(limits),
            "files": self._files.kept,
        }
        module = "grammars.trying.server"
        self._command = module_command(module, json.dumps(settings))
        self._lock = Lock()
        self._asked: dict[int, _Asked] = {}
        self._numbers = itertools.count(1)
        self._outgoing = bytearray()
        self._woken = self._wake = -1
        self._thread: Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the child that runs now."""
        process = self._process
        return None if process is None else process.pid

    def begin(self, trial: Trial, client: str = "") -> Future[Verdict]:
        """Ask for a trial; the future has the verdict or the error, and may be cancelled.

        Clients take turns. Errors: `InvalidRequest` for what cannot be followed or meets a limit;
        `Overloaded` where others, or what the machine has to do, are in the way.
        """
        number, verdict = next(self._numbers), Future[Verdict]()
        message = packed({"id": number, "client": client, **trial_fields(trial)})
        with self._lock:
            if self._is_closed:
                verdict.set_exception(Overloaded(_CLOSING))
                return verdict
            if self._thread is None and not self._start_thread():
                verdict.set_exception(Overloaded(_NO_ROOM))
                return verdict
            self._asked[number] = _Asked(message, verdict)
            self._outgoing += message
            self._send_wake()  # `close` cannot have closed the pipe yet
        verdict.add_done_callback(lambda done: self._forget(number, done))
        return verdict

    def _start_thread(self) -> bool:
        """Start the thread; return whether the machine had room for it."""
        # A daemon: the process ends with its thread, so also when its owner just ends.
        thread = Thread(target=self._run, name="pdserve-trials", daemon=True)
        try:
            self._woken, self._wake = os.pipe()
        except OSError as error:
            log.warning("grammars are not compiled: %s", error)
            return False
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("grammars are not compiled: %s", error)
            os.close(self._woken)
            os.close(self._wake)
            return False
        self._thread = thread
        return True

    def weigh(self, grammar: Grammar) -> int:
        """Return how many bytes a grammar takes when it is compiled, from a thread that may wait.

        Raises what `begin` has as errors.
        """
        return self.begin(Trial(grammar)).result().num_bytes

    def close(self) -> None:
        """End the process and everything that waits for it. Idempotent."""
        with self._lock:
            was_closed, self._is_closed, thread = self._is_closed, True, self._thread
        if was_closed:
            return
        if thread is not None:
            self._send_wake()
            thread.join()
            os.close(self._wake)
            os.close(self._woken)

    def _forget(self, number: int, verdict: Future[Verdict]) -> None:
        with self._lock:
            was_asked = self._asked.pop(number, None) is not None
            if was_asked and verdict.cancelled() and not self._is_closed:
                self._outgoing += packed({"cancelled": number})
                self._send_wake()

    def _run(self) -> None:
        """Run a process while trials are requested, until `close`."""
        while not self._is_closed:
            if self._asked:
                self._serve()
            else:
                events = select.poll()
                events.register(self._woken, select.POLLIN)
                events.poll()
                self._clear_wakes()
        self._fail(lambda asked: Overloaded(_CLOSING))

    def _serve(self) -> None:
        """Run one process until it ends, or must."""
        try:
            process, ours = start_helper(self._command, self._files.kept.values())
        except Exception as error:  # there may be no memory for it: a later one may start
            log.warning("the process that compiles grammars does not start: %r", error)
            self._fail(lambda asked: Overloaded(_NO_ROOM))
            return
        with ours:
            with self._lock:
                self._process = process
                self._outgoing[:] = b"".join(one.message for one in self._asked.values())
            try:
                self._talk(ours)
            except Exception:  # without this thread nothing would be compiled any more
                log.exception("the process that compiles grammars is not understood")
            finally:
                process.kill()
                code = process.wait()
                self._process = None
            if not self._is_closed:
                log.warning("the process that compiles grammars ended with %d", code)
                self._fail(_ended)

    def _talk(self, peer: socket.socket) -> None:
        """Send what is asked and take the answers, until the process or this side ends."""
        peer.setblocking(False)
        received, events = bytearray(), select.poll()
        events.register(self._woken, select.POLLIN)
        while not self._is_closed:
            events.register(peer, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
            ready = dict(events.poll(MAX_SILENCE_S * 1000 if self._asked else None))
            if not ready:
                self._fail(lambda asked: Overloaded(
                    f"no grammar was compiled within {MAX_SILENCE_S:g} s: try again"
                ))  # fmt: skip
                return
            self._clear_wakes()
            try:
                if ready.get(peer.fileno(), 0) & select.POLLOUT:
                    with self._lock:
                        del self._outgoing[: peer.send(self._outgoing)]
                if ready.get(peer.fileno(), 0) & ~select.POLLOUT:
                    data = peer.recv(_READ_BYTES)
                    if not data:
                        return
                    received += data
            except OSError:
                return
            for reply in unpacked(received):
                self._settle(reply)

    def _settle(self, reply: dict[str, Any]) -> None:
        asked = self._asked.get(reply["id"])
        if asked is None:
            return
        with suppress(InvalidStateError):  # it was cancelled meanwhile
            try:
                asked.verdict.set_result(verdict_of(reply))
            except PdserveError as error:
                asked.verdict.set_exception(error)

    def _fail(self, why: Callable[[_Asked], PdserveError | None]) -> None:
        """Fail everything that waits for which there is a reason."""
        with self._lock:
            waiting = list(self._asked.values())
        for asked in waiting:
            error = why(asked)
            if error is not None:
                with suppress(InvalidStateError):
                    asked.verdict.set_exception(error)

    def _send_wake(self) -> None:
        with suppress(BlockingIOError):  # it is full: the thread will wake
            os.write(self._wake, b"x")

    def _clear_wakes(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._woken, _READ_BYTES):
                pass


def _ended(asked: _Asked) -> PdserveError | None:
    """Return why a trial is given up after one more end of the process, if it is."""
    asked.num_ends += 1
    if asked.num_ends < _MAX_ENDS:
        return None
    return Overloaded(f"the process that compiles grammars ended {_MAX_ENDS} times: try again")
