"""The handoffs of the benchmark: small ones, so that what they cost besides their bytes shows."""

from __future__ import annotations

from common.ids import AttemptId, Incarnation
from common.kv.kv_layout import KVLayout
from kv_transfer.contract import Commit, Ticket

# A piece is 1 KiB; a handoff moves 8 blocks of 4 layers, 64 KiB.
LAYOUT = KVLayout(
    model_digest="bench",
    num_layers=4,
    num_kv_heads=1,
    head_dim=32,
    block_size=16,
    dtype="bfloat16",
)
BLOCKS = tuple(range(8))
COMMIT = Commit(num_tokens=len(BLOCKS) * LAYOUT.block_size, first_token_id=0)
DEADLINE_S = 120.0


def ticket_for(token: int, decode_node: Incarnation, endpoint: str, first_block: int) -> Ticket:
    """Return the ticket of a handoff, which lands in the blocks from `first_block` on."""
    return Ticket(
        attempt=AttemptId(f"bench-{token}", 0),
        decode_node=decode_node,
        kv_endpoint=endpoint,
        lease_token=token,
        generation=1,
        target_block_ids=tuple(first_block + block for block in BLOCKS),
        num_cached_tokens=0,
        fingerprint=LAYOUT.fingerprint,
        lease_s=DEADLINE_S,
    )
