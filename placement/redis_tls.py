"""TLS to Redis with the keys of the cluster: its CA alone, and certificates on both sides."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

from redis.asyncio.connection import Connection

from common.keys_folder import REDIS_NAME, Keys


def redis_tls(keys: Keys) -> ssl.SSLContext:
    """Trusts no other authority, such as those that the system knows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=keys.ca.decode("ascii"))
    context.load_cert_chain(keys.folder / "cert.pem", keys.folder / "key.pem")
    return context


class RedisTlsConnection(Connection):
    """Expects the certificate of this cluster's Redis, under whatever address it is reached.

    redis-py's own TLS connection trusts the system's authorities too, and wants the address in the
    certificate.
    """

    def __init__(self, *, tls: ssl.SSLContext, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._tls = tls

    def _connection_arguments(self) -> Mapping[str, Any]:
        arguments = super()._connection_arguments()
        return {**arguments, "ssl": self._tls, "server_hostname": REDIS_NAME}
