"""The process that tries grammars: `python -m grammars.trying.server SETTINGS`.

Routers and nodes each start one for their first grammar. It reads trials from its standard input, a
socket, and forks for each of them, so that a trial that crashes, hangs or takes all its memory
costs nobody but its client. This process itself compiles nothing and has one thread. It ends with
its input, and the kernel ends it and its forks with its parent.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.child_process import begin_helper, end_with_parent
from common.errors import CheckpointError, InvalidRequest, Overloaded
from common.files.kept_files import KeptFiles
from common.grammar import Grammar
from grammars.compiler import GrammarCompiler
from grammars.heap import use_one_arena
from grammars.trying.messages import Trial, error_fields, packed, trial_of, unpacked
from grammars.trying.queue import TrialQueue
from grammars.trying.trial import TrialLimits, is_final, run_trial, why_ended

MAX_TRIAL_S = 20.0
"""Longest time from a trial's arrival to its end, on a machine where CPU time is scarce."""
YOUNG_S = 0.1
"""CPU time after which a trial is old."""
_OLD_NICE = 19
_LEAST_WAIT_S = 0.01
_MAX_STARTS = 2
_READ_BYTES = 1 << 16
_CPUCLOCK_SCHED = 2
"""Linux's clock of a process is named by its id and this."""


@dataclass(slots=True)
class _Job:
    """A trial; `pid` and `reply_fd` are of its fork while it runs."""

    trial: Trial
    deadline_s: float
    num_ended: int = 0
    pid: int = 0
    is_old: bool = False
    reply_fd: int = -1
    reply: bytearray = field(default_factory=bytearray)


