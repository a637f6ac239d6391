"""Puts the tokens of several nodes into one order: each index once, none skipped."""

from __future__ import annotations

from common.errors import PeerProtocolError
from common.request import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from router.generation import TokenChunk

MAX_HELD_TOKENS = 4096


class TokenLedger:
    """Tokens that arrived, and how many of them were emitted.

    Decode may run ahead of the first token, which comes another way: what cannot be emitted yet is
    held, up to `MAX_HELD_TOKENS`. The first arrival of an index counts, later ones are dropped.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._held: dict[int, tuple[int, TokenLogprobs | None]] = {}
        self._end: int | None = None
        self._reason: FinishReason | None = None
        self.num_emitted = 0
        self.num_cached_tokens = 0
        self._drafted, self._accepted, self._drafted_before = 0, 0, 0
        self._queue_s, self._compute_s = 0.0, 0.0

    @property
    def is_complete(self) -> bool:
        """Whether the last token, known as such, was emitted."""
        return self._end is not None and self.num_emitted >= self._end

    @property
    def reason(self) -> FinishReason | None:
        """Why the answer ends, once a node said so."""
        return self._reason

    def has(self, index: int) -> bool:
        """Whether this index was emitted or is held."""
        return index < self.num_emitted or index in self._held

    def add(self, output: RequestOutput) -> None:
        """Take an output's tokens. Raises `PeerProtocolError` for what no node may send."""
        end = output.first_index + len(output.token_ids)
        if end > self._sampling.max_tokens:
            raise PeerProtocolError(
                f"{output.id}: token index {end - 1}, max_tokens is {self._sampling.max_tokens}"
            )
        has_logprobs = self._sampling.logprobs is not None
        if has_logprobs and len(output.logprobs) != len(output.token_ids):
            raise PeerProtocolError(
                f"{output.id}: {len(output.logprobs)} logprobs for {len(output.token_ids)} tokens"
            )
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        # One node of an attempt verifies drafts, and it reports all of them each time.
        self._drafted = max(self._drafted, output.num_drafted)
        self._accepted = max(self._accepted, output.num_accepted)
        if output.token_ids and output.first_index == 0:
            self._queue_s, self._compute_s = output.queue_s, output.compute_s
        for offset, token_id in enumerate(output.token_ids):
            index = output.first_index + offset
            if not self.has(index):
                entry = output.logprobs[offset] if has_logprobs else None
                self._held[index] = (token_id, entry)

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
        first = self.num_emitted
        end = self._end if self._end is not None else self._sampling.max_tokens
        entries = []
        while self.num_emitted < end and self.num_emitted in self._held:
            entries.append(self._held.pop(self.num_emitted))
            self.num_emitted += 1
        if len(self._held) > MAX_HELD_TOKENS:
            raise PeerProtocolError(
                f"{len(self._held)} tokens arrived, but not index {self.num_emitted}"
            )
        if not entries and not self.is_complete:
            return None
        return TokenChunk(
            first_index=first,
            token_ids=tuple(token_id for token_id, _ in entries),
            logprobs=tuple(entry for _, entry in entries if entry is not None),
            finish_reason=self._reason if self.is_complete else None,
            num_cached_tokens=self.num_cached_tokens,
            num_drafted=self._drafted_before + self._drafted,
            num_accepted=self._accepted,
            queue_s=0.0 if first else self._queue_s,
            compute_s=0.0 if first else self._compute_s,
        )

    def restart(self) -> None:
        """Another attempt begins: forget what was held. Only before anything was emitted.

        Drafts are counted on: those of a lost attempt were verified, and none became output.
        """
        if self.num_emitted:
            raise ValueError(f"{self.num_emitted} tokens were emitted: no other attempt may run")
        self._held.clear()
        self._end, self._reason = None, None
        self.num_cached_tokens = 0
        self._drafted_before += self._drafted
        self._drafted, self._accepted = 0, 0
