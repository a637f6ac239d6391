"""What is made of all tokens of a prompt, once for all who ask in one process."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from common.kv.blocks import BlockHash, hash_words_behind


class PromptBlocks:
    """The words of a prompt and the hashes of its full blocks, made when they are asked for.

    A word is a token in 32 bits without a sign.
    """

    __slots__ = ("_hashes", "_words", "token_ids")

    def __init__(self, token_ids: Sequence[int], words: array[int] | None = None) -> None:
        """Take the tokens, and their words from who has them."""
        self.token_ids = token_ids
        self._words = words
        self._hashes: dict[tuple[BlockHash, int], list[BlockHash]] = {}

    @property
    def words(self) -> array[int]:
        """The tokens as words."""
        if self._words is None:
            self._words = array("I", self.token_ids)
        return self._words

    def hashes_behind(self, root: BlockHash, block_size: int, count: int) -> list[BlockHash]:
        """Return the hashes of at least the first `count` full blocks, as far as there are so many.

        `root` is the parent of the first one. The list is not to be changed, and may grow later.
        """
        known = self._hashes.setdefault((root, block_size), [])
        if len(known) < count:
            words = self.words[len(known) * block_size : count * block_size]
            known += hash_words_behind(known[-1] if known else root, words, block_size)
        return known
