"""Encrypts what is written to files of blocks, and decrypts what is read.

AES-256-GCM with a random nonce for each file, which stands before the block, and its tag behind it.
The header of the file is authenticated with it: a file that was copied to the name of another block
is not that block. `cryptography` is imported only where blocks are encrypted.
"""

from __future__ import annotations

import hashlib
import os

from common.errors import ConfigError
from engine.prefix_disk.block_file import CorruptFile

_NONCE_BYTES, _TAG_BYTES = 12, 16
SEAL_BYTES = _NONCE_BYTES + _TAG_BYTES
"""Bytes by which a sealed block is longer."""


class BlockSeal:
    """One key, which follows from a secret. `name` tells keys apart, and nothing about them."""

    def __init__(self, secret: bytes) -> None:
        """Derive the key. Raises `ConfigError` where `cryptography` is not installed."""
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise ConfigError(
                "prefix_disk_encryption is on: wanted the package cryptography, "
                "as in pdserve[keys], which is not installed"
            ) from None
        key = _derived(secret, b"pdserve disk key", 32)
        self.name = _derived(secret, b"pdserve key name", 8).hex()
        self._cipher = AESGCM(key)

    def seal(self, block: memoryview, fields: bytes) -> bytes:
        """Return nonce, encrypted block and tag, for a file with these fields in its header."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, block, fields)

    def open(self, sealed: memoryview, fields: bytes) -> bytes:
        """Return the block. Raises `CorruptFile` unless this key has sealed it for these fields."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], fields)
        except InvalidTag:
            raise CorruptFile("it was not encrypted with this key, or was changed") from None


def _derived(secret: bytes, purpose: bytes, num_bytes: int) -> bytes:
    return hashlib.blake2b(key=secret, person=purpose, digest_size=num_bytes).digest()
