"""TLS to Redis with the keys of the cluster: its CA alone, and certificates on both sides."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from redis.asyncio.connection import Connection

from common.files.keys_folder import REDIS_NAME, Keys, TlsFiles


class RedisTls:
    """Contexts that trust only the cluster's CA, not those of the system."""

    def __init__(self, keys: Keys) -> None:
        """Read the folder; `OSError` when its files have changed into invalid ones."""
        self._keys = keys
        self._tls = keys.tls
        self._context = _context(keys, self._tls)

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection: with the latest certificate."""
        latest = self._keys.tls
        if latest is not self._tls:
            # Where the files are just changing once more, the earlier certificate serves.
            with suppress(OSError):
                self._context, self._tls = _context(self._keys, latest), latest
        return self._context

    def on_shown(self, certificate: Mapping[str, Any]) -> None:
        """Note the end of the certificate that Redis has shown: nothing else reads its file."""
        self._keys.redis_expires_at_s = float(ssl.cert_time_to_seconds(certificate["notAfter"]))


def _context(keys: Keys, tls: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # `ssl` takes ASCII alone; other characters are possible in comments, which it skips.
    context.load_verify_locations(cadata=tls.ca.decode("ascii", "ignore"))
    context.load_cert_chain(keys.folder / "cert.pem", keys.folder / "key.pem")
    return context


class RedisTlsConnection(Connection):
    """Requires the certificate of this cluster's Redis, at any address.

    redis-py's own TLS connection also trusts the system's authorities, and requires the address in
    the certificate.
    """

    def __init__(self, *, tls: RedisTls, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._tls = tls

    def _connection_arguments(self) -> Mapping[str, Any]:
        arguments = super()._connection_arguments()
        return {**arguments, "ssl": self._tls.context(), "server_hostname": REDIS_NAME}

    async def _connect(self) -> None:
        await super()._connect()  # type: ignore[no-untyped-call]
        if self._writer is not None:
            self._tls.on_shown(self._writer.get_extra_info("peercert"))

    async def disconnect(self, *args: Any, **kwargs: Any) -> None:
        """Close the connection as redis-py does, and leave nothing of it.

        Where it does not wait, TLS would wait up to 30 s for the other end's last word.
        """
        writer = self._writer
        try:
            await super().disconnect(*args, **kwargs)
        finally:
            if writer is not None:
                writer.transport.abort()


def is_untrusted(error: BaseException) -> bool:
    """Return whether `error` comes from a failure of TLS other than a connection that ended."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, ssl.SSLError):
            return not isinstance(behind, (ssl.SSLEOFError, ssl.SSLZeroReturnError))
        behind = behind.__cause__ or behind.__context__
    return False
