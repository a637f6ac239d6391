"""A file is replaced by another one whole or not at all, and keeps its owner and mode."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_beside(path: Path, content: bytes) -> Iterator[Path]:
    """Write a file beside `path`, to be renamed to it; it is removed at the end if it was not.

    It has owner and mode of `path`, so that all who read that can read it; mode 600 where there is
    none. Raises `OSError`.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    new = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            _keep_owner(path, file.fileno())
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield new
    finally:
        new.unlink(missing_ok=True)


def _keep_owner(path: Path, descriptor: int) -> None:
    if path.exists():
        status = path.stat()
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
        if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
            with contextlib.suppress(PermissionError):
                os.fchown(descriptor, status.st_uid, status.st_gid)
