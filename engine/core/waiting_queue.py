"""Sequences without a seat, in the order in which they are to get one."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Set

from engine.core.sequence import Sequence


class WaitingQueue(Collection[Sequence]):
    """By priority, if it counts, then by arrival.

    A preempted sequence keeps its place by arrival, or goes behind all who have arrived so far if
    `requeues_at_tail`.
    """

    def __init__(self, *, has_priorities: bool, requeues_at_tail: bool) -> None:
        self._sequences: list[Sequence] = []
        self._has_priorities = has_priorities
        self._requeues_at_tail = requeues_at_tail
        self._latest_arrival = 0
        self._num_requeued = 0
        self.num_tokens = 0
        """Known tokens of all who wait."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __contains__(self, sequence: object) -> bool:
        if not isinstance(sequence, Sequence):
            return False
        index = bisect_left(self._sequences, sequence.queue_key, key=_queue_key)
        return index < len(self._sequences) and self._sequences[index] is sequence

    def join(self, sequence: Sequence) -> None:
        """A new sequence, in line by its arrival."""
        self._latest_arrival = max(self._latest_arrival, sequence.arrival)
        self._insert(sequence, sequence.arrival, 0)

    def rejoin(self, sequence: Sequence) -> None:
        """A preempted sequence."""
        if self._requeues_at_tail:
            self._num_requeued += 1
            self._insert(sequence, self._latest_arrival, self._num_requeued)
        else:
            self._insert(sequence, sequence.arrival, 0)

    def leave(self, sequence: Sequence) -> None:
        """An end while waiting."""
        index = bisect_left(self._sequences, sequence.queue_key, key=_queue_key)
        if self._sequences[index] is not sequence:
            raise ValueError(f"sequence {sequence.sequence_id} does not wait")
        del self._sequences[index]
        self.num_tokens -= sequence.num_known

    def take(self, sequence_ids: Set[int]) -> dict[int, Sequence]:
        """Remove those who get a seat, by id; they are at the front but for a few before them."""
        taken: dict[int, Sequence] = {}
        passed: list[Sequence] = []
        num_seen = 0
        while len(taken) < len(sequence_ids):
            sequence = self._sequences[num_seen]
            num_seen += 1
            if sequence.sequence_id in sequence_ids:
                taken[sequence.sequence_id] = sequence
                self.num_tokens -= sequence.num_known
            else:
                passed.append(sequence)
        self._sequences[:num_seen] = passed
        return taken

    def _insert(self, sequence: Sequence, place: int, behind: int) -> None:
        priority = sequence.priority if self._has_priorities else 0
        sequence.queue_key = (-priority, place, behind)
        insort(self._sequences, sequence, key=_queue_key)
        self.num_tokens += sequence.num_known


def _queue_key(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.queue_key
