"""One choice of an answer: tokens in, text to send out.

Puts the detokenizer and the stop strings behind each other and keeps each token's logprobs with
the text they belong to: an entry leaves when its token's first character does, and never when a
stop string cut that character off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from common.errors import InternalError
from common.request import FinishReason, TokenLogprobs
from router.core.generation import TokenChunk
from router.core.ttft_stages import DispatchStages
from router.text.stop_strings import StopStrings


class TextDecoder(Protocol):
    """What turns tokens into text; `router.text.detokenizer.Detokenizer`."""

    @property
    def has_pending(self) -> bool: ...

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """A token with its probabilities; `text_offset` is where its text starts in the answer."""

    token_id: int
    logprobs: TokenLogprobs
    text_offset: int


class Delta(NamedTuple):
    """What one chunk of tokens adds to a choice. `num_tokens` counts every token generated.

    `num_drafted` and `num_accepted` are the choice's draft tokens so far, and how many of them are
    among its tokens. `stages` is the chunk's.
    """

    text: str
    entries: tuple[LogprobEntry, ...]
    num_tokens: int
    num_cached_tokens: int
    num_drafted: int
    num_accepted: int
    finish_reason: FinishReason | None
    stages: DispatchStages | None


_new_delta: Callable[[tuple[object, ...]], Delta] = partial(tuple.__new__, Delta)
"""From all of its fields in order, in a third of the time."""


class ChoiceText:
    """Keeps nothing but what is held back, so an answer of any length costs the same memory."""

    def __init__(
        self,
        decoder: TextDecoder,
        stop: Sequence[str],
        *,
        has_logprobs: bool = False,
        hidden_token_ids: Container[int] = (),
        echo: str = "",
    ) -> None:
        """`has_logprobs`: every token comes with its logprobs, which are passed on.

        Tokens in `hidden_token_ids` are not shown where an answer stops at them. `echo` is shown
        before the answer (a prompt); stop strings are not sought in it.
        """
        self._decoder = decoder
        self._stops = StopStrings(stop)
        self._is_plain = not stop and not has_logprobs
        self._has_logprobs = has_logprobs
        self._hidden = hidden_token_ids
        self._echo = echo
        self._entries: deque[LogprobEntry] = deque()
        self._decoded_chars = len(echo)
        self._sent_chars = 0

    def push_all(self, chunks: Sequence[TokenChunk]) -> list[Delta]:
        """One delta for each chunk, up to the one that ends the choice."""
        deltas = []
        for chunk in chunks:
            if self._is_plain and chunk.finish_reason is None and not self._echo:
                deltas.append(self._push_plain(chunk))
                continue
            delta = self.push(chunk)
            deltas.append(delta)
            if delta.finish_reason is not None:
                break
        return deltas

    def _push_plain(self, chunk: TokenChunk) -> Delta:
        """What `push` comes to where all text is shown as it comes: once a token."""
        token_ids, push = chunk.token_ids, self._decoder.push
        num_tokens = len(token_ids)
        text = push(token_ids[0]) if num_tokens == 1 else "".join(map(push, token_ids))
        _, _, _, _, cached, drafted, accepted, _, _, stages = chunk
        return _new_delta((text, (), num_tokens, cached, drafted, accepted, None, stages))

    def push(self, chunk: TokenChunk) -> Delta:
        """The delta of one chunk. With a `finish_reason` set, the choice is over.

        Raises `InternalError` when tokens come without the logprobs that were asked for.
        """
        if self._has_logprobs and len(chunk.logprobs) != len(chunk.token_ids):
            raise InternalError(
                f"{len(chunk.logprobs)} logprobs came with {len(chunk.token_ids)} tokens"
            )
        pieces = [self._echo]
        self._echo = ""
        num_tokens = 0
        hidden_at = self._hidden_at(chunk)
        for place, token_id in enumerate(chunk.token_ids):
            num_tokens += 1
            if place == hidden_at:
                break
            if self._has_logprobs:
                entry = LogprobEntry(token_id, chunk.logprobs[place], self._decoded_chars)
                self._entries.append(entry)
            pieces.append(self._show(self._decoder.push(token_id)))
            if self._stops.is_stopped:
                break
        if chunk.finish_reason is not None and not self._stops.is_stopped:
            pieces.append(self._show(self._decoder.flush()))
            pieces.append(self._stops.flush())
        text = "".join(pieces)
        self._sent_chars += len(text)
        finish_reason = FinishReason.STOP if self._stops.is_stopped else chunk.finish_reason
        # What a stop string cut off ends with a token of the model's own; the others were drafts.
        num_cut_drafts = max(len(chunk.token_ids) - num_tokens - 1, 0)
        return Delta(  # once a token: by position, which takes a third of the time
            text,
            tuple(self._take_entries()) if self._entries else (),
            num_tokens,
            chunk.num_cached_tokens,
            chunk.num_drafted,
            max(chunk.num_accepted - num_cut_drafts, 0),
            finish_reason,
            chunk.stages,
        )

    def _hidden_at(self, chunk: TokenChunk) -> int | None:
        """Where the token is that the answer stopped at: counted, but not shown."""
        if chunk.finish_reason is not FinishReason.STOP or not chunk.token_ids:
            return None
        return len(chunk.token_ids) - 1 if chunk.token_ids[-1] in self._hidden else None

    def _show(self, text: str) -> str:
        self._decoded_chars += len(text)
        return self._stops.push(text)

    def _take_entries(self) -> Iterator[LogprobEntry]:
        """The entries whose text is out now; all of them when no text is held back."""
        is_all_out = self._sent_chars == self._decoded_chars and not self._decoder.has_pending
        while self._entries and (is_all_out or self._entries[0].text_offset < self._sent_chars):
            yield self._entries.popleft()
