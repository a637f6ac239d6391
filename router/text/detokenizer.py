"""Token ids to text, a few at a time.

A token is not a piece of text: an emoji may take four tokens, and a decoder may treat the first
token of a text differently from the rest. So a short window is decoded again each time: tokens
whose text is out already (the context), then the new ones. What goes beyond the context's text is
new, unless it ends in U+FFFD: then the last character may still be waiting for its bytes.
The window never exceeds `2 * MAX_PENDING` tokens, so the cost per token is constant.

Where a token stands for the same bytes whatever is around it, and they are whole characters, as
most tokens of a byte-level tokenizer are, its text is looked up instead.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

MAX_PENDING = 12
"""Tokens that may wait for a character to become whole. UTF-8 has at most 4 bytes per character,
so only output that is not text at all ever waits so long."""

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """One answer's tokens; the pieces it returns add up to the decoded whole."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        special_token_ids: Container[int],
        continues: Sequence[int] = (),
        *,
        whole_text: Callable[[int], str | None] = lambda _: None,
    ) -> None:
        """`decode` turns ids into text; tokens in `special_token_ids` have no text.

        `whole_text` is the text of a token that is whole and the same everywhere, None for others.

        `continues` are tokens that the answer directly goes on from, as a completion does from its
        prompt: some decoders drop the space before the first token of a text.
        """
        self._decode = decode
        self._special = special_token_ids
        self._context = [
            token for token in continues[-MAX_PENDING:] if token not in special_token_ids
        ]
        self._context_text = decode(self._context)
        if self._context_text.endswith(_REPLACEMENT):  # ends inside a character: no base to add to
            self._context, self._context_text = [], ""
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
            # Whatever comes next needs no context either: it goes on behind a whole character.
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
        """The answer ended: unfinished bytes are shown as U+FFFD."""
        if not self._pending:
            return ""
        return self._advance(len(self._pending), self._decode(self._context + self._pending))

    def _advance(self, num_tokens: int, text: str) -> str:
        """The first pending tokens become the context; `text` is old context and they, decoded."""
        new_text = text[len(self._context_text) :]
        self._context, self._pending = self._pending[:num_tokens], self._pending[num_tokens:]
        self._context_text = self._decode(self._context)
        return new_text

    def _settled_tokens(self) -> int:
        """How many pending tokens stand before the last, maybe unfinished, character.

        A cut is safe where both sides decode to the same text apart as together.
        """
        whole = self._decode(self._pending)
        for keep in range(1, 4):
            left, right = self._pending[:-keep], self._pending[-keep:]
            if self._decode(left) + self._decode(right) == whole:
                return len(left)
        return len(self._pending)
