"""Block arithmetic and block hashes.

The hash of a block covers the cache's fingerprint (model and layout), the request's salt and every
token before the block's end, so equal hashes mean equal KV. It is SHA-256, because after a
collision one user would get the text of another.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache

HASH_BYTES = 16
BlockHash = bytes
"""`HASH_BYTES` of a SHA-256."""
BlockKey = int
"""The first 8 bytes of a block hash: enough for a hint about who holds the block."""
KEY_BYTES = 8
_SHA256 = hashlib.sha256()


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` tokens: integer ceiling division."""
    return -(-num_tokens // block_size)


def block_key(block_hash: BlockHash) -> BlockKey:
    """Return the short name of a block, by which nodes and routers speak of it."""
    return int.from_bytes(block_hash[:KEY_BYTES])


def block_keys(block_hashes: Iterable[BlockHash]) -> tuple[BlockKey, ...]:
    """Return the short names of blocks, in a fifth of the time that one after the other takes."""
    words = array("Q", b"".join(block_hashes))
    if sys.byteorder == "little":
        words.byteswap()
    return tuple(words[:: HASH_BYTES // KEY_BYTES])


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
    return hash_words_behind(root_hash(fingerprint, salt), array("I", token_ids), block_size)


def hash_words_behind(parent: BlockHash, words: array[int], block_size: int) -> list[BlockHash]:
    """Return the hashes of the full blocks of `words`, which come behind the block `parent`.

    `parent` is that block's hash, or the root; a word is a token in 32 bits without a sign.
    """
    content, step = words.tobytes(), block_size * words.itemsize
    hashes: list[BlockHash] = []
    begin = _SHA256.copy  # a fifth of the time goes into `hashlib.sha256`
    for end in range(step, len(content) + 1, step):
        block = begin()
        block.update(parent + content[end - step : end])
        parent = block.digest()[:HASH_BYTES]
        hashes.append(parent)
    return hashes
