"""What a step computed and drew, written into its sequences and their seats."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import cast

import numpy as np

from common.request import FinishReason
from engine.core.planner_contract import StepLimits
from engine.core.runner_contract import DrawnTokens, RunnerResult
from engine.core.sequences.prefix_index import PrefixIndex
from engine.core.sequences.seats import Seats
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from engine.core.sequences.stop_rules import until_end
from engine.core.speculation.speculation import Speculation
from engine.core.statistics import StepCounters
from engine.core.step.plain_decodes import PlainDecodes, StepOutputs
from engine.core.step.prompt_rows import take_prompt_logprobs
from engine.core.step.step_in_flight import PlannedStep, StepOutput

OnEnd = Callable[[Sequence, FinishReason | None], None]
"""Ends a sequence by what it drew: with a reason, or without one when another node continues it."""


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

    # Decodes that draw one token and go on are written together (`PlainDecodes`), every other entry
    # by itself:
    #
    #     drew nothing            a chunk of a prompt that is not complete: tokens are computed
    #     plain, block full       its block gets a hash and becomes findable (`publish`)
    #     drew otherwise          several tokens, the first one, or the last one (`append`)
    #
    # Entries of the loop are ascending: publishing and ends happen in the order of the batch,
    # however the step was planned.
    #
    # `others` are by their index among the sequences that drew at all, which is why entries that
    # drew nothing are counted. `_learn` comes last: it compares drafts with what was kept.
    def apply(self, step: PlannedStep, results: RunnerResult) -> StepOutputs:
        """Write the results of a step.

        Decodes that go on are written together first. What happens to any sequence beyond that
        (blocks are published, an output ends, a prompt ends) happens in the order of the batch.
        """
        self._counters.on_ran(step.took_s, has_prompts=not step.batch.is_decode.all())
        self._observe(step, has_scored=bool(results.prompt_logprobs))
        if results.num_steps > 1:
            self._counters.on_repeated(len(step.sequences), results.num_steps - 1)
        for entry, found in results.prompt_logprobs.items():
            step.sequences[entry].prompt_logprobs.append(found)
        was_decoding = [s.is_decoding for s in step.sequences] if self._speculation else []
        plain = PlainDecodes(step, results, self._seats)
        plain.write(self._seats, has_drafts=self._speculation is not None)
        others: dict[int, StepOutput] = {}
        is_block_full = plain.has_filled(self._limits.block_size)
        num_idle = 0
        for entry in np.flatnonzero(is_block_full | ~plain.is_plain).tolist():
            sequence, drawn = step.sequences[entry], results[entry]
            if drawn is None:
                num_idle += 1
                sequence.num_computed += int(step.batch.num_tokens[entry])
                self._prefixes.publish(sequence)
            elif plain.is_plain[entry]:
                self._prefixes.publish(sequence)
            else:
                others[entry - num_idle] = self.append(sequence, drawn)
        outputs = StepOutputs(plain, others)
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
        sequence.take_drafts(drawn)
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
