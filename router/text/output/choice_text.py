"""One choice of an answer: tokens in, text to send out.

Runs tokens through the detokenizer and the stop strings, and keeps each token's logprobs with its
text: an entry is sent with its token's first character, and never if a stop string cut that
character off. That of a token without text, such as an end that is ignored, is sent with the text
before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from common.errors import InternalError
from common.prompt_logprobs import PromptLogprobs
from common.request import NO_COUNTS, FinishReason, RequestCounts, TokenLogprobs
from router.core.generation import PromptResult, TokenChunk
from router.text.output.stop_search import StopSearch
from router.text.output.stop_strings import NO_TOKENS, without_marks
from router.tools.harmony.reading import AnalysisTokens
from router.tools.stop_scope import MessageScope, StopScope
from router.tools.thinking import ThinkingTokens


class TextDecoder(Protocol):
    """The interface that turns tokens into text; see `detokenizer.Detokenizer`."""

    @property
    def has_pending(self) -> bool: ...

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """A token with its probabilities; `text_offset` is where its text starts in the answer.

    `logprobs` is None for the first token of a prompt alone.
    """

    token_id: int
    logprobs: TokenLogprobs | None
    text_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaDetails:
    """What the first and the last delta of a choice have, and those whose counts are new.

    Of the accepted drafts, `counts` has those that are among the choice's tokens; None: as in the
    delta before. `stop_reason` is the stop string, or the id of the stop token, that ended the
    choice; None for any other end, such as an end-of-sequence token. `of_prompt` is the chunk's.
    `num_thinking` of the tokens so far are thinking; None: as in the delta before. `echoed` are the
    entries of a prompt that is shown, with the first delta.
    """

    counts: RequestCounts | None = None
    num_thinking: int | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    of_prompt: PromptResult | None = None
    echoed: Sequence[LogprobEntry] = ()


_NO_DETAILS = DeltaDetails()


class Delta(NamedTuple):
    """What one chunk of tokens adds to a choice. `num_tokens` counts every token generated.

    `token_ids` are all tokens, whether their text is shown or not.
    """

    text: str
    num_tokens: int
    token_ids: tuple[int, ...]
    entries: tuple[LogprobEntry, ...] = ()
    details: DeltaDetails = _NO_DETAILS


MakeEchoed = Callable[[PromptLogprobs | None], Sequence[LogprobEntry]]
"""Makes the entries of a prompt that is shown."""

_new_delta: Callable[[tuple[object, ...]], Delta] = partial(tuple.__new__, Delta)
"""Makes a `Delta` from all of its fields in order, in a third of the time."""


def _logprobs_of(prompt: PromptResult | None) -> PromptLogprobs | None:
    return None if prompt is None else prompt.prompt_logprobs


class ChoiceText:
    """The text of one choice. It keeps only held-back text, so its memory is bounded."""

    def __init__(
        self,
        decoder: TextDecoder,
        stop: Sequence[str],
        *,
        min_tokens: int = 0,
        has_logprobs: bool = False,
        hidden_token_ids: Container[int] = (),
        stop_token_ids: Container[int] = (),
        named_tokens: Mapping[str, int] = NO_TOKENS,
        shows_stop: bool = False,
        echo: str = "",
        echoed: MakeEchoed | None = None,
        has_output: bool = True,
        scope: StopScope | MessageScope | None = None,
        thinking: ThinkingTokens | AnalysisTokens | None = None,
    ) -> None:
        """Start a choice.

        A stop string that ends in the text of the first `min_tokens` tokens is text like any other.
        `has_logprobs`: every token comes with its logprobs, which are passed on. A token in
        `hidden_token_ids` is not shown if the answer stops at it, and one in `stop_token_ids` is
        then the reason of the stop; a stop string is shown with `shows_stop` alone. Of the special
        tokens without a text, stop strings name `named_tokens`, and are found where these are.
        `echo` (a prompt) is shown before the answer, with the entries that `echoed` makes of its
        log probabilities; stop strings are not searched in it, nor outside of `scope` where there
        is one. Without `has_output` that is all: what a node drew is not shown or counted. The
        tokens that the answer thinks are counted by `thinking`; None: it does not think.
        """
        self._decoder = decoder
        self._stops = StopSearch(
            stop,
            is_shown=shows_stop,
            named_tokens=named_tokens,
            min_tokens=min_tokens,
            scope=scope,
        )
        self._marks = self._stops.mark_of
        self._num_marks = 0
        self._is_plain = not stop and not has_logprobs
        self._thinking = thinking
        self._is_bare = self._is_plain and has_output and not echo and echoed is None
        self._has_logprobs = has_logprobs
        self._hidden = hidden_token_ids
        self._stop_token_ids = stop_token_ids
        self._echo = echo
        self._echoed = echoed
        self._has_output = has_output
        self._counts = NO_COUNTS
        self._entries: deque[tuple[int, LogprobEntry]] = deque()
        """The entries that are not sent yet, each with the characters before or with it."""
        self._decoded_chars = self._sent_chars = len(echo)
        """The characters so far, and the marks of hidden tokens among them, which are not shown."""

    def push_all(self, chunks: Sequence[TokenChunk]) -> list[Delta]:
        """Return one delta for each chunk, up to the one that ends the choice; see `push`."""
        deltas, decode = [], self._decoder.push
        for chunk in chunks:
            _, token_ids, _, reason, counts, of_prompt = chunk
            is_usual = reason is None and counts is None and of_prompt is None
            is_bare = self._is_bare and self._thinking is None
            if is_usual and is_bare and len(token_ids) == 1:
                # As in almost all chunks.
                deltas.append(_new_delta((decode(token_ids[0]), 1, token_ids, (), _NO_DETAILS)))
                continue
            delta = self.push(chunk)
            deltas.append(delta)
            if delta.details.finish_reason is not None:
                break
        return deltas

    def push(self, chunk: TokenChunk) -> Delta:
        """Return the delta of one chunk. With a `finish_reason` set, the choice is over.

        Raises `InternalError` when tokens come without the logprobs that were asked for.
        """
        if not self._has_output:
            return self._without_output(chunk)
        _, token_ids, _, finish_reason, counts, of_prompt = chunk
        self._counts = counts or self._counts
        entries: tuple[LogprobEntry, ...] = ()
        echoed: Sequence[LogprobEntry] = ()
        stop_reason: str | int | None = None
        num_tokens = len(token_ids)
        thinking = self._thinking
        if self._is_plain:
            text = "".join(map(self._decode, self._shown(chunk)))
            if finish_reason is not None:
                text += self._decoder.flush()
                stop_reason = self._stop_token(chunk)
        else:
            text, num_tokens = self._filter(chunk)
            entries = tuple(self._take_entries())
            stop_reason = self._stops.found or self._stop_token(chunk)
            if self._stops.found:
                finish_reason = FinishReason.STOP
                # The token that ends a stop string is the model's own; the tokens it cut off were
                # drafts.
                num_cut = max(len(token_ids) - num_tokens - 1, 0)
                num_accepted = max(self._counts.num_accepted - num_cut, 0)
                counts = self._counts._replace(num_accepted=num_accepted)
                token_ids = token_ids[:num_tokens]
        if self._echo:
            text, self._echo = self._echo + text, ""
        if self._echoed is not None:
            echoed, self._echoed = self._echoed(_logprobs_of(of_prompt)), None
        details = DeltaDetails(
            counts=counts,
            num_thinking=None if thinking is None else thinking.num,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            of_prompt=of_prompt,
            echoed=echoed,
        )
        return Delta(text, num_tokens, token_ids, entries, details)

    def _without_output(self, chunk: TokenChunk) -> Delta:
        """Return the prompt alone; the token that a node drew ended the choice."""
        of_prompt = chunk.of_prompt
        num_cached_tokens = (chunk.counts or NO_COUNTS).num_cached_tokens
        details = DeltaDetails(
            counts=RequestCounts(num_cached_tokens),
            finish_reason=FinishReason.LENGTH,
            of_prompt=of_prompt,
            echoed=() if self._echoed is None else self._echoed(_logprobs_of(of_prompt)),
        )
        return Delta(self._echo, 0, (), details=details)

    def _decode(self, token_id: int) -> str:
        text = self._decoder.push(token_id)
        if self._thinking is not None:
            self._thinking.push(text)
            if self._thinking.is_over:
                self._thinking = None
        return text

    def _filter(self, chunk: TokenChunk) -> tuple[str, int]:
        """Return the text that stop strings let through, and how many tokens were generated."""
        if self._has_logprobs and len(chunk.logprobs) != len(chunk.token_ids):
            raise InternalError(
                f"{len(chunk.logprobs)} logprobs came with {len(chunk.token_ids)} tokens"
            )
        pieces = []
        num_tokens = len(chunk.token_ids)
        for index, token_id in enumerate(self._shown(chunk)):
            mark = self._marks.get(token_id, "")
            decoded = self._decode(token_id) + mark
            if self._has_logprobs:
                begin = self._decoded_chars
                has_text = bool(decoded) or self._decoder.has_pending
                offset = begin - self._num_marks
                entry = LogprobEntry(token_id, chunk.logprobs[index], offset)
                self._entries.append((begin + has_text, entry))
            self._num_marks += len(mark)
            self._decoded_chars += len(decoded)
            pieces.append(self._stops.push(decoded))
            if self._stops.found:
                num_tokens = index + 1
                break
        if chunk.finish_reason is not None and not self._stops.found:
            rest = self._decoder.flush()
            self._decoded_chars += len(rest)
            pieces.append(self._stops.end(rest))
        text = "".join(pieces)
        self._sent_chars += len(text)
        return without_marks(text) if self._num_marks else text, num_tokens

    def _shown(self, chunk: TokenChunk) -> Sequence[int]:
        """Return the tokens without the one that the answer stopped at, where it is not shown."""
        token_ids = chunk.token_ids
        if chunk.finish_reason is FinishReason.STOP and token_ids and token_ids[-1] in self._hidden:
            return token_ids[:-1]
        return token_ids

    def _stop_token(self, chunk: TokenChunk) -> int | None:
        """Return the stop token that ended the choice; None for another end, or none."""
        if chunk.finish_reason is FinishReason.STOP and chunk.token_ids:
            last = chunk.token_ids[-1]
            return last if last in self._stop_token_ids else None
        return None

    def _take_entries(self) -> Iterator[LogprobEntry]:
        """Yield the entries whose text is sent now; all of them when no text is held back."""
        is_all_out = self._sent_chars == self._decoded_chars and not self._decoder.has_pending
        while self._entries and (is_all_out or self._entries[0][0] <= self._sent_chars):
            yield self._entries.popleft()[1]
