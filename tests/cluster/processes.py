"""One `pdserve serve` process of a test cluster. It cannot outlive the test run."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from pdserve.child_process import ChildProcess, described_exit, start_child
from tests.cluster.waiting import wait_until

STOP_TIMEOUT_S = 15.0


class ServeProcess:
    """A role that runs until it is stopped or killed."""

    def __init__(self, name: str, arguments: list[str], log_path: Path) -> None:
        self.name = name
        self._command = [sys.executable, "-m", "pdserve", "serve", *arguments]
        self._log_path = log_path
        self._child: ChildProcess | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None, f"{self.name} was not started"
        return self._child.pid

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.exit_code() is None

    def start(self) -> None:
        """Start it; whoever needs it ready waits for that."""
        assert not self.is_running, f"{self.name} runs already"
        self._child = start_child(self.name, self._command, self._log_path, role_environment())

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._child is not None:
            self._child.kill()

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        assert self._child is not None, f"{self.name} was not started"
        self._child.send(signal.SIGTERM)
        return self.wait(STOP_TIMEOUT_S)

    def wait(self, timeout_s: float) -> int:
        """The exit code, once it has ended by itself."""
        child = self._child
        assert child is not None, f"{self.name} was not started"
        wait_until(
            lambda: child.exit_code() is not None, f"the end of {self.name}", timeout_s=timeout_s
        )
        code = child.exit_code()
        assert code is not None
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
        assert self._child is not None, f"{self.name} was not started"
        code = self._child.exit_code()
        if code is not None:
            tail = "\n  ".join(self._child.log_tail(30))
            raise AssertionError(f"{self.name} ended with {described_exit(code)}:\n  {tail}")

    def _send(self, number: signal.Signals) -> None:
        assert self._child is not None, f"{self.name} was not started"
        self._child.send(number)


def role_environment() -> dict[str, str]:
    """This process's environment without settings of pdserve."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PDSERVE_")}
