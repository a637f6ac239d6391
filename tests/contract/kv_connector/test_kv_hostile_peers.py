"""Raw sockets against the receiving side: no crash, no growth, and others are not disturbed."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
import zmq

from common.errors import PeerProtocolError
from kv_transfer.contract import Landed, LandingFailed, Ticket, TransferEnded
from kv_transfer.lanes.pieces import packed_sums, piece_sum
from kv_transfer.receiving.effects import DropReason
from kv_transfer.shared.limits import (
    MAX_HEADER_BYTES,
    PROTOCOL_VERSION,
    Limits,
)
from kv_transfer.wire import frames
from kv_transfer.wire.header_seal import SEAL_BYTES, seal
from tests.contract.kv_connector.raw_peer import (
    ROGUE,
    WELCOME,
    Raw,
    assert_others_are_served,
    dropped,
    hello_to,
)
from tests.contract.kv_connector.raw_peer import decode as decode
from tests.contract.kv_connector.raw_peer import raw as raw
from tests.support.kv.kv_cluster import (
    LAYOUT,
    Cluster,
    Node,
)

P = LAYOUT.piece_bytes


def sealed(value: object) -> bytes:
    """Return a header with these fields and its checksum."""
    return seal(msgpack.packb(value))


def data_frame(ticket: Ticket, **changes: Any) -> frames.Data:
    fields: dict[str, Any] = {
        "seq": 0,
        "lease_token": ticket.lease_token,
        "generation": ticket.generation,
        "layer": 0,
        "ordinals": (0,),
        "runs": (1,),
        "source_blocks": (),
        "sums": packed_sums([0, 0]),
    }
    return frames.Data(**{**fields, **changes})


def sums_of(keys: bytes, values: bytes, layer: int = 0) -> bytes:
    """Return the sums of block 0 of the ticket."""
    return packed_sums(piece_sum(kind, layer, 0) for kind in (keys, values))


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"", b"", b""],
        [b"\xff\x00garbage"],
        [b"\xc1" * 100],
        [b"\x91" * 5000],
        [sealed({"v": 2})],
        [sealed({"v": 2, "k": 99})],
        [sealed({"v": 2, "k": 5})],
        [sealed([1, 2, 3])],
        [msgpack.packb({"v": 2, "k": 13})],
        # Too deep to be printed: the answer must not be printed from it either.
        [seal(b"\x83\xa1v\x02\xa1k\x04\xablease_token" + b"\x91" * 1020 + b"\x00")],
        [b"x" * (MAX_HEADER_BYTES + 1)],
    ],
)
def test_garbage_without_a_session(
    zmq_cluster: Cluster, decode: Node, raw: Raw, parts: list[bytes]
) -> None:
    raw.socket.send_multipart(parts)
    raw.settle()
    assert dropped(decode, DropReason.MALFORMED) == 1
    assert_others_are_served(zmq_cluster, decode)


def test_garbage_on_a_session_fails_its_landings_only(
    zmq_cluster: Cluster, decode: Node, raw: Raw
) -> None:
    ticket = zmq_cluster.ticket(decode, [1])
    decode.connector.expect(ticket, sender_deadline_s=30)
    raw.hello()
    raw.send(frames.Begin(ticket.lease_token, ticket.generation))
    raw.send(b"garbage")
    event = decode.wait_event()
    assert isinstance(event, LandingFailed)
    assert event.error.code == "peer_protocol_error"
    assert decode.connector.statistics().sessions_open == 0
    assert_others_are_served(zmq_cluster, decode)


@pytest.mark.covers("F118")
def test_another_protocol_version_is_told_so(decode: Node, raw: Raw) -> None:
    raw.send(sealed({"v": PROTOCOL_VERSION + 1, "k": 1, "news": True}))
    answer = raw.answer()
    assert isinstance(answer, frames.Rejected)
    assert f"version is {PROTOCOL_VERSION + 1}: wanted {PROTOCOL_VERSION}" in answer.message


@pytest.mark.covers("F118")
def test_unknown_fields_are_ignored(decode: Node, raw: Raw) -> None:
    header = msgpack.unpackb(frames.encode(hello_to(decode))[:-SEAL_BYTES])
    raw.send(sealed({**header, "from_the_future": [1, {"a": b"c"}]}))
    assert raw.answer() == WELCOME


def test_frames_before_hello(decode: Node, raw: Raw) -> None:
    raw.send(frames.Ping((1, 2)))
    answer = raw.answer()
    assert isinstance(answer, frames.Rejected)
    assert answer.code == frames.NO_SESSION
    assert dropped(decode, DropReason.NO_SESSION) == 1


@pytest.mark.covers("F24")
@pytest.mark.parametrize(
    ("changes", "payload"),
    [
        ({}, []),
        ({}, [b"k" * P]),
        ({}, [b"k" * P, b"v" * (P - 1)]),
        ({}, [b"k" * (P + 1), b"v" * (P - 1)]),
        ({}, [b"k" * P, b"v" * P, b"more"]),
        ({"layer": 3}, [b"k" * P, b"v" * P]),
        ({"ordinals": (2,)}, [b"k" * P, b"v" * P]),
    ],
)
def test_data_that_does_not_fit_its_ticket(
    zmq_cluster: Cluster, decode: Node, raw: Raw, changes: dict[str, Any], payload: list[bytes]
) -> None:
    """Truncated, oversized, out of bounds: the landing fails, memory is intact."""
    ticket = zmq_cluster.ticket(decode, [1, 2])
    decode.connector.expect(ticket, sender_deadline_s=30)
    untouched = decode.pool.copy()
    raw.hello()
    raw.send(frames.Begin(ticket.lease_token, ticket.generation))
    raw.send(data_frame(ticket, **changes), *payload)
    assert isinstance(decode.wait_event(), LandingFailed)
    assert isinstance(raw.answer(), frames.Failed)
    assert np.array_equal(decode.pool, untouched)
    assert_others_are_served(zmq_cluster, decode)


@pytest.mark.covers("F24")
@pytest.mark.parametrize("which", [0, 1])
def test_data_that_is_not_what_its_sums_say(
    zmq_cluster: Cluster, decode: Node, raw: Raw, which: int
) -> None:
    """The landing fails, and no block but the one of this frame was touched."""
    ticket = zmq_cluster.ticket(decode, [1, 2])
    decode.connector.expect(ticket, sender_deadline_s=30)
    others = [block for block in range(decode.pool.shape[2]) if block != 1]
    untouched = decode.pool[:, :, others]
    raw.hello()
    raw.send(frames.Begin(ticket.lease_token, ticket.generation))
    keys, values = b"k" * P, b"v" * P
    sums = bytearray(sums_of(keys, values))
    sums[8 * which] ^= 1
    raw.send(data_frame(ticket, sums=bytes(sums)), keys, values)
    assert isinstance(decode.wait_event(), LandingFailed)
    assert isinstance(raw.answer(), frames.Failed)
    assert np.array_equal(decode.pool[:, :, others], untouched)
    assert decode.connector.statistics().checksum_failures["zmq"] == 1
    assert_others_are_served(zmq_cluster, decode)


@pytest.mark.covers("F24")
@pytest.mark.parametrize(("more_keys", "more_values"), [(1, 0), (0, 1), (P, P), (1, -1)])
def test_sizes_are_checked_before_sums(
    zmq_cluster: Cluster, decode: Node, raw: Raw, more_keys: int, more_values: int
) -> None:
    """Every checksum is right for what it covers, and the parts are too long or too short."""
    ticket = zmq_cluster.ticket(decode, [1, 2])
    decode.connector.expect(ticket, sender_deadline_s=30)
    raw.hello()
    raw.send(frames.Begin(ticket.lease_token, ticket.generation))
    keys, values = b"k" * (P + more_keys), b"v" * (P + more_values)
    raw.send(data_frame(ticket, sums=sums_of(keys[:P], values[:P])), keys, values)
    event = decode.wait_event()
    assert isinstance(event, LandingFailed)
    assert "payload of" in str(event.error)
    assert_others_are_served(zmq_cluster, decode)


@pytest.mark.covers("F69")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lease_token": 5}, DropReason.UNKNOWN_LEASE),
        ({"generation": 6}, DropReason.STALE_GENERATION),
        ({}, DropReason.WRONG_SENDER),
    ],
)
def test_data_that_nobody_asked_for_is_dropped(
    zmq_cluster: Cluster,
    decode: Node,
    raw: Raw,
    changes: dict[str, Any],
    reason: DropReason,
) -> None:
    """DATA alone, without the BEGIN that would have been refused, and with sums that fit."""
    ticket = zmq_cluster.ticket(decode, [1, 2])
    decode.connector.expect(ticket, sender_deadline_s=30)
    untouched = decode.pool.copy()
    if reason is DropReason.STALE_GENERATION:
        raw_begin = frames.Begin(ticket.lease_token, ticket.generation)
    else:
        raw_begin = frames.Begin(5, 5)
    raw.hello()
    raw.send(raw_begin)
    keys, values = b"k" * P, b"v" * P
    raw.send(data_frame(ticket, sums=sums_of(keys, values), **changes), keys, values)
    raw.settle()
    assert dropped(decode, reason) == 1
    assert np.array_equal(decode.pool, untouched)
    assert decode.events == []
    assert decode.connector.statistics().landings_open == 1


def test_data_out_of_sequence_ends_the_session(
    zmq_cluster: Cluster, decode: Node, raw: Raw
) -> None:
    raw.hello()
    raw.send(data_frame(zmq_cluster.ticket(decode, [1]), seq=1), b"k" * P, b"v" * P)
    answer = raw.answer()
    assert isinstance(answer, frames.Rejected)
    assert "DATA frame 1 arrived: wanted 0" in answer.message


@pytest.mark.parametrize("frame", [frames.Pong(), frames.Ack(3), WELCOME])
def test_frames_of_the_other_side(decode: Node, raw: Raw, frame: frames.Frame) -> None:
    raw.hello()
    raw.send(frame)
    answer = raw.answer()
    assert isinstance(answer, frames.Rejected)
    assert (answer.code, answer.message) == (
        PeerProtocolError.code,
        f"{type(frame).__name__} from a sender",
    )


def test_commit_before_begin(zmq_cluster: Cluster, decode: Node, raw: Raw) -> None:
    ticket = zmq_cluster.ticket(decode, [1])
    decode.connector.expect(ticket, sender_deadline_s=30)
    raw.hello()
    raw.send(frames.CommitFrame(ticket.lease_token, ticket.generation, 3, 0, 4, 0, ()))
    answer = raw.answer()
    assert isinstance(answer, frames.Rejected)
    assert (answer.code, answer.message) == (PeerProtocolError.code, "COMMIT before BEGIN")
    assert decode.connector.statistics().landings_open == 1


@pytest.mark.covers("F38")
def test_a_commit_ahead_of_its_data_waits_for_it(
    zmq_cluster: Cluster, decode: Node, raw: Raw
) -> None:
    ticket = zmq_cluster.ticket(decode, [1])
    decode.connector.expect(ticket, sender_deadline_s=30)
    raw.hello()
    raw.send(frames.Begin(ticket.lease_token, ticket.generation))
    raw.send(frames.CommitFrame(ticket.lease_token, ticket.generation, 3, 0, 4, 0, ()))
    keys, values = b"k" * P, b"v" * P
    for seq, layer in enumerate([2, 2, 0, 1]):
        frame = data_frame(ticket, seq=seq, layer=layer, sums=sums_of(keys, values, layer))
        raw.send(frame, keys, values)
    assert isinstance(decode.wait_event(), Landed)
    assert dropped(decode, DropReason.DUPLICATE) == 1


@pytest.mark.covers("F52", "F78", "V01")
def test_a_flood_of_unknown_tokens(zmq_cluster: Cluster, decode: Node, raw: Raw) -> None:
    """5000 leases that never were; nothing is kept of any."""
    raw.hello()
    untouched = decode.pool.copy()
    for seq in range(5000):
        token = 10_000 + seq
        ticket = zmq_cluster.ticket(decode, [1])
        raw.send(data_frame(ticket, seq=seq, lease_token=token), b"k" * P, b"v" * P)
    raw.settle()
    statistics = decode.connector.statistics()
    assert statistics.frames_dropped["unknown_lease"] == 5000
    assert (statistics.landings_open, statistics.sessions_open) == (0, 1)
    assert np.array_equal(decode.pool, untouched)
    assert_others_are_served(zmq_cluster, decode)


@pytest.mark.covers("F31")
def test_a_part_over_the_limit_costs_its_sender_the_connection(
    zmq_cluster: Cluster, decode: Node, raw: Raw
) -> None:
    raw.hello()
    most = Limits().max_part_bytes(LAYOUT)
    raw.send(data_frame(zmq_cluster.ticket(decode, [1])), b"k" * (most + 1), b"v")
    # The socket reconnects by itself, may lose some frames doing so, and is unknown then.
    for _ in range(100):
        raw.send(frames.Ping(()))
        if raw.socket.poll(200):
            break
    answer = raw.answer()
    assert isinstance(answer, frames.Rejected)
    assert answer.code == frames.NO_SESSION, answer
    assert decode.connector.statistics().bytes_received == 0
    assert_others_are_served(zmq_cluster, decode)


def test_bytes_that_are_not_zmq(zmq_cluster: Cluster, decode: Node) -> None:
    address = ("127.0.0.1", int(decode.connector.endpoint.rpartition(":")[2]))
    with socket.create_connection(address, timeout=20) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 20)
        assert_others_are_served(zmq_cluster, decode)
    assert_others_are_served(zmq_cluster, decode)


def test_a_receiver_that_lies_fails_the_transfer_typed(zmq_cluster: Cluster) -> None:
    """The sending side against a rogue decode node."""
    prefill, decode = zmq_cluster.node("p"), zmq_cluster.node("d")
    lies: list[frames.Frame | bytes] = [
        b"garbage",
        frames.Ack(7),
        frames.Ping(()),
    ]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as rogue:
        rogue.setsockopt(zmq.LINGER, 0)
        port = rogue.bind_to_random_port("tcp://127.0.0.1")
        for lie in [*lies, None]:
            ticket = zmq_cluster.ticket(decode, [1])
            changed = {"kv_endpoint": f"tcp://127.0.0.1:{port}"}
            prefill.connector.open(Ticket(**{**fields_of(ticket), **changed}), deadline_s=20)
            # What the connection before still said comes first.
            session, hello = rogue.recv_multipart()
            while not isinstance(frames.decode(hello), frames.Hello):
                session, hello = rogue.recv_multipart()
            receiver = decode.incarnation if lie is not None else ROGUE
            welcome = dataclasses.replace(WELCOME, receiver=receiver)
            rogue.send_multipart([session, frames.encode(welcome)])
            if lie is not None:
                body = lie if isinstance(lie, bytes) else frames.encode(lie)
                rogue.send_multipart([session, body])
            ended = prefill.wait_event()
            assert isinstance(ended, TransferEnded)
            assert ended.error is not None
            assert ended.error.code == "peer_protocol_error"


def fields_of(ticket: Ticket) -> dict[str, Any]:
    return {name: getattr(ticket, name) for name in Ticket.__dataclass_fields__}
