"""Tokens in place of those that a recording lacks: equal where the recorded ones were. Pure.

A node's decisions depend on tokens in two ways: on which blocks of two sequences are equal, and on
which token ends an answer. A recording has the hashes of all full blocks, so the tokens of a block
follow from its hash: equal blocks after equal ones get equal tokens, and other blocks other tokens.
Tokens of a block that was never full are equal to no others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from common.kv.blocks import BlockHash, hash_full_blocks

END_TOKEN = 0
"""The token that ends every answer; no other is equal to it."""
VOCAB_SIZE = 1 << 31
UNKNOWN_TOKEN = VOCAB_SIZE
"""A token outside of the vocabulary."""
_TOKEN_BYTES = 4


class MadeUpTokens:
    """The tokens of one node's sequences, by the number of the sequence and their index in it."""

    def __init__(self, fingerprint: str, block_size: int) -> None:
        self._fingerprint, self._block_size = fingerprint, block_size
        self._hashes: dict[int, dict[int, BlockHash]] = {}
        self._made: dict[BlockHash, BlockHash] = {}

    def add(self, sequence_id: int, first: int, hashes: Iterable[BlockHash]) -> None:
        """Take the recorded hashes of a sequence's blocks, from the block `first` on."""
        self._hashes.setdefault(sequence_id, {}).update(enumerate(hashes, first))

    def tokens(self, sequence_id: int, start: int, end: int) -> tuple[int, ...]:
        """Return the tokens `start` to `end`, exclusive, of a sequence."""
        known, size = self._hashes.get(sequence_id, {}), self._block_size
        found = []
        for index in range(start, end):
            block_hash = known.get(index // size)
            name = b"sequence %d" % sequence_id if block_hash is None else block_hash
            at = index if block_hash is None else index % size
            found.append(_token(name, at))
        return tuple(found)

    def tell_hashes(self) -> None:
        """Find the hashes that nodes compute of these tokens, for `made`."""
        for sequence_id, known in self._hashes.items():
            recorded: list[BlockHash] = []
            while len(recorded) in known:
                recorded.append(known[len(recorded)])
            if recorded and recorded[-1] not in self._made:
                tokens = self.tokens(sequence_id, 0, len(recorded) * self._block_size)
                made = hash_full_blocks(tokens, self._block_size, self._fingerprint)
                self._made.update(zip(recorded, made, strict=True))

    def made(self, hashes: Sequence[BlockHash]) -> tuple[BlockHash, ...]:
        """Return the hashes of the replayed blocks; one that no sequence had stays as it is."""
        return tuple(self._made.get(one, one) for one in hashes)


def _token(name: bytes, index: int) -> int:
    digest = hashlib.blake2b(b"%b %d" % (name, index), digest_size=_TOKEN_BYTES).digest()
    return int.from_bytes(digest) % (VOCAB_SIZE - 1) + 1
