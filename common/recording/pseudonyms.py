"""Names under a key that nobody has: equal ones stay equal, and nothing else can be learned."""

from __future__ import annotations

import hashlib
import secrets

from common.kv.blocks import KEY_BYTES, BlockHash, BlockKey


class Pseudonyms:
    """The pseudonyms of one recording. Their key is random, and is never written."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def of(self, name: bytes) -> bytes:
        """Return another name, of the same length; none for an empty one."""
        if not name:
            return name
        return hashlib.blake2b(name, digest_size=len(name), key=self._key).digest()

    def of_block(self, block_hash: BlockHash) -> BlockHash:
        """Return the other hash of a block. It begins with the block's other key."""
        return self.of(block_hash[:KEY_BYTES]) + self.of(block_hash[KEY_BYTES:])

    def of_key(self, key: BlockKey) -> BlockKey:
        """Return the other key of a block."""
        return int.from_bytes(self.of(key.to_bytes(KEY_BYTES)))
