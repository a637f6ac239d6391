"""The fast path of a step: decodes that draw one token and go on, as nearly all entries do.

A step that was run several times at once draws one token each time. Hundreds of them are written
with a few array operations, and their outputs are made one by one when the first of them is read:
by then the next step may run. Which entries are plain is decided here alone, and `StepResults`
writes every other one by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from itertools import compress, repeat
from typing import cast, overload

import numpy as np

from engine.core.runner_contract import DrawnTokens, RunnerResult
from engine.core.sequences.seats import Bools, Ints, Seats
from engine.core.sequences.sequence import Sequence
from engine.core.step.step_in_flight import PlannedStep, StepOutput

_OTHER = -1
"""Token of an entry that drew none or too many, or one that ends its sequence."""


class PlainDecodes:
    """The entries of a step that decode, draw a token each time and do not end, before they are
    written.

    `is_plain` says which ones they are; it does not change when something is written.
    """

    def __init__(self, step: PlannedStep, results: RunnerResult, seats: Seats) -> None:
        rows, num_steps = step.batch.rows, results.num_steps
        self._num_known, self._num_steps = seats.num_known.take(rows), num_steps
        first_indices = self._num_known - seats.num_prompt.take(rows)
        token_ids = np.array(_going_on(step.sequences, results, num_steps), np.int64)
        self.is_plain: Bools = first_indices + num_steps < seats.max_new_tokens.take(rows)
        self.is_plain &= step.batch.is_decode
        self.is_plain &= (token_ids if num_steps == 1 else token_ids[:, 0]) != _OTHER
        self._columns: Items[Ints] = (rows, self._num_known, token_ids)
        self._first_indices = first_indices
        self._sequences: Items[Sequence] = step.sequences
        self._drawn = cast("Items[DrawnTokens]", results)
        if not self.is_plain.all():
            chosen = self.is_plain.tolist()
            self._columns = [column[self.is_plain] for column in self._columns]
            self._first_indices = first_indices[self.is_plain]
            self._sequences = list(compress(step.sequences, chosen))
            self._drawn = list(compress(self._drawn, chosen))

    def __len__(self) -> int:
        return len(self._sequences)

    def write(self, seats: Seats, *, has_drafts: bool) -> None:
        """Append the tokens; `has_drafts`: the sequences may have had drafts, or get some."""
        if self._num_steps == 1:
            seats.append_one_each(*self._columns)
        else:
            seats.append_several_each(*self._columns)
        if has_drafts:
            for sequence, drawn in zip(self._sequences, self._drawn, strict=True):
                sequence.take_drafts(drawn)

    def has_filled(self, block_size: int) -> Bools:
        """Return for each entry whether a block is full of computed tokens, if it is plain.

        The KV of the last token that it draws does not exist yet.
        """
        num_computed = self._num_known + self._num_steps - 1
        filled: Bools = num_computed % block_size < self._num_steps
        return filled

    def outputs(self) -> list[StepOutput]:
        """Return an output for each of them."""
        return list(
            map(
                StepOutput,
                self._sequences,
                self._first_indices.tolist(),
                [one.token_ids for one in self._drawn],
                [one.logprobs for one in self._drawn],
                repeat(None),
            )
        )


class StepOutputs(Items[StepOutput]):
    """The outputs of a step, in the order of its batch.

    `others` are those of entries that are not plain, by their index among all, in order: prompts
    that have ended, ends, accepted drafts.
    """

    def __init__(self, plain: PlainDecodes, others: Mapping[int, StepOutput]) -> None:
        self.others = others
        self._plain = plain
        self._outputs: list[StepOutput] | None = None

    def __len__(self) -> int:
        return len(self._plain) + len(self.others)

    def __iter__(self) -> Iterator[StepOutput]:
        return iter(self._all())

    @overload
    def __getitem__(self, index: int) -> StepOutput: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepOutput]: ...
    def __getitem__(self, index: int | slice) -> StepOutput | list[StepOutput]:
        return self._all()[index]

    def _all(self) -> list[StepOutput]:
        if self._outputs is None:
            self._outputs = self._plain.outputs()
            for index, output in self.others.items():
                self._outputs.insert(index, output)
        return self._outputs


def _going_on(
    sequences: Items[Sequence], results: Items[DrawnTokens | None], num_steps: int
) -> list[int] | list[tuple[int, ...]]:
    """Return the token of each sequence that drew a single one that does not end it, or its tokens,
    where it drew one in each of several steps."""
    if num_steps > 1:
        none = (_OTHER,) * num_steps
        return [
            drawn.token_ids
            if drawn is not None
            and len(drawn.token_ids) == num_steps
            and sequence.end_token_ids.isdisjoint(drawn.token_ids)
            else none
            for sequence, drawn in zip(sequences, results, strict=True)
        ]
    return [
        drawn.token_ids[0]
        if drawn is not None
        and len(drawn.token_ids) == 1
        and drawn.token_ids[0] not in sequence.end_token_ids
        else _OTHER
        for sequence, drawn in zip(sequences, results, strict=True)
    ]
