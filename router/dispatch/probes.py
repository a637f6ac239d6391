"""Whether the process of a silent node still runs: it accepts a new connection.

gRPC accepts connections on threads of its own, also while a long call holds the interpreter lock or
a callback blocks the event loop of the node. A process that is stopped, or whose machine is gone,
accepts none: its kernel may, but the handshake of HTTP/2 (and of TLS) needs the process.
"""

from __future__ import annotations

import asyncio

from common.keys_folder import Keys
from protos.transport_security import Options, open_channel

PROBE_TIMEOUT_S = 1.0
MAX_PROBES = 32
"""At once. If more nodes are silent, the network is at fault, and no node is busy."""


class Probes:
    """Connections that are opened to be closed again."""

    def __init__(self, options: Options, keys: Keys | None) -> None:
        """Connect with these options, which must let no two channels share a connection."""
        self._options = options
        self._keys = keys
        self._num_probes = 0

    async def is_accepted(self, address: str) -> bool:
        """Return whether `address` completes a handshake within `PROBE_TIMEOUT_S`."""
        if self._num_probes >= MAX_PROBES:
            return False
        self._num_probes += 1
        channel = open_channel(address, self._options, self._keys)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await channel.channel_ready()
        except TimeoutError:
            return False
        else:
            return True
        finally:
            self._num_probes -= 1
            await channel.close(None)
