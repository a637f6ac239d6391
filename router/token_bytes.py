"""The bytes that a single token stands for, whatever the tokenizer's family."""

from __future__ import annotations

import json
import re
from functools import cache

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Looks tokens up one by one; what a decoder does to the start of a text is left out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        layout = json.loads(tokenizer.to_str())
        decoder = json.dumps(layout.get("decoder"), ensure_ascii=False)
        self._tokenizer = tokenizer
        self._is_byte_level = '"ByteLevel"' in decoder
        self._has_byte_tokens = '"ByteFallback"' in decoder
        self._has_word_marks = "▁" in decoder

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes; empty for an id without a token."""
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


@cache
def _byte_of_char() -> dict[str, int]:
    """Byte-level tokenizers write each byte as one printable character; this reads them back.

    Bytes that print stand for themselves, the rest are numbered from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return table
