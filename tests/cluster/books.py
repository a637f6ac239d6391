"""What nodes and the store hold for requests: after every test, nothing.

The facts come from where they are kept: a node's own books over gRPC, the keys out of Redis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

from common.ids import Incarnation
from common.keys_folder import NODE_NAME, Keys
from placement.store import LiveNode
from protos import pdserve_node_pb2 as pb
from protos import pdserve_node_pb2_grpc as pb_grpc
from protos.codec import make_envelope

_CALL_TIMEOUT_S = 5.0
_READER = Incarnation("books", 1)


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where one life of a node is asked."""

    incarnation: Incarnation
    control_address: str


def address_of(node: LiveNode) -> NodeAddress:
    """Of a node in the placement store."""
    return NodeAddress(node.record.incarnation, node.record.control_address)


class NodeBooks:
    """Asks one node for its status; close it."""

    def __init__(self, address: NodeAddress, keys: Keys | None = None) -> None:
        """`keys` are a router's."""
        self.address = address
        options: list[tuple[str, Any]] = [("grpc.use_local_subchannel_pool", 1)]
        if keys is None:
            self._channel = grpc.insecure_channel(address.control_address, options=options)
        else:
            options.append(("grpc.ssl_target_name_override", NODE_NAME))
            credentials = grpc.ssl_channel_credentials(keys.ca, keys.private_key, keys.certificate)
            self._channel = grpc.secure_channel(
                address.control_address, credentials, options=options
            )
        self._stub = pb_grpc.NodeStub(self._channel)  # type: ignore[no-untyped-call]

    def read(self) -> pb.StatusReply:
        """Raises `grpc.RpcError` when the node does not answer."""
        envelope = make_envelope(_READER, self.address.incarnation)
        reply: pb.StatusReply = self._stub.Status(
            pb.StatusRequest(envelope=envelope), timeout=_CALL_TIMEOUT_S
        )
        return reply

    def close(self) -> None:
        self._channel.close()


def held_by(status: pb.StatusReply) -> list[str]:
    """What the node holds for requests, in words; empty when every block is free or cached."""
    blocks = status.blocks
    counts = {
        "running blocks": blocks.running,
        "reserved blocks": blocks.reserved,
        "receiving blocks": blocks.receiving,
        "quarantined blocks": blocks.quarantined,
        "running sequences": status.num_running,
        "waiting sequences": status.num_waiting,
        "transfers": status.num_transfers,
    }
    held = [f"{status.node_id} has {count} {what}" for what, count in counts.items() if count]
    total = sum(count for _, count in blocks.ListFields())
    if total != status.num_blocks:
        held.append(f"{status.node_id} counts {total} blocks of {status.num_blocks}")
    return held
