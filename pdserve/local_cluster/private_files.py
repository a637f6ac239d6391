"""Files that only their owner may read and write, from their creation on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


def write_private(path: Path, text: str) -> None:
    """Write a new file of mode 600. Raises `OSError`, also where there is a file already."""
    with os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
    ) as file:
        file.write(text)


def open_private_log(path: Path) -> BinaryIO:
    """Return a file of mode 600, made if missing, to whose end is written."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "ab")
