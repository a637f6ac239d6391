"""One step, as the runner sees it: which tokens to compute, and after which to draw the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import InternalError
from common.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampleInput:
    """All that drawing one token depends on: nothing is remembered between steps.

    The new token has output index `output_index`. The token lists are read, never kept.
    """

    params: SamplingParams
    output_index: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Compute `token_ids` at positions `start`, `start + 1`, …; their KV goes into `block_table`.

    Positions before `start` are in the cache already. With `sample` set, one token is drawn from
    the logits of the last position.
    """

    sequence_id: int
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: SampleInput | None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The drawn token, with log probabilities when the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class SequencesFailed(InternalError):
    """Some sequences of a batch have no result; the others do, as if those had not been there.

    `entries` are places in the batch. `results` has one entry per scheduled sequence.
    """

    def __init__(
        self, message: str, entries: tuple[int, ...], results: tuple[SampledToken | None, ...]
    ) -> None:
        super().__init__(message)
        self.entries = entries
        self.results = results


class Runner(Protocol):
    """Executes a planned step. Its owner is one thread; it keeps no state but the KV cache."""

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        """One entry per scheduled sequence, in order; None where `sample` was None.

        A sequence's result depends on its own tokens and cache alone, never on its neighbours.
        Raises `SequencesFailed` when only some have a result.
        """
