"""The seam between the HTTP edge (text) and dispatch (nodes): token ids in, numbered tokens out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from common.observing.tracing import Span
from common.prompt_logprobs import PromptLogprobs
from common.request import FinishReason, SamplingParams, TokenLogprobs
from router.core.ttft_stages import DispatchStages

SHUTTING_DOWN = "the router is shutting down: send the request again"
"""Why a request ends that is still here when the router does not wait any more."""


class TokenChunk(NamedTuple):
    """The next tokens of one answer: indices follow each other without gap or repeat.

    `finish_reason` is set on the last chunk alone (STOP or LENGTH; failures are raised).
    `num_cached_tokens` is how much of the prompt was found in a prefix cache, known from the
    first chunk on. `num_drafted` and `num_accepted` are the draft tokens that were verified for
    this answer so far, and those of them that became output. With token 0 come `queue_s` and
    `compute_s`, how long its prompt waited on the node that drew it and was computed there,
    `stages`, where all of its time went, and `prompt_logprobs`, if they were asked for and the
    prompt has a second token.
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
    prompt_logprobs: PromptLogprobs | None = None


new_chunk: Callable[[tuple[object, ...]], TokenChunk] = partial(tuple.__new__, TokenChunk)
"""A chunk from all of its fields in order, in a third of the time: there is one for each token."""


class RequestListener(Protocol):
    """Receives the events of a request. Each of its choices runs by itself."""

    @property
    def request_id(self) -> str:
        """The id under which the client and the log know the request; may be empty."""

    @property
    def span(self) -> Span:
        """The parent of the spans of its choices."""

    def on_choice(self, choice_id: str) -> None:
        """Note the id under which nodes know a choice."""

    def on_node(self, node_id: str) -> None:
        """Note a node that holds some of the request."""

    def on_retry(self) -> None:
        """Count another attempt of a choice."""


class Sink(Protocol):
    """Receives one answer: called on the event loop, returns at once, raises nothing."""

    def on_accepted(self) -> None:
        """Take that a node computes the prompt: at most once, and not after a chunk.

        An error may follow, and another node may go on. Before it nodes were only asked.
        """

    def on_chunks(self, chunks: Sequence[TokenChunk]) -> None:
        """Take the next chunks, at least one; those that came together are pushed together.

        A `finish_reason` on the last of them ends the answer. `send_now` follows.
        """

    def send_now(self) -> None:
        """Send what was pushed: all answers that were pushed to have their chunks by now.

        Parts that are written one behind the other wake their reader once, and several choices of
        one answer are one part.
        """

    def on_failed(self, error: Exception) -> None:
        """Take the error that ends the answer; it may come before the first chunk."""


class Generator(Protocol):
    """Runs choices somewhere in the cluster."""

    def generate(
        self,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        sink: Sink,
        *,
        deadline_s: float,
        priority: int = 0,
        cache_salt: str = "",
        listener: RequestListener | None = None,
    ) -> Callable[[], None]:
        """Start one answer and return its abort. KV is shared within `cache_salt` alone.

        Chunks are pushed into `sink` as they come, followed by exactly one end. A failure may be
        pushed before this returns. The abort ends the answer on every node, and nothing is
        pushed after it, except for the failure after the chunks whose push it was called in.
        After the end it does nothing.

        Raises `InvalidRequest` or `Overloaded` when nothing was started. Failures that are pushed
        are `InvalidRequest`, `Overloaded`, `DeadlineExceeded`, `NodeLost`, `HandoffFailed`,
        `PoolExhausted` or `InternalError`.
        """
