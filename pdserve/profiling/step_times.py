"""Times of steps by their sizes: rows and context, chunk and context, drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from common.kv.blocks import blocks_for
from common.measured_profile import ChunkTime, DecodeTime, VerifiedTime
from common.request import SamplingParams
from engine.core.runner_contract import SampleInput, ScheduledSequence
from engine.core.step.step_batch import StepBatch, batch_of
from engine.runner.step_costs import unlike_tokens

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 1024, 4096, 16_384, 65_536)
CHUNKS = (16, 64, 256, 512, 1024, 2048, 4096, 8192)
CHUNK_CONTEXTS = (0, 1024, 4096, 16_384, 65_536)
VERIFIED = (1, 4, 16, 64)
MOST_REPEATS = 5
_GREEDY = SampleInput(SamplingParams(max_tokens=1, temperature=0.0), 0, [0], [])

Execute = Callable[[StepBatch], object]
Point = TypeVar("Point", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBounds:
    """What a step can have: tokens in all, tokens of a sequence, blocks, sequences, token ids.

    No more than `most_touched` of the blocks are used; sequences share them where that is too few.
    """

    max_tokens: int
    max_len: int
    num_blocks: int
    block_size: int
    max_rows: int
    most_touched: int
    vocab_size: int


class StepTimer:
    """Runs steps on a runner that is warm, and keeps the least time of each size.

    It writes over the KV cache.
    """

    def __init__(
        self,
        execute: Execute,
        bounds: StepBounds,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Measure by `execute`. `tell` gets a line before each kind of step, and then one for each
        point with the time that is kept: the first time of a size has that of new pages in it.
        """
        self._execute = execute
        self._bounds = bounds
        self._tell = tell
        self._clock = clock

    def decodes(self, budget_s: float) -> tuple[DecodeTime, ...]:
        """Measure decodes in about so many seconds."""
        shortest = min(CONTEXTS[0], self._longest - 1)
        points = [(rows, context) for rows in ROWS for context in (shortest, *CONTEXTS[1:])]
        least = self._measured(
            [point for point in points if self._can_decode(*point)],
            lambda point: self._sequences(point[0], 1, point[1]),
            lambda point: f"decode of {point[0]} rows at {point[1]} tokens",
            budget_s,
        )
        return tuple(
            DecodeTime(rows=rows, context=context, step_s=step_s)
            for (rows, context), step_s in least.items()
        )

    def chunks(self, budget_s: float) -> tuple[ChunkTime, ...]:
        """Measure chunks of one prompt in about so many seconds."""
        points = [(tokens, context) for tokens in CHUNKS for context in CHUNK_CONTEXTS]
        least = self._measured(
            [point for point in points if self._can_prefill(*point)],
            lambda point: [self._sequence(0, point[0], point[1], None)],
            lambda point: f"chunk of {point[0]} tokens at {point[1]}",
            budget_s,
        )
        return tuple(
            ChunkTime(tokens=tokens, context=context, step_s=step_s)
            for (tokens, context), step_s in least.items()
        )

    def verified(self, tokens_per_sequence: int, budget_s: float) -> tuple[VerifiedTime, ...]:
        """Measure steps that verify drafts; nothing where a sequence has none."""
        if tokens_per_sequence < 2:
            return ()
        context, bounds = CONTEXTS[0], self._bounds
        most = min(bounds.max_rows, bounds.max_tokens // tokens_per_sequence)
        if not self._fits(1, tokens_per_sequence, context):
            return ()
        least = self._measured(
            [
                number
                for number in VERIFIED
                if number <= most and self._fits(number, tokens_per_sequence, context)
            ],
            lambda number: self._sequences(number, tokens_per_sequence, context),
            lambda number: f"{number} sequences of {tokens_per_sequence} tokens, drafts verified",
            budget_s,
        )
        return tuple(
            VerifiedTime(sequences=number, tokens_per_sequence=tokens_per_sequence, step_s=step_s)
            for number, step_s in least.items()
        )

    @property
    def _longest(self) -> int:
        """Tokens of the longest sequence."""
        return min(self._bounds.max_len, self._bounds.num_blocks * self._bounds.block_size)

    def _can_decode(self, rows: int, context: int) -> bool:
        bounds = self._bounds
        return rows <= min(bounds.max_rows, bounds.max_tokens) and self._fits(rows, 1, context)

    def _can_prefill(self, tokens: int, context: int) -> bool:
        return tokens <= self._bounds.max_tokens and self._fits(1, tokens, context)

    def _fits(self, num_seqs: int, num_tokens: int, context: int) -> bool:
        bounds, length = self._bounds, context + num_tokens
        num_blocks = num_seqs * blocks_for(length, bounds.block_size)
        return length <= bounds.max_len and num_blocks <= bounds.num_blocks

    def _sequences(self, number: int, num_tokens: int, context: int) -> list[ScheduledSequence]:
        return [self._sequence(index, num_tokens, context, _GREEDY) for index in range(number)]

    def _sequence(
        self, index: int, num_tokens: int, context: int, sample: SampleInput | None
    ) -> ScheduledSequence:
        """Return a sequence with blocks of its own: shared ones would stay in the caches.

        With more blocks than may be touched it begins again with the first.
        """
        num_blocks = blocks_for(context + num_tokens, self._bounds.block_size)
        first = index * num_blocks
        blocks = [one % self._bounds.most_touched for one in range(first, first + num_blocks)]
        num_drafts = num_tokens - 1 if sample is not None else 0
        return ScheduledSequence(
            index, unlike_tokens(index * num_tokens, num_tokens, self._bounds.vocab_size),
            context, blocks, sample, num_drafts=num_drafts,
            next_token_id=None if sample is not None else 0,
        )  # fmt: skip

    def _measured(
        self,
        points: Sequence[Point],
        step: Callable[[Point], list[ScheduledSequence]],
        name: Callable[[Point], str],
        budget_s: float,
    ) -> dict[Point, float]:
        """Measure each point once, as long as the budget lasts, then all again while some is left.

        The first point is measured in any case, another one if as much time is left as the one
        before it took: points come with the small steps first.
        """
        ends_at_s, last_s = self._clock() + budget_s, 0.0
        least: dict[Point, float] = {}
        self._tell(f"{name(points[0])} and more, for {budget_s:g} s at most")
        for point in points:
            if least and self._clock() + last_s >= ends_at_s:
                self._tell(f"{name(point)} and what follows: left out, the time is up")
                break
            least[point] = last_s = self._step_s(step(point))
        for _ in range(MOST_REPEATS - 1):
            for point, before_s in least.items():
                if self._clock() + before_s < ends_at_s:
                    least[point] = min(before_s, self._step_s(step(point)))
        for point, least_s in least.items():
            self._tell(f"{name(point)}: {1e3 * least_s:.2f} ms")
        return least

    def _step_s(self, sequences: list[ScheduledSequence]) -> float:
        began_at_s = self._clock()
        self._execute(batch_of(sequences))
        return self._clock() - began_at_s
