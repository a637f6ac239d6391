"""A copy of findable blocks between the cache and host memory, beside the steps."""

from __future__ import annotations

from dataclasses import dataclass

from common.kv.blocks import BlockHash


@dataclass(frozen=True, slots=True, eq=False)
class PrefixCopy:
    """Copy whole blocks to host memory (`is_out`) or back, pairwise. They hold what `hashes` name.

    They can be found where they come only when the copy has ended.
    """

    block_ids: list[int]
    host_block_ids: list[int]
    hashes: list[BlockHash]
    is_out: bool
