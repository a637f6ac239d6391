"""Jobs on files of blocks on disk, and their results. Values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from common.kv.blocks import BlockHash

OWN_FOLDER = ""
"""The folder that this node writes to."""
FileName = BlockHash | str
"""A file in a node's own folder: a block, or by its name what another model or layout left."""


@dataclass(frozen=True, slots=True, eq=False)
class DiskWrite:
    """Remove files, then write host blocks, each whole or not at all, in this order."""

    host_block_ids: list[int]
    hashes: list[BlockHash]
    removed: list[FileName]


@dataclass(frozen=True, slots=True, eq=False)
class DiskRead:
    """Read blocks of these folders into host blocks, in this order, up to one that fails."""

    host_block_ids: list[int]
    hashes: list[BlockHash]
    folders: list[str]


@dataclass(frozen=True, slots=True, eq=False)
class DiskLook:
    """See which blocks there are: with `is_all` this node's, else only those of other nodes.

    This node's folder is found or made, and what a killed process left half written is removed.
    """

    is_all: bool


DiskJob = DiskWrite | DiskRead | DiskLook


class DiskFailure(Enum):
    """Why a job ended early."""

    VANISHED = "vanished"
    """There is no such file any more: somebody removed it."""
    CORRUPT = "corrupt"
    """A file is not what was written. It was removed."""
    ERROR = "error"
    """The system refused."""


@dataclass(frozen=True, slots=True)
class DiskScan:
    """What a look has found.

    `own` are this node's blocks, the one that was not used for longest first, `strangers` names and
    bytes of what other models or layouts left in its folder, `others` the blocks of other nodes.
    """

    own: tuple[BlockHash, ...] = ()
    strangers: tuple[tuple[str, int], ...] = ()
    others: dict[BlockHash, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DiskResult:
    """How many blocks were read or written, what was seen, and why the rest was not."""

    num_done: int = 0
    scan: DiskScan = field(default_factory=DiskScan)
    failure: DiskFailure | None = None
    why: str = ""


OnResult = Callable[[DiskResult], object]
"""Takes what became of a job, on any thread."""
