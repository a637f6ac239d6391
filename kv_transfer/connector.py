"""The contract of a KV connector: numbered blocks from one pool to another, whole or not at all.

A connector knows nothing of models. It is given the pool as bytes, `[num_layers, 2, num_blocks,
piece_bytes]`, and moves *pieces* (one block's keys or values in one layer).

Receiving side (decode node)
    `expect` opens a landing, and comes before its ticket is handed out. Pieces are written only
    while the landing is open, and only when lease token, generation, bounds and checksums match;
    everything else is dropped before memory is touched. One `Landed` or `LandingFailed` follows,
    never both, or none when `revoke` closed it first. The hold on the target blocks ends with
    exactly one of `Landed` and `Released`: from then on nothing of that landing can be written, so
    the blocks may be reused. `Released` follows a failure or a `revoke` at once where the receiver
    is the only writer of its pool; where a sender writes by itself (RDMA), when it has said that
    it writes no more, or has been fenced. Never on a timer. (A `Landed` that was decided before
    `revoke` may still arrive; it then stands for the `Released`.)

Sending side (prefill node)
    `open`, then `push` for layers and blocks as they are computed, then `commit`. Exactly one
    `TransferEnded` follows every `open`; until then the source blocks must not change or be reused
    (they are pinned by whoever pushed them). `abort` is legal in every state and hastens the end.
    No transfer outlives its `deadline_s` by more than a moment. A transfer that ended in an error
    may have landed all the same, when only the acknowledgement was lost. A broken connection is
    opened again and takes up where it was; a peer that stays silent fails the transfer at once.

Events come from the connector's own thread, through `on_event`, which must not block and may call
the connector. After `ConnectorFailed` none of them is to be relied on: what could not be fenced is
called released all the same, so its owner reuses no block and ends. Every method is thread-safe
and returns without waiting for the peer. Misuse of the contract (a token opened twice, a push
after commit, two landings for one block, anything begun after `close`) raises `ValueError`; a
peer's misbehaviour never raises here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.errors import HandoffFailed
from common.ids import AttemptId, Incarnation
from kv_transfer.transfer_timing import TransferTiming


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a decode node reserved for one attempt, and what a prefill node may write there.

    `target_block_ids` hold the prompt from token `num_cached_tokens` (a multiple of the block
    size) on, in order. `lease_s` is what is left of the lease, a span and never a time.
    `kv_description` says for people what the fingerprint stands for.
    """

    attempt: AttemptId
    decode_node: Incarnation
    kv_endpoint: str
    lease_token: int
    generation: int
    target_block_ids: tuple[int, ...]
    num_cached_tokens: int
    fingerprint: str
    lease_s: float
    kv_description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Sent behind the last piece.

    `num_tokens` is the prompt's length, so that the last block's fill is known: the ticket's
    blocks must be those that hold tokens `num_cached_tokens` to `num_tokens`, no more, no fewer.
    """

    num_tokens: int
    first_token_id: int
    draft_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Landed:
    """Every piece of a landing arrived and was verified; the landing is closed."""

    lease_token: int
    commit: Commit


@dataclass(frozen=True, slots=True)
class LandingFailed:
    """The sender gave up, or what came was not what was promised; the landing is closed.

    Its blocks may be reused only when `Released` comes.
    """

    lease_token: int
    error: HandoffFailed


@dataclass(frozen=True, slots=True)
class Released:
    """The blocks of a landing that failed or was revoked can be written by nobody any more."""

    lease_token: int


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """The sender's side of a transfer is over and its source blocks may be reused.

    `error` is None when the receiver acknowledged the commit; then `timing` says when what
    happened, on the connector's clock, where somebody measured it.
    """

    lease_token: int
    error: HandoffFailed | None
    timing: TransferTiming | None = field(default=None, compare=False)


KVEvent = Landed | LandingFailed | Released | TransferEnded


@dataclass(frozen=True, slots=True)
class ConnectorFailed:
    """The connector met a bug. It ends what it has and takes nothing more."""

    error: Exception


class KVConnector(Protocol):
    """Seven methods; see the module's text for the contract."""

    def expect(self, ticket: Ticket, *, sender_deadline_s: float) -> None:
        """Open a landing. It fails by itself when its sender was not heard for `sender_deadline_s`.

        A sender is heard from its `open` to its end: its connector renews what it has open. Once
        begun, a sender whose connection falls silent fails the landing sooner.
        """

    def revoke(self, lease_token: int) -> None:
        """Close a landing; the sender is told, `Released` follows. Unknown tokens are ignored."""

    def open(self, ticket: Ticket, *, deadline_s: float) -> None:
        """Begin a transfer; it ends in failure when not acknowledged within `deadline_s`."""

    def push(
        self, lease_token: int, *, layer: int, ordinals: Sequence[int], source_blocks: Sequence[int]
    ) -> None:
        """Layer `layer` of `source_blocks` is written: send each to target block `ordinals[i]`.

        Ordinals index the ticket's `target_block_ids`. A piece pushed again (recomputed after a
        preemption) is not sent again. Pushes for an ended transfer are ignored.
        """

    def commit(self, lease_token: int, commit: Commit) -> None:
        """Everything was pushed. Ignored for an ended transfer."""

    def abort(self, lease_token: int) -> None:
        """Give a transfer up and tell the receiver. Ignored for an ended transfer."""

    def close(self) -> None:
        """End everything, emit what is owed, release sockets and threads. Idempotent.

        Returns when all of it is done, except when called from `on_event`.
        """


ConnectorEvent = KVEvent | ConnectorFailed
OnEvent = Callable[[ConnectorEvent], None]
