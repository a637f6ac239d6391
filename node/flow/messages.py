"""Messages to the step thread, the answers to calls, and the effects that it wants, as values.

The flows that read these messages only return effects, so a recorded inbox reproduces a bug.
`reply_to` identifies a waiting call and has no other meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from common.errors import PdserveError
from common.ids import AttemptId, Incarnation
from common.kv.blocks import BlockHash
from common.kv.prefix_source import PrefixSource
from common.nodes import NodeLoad
from common.request import GenerationRequest, RequestOutput
from engine.core.blocks.cache_copy import CacheCopy
from engine.core.blocks.disk_jobs import DiskJob, DiskResult
from engine.core.statistics import SchedulerStatistics
from kv_transfer.contract import Commit, ConnectorEvent, Ticket

# --- messages ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A router requests a reservation, or with `is_prompt` the prefill of a prompt.

    The call came at `received_at_s`; a busy step thread reads it a step later.
    """

    request: GenerationRequest
    router: Incarnation
    reply_to: int
    received_at_s: float
    is_prompt: bool = False
    ticket: Ticket | None = None
    source: PrefixSource | None = None
    must_prefill_locally: bool = False
    may_wait: bool = False
    is_compiling: bool = False
    """Its grammar is being compiled: `Compiled` follows."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """The grammar of a `Submit`, that with this `reply_to`, is compiled, or cannot be followed."""

    attempt: AttemptId
    reply_to: int
    error: PdserveError | None = None


@dataclass(frozen=True, slots=True)
class AbortAttempt:
    """A router aborts attempts. Unknown ids are remembered: their request may still arrive."""

    router: Incarnation
    attempts: tuple[AttemptId, ...]


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """Another node wants cached blocks with these hashes, into those of `ticket`.

    `router` passed it on.
    """

    router: Incarnation
    ticket: Ticket
    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class PullRefused:
    """Nobody will answer this node's pull with that lease token."""

    lease_token: int


@dataclass(frozen=True, slots=True)
class WarmNode:
    """A node that has started wants what this one has used last."""

    router: Incarnation
    node: Incarnation


@dataclass(frozen=True, slots=True)
class FetchBlocks:
    """A router wants this node to pull cached blocks of `source`, which leaves, or warms it."""

    router: Incarnation
    source: Incarnation
    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class RouterGone:
    """The token stream of a router ended: nobody reads the outputs of its attempts."""

    router: Incarnation


@dataclass(frozen=True, slots=True)
class Drain:
    """The node is to leave: running attempts have `timeout_s` to finish. The first one counts."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """Routers ask for other work from now on: what was measured of the queue is worth nothing."""


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """The copy with this number has ended, with an error or without; it uses no block any more."""

    number: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class DiskEnded:
    """A job on disk that `BeginDisk` began has ended."""

    number: int
    result: DiskResult


Message = (
    Submit
    | Compiled
    | AbortAttempt
    | SendBlocks
    | PullRefused
    | WarmNode
    | FetchBlocks
    | RouterGone
    | Drain
    | RoleChanged
    | CopyEnded
    | DiskEnded
    | ConnectorEvent
)

# --- answers ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks and a seat are held; the prompt's KV may be written to them."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class StartedLocally:
    """This node computes the prompt itself."""

    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class PromptAccepted:
    """A prefill node accepted the prompt."""


@dataclass(frozen=True, slots=True)
class CallRefused:
    """The call was refused: why, and how much room the node has."""

    error: PdserveError
    free_blocks: int = 0
    free_seats: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatistics:
    """A node's statistics at one moment. `num_transfers` includes open landings."""

    scheduler: SchedulerStatistics
    num_transfers: int


class NodeSnapshot(NamedTuple):
    """What other threads may see of a node at one moment."""

    statistics: NodeStatistics
    load: NodeLoad


Answer = Reserved | StartedLocally | PromptAccepted | CallRefused

# --- effects ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerCall:
    """Answer a waiting call."""

    reply_to: int
    answer: Answer


class SendOutput(NamedTuple):
    """Send an output to the router that asked for it. A tuple, as the output is."""

    router: Incarnation
    output: RequestOutput


@dataclass(frozen=True, slots=True)
class AskBlocks:
    """Ask `source`, through a router, for cached blocks: `SendBlocks` there."""

    router: Incarnation
    source: Incarnation
    ticket: Ticket
    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class RefusePull:
    """Refuse a pull of `node`, through a router: it becomes `PullRefused` there."""

    router: Incarnation
    node: Incarnation
    lease_token: int


@dataclass(frozen=True, slots=True)
class OfferBlocks:
    """Offer cached blocks to a node: `FetchBlocks` there.

    `new_node` wants them, through that router; None: one that stays, through any router.
    """

    block_hashes: tuple[BlockHash, ...]
    new_node: WarmNode | None = None


@dataclass(frozen=True, slots=True)
class OpenLanding:
    """Allow the ticket's sender to write its blocks."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class CheckCopies:
    """Look which copies have ended."""


@dataclass(frozen=True, slots=True)
class CloseLanding:
    """Revoke a landing: its sender is informed, and the event `Released` marks its end."""

    lease_token: int


@dataclass(frozen=True, slots=True)
class OpenTransfer:
    """Begin to write into a ticket's blocks; the transfer ends within `deadline_s`.

    `priority` is that of the request, where the node schedules by priority.
    """

    ticket: Ticket
    deadline_s: float
    priority: int = 0


class PushBlocks(NamedTuple):
    """Send a layer of these blocks, which can be read; None: all layers.

    A tuple, because there is one for each layer of each prompt in a step.
    """

    lease_token: int
    layer: int | None
    ordinals: tuple[int, ...]
    source_blocks: tuple[int, ...]

    def of_layer(self, layer: int) -> PushBlocks:
        """Return the push of one layer of these blocks."""
        return PushBlocks(self.lease_token, layer, self.ordinals, self.source_blocks)


@dataclass(frozen=True, slots=True)
class BeginCopy:
    """Begin a copy of blocks, beside the steps; `CopyEnded` follows.

    `push` is performed before that if the copy is good, so that it need not wait for a turn.
    """

    number: int
    copy: CacheCopy
    push: PushBlocks | None = None


@dataclass(frozen=True, slots=True)
class CommitTransfer:
    """End a transfer whose blocks were all pushed."""

    lease_token: int
    commit: Commit


@dataclass(frozen=True, slots=True)
class AbortTransfer:
    """Abort a transfer."""

    lease_token: int


@dataclass(frozen=True, slots=True)
class Drained:
    """The node is empty: no sequence, no transfer, no landing, no block in quarantine."""


@dataclass(frozen=True, slots=True)
class BeginDisk:
    """Begin to read or write files of blocks; `DiskEnded` follows."""

    number: int
    job: DiskJob


Effect = (
    AnswerCall
    | SendOutput
    | AskBlocks
    | RefusePull
    | OfferBlocks
    | OpenLanding
    | BeginCopy
    | CheckCopies
    | BeginDisk
    | CloseLanding
    | OpenTransfer
    | PushBlocks
    | CommitTransfer
    | AbortTransfer
    | Drained
)
