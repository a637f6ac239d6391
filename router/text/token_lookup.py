"""The bytes of a single token, and its text if that does not depend on its neighbours."""

from __future__ import annotations

import json
import re
from functools import cache

from tokenizers import Tokenizer, decoders

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Looks up tokens one by one; what a decoder does to the start of a text is left out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        layout = json.loads(tokenizer.to_str())
        decoder = json.dumps(layout.get("decoder"), ensure_ascii=False)
        self._tokenizer = tokenizer
        self._is_byte_level = '"ByteLevel"' in decoder
        self._has_byte_tokens = '"ByteFallback"' in decoder
        self._has_word_marks = "▁" in decoder

    def single_bytes(self) -> dict[int, int]:
        """Return the tokens that stand for one byte each, with the byte.

        A byte-level tokenizer has none of this kind.
        """
        if not self._has_byte_tokens:
            return {}
        ids = ((self._tokenizer.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
        return {token_id: byte for token_id, byte in ids if token_id is not None}

    def __getitem__(self, token_id: int) -> bytes:
        """Return the token's bytes; empty for an id without a token."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            table = _byte_of_char()
            if all(char in table for char in token):
                return bytes(table[char] for char in token)
        elif self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if self._has_word_marks:
            token = token.replace("▁", " ")
        return token.encode()


class TokenTextCache(dict[int, str | None]):
    """Token id to text, filled on first use; None if the text depends on neighbouring tokens.

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
            return None  # not stored: ids outside the vocabulary are unbounded
        if self._is_byte_level:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            if not text or _REPLACEMENT in text:
                text = None
        self[token_id] = text
        return text


@cache
def _byte_of_char() -> dict[str, int]:
    """Return the byte of each printable character by which byte-level tokenizers write bytes.

    Printable bytes represent themselves, the rest are numbered from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table
