"""The small files of a model's folder: read once, and the same for helpers that start later.

A helper process may start days after its owner. Until then the folder may have been removed, its
server may be away, or another model may lie there, whose tokens are other ones. So the owner keeps
what it has read in files without a name, and hands these to its helpers.
"""

from __future__ import annotations

import codecs
import os
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path


class KeptFiles:
    """Contents by path."""

    def __init__(self, kept: Mapping[str, int] | None = None) -> None:
        """Take over what an owner has kept (descriptors by path) and nothing else; None: read."""
        self._kept = dict(kept or {})
        self._is_closed = kept is not None
        if not self._is_closed:
            weakref.finalize(self, _close, self._kept)

    @property
    def kept(self) -> Mapping[str, int]:
        """Descriptors of what was read, by path: a helper that inherits them reads them."""
        return self._kept

    def has(self, path: Path) -> bool:
        """Return whether there is a file to read."""
        return str(path) in self._kept or (not self._is_closed and path.exists())

    def read(self, path: Path, most_bytes: int = -1) -> bytes | None:
        """Return the content of a file, or its first `most_bytes`; None where there is none.

        A byte order mark, as editors of Windows write it, is not a part of it: of a chat template
        it would be in every prompt.
        Raises `OSError`.
        """
        name = str(path)
        if name in self._kept:
            return _content(self._kept[name])
        if self._is_closed:
            return None
        try:
            with path.open("rb") as file:
                content = file.read(most_bytes).removeprefix(codecs.BOM_UTF8)
        except FileNotFoundError:
            return None
        self._kept[name] = _nameless_file(content)
        return content


def _nameless_file(content: bytes) -> int:
    descriptor = os.memfd_create("model-file")
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(content)
    return descriptor


def _content(descriptor: int) -> bytes:
    size = os.fstat(descriptor).st_size
    content = bytearray()
    while len(content) < size:  # one call reads 2 GiB at most
        content += os.pread(descriptor, size - len(content), len(content))
    return bytes(content)


def _close(kept: Mapping[str, int]) -> None:
    descriptors: Iterable[int] = kept.values()
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
