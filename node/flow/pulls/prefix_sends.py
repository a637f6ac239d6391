"""Cached blocks that other nodes pull out of this node's prefix cache. Pure.

Blocks are asked for by their whole hashes, which cover all tokens before them, the salt and the
layout: what is found under a hash is what was asked for. They are sent out of the pool, and out of
host memory those that the pool has evicted, without a copy of them here. They are kept until the
transfer has ended. Those that are on disk alone are read into host memory first, while the others
are kept, for no longer than computing them would take. Where one of them is in no tier any more, is
not read, or finds no room, those before it are sent; where there are none, or the ticket wants all,
the transfer is aborted at once, so that the other node does not wait for it. Where no transfer can
say so, because the node is not reached or its ticket does not fit, a router does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from common.ids import Incarnation
from common.kv.blocks import BlockHash
from engine.core.blocks.cache_copy import CacheCopy, CopyKind
from engine.core.scheduler import Scheduler
from kv_transfer.contract import Commit, Revoked, Ticket, TransferEnded
from kv_transfer.sending.transfer_errors import TransferAborted
from node.flow.copies_under_way import CopiesUnderWay
from node.flow.disk.prefix_disk import PrefixDisk
from node.flow.messages import (
    AbortTransfer,
    CommitTransfer,
    Effect,
    OfferBlocks,
    OpenTransfer,
    PushBlocks,
    RefusePull,
    SendBlocks,
    WarmNode,
)
from node.flow.pulls.hand_over import MOST_BLOCKS
from node.flow.pulls.pull_cost import Pauses

MOST_SENDS = 64
"""Pulls that are answered at the same time; further ones are refused, and computed."""


@dataclass(slots=True)
class _Send:
    router: Incarnation
    ticket: Ticket
    block_hashes: tuple[BlockHash, ...]
    source_ids: tuple[int, ...] | None = None
    """What is kept for it, by the numbers of `PrefixTransfers.pin`."""
    sought: frozenset[BlockHash] = frozenset()
    """The blocks that were read from disk for it."""
    num_read: int = 0
    is_copied: bool = True
    """What is sent can be read; before, its copy uses the blocks."""
    has_ended: bool = False


class PrefixSends:
    """The pulls of other nodes from this one, by lease token.

    With `copies`, blocks of the pool are copied to where transfers read them before any is pushed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        fingerprint: str,
        copies: CopiesUnderWay | None,
        disk: PrefixDisk,
    ) -> None:
        self._transfers = scheduler.prefix_transfers
        self._block_size = scheduler.limits.block_size
        self._fingerprint = fingerprint
        self._copies, self._disk = copies, disk
        self._sends: dict[int, _Send] = {}
        self._pauses = Pauses()
        """Nodes for which nothing is read: the lane to them sends from the pool alone."""

    def __len__(self) -> int:
        """Return how many pulls are being answered."""
        return len(self._sends)

    def __contains__(self, lease_token: int) -> bool:
        return lease_token in self._sends

    def begin(self, message: SendBlocks, now_s: float) -> list[Effect]:
        """Send cached blocks; refuse it if the ticket does not fit this node or the hashes."""
        ticket, token = message.ticket, message.ticket.lease_token
        num_kept, count = ticket.num_cached_tokens, len(ticket.target_block_ids)
        if token in self._sends:
            return []
        is_fit = ticket.fingerprint == self._fingerprint and not num_kept % self._block_size
        if not is_fit or count != len(message.block_hashes):
            return [RefusePull(message.router, ticket.decode_node, token)]
        opened = OpenTransfer(ticket, ticket.lease_s)
        send = _Send(message.router, ticket, message.block_hashes)
        self._sends[token] = send
        if len(self._sends) > MOST_SENDS:
            return [opened, AbortTransfer(token)]
        if self._pin(send, may_be_short=False):
            return [opened, *self._push(token, send)]
        reading = self._read(token, send, now_s)
        return [opened, *(self._push_found(token, send) if reading is None else reading)]

    def offer(self, wanted: WarmNode) -> list[Effect]:
        """Offer a new node what was used last; nothing if nothing is in memory."""
        block_hashes = self._transfers.latest(MOST_BLOCKS)
        return [OfferBlocks(block_hashes, wanted)] if block_hashes else []

    def on_ended(self, event: TransferEnded, now_s: float) -> list[Effect]:
        """Release the blocks of a transfer that is over, when no copy uses them.

        A node that it could not reach gets the refusal through its router.
        """
        token, send = event.lease_token, self._sends[event.lease_token]
        send.has_ended = True
        self._disk.forget(token)
        if event.error is None and send.source_ids is not None:
            self._transfers.count_sent(send.source_ids, send.num_read)
            self._pauses.on_landed(send.ticket.decode_node)
        elif send.num_read and isinstance(event.error, TransferAborted):
            # Not by this flow, which has pushed all: it was read in vain.
            self._pauses.on_failed(send.ticket.decode_node, now_s)
        self._release(token, send)
        # An abort is told by the transfer itself, and what the other node has ended it knows.
        if event.error is None or isinstance(event.error, (TransferAborted, Revoked)):
            return []
        return [RefusePull(send.router, send.ticket.decode_node, token)]

    def _pin(self, send: _Send, *, may_be_short: bool) -> bool:
        """Keep the blocks of a pull that are in memory and may be kept; return whether any is.

        All of them or none, unless it may be short.
        """
        source_ids = self._transfers.pin(send.block_hashes, may_be_short=may_be_short)
        if not source_ids:
            return False
        self._unpin(send)
        send.source_ids = source_ids
        pairs = zip(source_ids, send.block_hashes, strict=False)
        _, read = self._transfers.split(one for one, name in pairs if name in send.sought)
        send.num_read = len(read)
        return True

    def _unpin(self, send: _Send) -> None:
        if send.source_ids is not None:
            self._transfers.unpin(send.source_ids)
            send.source_ids = None

    def _push_found(self, token: int, send: _Send) -> list[Effect]:
        """Send what is in memory now: all of it, or its beginning where the ticket allows that."""
        is_kept = self._pin(send, may_be_short=send.ticket.may_be_short)
        return self._push(token, send) if is_kept else [AbortTransfer(token)]

    def _push(self, token: int, send: _Send) -> list[Effect]:
        """Send what is kept, when it can be read."""
        assert send.source_ids is not None, "nothing is kept"
        push = PushBlocks(token, None, tuple(range(len(send.source_ids))), send.source_ids)
        block_ids, _ = self._transfers.split(send.source_ids)
        if self._copies is None or not block_ids:
            return [push, self._commit(token, send)]
        send.is_copied = False
        copy = CacheCopy(CopyKind.STAGE_OUT, block_ids)
        return [self._copies.begin(copy, partial(self._on_copied, token), push)]

    def _commit(self, token: int, send: _Send) -> Effect:
        """Commit what was pushed. Nothing is drawn: the other node reads no token from it."""
        num_sent = len(send.source_ids or ()) * self._block_size
        num_tokens = send.ticket.num_cached_tokens + num_sent
        return CommitTransfer(token, Commit(num_tokens=num_tokens, first_token_id=0))

    def _read(self, token: int, send: _Send, now_s: float) -> list[Effect] | None:
        """Begin to read what memory has not; None: nothing is read."""
        if self._pauses.is_on(send.ticket.decode_node, now_s):
            return None
        found = self._disk.find_for_pull(
            send.block_hashes, now_s, may_be_short=send.ticket.may_be_short
        )
        if found is None:
            return None
        wanted = send.block_hashes[: found.num_blocks]
        send.source_ids = self._transfers.pin_some(wanted, len(found.sought))
        if send.source_ids is None:
            return None
        send.sought = found.sought
        return self._disk.read_for_pull(token, found, now_s, partial(self._on_read, token))

    def _on_read(self, token: int) -> list[Effect]:
        return self._push_found(token, self._sends[token])

    def _on_copied(self, token: int, error: Exception | None) -> list[Effect]:
        send = self._sends[token]
        send.is_copied = True
        if send.has_ended:
            self._release(token, send)
            return []
        return [self._commit(token, send) if error is None else AbortTransfer(token)]

    def _release(self, token: int, send: _Send) -> None:
        if send.is_copied and send.has_ended:
            del self._sends[token]
            self._unpin(send)
