"""Copies of whole KV blocks between a device and host memory, made beside the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from common.kv.blocks import BlockHash


class CopyKind(Enum):
    """Between which memories blocks are copied."""

    STAGE_IN = "stage_in"
    """Copies from the memory that transfers write to the cache."""
    STAGE_OUT = "stage_out"
    """Copies from the cache to the memory that transfers read."""
    SWAP_IN = "swap_in"
    """Copies from host blocks to the cache: of a swapped sequence, or of a prefix."""
    SWAP_OUT = "swap_out"
    """Copies from the cache to host blocks: of a swapped sequence, or of a prefix."""

    @property
    def is_out(self) -> bool:
        """Whether the cache is read."""
        return self in (CopyKind.STAGE_OUT, CopyKind.SWAP_OUT)


@dataclass(frozen=True, slots=True)
class CacheCopy:
    """Copy these blocks, all layers. A swap has as many host blocks, pairwise.

    Until it has ended, nothing may write what it reads, and nothing may use what it writes. What it
    reads on the device is what the steps before it wrote. Copies take effect in the order in which
    they begin.
    """

    kind: CopyKind
    block_ids: Sequence[int]
    host_block_ids: Sequence[int] = ()


class CopyUnderWay(Protocol):
    """A copy that was begun."""

    def is_done(self, *, may_begin: bool = True) -> bool:
        """Advance the copy without waiting; return whether it has ended. Raises its error.

        `may_begin` False: a step runs, so nothing is begun on the device.
        """


@dataclass(frozen=True, slots=True, eq=False)
class PrefixCopy:
    """Copy whole blocks to host memory (`is_out`) or back, pairwise. They hold what `hashes` name.

    They can be found where they come only when the copy has ended.
    """

    block_ids: list[int]
    host_block_ids: list[int]
    hashes: list[BlockHash]
    is_out: bool
