"""Files that only their owner may read and write, from their creation on."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from common.errors import ConfigError


def write_private(path: Path, text: str) -> None:
    """Write a new file of mode 600.

    Raises `ConfigError` where there is a file already, and where there is no room for it.
    """
    try:
        with os.fdopen(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
        ) as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def open_private_log(path: Path) -> BinaryIO:
    """Return a file of mode 600, made if missing, to whose end is written.

    Raises `ConfigError` for a link, for what is no file, and for a file of another user: who can
    put something into a folder of logs must neither read them nor choose where they go.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise ConfigError(f"{path} is not a file of this user: wanted a folder without it")
    os.fchmod(descriptor, 0o600)
    return os.fdopen(descriptor, "ab")
