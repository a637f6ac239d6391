"""Prefixes that a node reads from disk instead of computing them, and writes there. Pure.

A prompt that is computed here waits for a read before it is queued, where the read should be
quicker than computing (the rule and the constants of a pull, `pulls.pull_cost`), and for no longer
than computing takes: then it is queued as it is, and the read lands for those who come later. What
is read is not pulled: a prompt may wait for both. One whose KV another node sends reads nothing.
What another node pulls out of this one is read by the same rule (`pulls.prefix_sends`).

A read that fails or is late pauses reads, a write that fails pauses writes, for longer and longer.
Writes begin with a look at what is there, at the start and after each pause. The folders of other
nodes are looked at now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from common.ids import AttemptId
from common.kv.blocks import BlockHash
from engine.core.blocks.disk_jobs import (
    DiskFailure,
    DiskJob,
    DiskLook,
    DiskRead,
    DiskResult,
    DiskWrite,
)
from engine.core.disk_prefixes import OnDisk
from engine.core.scheduler import Scheduler
from engine.core.statistics import DiskEvent
from node.flow.attempts.attempt_table import NodeAttempt
from node.flow.messages import BeginDisk, DiskEnded, Effect
from node.flow.pause import Pause
from node.flow.pulls.pull_cost import PullCost

LOOK_S = 30.0
"""How often the folders of other nodes are looked at."""

Waiter = AttemptId | int
"""An attempt of this node, or by its lease token the pull of another one."""


@dataclass(frozen=True, slots=True)
class _Wait:
    reads: set[DiskRead]
    until_s: float
    num_blocks: int
    """How many blocks the reads bring."""
    go_on: Callable[[], list[Effect]]


class PrefixDisk:
    """The jobs of a disk, and what waits for one: attempts, and pulls of other nodes.

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
        self._on_end: dict[int, Callable[[DiskResult, float], list[Effect]]] = {}
        self._waiting: dict[Waiter, _Wait] = {}
        self._late: set[DiskRead] = set()
        """Reads that somebody stopped waiting for. Until they end nothing else is read."""
        self._reads, self._writes = Pause(), Pause()
        self._is_looking = False
        self._look_at_s = 0.0

    def __contains__(self, waiter: Waiter) -> bool:
        return waiter in self._waiting

    def begin(self, attempt: NodeAttempt, now_s: float) -> list[Effect]:
        """Begin to read what a new attempt lacks, which then waits, where that is worth it."""
        sequence = attempt.sequence
        if self._cost is None or sequence.has_remote_kv:
            return []
        found = self._prefixes.find(sequence)
        if found is None or not self._is_worth(found, self._cost, now_s):
            return []
        sequence.sought_on_disk = found.sought
        return self._wait(attempt.id, found, partial(self._go_on, attempt), self._cost, now_s)

    def find_for_pull(
        self, block_hashes: Sequence[BlockHash], now_s: float, *, may_be_short: bool
    ) -> OnDisk | None:
        """Return what is to be read of these blocks for a pull.

        None: nothing is, or reading it is not worth it; or not all of the blocks are in a tier and
        can be read now, and the pull may not be short.
        """
        found = None if self._cost is None else self._prefixes.find_blocks(block_hashes)
        if self._cost is None or found is None:
            return None
        is_enough = may_be_short or found.num_blocks == len(block_hashes)
        return found if is_enough and self._is_worth(found, self._cost, now_s) else None

    def read_for_pull(
        self, lease_token: int, found: OnDisk, now_s: float, go_on: Callable[[], list[Effect]]
    ) -> list[Effect]:
        """Begin to read that; `go_on` is called when it has come or does not, unless `forget`."""
        assert self._cost is not None, "there is no disk"
        return self._wait(lease_token, found, go_on, self._cost, now_s)

    def forget(self, waiter: Waiter) -> bool:
        """Remove an attempt or a pull that is over from the waiters; return whether it was one."""
        return self._waiting.pop(waiter, None) is not None

    def write(self) -> list[Effect]:
        """Begin to write what host memory would evict next, when a step was planned."""
        write = self._prefixes.begin_write()
        return [] if write is None else [self._begin(write, partial(self._on_written, write))]

    def on_ended(self, message: DiskEnded, now_s: float) -> list[Effect]:
        """Take the end of a job."""
        return self._on_end.pop(message.number)(message.result, now_s)

    def on_time(self, now_s: float) -> list[Effect]:
        """Release the waiters that waited as long as computing takes, and look at the folders."""
        effects: list[Effect] = []
        if self._cost is None:
            return effects  # there is no disk
        for waiter, wait in list(self._waiting.items()):
            if wait.until_s <= now_s:
                del self._waiting[waiter]
                self._prefixes.count(DiskEvent.LATE, wait.num_blocks)
                if not self._late:
                    self._reads.on_failed(now_s)
                self._late |= wait.reads
                effects += wait.go_on()
        if self._is_looking or now_s < self._look_at_s:
            return effects
        self._is_looking = True
        is_all = not self._prefixes.may_write and not self._writes.is_on(now_s)
        return [*effects, self._begin(DiskLook(is_all), partial(self._on_look, is_all))]

    def next_due_s(self) -> float | None:
        """Return when `on_time` must be called next; None: nothing is due."""
        if self._cost is None:
            return None
        due_s = [wait.until_s for wait in self._waiting.values()]
        if not self._is_looking:
            due_s.append(self._look_at_s)
        return min(due_s, default=None)

    # --- inside -----------------------------------------------------------------------------------

    def _is_worth(self, found: OnDisk, cost: PullCost, now_s: float) -> bool:
        is_left_alone = self._late or self._reads.is_on(now_s)
        if is_left_alone or not cost.is_worth(self._num_tokens(found)):
            self._prefixes.count(DiskEvent.DECLINED, len(found.sought))
            return False
        return True

    def _wait(
        self,
        waiter: Waiter,
        found: OnDisk,
        go_on: Callable[[], list[Effect]],
        cost: PullCost,
        now_s: float,
    ) -> list[Effect]:
        effects: list[Effect] = []
        reads = set(found.awaited)
        if found.hashes:
            read = self._prefixes.begin_read(found.hashes)
            reads.add(read)
            effects.append(self._begin(read, partial(self._on_read, read, now_s)))
        until_s = now_s + cost.compute_s(self._num_tokens(found))
        self._waiting[waiter] = _Wait(reads, until_s, len(found.sought), go_on)
        return effects

    def _num_tokens(self, found: OnDisk) -> int:
        return len(found.sought) * self._block_size

    def _go_on(self, attempt: NodeAttempt) -> list[Effect]:
        self._resume(attempt)
        return []

    def _begin(self, job: DiskJob, on_end: Callable[[DiskResult, float], list[Effect]]) -> Effect:
        number = next(self._numbers)
        self._on_end[number] = on_end
        return BeginDisk(number, job)

    def _on_read(
        self, read: DiskRead, began_at_s: float, result: DiskResult, now_s: float
    ) -> list[Effect]:
        self._prefixes.end_read(read, result)
        is_late = read in self._late
        self._late.discard(read)
        if result.failure in (DiskFailure.ERROR, DiskFailure.CORRUPT):
            self._reads.on_failed(now_s)
        elif not is_late and result.failure is None:
            self._reads.on_good()
        if result.num_done and self._cost is not None:
            self._cost.on_pulled(result.num_done * self._block_size, began_at_s, now_s)
        effects: list[Effect] = []
        for waiter, wait in list(self._waiting.items()):
            wait.reads.discard(read)
            if not wait.reads:
                del self._waiting[waiter]
                effects += wait.go_on()
        return effects

    def _on_written(self, write: DiskWrite, result: DiskResult, now_s: float) -> list[Effect]:
        self._prefixes.end_write(write, result)
        if result.failure is not None:
            self._pause_writes(now_s)
        else:
            self._writes.on_good()
        return []

    def _on_look(self, is_all: bool, result: DiskResult, now_s: float) -> list[Effect]:
        self._is_looking = False
        self._look_at_s = now_s + LOOK_S
        self._prefixes.end_look(result, is_all=is_all)
        if result.failure is not None:
            self._pause_writes(now_s)
        return []

    def _pause_writes(self, now_s: float) -> None:
        self._writes.on_failed(now_s)
        if not self._is_looking:
            self._look_at_s = min(self._look_at_s, self._writes.until_s)
