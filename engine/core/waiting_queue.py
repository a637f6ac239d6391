"""Sequences without a seat, in the order in which they will be admitted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Set

from engine.core.sequence import Sequence


class WaitingQueue(Collection[Sequence]):
    """Waiting sequences, by priority if `has_priorities`, then by arrival.

    A preempted sequence keeps its position by arrival, or with `requeues_at_tail` goes behind all
    that have arrived so far.
    """

    def __init__(self, *, has_priorities: bool, requeues_at_tail: bool) -> None:
        self._sequences: list[Sequence] = []
        self._has_priorities = has_priorities
        self._requeues_at_tail = requeues_at_tail
        self._latest_arrival = 0
        self._num_requeued = 0
        self.num_tokens = 0
        """Known tokens of all waiting sequences."""

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
        """Insert a new sequence by its arrival."""
        self._latest_arrival = max(self._latest_arrival, sequence.arrival)
        self._insert(sequence, sequence.arrival, 0)

    def rejoin(self, sequence: Sequence) -> None:
        """Insert a preempted sequence."""
        if self._requeues_at_tail:
            self._num_requeued += 1
            self._insert(sequence, self._latest_arrival, self._num_requeued)
        else:
            self._insert(sequence, sequence.arrival, 0)

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence that ended while it waited; `ValueError` if it does not wait."""
        index = bisect_left(self._sequences, sequence.queue_key, key=_queue_key)
        if self._sequences[index] is not sequence:
            raise ValueError(f"sequence {sequence.sequence_id} does not wait")
        del self._sequences[index]
        self.num_tokens -= sequence.num_known

    def take(self, sequence_ids: Set[int]) -> dict[int, Sequence]:
        """Remove the sequences that are admitted and return them by id.

        They are at the front, apart from a few bypassed ones.
        """
        taken: dict[int, Sequence] = {}
        bypassed: list[Sequence] = []
        num_seen = 0
        while len(taken) < len(sequence_ids):
            sequence = self._sequences[num_seen]
            num_seen += 1
            if sequence.sequence_id in sequence_ids:
                taken[sequence.sequence_id] = sequence
                self.num_tokens -= sequence.num_known
            else:
                bypassed.append(sequence)
        self._sequences[:num_seen] = bypassed
        return taken

    def _insert(self, sequence: Sequence, arrival: int, num_requeued: int) -> None:
        priority = sequence.priority if self._has_priorities else 0
        sequence.queue_key = (-priority, arrival, num_requeued)
        insort(self._sequences, sequence, key=_queue_key)
        self.num_tokens += sequence.num_known


def _queue_key(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.queue_key
