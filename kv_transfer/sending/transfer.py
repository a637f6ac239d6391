"""A sender's transfers: the pushed pieces, pending chunks and commit of each, and their turns."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import numpy as np

from common.errors import HandoffFailed, PeerProtocolError
from kv_transfer.contract import Commit, Ticket
from kv_transfer.shared.block_arrays import Blocks, as_blocks
from kv_transfer.shared.chunks import (
    MAX_SOURCE_BLOCKS,
    BlockSums,
    LayerChunk,
    PieceSet,
    PushedPieces,
    add_to_digest,
    split_chunks,
)
from kv_transfer.shared.handshake import HANDOFF_TABLE, HandoffState, HandoffStep, advance
from kv_transfer.shared.limits import (
    MAX_BLOCKS_PER_PART,
    MAX_DRAFT_TOKENS,
    MAX_REPEATS_PER_TRANSFER,
)
from kv_transfer.wire.frames import CommitFrame


@dataclass(frozen=True, slots=True)
class Source:
    """The memory to read: the pool and, from block `num_pool_blocks` on, other memory of the host.

    `max_blocks` of each layer fit into one chunk.
    """

    num_blocks: int
    max_blocks: tuple[int, ...]
    num_pool_blocks: int = MAX_SOURCE_BLOCKS

    @property
    def num_layers(self) -> int:
        return len(self.max_blocks)

    def part_of(self, chunk: LayerChunk) -> tuple[int, bool]:
        """Return the layer of a chunk, and whether it is in the pool: what a frame has one of."""
        return chunk.layer, int(chunk.source_blocks[0]) < self.num_pool_blocks


@dataclass(slots=True)
class _Push:
    """Pushed blocks of a layer, of which the first `num_split` are in chunks."""

    layer: int
    ordinals: Sequence[int] | Blocks
    source_blocks: Sequence[int] | Blocks
    num_split: int = 0


class Transfer:
    """State, pending chunks and deadline of one `open`.

    Pushed blocks become chunks only shortly before they are sent, so a push costs the same for any
    number of blocks. `misuse` is what its owner did wrong: such a transfer sends nothing more.

    `num_in_flight` chunks were sent and are not acknowledged. `has_promised` is whether a COMMIT
    was ever sent: only then can the peer have committed. `committing_since_s` is when a tick first
    saw that everything was pushed. `was_begun` is whether a BEGIN was ever sent. `is_begun` is
    whether pieces may be sent on this connection: on a one-sided lane not before the receiver has
    registered the writer. `may_spread` is whether they may be sent on further ones: not before the
    receiver knows the transfer.
    """

    def __init__(
        self,
        ticket: Ticket,
        source: Source,
        *,
        deadline_at_s: float,
        now_s: float,
        priority: int = 0,
    ) -> None:
        self.ticket = ticket
        self.priority = priority
        self.state = HandoffState.TRANSFERRING
        self.deadline_at_s = deadline_at_s
        self.pending: deque[LayerChunk] = deque()
        self.misuse: HandoffFailed | None = None
        self._source = source
        self._pushes: deque[_Push] = deque()
        self._num_unsplit = 0
        self._num_repeats = 0
        self._targets = as_blocks(ticket.target_block_ids)
        self._pushed = PushedPieces(source.num_layers, self._targets.size)
        self._commit: Commit | None = None
        self._is_commit_sent = False
        self.has_promised = False
        self.was_begun = self.is_begun = self.may_spread = False
        self.num_in_flight = 0
        self._num_acknowledged = 0
        self.opened_at_s = now_s
        self.committing_since_s: float | None = None
        self._summed = PieceSet(source.num_layers, self._targets.size)
        self._digest = 0

    @property
    def token(self) -> int:
        return self.ticket.lease_token

    @property
    def num_pushed(self) -> int:
        """The pieces, each of one block and layer."""
        return self._pushed.count

    @property
    def num_remaining(self) -> int:
        """The pushed pieces that were not acknowledged; those pushed twice may count twice."""
        return max(0, self._pushed.count + self._num_unsplit - self._num_acknowledged)

    @property
    def is_stopped(self) -> bool:
        """Whether nothing more is sent, although the transfer has not ended."""
        return self.state is HandoffState.ABORTING or self.misuse is not None

    @property
    def has_pieces(self) -> bool:
        """Whether there are pieces to be sent."""
        return bool(self.pending or self._pushes)

    def acknowledge(self, chunk: LayerChunk) -> None:
        """Record that the peer consumed a chunk."""
        self.num_in_flight -= 1
        self._num_acknowledged += len(chunk)

    @property
    def prefill_s(self) -> float:
        """How long the prompt took, with its time in the queue; for one that is committing."""
        return (self.committing_since_s or self.opened_at_s) - self.opened_at_s

    def waiting_s(self, now_s: float) -> float:
        """Return for how long it was seen to wait for its bytes alone; call it now and then."""
        if self.state is not HandoffState.COMMITTING or not self.num_remaining:
            return 0.0
        if self.committing_since_s is None:
            self.committing_since_s = now_s
        return now_s - self.committing_since_s

    def on_suspended(self, span_s: float, now_s: float) -> None:
        """Leave out `span_s` until now, in which this process stood still; the deadline stays."""
        self.opened_at_s = min(now_s, self.opened_at_s + span_s)
        if self.committing_since_s is not None:
            self.committing_since_s = min(now_s, self.committing_since_s + span_s)

    def advance(self, step: HandoffStep) -> bool:
        """Apply `step` if the table allows it; return whether it did."""
        state = advance(HANDOFF_TABLE, self.state, step)
        self.state = state or self.state
        return state is not None

    def push(
        self, layer: int, ordinals: Sequence[int] | Blocks, source_blocks: Sequence[int] | Blocks
    ) -> None:
        """Queue the pieces that were not pushed before, whatever their number."""
        if self.state is HandoffState.COMMITTING:
            self._stop("push after commit")
        elif not 0 <= layer < self._source.num_layers:
            self._stop(f"layer {layer}: wanted 0 to {self._source.num_layers - 1}")
        elif len(ordinals) != len(source_blocks):
            self._stop(f"{len(ordinals)} ordinals for {len(source_blocks)} source blocks")
        else:
            self._pushes.append(_Push(layer, ordinals, source_blocks))
            self._num_unsplit += len(ordinals)

    def split_pushes(self, num_wanted: int) -> None:
        """Make chunks of pushed blocks until there are `num_wanted`, if there are so many."""
        while self._pushes and len(self.pending) < num_wanted:
            self._split_part(self._pushes[0])

    def next_frame(
        self, block_bytes: Sequence[int], *, most_chunks: int, most_blocks: int, most_bytes: int
    ) -> tuple[int, int]:
        """Return how many pending chunks, all of one layer and memory, are the next DATA frame;
        its bytes. The first chunk always fits.
        """
        layer = num_chunks = num_blocks = 0
        part = (0, True)
        for chunk in islice(self.pending, most_chunks):
            if not num_chunks:
                layer, part = chunk.layer, self._source.part_of(chunk)
                most_blocks = min(most_blocks, most_bytes // block_bytes[layer])
            elif self._source.part_of(chunk) != part or num_blocks + len(chunk) > most_blocks:
                break
            num_chunks += 1
            num_blocks += len(chunk)
        return num_chunks, num_blocks * block_bytes[layer]

    def _split_part(self, push: _Push) -> None:
        # Whole chunks, so that none is short before the last part.
        max_blocks = self._source.max_blocks[push.layer]
        num_chunks = max(1, MAX_BLOCKS_PER_PART // max_blocks)
        part = slice(push.num_split, push.num_split + num_chunks * max_blocks)
        ordinals = self._checked("ordinal", push.ordinals[part], self._targets.size)
        blocks = self._checked("source block", push.source_blocks[part], self._source.num_blocks)
        if ordinals is None or blocks is None:
            return
        new = self._pushed.add(push.layer, ordinals, blocks)
        self.pending.extend(self._split(push.layer, ordinals[new], blocks[new]))
        push.num_split += ordinals.size
        self._num_unsplit -= ordinals.size
        if push.num_split == len(push.ordinals):
            self._pushes.popleft()

    def _checked(self, name: str, numbers: Sequence[int] | Blocks, limit: int) -> Blocks | None:
        """Return the numbers as an array; None, and stop, where one is not below `limit`."""
        with suppress(ValueError):
            blocks = as_blocks(numbers)
            if not blocks.size or blocks.max() < limit:
                return blocks
        is_good = (isinstance(one, int | np.integer) and 0 <= one < limit for one in numbers)
        wrong = next((one for one, good in zip(numbers, is_good, strict=True) if not good), "")
        self._stop(f"{name} {wrong!r:.80}: wanted 0 to {limit - 1}")
        return None

    def _split(self, layer: int, ordinals: Blocks, source_blocks: Blocks) -> list[LayerChunk]:
        return split_chunks(
            layer,
            ordinals,
            source_blocks,
            max_blocks=self._source.max_blocks[layer],
            num_pool_blocks=self._source.num_pool_blocks,
        )

    def _stop(self, misuse: str) -> None:
        self.misuse = HandoffFailed(f"lease {self.token:#x}: {misuse}")
        self.drop_pieces()

    def drop_pieces(self) -> None:
        """Send none of the pieces that were not sent yet."""
        self.pending.clear()
        self._pushes.clear()
        self._num_unsplit = 0

    def targets_of(self, chunk: LayerChunk) -> Blocks:
        """Return the target block of each block of a chunk."""
        return self._targets[chunk.ordinals]

    def commit(self, commit: Commit) -> None:
        """Store the commit: nothing more is pushed."""
        if self.state is HandoffState.COMMITTING:
            self._stop("committed twice")
        elif len(commit.draft_token_ids) > MAX_DRAFT_TOKENS:
            self._stop(
                f"{len(commit.draft_token_ids)} draft tokens: wanted at most {MAX_DRAFT_TOKENS}"
            )
        elif self.advance(HandoffStep.COMMIT):
            self._commit = commit

    def rewind(self, unacknowledged: Sequence[LayerChunk]) -> None:
        """Queue unacknowledged chunks of a broken connection again, in their old order."""
        self._is_commit_sent = False
        self.requeue(unacknowledged)

    def requeue(self, unacknowledged: Sequence[LayerChunk]) -> None:
        """Queue chunks again that were lost with one of several connections."""
        self.num_in_flight -= len(unacknowledged)
        if not self.is_stopped:
            # A chunk joined for the old lane may be too large for a frame of the new one.
            parts = [
                part
                for chunk in unacknowledged
                for part in self._split(chunk.layer, chunk.ordinals, chunk.source_blocks)
            ]
            self.pending.extendleft(reversed(parts))

    def repeat(self, layer: int, ordinals: Sequence[int]) -> None:
        """Queue pieces again, which arrived damaged.

        Raises `PeerProtocolError` for pieces that were not pushed, and when asked too often.
        """
        found = [self._pushed.source_of(layer, ordinal) for ordinal in ordinals]
        blocks = [block for block in found if block is not None]
        if len(blocks) < max(1, len(ordinals)):
            raise PeerProtocolError(f"REPEAT of layer {layer} names pieces that were not sent")
        self._num_repeats += 1
        if self._num_repeats > MAX_REPEATS_PER_TRANSFER:
            raise PeerProtocolError(f"more than {MAX_REPEATS_PER_TRANSFER} REPEAT for one transfer")
        self._num_acknowledged -= len(blocks)  # The damaged ones will count once more.
        self.pending.extend(self._split(layer, as_blocks(ordinals), as_blocks(blocks)))

    def add_sums(self, chunk: LayerChunk, sums: BlockSums) -> None:
        """Add the piece sums of the chunk's blocks, keys and values together, to the digest."""
        is_new = self._summed.add(chunk.layer, chunk.ordinals)
        self._digest = add_to_digest(self._digest, sums[is_new])

    def take_commit(self) -> CommitFrame | None:
        """Return the COMMIT frame, once per connection, when every piece was consumed.

        Not before: a source block that is reused after a transfer ended in an error might still be
        read by a frame that was not sent yet. Without a COMMIT none of that can ever be landed.
        """
        is_due = self.state is HandoffState.COMMITTING and not self.has_pieces and not self.misuse
        if not is_due or self.num_in_flight or self._is_commit_sent or self._commit is None:
            return None
        self._is_commit_sent = True
        self.has_promised = True
        return CommitFrame(
            lease_token=self.token,
            generation=self.ticket.generation,
            num_pieces=self._pushed.count,
            digest=self._digest,
            num_tokens=self._commit.num_tokens,
            first_token_id=self._commit.first_token_id,
            draft_token_ids=self._commit.draft_token_ids,
        )


