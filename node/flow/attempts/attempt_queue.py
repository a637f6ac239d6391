"""Attempts on their way to the scheduler, which some reach later, and their ends there. Pure."""

from __future__ import annotations

from common.ids import AttemptId
from engine.core.scheduler import Scheduler
from engine.core.sequences.status import SequenceStatus
from node.flow.attempts.attempt_table import NodeAttempt
from node.flow.disk.prefix_disk import PrefixDisk
from node.flow.messages import Compiled, Submit
from node.flow.pulls.pull_cost import PullCost


class AttemptQueue:
    """Holds attempts that wait for a grammar, a pull or a disk; with a `disk_cost` there is one."""

    def __init__(self, scheduler: Scheduler, disk_cost: PullCost | None) -> None:
        self._scheduler = scheduler
        self.disk = PrefixDisk(scheduler, disk_cost, self.add_if_ready)
        self._held: set[AttemptId] = set()
        """Attempts that the scheduler does not know yet."""
        self._compiling: dict[AttemptId, Submit] = {}
        """Held attempts whose grammar is being compiled."""

    def __len__(self) -> int:
        """Return how many attempts wait for a grammar, a pull or a disk."""
        return len(self._held)

    def put(self, attempt: NodeAttempt, message: Submit) -> None:
        """Pass a sequence to the scheduler, but not before its grammar is compiled.

        A step under a grammar that is not compiled would make all its other requests wait.
        """
        if message.is_compiling:
            self._compiling[attempt.id] = message
        self.add_if_ready(attempt)

    def add_if_ready(self, attempt: NodeAttempt) -> None:
        """Pass a sequence to the scheduler, unless it waits for a grammar, a pull or a disk."""
        is_held = attempt.id in self._compiling or attempt.id in self.disk
        if attempt.waits_for_pull or is_held:
            self._held.add(attempt.id)
        else:
            self._held.discard(attempt.id)
            self._scheduler.add(attempt.sequence)

    def waiting_for(self, compiled: Compiled) -> Submit | None:
        """Return the request that waits for this grammar.

        None: it is over, or this tells of a call that asked again.
        """
        held = self._compiling.get(compiled.attempt)
        return held if held is not None and held.reply_to == compiled.reply_to else None

    def on_compiled(self, attempt: NodeAttempt) -> None:
        """Note that an attempt's grammar is compiled."""
        del self._compiling[attempt.id]
        self.add_if_ready(attempt)

    def finish(self, attempt: NodeAttempt, *, keep_blocks: bool = False) -> None:
        """End an attempt's sequence, whether the scheduler knows it yet or not."""
        self.disk.forget(attempt.id)
        self._compiling.pop(attempt.id, None)
        if attempt.id in self._held:
            self._held.remove(attempt.id)
            attempt.sequence.move_to(SequenceStatus.FINISHED)
        else:
            self._scheduler.finish(attempt.sequence, keep_blocks=keep_blocks)
