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

    Only the connector's thread calls this, but for `post`. Jobs begin in order and end in any
    order. `turn` is set to the number of that thread's turn.
    """

    def __init__(self, count: int, wake: Callable[[], None]) -> None:
        """Start the threads; `wake` is called, on any thread, when `finish` has something to do."""
        self._wake = wake
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._done: deque[Finish] = deque()
        self.turn = 0
        # By thread: the turn in which the job began that it runs now.
        self._began_in: list[int | None] = [None] * count
        self._threads = [
            threading.Thread(
                target=self._work, args=(number,), name=f"pdserve-kv-{number + 1}", daemon=True
            )
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, job: Job) -> None:
        """Run a job here, or leave it to a thread."""
        if self._threads:
            self._jobs.put(job)
        else:
            job()()

    def post(self, finish: Finish) -> None:
        """Leave something to do to the connector's thread; called on any thread."""
        self._done.append(finish)
        self._wake()

    @property
    def oldest_turn(self) -> int:
        """The turn in which the oldest job began that runs now; `turn` if none runs.

        It stays the same while a job hangs. Read on any thread.
        """
        return min([self.turn, *(turn for turn in self._began_in if turn is not None)])

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

    def _work(self, number: int) -> None:
        while (job := self._jobs.get()) is not None:
            self._began_in[number] = self.turn
            try:
                finish = job()
            except BaseException as error:  # It ends the connector, as on its own thread.
                finish = _raising(error)
            self._done.append(finish)
            # They hold message parts and copies, and this thread may have nothing to do for long.
            del job, finish
            self._began_in[number] = None
            self._wake()


def _raising(error: BaseException) -> Finish:
    def finish() -> None:
        raise error

    return finish
