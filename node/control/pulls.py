"""Pulls of cached blocks between protobuf messages and the values that the step thread takes."""

from __future__ import annotations

from common.errors import InvalidRequest
from common.ids import Incarnation
from common.kv.blocks import HASH_BYTES, BlockHash
from node.control.tickets import ticket_from_proto, ticket_to_proto
from node.flow.messages import AskBlocks, FetchBlocks, OfferBlocks, RefusePull, SendBlocks, WarmNode
from node.flow.pulls.hand_over import MOST_BLOCKS
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


def refused_to_proto(refused: RefusePull) -> pb.RefusedPull:
    """Return the message that a router passes on to the node that asked."""
    node = refused.node
    return pb.RefusedPull(node_id=node.node_id, epoch=node.epoch, lease_token=refused.lease_token)


def send_blocks_from_proto(pull: pb.Pull, router: Incarnation) -> SendBlocks:
    """Return what is asked of this node.

    Raises `InvalidRequest` unless each block has a hash of its own.
    """
    ticket = ticket_from_proto(pull.ticket, attempt_from_proto(pull.request_id, pull.attempt))
    packed, num_blocks = pull.block_hashes, len(ticket.target_block_ids)
    if len(packed) != HASH_BYTES * num_blocks:
        raise InvalidRequest(
            f"a pull of {num_blocks} blocks has {len(packed)} bytes of hashes: "
            f"wanted {HASH_BYTES} for each"
        )
    return SendBlocks(router, ticket, _hashes(packed))


def add_offer(message: pb.NodeMessage, offered: OfferBlocks) -> None:
    """Add an offer of blocks to a message."""
    message.offered_hashes = b"".join(offered.block_hashes)
    if offered.new_node is not None:
        new = offered.new_node.node
        message.offered_to.CopyFrom(pb.NewNode(node_id=new.node_id, epoch=new.epoch))


def warm_node_from_proto(new: pb.NewNode, router: Incarnation) -> WarmNode:
    """Return which node wants blocks. Raises `InvalidRequest` for one without a name."""
    if not 0 < len(new.node_id) <= MAX_ID_LENGTH:
        raise InvalidRequest(f"the new node's node_id has {len(new.node_id)} characters")
    return WarmNode(router, Incarnation(new.node_id, new.epoch))


def fetch_from_proto(fetch: pb.Fetch, router: Incarnation) -> FetchBlocks:
    """Return what another node has.

    Raises `InvalidRequest` for too much, no name, or a block that comes twice.
    """
    packed = fetch.block_hashes
    if len(packed) % HASH_BYTES or len(packed) > HASH_BYTES * MOST_BLOCKS:
        raise InvalidRequest(
            f"{len(packed)} bytes of hashes: wanted {HASH_BYTES} for each of at most {MOST_BLOCKS}"
        )
    if not 0 < len(fetch.source_id) <= MAX_ID_LENGTH:
        raise InvalidRequest(f"the source's node_id has {len(fetch.source_id)} characters")
    return FetchBlocks(router, Incarnation(fetch.source_id, fetch.source_epoch), _hashes(packed))


def _hashes(packed: bytes) -> tuple[BlockHash, ...]:
    """Return the hashes of blocks. Raises `InvalidRequest` if one of them comes twice."""
    starts = range(0, len(packed), HASH_BYTES)
    hashes = tuple(packed[start : start + HASH_BYTES] for start in starts)
    num_blocks = len(set(hashes))
    if num_blocks < len(hashes):
        raise InvalidRequest(f"{len(hashes)} hashes name {num_blocks} blocks: wanted each once")
    return hashes
