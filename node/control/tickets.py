"""Tickets between protobuf messages and the values that KV connectors take."""

from __future__ import annotations

from common.errors import InvalidRequest
from common.ids import AttemptId, Incarnation
from kv_transfer.contract import Ticket
from protos import pdserve_node_pb2 as pb
from protos.codec import MAX_ID_LENGTH, to_ms

MAX_ENDPOINT_LENGTH = 256
MAX_DESCRIPTION_LENGTH = 256


def ticket_to_proto(ticket: Ticket) -> pb.Ticket:
    """Return the message. It has no attempt id: a ticket travels with its request."""
    return pb.Ticket(
        decode_node_id=ticket.decode_node.node_id,
        decode_epoch=ticket.decode_node.epoch,
        kv_endpoint=ticket.kv_endpoint,
        lease_token=ticket.lease_token,
        generation=ticket.generation,
        target_block_ids=ticket.target_block_ids,
        num_cached_tokens=ticket.num_cached_tokens,
        fingerprint=ticket.fingerprint,
        lease_ms=to_ms(ticket.lease_s),
        kv_description=ticket.kv_description[:MAX_DESCRIPTION_LENGTH],
        may_be_short=ticket.may_be_short,
    )


def ticket_from_proto(message: pb.Ticket, attempt: AttemptId) -> Ticket:
    """Return the ticket of `attempt`. Raises `InvalidRequest` for one that no decode node wrote."""
    if not 0 < len(message.decode_node_id) <= MAX_ID_LENGTH:
        raise InvalidRequest("the ticket names no decode node")
    if not 0 < len(message.kv_endpoint) <= MAX_ENDPOINT_LENGTH:
        raise InvalidRequest(f"the ticket's kv_endpoint is {message.kv_endpoint[:80]!r}")
    if not message.lease_token or not message.target_block_ids:
        raise InvalidRequest("the ticket holds no lease or no blocks")
    return Ticket(
        attempt=attempt,
        decode_node=Incarnation(message.decode_node_id, message.decode_epoch),
        kv_endpoint=message.kv_endpoint,
        lease_token=message.lease_token,
        generation=message.generation,
        target_block_ids=tuple(message.target_block_ids),
        num_cached_tokens=message.num_cached_tokens,
        fingerprint=message.fingerprint,
        lease_s=message.lease_ms / 1000,
        kv_description=message.kv_description[:MAX_DESCRIPTION_LENGTH],
        may_be_short=message.may_be_short,
    )
