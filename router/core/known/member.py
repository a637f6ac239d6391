"""One node of the membership: its last report, whether it is heard, what it was sent. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from common.nodes import NodeLoad, NodeRecord
from router.core.held_load import OwnLoad


@dataclass(slots=True)
class Member:
    """One node of `Membership`, whose time all times are."""

    record: NodeRecord
    load: NodeLoad
    listed_at_s: float
    lost_at_s: float = -math.inf
    is_heard: bool = False
    suspicion: bool | None = None
    """None: it is trusted; otherwise whether it is heard."""
    is_replaced: bool = False
    role_told_at: int = -1
    """How often the store was asked before the node last reported its role on its stream."""
    own: OwnLoad = field(default_factory=OwnLoad)

    @property
    def can_be_chosen(self) -> bool:
        """Whether a request may be sent there."""
        return self.is_heard and not self.is_replaced

    @property
    def was_lost(self) -> bool:
        """Whether its stream broke before."""
        return self.lost_at_s != -math.inf

    def take_report(self, record: NodeRecord, load: NodeLoad, now_s: float) -> bool:
        """Take over the store's listing of the node; return whether its view has to be made again.

        Most reports of an idle node are the same object as the one before. In the replay of a
        recording they are equal ones, of which the same has to follow.
        """
        is_equal = (record is self.record or record == self.record) and (
            load is self.load or load == self.load
        )
        self.record, self.load, self.listed_at_s = record, load, now_s
        return self.own.on_listing() or not is_equal
