"""TLS to Redis with the keys of the cluster: its CA alone, and certificates on both sides."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

from redis.asyncio.connection import Connection

from common.keys_folder import REDIS_NAME, Keys


def redis_tls(keys: Keys) -> ssl.SSLContext:
    """Return a context that trusts only the cluster's CA, not those of the system."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=keys.ca.decode("ascii"))
    context.load_cert_chain(keys.folder / "cert.pem", keys.folder / "key.pem")
    return context


class RedisTlsConnection(Connection):
    """Requires the certificate of this cluster's Redis, at any address.

    redis-py's own TLS connection also trusts the system's authorities, and requires the address in
    the certificate.
    """

    def __init__(self, *, tls: ssl.SSLContext, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._tls = tls

    def _connection_arguments(self) -> Mapping[str, Any]:
        arguments = super()._connection_arguments()
        return {**arguments, "ssl": self._tls, "server_hostname": REDIS_NAME}


def is_untrusted(error: BaseException) -> bool:
    """Return whether TLS failed behind `error`, other than by a connection that ended."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, ssl.SSLError):
            return not isinstance(behind, (ssl.SSLEOFError, ssl.SSLZeroReturnError))
        behind = behind.__cause__ or behind.__context__
    return False
