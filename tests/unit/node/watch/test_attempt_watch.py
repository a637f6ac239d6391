"""Ended attempts reach the log where its level asks for them; elsewhere nothing is kept."""

from __future__ import annotations

import asyncio
import logging

import pytest

from common.observing.tracing import NO_TRACING
from node.flow.attempts.attempt_table import AttemptTable
from node.watch.attempt_watch import AttemptWatch
from tests.support.clocks.manual_clock import ManualClock
from tests.unit.node.watch.attempts import attempt_with

LOGGER = "pdserve.node.attempts"


@pytest.mark.parametrize(
    ("level", "told"), [(logging.DEBUG, ["an attempt ended: length"]), (logging.INFO, [])]
)
async def test_an_end_is_a_line_at_debug(
    caplog: pytest.LogCaptureFixture, level: int, told: list[str]
) -> None:
    table, attempt = AttemptTable(), attempt_with(outcome="length")
    with caplog.at_level(level, LOGGER):
        watch = AttemptWatch(table, NO_TRACING, asyncio.get_running_loop(), ManualClock())
        table.add(attempt)
        table.remove(attempt)
        watch.look()
        watch.look()
        await asyncio.sleep(0)
    assert [record.message for record in caplog.records if record.name == LOGGER] == told
    assert table.take_ended() == []
