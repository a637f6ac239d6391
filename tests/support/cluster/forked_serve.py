"""`pdserve serve …` in a process that is forked from one that has imported what roles need.

A role spends more of its start on imports than on everything else. A *template* makes them once,
and its forks have them (`templates`). The core of gRPC reads the environment when it is loaded,
which nodes and routers set up differently, so each kind has a template.
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
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

from common.nodes import Role
from tests.support.templates import KERNELS, NODES, ROUTERS, Template

FORKS = multiprocessing.get_context("forkserver")
"""Makes processes of no template, from one that ends with this process."""
FORKS.set_forkserver_preload(
    ["engine.core.scheduler", "redis.asyncio", "tests.support.cluster.watching", __name__]
)
_SET_DEATH_SIGNAL = 1


_start_lock = threading.Lock()


class Forked:
    """The calls of `subprocess.Popen` that tests make, for a process that is forked."""

    def __init__(self, template: Template, target: Callable[..., None], *args: Any) -> None:
        """Call `target` in a fork of `template`."""
        self._process = FORKS.Process(target=target, args=args, daemon=True)
        self._start(template)

    def _start(self, template: Template) -> None:
        connect = template.connect_to_new_process
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
            raise subprocess.TimeoutExpired(str(self._process.name), timeout or 0.0)
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


def become(output: int, environ: Mapping[str, str]) -> None:
    """Make this fork what a new process would be, which writes to a file descriptor.

    It ends with the process that forked it, which ends with the tests.
    """
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    os.setsid()
    for number in (1, 2):
        os.dup2(output, number)
    os.environ.clear()
    os.environ.update(environ)


class ForkedServe(Forked):
    """A role in a fork of its template."""

    def __init__(
        self, arguments: Sequence[str], log_path: Path, environ: Mapping[str, str], cwd: Path
    ) -> None:
        super().__init__(_template(arguments), _serve, arguments, log_path, dict(environ), cwd)


def _is_router(arguments: Sequence[str]) -> bool:
    return arguments[arguments.index("--role") + 1] == Role.ROUTER.value


def _template(arguments: Sequence[str]) -> Template:
    """Return what a role is forked from."""
    return ROUTERS if _is_router(arguments) else NODES


def _serve(arguments: Sequence[str], log_path: Path, environ: Mapping[str, str], cwd: Path) -> None:
    """Become the role."""
    assert "grpc" in sys.modules, "that is no template"
    with log_path.open("ab") as log:
        become(log.fileno(), environ)
    os.chdir(cwd)
    if kernels := sys.modules.get(KERNELS):
        kernels.set_up_threads()
    from pdserve.cli import main
    from tests.support.clocks.patience import PATIENT, wait_for_nodes, wait_for_pulls
    from tests.support.cluster.slow_serve import slow_down
    from tests.support.grammars.patient_trials import wait_for_trials

    wait_for_trials()
    if PATIENT in environ:
        (wait_for_nodes if _is_router(arguments) else wait_for_pulls)()
    if file := environ.get("SLOW_WHILE"):
        slow_down(Path(file), arguments[arguments.index("--node-id") + 1])
    sys.exit(main(["serve", *arguments]))
