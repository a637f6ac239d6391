"""`pdserve serve …` in a process that is forked from one that has imported what roles need.

A role spends more of its start on imports than on everything else. One process of a test run makes
them once, and its forks have them. Kernels are not among them: the threads of GNU's OpenMP, which
computes them, do not survive a fork. Nor is gRPC: its core reads the environment when it is loaded,
which each role sets up for itself.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PRELOADED = [
    "engine.core.scheduler",
    "engine.runner.start.load",
    "numba",
    "redis.asyncio",
    "router.api.endpoints",
    "router.http.server",
    "router.live.live_routes",
    "tests.support.cluster.watching",
    __name__,
]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(PRELOADED)
"""Makes processes with `PRELOADED`, from one that ends with this process."""
_SET_DEATH_SIGNAL = 1


class ForkedServe:
    """The calls of `subprocess.Popen` that tests make, for a forked role."""

    def __init__(
        self, arguments: Sequence[str], log_path: Path, environ: Mapping[str, str], cwd: Path
    ) -> None:
        self._process = FORKS.Process(
            target=_serve, args=(arguments, log_path, dict(environ), cwd), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code: None while it runs, negative for the signal that killed it."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; `subprocess.TimeoutExpired` if it has not ended by then."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("pdserve serve", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve(arguments: Sequence[str], log_path: Path, environ: Mapping[str, str], cwd: Path) -> None:
    """Become the role. It ends with the process that forked it, which ends with the tests."""
    assert "grpc" not in sys.modules, "what is preloaded has loaded gRPC"
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    os.setsid()
    with log_path.open("ab") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    from pdserve.cli import main
    from tests.support.cluster.slow_serve import slow_down

    if file := environ.get("SLOW_WHILE"):
        slow_down(Path(file), arguments[arguments.index("--node-id") + 1])
    sys.exit(main(["serve", *arguments]))
