"""The bounds of a node's gRPC port, as options of the library's server."""

from __future__ import annotations

from typing import Any

from node.control_service import MAX_MESSAGE_BYTES

KEEPALIVE_MS = 5000
MAX_CONNECTIONS = 256
"""A router needs one."""
MAX_CALLS_PER_CONNECTION = 64
"""A router's stream, questions after the books, and a request to leave."""
MAX_METADATA_BYTES = 16 << 10
HANDSHAKE_TIMEOUT_MS = 10_000
IDLE_MS = 60_000
"""A router that is alive always has its token stream open."""

SERVER_OPTIONS: list[tuple[str, Any]] = [
    # Without this two processes could listen on one port and share its calls.
    ("grpc.so_reuseport", 0),
    # A router whose machine vanished closes nothing; without pings its requests would go on.
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),  # else a minute, whatever the line above says
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # And clients may ping as often.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
    # Who connects and says nothing is not kept, nor is who has nothing to say.
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
    ("grpc.max_connection_idle_ms", IDLE_MS),
]
