"""With a cluster key: the same handoffs, encrypted, and no access without the key."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from common.errors import HandoffFailed
from common.kv.kv_layout import KVLayout
from common.observing.clock import Clock
from kv_transfer.connector.shell import TransportConnector
from kv_transfer.contract import Landed, OnEvent, TransferEnded
from kv_transfer.lanes.pool_memory import Bytes
from kv_transfer.shared.limits import Limits
from kv_transfer.zmq.connector import ZmqConnector
from kv_transfer.zmq.curve_keys import CurveKeys, new_curve_keys
from kv_transfer.zmq.gate import ZmqGate
from tests.contract.kv_connector.proxy import Proxy
from tests.support.clocks.manual_clock import ManualClock
from tests.support.kv.kinds import NodeOptions, ZmqKind
from tests.support.kv.kv_cluster import (
    LAYOUT,
    Cluster,
    Node,
    commit_for,
    error_of,
    send,
)

KEYS = new_curve_keys()
OTHER_KEYS = new_curve_keys()


class KeyedKind(ZmqKind):
    """`keys` are those of the next node that is made."""

    keys: CurveKeys | None = KEYS

    def connector(self, pool: Bytes, options: NodeOptions, on_event: OnEvent) -> TransportConnector:
        return ZmqConnector(
            pool,
            options.layout,
            options.incarnation,
            on_event,
            window_bytes=options.window_bytes,
            peer_timeout_s=options.peer_timeout_s,
            clock=options.clock,
            keys=self.keys,
        )


class KeyedCluster(Cluster):
    def __init__(self) -> None:
        self.keyed = KeyedKind()
        super().__init__(self.keyed)

    def keyed_node(
        self, name: str, keys: CurveKeys | None, *, epoch: int = 1, clock: Clock | None = None
    ) -> Node:
        self.keyed.keys = keys
        return self.node(name, epoch=epoch, clock=clock)


@pytest.fixture
def keyed() -> Iterator[KeyedCluster]:
    cluster = KeyedCluster()
    yield cluster
    cluster.close()


def land(prefill: Node, decode: Node, cluster: Cluster, blocks: range) -> None:
    ticket = cluster.ticket(decode, blocks)
    wanted = decode.pool.copy()
    wanted[:, :, blocks] = prefill.pool[:, :, blocks]
    send(prefill, decode, ticket, blocks)
    assert decode.wait_event() == Landed(ticket.lease_token, commit_for(ticket, decode.layout))
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    assert np.array_equal(decode.pool, wanted)


def test_nodes_with_the_same_key_hand_off(keyed: KeyedCluster) -> None:
    land(keyed.node("p"), keyed.node("d"), keyed, range(8))


def test_the_largest_frames_pass_encrypted(keyed: KeyedCluster) -> None:
    """A piece as large as a frame's part may be; the encryption adds its own bytes."""
    most = Limits().max_joined * Limits().max_frame_bytes // 2
    layout = KVLayout(
        model_digest="m",
        num_layers=1,
        num_kv_heads=8,
        head_dim=128,
        block_size=most // 2048,
        dtype="bfloat16",
    )
    assert layout.piece_bytes == most
    prefill = keyed.node("p", layout=layout, window_bytes=8 * most, num_blocks=3)
    decode = keyed.node("d", layout=layout, window_bytes=8 * most, num_blocks=3)
    land(prefill, decode, keyed, range(3))


@pytest.mark.parametrize(
    ("sender_keys", "receiver_keys"),
    [
        pytest.param(None, KEYS, id="sender-without"),
        pytest.param(OTHER_KEYS, KEYS, id="sender-with-another"),
        pytest.param(KEYS, None, id="receiver-without"),
        pytest.param(KEYS, OTHER_KEYS, id="receiver-with-another"),
        # Knows whom to speak to, but cannot prove to be one of them.
        pytest.param(CurveKeys(KEYS.public, OTHER_KEYS.secret), KEYS, id="sender-with-half"),
    ],
)
def test_other_keys_get_nothing_and_a_typed_error(
    keyed: KeyedCluster, sender_keys: CurveKeys | None, receiver_keys: CurveKeys | None
) -> None:
    clock = ManualClock()
    decode = keyed.keyed_node("d", receiver_keys)
    prefill = keyed.keyed_node("p", sender_keys, clock=clock)
    before = decode.pool.copy()
    ticket = keyed.ticket(decode, range(4))
    send(prefill, decode, ticket, range(4))

    prefill.pass_time_until(lambda: prefill.events, clock)
    error = error_of(prefill.wait_event())
    assert isinstance(error, HandoffFailed)
    assert "d#1" in str(error)
    assert prefill.connector.statistics().transfers_open == 0
    statistics = decode.connector.statistics()
    assert (statistics.sessions_open, statistics.landings_open) == (0, 1)
    assert statistics.bytes_received == 0
    assert np.array_equal(decode.pool, before)
    # The landing is still there for who may fill it.
    rightful = keyed.keyed_node("p", receiver_keys, epoch=2)
    rightful.connector.open(ticket, deadline_s=30)
    rightful.push_all(ticket, range(4))
    rightful.connector.commit(ticket.lease_token, commit_for(ticket))
    assert decode.wait_event() == Landed(ticket.lease_token, commit_for(ticket))


