"""The fast path of a step: decodes that draw one token and go on, as nearly all entries do.

Hundreds of them are written with a few array operations, and their outputs are made one by one when
the first of them is read: by then the next step may run. Which entries are plain is decided here
alone, and `StepResults` writes every other one by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from itertools import compress, repeat
from typing import cast, overload

import numpy as np

from engine.core.runner_contract import DrawnTokens
from engine.core.sequences.seats import Bools, Ints, Seats
from engine.core.sequences.sequence import Sequence
from engine.core.step.step_in_flight import PlannedStep, StepOutput

_OTHER = -1
"""Token of an entry that drew none or several, or one that ends its sequence."""


class PlainDecodes:
    """The entries of a step that decode, draw one token and do not end, before they are written.

    `is_plain` says which ones they are; `num_known` has the known tokens of all entries. Both do
    not change when something is written.
    """

    def __init__(self, step: PlannedStep, results: Items[DrawnTokens | None], seats: Seats) -> None:
        rows = step.batch.rows
        self.num_known = seats.num_known.take(rows)
        first_indices = self.num_known - seats.num_prompt.take(rows)
        token_ids = np.array(_single_tokens(step.sequences, results), np.int64)
        self.is_plain: Bools = first_indices + 1 < seats.max_new_tokens.take(rows)
        self.is_plain &= step.batch.is_decode
        self.is_plain &= token_ids != _OTHER
        self._columns: Items[Ints] = (rows, self.num_known, token_ids)
        self._first_indices = first_indices
        self._sequences: Items[Sequence] = step.sequences
        self._drawn = cast(Items[DrawnTokens], results)
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
        seats.append_one_each(*self._columns)
        if has_drafts:
            for sequence, drawn in zip(self._sequences, self._drawn, strict=True):
                sequence.take_drafts(drawn)

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


def _single_tokens(sequences: Items[Sequence], results: Items[DrawnTokens | None]) -> list[int]:
    """Return the token of each sequence that drew a single one that does not end it."""
    return [
        drawn.token_ids[0]
        if drawn is not None
        and len(drawn.token_ids) == 1
        and drawn.token_ids[0] not in sequence.end_token_ids
        else _OTHER
        for sequence, drawn in zip(sequences, results, strict=True)
    ]
