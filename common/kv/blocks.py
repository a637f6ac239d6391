"""Block arithmetic and block hashes.

The hash of a block covers the cache's fingerprint (model and layout), the request's salt and every
token before the block's end, so equal hashes mean equal KV. It is SHA-256, because after a
collision one user would get the text of another.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from functools import lru_cache

HASH_BYTES = 16
BlockHash = bytes
"""`HASH_BYTES` of a SHA-256."""
BlockKey = int
"""The first 8 bytes of a block hash: enough for a hint about who holds the block."""
KEY_BYTES = 8


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` tokens: integer ceiling division."""
    return -(-num_tokens // block_size)


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Return the hash of one full block after `parent` (the hash before it, or the root)."""
    return hashlib.sha256(parent + array("I", token_ids).tobytes()).digest()[:HASH_BYTES]


def block_key(block_hash: BlockHash) -> BlockKey:
    """Return the short name of a block, by which nodes and routers speak of it."""
    return int.from_bytes(block_hash[:KEY_BYTES])


@lru_cache(maxsize=1024)
def root_hash(fingerprint: str, salt: str = "") -> BlockHash:
    """Return the parent of every first block of one model, layout and salt."""
    root = b"pdserve/1 " + fingerprint.encode()
    if salt:
        root += b"\0" + salt.encode()
    return hashlib.sha256(root).digest()[:HASH_BYTES]


def hash_full_blocks(
    token_ids: Sequence[int], block_size: int, fingerprint: str, salt: str = ""
) -> list[BlockHash]:
    """Return the hashes of the full blocks of `token_ids` in order, without a partial last one."""
    hashes: list[BlockHash] = []
    parent = root_hash(fingerprint, salt)
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = hash_block(parent, token_ids[end - block_size : end])
        hashes.append(parent)
    return hashes
