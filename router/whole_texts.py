"""Tokens whose text is whole and the same wherever they stand, looked up instead of decoded."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders

_REPLACEMENT = "\ufffd"


class WholeTexts(dict[int, str | None]):
    """Token id to text, filled as it is asked for; None where neighbours may have a say.

    A byte-level decoder joins the bytes of all tokens, so a token of whole characters has the same
    text everywhere. Others drop or add spaces at the beginning of a text: there all are None.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)

    def __missing__(self, token_id: int) -> str | None:
        text: str | None = None
        if self._tokenizer.id_to_token(token_id) is None:
            return None  # not kept: only the vocabulary bounds what is
        if self._is_byte_level:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            if not text or _REPLACEMENT in text:
                text = None
        self[token_id] = text
        return text
