"""A pool of KV blocks with host memory below it: what is found, request by request.

Requests are taken one after the other. A prompt finds its leading blocks in the pool or below it,
and has all of them in the pool then. The pool gives up what was used least recently, the end of a
prompt before its beginning. What host memory gets of that is `Kept`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from bench.prefix_eviction.chains import BLOCK_TOKENS, Chain
from bench.prefix_eviction.orders import Order, Use
from engine.core.blocks.leaving_blocks import REMEMBERED, USE_PAYS

LINEAR_TOKENS = 30_000
"""The position at which attention costs as much as all matrices together, in a model of 8B."""


class Kept(Enum):
    """Which of the blocks that the pool gives up are kept below it."""

    FOUND = "found"
    """Blocks that a prompt found."""
    USED_TWICE = "used_twice"
    """Blocks that a prompt found, or computed again soon after the pool evicted them."""
    PAID = "paid"
    """Blocks of `USED_TWICE`, and as many others as uses of blocks pay for, as the product does."""
    ALL = "all"


class Found(NamedTuple):
    """Shares of all tokens of prompts, and of the cost of computing them, that were found."""

    tokens: float
    cost: float


def cost(depth: int) -> float:
    """Return what a block at this depth costs, in blocks at the beginning."""
    return 1.0 + depth * BLOCK_TOKENS / LINEAR_TOKENS


def next_uses(chains: Sequence[Chain]) -> list[list[float]]:
    """Return, for each block of each prompt, the number of the request that uses it next."""
    following: dict[int, int] = {}
    found = []
    for number in range(len(chains) - 1, -1, -1):
        found.append([following.get(block, math.inf) for block in chains[number]])
        following.update(dict.fromkeys(chains[number], number))
    return found[::-1]


class Tiers:
    """A pool of `num_blocks` and, below it, `order` of `num_below`. All prompts fit the pool."""

    def __init__(self, num_blocks: int, num_below: int, order: Order, kept: Kept) -> None:
        self._num_blocks, self._num_below = num_blocks, num_below
        self._below, self._kept = order, kept
        self._pool: OrderedDict[int, None] = OrderedDict()
        self._reused: set[int] = set()
        """Blocks of the pool that were used again since they were last given up."""
        self._gone: OrderedDict[int, None] = OrderedDict()
        """The blocks evicted last, which are remembered."""
        self._num_uses: dict[int, int] = {}
        self._use: dict[int, Use] = {}
        """The latest use of each block of the pool."""
        self._num_paid = 0
        """How many blocks that were used once may be kept."""

    def ask(self, chain: Chain, next_use: Sequence[float]) -> int:
        """Take a prompt; return how many leading blocks of it were found."""
        num_found = 0
        for block in chain:
            if block not in self._pool and block not in self._below:
                break
            num_found += 1
        self._note(chain, next_use)
        for block in reversed(chain[:num_found]):
            self._note_again(block)
            if block not in self._pool:
                self._below.copy_back(block, self._use[block])
        for block in reversed(chain):
            if block in self._gone:
                del self._gone[block]
                self._note_again(block)
            self._pool[block] = None
            self._pool.move_to_end(block)
        while len(self._pool) > self._num_blocks:
            self._give_up(self._pool.popitem(last=False)[0])
        return num_found

    def _note_again(self, block: int) -> None:
        self._reused.add(block)
        self._num_paid = min(self._num_paid + USE_PAYS, self._num_blocks + self._num_below)

    def _note(self, chain: Chain, next_use: Sequence[float]) -> None:
        worth = 0.0
        for depth in range(len(chain) - 1, -1, -1):
            block = chain[depth]
            num_uses = self._num_uses[block] = self._num_uses.get(block, 0) + 1
            worth = max(worth, num_uses * cost(depth))
            self._use[block] = Use(worth, next_use[depth])

    def _give_up(self, block: int) -> None:
        is_again = block in self._reused
        use = self._use.pop(block)._replace(is_again=is_again)
        if self._kept is not Kept.FOUND:
            self._gone[block] = None
            if len(self._gone) > REMEMBERED * (self._num_blocks + self._num_below):
                self._gone.popitem(last=False)
        is_new = not is_again and block not in self._below
        is_paid = self._kept is Kept.PAID and self._num_paid > 0
        self._num_paid -= is_new and is_paid
        if is_again or is_paid or self._kept is Kept.ALL:
            self._reused.discard(block)
            self._below.use(block, use)
            if len(self._below) > self._num_below:
                evicted = self._below.evict()
                if evicted not in self._pool:
                    self._num_uses.pop(evicted, None)
        elif block not in self._below:
            del self._num_uses[block]


def replay(chains: Sequence[Chain], tiers: Tiers) -> Found:
    """Ask for all prompts in order."""
    num_tokens = num_found = 0
    all_cost = found_cost = 0.0
    for chain, uses in zip(chains, next_uses(chains), strict=True):
        count = tiers.ask(chain, uses)
        num_tokens += len(chain)
        num_found += count
        all_cost += sum(map(cost, range(len(chain))))
        found_cost += sum(map(cost, range(count)))
    return Found(num_found / num_tokens, found_cost / all_cost)
