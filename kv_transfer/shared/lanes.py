"""The lanes: the ways in which the bytes of DATA frames get into a pool.

    loopback, zmq   the bytes travel after the header; the receiver copies them into its pool
    ipc             the receiver's card copies them out of the sender's pool, which is on a card
    shm             the receiver copies them out of the sender's pool, which is shared memory
    rdma            the sender writes them into the receiver's pool, then sends the header
    rdma_read       the receiver reads them out of the sender's ring; both pools are on cards

Only `rdma` is one-sided: the receiver cannot refuse a write, so a landing that ends early keeps
its blocks until its sender stops writing. HELLO and WELCOME agree on the lane of a pair and on how
its bytes are verified.
"""

from __future__ import annotations

INLINE_LANES = ("loopback", "zmq")
LANES_BY_SPEED = ("ipc", "shm", "rdma", "rdma_read", *INLINE_LANES)
"""The order in which a receiver chooses among the lanes that both sides support."""
PULLING_LANES = frozenset({"ipc", "shm", "rdma_read"})
ONE_SIDED_LANES = frozenset({"rdma"})
RDMA_LANES = frozenset({"rdma", "rdma_read"})
"""A node has one of them: with its pool in host memory the first, with a card the second."""
CARD_LANES = frozenset({"ipc"})
"""Lanes between pools on cards; the others are between pools or rings in host memory."""
POOL_ONLY_LANES = ONE_SIDED_LANES | CARD_LANES
"""Lanes that send blocks of the pool alone: other memory of the host is neither registered with an
engine nor on a card."""
RING_ONLY_LANES = frozenset({"rdma_read"})
"""Lanes whose receivers reach the ring alone: what is in other memory of the host is copied to its
slots."""

LANE_NEEDS = {
    "ipc": "ipc wants both nodes on GPUs of one host, as one user, with kv_transport auto or ipc",
    "shm": "shm wants both nodes on one host, as one user, with kv_transport auto or shm",
    "rdma": "rdma wants RDMA devices on both nodes, with kv_transport auto or rdma",
    "rdma_read": "rdma_read wants RDMA devices on both nodes, with kv_transport auto or rdma",
}

VERIFY_MODES = ("off", "commit", "block")
"""Weakest first: no checksums, one digest with COMMIT, one sum per block in each DATA frame."""
VERIFY_AUTO = "auto"


def verification(lane: str, *wanted: str) -> str:
    """Return the strongest of the wanted modes on `lane`.

    `auto` means `block`, and `off` on `rdma`, whose network verifies its data itself. On
    `rdma_read` it is `commit` at least: see `lanes.rdma`.
    """
    default = "off" if lane in ONE_SIDED_LANES else "block"
    least = "commit" if lane == "rdma_read" else "off"
    modes = [default if mode == VERIFY_AUTO else mode for mode in wanted]
    return max(least, *modes, key=VERIFY_MODES.index)
