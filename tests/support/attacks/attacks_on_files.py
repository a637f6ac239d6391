"""What can be tried with a file or a process of another user; each try by its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path


def try_file(path: str) -> dict[str, str]:
    """Read, change, replace and remove a file or folder; nothing is left of what succeeds."""
    target = Path(path)
    beside = Path(f"{path}.of-another")
    return _outcomes(
        {
            "read": lambda: _closed(os.open(path, os.O_RDONLY)),
            "write": lambda: _closed(os.open(path, os.O_WRONLY)),
            "list": lambda: list(target.iterdir()),
            "put a file into": lambda: _made_and_removed(target / "of-another"),
            "put a file beside": lambda: _made_and_removed(beside),
            "change the mode of": lambda: target.chmod(0o777),
            "rename": lambda: target.rename(beside),
        }
    )


def try_process(pid: int) -> dict[str, str]:
    """Look into a process, and at what its descriptors name; send it a signal."""
    folder = Path(f"/proc/{pid}")
    return _outcomes(
        {
            "environ": lambda: (folder / "environ").read_bytes(),
            "maps": lambda: (folder / "maps").read_bytes(),
            "mem": lambda: _closed(os.open(folder / "mem", os.O_RDONLY)),
            "write mem": lambda: _closed(os.open(folder / "mem", os.O_RDWR)),
            "cwd": lambda: (folder / "cwd").readlink(),
            "fds": lambda: list((folder / "fd").iterdir()),
            **{f"fd {fd}": partial(_read_descriptor, folder / f"fd/{fd}") for fd in range(64)},
            "signal": lambda: os.kill(pid, 0),
        }
    )


def _made_and_removed(path: Path) -> None:
    path.touch(exist_ok=False)
    path.unlink()


def _read_descriptor(path: Path) -> None:
    _closed(os.open(path, os.O_RDONLY))


def _closed(descriptor: int) -> None:
    os.close(descriptor)


def _outcomes(tries: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """Return what succeeded, as `done`, and the name of the error of what did not."""
    outcomes = {}
    for name, attempt in tries.items():
        try:
            attempt()
            outcomes[name] = "done"
        except OSError as error:
            outcomes[name] = type(error).__name__
    return outcomes
