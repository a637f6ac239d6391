"""Sequences without a seat, in the order in which they will be admitted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Set, Sized
from itertools import islice

from engine.core.sequences.sequence import Sequence

_FIRST = -(1 << 63)
"""Sorts before every priority."""


class WaitingQueue(Collection[Sequence]):
    """Waiting sequences, by priority if `has_priorities`, then by arrival.

    A preempted sequence keeps its position by arrival, or with `requeues_at_tail` goes behind all
    that have arrived so far. Priorities starve nobody: when the sequence that waits longest has
    been passed by `pass_limit` admissions, it goes to the front. Only one sequence at a time ages
    in this way, so a long queue of old sequences does not delay urgent ones either.
    """

    def __init__(
        self, *, has_priorities: bool, requeues_at_tail: bool, pass_limit: int = 16
    ) -> None:
        self._sequences: list[Sequence] = []
        self._by_arrival: list[Sequence] = []
        """The same sequences without regard to priorities; empty where those do not count."""
        self._pass_limit = pass_limit
        self._oldest: Sequence | None = None
        """The sequence that `_num_passes` counts for."""
        self._num_passes = 0
        self._has_priorities = has_priorities
        self._requeues_at_tail = requeues_at_tail
        self._latest_arrival = 0
        self._num_requeued = 0
        self.num_tokens = 0
        """Known tokens of all waiting sequences."""
        self.num_found_tokens = 0
        """The tokens of these that were cached when their sequences were queued."""
        self.num_taken = 0
        """How many were admitted."""
        self.num_taken_tokens = 0
        """Their known tokens."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __contains__(self, sequence: object) -> bool:
        if not isinstance(sequence, Sequence):
            return False
        index = bisect_left(self._sequences, sequence.queue_key, key=_queue_key)
        return index < len(self._sequences) and self._sequences[index] is sequence

    @property
    def num_missing_tokens(self) -> int:
        """The known tokens without those that were cached."""
        return self.num_tokens - self.num_found_tokens

    def ahead(self, priority: int) -> tuple[int, int]:
        """Return how many wait before a new sequence of this priority, and their known tokens."""
        if not self._has_priorities:
            return len(self._sequences), self.num_tokens
        ahead = [s.num_known for s in self._sequences if s.queue_key[0] <= -priority]
        return len(ahead), sum(ahead)

    def join(self, sequence: Sequence, num_found_tokens: int = 0) -> int:
        """Insert a new sequence by its arrival, and return how many it waits behind.

        So many of its tokens are cached now. One that was held for its grammar or for a prefix has
        arrived before some that wait already.
        """
        self._latest_arrival = max(self._latest_arrival, sequence.arrival)
        sequence.num_found_tokens = num_found_tokens
        return self._insert(sequence, sequence.arrival, 0)

    def rejoin(self, sequence: Sequence) -> None:
        """Insert a preempted sequence, for which room is made: what it had is not counted on."""
        sequence.num_found_tokens = 0
        if self._requeues_at_tail:
            self._num_requeued += 1
            self._insert(sequence, self._latest_arrival, self._num_requeued)
        else:
            self._insert(sequence, sequence.arrival, 0)

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence that ended while it waited; `ValueError` if it does not wait."""
        index = bisect_left(self._sequences, sequence.queue_key, key=_queue_key)
        if index == len(self._sequences) or self._sequences[index] is not sequence:
            raise ValueError(f"sequence {sequence.sequence_id} does not wait")
        del self._sequences[index]
        self._discount(sequence)
        if self._has_priorities:
            self._forget_arrival(sequence)

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
                self._discount(sequence)
                self.num_taken += 1
                self.num_taken_tokens += sequence.num_known
            else:
                bypassed.append(sequence)
        self._sequences[:num_seen] = bypassed
        if self._has_priorities:
            self._count_passes(taken.values())
        return taken

    def count_bypasses(self, bypassed: Mapping[int, Sized], num_looked_at: int) -> int:
        """Count admissions that passed one of the first sequences, by id; return the most of one.

        A plan looks at `num_looked_at` sequences that it does not admit.
        """
        highest = 0
        for sequence in islice(self._sequences, num_looked_at):
            sequence.num_bypassed += len(bypassed.get(sequence.sequence_id, ()))
            highest = max(highest, sequence.num_bypassed)
        return highest

    def _insert(self, sequence: Sequence, arrival: int, num_requeued: int) -> int:
        priority = sequence.priority if self._has_priorities else 0
        sequence.queue_key = (-priority, arrival, num_requeued)
        position = bisect_left(self._sequences, sequence.queue_key, key=_queue_key)
        self._sequences.insert(position, sequence)
        self.num_tokens += sequence.num_known
        self.num_found_tokens += sequence.num_found_tokens
        if self._has_priorities:
            insort(self._by_arrival, sequence, key=_arrival_key)
        return position

    def _discount(self, sequence: Sequence) -> None:
        self.num_tokens -= sequence.num_known
        self.num_found_tokens -= sequence.num_found_tokens

    def _count_passes(self, taken: Iterable[Sequence]) -> None:
        """Count the admissions that passed the oldest sequence; at the limit, move it forward."""
        for sequence in taken:
            self._forget_arrival(sequence)
        oldest = self._by_arrival[0] if self._by_arrival else None
        if oldest is not self._oldest:
            self._oldest, self._num_passes = oldest, 0
        if oldest is None:
            return
        self._num_passes += sum(_arrival_key(one) > _arrival_key(oldest) for one in taken)
        if self._num_passes >= self._pass_limit and oldest.queue_key[0] != _FIRST:
            del self._sequences[bisect_left(self._sequences, oldest.queue_key, key=_queue_key)]
            oldest.queue_key = (_FIRST, *_arrival_key(oldest))
            insort(self._sequences, oldest, key=_queue_key)

    def _forget_arrival(self, sequence: Sequence) -> None:
        del self._by_arrival[
            bisect_left(self._by_arrival, _arrival_key(sequence), key=_arrival_key)
        ]


def _queue_key(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.queue_key


def _arrival_key(sequence: Sequence) -> tuple[int, int]:
    return sequence.queue_key[1:]
