"""One step, as the runner sees it: which tokens to compute, and after which to draw the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import InternalError
from common.request import SamplingParams, TokenLogprobs


# Hundreds of the next two are made in each step, and a frozen dataclass costs three times as much.
# Only the scheduler writes to them, while it makes a step.
@dataclass(slots=True)
class SampleInput:
    """All that drawing one token depends on: nothing is remembered between steps.

    The new token has output index `output_index`. The token lists are read, never kept.
    """

    params: SamplingParams
    output_index: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


@dataclass(slots=True)
class ScheduledSequence:
    """Compute `token_ids` at positions `start`, `start + 1`, …; their KV goes into `block_table`.

    Positions before `start` are in the cache already. The last `num_drafts` of `token_ids` are
    drafts. With `sample` set, a token is drawn after the last known token and, as long as the drawn
    token equals the next draft, after each draft: `sample` describes the first of them. Without it
    `next_token_id` is the known token behind the chunk.

    `num_proposals` is how many drafts a drafter inside the runner (mtp) may propose for the next
    step; it proposes fewer when the block table has no slots for them.
    """

    sequence_id: int
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: SampleInput | None
    num_drafts: int = 0
    num_proposals: int = 0
    next_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The drawn token, with log probabilities when the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """What one step drew for one sequence: the accepted drafts, then the model's own next token.

    `tokens` has 1 to `num_drafts + 1` entries, all drawn by the model itself: a draft is accepted
    exactly when it equals the token drawn at its place. `draft_token_ids` are proposals for what
    follows the last of them.
    """

    tokens: tuple[SampledToken, ...]
    draft_token_ids: tuple[int, ...] = ()


class SequencesFailed(InternalError):
    """Some sequences of a batch have no result; the others do, as if those had not been there.

    `entries` are places in the batch. `results` has one entry per scheduled sequence.
    """

    def __init__(
        self, message: str, entries: tuple[int, ...], results: tuple[DrawnTokens | None, ...]
    ) -> None:
        super().__init__(message)
        self.entries = entries
        self.results = results


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step costs, measured: `step_s[i]` seconds for a step of `rows[i]` tokens.

    `rows` rise strictly. `draft_s` is what one draft of one sequence costs beside its row in the
    step that verifies it (0 for drafters that look tokens up).
    """

    rows: tuple[int, ...]
    step_s: tuple[float, ...]
    draft_s: float = 0.0


OnLayer = Callable[[int], None]
"""Called with the number of a layer of the KV cache, on the thread that executes the step."""


class Runner(Protocol):
    """Executes a planned step. Its owner is one thread; it keeps no state but the KV cache and the
    blocks that were swapped out of it."""

    def execute(
        self, batch: Sequence[ScheduledSequence], on_layer: OnLayer | None = None
    ) -> list[DrawnTokens | None]:
        """One entry per scheduled sequence, in order; None where `sample` was None.

        A sequence's tokens depend on its own tokens and cache alone, never on its neighbours nor
        on its drafts. Raises `SequencesFailed` when only some have a result.

        `on_layer` is called once for each layer, 0 first, as soon as the keys and values of all of
        the step's tokens in it can be sent: nothing writes them any more. A drafting layer inside
        the runner (mtp) comes last, after the draw. It is also called for all layers when
        `SequencesFailed` follows; after any other error some calls may be missing.
        """

    def swap_out(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> None:
        """Copy whole blocks, every layer, into the host pool."""

    def swap_in(self, host_block_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy whole blocks back from the host pool."""