class TrialServer:
    """Runs the trials that come through one socket."""

    def __init__(
        self,
        peer: socket.socket,
        compiler: GrammarCompiler | None,
        limits: TrialLimits,
        why_not: str = "",
    ) -> None:
        """Compile with `compiler`; without one, `why_not` is why grammars are refused."""
        self._peer = peer
        self._compiler = compiler
        self._why_not = why_not
        self._limits = limits
        self._queue = TrialQueue()
        self._jobs: dict[int, _Job] = {}
        self._received = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(peer, selectors.EVENT_READ)

    def serve(self) -> None:
        """Run trials until the input ends."""
        while True:
            for key, _ in self._selector.select(self._wait_s()):
                if key.fileobj is not self._peer:
                    self._read_reply(key.data)
                elif not self._read_requests():
                    return
            self._end_overdue()
            self._age()
            self._start_and_stop()

    def _wait_s(self) -> float | None:
        now_s = time.monotonic()
        waits = [job.deadline_s - now_s for job in self._jobs.values()]
        young = (job for job in self._jobs.values() if job.pid and not job.is_old)
        waits += [max(_LEAST_WAIT_S, YOUNG_S - cpu_s(job.pid)) for job in young]
        return max(0.0, min(waits)) if waits else None

    def _read_requests(self) -> bool:
        """Read the requests that have arrived; False at the end of the input."""
        data = self._peer.recv(_READ_BYTES)
        self._received += data
        for message in unpacked(self._received):
            if "cancelled" in message:
                self._forget(message["cancelled"])
            else:
                self._take(message["id"], message)
        return bool(data)

    def _take(self, number: int, message: dict[str, Any]) -> None:
        try:
            trial = trial_of(message)
            if self._compiler is None and isinstance(trial.grammar, Grammar):
                raise InvalidRequest(self._why_not, param=trial.grammar.source or None)
            self._queue.add(number, message["client"])
        except (InvalidRequest, Overloaded) as error:
            self._answer(number, error_fields(error))
            return
        self._jobs[number] = _Job(trial, time.monotonic() + MAX_TRIAL_S)

    def _start_and_stop(self) -> None:
        while True:
            number = self._queue.next_to_start()
            if number is not None:
                self._start(number)
                continue
            number = self._queue.next_to_stop()
            if number is None:
                return
            self._end_fork(self._jobs[number])
            if self._queue.is_given_up(number):
                self._end(number, error_fields(Overloaded(
                    "the grammar takes long to be compiled while others wait: send it again later"
                )))  # fmt: skip

    def _age(self) -> None:
        """Lower the priority of trials that have computed for long."""
        for number, job in self._jobs.items():
            if job.pid and not job.is_old and cpu_s(job.pid) >= YOUNG_S:
                job.is_old = True
                self._queue.age(number)
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, job.pid, _OLD_NICE)

    def _start(self, number: int) -> None:
        job = self._jobs[number]
        ours, theirs = os.pipe()
        own_pid, pid = os.getpid(), os.fork()
        if pid == 0:
            end_with_parent()
            if os.getppid() != own_pid:  # it died before that
                os._exit(1)
            self._peer.close()
            run_trial(job.trial, self._compiler, self._limits, theirs)
        os.close(theirs)
        os.set_blocking(ours, False)
        job.pid, job.reply_fd, job.reply, job.is_old = pid, ours, bytearray(), False
        self._selector.register(ours, selectors.EVENT_READ, number)

    def _read_reply(self, number: int) -> None:
        job = self._jobs.get(number)
        if job is None or not job.pid:
            return  # it was ended in this turn
        data = os.read(job.reply_fd, _READ_BYTES)
        if data:
            job.reply += data
            return
        status = self._end_fork(job)
        if job.reply:
            self._end(number, json.loads(job.reply))
            return
        job.num_ended += 1
        if job.num_ended >= _MAX_STARTS or is_final(status):
            self._end(number, error_fields(why_ended(job.trial, status, self._limits)))
        else:
            self._start(number)

    def _end_overdue(self) -> None:
        now_s = time.monotonic()
        for number in [n for n, job in self._jobs.items() if job.deadline_s <= now_s]:
            late = Overloaded(f"the grammar was not compiled within {MAX_TRIAL_S:g} s: try again")
            self._end(number, error_fields(late))

    def _end(self, number: int, reply: dict[str, Any]) -> None:
        self._forget(number)
        self._answer(number, reply)

    def _forget(self, number: int) -> None:
        job = self._jobs.pop(number, None)
        if job is not None:
            self._queue.remove(number)
            self._end_fork(job)

    def _end_fork(self, job: _Job) -> int:
        """End the fork of a trial, if it has one; return how it ended."""
        if not job.pid:
            return 0
        self._selector.unregister(job.reply_fd)
        os.close(job.reply_fd)
        with suppress(ProcessLookupError):
            os.kill(job.pid, signal.SIGKILL)
        _, status = os.waitpid(job.pid, 0)
        job.pid = 0
        return status

    def _answer(self, number: int, reply: dict[str, Any]) -> None:
        self._peer.sendall(packed({"id": number, **reply}))


def cpu_s(pid: int) -> float:
    """Return the seconds for which a child has computed, also one that has ended."""
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


def _compiler_of(settings: dict[str, Any]) -> tuple[GrammarCompiler | None, str]:
    """Return the compiler of a model's tokenizer, or why there is none."""
    name, ends = settings["model"], settings["eos_token_ids"]
    try:
        files = KeptFiles(settings["files"])
        folder, vocab_size = Path(settings["folder"]), settings["vocab_size"]
        found = GrammarCompiler.load(folder, vocab_size, ends, files=files)
    except CheckpointError as error:
        return None, f"the tokenizer of model {name!r} cannot be used for grammars: {error}"
    return found, f"model {name!r} has no end-of-sequence token, which grammars need"


def main(arguments: Sequence[str]) -> int:
    """Read the tokenizer, then run trials; return the exit code."""
    begin_helper()
    use_one_arena()  # what a trial reserves counts as what it takes
    settings = json.loads(arguments[0])
    compiler, why_not = _compiler_of(settings)
    gc.freeze()  # forks share what is not written
    peer = socket.socket(fileno=os.dup(0))
    with suppress(ConnectionError):
        TrialServer(peer, compiler, TrialLimits(**settings["limits"]), why_not).serve()
    os._exit(0)  # the kernel ends the forks


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
