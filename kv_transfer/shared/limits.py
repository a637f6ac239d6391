"""Every bound of the KV plane, in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.errors import ConfigError
from common.kv.kv_layout import KVLayout
from kv_transfer.shared.lanes import ONE_SIDED_LANES, PULLING_LANES

PROTOCOL_VERSION = 4
MAX_PEERS = 8192
"""Nodes that one node is connected to; its open files usually end before (`ulimit -n`)."""
DEFAULT_WINDOW_BYTES = 32 << 20
DEFAULT_PEER_TIMEOUT_S = 5.0
WINDOWS_PER_NODE = 4
RING_WINDOWS, RING_RECEIVING_WINDOWS = 8, 2
"""Windows that the ring of a node with a card holds, and how many of them are for what it receives.

The rest is what a node may have unacknowledged, and half as much again: for two frames to each of
many peers beyond that, and for slots that a broken connection leaves taken.
"""
MAX_WAIT_S = 1.0
"""The longest wait of a connector before it checks the time again."""
MAX_HEADER_BYTES = 128 * 1024
MAX_TEXT_CHARS = 1024
MAX_NODE_ID_CHARS = 256
MAX_BLOCKS_PER_FRAME = 4096
LEAST_BLOCKS_PER_FRAME = 256
"""Blocks of a frame that every release accepts; a chunk has at most as many."""
MAX_BLOCKS_PER_PART = 1024
"""Pushed blocks are prepared for sending in parts of so many, which takes about a millisecond."""
MAX_DRAFT_TOKENS = 64
MAX_LANES = 4
MAX_LANE_BYTES = 3072
MAX_GROUP_BYTES = 256
# One ping renews every transfer of a link, so this also bounds the transfers per link.
MAX_TRANSFERS_PER_LINK = 512
BESIDE_WINDOWS = 2
"""Window factor of lanes whose bytes travel beside the frames: in flight they take no memory.

