"""Reads one node's block reports in order, and notices when one is missing. Pure."""

from __future__ import annotations

import struct
from typing import NamedTuple

from common.kv.blocks import KEY_BYTES, BlockKey
from common.kv.tiers import Tier

_TIERS = frozenset(Tier)


class BlockReport(NamedTuple):
    """Blocks that entered or left a tier. `is_first` voids all earlier reports."""

    is_first: bool
    added: tuple[BlockKey, ...] = ()
    removed: tuple[BlockKey, ...] = ()
    tier: Tier = Tier.POOL


class ReportReader:
    """The reports of one stream.

    They begin with the number 1, also when the node reports all blocks again.
    """

    def __init__(self) -> None:
        self._next = 1
        self.has_lost = False
        """Whether a report is missing, and the node has not reported all blocks again."""

    def take(self, number: int, tier: int, added: bytes, removed: bytes) -> BlockReport | None:
        """Return what a report says; None: nothing can be learned from it.

        After a report that is missing, or that is not as it should be, nothing is known of the
        node, and nothing is learned until it says all again. A tier that is not known here is
        skipped.
        """
        if number == 1:
            self._next, self.has_lost = 1, False
        if self.has_lost:
            return None
        if number != self._next or len(added) % KEY_BYTES or len(removed) % KEY_BYTES:
            self.has_lost = True
            return BlockReport(is_first=True)
        self._next += 1
        if tier not in _TIERS:
            return BlockReport(number == 1)
        return BlockReport(number == 1, _keys(added), _keys(removed), Tier(tier))


def _keys(packed: bytes) -> tuple[BlockKey, ...]:
    return struct.unpack(f">{len(packed) // KEY_BYTES}Q", packed)
