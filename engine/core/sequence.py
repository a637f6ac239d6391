"""One stream of tokens on one node."""

from __future__ import annotations

from common.blocks import BlockHash
from common.request import GenerationRequest
from engine.core.plan import SampleInput
from engine.core.status import SequenceStatus, check_transition


class Sequence:
    """Known tokens, how far they are computed, and the blocks that hold their KV.

    `has_remote_kv`: the prompt's KV is computed elsewhere and lands here. `is_exported`: the
    prompt is computed here and its KV leaves for another node after the first token.
    Only the scheduler writes to a sequence.
    """

    __slots__ = (
        "arrival",
        "block_hashes",
        "block_table",
        "has_remote_kv",
        "is_exported",
        "num_cached_tokens",
        "num_computed",
        "num_hashed_blocks",
        "num_prompt",
        "output_token_ids",
        "prompt_token_ids",
        "request",
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
        self.request = request
        self.prompt_token_ids = request.prompt_token_ids
        self.num_prompt = len(request.prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.num_computed = 0
        self.block_table: list[int] = []
        self.block_hashes: list[BlockHash] = []
        self.num_hashed_blocks = 0
        self.num_cached_tokens = 0
        self.has_remote_kv = has_remote_kv
        self.is_exported = is_exported
        self.status = SequenceStatus.WAITING

    @property
    def num_known(self) -> int:
        """Prompt and accepted output."""
        return self.num_prompt + len(self.output_token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose KV is not in the cache."""
        return self.num_known - self.num_computed

    @property
    def num_remaining_output(self) -> int:
        """Output tokens that `max_tokens` still allows."""
        return self.request.sampling.max_tokens - len(self.output_token_ids)

    def tokens(self, start: int, end: int) -> tuple[int, ...] | list[int]:
        """Known tokens `start` to `end`, exclusive."""
        if end <= self.num_prompt:
            return self.prompt_token_ids[start:end]
        outputs = self.output_token_ids[max(start - self.num_prompt, 0) : end - self.num_prompt]
        if start >= self.num_prompt:
            return outputs
        return [*self.prompt_token_ids[start:], *outputs]

    def sample_input(self) -> SampleInput:
        """What drawing the next output token depends on."""
        return SampleInput(
            self.request.sampling,
            len(self.output_token_ids),
            self.prompt_token_ids,
            self.output_token_ids,
        )

    def move_to(self, status: SequenceStatus) -> None:
        """Change the status along the transition table."""
        check_transition(self.status, status)
        self.status = status
