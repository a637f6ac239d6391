"""A prompt in a process with several nodes: what each of them makes of all of its tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from common.kv.blocks import BlockHash, hash_words_behind


class SharedPrompt(tuple[int, ...]):
    """The tokens of a prompt; its words and the hashes of its full blocks are made once."""

    words: array[int]
    """The tokens in 32 bits each, without a sign."""
    _hashes: dict[tuple[BlockHash, int], list[BlockHash]]

    @classmethod
    def of_runs(cls, token_ids: Iterable[int], num_each: int, num_tokens: int) -> SharedPrompt:
        """Return a prompt of `num_each` equal tokens, as many of the next one, and so on."""
        words, tokens = array("I"), list[int]()
        for token_id in token_ids:  # one token after the other takes twenty times as long
            words += array("I", (token_id,)) * num_each
            tokens += [token_id] * num_each
        del words[num_tokens:], tokens[num_tokens:]
        prompt = cls(tokens)
        prompt.words, prompt._hashes = words, {}
        return prompt

    def hashes_behind(self, root: BlockHash, block_size: int) -> list[BlockHash]:
        """Return the hashes of the full blocks, in order, not to be changed."""
        found = self._hashes.get((root, block_size))
        if found is None:
            found = self._hashes[root, block_size] = hash_words_behind(root, self.words, block_size)
        return found
