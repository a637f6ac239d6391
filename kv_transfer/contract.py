"""The contract of a KV connector: numbered blocks from one pool to another, whole or not at all.

A connector knows nothing of models. It is given the pool as bytes, `[num_layers, 2, num_blocks,
piece_bytes]`, and moves *pieces* (one block's keys or values in one layer). It may be given more
memory of the host in the same form, which it only sends from.

Receiving side (decode node)
    `expect` opens a landing; it must be called before the ticket is issued. Pieces are written only
    while the landing is open, and only when lease token, generation, bounds and checksums match;
    everything else is dropped before memory is touched. One `Landed` or `LandingFailed` follows,
    never both, or none when `revoke` closed the landing first. The hold on the target blocks ends
    with exactly one of `Landed` and `Released`: from then on nothing of that landing can be
    written, so the blocks may be reused. After a failure or a `revoke`, `Released` follows at once
    if the receiver is the only writer of its pool. If a sender writes the pool itself (RDMA), it
    follows when that sender has reported that it stopped writing, or has been fenced; never on a
    timer. (A `Landed` that was decided before `revoke` may still arrive; it then replaces the
    `Released`.)

Sending side (prefill node)
    `open`, then `push` for layers and blocks as they are computed, then `commit`. Exactly one
    `TransferEnded` follows every `open`; until then the source blocks must not change or be reused
    (the caller of `push` pins them). `abort` is legal in every state and hastens the end. No
    transfer outlives its `deadline_s` by more than a moment. A transfer that ended in an error may
    have landed all the same, when only the acknowledgement was lost. A broken connection is opened
    again and the transfer continues; a peer that stays silent fails the transfer at once.

Events come from the connector's own thread, through `on_event`, which must not block and may call
the connector. After `ConnectorFailed` no event is reliable: blocks that could not be fenced are
reported as released too, so their owner must reuse no block and must end. Every method is
thread-safe and returns without waiting for the peer. On the sending side calls are only queued for
the connector's thread, in order: they take microseconds, for any number of blocks. Misuse of
`expect` and `open` (a token opened twice, two landings for one block, any call after `close`)
raises `ValueError`; misuse of `push` and `commit` (a push after commit, a block that does not
exist) ends the transfer with an error; a peer's misbehaviour never raises here.
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
    """A decode node's reservation for one attempt: what a prefill node may write there.

    `target_block_ids` hold the prompt from token `num_cached_tokens` (a multiple of the block size)
    on, in order. `lease_s` is the rest of the lease, a span in seconds, not a time.
    `kv_description` is a readable form of the fingerprint. Where it `may_be_short`, a transfer may
    have fewer of the blocks, the first ones.
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
    may_be_short: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Sent after the last piece.

    `num_tokens` is the prompt's length, so that the last block's fill is known: the ticket's
    blocks must be those that hold tokens `num_cached_tokens` to `num_tokens`, no more, and no fewer
    unless the ticket `may_be_short`.
    """

    num_tokens: int
    first_token_id: int
    draft_token_ids: tuple[int, ...] = ()


class GivenUp(HandoffFailed):
    """The sender aborted the transfer: it can be reached, and does not send this.

    For the sender the transfer has ended too, by its own node or with `TransferEnded`.
    """


class Revoked(HandoffFailed):
    """The receiving node ended the landing by itself, maybe because it closes: it was reached, and
    wants no more KV."""


@dataclass(frozen=True, slots=True)
class Landed:
    """Every piece of a landing arrived and was verified; the landing is closed."""

    lease_token: int
    commit: Commit


@dataclass(frozen=True, slots=True)
class LandingFailed:
    """The sender aborted (`GivenUp`), or the data did not match its commit; the landing is closed.

    Its blocks may be reused only after `Released`.
    """

    lease_token: int
    error: HandoffFailed


@dataclass(frozen=True, slots=True)
class Released:
    """No writer can reach the blocks of a landing that failed or was revoked any more."""

    lease_token: int


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """The sender's side of a transfer is over and its source blocks may be reused.

    `error` is None when the receiver acknowledged the commit, and `Revoked` when its node ended the
    landing; `timing` is then set if the connector
    measures times, on its own clock.
    """

    lease_token: int
    error: HandoffFailed | None
    timing: TransferTiming | None = field(default=None, compare=False)


KVEvent = Landed | LandingFailed | Released | TransferEnded


@dataclass(frozen=True, slots=True)
class ConnectorFailed:
    """The connector's thread failed. It ends everything that is open and accepts nothing more."""

    error: BaseException


class KVConnector(Protocol):
    """The seven methods of a connector; see the module's docstring for the contract."""

    def expect(self, ticket: Ticket, *, sender_deadline_s: float) -> None:
        """Open a landing; it fails when its sender is silent for `sender_deadline_s`.

        A sender is heard from its `open` to its end, because its connector renews open leases.
        After the transfer began, a silent connection fails the landing sooner.

        Raises `ValueError` on misuse.
        """

    def revoke(self, lease_token: int) -> None:
        """Close a landing and notify the sender; `Released` follows. Unknown tokens are ignored."""

    def open(self, ticket: Ticket, *, deadline_s: float, priority: int = 0) -> None:
        """Begin a transfer; it fails when not acknowledged within `deadline_s`.

        Of the transfers to one node, those with the highest priority send first.

        Raises `ValueError` on misuse.
        """

    def push(
        self, lease_token: int, *, layer: int, ordinals: Sequence[int], source_blocks: Sequence[int]
    ) -> None:
        """Send the written layer `layer` of `source_blocks`, each to target block `ordinals[i]`.

        Blocks of the host memory that is no pool have the numbers behind those of the pool. Lanes
        that send from the pool alone abort a transfer with such blocks.

        Ordinals index the ticket's `target_block_ids`. A piece pushed again (recomputed after a
        preemption) is not sent again. Pushes for an ended transfer are ignored. The sequences are
        read later, so they must not change. Misuse fails the transfer.
        """

    def commit(self, lease_token: int, commit: Commit) -> None:
        """Declare that everything was pushed; ignored for an ended transfer.

        Misuse fails the transfer.
        """

    def abort(self, lease_token: int) -> None:
        """Abort a transfer and notify the receiver; ignored for an ended transfer."""

    def close(self) -> None:
        """End everything, emit the outstanding events, release sockets and threads. Idempotent.

        Returns when all of it is done, except when called from `on_event`, or when the connector's
        thread hangs.
        """


ConnectorEvent = KVEvent | ConnectorFailed
OnEvent = Callable[[ConnectorEvent], None]
