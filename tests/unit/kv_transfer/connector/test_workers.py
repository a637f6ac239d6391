"""The threads that hash and copy."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kv_transfer.connector.workers import Finish, Workers

WITHIN_S = 10.0


@contextmanager
def started(count: int) -> Iterator[tuple[Workers, Callable[[], None]]]:
    """Yield workers, and a function that waits until one of them has ended a job."""
    ended = threading.Semaphore(0)
    workers = Workers(count, ended.release)

    def wait() -> None:
        assert ended.acquire(timeout=WITHIN_S)

    try:
        yield workers, wait
    finally:
        workers.close()


class Held:
    """Something large that a job holds, and then its result."""


def holding(held: Held) -> Callable[[], Finish]:
    def finish() -> None:
        hash(held)

    return lambda: finish


def test_an_idle_worker_keeps_nothing_of_its_last_job() -> None:
    with started(1) as (workers, wait):
        held = Held()
        is_alive = weakref.ref(held)
        workers.run(holding(held))
        del held
        wait()
        workers.finish()
        assert is_alive() is None


@pytest.mark.parametrize("count", [0, 2])
def test_an_error_of_a_job_is_raised_on_the_connectors_thread(count: int) -> None:
    def broken() -> Finish:
        raise RuntimeError("broken")

    def run(workers: Workers, wait: Callable[[], None]) -> None:
        workers.run(broken)
        wait()
        workers.finish()

    with started(count) as (workers, wait), pytest.raises(RuntimeError, match="broken"):
        run(workers, wait)


@pytest.mark.covers("F79")
def test_the_count_of_turns_stops_while_a_job_hangs_and_not_while_others_come_and_go() -> None:
    """It is what a node watches."""
    hangs, goes_on = threading.Event(), threading.Event()

    def hung() -> Finish:
        hangs.set()
        assert goes_on.wait(WITHIN_S)
        return lambda: None

    with started(2) as (workers, wait):
        for workers.turn in range(1, 4):
            workers.run(lambda: lambda: None)
            wait()
            workers.finish()
            assert workers.oldest_turn == workers.turn
        workers.run(hung)
        assert hangs.wait(WITHIN_S)
        for workers.turn in range(4, 9):
            workers.run(lambda: lambda: None)
            wait()
            assert workers.oldest_turn == 3
        goes_on.set()
        wait()
        assert workers.oldest_turn == 8


def test_what_another_thread_posts_wakes_the_connectors_thread() -> None:
    done: list[int] = []
    with started(0) as (workers, wait):
        threading.Thread(target=workers.post, args=(lambda: done.append(1),)).start()
        wait()
        workers.finish()
    assert done == [1]
