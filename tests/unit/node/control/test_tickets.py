"""Tickets over the wire."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from common.errors import InvalidRequest
from common.ids import AttemptId, Incarnation
from kv_transfer.contract import Ticket
from node.control.tickets import MAX_ENDPOINT_LENGTH, ticket_from_proto, ticket_to_proto
from protos import pdserve_node_pb2 as pb
from protos.codec import MAX_ID_LENGTH

TICKET = Ticket(
    attempt=AttemptId("a", 2),
    decode_node=Incarnation("decode-0", 7),
    kv_endpoint="tcp://127.0.0.1:5000",
    lease_token=2**64 - 1,
    generation=3,
    target_block_ids=(5, 0, 9),
    num_cached_tokens=128,
    fingerprint="ab" * 16,
    lease_s=29.5,
    kv_description="31 layers, with mtp",
    may_be_short=True,
)


def test_a_ticket_comes_back_as_it_left() -> None:
    message = pb.Ticket.FromString(ticket_to_proto(TICKET).SerializeToString())
    assert ticket_from_proto(message, TICKET.attempt) == TICKET


def no_node(message: pb.Ticket) -> None:
    message.decode_node_id = ""


def long_node(message: pb.Ticket) -> None:
    message.decode_node_id = "d" * (MAX_ID_LENGTH + 1)


def no_endpoint(message: pb.Ticket) -> None:
    message.kv_endpoint = ""


def long_endpoint(message: pb.Ticket) -> None:
    message.kv_endpoint = "t" * (MAX_ENDPOINT_LENGTH + 1)


def no_lease(message: pb.Ticket) -> None:
    message.lease_token = 0


def no_blocks(message: pb.Ticket) -> None:
    del message.target_block_ids[:]


@pytest.mark.covers("V03")
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (no_node, "names no decode node"),
        (long_node, "names no decode node"),
        (no_endpoint, "kv_endpoint is ''"),
        (long_endpoint, "kv_endpoint is 'ttt"),
        (no_lease, "no lease or no blocks"),
        (no_blocks, "no lease or no blocks"),
    ],
)
def test_a_ticket_that_no_decode_node_wrote_is_refused(
    spoil: Callable[[pb.Ticket], None], words: str
) -> None:
    message = ticket_to_proto(TICKET)
    spoil(message)
    with pytest.raises(InvalidRequest, match=words) as caught:
        ticket_from_proto(message, TICKET.attempt)
    assert len(str(caught.value)) < 200


@pytest.mark.covers("V03")
@pytest.mark.parametrize("name", [field.name for field in pb.Ticket.DESCRIPTOR.fields])
def test_any_part_of_a_ticket_may_be_missing(name: str) -> None:
    """It is refused, or the ticket is one that fits no reservation; nothing else is raised."""
    message = ticket_to_proto(TICKET)
    message.ClearField(name)
    with suppress(InvalidRequest):
        ticket = ticket_from_proto(message, TICKET.attempt)
        assert ticket != TICKET
        assert ticket.lease_token
        assert ticket.target_block_ids
