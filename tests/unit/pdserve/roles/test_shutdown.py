"""Signals of a role: the first SIGTERM drains, everything else ends at once."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from pdserve.roles.shutdown import Shutdown


@pytest.mark.parametrize(
    ("signals", "drains", "ends"),
    [
        ([signal.SIGTERM], True, False),
        ([signal.SIGTERM, signal.SIGTERM], True, True),
        ([signal.SIGTERM, signal.SIGINT], True, True),
        ([signal.SIGINT], False, True),
        ([signal.SIGHUP], True, False),
        ([signal.SIGHUP, signal.SIGTERM], True, True),
    ],
)
async def test_signals(signals: list[signal.Signals], drains: bool, ends: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    shutdown = Shutdown()
    shutdown.watch_signals()
    loop = asyncio.get_running_loop()
    try:
        for number in signals:
            os.kill(os.getpid(), number)
            # The loop reads one signal after the other.
            for _ in range(100):
                await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await shutdown.either.wait()
            if ends:
                await shutdown.now.wait()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, before)
    assert (shutdown.drain.is_set(), shutdown.now.is_set()) == (drains, ends)


async def test_a_process_that_nohup_started_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    shutdown = Shutdown()
    shutdown.watch_signals()
    try:
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, before)


async def test_a_drain_by_a_router_is_no_signal() -> None:
    shutdown = Shutdown()
    shutdown.drain.set()
    shutdown.request()
    assert not shutdown.now.is_set()
    assert shutdown.either.is_set()
    shutdown.request()
    assert shutdown.now.is_set()