_AT_ONCE = -math.inf, 0.0


class Turns:
    """Transfers with something to send: the highest priority, then the earliest deadline, first.

    One that has only its COMMIT to send requires no room in the window, and goes before all others.

    Transfers that are equal in both take turns, one frame each.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, float, int, int]] = []
        # By token the number of its entry, and whether it has pieces; other entries are outdated.
        self._entry_of: dict[int, tuple[int, bool]] = {}
        self._num_entries = 0

    def add(self, transfer: Transfer) -> None:
        """Add a transfer behind its equals, unless it is there."""
        has_pieces = transfer.has_pieces
        queued = self._entry_of.get(transfer.token)
        if queued is not None and queued[1] is has_pieces:
            return
        self._num_entries += 1
        self._entry_of[transfer.token] = self._num_entries, has_pieces
        urgency = (-transfer.priority, transfer.deadline_at_s) if has_pieces else _AT_ONCE
        heapq.heappush(self._heap, (*urgency, self._num_entries, transfer.token))

    def discard(self, token: int) -> None:
        self._entry_of.pop(token, None)

    def clear(self) -> None:
        self._heap.clear()
        self._entry_of.clear()

    def __iter__(self) -> Iterator[int]:
        """Iterate over the tokens, in no order."""
        return iter(self._entry_of)

    def first(self) -> int | None:
        """Return the token of the transfer whose turn it is."""
        while self._heap:
            _, _, entry, token = self._heap[0]
            if self._entry_of.get(token, (0, False))[0] == entry:
                return token
            heapq.heappop(self._heap)
        return None
