"""One stream of tokens on one node."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Tokens
from collections.abc import Set

from common.kv.blocks import BlockHash
from common.prompt_logprobs import PromptLogprobs
from common.request import GenerationRequest
from engine.core.runner_contract import DrawnTokens, SampleInput
from engine.core.sequences.seats import Seats
from engine.core.sequences.status import SequenceStatus, check_transition
from engine.core.sequences.stop_rules import end_tokens
from engine.core.speculation.draft_length import Acceptance

NO_SEAT = -1
"""The seat of a sequence that has none."""

# To look up a member of an enumeration costs more than all else in `is_decoding`.
_DECODE = SequenceStatus.RUNNING_DECODE


class Sequence:
    """Known tokens, how far they are computed, and the blocks that hold their KV.

    While it is seated these are in its seat alone, and it reads them there.

    `has_remote_kv`: the prompt's KV is computed on another node and lands here. `is_exported`: the
    prompt is computed here and its KV is sent to another node after the first token. Only the
    scheduler writes to a sequence.
    """

    __slots__ = (
        "_block_table",
        "_num_computed",
        "_output_token_ids",
        "_seats",
        "acceptance",
        "arrival",
        "block_hashes",
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
        "num_disk_tokens",
        "num_drafted",
        "num_found_tokens",
        "num_hashed_blocks",
        "num_host_tokens",
        "num_output_at_preemption",
        "num_prompt",
        "num_swapped",
        "priority",
        "prompt_blocks",
        "prompt_logprobs",
        "prompt_token_ids",
        "proposed_token_ids",
        "queue_key",
        "request",
        "seat",
        "sequence_id",
        "sought_on_disk",
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
        self.prompt_blocks = request.prompt_blocks
        self.num_prompt = len(request.prompt_token_ids)
        self._output_token_ids: Tokens[int] = request.output_token_ids
        self.prompt_logprobs: list[PromptLogprobs] = []
        """Log probabilities of the computed chunks, until the first token is drawn."""
        self._num_computed = 0
        self._block_table: list[int] = []
        self.max_new_tokens = 0
        """Output tokens that `max_tokens` and the model's length allow here; set when queued."""
        self.block_hashes: list[BlockHash] = []
        self.num_hashed_blocks = 0
        self.num_cached_tokens = 0
        self.num_host_tokens = self.num_disk_tokens = 0
        """Cached tokens that were copied back for it from host memory, and read from disk."""
        self.num_found_tokens = 0
        """Tokens that were cached when it was queued; only the queue writes it."""
        self.has_remote_kv = has_remote_kv
        self.is_exported = is_exported
        self.status = SequenceStatus.WAITING
        self.seat = NO_SEAT
        """The number of its row in `Seats` while it runs or receives KV."""
        self._seats: Seats | None = None
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
        self.sought_on_disk: frozenset[BlockHash] = frozenset()
        """Blocks of its prefix that were on disk when it came."""
        self.num_swapped = 0
        """Leading tokens whose KV is in host memory."""

    def set_ends(self, eos_token_ids: Set[int], max_model_len: int) -> None:
        """Set the tokens that end the output, and the most tokens that can be output here.

        The latter is 0 for exported sequences: those leave after their first token, so they need no
        blocks for growth.
        """
        sampling = self.request.sampling
        self.end_token_ids = end_tokens(sampling, eos_token_ids)
        if not self.is_exported:
            self.max_new_tokens = min(sampling.max_tokens, max_model_len - self.num_prompt)

    def take_seat(self, seats: Seats) -> None:
        """Move into a free seat; it has no blocks yet."""
        self.seat = seats.take(
            self.prompt_blocks.words,
            self._output_token_ids,
            self.max_new_tokens,
            self.request.sampling,
        )
        self._seats, self._output_token_ids = seats, ()

    def leave_seat(self) -> None:
        """Take tokens and blocks along, and empty the seat."""
        assert self._seats is not None, "a sequence without a seat"
        self._output_token_ids, self._block_table = self.output_token_ids, self.block_table
        self._num_computed = self.num_computed
        self._seats.leave(self.seat)
        self._seats, self.seat = None, NO_SEAT

    def give_up_blocks(self) -> list[int]:
        """Return the blocks of a sequence without a seat; it holds none after that."""
        block_ids, self._block_table = self._block_table, []
        return block_ids

    @property
    def num_known(self) -> int:
        """Prompt and accepted output."""
        if self._seats is None:
            return self.num_prompt + len(self._output_token_ids)
        return self._seats.num_known.item(self.seat)

    @property
    def num_computed(self) -> int:
        """Known tokens whose KV is in the cache."""
        if self._seats is None:
            return self._num_computed
        return self._seats.num_computed.item(self.seat)

    @num_computed.setter
    def num_computed(self, count: int) -> None:
        if self._seats is None:
            self._num_computed = count
        else:
            self._seats.num_computed[self.seat] = count

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return self.num_known - self.num_prompt

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the output so far."""
        return self.tokens(self.num_prompt, self.num_known)

    @property
    def num_held_blocks(self) -> int:
        """Blocks in the table."""
        if self._seats is None:
            return len(self._block_table)
        return self._seats.num_blocks.item(self.seat)

    @property
    def block_table(self) -> list[int]:
        """A copy of the table of its blocks."""
        if self._seats is None:
            return self._block_table.copy()
        table: list[int] = self._seats.block_tables[self.seat, : self.num_held_blocks].tolist()
        return table

    def blocks(self, start: int, end: int) -> list[int]:
        """Return a part of the table, exclusive of `end`: a long one is not copied for it."""
        if self._seats is None:
            return self._block_table[start:end]
        part: list[int] = self._seats.block_tables[self.seat, start:end].tolist()
        return part

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

    def tokens(self, start: int, end: int) -> list[int]:
        """Return known tokens `start` to `end`, exclusive."""
        if self._seats is not None:
            tokens: list[int] = self._seats.token_ids[self.seat, start:end].tolist()
            return tokens
        first = self.num_prompt
        return [
            *self.prompt_token_ids[start:end],
            *self._output_token_ids[max(start - first, 0) : max(end - first, 0)],
        ]

    def words(self, start: int, end: int) -> array[int]:
        """Return known tokens `start` to `end`, exclusive, as 32-bit numbers without a sign."""
        if end <= self.num_prompt:
            return self.prompt_blocks.words[start:end]
        return array("I", self.tokens(start, end))

    def take_drafts(self, drawn: DrawnTokens) -> None:
        """Keep the drafts that came with the latest tokens; earlier ones are outdated."""
        self.draft_token_ids = ()
        self.proposed_token_ids = drawn.draft_token_ids
        self.forced_token_ids = drawn.forced_token_ids

    def sample_input(self) -> SampleInput:
        """Return the inputs of drawing the next output token."""
        return SampleInput(
            self.request.sampling,
            self.num_output,
            self.prompt_token_ids,
            self.output_token_ids,
        )

    def move_to(self, status: SequenceStatus) -> None:
        """Change the status; `ValueError` if the transition table does not allow it."""
        check_transition(self.status, status)
        self.status = status
