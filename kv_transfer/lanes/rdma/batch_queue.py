"""What is moved to or from one peer, in batches, of which two are under way, pure.

While one batch is waited for the next is on the wire already, so the wire does not idle. What is
queued meanwhile is gathered into the batch after that. An item, for example the header of a frame,
is told when everything queued before it is moved. The queue is bounded by the window of the
connection that fills it.

    put, tell_after ──► queue ──next_batch──► under way ──moved──► items are told ──told──► gone
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MAX_BATCHES_UNDER_WAY = 2
MAX_BATCH_RANGES = 1024
# Those under way, and as much again waiting for acknowledgement.
BATCHES_PER_WINDOW = 2 * MAX_BATCHES_UNDER_WAY

Part = TypeVar("Part")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class QueuedPart(Generic[Part]):
    """Ranges of memory that are moved by one batch."""

    part: Part
    num_ranges: int
    num_bytes: int


@dataclass(eq=False, slots=True)
class Batch(Generic[Part, Item]):
    """What is moved together, nothing if only items are told, and the items to tell afterwards."""

    parts: list[Part] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    num_ranges: int = 0
    num_bytes: int = 0

    def add(self, move: QueuedPart[Part]) -> None:
        self.parts.append(move.part)
        self.num_ranges += move.num_ranges
        self.num_bytes += move.num_bytes


class BatchQueue(Generic[Part, Item]):
    """The queue and the batches under way.

    A batch has at most `batch_bytes` and `MAX_BATCH_RANGES`, unless a single move has more.
    """

    def __init__(self, batch_bytes: int) -> None:
        self._batch_bytes = batch_bytes
        self._queue: deque[QueuedPart[Part] | tuple[Item]] = deque()
        self._under_way: deque[Batch[Part, Item]] = deque()
        self._is_telling = False
        self._is_ending = False
        self.is_stopped = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is queued."""
        return not self._queue

    @property
    def is_over(self) -> bool:
        """Whether nothing is queued, nor will be."""
        return not self._queue and (self.is_stopped or self._is_ending)

    @property
    def first(self) -> Batch[Part, Item] | None:
        """The batch under way that was begun first: the one to wait for."""
        return self._under_way[0] if self._under_way else None

    def put(self, move: QueuedPart[Part]) -> None:
        """Queue a move, unless no more are accepted."""
        if not (self.is_stopped or self._is_ending):
            self._queue.append(move)

    def tell_after(self, item: Item) -> bool:
        """Queue an item; return True, without queueing it, if it is to be told at once."""
        if self.is_stopped:
            return False
        if not (self._queue or self._under_way or self._is_telling):
            return True
        if not self._is_ending:
            self._queue.append((item,))
        return False

    def next_batch(self) -> Batch[Part, Item] | None:
        """Return a batch to begin now; None: nothing is queued, or enough is under way."""
        if not self._queue or len(self._under_way) >= MAX_BATCHES_UNDER_WAY:
            return None
        batch: Batch[Part, Item] = Batch()
        while self._queue:
            one = self._queue[0]
            if not isinstance(one, QueuedPart):
                batch.items.append(one[0])
            elif batch.parts and self._exceeds(batch, one):
                break
            else:
                batch.add(one)
            self._queue.popleft()
        self._under_way.append(batch)
        return batch

    def moved(self) -> list[Item]:
        """Record that `first` is moved; return its items, which are told until `told`.

        The next batch can be begun before they are.
        """
        self._is_telling = True
        return self._under_way.popleft().items

    def told(self) -> None:
        """Record that the items of `moved` were told."""
        self._is_telling = False

    def stop(self) -> None:
        """Forget what is queued, and accept nothing; batches under way continue."""
        self.is_stopped = True
        self._queue.clear()

    def end(self) -> None:
        """Accept nothing more; what is queued is moved."""
        self._is_ending = True

    def _exceeds(self, batch: Batch[Part, Item], move: QueuedPart[Part]) -> bool:
        is_too_much = batch.num_bytes + move.num_bytes > self._batch_bytes
        return is_too_much or batch.num_ranges + move.num_ranges > MAX_BATCH_RANGES
