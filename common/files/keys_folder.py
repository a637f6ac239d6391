"""The keys of one process: its subfolder of what `pdserve keys init` made, read and checked.

    DIR/router/  ca.pem cert.pem key.pem redis.password metrics.token api_keys.json
    DIR/node/    ca.pem cert.pem key.pem redis.password metrics.token kv.key

All keys are checked before the process listens: an expired certificate is reported at the start,
instead of by failed handshakes later. Certificates are read again when they change; passwords,
tokens and kv.key are read once.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.files.followed_files import FollowedFiles
from common.files.secret_files import secret_file_problem
from common.files.tls_handshake import handshake_in_memory, is_too_early, no_password, why_refused
from common.nodes import Role

log = logging.getLogger("pdserve")

ROUTER_NAME = "router.pdserve"
NODE_NAME = "node.pdserve"
REDIS_NAME = "redis.pdserve"
"""The DNS name in a certificate. It names the kind of process, not the machine."""

_MAX_FILE_BYTES = 64 << 10
_OWN_SECRET = {"router": "api_keys.json", "node": "kv.key"}


_TLS_FILES = ("ca.pem", "cert.pem", "key.pem")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """What a TLS connection requires of the keys, all PEM, and when the certificate ends."""

    ca: bytes
    certificate: bytes
    private_key: bytes = field(repr=False)
    begins_at_s: float
    expires_at_s: float
    """Beginning and end of the certificate, in seconds since 1970."""


@dataclass(slots=True, kw_only=True)
class Keys:
    """The keys of one process. `redis_user` is `router` or `node`.

    `tls` is another object after a renewal: connections that are opened later use that one.
    """

    folder: Path
    tls: TlsFiles
    redis_user: str
    redis_password: str = field(repr=False)
    metrics_token: str = field(repr=False)
    tls_files: FollowedFiles = field(repr=False)
    redis_expires_at_s: float | None = None
    """End of the certificate that Redis showed last, in seconds since 1970; None before, and
    without TLS to it."""

    def reload_if_changed(self) -> bool:
        """Take over changed certificates; return whether there were any.

        If they are broken, the earlier ones stay; see `FollowedFiles`.
        """
        tls = self.tls_files.read_if_changed(lambda: load_tls(self.folder, self.redis_user))
        if tls is None:
            return False
        self.tls = tls
        log.info("%s was read again, without a restart", self.folder / "cert.pem")
        return True

    @property
    def api_keys_path(self) -> Path:
        """A router's file of API key hashes."""
        return self.folder / "api_keys.json"

    @property
    def kv_key_path(self) -> Path:
        """A node's CURVE key pair."""
        return self.folder / "kv.key"


def load_keys(folder: Path, role: Role) -> Keys:
    """Return the keys with which a process of this role proves its identity and checks others.

    Raises `ConfigError`, which names the file: it is missing, usable by others or empty, or the
    certificate is expired, of another CA, of another key, of another role, or not usable for TLS.
    """
    kind = "router" if role is Role.ROUTER else "node"
    if not folder.is_dir() or not (folder / "cert.pem").exists():
        inner = f", here {folder / kind}" if (folder / kind).is_dir() else ""
        raise ConfigError(
            f"keys is {str(folder)!r}, which is not a folder of keys: wanted the subfolder {kind} "
            f"that `pdserve keys init` made{inner}"
        )
    for other, secret in _OWN_SECRET.items():
        if (folder / secret).exists() and not (folder / _OWN_SECRET[kind]).exists():
            raise ConfigError(
                f"keys is {str(folder)!r}, the folder of a {other}: wanted a {kind}'s"
            )
    tls_files = FollowedFiles(
        [folder / name for name in _TLS_FILES], log, stays="the earlier certificate stays"
    )
    names = ("redis.password", "metrics.token", _OWN_SECRET[kind])
    contents = {name: _read_secret(folder / name) for name in names}
    return Keys(
        folder=folder,
        tls=load_tls(folder, kind),
        redis_user=kind,
        redis_password=_word(folder / "redis.password", contents["redis.password"]),
        metrics_token=_word(folder / "metrics.token", contents["metrics.token"]),
        tls_files=tls_files,
    )


def load_tls(folder: Path, kind: str) -> TlsFiles:
    private_key = _read_secret(folder / "key.pem")
    ca, certificate = _read(folder / "ca.pem"), _read(folder / "cert.pem")
    begins_at_s, expires_at_s = _checked_certificate(folder, kind)
    return TlsFiles(
        private_key=private_key,
        ca=ca,
        certificate=certificate,
        begins_at_s=begins_at_s,
        expires_at_s=expires_at_s,
    )


def _read_secret(path: Path) -> bytes:
    try:
        problem = secret_file_problem(path, path.stat())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if problem:
        raise ConfigError(problem)
    return _read(path)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if not content.strip():
        raise ConfigError(f"{path} is empty: `pdserve keys init` writes it")
    if len(content) > _MAX_FILE_BYTES and path.name != "api_keys.json":
        raise ConfigError(f"{path} is larger than {_MAX_FILE_BYTES >> 10} KiB: wanted a key file")
    return content


def _word(path: Path, content: bytes) -> str:
    """Return a password or token: one word, because headers and Redis commands carry it."""
    try:
        text = content.decode("ascii").strip()
    except UnicodeDecodeError:
        text = ""
    if not text.isprintable() or not text or " " in text:
        raise ConfigError(f"{path} holds no password: wanted one line of printable ASCII")
    return text


def _checked_certificate(folder: Path, kind: str) -> tuple[float, float]:
    """Check the certificate by a real handshake; return when it begins and ends (seconds since
    1970)."""
    path = folder / "cert.pem"
    end = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    end.verify_mode = ssl.CERT_REQUIRED
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    own.check_hostname = False
    # The other end is this process itself, and only the certificate shown to it is checked.
    own.verify_mode = ssl.CERT_NONE
    try:
        end.load_verify_locations(folder / "ca.pem")
    except OSError:
        raise ConfigError(f"{folder / 'ca.pem'} holds no certificate in PEM") from None
    try:
        for context in (end, own):
            context.load_cert_chain(path, folder / "key.pem", password=no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} and {folder / 'key.pem'} are not a certificate and its key in PEM "
            f"({_reason(error)}): {_how_to_renew(kind)}"
        ) from None
    try:
        shown: dict[str, Any] = dict(handshake_in_memory(own, end)[1].getpeercert() or {})
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"{path} is not accepted by {folder / 'ca.pem'}: {why_refused(error)}"
            f"{'' if is_too_early(error) else f': {_how_to_renew(kind)}'}"
        ) from None
    except ssl.SSLError as error:
        raise ConfigError(
            f"{path} cannot be used for TLS ({_reason(error)}): {_how_to_renew(kind)}"
        ) from None
    wanted = ROUTER_NAME if kind == "router" else NODE_NAME
    names = [name for _, name in shown.get("subjectAltName", ())]
    if wanted not in names:
        raise ConfigError(
            f"{path} is the certificate of {', '.join(names) or 'no name'}: "
            f"wanted the one of {wanted}"
        )
    begins_at_s, ends_at_s = map(ssl.cert_time_to_seconds, (shown["notBefore"], shown["notAfter"]))
    return float(begins_at_s), float(ends_at_s)


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)


def _how_to_renew(kind: str) -> str:
    return f"`pdserve keys renew DIR {kind}` makes a new one"
