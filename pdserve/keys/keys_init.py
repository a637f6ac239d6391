"""The keys of a cluster as a folder: one subfolder for each kind of process, with only its keys.

ca/      stays with the operator: its holder can make certificates
router/  node/  redis/   each is copied to the machines that run such processes
client/  the API keys and tokens of the operator and the first client, in clear text
"""

from __future__ import annotations

import os
import secrets
import shutil
from datetime import datetime
from pathlib import Path

from common.errors import ConfigError
from common.files.keys_folder import NODE_NAME, REDIS_NAME, ROUTER_NAME
from common.files.replaced_file import written_beside
from kv_transfer.zmq.curve_keys import new_curve_keys, write_curve_keys
from pdserve.keys.certificates import (
    CA_DAYS,
    CALLS,
    SERVES,
    CertificateAuthority,
    Holder,
)
from pdserve.keys.redis_acl import users_acl
from router.access.api_keys import add_api_key

HOLDERS = {
    "router": Holder(names=(ROUTER_NAME,), usages=(CALLS,)),
    # A node serves routers, and calls Redis.
    "node": Holder(names=(NODE_NAME,), usages=(SERVES, CALLS)),
    "redis": Holder(names=(REDIS_NAME, "redis", "localhost", "127.0.0.1"), usages=(SERVES,)),
}
_FOLDERS = ("ca", *HOLDERS, "client")


def init_keys(folder: Path, now: datetime, *, days: int) -> None:
    """Make all keys of a new cluster; certificates are valid for `days`.

    Raises `ConfigError` where there are keys already, or the folder cannot be written; nothing is
    left behind then.
    """
    for name in _FOLDERS:
        if (folder / name).exists():
            raise ConfigError(
                f"{folder / name} exists already: processes that use its keys would lose touch; "
                "wanted a new folder (`pdserve keys renew` makes single certificates anew)"
            )
    is_new = not folder.exists()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in _FOLDERS:
            (folder / name).mkdir(mode=0o700)
        _write_all(folder, now, days)
    except BaseException as error:
        for name in _FOLDERS:
            shutil.rmtree(folder / name, ignore_errors=True)
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, (FileExistsError, NotADirectoryError)):
            raise ConfigError(f"{folder} is no folder: wanted the name of a new one") from None
        if isinstance(error, OSError):
            raise ConfigError(f"{folder} cannot be written: {error.strerror}") from None
        raise


def renew_certificate(folder: Path, kind: str, now: datetime, *, days: int) -> None:
    """Replace one kind's key and certificate by new ones from the same CA.

    Running routers and nodes take over a copy within seconds; Redis reads it when it is told to.
    Raises `ConfigError` without the CA, or the subfolder.
    """
    ca = folder / "ca"
    if not (ca / "ca.key").exists() or not (folder / kind).is_dir():
        missing = folder / kind if (ca / "ca.key").exists() else ca / "ca.key"
        raise ConfigError(f"{missing} is missing: wanted the folder that `pdserve keys init` made")
    try:
        authority = CertificateAuthority.load(
            (ca / "ca.pem").read_bytes(), (ca / "ca.key").read_bytes()
        )
        _require_longer_life(authority, now, days)
        issued = authority.issue(HOLDERS[kind], now, days=days)
        key, certificate = (folder / kind / name for name in ("key.pem", "cert.pem"))
        with (
            written_beside(key, issued.private_key) as new_key,
            written_beside(certificate, issued.certificate) as new_certificate,
        ):
            new_key.replace(key)
            new_certificate.replace(certificate)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror}") from None


def _require_longer_life(authority: CertificateAuthority, now: datetime, days: int) -> None:
    num_left = (authority.ends_at - now).days
    if days > num_left:
        raise ConfigError(
            f"--days is {days}, but the CA itself ends in {num_left} days: wanted at most that, "
            "or new keys for all from `pdserve keys init`"
        )


def _write_all(folder: Path, now: datetime, days: int) -> None:
    authority = CertificateAuthority.new(now, days=max(days, CA_DAYS))
    _write(folder / "ca/ca.pem", authority.pem.certificate)
    _write(folder / "ca/ca.key", authority.pem.private_key, is_secret=True)
    for kind, holder in HOLDERS.items():
        issued = authority.issue(holder, now, days=days)
        _write(folder / kind / "ca.pem", authority.pem.certificate)
        _write(folder / kind / "cert.pem", issued.certificate)
        _write(folder / kind / "key.pem", issued.private_key, is_secret=True)
    _write(folder / "client/ca.pem", authority.pem.certificate)
    _write_passwords(folder)
    write_curve_keys(folder / "node/kv.key", new_curve_keys())
    hashes = folder / "router/api_keys.json"
    for name, file, is_admin in (("client", "api.key", False), ("admin", "admin.key", True)):
        _write_word(folder / "client" / file, add_api_key(hashes, name, is_admin=is_admin))


def _write_passwords(folder: Path) -> None:
    passwords = {user: secrets.token_urlsafe(32) for user in ("router", "node", "admin")}
    for user, place in (("router", "router"), ("node", "node"), ("admin", "client")):
        _write_word(folder / place / "redis.password", passwords[user])
    _write(folder / "redis/users.acl", users_acl(passwords).encode(), is_secret=True)
    token = secrets.token_urlsafe(32)
    for place in ("router", "node", "client"):
        _write_word(folder / place / "metrics.token", token)


def _write_word(path: Path, word: str) -> None:
    # Without a newline: Prometheus, for one, takes the whole file as the token.
    _write(path, word.encode(), is_secret=True)


def _write(path: Path, content: bytes, *, is_secret: bool = False) -> None:
    """Write a new file, whose mode is restricted from its creation on."""
    mode = 0o600 if is_secret else 0o644
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
