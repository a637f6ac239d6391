"""The prefix cache, used by sequences: find a sequence's cached blocks, publish its new ones."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from common.kv.blocks import BlockHash, hash_words_behind, root_hash
from engine.core.blocks.block_pool import BlockPool
from engine.core.sequences.sequence import Sequence


class PrefixIndex:
    """Hashes full blocks of known tokens, once each, and finds or publishes them in `pool`.

    Hashes start from `fingerprint` and the request's salt, so that KV of another model or layout,
    or of requests with another salt, is never found.
    """

    def __init__(
        self, pool: BlockPool, *, block_size: int, fingerprint: str, is_enabled: bool
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self._fingerprint = fingerprint
        self._root_hash = root_hash(fingerprint)
        self.is_enabled = is_enabled

    def match(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks that hold the start of the sequence's known tokens, in order.

        The last known token is never included: it must be computed, because the next token is drawn
        from its output. Where log probabilities of the prompt are wanted, all of it is computed.
        """
        return self.pool.prefix_cache.match(self.hashes_behind(sequence, 0))

    def hashes_behind(self, sequence: Sequence, num_blocks: int) -> Iterable[BlockHash]:
        """Return the hashes of the blocks behind the first `num_blocks` that `match` looks for."""
        if not self.is_enabled or sequence.needs_prompt_rows:
            return ()
        num_hashes = (sequence.num_known - 1) // self.block_size
        self._extend_hashes(sequence, num_hashes)
        return islice(sequence.block_hashes, num_blocks, num_hashes)

    def publish(self, sequence: Sequence) -> None:
        """Make every block findable whose tokens are all known and computed."""
        num_full = sequence.num_computed // self.block_size
        if num_full <= sequence.num_hashed_blocks or not self.is_enabled:
            return
        self._extend_hashes(sequence, num_full)
        first = sequence.num_hashed_blocks
        block_ids = sequence.blocks(first, num_full)
        self.pool.publish_all(block_ids, sequence.block_hashes[first:num_full])
        sequence.num_hashed_blocks = num_full

    def _extend_hashes(self, sequence: Sequence, count: int) -> None:
        size, hashes = self.block_size, sequence.block_hashes
        if len(hashes) >= count:  # as whenever a prompt is looked up again
            return
        num_of_prompt = min(count, sequence.num_prompt // size)
        if len(hashes) < num_of_prompt:
            root, prompt = self._root(sequence.request.cache_salt), sequence.prompt_blocks
            known = prompt.hashes_behind(root, size, num_of_prompt)
            hashes += known[len(hashes) : num_of_prompt]
        if len(hashes) < count:
            parent = hashes[-1] if hashes else self._root(sequence.request.cache_salt)
            words = sequence.words(len(hashes) * size, count * size)
            hashes += hash_words_behind(parent, words, size)

    def _root(self, salt: str) -> BlockHash:
        return root_hash(self._fingerprint, salt) if salt else self._root_hash
