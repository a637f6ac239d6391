"""What reaches the step thread, and what it wants done, as plain values.

A recorded inbox is a bug report: the flows that read these messages do nothing but return effects.
`reply_to` names a waiting call and means nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import PdserveError
from common.ids import AttemptId, Incarnation
from common.request import GenerationRequest, RequestOutput
from engine.core.statistics import SchedulerStatistics
from kv_transfer.connector import Commit, ConnectorEvent, Ticket

# --- messages ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A router asks for a reservation (decode node) or for a prompt (prefill node).

    `received_at_s` is when the call came: a busy step thread reads it a step later.
    """

    request: GenerationRequest
    router: Incarnation
    reply_to: int
    received_at_s: float
    ticket: Ticket | None = None
    must_prefill_locally: bool = False
    may_wait: bool = False


@dataclass(frozen=True, slots=True)
class Abort:
    """A router gives attempts up. Unknown ones are remembered: their request may still arrive."""

    router: Incarnation
    attempts: tuple[AttemptId, ...]


@dataclass(frozen=True, slots=True)
class RouterGone:
    """The token stream of a router ended: nobody reads what it asked for."""

    router: Incarnation


@dataclass(frozen=True, slots=True)
class Drain:
    """The node is to leave: what runs has `timeout_s` to finish. Only the first one counts."""

    timeout_s: float


Message = Submit | Abort | RouterGone | Drain | ConnectorEvent

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
class Accepted:
    """A prefill node took the prompt."""


@dataclass(frozen=True, slots=True)
class Refused:
    """No, why, and what room there is."""

    error: PdserveError
    free_blocks: int = 0
    free_seats: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatistics:
    """What a node counts, all at one moment. `num_transfers` counts open landings as well."""

    scheduler: SchedulerStatistics
    num_transfers: int


Answer = Reserved | StartedLocally | Accepted | Refused

# --- effects ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a waiting call."""

    reply_to: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Emit:
    """Send an output to the router that asked for it."""

    router: Incarnation
    output: RequestOutput


@dataclass(frozen=True, slots=True)
class OpenLanding:
    """Let the ticket's blocks be written."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class TakeLanded:
    """KV landed in these blocks: it must be where the next step reads it."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CloseLanding:
    """Nobody waits for this landing: its sender is told, and `Released` says when it has ended."""

    lease_token: int


@dataclass(frozen=True, slots=True)
class OpenTransfer:
    """Begin to write into a ticket's blocks; the transfer ends within `deadline_s`."""

    ticket: Ticket
    deadline_s: float


@dataclass(frozen=True, slots=True)
class PushBlocks:
    """A layer of these blocks is computed; None: every layer was, before this step."""

    lease_token: int
    layer: int | None
    ordinals: tuple[int, ...]
    source_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CommitTransfer:
    """Everything was pushed."""

    lease_token: int
    commit: Commit


@dataclass(frozen=True, slots=True)
class AbortTransfer:
    """Give a transfer up."""

    lease_token: int


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing is left: no sequence, no transfer, no landing, no block in quarantine."""


Effect = (
    Reply
    | Emit
    | OpenLanding
    | TakeLanded
    | CloseLanding
    | OpenTransfer
    | PushBlocks
    | CommitTransfer
    | AbortTransfer
    | Drained
)
