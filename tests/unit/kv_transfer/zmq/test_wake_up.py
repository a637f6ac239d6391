"""Waking a thread that polls: never missed, and one system call for each wait at most."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterator

import pytest

from kv_transfer.zmq.wake_up import WakeUp


@pytest.fixture
def wake_up() -> Iterator[WakeUp]:
    with contextlib.closing(WakeUp()) as one:
        yield one


def is_ready(wake_up: WakeUp) -> bool:
    return bool(select.select([wake_up], [], [], 0.0)[0])


def test_a_thread_that_is_awake_costs_nothing_and_does_not_wait_next(wake_up: WakeUp) -> None:
    wake_up.wake()
    assert not is_ready(wake_up)
    assert wake_up.before_wait(5.0) == 0.0
    wake_up.after_wait(is_ready=False)
    assert wake_up.before_wait(5.0) == 5.0


def test_one_signal_ends_a_wait_however_often_it_is_called(wake_up: WakeUp) -> None:
    assert wake_up.before_wait(5.0) == 5.0
    assert not is_ready(wake_up)
    for _ in range(3):
        wake_up.wake()
    assert is_ready(wake_up)
    assert os.eventfd_read(wake_up.fileno()) == 1
    wake_up.after_wait(is_ready=False)
    # What was made known before these calls is seen after this wait.
    assert wake_up.before_wait(5.0) == 5.0


def test_a_signal_is_taken_once(wake_up: WakeUp) -> None:
    for _ in range(2):
        wake_up.before_wait(5.0)
        wake_up.wake()
        wake_up.after_wait(is_ready=is_ready(wake_up))
        assert not is_ready(wake_up)


def test_a_signal_after_the_poll_ends_the_next_wait(wake_up: WakeUp) -> None:
    wake_up.before_wait(5.0)
    found = is_ready(wake_up)
    wake_up.wake()
    wake_up.after_wait(is_ready=found)
    assert wake_up.before_wait(5.0) == 5.0
    assert is_ready(wake_up)


def test_a_call_in_the_moment_before_a_wait_is_not_missed() -> None:
    """The other thread comes exactly between the two things that the waiting one does."""

    class Late(WakeUp):
        was_asked = False

        @property
        def _is_called(self) -> bool:
            if not self.was_asked:
                self.was_asked = True
                self.wake()
            return False

        @_is_called.setter
        def _is_called(self, value: bool) -> None:
            pass

    with contextlib.closing(Late()) as late:
        assert late.before_wait(5.0) == 5.0
        assert is_ready(late)


def test_nothing_is_written_after_close() -> None:
    """The number of the closed file may be that of another one by then."""
    wake_up = WakeUp()
    number = wake_up.fileno()
    wake_up.before_wait(5.0)
    wake_up.close()
    other = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        assert other == number
        wake_up.wake()
        assert not is_ready(wake_up)
    finally:
        os.close(other)
