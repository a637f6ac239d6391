"""Puts the tokens of several nodes into one order: each index once, none skipped."""

from __future__ import annotations

from common.errors import PeerProtocolError
from common.request import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from router.core.generation import TokenChunk, new_chunk

MAX_HELD_TOKENS = 4096


class TokenLedger:
    """Tokens that arrived, and how many of them were emitted.

    Decode may run ahead of the first token, which comes another way: what cannot be emitted yet is
    held, up to `MAX_HELD_TOKENS`. The first arrival of an index counts, later ones are dropped.
    `emitted` is what the client has; `num_before` of it came from earlier attempts.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self._max_tokens = sampling.max_tokens
        self._has_logprobs = sampling.logprobs is not None
        self._held: dict[int, tuple[int, TokenLogprobs | None]] = {}
        self._end: int | None = None
        self._reason: FinishReason | None = None
        self.emitted: list[int] = []
        self.num_emitted = 0
        self.num_before = 0
        self.num_cached_tokens = 0
        self._drafted, self._drafted_before = 0, 0
        self._accepted, self._accepted_before = 0, 0
        self._queue_s, self._compute_s = 0.0, 0.0

    @property
    def is_complete(self) -> bool:
        """Whether the last token, known as such, was emitted."""
        return self._end is not None and self.num_emitted >= self._end

    def has(self, index: int) -> bool:
        """Whether this index was emitted or is held."""
        return index < self.num_emitted or index in self._held

    def add(self, output: RequestOutput) -> None:
        """Take an output's tokens. Raises `PeerProtocolError` for what no node may send."""
        end = output.first_index + len(output.token_ids)
        if end > self._max_tokens:
            raise PeerProtocolError(
                f"{output.id}: token index {end - 1}, max_tokens is {self._max_tokens}"
            )
        has_logprobs = self._has_logprobs
        if has_logprobs and len(output.logprobs) != len(output.token_ids):
            raise PeerProtocolError(
                f"{output.id}: {len(output.logprobs)} logprobs for {len(output.token_ids)} tokens"
            )
        self.note_cached(output.num_cached_tokens)
        # One node of an attempt verifies drafts, and it reports all of them each time.
        self._drafted = max(self._drafted, output.num_drafted)
        self._accepted = max(self._accepted, output.num_accepted)
        if output.token_ids and output.first_index == 0:
            self._queue_s, self._compute_s = output.queue_s, output.compute_s
        for index, token_id in enumerate(output.token_ids, output.first_index):
            if not self.has(index):
                entry = output.logprobs[index - output.first_index] if has_logprobs else None
                self._held[index] = (token_id, entry)

    def take_next(self, output: RequestOutput) -> TokenChunk | None:
        """`add` and `take` at once for an output that brings the next tokens and no other news, as
        almost all do. None, and nothing taken, for every other output."""
        first, token_ids = output.first_index, output.token_ids
        end = first + len(token_ids)
        if (
            first != self.num_emitted
            or not 0 < first < end <= self._max_tokens
            or self._held
            or self._end is not None
            or self._has_logprobs
            or output.num_drafted
            or output.num_cached_tokens > self.num_cached_tokens
        ):
            return None
        self.num_emitted = end
        self.emitted += token_ids
        drafted = self._drafted_before + self._drafted
        accepted = self._accepted_before + self._accepted
        return new_chunk(
            (first, token_ids, (), None, self.num_cached_tokens, drafted, accepted, 0.0, 0.0, None)
        )

    def note_cached(self, num_tokens: int) -> None:
        """This much of the prompt was cached where the answer begins; later nodes do not count."""
        if not self.num_before:
            self.num_cached_tokens = max(self.num_cached_tokens, num_tokens)

    def end(self, output: RequestOutput, reason: FinishReason, *, complete_from: int) -> None:
        """Its node says that the answer ends with this output.

        The node has sent everything from index `complete_from` on. Raises `PeerProtocolError`
        when something of that is missing, or nothing was answered at all.
        """
        known = [self.num_emitted, *(index + 1 for index in self._held)]
        end = output.first_index + len(output.token_ids) if output.token_ids else max(known)
        missing = [index for index in range(complete_from, end) if not self.has(index)]
        if missing or end == 0:
            raise PeerProtocolError(f"{output.id}: ended at {end} tokens without {missing[:4]}")
        self._end, self._reason = end, reason

    def take(self) -> TokenChunk | None:
        """What can be emitted now, if anything; a chunk that completes the answer says why.

        Raises `PeerProtocolError` when too much waits for one missing index.
        """
        first = index = self.num_emitted
        end = self._end if self._end is not None else self._max_tokens
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        while index < end and index in self._held:
            token_id, entry = self._held.pop(index)
            token_ids.append(token_id)
            if entry is not None:
                logprobs.append(entry)
            index += 1
        self.num_emitted = index
        if len(self._held) > MAX_HELD_TOKENS:
            raise PeerProtocolError(f"{len(self._held)} tokens arrived, but not index {index}")
        is_complete = self.is_complete
        if not token_ids and not is_complete:
            return None
        self.emitted += token_ids
        return TokenChunk(  # once a token: by position, which takes a third of the time
            first,
            tuple(token_ids),
            tuple(logprobs),
            self._reason if is_complete else None,
            self.num_cached_tokens,
            self._drafted_before + self._drafted,
            self._accepted_before + self._accepted,
            0.0 if first else self._queue_s,
            0.0 if first else self._compute_s,
        )

    def restart(self) -> None:
        """Another attempt begins behind what was emitted: forget what was held.

        Drafts are counted on: those of a lost attempt were verified, and became output where
        anything was emitted.
        """
        self._held.clear()
        self._end, self._reason = None, None
        self.num_before = self.num_emitted
        if not self.num_before:
            self.num_cached_tokens = 0
        else:
            self._accepted_before += self._accepted
        self._drafted_before += self._drafted
        self._drafted, self._accepted = 0, 0
