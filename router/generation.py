"""The seam between the HTTP edge (text) and dispatch (nodes): token ids in, numbered tokens out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from common.request import FinishReason, SamplingParams, TokenLogprobs
from router.core.ttft_stages import DispatchStages


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """The next tokens of one answer: indices follow each other without gap or repeat.

    `finish_reason` is set on the last chunk alone (STOP or LENGTH; failures are raised).
    `num_cached_tokens` is how much of the prompt was found in a prefix cache, known from the
    first chunk on. `num_drafted` and `num_accepted` are the draft tokens that were verified for
    this answer so far, and those of them that became output. With token 0 come `queue_s` and
    `compute_s`, how long its prompt waited on the node that drew it and was computed there, and
    `stages`, where all of its time went.
    """

    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    queue_s: float = 0.0
    compute_s: float = 0.0
    stages: DispatchStages | None = None


class Generator(Protocol):
    """Runs one choice somewhere in the cluster."""

    def generate(
        self,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        *,
        deadline_s: float,
        priority: int = 0,
    ) -> AsyncGenerator[TokenChunk, None]:
        """Stream one answer. Closing the generator early aborts it on every node.

        Raises `InvalidRequest`, `Overloaded`, `DeadlineExceeded`, `NodeLost`, `HandoffFailed`,
        `PoolExhausted` or `InternalError`; before the first chunk or after any.
        """
