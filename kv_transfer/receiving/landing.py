"""The receiver's record of one landing: its sender, the pieces that arrived, the commit."""

from __future__ import annotations

from collections.abc import Set

from common.errors import HandoffFailed, PeerProtocolError
from common.ids import Incarnation
from common.kv.blocks import blocks_for
from common.kv.kv_layout import KVLayout
from kv_transfer.contract import Commit, Ticket
from kv_transfer.receiving.damaged import DamagedPieces
from kv_transfer.shared.block_arrays import Blocks, as_blocks
from kv_transfer.shared.chunks import ArrivedSums, BlockSums, PieceSet
from kv_transfer.shared.handshake import HANDOFF_TABLE, HandoffState, HandoffStep, advance
from kv_transfer.shared.lanes import INLINE_LANES, ONE_SIDED_LANES, PULLING_LANES
from kv_transfer.wire.frames import SUM_BYTES, CommitFrame, Data, Repeat


class Landing:
    """One `expect`. `sender` and `session` are None, and `lane` is "", until the first BEGIN."""

    def __init__(
        self, ticket: Ticket, layout: KVLayout, *, sender_deadline_s: float, now_s: float
    ) -> None:
        self.ticket = ticket
        self.state = HandoffState.RESERVED
        self.sender: Incarnation | None = None
        self.session: bytes | None = None
        self.lane = ""
        self.sender_deadline_s = sender_deadline_s
        self.expires_at_s = now_s + sender_deadline_s
        self.commit: Commit | None = None
        # The sender's digest, if the pair verifies at commit.
        self._digest: int | None = None
        self._layout = layout
        self._targets = as_blocks(ticket.target_block_ids)
        num_blocks = self._num_wanted = self._targets.size
        self.damaged = DamagedPieces()
        self._arrived = PieceSet(layout.num_layers, num_blocks)
        self._sums = ArrivedSums(layout.num_layers, num_blocks)

    @property
    def token(self) -> int:
        return self.ticket.lease_token

    def advance(self, step: HandoffStep) -> bool:
        """Apply `step` if the table allows it; return whether it did."""
        state = advance(HANDOFF_TABLE, self.state, step)
        self.state = state or self.state
        return state is not None

    @property
    def may_be_written(self) -> bool:
        """Whether its sender may write its blocks by itself."""
        return self.lane in ONE_SIDED_LANES

    def renew(self, now_s: float) -> None:
        """Restart the sender's deadline, because it was heard."""
        self.expires_at_s = now_s + self.sender_deadline_s

    def check(self, data: Data, part_sizes: list[int], verify: str) -> None:
        """Raise `PeerProtocolError` unless `data` and its parts fit ticket, layout and `verify`."""
        if data.layer >= self._layout.num_layers:
            raise PeerProtocolError(
                f"layer {data.layer}: the cache has {self._layout.num_layers} layers"
            )
        num_targets = self._targets.size
        if max(data.ordinals) >= num_targets:
            raise PeerProtocolError(
                f"block {max(data.ordinals)} of the ticket: it has {num_targets} blocks"
            )
        is_inline = self.lane in INLINE_LANES
        is_pulled = self.lane in PULLING_LANES
        if is_inline != bool(data.runs) or is_pulled != bool(data.source_blocks):
            raise PeerProtocolError(f"DATA does not name its blocks as lane {self.lane} requires")
        layer = self._layout.layers[data.layer]
        if len(data.sums) not in (0, SUM_BYTES * layer.num_planes * len(data.ordinals)):
            raise PeerProtocolError(
                f"{len(data.sums)} bytes of sums for {len(data.ordinals)} blocks of layer "
                f"{data.layer}, which has {layer.num_planes} planes"
            )
        wanted = [count * layer.piece_bytes for count in data.runs for _ in range(layer.num_planes)]
        if part_sizes != wanted:
            raise PeerProtocolError(
                f"payload of {len(part_sizes)} parts and {sum(part_sizes)} bytes: "
                f"wanted {len(wanted)} parts and {sum(wanted)} bytes"
            )
        if (verify == "block") != bool(data.sums):
            raise PeerProtocolError(f"DATA breaks the agreement to verify: {verify}")

    def targets_of(self, data: Data) -> Blocks:
        """Return the target block of each block of `data`, which `check` passed."""
        return self._targets[as_blocks(data.ordinals)]

    def has_all(self, data: Data) -> bool:
        """Return whether every piece of `data` arrived before."""
        return self._arrived.has_all(data.layer, as_blocks(data.ordinals))

    def record(self, data: Data, spoiled: Set[int], sums: BlockSums | None) -> None:
        """Record that the pieces of `data` are in the pool; add `sums`, if any, to the digest.

        Of the `spoiled` ones it is unknown whether they are: see `landings.Copies`.

        Raises `HandoffFailed` for a piece that had another sum before: copies may overlap in time,
        so which of the two is in the pool is unknown.
        """
        self._add(data, spoiled)
        if sums is None:
            return
        changed = self._sums.put(data.layer, as_blocks(data.ordinals), sums)
        if changed.size:
            raise HandoffFailed(
                f"bad checksum: block {changed[0]} of the ticket in layer {data.layer} "
                "came again with other bytes"
            )

    def record_damaged(self, data: Data, spoiled: Set[int], damaged: Set[int]) -> None:
        """Record the pieces of `data` as above; the pool lost the `damaged` ones with it.

        A damaged piece may have arrived before, in another frame: it was overwritten.
        """
        self._add(data, spoiled | damaged)
        self._arrived.discard(data.layer, as_blocks(tuple(damaged)))

    def _add(self, data: Data, but_for: Set[int]) -> None:
        ordinals = data.ordinals
        if but_for:
            ordinals = tuple(one for one in ordinals if one not in but_for)
        self._arrived.add(data.layer, as_blocks(ordinals))
        self.damaged.arrived(data.layer, ordinals)

    def repeat(self, layer: int, ordinals: tuple[int, ...]) -> Repeat:
        """Return the frame that asks for these pieces again."""
        return Repeat(self.token, self.ticket.generation, layer, ordinals)

    def promise(self, frame: CommitFrame, verify: str) -> None:
        """Store the commit. Raises `HandoffFailed` unless ticket and bytes agree with it."""
        num_blocks, block_size = self._targets.size, self._layout.block_size
        cached_blocks = self.ticket.num_cached_tokens // block_size
        prompt_blocks = blocks_for(frame.num_tokens, block_size)
        if self.ticket.may_be_short and 0 < prompt_blocks - cached_blocks < num_blocks:
            num_blocks = prompt_blocks - cached_blocks
        num_pieces = num_blocks * self._layout.num_layers
        if frame.num_pieces != num_pieces:
            raise HandoffFailed(
                f"short count: the sender sent {frame.num_pieces} pieces, "
                f"wanted {num_pieces} ({num_blocks} blocks, "
                f"{self._layout.num_layers} layers)"
            )
        if prompt_blocks - cached_blocks != num_blocks:
            raise HandoffFailed(
                f"a prompt of {frame.num_tokens} tokens has {prompt_blocks} blocks: "
                f"the ticket has {num_blocks} behind {cached_blocks} cached ones"
            )
        self._num_wanted = num_blocks
        self._digest = frame.digest if verify == "commit" else None
        self.commit = Commit(
            num_tokens=frame.num_tokens,
            first_token_id=frame.first_token_id,
            draft_token_ids=frame.draft_token_ids,
        )

    def complete(self) -> Commit | None:
        """Return the commit, once, when it was promised and every piece of its blocks has arrived.

        Called when nothing is being copied. Raises `HandoffFailed` for a wrong digest.
        """
        if self.commit is None:
            return None
        if self._digest not in (None, self._sums.digest):
            raise HandoffFailed(
                f"bad checksum: the digest of the data is {self._sums.digest:#x}, "
                f"the sender's is {self._digest:#x}"
            )
        if not self._arrived.has_first(self._num_wanted):
            return None
        return self.commit if self.advance(HandoffStep.COMPLETE) else None
