"""Whose KV a request may use: that of requests of the same salt. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

from common.errors import InternalError
from common.kv.blocks import BlockHash, hash_full_blocks
from engine.core.blocks.prefix_cache import PrefixCache
from node.flow.attempts.attempt_table import NodeAttempt


class Salted(NamedTuple):
    """The name of a request, its salt, and the tokens of its prompt and its answer."""

    name: str
    salt: str
    token_ids: tuple[int, ...]


class Salts:
    """The salt of each request and of each block that may be computed; empty: there are none."""

    def __init__(
        self, requests: Iterable[Salted], block_size: int, fingerprints: Iterable[str]
    ) -> None:
        """Name the blocks of all requests; `fingerprints` are those of all nodes that may come."""
        requests = list(requests)
        self._of_request: dict[str, str] = {}
        self._of_block: dict[BlockHash, str] = {}
        if not any(one.salt for one in requests):
            return
        self._of_request = {one.name: one.salt for one in requests}
        for one, fingerprint in product(requests, fingerprints):
            names = hash_full_blocks(one.token_ids, block_size, fingerprint, one.salt)
            self._of_block.update(dict.fromkeys(names, one.salt))

    def check(self, attempts: Iterable[NodeAttempt], cache: PrefixCache) -> None:
        """Check that no sequence of a node has a cached block of another salt.

        Raises `InternalError`.
        """
        for attempt in attempts if self._of_request else ():
            salt = self._of_request[attempt.id.choice_id]
            for block in attempt.sequence.block_table:
                of_block = self._of_block.get(cache.hash_of(block)) if cache.holds(block) else salt
                if of_block != salt:
                    says = f"of salt {salt!r} has a block of salt {of_block!r}"
                    raise InternalError(f"{attempt.id} {says}")
