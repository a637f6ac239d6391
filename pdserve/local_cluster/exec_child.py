"""Becomes a command, after arranging to be killed when the parent dies: exec_child.py PID COMMAND …

A program of its own, because nothing of the parent may run between fork and exec: libraries with
threads have fork handlers (gRPC's end a child at its birth), so the parent starts this by vfork.
It imports nothing but the standard library, and takes 20 ms.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_NOT_STARTED = 127
"""A shell's exit code for a command that it cannot start."""

if __name__ == "__main__":
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(1)
    try:
        os.execvp(command[0], command)  # noqa: S606 - what its parent wants to run
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(_NOT_STARTED)
