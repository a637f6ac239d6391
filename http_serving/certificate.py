"""The certificate of an HTTPS port: read from two files, and read again when they change."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge

from common.errors import ConfigError
from common.files.certificate_dates import CertificateDates
from common.files.followed_files import FollowedFiles
from common.files.secret_files import secret_file_problem
from common.files.tls_handshake import handshake_in_memory, no_password, why_refused

log = logging.getLogger("pdserve")

CHECK_EVERY_S = 10.0


class Certificate:
    """A certificate with its chain, and its key, both PEM. `context` serves the latest valid ones.

    Connections that are open keep the certificate with which they began. Each new one is passed to
    the context of the latest pair that was checked: a context into which two files are loaded again
    may have the new certificate and the old key meanwhile.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        """Read both files. Raises `ConfigError`, which names what is wrong with them."""
        self._certificate, self._key = certificate, key
        self._files = FollowedFiles((certificate, key), log, stays="the earlier certificate stays")
        self._latest, self.expires_at_s = checked_certificate(certificate, key)
        self._dates = CertificateDates()
        self.context = self._latest
        self.context.sni_callback = self._take_latest

    def _take_latest(self, connection: ssl.SSLObject, _name: str, _at: ssl.SSLContext) -> None:
        """Pass a new connection on; TLS calls this whether the client names a host or not."""
        connection.context = self._latest

    def reload_if_changed(self) -> bool:
        """Take over changed files; return whether there were any.

        If they are broken, the earlier certificate stays; see `FollowedFiles`.
        """
        latest = self._files.read_if_changed(
            lambda: checked_certificate(self._certificate, self._key)
        )
        if latest is None:
            return False
        self._latest, self.expires_at_s = latest
        log.info("%s was read again; it ends in %.1f days", self._certificate, self._days_left())
        return True

    def check(self, now_s: float) -> None:
        """Read changed files again, then warn of the end; `now_s` counts from 1970."""
        if self.reload_if_changed():
            self._dates.forget()
        self._dates.judge(
            now_s,
            f"the certificate in {self._certificate}",
            self.expires_at_s,
            "replace it and its key; they are read again without a restart",
        )

    async def keep_current(self) -> None:
        """Check now and every `CHECK_EVERY_S`, until cancelled."""
        while True:
            self.check(time.time())
            await asyncio.sleep(CHECK_EVERY_S)

    def _days_left(self) -> float:
        return (self.expires_at_s - time.time()) / 86400


def show_end(registry: CollectorRegistry, certificate: Certificate | None) -> None:
    """Show in `registry` when the certificate of the HTTP port ends; 0 without one."""
    gauge = Gauge(
        "pdserve_http_certificate_end_timestamp_seconds",
        "End of the HTTP port's certificate, in seconds since 1970; 0 without HTTPS",
        registry=registry,
    )
    gauge.set_function(lambda: certificate.expires_at_s if certificate else 0.0)


def checked_certificate(certificate: Path, key: Path) -> tuple[ssl.SSLContext, float]:
    """Return a context with a certificate, after a handshake in memory, and its end, in seconds
    since 1970.

    Raises `ConfigError` when a file cannot be read, others may use the key's, the key is another
    one's, the certificate is not valid now, or TLS does not accept its kind of key.
    """
    server = _server_context()
    try:
        if problem := secret_file_problem(key, key.stat()):
            raise ConfigError(problem)
        server.load_cert_chain(certificate, key, password=no_password)
    except OSError as error:
        if not isinstance(error, ssl.SSLError):
            raise ConfigError(f"{certificate} or {key} cannot be read: {error.strerror}") from None
        raise ConfigError(
            f"{certificate} and {key} are not a certificate and its key in PEM ({error.reason})"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    # The first certificate of the file is trusted as it is: only its dates are checked.
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        client.load_verify_locations(certificate)
        shown = handshake_in_memory(client, server)[0].getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"{certificate} is not valid: {why_refused(error)}") from None
    except OSError as error:
        raise ConfigError(f"{certificate} cannot be used for TLS: {error}") from None
    return server, float(ssl.cert_time_to_seconds(str(shown["notAfter"])))


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context
