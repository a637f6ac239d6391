"""Becomes `pdserve serve …`, after arranging to be killed when the parent dies: launch.py PID ….

With the variable SLOW_WHILE, the path of a file, it is `slow_serve.py` that it becomes.

A step of its own because of what runs between fork and exec otherwise: the parent's gRPC has
threads and fork handlers, and a child that runs Python there may crash.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent_pid, arguments = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(1)
    program = ["-m", "pdserve", "serve"]
    if file := os.environ.get("SLOW_WHILE"):
        program = [str(Path(__file__).with_name("slow_serve.py")), file]
    os.execv(sys.executable, [sys.executable, *program, *arguments])