def knock(endpoint: str) -> Mapping[str, object]:
    """Return how the handshake ends of a client with the public key but another secret."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.CURVE_PUBLICKEY, OTHER_KEYS.public)
        stranger.setsockopt(zmq.CURVE_SECRETKEY, OTHER_KEYS.secret)
        stranger.setsockopt(zmq.CURVE_SERVERKEY, KEYS.public)
        endings = (
            zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        with stranger.get_monitor_socket(endings) as monitor:
            stranger.connect(endpoint)
            assert monitor.poll(20_000)
            ending = recv_monitor_message(monitor)
            stranger.disable_monitor()
    return ending


@pytest.mark.covers("V01")
def test_a_client_with_the_public_key_alone_is_refused_at_once(
    keyed: KeyedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The encryption would work, but the gate refuses the client's key."""
    decode = keyed.keyed_node("d", KEYS)
    ending = knock(decode.connector.endpoint)
    assert ending["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert ending["value"] == 400
    assert "refused 1 KV connections, the last from 127.0.0.1" in caplog.text
    assert decode.connector.statistics().sessions_open == 0


def test_a_gate_that_is_closed_lets_nobody_through() -> None:
    """No gate answers, as for a moment while a connector closes."""
    with zmq.Context() as context:
        gate = ZmqGate(context, KEYS)
        with context.socket(zmq.ROUTER) as router:
            router.setsockopt(zmq.LINGER, 0)
            gate.guard(router)
            port = router.bind_to_random_port("tcp://127.0.0.1")
            gate.close()
            ending = knock(f"tcp://127.0.0.1:{port}")
    assert ending["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def test_closing_with_strangers_at_the_door_is_prompt(keyed: KeyedCluster) -> None:
    decode = keyed.keyed_node("d", KEYS)
    strangers = [keyed.keyed_node(f"s{index}", OTHER_KEYS) for index in range(3)]
    for stranger in strangers:
        stranger.connector.open(keyed.ticket(decode, [0]), deadline_s=30)
    decode.connector.close()
    for stranger in strangers:
        stranger.connector.close()
        assert [type(event) for event in stranger.events] == [TransferEnded]


@pytest.mark.parametrize("keys", [KEYS, None])
def test_what_travels_cannot_be_read(keyed: KeyedCluster, keys: CurveKeys | None) -> None:
    """Neither a block's bytes nor a header are readable; without a key both are (control)."""
    seen = bytearray()

    def watch(connection: int, num_before: int, data: bytes) -> bytes:
        seen.extend(data)
        return data

    prefill, decode = keyed.keyed_node("p", keys), keyed.keyed_node("d", keys)
    ticket = keyed.ticket(decode, range(2))
    proxy = Proxy(decode.connector.endpoint, watch)
    try:
        decode.connector.expect(ticket, sender_deadline_s=30)
        through = dataclasses.replace(ticket, kv_endpoint=proxy.endpoint)
        prefill.connector.open(through, deadline_s=30)
        prefill.push_all(ticket, range(2))
        prefill.connector.commit(ticket.lease_token, commit_for(ticket))
        assert isinstance(decode.wait_event(), Landed)
        assert isinstance(prefill.wait_event(), TransferEnded)
    finally:
        proxy.close()
    is_readable = keys is None
    assert (prefill.pool[0, 0, 0].tobytes() in seen) == is_readable
    assert (b"lease_token" in seen) == is_readable
    assert len(seen) > 2 * LAYOUT.block_bytes
