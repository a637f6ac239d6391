"""Detects that a file has changed, without reading it."""

from __future__ import annotations

from pathlib import Path

FileStamp = tuple[int, int, int] | None


def file_stamp(path: Path) -> FileStamp:
    """Return the time of the last change (ns), the size (bytes) and the inode of a file.

    None for a file that is missing or cannot be looked at.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
