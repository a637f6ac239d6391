"""Special tokens that a user wrote are text, not control tokens.

A tokenizer takes the text of a special token, as in `<|im_end|>`, for the token itself, so a user
could end a turn and begin another one with another role. Such text is replaced by a mark before a
chat template puts it among the template's own special tokens, and tokenised in two pieces behind
it, of which none is the text of a special token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

_BEGIN, _END = "\ue000", "\ue001"
"""Characters for private use, which templates copy. `_BEGIN` in a user's text gets a mark too."""
_MARK = re.compile(f"{_BEGIN}([0-9]+){_END}")

Encode = Callable[[str], Sequence[int]]


class SpecialText:
    """Marks the text of special tokens, and tokenises marked text."""

    def __init__(self, texts: Collection[str]) -> None:
        """Know the special tokens' `texts`."""
        # A token of one character cannot be cut into pieces that are another text.
        self._texts = [_BEGIN, *sorted((one for one in texts if len(one) > 1), key=len)]
        self._number = {text: number for number, text in enumerate(self._texts)}
        # The longest first, as tokenizers do it.
        self._any = re.compile("|".join(map(re.escape, reversed(self._texts))))

    def marked(self, text: str) -> str:
        """Return `text` with a mark for each special token's text."""
        return self._any.sub(lambda found: f"{_BEGIN}{self._number[found[0]]}{_END}", text)

    def encoded(self, text: str, encode: Encode) -> list[int]:
        """Return the tokens of a text with marks; other special tokens in it are themselves."""
        ids: list[int] = []
        end = 0
        for mark in _MARK.finditer(text):
            ids += encode(text[end : mark.start()])
            ids += self._as_text(self._texts[int(mark[1])], encode)
            end = mark.end()
        ids += encode(text[end:])
        return ids

    def _as_text(self, text: str, encode: Encode) -> list[int]:
        """Return the tokens of the characters of `text`, none of which is a special token."""
        found = self._any.search(text)
        if found is None or text == _BEGIN:
            return list(encode(text))
        cut = found.start() + 1
        return [*encode(text[:cut]), *self._as_text(text[cut:], encode)]
