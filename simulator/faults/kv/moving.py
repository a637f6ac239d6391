"""What the parts that move bytes share: their frames, and pieces that landed against those sent."""

from __future__ import annotations

from collections.abc import Sequence, Set

from common.errors import InternalError
from kv_transfer.receiving.effects import Write
from kv_transfer.sending.effects import SendChunk
from kv_transfer.wire import frames
from simulator.faults.contents import KVMemory, Numbers

_SUM_BYTES = 16
"""The sums of one block: those of its keys and of its values."""


def data_of(
    effect: SendChunk,
    *,
    runs: Sequence[int] = (),
    source_blocks: Sequence[int] = (),
    is_summed: bool = False,
) -> frames.Data:
    """Return the DATA frame of a chunk; without a description of its bytes it has none."""
    return frames.Data(
        seq=effect.seq,
        lease_token=effect.lease_token,
        generation=effect.generation,
        layer=effect.chunk.layer,
        ordinals=tuple(effect.chunk.ordinals.tolist()),
        runs=tuple(runs),
        source_blocks=tuple(source_blocks),
        sums=bytes(_SUM_BYTES * len(effect.chunk)) if is_summed else b"",
        wants_ack=effect.wants_ack,
    )


class SentPieces:
    """What the senders of open landings have sent, by the block that it is for."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._of_lease: dict[int, dict[tuple[int, int], Numbers]] = {}

    def add(self, write: Write, values: Numbers, but_for: Set[int] = frozenset()) -> None:
        """Record that pieces of a write count as arrived; `values` are those that were sent."""
        data = write.data
        of_lease = self._of_lease.setdefault(data.lease_token, {})
        blocks = write.target_blocks.tolist()
        for ordinal, block, row in zip(data.ordinals, blocks, values, strict=True):
            if ordinal not in but_for:
                of_lease[data.layer, block] = row

    def check(self, me: object, lease_token: int) -> None:
        """Raise `InternalError` where what has landed is not what was sent."""
        for (layer, block), sent in self._of_lease.get(lease_token, {}).items():
            if (self._memory.read(layer, [block])[0] != sent).any():
                raise InternalError(f"{me} lands block {block} with something else in it")

    def forget(self, lease_token: int) -> None:
        """Forget a landing that is over."""
        self._of_lease.pop(lease_token, None)
