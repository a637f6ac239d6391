"""What the log says while kernels compile, and that it says nothing where none is compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numba
import pytest

from engine.runner.start.compile_progress import NUM_KERNELS, logged_compilation
from tests.support.clocks.manual_clock import ManualClock


def kernel(added: int) -> Callable[[int], int]:
    """A function that numba has not compiled yet."""
    compiled: Callable[[int], int] = numba.njit(lambda x: x + added)
    return compiled


def test_progress_is_logged_every_two_seconds(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    caplog.set_level(logging.INFO, "pdserve.engine")
    with logged_compilation(clock):
        for number in range(3):
            kernel(number)(1)
        assert caplog.messages == []
        clock.advance(2.0)
        kernel(3)(1)
        kernel(4)(1)
    assert caplog.messages == [
        f"compiled 4 of about {NUM_KERNELS} CPU kernels",
        f"compiled 5 of about {NUM_KERNELS} CPU kernels",
    ]


def test_what_is_compiled_already_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pdserve.engine")
    known = kernel(1)
    known(1)
    with logged_compilation(ManualClock()):
        assert known(2) == 3
    kernel(2)(1)
    assert caplog.messages == []
