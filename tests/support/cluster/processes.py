"""One `pdserve serve` process of a test cluster. It cannot outlive the test run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pdserve.local_cluster.child_process import described_exit, ending_with_parent
from tests.support.clocks.patience import PATIENT
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.forked_serve import ForkedServe
from tests.support.observing.process_tasks import children_of

SOURCES = Path(__file__).resolve().parents[3]
"""This checkout."""
SLOW_SERVE = SOURCES / "tests/support/cluster/slow_serve.py"
STOP_TIMEOUT_S = 60.0
_TAIL_LINES = 30


class ServeProcess:
    """A role that runs until it is stopped or killed."""

    def __init__(
        self, name: str, arguments: list[str], log_path: Path, environ: Mapping[str, str]
    ) -> None:
        self.name = name
        self._arguments = arguments
        self._log_path = log_path
        self._own_environ = environ
        self._process: subprocess.Popen[bytes] | ForkedServe | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id of its present life."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    def start(self, sources: Path = SOURCES, flags: Sequence[str] = ()) -> None:
        """Start it; whoever needs it ready waits for that.

        `sources` is the checkout whose code runs. `flags` are for this life only and
        replace equal ones.
        """
        assert not self.is_running, f"{self.name} runs already"
        environ = {**role_environment(), **self._own_environ}
        # A start of its own reads its sources, and what Python's variables name.
        if sources == SOURCES and self._own_environ.keys() <= {"SLOW_WHILE", PATIENT}:
            arguments = [*self._arguments, *flags]
            self._process = ForkedServe(arguments, self._log_path, environ, sources)
            return
        program = ["-m", "pdserve", "serve"]
        if file := environ.get("SLOW_WHILE"):
            program = [str(SLOW_SERVE), file]
        path = os.pathsep.join(filter(None, (str(sources), environ.get("PYTHONPATH"))))
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                ending_with_parent([sys.executable, *program, *self._arguments, *flags]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=sources,
                env={**environ, "PYTHONPATH": path},
                start_new_session=True,
            )

    def children(self) -> list[int]:
        """The processes that it started and that run: a router plans large bodies in one."""
        return children_of(self.pid) if self.is_running else []

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone, and every process that it started."""
        if self._process is not None:
            children = self.children()
            self._process.kill()
            self._process.wait()
            _wait_ended(self.name, children)

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self._send(signal.SIGTERM)
        return self.wait(STOP_TIMEOUT_S)

    def begin_stop(self) -> None:
        """SIGTERM, which drains; a second one ends it at once."""
        self._send(signal.SIGTERM)

    def interrupt(self) -> int:
        """SIGINT, which ends a role at once, and the exit code."""
        self._send(signal.SIGINT)
        return self.wait(STOP_TIMEOUT_S)

    def wait(self, timeout_s: float) -> int:
        """The exit code, once it has ended by itself, and every process that it started."""
        assert self._process is not None, f"{self.name} was not started"
        children = self.children()
        code = self._process.wait(timeout_s)
        _wait_ended(self.name, children)
        return code

    def freeze(self) -> None:
        """SIGSTOP: alive, and silent."""
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._send(signal.SIGCONT)

    def log(self) -> str:
        """All that it wrote, in all its lives."""
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def require_running(self) -> None:
        """Fails with its last words when it has ended."""
        assert self._process is not None, f"{self.name} was not started"
        code = self._process.poll()
        if code is not None:
            tail = "\n  ".join(self.log().splitlines()[-_TAIL_LINES:])
            raise AssertionError(f"{self.name} ended with {described_exit(code)}:\n  {tail}")

    def _send(self, number: signal.Signals) -> None:
        assert self._process is not None, f"{self.name} was not started"
        self._process.send_signal(number)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for is dead as well."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait_ended(name: str, children: list[int]) -> None:
    what = f"the processes that {name} started have ended"
    wait_until(lambda: not any(map(is_alive, children)), what)


def role_environment() -> dict[str, str]:
    """This process's environment without settings of pdserve."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PDSERVE_")}
