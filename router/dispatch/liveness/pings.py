"""Whether the process of a node runs: it answers the pings of a connection kept for them.

gRPC's own threads answer pings of HTTP/2, also while a long call holds the interpreter lock or a
callback blocks the event loop of the node. A process that is stopped, or whose machine is gone,
answers none, and gRPC closes the connection. A new connection would tell less: its TLS handshake
calls the node's Python code for the present certificate. The connection of the node's stream is not
pinged, because the first ping without an answer would end the stream.
"""

from __future__ import annotations

import grpc

from common.files.keys_folder import Keys
from protos.transport_security import Options, open_channel

PING_INTERVAL_MS = 500
PING_TIMEOUT_MS = 500
_NEVER_MS = 2**31 - 1
PINGED_SINCE_PROTOCOL = 3
"""Nodes of an earlier protocol version close a connection with a ping twice a second."""

PING_OPTIONS = (
    ("grpc.keepalive_time_ms", PING_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    # The time-out of a ping has an option of its own, one minute unless set.
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A channel without calls is idle, and gRPC closes idle ones.
    ("grpc.client_idle_timeout_ms", _NEVER_MS),
)


class Pings:
    """A connection to one node that carries pings and no calls, from the first question on."""

    def __init__(self, address: str, options: Options, keys: Keys | None) -> None:
        """Connect with these options, which must let no two channels share a connection."""
        self._address = address
        self._options = (*options, *PING_OPTIONS)
        self._keys = keys
        self._channel: grpc.aio.Channel | None = None

    def _open_channel(self) -> grpc.aio.Channel:
        self._tls = self._keys.tls if self._keys else None
        self._channel = open_channel(self._address, self._options, self._keys)
        return self._channel

    def are_answered(self) -> bool:
        """Return whether the process answered a ping in the last second; connect if need be."""
        channel = self._channel or self._open_channel()
        state = channel.get_state(try_to_connect=True)
        if state is grpc.ChannelConnectivity.READY:
            return True
        if self._keys is not None and self._keys.tls is not self._tls:
            # The certificate was renewed. The earlier channel is closed as it is collected.
            self._open_channel()
        return False

    def rest(self) -> None:
        """Send no pings until the next question: the channel is closed as it is collected."""
        self._channel = None

    async def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            await self._channel.close(None)
