"""Special tokens that a user wrote are text, not control tokens.

A tokenizer takes the text of a special token, as in `<|im_end|>`, for the token itself, so a user
could end a turn and begin another one with another role. Such text is replaced by a mark before a
chat template puts it among the template's own special tokens, and tokenised in two pieces after
it, of which none is the text of a special token.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_BEGIN, _END = "\ue000", "\ue001"
"""Characters for private use, which templates copy. `_BEGIN` in a user's text gets a mark too."""
_MARK = re.compile(f"{_BEGIN}([0-9]+){_END}")


class SpecialText:
    """Marks the text of special tokens, and cuts marked text into pieces."""

    def __init__(self, texts: Collection[str]) -> None:
        """Know the special tokens' `texts`."""
        # A token of one character cannot be cut into pieces that are another text.
        self._texts = [_BEGIN, *sorted((one for one in texts if len(one) > 1), key=len)]
        self._number = {text: number for number, text in enumerate(self._texts)}
        # The longest first, as tokenizers do it.
        self._any = re.compile("|".join(map(re.escape, reversed(self._texts))))
        self._parts = [self._as_text(text) for text in self._texts]

    def marked(self, text: str) -> str:
        """Return `text` with a mark for each special token's text."""
        return self._any.sub(lambda found: f"{_BEGIN}{self._number[found[0]]}{_END}", text)

    def named_in(self, text: str) -> list[str]:
        """Return the texts of special tokens in `text`, each where it stands."""
        return [found for found in self._any.findall(text) if found != _BEGIN]

    def pieces(self, text: str) -> list[str]:
        """Return a text with marks as pieces, to be tokenised one by one, at least one.

        What was marked is in pieces of which none is the text of a special token; other special
        tokens are themselves.
        """
        pieces: list[str] = []
        end = 0
        for mark in _MARK.finditer(text):
            pieces.append(text[end : mark.start()])
            pieces += self._parts[int(mark[1])]
            end = mark.end()
        pieces.append(text[end:])
        return [piece for piece in pieces if piece] or [""]

    def _as_text(self, text: str) -> list[str]:
        """Cut `text` after the first character of each special token in it."""
        found = self._any.search(text)
        if found is None or text == _BEGIN:
            return [text]
        cut = found.start() + 1
        return [text[:cut], *self._as_text(text[cut:])]
