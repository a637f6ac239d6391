"""One stream of tokens on one node."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from collections.abc import Set

import numpy as np
import numpy.typing as npt

from common.kv.blocks import BlockHash
from common.prompt_logprobs import PromptLogprobs
from common.request import GenerationRequest
from engine.core.runner_contract import SampleInput
from engine.core.sequences.status import SequenceStatus, check_transition
from engine.core.speculation.draft_length import Acceptance

NO_SEAT = -1
"""The seat of a sequence that has none."""

# To look up a member of an enumeration costs more than all else in `is_decoding`.
_DECODE = SequenceStatus.RUNNING_DECODE


class Sequence:
    """Known tokens, how far they are computed, and the blocks that hold their KV.

    `has_remote_kv`: the prompt's KV is computed on another node and lands here. `is_exported`: the
    prompt is computed here and its KV is sent to another node after the first token. Only the
    scheduler writes to a sequence.
    """

    __slots__ = (
        "_output_token_ids",
        "acceptance",
        "arrival",
        "block_hashes",
        "block_table",
        "draft_token_ids",
        "end_token_ids",
        "fetched",
        "forced_token_ids",
        "has_remote_kv",
        "host_block_ids",
        "is_exported",
        "max_new_tokens",
        "num_accepted_drafts",
        "num_bypassed",
        "num_cached_tokens",
        "num_computed",
        "num_drafted",
        "num_hashed_blocks",
        "num_known",
        "num_output_at_preemption",
        "num_prompt",
        "num_swapped",
        "priority",
        "prompt_logprobs",
        "prompt_token_ids",
        "proposed_token_ids",
        "queue_key",
        "request",
        "row",
        "seat",
        "sequence_id",
        "status",
    )

    def __init__(
        self,
        sequence_id: int,
        request: GenerationRequest,
        *,
        has_remote_kv: bool = False,
        is_exported: bool = False,
    ) -> None:
        self.sequence_id = sequence_id
        self.arrival = sequence_id
        self.priority = request.priority
        self.queue_key = (0, sequence_id, 0)
        """Sort key in the waiting queue, smallest first; only the queue writes it."""
        self.request = request
        self.prompt_token_ids = request.prompt_token_ids
        self.num_prompt = len(request.prompt_token_ids)
        self._output_token_ids = list(request.output_token_ids)
        self.prompt_logprobs: list[PromptLogprobs] = []
        """Those of the chunks that were computed, until the first token is drawn."""
        self.num_known = self.num_prompt + len(self._output_token_ids)
        """Prompt and accepted output."""
        self.num_computed = 0
        self.max_new_tokens = 0
        """Output tokens that `max_tokens` and the model's length allow here; set when queued."""
        self.block_table: list[int] = []
        self.block_hashes: list[BlockHash] = []
        self.num_hashed_blocks = 0
        self.num_cached_tokens = 0
        self.has_remote_kv = has_remote_kv
        self.is_exported = is_exported
        self.status = SequenceStatus.WAITING
        self.seat = NO_SEAT
        """The number of its row in `Seats` while it runs or receives KV."""
        self.row: npt.NDArray[np.int32] | None = None
        """The tokens of that row: those that its own list does not have yet are read there."""
        self.end_token_ids: Set[int] = frozenset()
        """Tokens that end the output; set when queued."""
        self.draft_token_ids: Tokens[int] = ()
        """Drafts to be verified after the last known token in the next step."""
        self.proposed_token_ids: Tokens[int] = ()
        """Drafts that the model itself (mtp) proposed with the last token."""
        self.forced_token_ids: Tokens[int] = ()
        """The only tokens that can follow the last one, under the request's grammar."""
        self.num_drafted = 0
        self.num_accepted_drafts = 0
        self.acceptance: Acceptance | None = None
        """The estimated acceptance of its drafts; None before the first estimate."""
        self.num_bypassed = 0
        """Sequences admitted while this one waited at the head of the queue and did not fit."""
        self.num_output_at_preemption: int | None = None
        self.host_block_ids: list[int] = []
        self.fetched: frozenset[int] | None = None
        """Blocks that its prefix is copied back to from host memory; None: none, so far."""
        self.num_swapped = 0
        """Leading tokens whose KV is in host memory."""

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return self.num_known - self.num_prompt

    @property
    def output_token_ids(self) -> list[int]:
        """The output so far; only `append` changes the list."""
        tokens = self._output_token_ids
        num_missing = self.num_known - self.num_prompt - len(tokens)
        if num_missing and self.row is not None:
            tokens += self.row[self.num_known - num_missing : self.num_known].tolist()
        return tokens

    def leave_row(self) -> None:
        """Take over the tokens of its row before another sequence gets it."""
        self._output_token_ids = self.output_token_ids
        self.row = None

    @property
    def num_held_blocks(self) -> int:
        """Blocks in the table."""
        return len(self.block_table)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose KV is not in the cache."""
        return self.num_known - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """The only predicate for decoding; `Scheduler.check` compares it with the counts."""
        return self.status is _DECODE

    @property
    def needs_prompt_rows(self) -> bool:
        """Whether the whole prompt must be computed here, for its log probabilities."""
        asked = self.request.sampling.prompt_logprobs is not None
        return asked and not self.has_remote_kv and self.num_known == self.num_prompt

    @property
    def num_output_since_resume(self) -> int | None:
        """Output tokens since the last preemption; None when there was none."""
        before = self.num_output_at_preemption
        return None if before is None else self.num_output - before

    def append(self, token_ids: Tokens[int]) -> None:
        """Append accepted output tokens."""
        self.output_token_ids.extend(token_ids)
        self.num_known += len(token_ids)

    def tokens(self, start: int, end: int) -> tuple[int, ...] | list[int]:
        """Return known tokens `start` to `end`, exclusive."""
        if start >= self.num_prompt:
            return self.output_token_ids[start - self.num_prompt : end - self.num_prompt]
        if end <= self.num_prompt:
            return self.prompt_token_ids[start:end]
        return [*self.prompt_token_ids[start:], *self.output_token_ids[: end - self.num_prompt]]

    def sample_input(self) -> SampleInput:
        """Return the inputs of drawing the next output token."""
        return SampleInput(
            self.request.sampling,
            len(self.output_token_ids),
            self.prompt_token_ids,
            self.output_token_ids,
        )

    def move_to(self, status: SequenceStatus) -> None:
        """Change the status; `ValueError` if the transition table does not allow it."""
        check_transition(self.status, status)
        self.status = status
