"""The tokens of one attempt's nodes in one order: each index once, none skipped."""

from __future__ import annotations

from common.errors import PeerProtocolError
from common.request import (
    NO_COUNTS,
    NO_DETAILS,
    FinishReason,
    RequestCounts,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from router.core.generation import PromptResult, TokenChunk, new_chunk

MAX_HELD_TOKENS = 4096


class TokenLedger:
    """The tokens that arrived, and those of them that were emitted.

    The decode node may run ahead of token 0, which the prefill node sends. Tokens after a missing
    index are held, up to `MAX_HELD_TOKENS`. The first arrival of an index counts, later ones are
    dropped. `emitted` is what the client has; `num_before` of it came from earlier attempts (see
    `continued`). Log probabilities of the prompt come with token 0, so they are emitted with it,
    once.
    """

    def __init__(self, sampling: SamplingParams, num_prompt_tokens: int = 1) -> None:
        self._sampling = sampling
        self._num_prompt_tokens = num_prompt_tokens
        self.max_tokens = sampling.max_tokens
        """The most tokens of this attempt: fewer than were asked for, where no node has room."""
        self._has_logprobs = sampling.logprobs is not None
        self._held: dict[int, tuple[int, TokenLogprobs | None]] = {}
        self._end: int | None = None
        self._reason: FinishReason | None = None
        self.emitted: list[int] = []
        self.num_emitted = 0
        self.num_before = 0
        self._counts = self._counts_before = NO_COUNTS
        self._emitted_counts: RequestCounts | None = NO_COUNTS

    def has(self, index: int) -> bool:
        """Return whether this index was emitted or is held."""
        return index < self.num_emitted or index in self._held

    def take_next(self, output: RequestOutput) -> TokenChunk | None:
        """Add and return tokens that come in their order, behind the first and before the last, as
        almost all do, without log probabilities. None, with nothing added: `push` takes it.
        """
        _, first, token_ids, _, counts, details = output
        end = first + len(token_ids)
        is_next = first == self.num_emitted and 0 < first < end <= self.max_tokens
        if not is_next or details is not NO_DETAILS or self._held or self._has_logprobs:
            return None
        self.num_emitted = end
        self.emitted += token_ids
        if counts is not None:
            self._note(counts)
        new_counts = None if self._counts is self._emitted_counts else self._new_counts()
        return new_chunk((first, token_ids, (), None, new_counts, None))

    def push(self, output: RequestOutput, complete_from: int) -> TokenChunk | None:
        """Add an output and return what can be emitted now, if anything.

        A chunk that completes the answer carries its finish reason. A node that ends the answer has
        sent everything from index `complete_from` on.

        Raises `PeerProtocolError` for what no node may send: tokens after `max_tokens`, tokens, or
        token 0, without the logprobs that were asked for, an end with tokens missing, too many
        tokens after a missing one.
        """
        chunk = self.take_next(output)
        if chunk is not None:
            return chunk
        first, token_ids, details = output.first_index, output.token_ids, output.details
        if first + len(token_ids) > self.max_tokens or self._has_logprobs:
            self._check(output)
        logprobs = details.logprobs if self._has_logprobs else ()
        if output.counts is not None:
            self._note(output.counts)
        of_prompt = None  # token 0 leaves as it comes, so nothing keeps it
        if first == 0 and token_ids and not self.has(0):
            of_prompt = self._prompt_result(output)
        if first == self.num_emitted and not self._held and token_ids:
            if details.finish_reason is not None:
                self._end, self._reason = first + len(token_ids), details.finish_reason
        elif first != self.num_emitted or self._held or details.finish_reason is not None:
            self._hold(first, token_ids, logprobs)
            if details.finish_reason is not None:
                self._note_end(output, details.finish_reason, complete_from)
            first, token_ids, logprobs = self._release()
        self.emitted += token_ids
        self.num_emitted += len(token_ids)
        reason = None if self._end is None or self.num_emitted < self._end else self._reason
        if not token_ids and reason is None:
            return None
        return new_chunk((first, token_ids, logprobs, reason, self._new_counts(), of_prompt))

    def _prompt_result(self, output: RequestOutput) -> PromptResult:
        details, found = output.details, None
        if self._sampling.prompt_logprobs is not None:
            found, wanted = details.prompt_logprobs, self._num_prompt_tokens - 1
            num_found = 0 if found is None else len(found)
            if num_found != wanted:
                raise PeerProtocolError(
                    f"{output.id}: logprobs of {num_found} tokens of the prompt: wanted {wanted}"
                )
        return PromptResult(
            queue_s=details.queue_s, compute_s=details.compute_s, prompt_logprobs=found
        )

    def note_cached(self, num_tokens: int) -> None:
        """Note how much of the prompt was cached. Only nodes that begin the answer count."""
        self._note(RequestCounts(num_tokens))

    def _note(self, counts: RequestCounts) -> None:
        """Note the counts of a node of this attempt; one of its nodes verifies drafts."""
        known = self._counts
        if counts == known:
            return
        noted = RequestCounts(*map(max, known, counts))
        if self.num_before:
            noted = noted._replace(num_cached_tokens=known.num_cached_tokens)
        if noted != known:
            self._counts = noted

    def _new_counts(self) -> RequestCounts | None:
        """Return the counts of all attempts, if they are not those of the chunk before."""
        if self._counts is self._emitted_counts:
            return None
        self._emitted_counts = self._counts
        cached, drafted, accepted = self._counts
        before = self._counts_before
        return RequestCounts(cached, before.num_drafted + drafted, before.num_accepted + accepted)

    def _check(self, output: RequestOutput) -> None:
        num_tokens, num_logprobs = len(output.token_ids), len(output.details.logprobs)
        if output.first_index + num_tokens > self.max_tokens:
            last = output.first_index + num_tokens - 1
            raise PeerProtocolError(
                f"{output.id}: token index {last}, max_tokens is {self.max_tokens}"
            )
        if self._has_logprobs and num_logprobs != num_tokens:
            raise PeerProtocolError(f"{output.id}: {num_logprobs} logprobs for {num_tokens} tokens")

    def _hold(
        self, first: int, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]
    ) -> None:
        entries = logprobs if self._has_logprobs else (None,) * len(token_ids)
        for index, token in enumerate(zip(token_ids, entries, strict=True), first):
            if not self.has(index):
                self._held[index] = token

    def _note_end(self, output: RequestOutput, reason: FinishReason, complete_from: int) -> None:
        known = [self.num_emitted, *(index + 1 for index in self._held)]
        end = output.first_index + len(output.token_ids) if output.token_ids else max(known)
        first = max(complete_from, self.num_emitted)
        missing = [index for index in range(first, end) if index not in self._held]
        if missing or end == 0:
            raise PeerProtocolError(f"{output.id}: ended at {end} tokens without {missing[:4]}")
        self._end, self._reason = end, reason

    def _release(self) -> tuple[int, tuple[int, ...], tuple[TokenLogprobs, ...]]:
        """Return the index of the next token, and the tokens held from there on without a gap."""
        first = index = self.num_emitted
        end = self.max_tokens if self._end is None else self._end
        while index < end and index in self._held:
            index += 1
        tokens = [self._held.pop(held) for held in range(first, index)]
        if len(self._held) > MAX_HELD_TOKENS:
            raise PeerProtocolError(f"{len(self._held)} tokens arrived, but not index {index}")
        logprobs = tuple(entry for _, entry in tokens if entry is not None)
        return first, tuple(token_id for token_id, _ in tokens), logprobs

    def continued(self) -> TokenLedger:
        """Return the ledger of another attempt, which begins after what was emitted here.

        Draft counts go on: those of this attempt were verified, and became output where it has
        emitted anything.
        """
        after = TokenLedger(self._sampling, self._num_prompt_tokens)
        after.emitted = list(self.emitted)
        after.num_emitted = after.num_before = self.num_emitted
        before, counts = self._counts_before, self._counts
        has_drawn = self.num_emitted > self.num_before
        num_accepted = before.num_accepted + (counts.num_accepted if has_drawn else 0)
        after._counts_before = RequestCounts(
            0, before.num_drafted + counts.num_drafted, num_accepted
        )
        after._emitted_counts = None
        if self.num_emitted:
            after._counts = RequestCounts(counts.num_cached_tokens)
        return after
