"""The connector between machines: KV over ZMQ on TCP."""

from __future__ import annotations

from collections.abc import Sequence

from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from common.observing.clock import Clock, MonotonicClock
from kv_transfer.connector.shell import TransportConnector
from kv_transfer.contract import OnEvent
from kv_transfer.lanes.card_pool import CardPool
from kv_transfer.lanes.inline_lane import InlineLane
from kv_transfer.lanes.lane import Lane
from kv_transfer.lanes.pool_memory import Bytes, Pool, as_pool
from kv_transfer.shared.lanes import VERIFY_AUTO
from kv_transfer.shared.limits import DEFAULT_PEER_TIMEOUT_S, DEFAULT_WINDOW_BYTES, Limits
from kv_transfer.zmq.curve_keys import CurveKeys
from kv_transfer.zmq.transport import ZmqTransport


class ZmqConnector(TransportConnector):
    """A `KVConnector` that senders reach at `endpoint`, e.g. `tcp://10.0.0.7:41234`.

    `host` is bound; `advertised_host` (default: the same) goes into tickets, so other nodes must be
    able to reach it. `lanes` are faster lanes, used where a pair supports them; without
    `has_inline` a pair that supports none of them is refused. Blocks of `beside`, other memory, are
    sent too, with the numbers behind those of the pool. With `card` blocks of the pool are pushed
    and land there, and `pool` is its ring in host memory. `verify` is a mode of `shared.lanes`.
    With `keys` only nodes that hold the same pair can connect, and all frames here are encrypted.

    At most `window_bytes` of data per decode node are unacknowledged, times `kv_lanes`; transfers
    to a peer that is silent for `peer_timeout_s` fail. With `kv_lanes` above 1 a pair has so many
    connections, or as many as its other node, and the connector as many threads that move bytes and
    as many that hash and copy. Raises `ConfigError` when the address cannot be bound or the window
    is too small for one block.
    """

    def __init__(
        self,
        pool: Pool | Bytes,
        layout: KVLayout,
        incarnation: Incarnation,
        on_event: OnEvent,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertised_host: str | None = None,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        peer_timeout_s: float = DEFAULT_PEER_TIMEOUT_S,
        kv_lanes: int = 1,
        lanes: Sequence[Lane] = (),
        beside: Pool | Bytes | None = None,
        card: CardPool | None = None,
        has_inline: bool = True,
        verify: str = VERIFY_AUTO,
        keys: CurveKeys | None = None,
        clock: Clock | None = None,
    ) -> None:
        limits = Limits(
            # With one window for all connections, frames of 8 MiB would leave most of them idle.
            window_bytes=kv_lanes * window_bytes,
            peer_timeout_s=peer_timeout_s,
            max_channels=kv_lanes,
        )
        pool = as_pool(pool, layout)
        limits.blocks_per_chunk(layout)
        # Before the transport, which is closed with the connector.
        all_lanes = [*lanes, InlineLane("zmq", pool, limits)] if has_inline else lanes
        super().__init__(
            pool,
            layout,
            incarnation,
            on_event,
            transport=ZmqTransport(host, port, advertised_host or host, layout, limits, keys),
            lanes=all_lanes,
            beside=beside,
            card=card,
            verify=verify,
            limits=limits,
            clock=clock or MonotonicClock(),
        )
