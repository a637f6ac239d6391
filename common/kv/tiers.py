"""Where a node keeps blocks that can be found by their hashes."""

from __future__ import annotations

from enum import IntEnum


class Tier(IntEnum):
    """A place for blocks, nearest to the steps first. The numbers are those of block reports."""

    POOL = 0
    HOST = 1
    DISK = 2
