"""The cluster's one CURVE key pair: only nodes that have the file can send and receive KV.

The file is a ZMQ certificate with both keys, as `pdserve kv-key` or `zmq.auth` write it.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth import load_certificate

from common.errors import ConfigError
from common.files.secret_files import secret_file_problem

_MAX_FILE_BYTES = 16 * 1024
_HOW_TO_MAKE = "make one with `pdserve kv-key FILE` and give every node the same"
_TEXT = """\
# CURVE key pair of a pdserve cluster: every prefill and decode node needs this file (--kv-key).
# Secret: a process that can read it can read and write the cluster's KV.
curve
    public-key = "{public}"
    secret-key = "{secret}"
"""


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A key pair in Z85, 40 characters each."""

    public: bytes
    secret: bytes = field(repr=False)


def new_curve_keys() -> CurveKeys:
    """Return a fresh key pair."""
    return CurveKeys(*zmq.curve_keypair())


def write_curve_keys(path: Path, keys: CurveKeys) -> None:
    """Write the file so that only its owner can read it; never overwrite one.

    Raises `ConfigError` when the file exists or cannot be written.
    """
    text = _TEXT.format(public=keys.public.decode(), secret=keys.secret.decode())
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists already: nodes that use it would be cut off; wanted a new file"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
    except OSError as error:
        path.unlink()
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def load_curve_keys(path: Path) -> CurveKeys:
    """Read and check the file.

    Raises `ConfigError`, with the reason, when the file is missing, readable by others or broken.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"kv_key {path} is no key file: {_HOW_TO_MAKE}")
        if problem := secret_file_problem(path, status):
            raise ConfigError(f"kv_key {problem}")
        public, secret = load_certificate(path)
    except OSError as error:
        reason = error.strerror or "it cannot be read"
        raise ConfigError(f"kv_key {path}: {reason}; {_HOW_TO_MAKE}") from None
    except (ValueError, IndexError):
        public, secret = b"", None
    if not secret or not _is_pair(public, secret):
        raise ConfigError(f"kv_key {path} holds no CURVE key pair: {_HOW_TO_MAKE}")
    return CurveKeys(public, secret)


def _is_pair(public: bytes, secret: bytes) -> bool:
    if len(public) != 40 or len(secret) != 40:
        return False
    try:
        return zmq.curve_public(secret) == public
    except (zmq.ZMQError, ValueError):
        return False
