"""How many pending chunks become one DATA frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from kv_transfer.shared.chunks import LayerChunk


def next_frame(
    pending: Iterable[LayerChunk],
    block_bytes: Sequence[int],
    *,
    most_chunks: int,
    most_blocks: int,
    most_bytes: int,
) -> tuple[int, int]:
    """Return how many of the first chunks, all of one layer, are the next frame; its bytes.

    The first chunk always fits.
    """
    layer = num_chunks = num_blocks = 0
    for chunk in islice(pending, most_chunks):
        if not num_chunks:
            layer = chunk.layer
            most_blocks = min(most_blocks, most_bytes // block_bytes[layer])
        elif chunk.layer != layer or num_blocks + len(chunk) > most_blocks:
            break
        num_chunks += 1
        num_blocks += len(chunk)
    return num_chunks, num_blocks * block_bytes[layer]
