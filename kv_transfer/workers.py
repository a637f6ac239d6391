"""Threads that hash and copy for a connector, while its own thread sends and receives."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

Finish = Callable[[], None]
Job = Callable[[], Finish]
"""Runs on any thread, and returns what the connector's thread does with the result."""


class Workers:
    """`count` threads; with none each job runs at once, on the thread that has it.

    Only the connector's thread calls this. Jobs begin in order and end in any order.
    """

    def __init__(self, count: int, wake: Callable[[], None]) -> None:
        """Start the threads; `wake` is called, on any thread, when `finish` has something to do."""
        self._wake = wake
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._done: deque[Finish] = deque()
        self._threads = [
            threading.Thread(target=self._work, name=f"pdserve-kv-{number}", daemon=True)
            for number in range(1, count + 1)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, job: Job) -> None:
        """Run a job here, or leave it to a thread."""
        if self._threads:
            self._jobs.put(job)
        else:
            job()()

    def finish(self) -> None:
        """Do what the jobs that have ended left to do; raise what one of them raised."""
        while self._done:
            self._done.popleft()()

    def close(self) -> None:
        """Wait until every job has ended; `finish` follows. Idempotent."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                finish = job()
            except BaseException as error:  # It ends the connector, as on its own thread.
                finish = _raising(error)
            self._done.append(finish)
            # They hold message parts and copies, and this thread may have nothing to do for long.
            del job, finish
            self._wake()


def _raising(error: BaseException) -> Finish:
    def finish() -> None:
        raise error

    return finish
