"""A node as a choice sees it: its record, and its load by report and by what was sent to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.ids import Incarnation
from common.nodes import NodeLoad, NodeRecord, Role

QUEUED_TOKENS_SCALE = 8192
"""Tokens of prompts that weigh as much as all seats of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node that can be chosen. `num_requests`, `num_used_blocks` and
    `num_queued_tokens` (of prompts) are what it is estimated to hold right now.

    `load` is what it reported last, and may be seconds old.
    One that `is_suspected` may be gone: it is chosen only where no other is left.
    One that is not `is_listed` has no lease in the store now: its `load` is an old one.
    """

    record: NodeRecord
    load: NodeLoad
    num_requests: int
    num_used_blocks: float = 0.0
    num_queued_tokens: float = 0.0
    is_suspected: bool = False
    is_listed: bool = True
    incarnation: Incarnation = field(init=False)
    pressure: float = field(init=False)
    """How busy the node is: 0 when idle, about 1 when its seats are taken."""

    def __post_init__(self) -> None:
        # Both are kept, because choices ask a view for them several times.
        record = self.record
        object.__setattr__(self, "incarnation", record.incarnation)
        seats = self.num_requests / (record.max_num_seqs or 1)
        blocks = self.num_used_blocks / (record.num_blocks or 1)
        blocks = blocks if blocks < 1.0 else 1.0
        pressure = seats + blocks + self.num_queued_tokens / QUEUED_TOKENS_SCALE
        object.__setattr__(self, "pressure", pressure)

    @property
    def is_full(self) -> bool:
        """Whether the node would refuse, or queue, one more answer."""
        is_decoding = self.record.role is not Role.PREFILL
        return is_decoding and self.num_requests >= self.record.max_num_seqs
