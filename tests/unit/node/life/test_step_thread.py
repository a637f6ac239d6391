"""A step that lasts longer than the stop waits: nothing that it leads to reaches anybody."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest

from engine.core.runner_contract import ScheduledSequence
from node.flow.node_flow import NodeFlow
from node.life.step_thread import StepThread
from tests.support.clocks.manual_clock import ManualClock
from tests.support.engine.scripted_loop import ScriptedFlow, ScriptedInbox, ScriptedRunner

WAIT_S = 20.0


class OpenInbox(ScriptedInbox):
    """Can be closed from outside."""

    def close(self) -> None:
        self.is_closed = True


class HeldRunner(ScriptedRunner):
    """Its step lasts until `release` is set."""

    def __init__(self, error: Any) -> None:
        super().__init__([], error)
        self.began, self.release = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None

    def execute(self, batch: Sequence[ScheduledSequence], *calls: Any) -> Any:
        self.thread = threading.current_thread()
        self.began.set()
        assert self.release.wait(WAIT_S)
        return super().execute(batch, *calls)


class Broken(BaseException):
    """Ends the step loop, as no error of a step does."""


@pytest.mark.parametrize("error", [None, Broken()])
@pytest.mark.parametrize("is_in_time", [False, True])
async def test_what_an_abandoned_step_leads_to_is_dropped(error: Any, is_in_time: bool) -> None:
    log: list[str] = []
    performed: list[object] = []
    runner = HeldRunner(error)
    thread = StepThread(
        inbox=cast(Any, OpenInbox()),
        flow=cast(NodeFlow, ScriptedFlow([], [1])),
        runner=cast(Any, runner),
        perform=performed.append,
        flush=lambda: log.append("flush"),
        on_crash=lambda: log.append("crash"),
        clock=ManualClock(),
    )
    assert runner.began.wait(WAIT_S)
    before = len(performed)
    if is_in_time:
        runner.release.set()
    await thread.stop(WAIT_S if is_in_time else 0.0)
    runner.release.set()
    assert runner.thread is not None
    runner.thread.join(WAIT_S)
    assert not runner.thread.is_alive()
    assert (len(performed) > before) is (is_in_time and error is None)
    assert set(log) == ({"crash" if error else "flush"} if is_in_time else set())
