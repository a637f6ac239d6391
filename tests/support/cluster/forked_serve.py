"""`pdserve serve …` in a process that is forked from one that has imported what roles need.

A role spends more of its start on imports than on everything else. A *template* makes them once,
and its forks have them (`templates`). The core of gRPC reads the environment when it is loaded,
which nodes and routers set up differently, so each kind has a template. A role that logs JSON sets
it up differently again, and loads gRPC and kernels itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

from common.nodes import Role
from tests.support.templates import KERNELS, NODES, ROUTERS

FORKS = multiprocessing.get_context("forkserver")
"""Makes processes of no template, from one that ends with this process."""
FORKS.set_forkserver_preload(
    ["engine.core.scheduler", "redis.asyncio", "tests.support.cluster.watching", __name__]
)
_SET_DEATH_SIGNAL = 1


_start_lock = threading.Lock()


class ForkedServe:
    """The calls of `subprocess.Popen` that tests make, for a forked role."""

    def __init__(
        self, arguments: Sequence[str], log_path: Path, environ: Mapping[str, str], cwd: Path
    ) -> None:
        self._process = FORKS.Process(
            target=_serve, args=(arguments, log_path, dict(environ), cwd), daemon=True
        )
        self._start(arguments)

    def _start(self, arguments: Sequence[str]) -> None:
        """Fork it from its template."""
        if "json" in arguments:
            self._process.start()
            return
        is_router = arguments[arguments.index("--role") + 1] == Role.ROUTER.value
        connect = (ROUTERS if is_router else NODES).connect_to_new_process
        # `multiprocessing` knows one server of forks.
        with _start_lock, mock.patch.object(forkserver, "connect_to_new_process", connect):
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
        """Send a signal, unless the process has ended.

        The template waits for it, and says so afterwards: its id may be gone while it seems to run.
        """
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve(arguments: Sequence[str], log_path: Path, environ: Mapping[str, str], cwd: Path) -> None:
    """Become the role. It ends with the process that forked it, which ends with the tests."""
    assert ("grpc" in sys.modules) is ("json" not in arguments), "that is not its template"
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    os.setsid()
    with log_path.open("ab") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    if kernels := sys.modules.get(KERNELS):
        kernels.set_up_threads()
    from pdserve.cli import main
    from tests.support.cluster.slow_serve import slow_down

    if file := environ.get("SLOW_WHILE"):
        slow_down(Path(file), arguments[arguments.index("--node-id") + 1])
    sys.exit(main(["serve", *arguments]))
