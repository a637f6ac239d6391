"""Prefix hits of one pool for the whole cluster: an upper bound of what placement can reach.

The pool takes requests one after the other, each computed before the next one comes, and evicts the
least recently used blocks, the end of a prompt before its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from simulator.trace_file import TOKENS_PER_HASH_ID, TraceRequest


def num_found_tokens(
    requests: Iterable[TraceRequest], num_pool_tokens: int, block_size: int
) -> int:
    """Return how many tokens of all prompts are in a pool of this many tokens when they come.

    The last token of a prompt is always computed, and with it its block.
    """
    most = num_pool_tokens // TOKENS_PER_HASH_ID
    held: OrderedDict[tuple[int, int], None] = OrderedDict()
    total = 0
    for request in requests:
        names = list(zip(request.hash_ids, range(len(request.hash_ids)), strict=True))
        num_found = 0
        while num_found < len(names) and names[num_found] in held:
            num_found += 1
        reusable = (request.num_prompt - 1) // block_size * block_size
        total += min(num_found * TOKENS_PER_HASH_ID, reusable)
        for name in reversed(names):
            held.pop(name, None)
            held[name] = None
        while len(held) > most:
            held.popitem(last=False)
    return total
