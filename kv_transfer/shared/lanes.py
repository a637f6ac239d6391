"""The lanes: the ways in which the bytes of DATA frames get into a pool.

    loopback, zmq   the bytes travel after the header; the receiver copies them into its pool
    ipc             the receiver's card copies them out of the sender's pool, which is on a card
    shm             the receiver copies them out of the sender's pool, which is shared memory
    rdma            the sender writes them into the receiver's pool, then sends the header

Only the last is one-sided: the receiver cannot refuse a write, so a landing that ends early keeps
its blocks until its sender stops writing. HELLO and WELCOME agree on the lane of a pair and on how
its bytes are verified.
"""

from __future__ import annotations

INLINE_LANES = ("loopback", "zmq")
LANES_BY_SPEED = ("ipc", "shm", "rdma", *INLINE_LANES)
"""The order in which a receiver chooses among the lanes that both sides support."""
PULLING_LANES = frozenset({"ipc", "shm"})
ONE_SIDED_LANES = frozenset({"rdma"})
CARD_LANES = frozenset({"ipc"})
"""Lanes between pools on cards; the others are between pools in host memory."""
POOL_ONLY_LANES = ONE_SIDED_LANES | CARD_LANES
"""Lanes that send blocks of the pool alone: other memory of the host is neither registered with an
engine nor on a card."""

LANE_NEEDS = {
    "ipc": "ipc wants both nodes on GPUs of one host, as one user, with kv_transport auto or ipc",
    "shm": "shm wants both nodes on one host, as one user, with kv_transport auto or shm",
    "rdma": "rdma wants RDMA devices on both nodes, with kv_transport auto or rdma",
}

VERIFY_MODES = ("off", "commit", "block")
"""Weakest first: no checksums, one digest with COMMIT, one sum per block in each DATA frame."""
VERIFY_AUTO = "auto"


def verification(lane: str, *wanted: str) -> str:
    """Return the strongest of the wanted modes on `lane`.

    `auto` means `block`, and `off` on RDMA, whose network verifies its data itself.
    """
    default = "off" if lane in ONE_SIDED_LANES else "block"
    modes = [default if mode == VERIFY_AUTO else mode for mode in wanted]
    return max(modes, key=VERIFY_MODES.index)
