"""Token ids to text, a few at a time.

A token is not a piece of text: an emoji may take four tokens, and a decoder may treat the first
token of a text differently from the rest. So a short window is decoded again each time: tokens
whose text was returned already (the context), then the new ones. The text beyond the context's text
is new, unless it ends in U+FFFD: then the last character may be incomplete. The window never
exceeds `2 * MAX_PENDING` tokens, so the cost per token is constant.

The text of some tokens does not depend on their neighbours and is whole characters, as for most
tokens of a byte-level tokenizer. Such text is looked up instead.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

MAX_PENDING = 12
"""The most tokens that may wait for a character to become complete.

UTF-8 has at most 4 bytes per character, so only output that is not text waits so long.
"""

_REPLACEMENT = "\ufffd"


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
    ) -> None:
        """Start an answer.

        `decode` turns ids into text; tokens in `special_token_ids` have no text. `whole_text`
        returns the text of a token if that is whole and the same everywhere, and None for others.
        `continues` are tokens that the answer directly continues, as a completion continues its
        prompt: some decoders drop the space before the first token of a text. Where there are
        none, the text is as it would be `behind` those tokens.
        """
        self._decode = decode
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
        return bool(self._pending)

    def push(self, token_id: int) -> str:
        """Add one token; return the text that is certain now, often one token's, sometimes ''."""
        if token_id in self._special:
            return ""
        if not self._pending and (whole := self._whole_text(token_id)) is not None:
            # The following tokens need no context either, because this is a whole character.
            if self._context:
                self._context, self._context_text = [], ""
            return whole
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if not text.endswith(_REPLACEMENT):
            return self._advance(len(self._pending), text)
        if len(self._pending) < MAX_PENDING:
            return ""
        settled = self._settled_tokens()
        return self._advance(settled, self._decode(self._context + self._pending[:settled]))

    def flush(self) -> str:
        """End the answer; return unfinished bytes as U+FFFD."""
        if not self._pending:
            return ""
        return self._advance(len(self._pending), self._decode(self._context + self._pending))

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
