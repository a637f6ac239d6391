"""What a step computed and drew, written into its sequences and their seats.

Nearly all entries of a step are *plain*: they decode, draw one token and go on; of a step that was
run several times at once, one token each time. Hundreds of them are written with a few array
operations, and their outputs are made one by one when the first of them is read: by then the next
step may run. Which entries are plain is decided by `PlainDecodes` alone, and `StepResults` writes
every other one by itself; so it does with all entries of a step that has only a few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import compress, repeat
from typing import cast, overload

import numpy as np

from common.prompt_logprobs import PromptLogprobs
from common.request import FinishReason, TokenLogprobs
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
from engine.core.step.step_in_flight import PlannedStep

OnEnd = Callable[[Sequence, FinishReason | None], None]
"""Ends a sequence by what it drew: with a reason, or without one when another node continues it."""


@dataclass(slots=True)
class StepOutput:
    """Output tokens that one step added to `sequence`, from `first_index` on, in order.

    With `finish_reason`, the output ends with the last of them. `logprobs` has one entry per token
    if the request asked for them, else none. With the first token come those of the prompt, if the
    request asked for them and the prompt was computed here.
    """

    sequence: Sequence
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    prompt_logprobs: PromptLogprobs | None = None


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
        self._counters.on_ran(step.took_s, has_prompts=step.batch.has_prompts)
        self._observe(step, has_scored=bool(results.prompt_logprobs))
        num_new = results.num_steps - results.num_recorded
        if num_new > 1:
            self._counters.on_repeated(len(step.sequences), num_new - 1)
        for entry, found in results.prompt_logprobs.items():
            step.sequences[entry].prompt_logprobs.append(found)
        was_decoding = [s.is_decoding for s in step.sequences] if self._speculation else []
        plain = PlainDecodes(step, results, self._seats)
        plain.write(self._seats, has_drafts=self._speculation is not None)
        others: dict[int, StepOutput] = {}
        num_idle = 0
        for entry in plain.looked_at(self._limits.block_size):
            sequence, drawn = step.sequences[entry], results[entry]
            if drawn is None:
                num_idle += 1
                sequence.num_computed += int(step.batch.num_tokens[entry])
                self._prefixes.publish(sequence)
            elif plain.is_plain[entry]:
                self._prefixes.publish(sequence)
            else:
                others[entry - num_idle] = self.append(sequence, drawn, results.num_recorded)
        outputs = StepOutputs(plain, others)
        if self._speculation is not None:
            self._learn(self._speculation, step, results, was_decoding, outputs)
        return outputs

    def append(self, sequence: Sequence, drawn: DrawnTokens, num_recorded: int = 0) -> StepOutput:
        """Append what one sequence drew, up to the token that ends it; it has `num_recorded`."""
        first_index = sequence.num_output - num_recorded
        of_prompt = None if first_index else take_prompt_logprobs(sequence)
        kept, reason = until_end(
            drawn.token_ids[num_recorded:],
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
        kept = drawn.token_ids[: num_recorded + len(kept)]
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


FEW = 4
"""The most entries of a step that are not written together: one by one they take less time."""
_OTHER = -1
"""Token of an entry that drew none or too many, or one that ends its sequence."""


class PlainDecodes:
    """The entries of a step that decode, draw a token each time and do not end, before they are
    written.

    `is_plain` says which ones they are, and does not change when something is written. A step of a
    few entries has none: each is written by itself.
    """

    is_plain: Bools

    def __init__(self, step: PlannedStep, results: RunnerResult, seats: Seats) -> None:
        rows, num_steps, num_recorded = step.batch.rows, results.num_steps, results.num_recorded
        self._sequences: Items[Sequence] = ()
        if len(rows) <= FEW or not step.batch.has_decodes:
            self.is_plain, self._are_all = np.zeros(len(rows), np.bool_), False
            return
        self._num_known, self._num_new = seats.num_known.take(rows), num_steps - num_recorded
        num_output = self._num_known - seats.num_prompt.take(rows)
        token_ids = np.array(_going_on(step.sequences, results, num_steps), np.int64)
        self.is_plain = num_output + self._num_new < seats.max_new_tokens.take(rows)
        if not step.batch.is_plain_decodes:
            self.is_plain &= step.batch.is_decode
        self.is_plain &= (token_ids if num_steps == 1 else token_ids[:, 0]) != _OTHER
        if num_steps > 1:
            token_ids = token_ids[:, -1] if self._num_new == 1 else token_ids[:, num_recorded:]
        self._columns: Items[Ints] = (rows, self._num_known, token_ids)
        self._num_output, self._num_recorded = num_output, num_recorded
        self._sequences = step.sequences
        self._drawn = cast("Items[DrawnTokens]", results)
        chosen = self.is_plain.tolist()
        self._are_all = all(chosen)
        if not self._are_all:
            self._columns = [column[self.is_plain] for column in self._columns]
            self._num_output = num_output[self.is_plain]
            self._sequences = list(compress(step.sequences, chosen))
            self._drawn = list(compress(self._drawn, chosen))

    def __len__(self) -> int:
        return len(self._sequences)

    def write(self, seats: Seats, *, has_drafts: bool) -> None:
        """Append the tokens; `has_drafts`: the sequences may have had drafts, or get some."""
        if not self._sequences:
            return
        if self._num_new == 1:
            seats.append_one_each(*self._columns)
        else:
            seats.append_several_each(*self._columns)
        if has_drafts:
            for sequence, drawn in zip(self._sequences, self._drawn, strict=True):
                sequence.take_drafts(drawn)

    def looked_at(self, block_size: int) -> Items[int]:
        """Return the entries of which more is to be written, ascending: those that are not plain,
        and those with a block that is full of computed tokens now.

        The KV of the last token that an entry draws does not exist yet.
        """
        if not self._sequences:
            return range(len(self.is_plain))
        num_computed = self._num_known + (self._num_new - 1)
        looked_at = num_computed % block_size < self._num_new
        if not self._are_all:
            looked_at |= ~self.is_plain
        entries: list[int] = looked_at.nonzero()[0].tolist()
        return entries

    def outputs(self) -> list[StepOutput]:
        """Return an output for each of them."""
        if not self._sequences:
            return []
        return list(
            map(
                StepOutput,
                self._sequences,
                (self._num_output - self._num_recorded).tolist(),
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
