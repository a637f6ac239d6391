"""Two prefill nodes, of which one pulls from the other, and a decode node that caches nothing."""

from __future__ import annotations

from typing import Any

from common.ids import Incarnation
from common.kv.prefix_source import PrefixSource
from node.flow.messages import Message, SendBlocks
from tests.simulation.scripted_node import BLOCK_SIZE, NodeSize
from tests.simulation.scripted_router import Asked
from tests.simulation.world import PREFILL, World, assert_finished
from tests.support.engine.build import make_prompt

OTHER = Incarnation("q", 1)
SHARED = make_prompt(21, 5)
"""Five whole blocks, which `p` knows after `the_first`, and a token."""
HELD = PrefixSource(PREFILL, 5 * BLOCK_SIZE)


class Three(World):
    """Two prefill nodes and a decode node, which caches nothing. `p` is asked first, then `q`."""

    def __init__(self, *, num_blocks: int = 48, of_q: NodeSize | None = None) -> None:
        size = NodeSize(num_blocks=num_blocks)
        super().__init__(prefill=size, decode=NodeSize(num_blocks=48, caching=False))
        self.q = self.join(OTHER, of_q or size)

    def the_first(self) -> Asked:
        """`p` computes the shared prompt."""
        asked = self.ask(SHARED, max_tokens=4, name="first")
        assert_finished(self, asked)
        self.router.prefill, self.router.source = OTHER, HELD
        return asked

    def the_next(self, *more: int, name: str = "next", **given: Any) -> Asked:
        """`q` is asked for a longer prompt, and told that `p` has the start of it."""
        given.setdefault("max_tokens", 4)
        return self.ask((*SHARED, *more), name=name, **given)

    def step_until_asked(self) -> SendBlocks:
        """Go on until a pull is on its way to its source, and return it."""
        self.step_until(lambda: bool(self.on_the_way()), frames=False)
        return self.on_the_way()[0]

    def on_the_way(self) -> list[SendBlocks]:
        return [message for _, message in self.to_nodes if isinstance(message, SendBlocks)]

    def lose(self, lost: Message) -> None:
        self.to_nodes = [(to, message) for to, message in self.to_nodes if message is not lost]
