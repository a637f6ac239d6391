"""Processes of this project's modules, and helpers, which never outlive their owner nor hurt it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_OOM_SCORE = "900"
_ROOT = Path(__file__).resolve().parent.parent


def module_command(module: str, *arguments: str) -> list[str]:
    """Return what runs a module in `module_environment()`.

    -P: a file of the current folder that is named like a module is not taken for it.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """Return this environment, with this project before what `PYTHONPATH` names.

    With -P a child would not find it if it lies in the current folder.
    """
    folders = [str(_ROOT), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def start_helper(
    command: Sequence[str], descriptors: Collection[int] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process, which inherits `descriptors`; return it with a socket to its standard input.

    It is its standard output too. Started by vfork or the like, not by fork: no
    library's fork handler runs, and those of gRPC end a child at its birth. Raises `OSError`.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - a command of our own
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                pass_fds=descriptors,
                env=module_environment(),
                start_new_session=True,  # Ctrl-C in a terminal reaches its owner only
            )
    except OSError:
        ours.close()
        raise
    return process, ours


def end_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends, on Linux.

    A parent that died before is noticed by the end of the input.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def begin_helper() -> None:
    """End with the parent and by no signal that a terminal or a service's stop sends to a group.

    Where memory runs out, the kernel ends this process first; its owner starts another.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
