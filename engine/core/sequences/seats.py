"""The seated sequences as arrays, one row per seat, changed in place: what every step reads.

The tokens and the block table of a seated sequence are here alone, with their counts and with how
far the tokens are computed. Its `Sequence` reads them here, and takes them along when it leaves.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from common.request import SamplingParams
from engine.core.policies.growth import GrowthColumns, Lacking

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
NOT_ASKED = -1
"""The number of log probabilities per token where none are asked for."""

SAMPLING_COLUMNS = np.dtype(
    [
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition_penalty", np.float64),
        ("presence_penalty", np.float64),
        ("frequency_penalty", np.float64),
        ("seed", np.uint64),
        ("num_logprobs", np.int64),
        ("min_tokens", np.int64),
        ("has_penalties", np.int64),
    ]
)
"""One row of sampling parameters. `num_logprobs` can be `NOT_ASKED`."""
_NOT_LOGPROBS = [name for name in SAMPLING_COLUMNS.names or () if name != "num_logprobs"]
_of_params = attrgetter(*_NOT_LOGPROBS)
"""Columns that `SamplingParams` has under the same names."""
_LOGPROBS_INDEX = (SAMPLING_COLUMNS.names or ()).index("num_logprobs")


class Seats:
    """Rows of `num_seats` seats. The row of an empty seat has zeros in all counts.

    A row of `block_tables` has zeros after the blocks that are held.

    Drafts stand after the known tokens of `token_ids` while a step verifies them. Memory of a row
    is touched as far as its sequence reaches, never `max_len` tokens at once.
    """

    def __init__(self, num_seats: int, max_len: int, max_blocks: int) -> None:
        # One column more, so that the column after the last token can be read for every token.
        self.token_ids = np.zeros((num_seats, max_len + 1), np.int32)
        self.block_tables = np.zeros((num_seats, max_blocks), np.int32)
        self.num_prompt: Ints = np.zeros(num_seats, np.int64)
        self.num_known: Ints = np.zeros(num_seats, np.int64)
        self.num_computed: Ints = np.zeros(num_seats, np.int64)
        self.num_blocks: Ints = np.zeros(num_seats, np.int64)
        self.max_new_tokens: Ints = np.zeros(num_seats, np.int64)
        self.sampling = np.zeros(num_seats, SAMPLING_COLUMNS)
        self.has_grammar: Bools = np.zeros(num_seats, np.bool_)
        self.has_rules: Bools = np.zeros(num_seats, np.bool_)
        self.may_end_thinking: Ints = np.zeros((num_seats, 2), np.int64)
        """The first index of an output at which its thinking may be ended, and the one after the
        last; equal ones where it is not."""
        self.num_prompt_logprobs: Ints = np.full(num_seats, NOT_ASKED, np.int64)
        self.params: list[SamplingParams | None] = [None] * num_seats
        self._free = list(range(num_seats - 1, -1, -1))

    def take(
        self,
        prompt_words: array[int],
        output_token_ids: Items[int],
        max_new_tokens: int,
        params: SamplingParams,
    ) -> int:
        """Return a free seat, now with these tokens, of which none is computed, and no blocks."""
        seat = self._free.pop()
        num_prompt = len(prompt_words)
        self.token_ids[seat, :num_prompt] = np.frombuffer(prompt_words, np.uint32)
        self.num_prompt[seat] = self.num_known[seat] = num_prompt
        if output_token_ids:
            self.append(seat, output_token_ids)
        self.max_new_tokens[seat] = max_new_tokens
        self.set_params(seat, params)
        return seat

    def set_params(self, seat: int, params: SamplingParams) -> None:
        """Write the sampling parameters of a seat."""
        self.params[seat] = params
        num_logprobs = NOT_ASKED if params.logprobs is None else params.logprobs
        values, index = _of_params(params), _LOGPROBS_INDEX
        self.sampling[seat] = (*values[:index], num_logprobs, *values[index:])
        self.has_grammar[seat] = has_grammar = params.grammar is not None
        self.has_rules[seat] = params.rules.are_everywhere
        budget = params.rules.thinking
        indices = range(0) if budget is None else budget.indices(has_grammar=has_grammar)
        self.may_end_thinking[seat] = indices.start, indices.stop
        asked = params.prompt_logprobs
        self.num_prompt_logprobs[seat] = NOT_ASKED if asked is None else asked

    def have_rules_at(self, seats: Ints, output_indices: Ints) -> Bools:
        """Return which draws, by their seats and their indices in the output, are under rules about
        single tokens."""
        bounds = self.may_end_thinking[seats]
        may_end = (bounds[:, 0] <= output_indices) & (output_indices < bounds[:, 1])
        found: Bools = self.has_rules[seats] | may_end
        return found

    def leave(self, seat: int) -> None:
        """Empty a seat."""
        self.block_tables[seat, : self.num_blocks[seat]] = 0
        for column in (
            self.num_prompt, self.num_known, self.num_computed, self.num_blocks,
            self.max_new_tokens,
        ):  # fmt: skip
            column[seat] = 0
        self.params[seat] = None
        self.has_grammar[seat] = self.has_rules[seat] = False
        self.may_end_thinking[seat] = 0
        self.num_prompt_logprobs[seat] = NOT_ASKED
        self._free.append(seat)

    def add_blocks(self, seat: int, block_ids: Items[int]) -> None:
        """Append `block_ids` to the block table of a seat."""
        if not block_ids:
            return
        held = self.num_blocks.item(seat)
        self.block_tables[seat, held : held + len(block_ids)] = block_ids
        self.num_blocks[seat] = held + len(block_ids)

    def write_drafts(self, seat: int, token_ids: Items[int]) -> None:
        """Write drafts after the known tokens of a seat."""
        known = self.num_known.item(seat)
        self.token_ids[seat, known : known + len(token_ids)] = token_ids

    def append(self, seat: int, token_ids: Items[int]) -> None:
        """Append known tokens to those of a seat."""
        self.write_drafts(seat, token_ids)
        self.num_known[seat] += len(token_ids)

    def append_one_each(self, rows: Ints, known: Ints, token_ids: Ints) -> None:
        """Append one token to each of these seats, whose `known` tokens are all computed now."""
        self.token_ids[rows, known] = token_ids
        self.num_known[rows] = known + 1
        self.num_computed[rows] = known

    def append_several_each(self, rows: Ints, known: Ints, token_ids: Ints) -> None:
        """Append tokens `[rows, several]`, of which all but the last of each are computed too."""
        several = token_ids.shape[1]
        for row, begin, of_row in zip(rows.tolist(), known.tolist(), token_ids, strict=True):
            self.token_ids[row, begin : begin + several] = of_row
        self.num_known[rows] = now_known = known + several
        self.num_computed[rows] = now_known - 1

    def lacking(self, rows: Ints, num_known: Ints, block_size: int) -> list[Lacking]:
        """Return which of these seats need more blocks for so many tokens, by their index, and how
        many; most need none."""
        num_blocks = self.num_blocks.take(rows)
        short = (num_known > num_blocks * block_size).nonzero()[0]
        return [
            (index, -(-num_known.item(index) // block_size) - num_blocks.item(index))
            for index in short.tolist()
        ]

    def growth(self) -> GrowthColumns:
        """Return what a reservation reads of every seat, as copies; empty seats need nothing."""
        return GrowthColumns(
            num_known=self.num_known.copy(),
            num_output=self.num_known - self.num_prompt,
            max_new_tokens=self.max_new_tokens.copy(),
            num_held_blocks=self.num_blocks.copy(),
        )

    def check(self, taken: Items[int]) -> None:
        """Raise `AssertionError` unless these seats are taken, and the others hold nothing."""
        assert sorted([*taken, *self._free]) == list(range(len(self.num_known))), (
            "a seat is lost or taken twice"
        )
        num_blocks, num_known = self.num_blocks.tolist(), self.num_known.tolist()
        for counts in (num_blocks, num_known):
            held = map(counts.__getitem__, self._free)
            assert not any(held), "an empty seat holds blocks"
        is_behind = np.arange(self.block_tables.shape[1]) >= self.num_blocks[:, None]
        assert not np.count_nonzero(self.block_tables[is_behind]), (
            "a block behind those that are held"
        )
