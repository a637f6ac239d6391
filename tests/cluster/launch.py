"""Becomes `pdserve serve …`, after arranging to be killed when the parent dies: launch.py PID ….

A step of its own because of what runs between fork and exec otherwise: the parent's gRPC has
threads and fork handlers, and a child that runs Python there may crash.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent_pid, arguments = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-m", "pdserve", "serve", *arguments])
