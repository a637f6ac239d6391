"""What a step computed and drew, written into its sequences and their seats."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import compress
from typing import TypeVar, cast

import numpy as np

from common.request import FinishReason
from engine.core.planner_contract import StepLimits
from engine.core.runner_contract import DrawnTokens, RunnerResult
from engine.core.sequences.prefix_index import PrefixIndex
from engine.core.sequences.seats import Bools, Ints, Seats
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from engine.core.sequences.stop_rules import until_end
from engine.core.speculation.speculation import Speculation
from engine.core.statistics import StepCounters
from engine.core.step.prompt_rows import take_prompt_logprobs
from engine.core.step.step_batch import StepBatch
from engine.core.step.step_in_flight import PlannedStep, StepOutput, StepOutputs

OnEnd = Callable[[Sequence, FinishReason | None], None]
"""Ends a sequence by what it drew: with a reason, or without one when another node continues it."""

T = TypeVar("T")
_NOT_PLAIN = -1
"""Token of a sequence that drew none or several, or one that ends it."""


class StepResults:
    """Writes results for the scheduler, which alone owns what is written."""

    def __init__(
        self,
        seats: Seats,
        prefixes: PrefixIndex,
        limits: StepLimits,
        counters: StepCounters,
        speculation: Speculation | None,
        *,
        on_end: OnEnd,
    ) -> None:
        self._seats = seats
        self._prefixes = prefixes
        self._limits = limits
        self._counters = counters
        self._speculation = speculation
        self._on_end = on_end

    # Two ways through one batch. Almost every sequence of almost every step decodes, draws one
    # token and goes on; hundreds of them are written with a few array operations
    # (`Seats.append_one_each`). Everything else has a path of its own, entry by entry:
    #
    #     drew nothing            a chunk of a prompt that is not complete: tokens are computed
    #     goes on, block full     its block gets a hash and becomes findable (`publish`)
    #     drew otherwise          several tokens, the first one, or the last one (`append`)
    #
    # `goes_on` divides the two. It is computed from the rows before anything is written, and so is
    # `known`; a block is full when the tokens known before this one are a multiple of the block
    # size, because the KV of the new token does not exist yet. Entries of the loop are ascending:
    # publishing and ends happen in the order of the batch, however the step was planned.
    #
    # Outputs are columns for the plain ones, and `others` by their index among the sequences that
    # drew at all, which is why entries that drew nothing are counted. `_learn` comes last: it
    # compares what was drafted with what was kept.
    def apply(self, step: PlannedStep, results: RunnerResult) -> StepOutputs:
        """Write the results of a step.

        Decodes that go on are written together first. What happens to any sequence beyond that
        (blocks are published, an output ends, a prompt ends) happens in the order of the batch.
        """
        self._observe(step, has_scored=bool(results.prompt_logprobs))
        for entry, found in results.prompt_logprobs.items():
            step.sequences[entry].prompt_logprobs.append(found)
        was_decoding = [s.is_decoding for s in step.sequences] if self._speculation else []
        rows = step.batch.rows
        known = self._seats.num_known.take(rows)
        num_output = known - self._seats.num_prompt.take(rows)
        token_ids = np.array(_plain_tokens(step.sequences, results), np.int64)
        goes_on = self._goes_on(step.batch, num_output, token_ids)
        chosen = None if goes_on.all() else goes_on
        sequences = _chosen(step.sequences, chosen)
        drawn_each = cast(Items[DrawnTokens], _chosen(results, chosen))
        self._seats.append_one_each(*_rows_of((rows, known, token_ids), chosen))
        if self._speculation is not None:
            for sequence, one in zip(sequences, drawn_each, strict=True):
                sequence.draft_token_ids = ()
                sequence.proposed_token_ids = one.draft_token_ids
                sequence.forced_token_ids = one.forced_token_ids
        others: dict[int, StepOutput] = {}
        is_block_full = known % self._limits.block_size == 0
        num_idle = 0
        for entry in np.flatnonzero(is_block_full | ~goes_on).tolist():
            sequence, drawn = step.sequences[entry], results[entry]
            if drawn is None:
                num_idle += 1
                sequence.num_computed += int(step.batch.num_tokens[entry])
                self._prefixes.publish(sequence)
            elif goes_on[entry]:
                self._prefixes.publish(sequence)
            else:
                others[entry - num_idle] = self.append(sequence, drawn)
        (first_indices,) = _rows_of((num_output,), chosen)
        outputs = StepOutputs(sequences, first_indices, drawn_each, others)
        if self._speculation is not None:
            self._learn(self._speculation, step, results, was_decoding, outputs)
        return outputs

    def append(self, sequence: Sequence, drawn: DrawnTokens) -> StepOutput:
        """Append what one sequence drew, up to the token that ends it."""
        first_index = sequence.num_output
        of_prompt = None if first_index else take_prompt_logprobs(sequence)
        kept, reason = until_end(
            drawn.token_ids,
            num_prompt=sequence.num_prompt,
            num_known=sequence.num_known,
            max_tokens=sequence.request.sampling.max_tokens,
            end_token_ids=sequence.end_token_ids,
            max_model_len=self._limits.max_model_len,
        )
        self._seats.append(sequence.seat, kept)
        # Every drawn token but the last was computed as a draft. KV of wrong drafts is discarded.
        sequence.num_computed = sequence.num_known - 1
        sequence.draft_token_ids = ()
        sequence.proposed_token_ids = drawn.draft_token_ids
        sequence.forced_token_ids = drawn.forced_token_ids
        self._prefixes.publish(sequence)
        if reason is not None or sequence.is_exported:
            self._on_end(sequence, reason)
        elif sequence.status is SequenceStatus.RUNNING_PREFILL:
            sequence.move_to(SequenceStatus.RUNNING_DECODE)
        logprobs = drawn.logprobs[: len(kept)]
        return StepOutput(sequence, first_index, kept, logprobs, reason, of_prompt)

    def _observe(self, step: PlannedStep, *, has_scored: bool) -> None:
        if has_scored:
            return  # the logits of a prompt take longer than its tokens explain
        if self._speculation is not None and step.took_s:
            num_proposals = int(step.batch.num_proposals.sum())
            self._speculation.observe(step.num_tokens, step.took_s, num_proposals)

    def _goes_on(self, batch: StepBatch, num_output: Ints, token_ids: Ints) -> Bools:
        """Return which sequences decode, get one token and do not end: the usual case."""
        goes_on: Bools = num_output + 1 < self._seats.max_new_tokens.take(batch.rows)
        goes_on &= batch.is_decode
        goes_on &= token_ids != _NOT_PLAIN
        return goes_on

    def _learn(
        self,
        speculation: Speculation,
        step: PlannedStep,
        results: Items[DrawnTokens | None],
        was_decoding: Items[bool],
        outputs: Items[StepOutput],
    ) -> None:
        """Learn from the drafts of every sequence that was decoding."""
        num_drafts = step.batch.num_drafts.tolist()
        drawing = [entry for entry, drawn in enumerate(results) if drawn is not None]
        for entry, output in zip(drawing, outputs, strict=True):
            if not was_decoding[entry]:
                continue
            sequence, num_drafted = step.sequences[entry], num_drafts[entry]
            # With an end token among the drafts, accepted drafts after it are not part of the
            # output.
            num_drawn = len(cast(DrawnTokens, results[entry]).token_ids)
            num_accepted = min(len(output.token_ids), num_drawn - 1)
            if num_drafted:
                sequence.num_drafted += num_drafted
                sequence.num_accepted_drafts += num_accepted
                self._counters.on_verified(num_drafted, num_accepted)
            sequence.acceptance = speculation.learn(sequence, num_drafted, num_accepted)


def _plain_tokens(sequences: Items[Sequence], results: Items[DrawnTokens | None]) -> list[int]:
    """Return the token of each sequence that drew a single one that does not end it."""
    return [
        drawn.token_ids[0]
        if drawn is not None
        and len(drawn.token_ids) == 1
        and drawn.token_ids[0] not in sequence.end_token_ids
        else _NOT_PLAIN
        for sequence, drawn in zip(sequences, results, strict=True)
    ]


def _chosen(items: Items[T], is_chosen: Bools | None) -> Items[T]:
    """Return the chosen ones, or all of them for None."""
    return items if is_chosen is None else list(compress(items, is_chosen.tolist()))


def _rows_of(columns: Items[Ints], is_chosen: Bools | None) -> Items[Ints]:
    """Return the chosen rows of each column, or all of them for None."""
    return columns if is_chosen is None else [column[is_chosen] for column in columns]
