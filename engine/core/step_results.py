"""What a step computed and drew, written into its sequences and their seats."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from common.request import FinishReason
from engine.core.plan import DrawnTokens
from engine.core.planned_step import PlannedStep, StepOutput
from engine.core.prefix_index import PrefixIndex
from engine.core.seats import Seats
from engine.core.sequence import Sequence
from engine.core.speculation.speculation import Speculation
from engine.core.statistics import StepCounters
from engine.core.status import SequenceStatus
from engine.core.step_plan import Limits
from engine.core.stop_rules import until_end

OnEnd = Callable[[Sequence, FinishReason | None], None]
"""Ends a sequence by what it drew: with a reason, or without one when another node continues it."""


class StepResults:
    """Writes results for the scheduler, which alone owns what is written."""

    def __init__(
        self,
        seats: Seats,
        prefixes: PrefixIndex,
        limits: Limits,
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

    def apply(self, step: PlannedStep, results: Items[DrawnTokens | None]) -> list[StepOutput]:
        """Write the results of a step, one per sequence, None where nothing was drawn."""
        outputs: list[StepOutput] = []
        batch = step.batch
        if self._speculation is not None and step.took_s:
            num_proposals = int(batch.num_proposals.sum())
            self._speculation.observe(step.num_tokens, step.took_s, num_proposals)
        num_drafts = batch.num_drafts.tolist()
        seats: list[int] = []
        token_ids: list[int] = []
        for entry, (sequence, drawn) in enumerate(zip(step.sequences, results, strict=True)):
            if drawn is None:
                sequence.num_computed += int(batch.num_tokens[entry])
                self._prefixes.publish(sequence)
                continue
            if self._goes_on(sequence, drawn):
                seats.append(sequence.seat)
                token_ids.append(drawn.token_ids[0])
                outputs.append(self._append_one(sequence, drawn))
                was_decoding = True
            else:
                was_decoding = sequence.is_decoding
                outputs.append(self.append(sequence, drawn))
            if self._speculation is not None and was_decoding:
                # With an end token among the drafts, accepted drafts behind it are not part of the
                # output.
                num_accepted = min(len(outputs[-1].token_ids), len(drawn.token_ids) - 1)
                self._learn(self._speculation, sequence, num_drafts[entry], num_accepted)
        if seats:
            self._seats.append_one_each(seats, token_ids)
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
        self._prefixes.publish(sequence)
        if reason is not None or sequence.is_exported:
            self._on_end(sequence, reason)
        elif sequence.status is SequenceStatus.RUNNING_PREFILL:
            sequence.move_to(SequenceStatus.RUNNING_DECODE)
        return StepOutput(sequence, first_index, kept, drawn.logprobs[: len(kept)], reason)

    def _goes_on(self, sequence: Sequence, drawn: DrawnTokens) -> bool:
        """Return whether a decoding sequence gets one token and does not end: the usual case."""
        return (
            len(drawn.token_ids) == 1
            and sequence.status is SequenceStatus.RUNNING_DECODE
            and drawn.token_ids[0] not in sequence.end_token_ids
            and sequence.num_known + 1 < sequence.num_prompt + sequence.max_new_tokens
        )

    def _append_one(self, sequence: Sequence, drawn: DrawnTokens) -> StepOutput:
        """Append one token to a sequence that goes on; its row in `seats` is written later."""
        num_known = sequence.num_known
        sequence.output_token_ids.append(drawn.token_ids[0])
        sequence.num_computed = num_known
        sequence.num_known = num_known + 1
        sequence.draft_token_ids = ()
        sequence.proposed_token_ids = drawn.draft_token_ids
        if num_known % self._limits.block_size == 0:
            self._prefixes.publish(sequence)
        first_index = num_known - sequence.num_prompt
        return StepOutput(sequence, first_index, drawn.token_ids, drawn.logprobs, None)

    def _learn(
        self, speculation: Speculation, sequence: Sequence, num_drafted: int, num_accepted: int
    ) -> None:
        if num_drafted:
            sequence.num_drafted += num_drafted
            sequence.num_accepted_drafts += num_accepted
            self._counters.on_verified(num_drafted, num_accepted)
        sequence.acceptance = speculation.learn(sequence, num_drafted, num_accepted)
