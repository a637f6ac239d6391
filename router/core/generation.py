"""The seam between the HTTP edge (text) and dispatch (nodes): token ids in, numbered tokens out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from common.observing.tracing import Span
from common.prompt_logprobs import PromptLogprobs
from common.request import FinishReason, RequestCounts, SamplingParams, TokenLogprobs
from router.core.known.sessions import SessionId
from router.core.ttft_stages import DispatchStages

SHUTTING_DOWN = "the router is shutting down: send the request again"
"""The error of a request that is still in progress when the router stops waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """What is known of a prompt once its answer begins.

    It waited `queue_s` on the node that drew token 0, and was computed there in `compute_s`.
    `stages` are where all of the time went, and `prompt_logprobs` come if they were asked for and
    the prompt has a second token.
    """

    queue_s: float = 0.0
    compute_s: float = 0.0
    stages: DispatchStages | None = None
    prompt_logprobs: PromptLogprobs | None = None


class TokenChunk(NamedTuple):
    """The next tokens of one answer: indices follow each other without gap or repeat.

    `finish_reason` is set on the last chunk alone (STOP or LENGTH; failures are raised).
    `counts` are those of the answer; None: as in the chunk before. `of_prompt` comes with token 0.
    """

    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    counts: RequestCounts | None = None
    of_prompt: PromptResult | None = None


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
        """Note that a node computes the prompt: at most once, and not after a chunk.

        An error may follow, and another node may go on. Before it nodes were only asked.
        """

    def on_chunks(self, chunks: Sequence[TokenChunk]) -> None:
        """Receive the next chunks, at least one; chunks of one output are pushed together.

        A `finish_reason` on the last of them ends the answer. `send_now` follows.
        """

    def send_now(self) -> None:
        """Send what was pushed: all answers that were pushed to have their chunks by now.

        Parts that are written one behind the other wake their reader once, and several choices of
        one answer are one part.
        """

    def on_failed(self, error: Exception) -> None:
        """Receive the error that ends the answer; it may come before the first chunk."""


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
        needs_salt: bool = True,
        session: SessionId = b"",
        is_cut_to_fit: bool = False,
        listener: RequestListener | None = None,
    ) -> Callable[[], None]:
        """Start one answer and return its abort. KV is shared within `cache_salt` alone.

        Without `needs_salt` nodes may serve it that know no salts, and share all KV.
        With `is_cut_to_fit` the answer may end before `max_tokens`, where the longest node ends it.

        The answers of one `session` are best made by the nodes that made its last one.

        Chunks are pushed into `sink` as they come, followed by exactly one end. A failure may be
        pushed before this returns. The abort ends the answer on every node, and nothing is
        pushed after it, except for the failure after the chunks whose push it was called in.
        After the end it does nothing.

        Raises `InvalidRequest` or `Overloaded` when nothing was started. Failures that are pushed
        are `InvalidRequest`, `Overloaded`, `DeadlineExceeded`, `NodeLost`, `HandoffFailed`,
        `PoolExhausted` or `InternalError`.
        """
