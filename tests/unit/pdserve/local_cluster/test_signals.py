"""Signals that a program waits for, and those that it leaves as they were."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from pdserve.local_cluster.signals import STOP_SIGNALS, Signals


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", sorted(STOP_SIGNALS))
def test_a_stop_signal_is_counted(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)
    with Signals() as signals:
        os.kill(os.getpid(), number)
        signals.wait(60.0)
        assert signals.num_stops == 1
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_process_that_nohup_started_outlives_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        signals.wait(0.0)
        assert signals.num_stops == 0
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_ctrl_c_stops_what_a_script_has_started_in_the_background() -> None:
    """A shell without job control makes such a process ignore it, and ends with it itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        signals.wait(60.0)
        assert signals.num_stops == 1
