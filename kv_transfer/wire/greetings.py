"""The frames that begin a connection; `frames` has them too, and the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from kv_transfer.shared.limits import LEAST_BLOCKS_PER_FRAME


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame of every connection; repeated until it is answered.

    `offers`: data of the sender's end of each lane, by the lane's name. `can_repeat`: the sender
    understands REPEAT. `number` counts the connections that this sender began: a HELLO that arrives
    late is known by it. `num_channels` is how many connections the sender would have to this
    receiver. `channel` is which of them this is: of a further one `group` is that of the first
    one's WELCOME. Earlier releases do not send the last five fields.
    """

    sender: Incarnation
    receiver: Incarnation
    layout: KVLayout
    offers: Mapping[str, bytes]
    verify: str
    can_repeat: bool = False
    number: int = 0
    num_channels: int = 1
    channel: int = 0
    group: bytes = b""


@dataclass(frozen=True, slots=True)
class Welcome:
    """HELLO is accepted by this incarnation, which chose one of the offered lanes.

    `lane_reply` is the data of the receiver's end of the lane. At most `window_bytes` of data may
    be unacknowledged on this connection, until an ACK says otherwise. `verify` is the mode that
    both sides use. A sender without a transfer may say nothing for `quiet_s`; 0 means that its
    silence ends the connection as ever. A DATA frame may have `frame_blocks` blocks. The sender may
    have `num_channels` connections, and names `group` in the HELLO of further ones. Earlier
    releases do not send the last four fields.
    """

    receiver: Incarnation
    lane: str
    lane_reply: bytes
    window_bytes: int
    verify: str
    quiet_s: int = 0
    frame_blocks: int = LEAST_BLOCKS_PER_FRAME
    num_channels: int = 1
    group: bytes = b""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The receiver refuses this connection."""

    code: str
    message: str
