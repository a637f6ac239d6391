"""Control groups as the kernel describes them to a process."""

from __future__ import annotations

from pathlib import Path


def put_in_group(root: Path, lines: str, files: dict[str, str]) -> None:
    """Write the kernel's files about the groups of a process."""
    for name, text in {"proc/self/cgroup": lines, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
