"""Whether the KV connector's thread makes turns; a node whose thread hangs must end."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from node.flow.step_progress import TICK_S

log = logging.getLogger("pdserve.node")

MOST_TURN_S = 30.0
"""A turn takes milliseconds, or some seconds where the memory of a slab is registered anew."""


class TurningConnector(Protocol):
    """A connector: `num_turns` grows all the time, also while nothing is to be done."""

    @property
    def num_turns(self) -> int: ...


class TurnWatch:
    """Judges the turns of a thread, which is looked at every `TICK_S` on the event loop.

    Time is counted in looks: while the whole process stands still, nothing is counted.
    """

    def __init__(self) -> None:
        self._num_turns = -1
        self._num_looks = 0

    @property
    def is_hung(self) -> bool:
        """Whether the present turn has lasted for too long."""
        return self._num_looks * TICK_S > MOST_TURN_S

    def look(self, num_turns: int) -> None:
        """Take the number of turns so far."""
        self._num_looks = self._num_looks + 1 if num_turns == self._num_turns else 0
        self._num_turns = num_turns


async def wait_for_hang(connector: TurningConnector) -> None:
    """Return when the connector's thread hangs.

    Without this its node would look healthy: it renews its lease, and each of its transfers fails.
    """
    watch = TurnWatch()
    # Polled: a thread that hangs cannot set an event.
    while not watch.is_hung:
        await asyncio.sleep(TICK_S)
        watch.look(connector.num_turns)
    log.error("the KV connector's thread has hung for %g s: the node stops", MOST_TURN_S)
