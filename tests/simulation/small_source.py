"""A source with little room for prefixes, and a node that is asked for what the source has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.ids import Incarnation
from common.kv.blocks import BlockHash
from node.flow.messages import AbortAttempt
from tests.simulation.scripted_node import NodeSize
from tests.simulation.scripted_router import Asked
from tests.simulation.world import PREFILL, ROUTER, World, assert_finished

OTHER = Incarnation("q", 1)
NUM_SHARED = 4
"""Whole blocks of the prompt that `p` has."""


class SmallSource(World):
    """`p` has a prompt of `NUM_SHARED` blocks, in a pool of 9; `q` is asked for it next."""

    shared: Sequence[BlockHash] = ()
    """The blocks of the prompt."""

    def __init__(self, prompt: tuple[int, ...], size: dict[str, Any], **given: Any) -> None:
        small = NodeSize(num_blocks=9, max_model_len=28, keeps_prefixes=True, **size)
        super().__init__(prefill=small, decode=NodeSize(num_blocks=48, caching=False), **given)
        self.prompt = prompt
        self.q = self.join(OTHER, NodeSize(num_blocks=24, max_model_len=28))

    def in_pool(self) -> int:
        """How many blocks of the prompt the pool of `p` has."""
        cache = self.p.scheduler.pool.prefix_cache
        return sum(cache.find(one) is not None for one in self.shared)

    def ask_q(self, *, last: int = 9, **given: Any) -> Asked:
        """`q` is asked for the prompt, and told that `p` has it."""
        given.setdefault("max_tokens", 4)
        return self.ask((*self.prompt, last), name=f"q{last}", may_wait=True, **given)

    def check_abort_after(self, num_steps: int) -> None:
        """`q` is asked, and its request aborted after so many steps: nothing is left of it."""
        asked = self.ask_q()
        for _ in range(num_steps):
            self.step()
        self.router.abort(asked)
        self.to_nodes.append((OTHER, AbortAttempt(ROUTER, (asked.request.id,))))
        self.settle()
        self.advance(30.0)
        self.settle()
        self.check_closed()
        assert self.p.scheduler.host_pool.num_read == 0
        assert_finished(self, self.ask_q(last=12))

    def check_death_after(self, num_steps: int) -> None:
        """`q` is asked, and `p` dies after so many steps, which costs the pull and no answer."""
        asked = self.ask_q()
        for _ in range(num_steps):
            self.step(frames=False)
        for frame in self.network.frames[: num_steps // 2]:
            self.network.deliver(frame)
        self.kill(self.p, is_noticed=False)
        self.settle()
        self.advance(6.0)
        self.q.connector.on_peer_lost(PREFILL)
        assert_finished(self, asked)
        assert sum(self.q.pulls().values()) == 1
