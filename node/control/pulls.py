"""Pulls of cached blocks between protobuf messages and the values that the step thread takes."""

from __future__ import annotations

from common.errors import InvalidRequest
from common.ids import Incarnation
from common.kv.blocks import HASH_BYTES
from common.kv.prefix_source import PrefixSource
from node.control.tickets import ticket_from_proto, ticket_to_proto
from node.flow.messages import AskBlocks, SendBlocks
from protos import pdserve_node_pb2 as pb
from protos.codec import MAX_ID_LENGTH, attempt_from_proto


def pull_to_proto(wanted: AskBlocks) -> pb.Pull:
    """Return the message that a router passes on."""
    ticket = wanted.ticket
    return pb.Pull(
        request_id=ticket.attempt.choice_id,
        attempt=ticket.attempt.attempt,
        ticket=ticket_to_proto(ticket),
        source_id=wanted.source.node_id,
        source_epoch=wanted.source.epoch,
        block_hashes=b"".join(wanted.block_hashes),
    )


def send_blocks_from_proto(pull: pb.Pull) -> SendBlocks:
    """Return what is asked of this node. Raises `InvalidRequest` unless each block has a hash."""
    ticket = ticket_from_proto(pull.ticket, attempt_from_proto(pull.request_id, pull.attempt))
    packed, num_blocks = pull.block_hashes, len(ticket.target_block_ids)
    if len(packed) != HASH_BYTES * num_blocks:
        raise InvalidRequest(
            f"a pull of {num_blocks} blocks has {len(packed)} bytes of hashes: "
            f"wanted {HASH_BYTES} for each"
        )
    starts = range(0, len(packed), HASH_BYTES)
    return SendBlocks(ticket, tuple(packed[start : start + HASH_BYTES] for start in starts))


def source_from_proto(source: pb.PrefixSource) -> PrefixSource:
    """Return who has the start of a prompt. Raises `InvalidRequest` for one without a name."""
    if not 0 < len(source.node_id) <= MAX_ID_LENGTH:
        raise InvalidRequest(f"the source's node_id has {len(source.node_id)} characters")
    return PrefixSource(Incarnation(source.node_id, source.epoch), source.num_tokens)