With one window the receiver of a pull lane stalls on checksums while it copies. Where they are read
into slots they take these, and one sender should not take all that a receiver has.
"""
MAX_FRAMES_IN_FLIGHT = 256
MAX_TURNS_PER_ACK = 4
"""Links that an acknowledgement lets send: enough to use the room that it makes."""
MAX_REMEMBERED_OUTCOMES = 1024
MAX_REMEMBERED_EPOCHS = 1024
MAX_REMEMBERED_PEERS = 1024
# A landing fails when more is damaged: a network this bad, or memory that changes.
MAX_REPEATS_PER_PIECE = 3
MAX_REPEATS_PER_LANDING = 16
# The receiver asks once more at COMMIT, on each connection, for what did not come.
MAX_REPEATS_PER_TRANSFER = 4 * MAX_REPEATS_PER_LANDING
WRITER_SHARE, REPORT_SHARE = 0.5, 0.4
"""Shares of the peer timeout for a silent writer, and for a report that a fence waits for."""
MAX_DAMAGED_HEADERS = 16
"""Headers with a wrong checksum after which a landing fails, or a decode node is given up."""


def receiving_slots(num_slots: int) -> int:
    """Return how many slots of a ring, its last ones, are for what is received."""
    return max(1, num_slots * RING_RECEIVING_WINDOWS // RING_WINDOWS)


def frame_blocks_towards(said: int) -> int:
    """Return how many blocks a frame may have to a receiver that said that it takes so many."""
    return max(LEAST_BLOCKS_PER_FRAME, min(said, MAX_BLOCKS_PER_FRAME))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one connector.

    `window_bytes` of data may be unacknowledged per decode node, and `WINDOWS_PER_NODE` times as
    much in all: beyond that a sender has two frames in flight to each, and a receiver grants two
    frames to each. A peer that is pinged and stays silent for `peer_timeout_s` (on some lanes
    earlier: `patience_s`) fails everything shared with it. Connections without a transfer are
    closed after `idle_s`. At most `max_sessions` senders are connected at once, each by at most
    `max_channels` connections.
    """

    window_bytes: int = DEFAULT_WINDOW_BYTES
    max_frame_bytes: int = 2 << 20
    max_joined: int = 4
    max_joined_pulled: int = 8
    max_joined_one_sided: int = 16
    peer_timeout_s: float = DEFAULT_PEER_TIMEOUT_S
    idle_s: float = 30.0
    max_sessions: int = MAX_PEERS
    max_channels: int = 1

    @property
    def node_window_bytes(self) -> int:
        """The most unacknowledged data of all peers together, in bytes."""
        return WINDOWS_PER_NODE * self.window_bytes

    @property
    def least_window_bytes(self) -> int:
        """Two frames: what a pair may have in flight whatever others have, in bytes.

        One is acknowledged while the other one is sent.
        """
        return min(self.window_bytes, 2 * self.max_frame_bytes)

    @property
    def num_workers(self) -> int:
        """The threads that hash and copy; 0: the connector's own thread does."""
        return self.max_channels if self.max_channels > 1 else 0

    @property
    def gathered_bytes(self) -> int:
        """The most in copies of short ranges that were not sent yet, in bytes.

        A window for each connection, and the frame that each worker makes at present.
        """
        frame_bytes = self.max_joined * self.max_frame_bytes
        return self.max_channels * DEFAULT_WINDOW_BYTES + self.num_workers * frame_bytes

    @property
    def quiet_s(self) -> int:
        """How long a sender without a transfer may say nothing; it closes its connection before."""
        return math.ceil(self.idle_s + self.peer_timeout_s)

    @property
    def ping_interval_s(self) -> float:
        """A quarter of the timeout, so that one late ping is not taken for a dead peer."""
        return self.peer_timeout_s / 4

    @property
    def answer_timeout_s(self) -> float:
        """How long a ping may stay unanswered: with the interval before it, `peer_timeout_s`."""
        return self.peer_timeout_s - self.ping_interval_s

    @property
    def report_timeout_s(self) -> float:
        """How long a fence waits for the reports of connected senders."""
        return REPORT_SHARE * self.peer_timeout_s

    def patience_s(self, lane: str) -> float:
        """Return how long a sender on `lane` may be silent.

        On one-sided lanes a fence must come before its blocks are back, so it is shorter: with
        `report_timeout_s` it leaves a tenth of `peer_timeout_s` for the moves of slabs.
        """
        return self.peer_timeout_s * (WRITER_SHARE if lane in ONE_SIDED_LANES else 1.0)

    def ping_interval_on(self, lane: str) -> float:
        """Return the interval of pings of a sender with transfers on `lane`.

        With it a node may stand still for 2 s, its last ping an interval before, and go on.
        """
        return self.ping_interval_s if lane not in ONE_SIDED_LANES else self.peer_timeout_s / 20

    def joined_on(self, lane: str) -> int:
        """Return the most chunks of one frame on a lane."""
        if lane in PULLING_LANES:
            return self.max_joined_pulled
        return self.max_joined_one_sided if lane in ONE_SIDED_LANES else self.max_joined

    def blocks_per_chunk(self, layout: KVLayout) -> tuple[int, ...]:
        """Return the most blocks of each layer that fit a frame and the window.

        Raises `ConfigError` when the window cannot hold even one block.
        """
        sizes = [layer.num_bytes for layer in layout.layers]
        if self.window_bytes < max(sizes):
            raise ConfigError(
                f"the KV window is {self.window_bytes} bytes: wanted at least {max(sizes)}, "
                "one block in one layer"
            )
        # Half a window at most, so that one frame is sent while the other is acknowledged.
        most_bytes = min(self.max_frame_bytes, self.window_bytes // 2)
        return tuple(max(1, min(LEAST_BLOCKS_PER_FRAME, most_bytes // size)) for size in sizes)

    def ring_slots(self, layout: KVLayout) -> int:
        """Return how many slots a ring has: what is for receiving takes any frame of any sender."""
        least_bytes = min(layer.num_bytes for layer in layout.layers)
        return RING_WINDOWS * max(self.window_bytes, self.max_frame_bytes) // least_bytes

    def max_part_bytes(self, layout: KVLayout) -> int:
        """Return the largest message part that a sender with any window may send, in bytes."""
        # A part is of one plane.
        joined = (
            self.max_joined
            * self.max_frame_bytes
            // min(layer.num_planes for layer in layout.layers)
        )
        piece_bytes = max(layer.piece_bytes for layer in layout.layers)
        return max(joined, piece_bytes, MAX_HEADER_BYTES)
