"""What a process listens on, as the kernel knows it."""

from __future__ import annotations

import contextlib
import socket
import struct
from pathlib import Path

_LISTENING = "0A"
_ACCEPTS = 0x10000
"""The flag of a unix socket that listens, in /proc/net/unix."""


def listening_sockets(pid: int) -> list[str]:
    """`tcp HOST:PORT`, `udp HOST:PORT` and `unix PATH` (abstract ones begin with @), sorted.

    Of a datagram socket it is what it is bound to.
    """
    inodes = _inodes(pid)
    found = [name for inode, name in _ports() if inode in inodes]
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split(maxsplit=7)
        if int(words[3], 16) & _ACCEPTS and words[6] in inodes:
            found.append(f"unix {words[7] if len(words) > 7 else ''}")
    return sorted(found)


def _inodes(pid: int) -> set[str]:
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            target = str(fd.readlink())
            if target.startswith("socket:["):
                inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    return inodes


def _ports() -> list[tuple[str, str]]:
    found = []
    for name in ("tcp", "tcp6", "udp", "udp6"):
        table = Path(f"/proc/net/{name}")
        lines = table.read_text().splitlines()[1:] if table.exists() else []
        for words in map(str.split, lines):
            if words[3] == _LISTENING or name.startswith("udp"):
                found.append((words[9], f"{name[:3]} {_address(words[1])}"))
    return found


def _address(text: str) -> str:
    host, _, port = text.partition(":")
    words = [int(host[i : i + 8], 16) for i in range(0, len(host), 8)]
    packed = b"".join(struct.pack("=I", word) for word in words)
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    name = socket.inet_ntop(family, packed).removeprefix("::ffff:")
    return f"{name}:{int(port, 16)}"
