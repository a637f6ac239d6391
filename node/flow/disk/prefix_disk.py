"""What a node reads from disk instead of computing it, and what it writes there. Pure.

A prompt that is computed here waits for a read before it is queued, where the read should be
quicker than computing (the rule and the constants of a pull, `pulls.pull_cost`), and for no longer
than computing takes: then it is queued as it is, and the read lands for those who come later. One
that waits for KV of another node, or for a pull, reads nothing.

A read that fails or is late pauses reads, a write that fails pauses writes, for longer and longer.
Writes begin with a look at what is there, at the start and after each pause. The folders of other
nodes are looked at now and then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

from common.ids import AttemptId
from engine.core.blocks.disk_jobs import (
    DiskFailure,
    DiskJob,
    DiskLook,
    DiskRead,
    DiskResult,
    DiskWrite,
)
from engine.core.scheduler import Scheduler
from engine.core.statistics import DiskEvent
from node.flow.attempts.attempt_table import NodeAttempt
from node.flow.messages import BeginDisk, DiskEnded, Effect
from node.flow.pause import Pause
from node.flow.pulls.pull_cost import PullCost

LOOK_S = 30.0
"""How often the folders of other nodes are looked at."""


class PrefixDisk:
    """The jobs of a disk, and the attempts that wait for one.

    `resume` is called with an attempt that need not wait any more. Without a `cost` there is no
    disk.
    """

    def __init__(
        self, scheduler: Scheduler, cost: PullCost | None, resume: Callable[[NodeAttempt], None]
    ) -> None:
        self._block_size = scheduler.limits.block_size
        self._prefixes = scheduler.disk_prefixes
        self._cost = cost
        self._resume = resume
        self._numbers = count(1)
        self._on_end: dict[int, Callable[[DiskResult, float], None]] = {}
        self._waiting: dict[AttemptId, tuple[NodeAttempt, set[DiskRead], float, int]] = {}
        """Attempts, the reads that each waits for, until when, and how many blocks those bring."""
        self._late: set[DiskRead] = set()
        """Reads that somebody stopped waiting for. Until they end nothing else is read."""
        self._reads, self._writes = Pause(), Pause()
        self._is_looking = False
        self._look_at_s = 0.0

    def __len__(self) -> int:
        """Return how many attempts wait."""
        return len(self._waiting)

    def __contains__(self, attempt_id: AttemptId) -> bool:
        return attempt_id in self._waiting

    def begin(self, attempt: NodeAttempt, now_s: float) -> list[Effect]:
        """Begin to read what a new attempt lacks, which then waits, where that is worth it."""
        sequence = attempt.sequence
        if self._cost is None or sequence.has_remote_kv:
            return []
        found = self._prefixes.find(sequence)
        if found is None:
            return []
        num_tokens = found.num_blocks * self._block_size
        is_left_alone = self._late or self._reads.is_on(now_s)
        if is_left_alone or not self._cost.is_worth(num_tokens):
            self._prefixes.count(DiskEvent.DECLINED, found.num_blocks)
            return []
        effects: list[Effect] = []
        reads = set(found.awaited)
        if found.hashes:
            read = self._prefixes.begin_read(found.hashes)
            reads.add(read)
            effects.append(self._begin(read, partial(self._on_read, read, now_s)))
        until_s = now_s + self._cost.compute_s(num_tokens)
        self._waiting[attempt.id] = attempt, reads, until_s, found.num_blocks
        return effects

    def forget(self, attempt_id: AttemptId) -> bool:
        """Let an attempt wait no more, because it is over; return whether it did."""
        return self._waiting.pop(attempt_id, None) is not None

    def write(self) -> list[Effect]:
        """Begin to write what host memory would evict next, when a step was planned."""
        write = self._prefixes.begin_write()
        return [] if write is None else [self._begin(write, partial(self._on_written, write))]

    def on_ended(self, message: DiskEnded, now_s: float) -> None:
        """Take the end of a job."""
        self._on_end.pop(message.number)(message.result, now_s)

    def on_time(self, now_s: float) -> list[Effect]:
        """Queue attempts that waited for as long as computing takes; look at the folders."""
        for attempt_id, (attempt, reads, until_s, num_blocks) in list(self._waiting.items()):
            if until_s <= now_s:
                del self._waiting[attempt_id]
                self._prefixes.count(DiskEvent.LATE, num_blocks)
                if not self._late:
                    self._reads.on_failed(now_s)
                self._late |= reads
                self._resume(attempt)
        if self._cost is None or self._is_looking or now_s < self._look_at_s:
            return []
        self._is_looking = True
        is_all = not self._prefixes.may_write and not self._writes.is_on(now_s)
        return [self._begin(DiskLook(is_all), partial(self._on_look, is_all))]

    def next_due_s(self) -> float | None:
        """Return when `on_time` must be called next; None: nothing is due."""
        due_s = [until_s for _, _, until_s, _ in self._waiting.values()]
        if self._cost is not None and not self._is_looking:
            due_s.append(self._look_at_s)
        return min(due_s, default=None)

    # --- inside -----------------------------------------------------------------------------------

    def _begin(self, job: DiskJob, on_end: Callable[[DiskResult, float], None]) -> Effect:
        number = next(self._numbers)
        self._on_end[number] = on_end
        return BeginDisk(number, job)

    def _on_read(self, read: DiskRead, began_at_s: float, result: DiskResult, now_s: float) -> None:
        self._prefixes.end_read(read, result)
        is_late = read in self._late
        self._late.discard(read)
        if result.failure in (DiskFailure.ERROR, DiskFailure.CORRUPT):
            self._reads.on_failed(now_s)
        elif not is_late and result.failure is None:
            self._reads.on_good()
        if result.num_done and self._cost is not None:
            self._cost.on_pulled(result.num_done * self._block_size, now_s - began_at_s)
        for attempt_id, (attempt, reads, _, _) in list(self._waiting.items()):
            reads.discard(read)
            if not reads:
                del self._waiting[attempt_id]
                self._resume(attempt)

    def _on_written(self, write: DiskWrite, result: DiskResult, now_s: float) -> None:
        self._prefixes.end_write(write, result)
        if result.failure is not None:
            self._pause_writes(now_s)
        else:
            self._writes.on_good()

    def _on_look(self, is_all: bool, result: DiskResult, now_s: float) -> None:
        self._is_looking = False
        self._look_at_s = now_s + LOOK_S
        self._prefixes.end_look(result, is_all=is_all)
        if result.failure is not None:
            self._pause_writes(now_s)

    def _pause_writes(self, now_s: float) -> None:
        self._writes.on_failed(now_s)
        if not self._is_looking:
            self._look_at_s = min(self._look_at_s, self._writes.until_s)
