"""What a step computed and drew, written into its sequences and their seats."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import compress, repeat
from typing import cast

import numpy as np

from common.request import FinishReason
from engine.core.plan import DrawnTokens
from engine.core.planned_step import PlannedStep, StepOutput
from engine.core.prefix_index import PrefixIndex
from engine.core.running import Running
from engine.core.seats import Bools, Ints, Seats
from engine.core.sequence import Sequence
from engine.core.speculation.speculation import Speculation
from engine.core.statistics import StepCounters
from engine.core.status import SequenceStatus
from engine.core.step_batch import StepBatch
from engine.core.step_plan import Limits
from engine.core.stop_rules import until_end

OnEnd = Callable[[Sequence, FinishReason | None], None]
"""Ends a sequence by what it drew: with a reason, or without one when another node continues it."""


class StepResults:
    """Writes results for the scheduler, which alone owns what is written."""

    def __init__(
        self,
        running: Running,
        seats: Seats,
        prefixes: PrefixIndex,
        limits: Limits,
        counters: StepCounters,
        speculation: Speculation | None,
        *,
        on_end: OnEnd,
    ) -> None:
        self._running = running
        self._seats = seats
        self._prefixes = prefixes
        self._limits = limits
        self._counters = counters
        self._speculation = speculation
        self._on_end = on_end

    def apply(self, step: PlannedStep, results: Items[DrawnTokens | None]) -> list[StepOutput]:
        """Write the results of a step, one per sequence, None where nothing was drawn.

        Decodes that go on are written together first. What happens to any sequence beyond that
        (blocks are published, an output ends, a prompt ends) happens in the order of the batch.
        """
        self._observe(step)
        was_decoding = [s.is_decoding for s in step.sequences] if self._speculation else []
        known = self._seats.num_known[step.batch.rows]
        goes_on = self._goes_on(step.batch, results, known)
        outputs = self._append_one_each(step, results, known, goes_on)
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
                outputs.insert(entry - num_idle, self.append(sequence, drawn))
        if self._speculation is not None:
            self._learn(self._speculation, step, results, was_decoding, outputs)
        return outputs

    def append(self, sequence: Sequence, drawn: DrawnTokens) -> StepOutput:
        """Append what one sequence drew, up to the token that ends it."""
        first_index = sequence.num_output
        kept, reason = until_end(
            drawn.token_ids,
            num_prompt=sequence.num_prompt,
            num_known=sequence.num_known,
            max_tokens=sequence.request.sampling.max_tokens,
            end_token_ids=sequence.end_token_ids,
            max_model_len=self._limits.max_model_len,
        )
        sequence.append(kept)
        self._seats.append(sequence, kept)
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
        return StepOutput(sequence, first_index, kept, drawn.logprobs[: len(kept)], reason)

    def _observe(self, step: PlannedStep) -> None:
        if self._speculation is not None and step.took_s:
            num_proposals = int(step.batch.num_proposals.sum())
            self._speculation.observe(step.num_tokens, step.took_s, num_proposals)

    def _goes_on(self, batch: StepBatch, results: Items[DrawnTokens | None], known: Ints) -> Bools:
        """Return which sequences decode, get one token and do not end: the usual case.

        A token that ends any of the running sequences is left to `append` to judge.
        """
        last = self._seats.num_prompt[batch.rows] + self._seats.max_new_tokens[batch.rows] - 1
        ends = self._running.end_token_ids
        is_plain = [
            drawn is not None and len(drawn.token_ids) == 1 and drawn.token_ids[0] not in ends
            for drawn in results
        ]
        goes_on: Bools = batch.is_decode & (known < last) & np.array(is_plain, np.bool_)
        return goes_on

    def _append_one_each(
        self,
        step: PlannedStep,
        results: Items[DrawnTokens | None],
        known: Ints,
        goes_on: Bools,
    ) -> list[StepOutput]:
        """Append one token to each sequence that goes on, and return these outputs.

        Hundreds of sequences are written here in each step, without a call for each.
        """
        sequences, drawn = step.sequences, cast(Items[DrawnTokens], results)
        if not goes_on.all():
            chosen = goes_on.tolist()
            sequences, drawn = list(compress(sequences, chosen)), list(compress(drawn, chosen))
        token_ids = [one.token_ids for one in drawn]
        rows, known = step.batch.rows[goes_on], known[goes_on]
        firsts = (known - self._seats.num_prompt[rows]).tolist()
        for sequence, num_known, one in zip(sequences, known.tolist(), drawn, strict=True):
            sequence.output_token_ids.append(one.token_ids[0])
            sequence.num_computed = num_known
            sequence.num_known = num_known + 1
        if self._speculation is not None:
            for sequence, one in zip(sequences, drawn, strict=True):
                sequence.draft_token_ids = ()
                sequence.proposed_token_ids = one.draft_token_ids
                sequence.forced_token_ids = one.forced_token_ids
        self._seats.append_one_each(rows, known, [ids[0] for ids in token_ids])
        logprobs = [one.logprobs for one in drawn]
        return list(map(StepOutput, sequences, firsts, token_ids, logprobs, repeat(None)))

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
            # With an end token among the drafts, accepted drafts behind it are not part of the
            # output.
            num_drawn = len(cast(DrawnTokens, results[entry]).token_ids)
            num_accepted = min(len(output.token_ids), num_drawn - 1)
            if num_drafted:
                sequence.num_drafted += num_drafted
                sequence.num_accepted_drafts += num_accepted
                self._counters.on_verified(num_drafted, num_accepted)
            sequence.acceptance = speculation.learn(sequence, num_drafted, num_accepted)
