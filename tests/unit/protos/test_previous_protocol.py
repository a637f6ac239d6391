"""This release beside the previous one: what version 2 of the protocol wrote, word for word.

The data was written by the code of that release: its messages with every field set, its entries in
the placement store, and the number, type and label of every field of its messages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from common.ids import AttemptId, Incarnation
from common.nodes import Role
from common.version import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION, can_speak
from placement.records import decode_node, decode_placement
from protos import pdserve_node_pb2 as pb
from protos.codec import check_envelope, make_envelope, request_from_proto, request_to_proto
from protos.output_batches import outputs_from_proto

ROUTER, NODE = Incarnation("router-0", 5), Incarnation("decode-0", 9)
OLD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "data" / "protocol_2.json").read_text()
)


def router_message() -> pb.RouterMessage:
    return pb.RouterMessage.FromString(bytes.fromhex(OLD["messages"]["router_message"]))


def test_the_previous_version_is_the_oldest_that_is_understood() -> None:
    assert OLDEST_PROTOCOL_VERSION == 2
    assert [can_speak(version) for version in (1, 2, 3, 4, 5)] == [False, True, True, True, False]


@pytest.mark.covers("F118")
def test_a_router_of_the_previous_version_is_understood_by_a_node() -> None:
    message = router_message()
    assert message.envelope.protocol_version == 2
    assert check_envelope(message.envelope, NODE) == ROUTER
    request = request_from_proto(message.calls[0].reserve.request)
    assert request.id == AttemptId("req-1", 2)
    assert (request.sampling.min_tokens, request.output_token_ids) == (4, (9, 8))


def test_a_node_of_the_previous_version_gets_what_its_own_router_would_have_sent() -> None:
    """Byte for byte, the version included: it refuses every other."""
    old = router_message()
    reserve = old.calls[0].reserve
    message = pb.RouterMessage(
        envelope=make_envelope(ROUTER, NODE, 2),
        calls=[
            pb.Call(
                id=3,
                reserve=pb.ReserveRequest(
                    request=request_to_proto(request_from_proto(reserve.request)),
                    must_prefill_locally=True,
                    may_wait=True,
                ),
            )
        ],
        aborts=old.aborts,
    )
    written = message.SerializeToString(deterministic=True)
    assert written.hex() == OLD["messages"]["router_message"]


def test_a_newer_node_gets_this_version() -> None:
    assert make_envelope(ROUTER, NODE, PROTOCOL_VERSION + 1).protocol_version == PROTOCOL_VERSION


@pytest.mark.covers("F118")
def test_a_node_of_the_previous_version_is_understood_by_a_router() -> None:
    message = pb.NodeMessage.FromString(bytes.fromhex(OLD["messages"]["node_message"]))
    assert message.replies[0].ticket.kv_description == "31 layers"
    (output,) = outputs_from_proto(message.outputs)
    assert (output.id, output.token_ids) == (AttemptId("req-1", 2), (5, 6))


def test_its_entries_in_the_store_are_read() -> None:
    node = decode_node(json.dumps(OLD["lease"]).encode())
    assert (node.record.incarnation, node.record.role) == (NODE, Role.DECODE)
    assert (node.record.version, node.record.protocol, node.record.kv_protocol) == ("", 2, 4)
    assert decode_placement(json.dumps(OLD["placement"]).encode()).decode == NODE


@pytest.mark.covers("F118")
@pytest.mark.parametrize("name", sorted(OLD["fields"]))
def test_no_field_of_a_message_was_given_another_meaning(name: str) -> None:
    described = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(described)
    (message,) = [message for message in described.message_type if message.name == name]
    now = {field.number: [field.name, field.type, field.label] for field in message.field}
    reserved = {number for r in message.reserved_range for number in range(r.start, r.end)}
    for field, (number, kind, label) in OLD["fields"][name].items():
        assert number in reserved or now[number] == [field, kind, label]
