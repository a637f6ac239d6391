"""A node's gRPC port: where the control service listens, and the bounds of its connections."""

from __future__ import annotations

from typing import Any

from common.addresses import host_port
from common.errors import ConfigError
from common.files.keys_folder import Keys
from node.control.control_service import MAX_MESSAGE_BYTES, ControlService
from protos import pdserve_node_pb2_grpc as pb_grpc
from protos.transport_security import add_port, make_server

KEEPALIVE_MS = 5000
MAX_CONNECTIONS = 512
"""A router needs two: one for its calls, and one for its pings."""
MAX_CALLS_PER_CONNECTION = 64
"""A router's stream and its calls to drain."""
MAX_METADATA_BYTES = 16 << 10
HANDSHAKE_TIMEOUT_MS = 10_000
MIN_PING_INTERVAL_MS = 250
"""Half of what routers keep to (`router/dispatch/liveness/pings.py`)."""
IDLE_MS = 3_600_000
"""A router's pings are no calls. While this node's Python is busy, a router whose connection for
pings is closed cannot open another, and suspects the node."""

SERVER_OPTIONS: list[tuple[str, Any]] = [
    # Without this two processes could listen on one port and share its calls.
    ("grpc.so_reuseport", 0),
    # A router whose machine vanished closes nothing; without pings its requests would go on.
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    # The time-out of a ping has an option of its own, one minute unless set.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
    # Connections that never complete the handshake, or carry no call, are closed.
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
    ("grpc.max_connection_idle_ms", IDLE_MS),
]


class ControlPort:
    """Binds the port when it is made, so that a port in use is reported before a model is loaded.

    `port` is the port's number, also where 0 was asked for.
    """

    def __init__(self, host: str, port: int, keys: Keys | None) -> None:
        """Bind `host` and `port`. Raises `ConfigError` when that is not possible."""
        self._server = make_server(SERVER_OPTIONS, keys)
        address = host_port(host, port)
        try:
            self.port = add_port(self._server, address, keys)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {address}: the port is in use or the address is not this "
                "machine's"
            ) from error

    async def serve(self, service: ControlService) -> None:
        """Begin to take calls."""
        pb_grpc.add_NodeServicer_to_server(service, self._server)  # type: ignore[no-untyped-call]
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, and cancel those that still run after `grace_s`."""
        await self._server.stop(grace_s)
