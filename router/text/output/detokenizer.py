"""Token ids to text, a few at a time.

A token is not a piece of text: an emoji may take four tokens, and a decoder may treat the first
token of a text differently from the rest. So a short window is decoded again each time: tokens
whose text was returned already (the context), then the new ones. The text beyond the context's text
is new, unless it ends in U+FFFD: then the last character may be incomplete. The window never
exceeds `2 * MAX_PENDING` tokens, so the cost per token is constant.

The text of some tokens does not depend on their neighbours and is whole characters, as for most
tokens of a byte-level tokenizer. Such text is looked up instead.

Other tokenizers have a token for each byte, for characters that have none of their own. Their
decoder takes all bytes in a row together: one that fits nowhere would make characters before and
after it unreadable, also those that were returned. So bytes are read here, one by one.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType

MAX_PENDING = 12
"""The most tokens that may wait for a character to become complete.

UTF-8 has at most 4 bytes per character, so only output that is not text waits so long.
"""

_REPLACEMENT = "\ufffd"
_NO_BYTES: Mapping[int, int] = MappingProxyType({})
NO_MARKS: Mapping[int, str] = MappingProxyType({})
_new_reader = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One answer's tokens; the pieces it returns add up to the decoded whole."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        special_token_ids: Container[int],
        continues: Sequence[int] = (),
        *,
        behind: Sequence[int] = (),
        whole_text: Callable[[int], str | None] = lambda _: None,
        bytes_of: Mapping[int, int] = _NO_BYTES,
        marks: Mapping[int, str] = NO_MARKS,
    ) -> None:
        """Start an answer.

        `decode` turns ids into text; tokens in `special_token_ids` have no text. `whole_text`
        returns the text of a token if that is whole and the same everywhere, and None for others.
        `continues` are tokens that the answer directly continues, as a completion continues its
        prompt: some decoders drop the space before the first token of a text. Where there are
        none, the text is as it would be `behind` those tokens. `bytes_of` has the tokens that stand
        for one byte each, of a tokenizer that has others for characters. `marks` has what stands
        for tokens in place of their text.
        """
        self._decode = decode
        self._bytes_of = bytes_of
        self._marks = marks
        self._reader = _new_reader("replace")
        self._read: list[int] = []
        """Tokens of bytes, up to those of a character that is not whole."""
        self._special = special_token_ids
        self._context = [
            token for token in continues[-MAX_PENDING:] if token not in special_token_ids
        ] or list(behind)
        self._context_text = decode(self._context)
        while self._context_text.endswith(_REPLACEMENT):  # ends inside a character
            self._context = self._context[:-1]
            self._context_text = decode(self._context)
        self._pending: list[int] = []
        self._whole_text = whole_text

    @property
    def has_pending(self) -> bool:
        """Whether tokens wait for the rest of their character."""
        return bool(self._pending or self._read)

    def push(self, token_id: int) -> str:
        """Add one token; return the text that is certain now, often one token's, sometimes ''."""
        if token_id in self._marks:
            return self.flush() + self._marks[token_id]
        if token_id in self._special:
            return ""
        if not self._pending and (whole := self._whole_text(token_id)) is not None:
            # The following tokens need no context either, because this is a whole character.
            if self._context:
                self._context, self._context_text = [], ""
            return whole
        if token_id in self._bytes_of:
            return self._flush_pending() + self._push_byte(token_id)
        before = self._flush_bytes()
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if not text.endswith(_REPLACEMENT):
            return before + self._advance(len(self._pending), text)
        if len(self._pending) < MAX_PENDING:
            return before
        settled = self._settled_tokens()
        return before + self._advance(
            settled, self._decode(self._context + self._pending[:settled])
        )

    def flush(self) -> str:
        """End the answer; return unfinished bytes as U+FFFD."""
        return self._flush_pending() + self._flush_bytes()

    def _flush_pending(self) -> str:
        if not self._pending:
            return ""
        return self._advance(len(self._pending), self._decode(self._context + self._pending))

    def _push_byte(self, token_id: int) -> str:
        """Add a token that is a byte; return the characters that are whole, or will never be."""
        text = self._reader.decode(bytes((self._bytes_of[token_id],)))
        self._read.append(token_id)
        self._keep_as_context(len(self._read) - len(self._reader.getstate()[0]))
        return text

    def _flush_bytes(self) -> str:
        """Return U+FFFD for a character that does not become whole, if there is one."""
        if not self._read:
            return ""
        text = self._reader.decode(b"", final=True)
        self._reader.reset()
        self._keep_as_context(len(self._read))
        return text

    def _keep_as_context(self, num_tokens: int) -> None:
        """Make the first tokens of bytes the context of what follows."""
        if num_tokens:
            self._context, self._read = self._read[:num_tokens], self._read[num_tokens:]
            self._context_text = self._decode(self._context)

    def _advance(self, num_tokens: int, text: str) -> str:
        """Make the first pending tokens the context; return their text.

        `text` is the decoded text of the old context and these tokens.
        """
        new_text = text[len(self._context_text) :]
        self._context, self._pending = self._pending[:num_tokens], self._pending[num_tokens:]
        self._context_text = self._decode(self._context)
        return new_text

    def _settled_tokens(self) -> int:
        """Return how many pending tokens come before the last, maybe unfinished, character.

        A cut is safe if both sides decode to the same text separately as together.
        """
        whole = self._decode(self._pending)
        for keep in range(1, 4):
            left, right = self._pending[:-keep], self._pending[-keep:]
            if self._decode(left) + self._decode(right) == whole:
                return len(left)
        return len(self._pending)
