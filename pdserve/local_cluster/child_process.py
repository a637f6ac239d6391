"""Child processes that write a log, end with their parent, and are stopped by pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from common.errors import PdserveError
from common.observing.clock import Clock
from pdserve.local_cluster.private_files import open_private_log
from pdserve.local_cluster.signals import Signals

_EXEC_CHILD = Path(__file__).with_name("exec_child.py")
_TAIL_BYTES = 16 << 10


class NotStarted(PdserveError):
    """The system does not start a process."""

    code = "not_started"


class ChildProcess:
    """One started process. Its output goes to the end of `log_path`, from `log_begin` on."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], log_path: Path, log_begin: int
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._process = process
        self._log_begin = log_begin

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code: None while it runs, negative for the signal that killed it."""
        return self._process.poll()

    def log_tail(self, num_lines: int) -> list[str]:
        """Return the last lines of what this process logged; none where its log is gone."""
        try:
            with self.log_path.open("rb") as file:
                size_bytes = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_begin, size_bytes - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        return text.splitlines()[-num_lines:]

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process, and wait until it has ended."""
        self._process.kill()
        self._process.wait()


def start_child(
    name: str, command: Sequence[str], log_path: Path, environ: Mapping[str, str]
) -> ChildProcess:
    """Start `command` in a new session, so that a terminal's Ctrl-C reaches only the parent.

    It ends with this process, as `ending_with_parent` says. Raises `NotStarted` where the system
    has no room for it, and `ConfigError` for a log that cannot be written.
    """
    with open_private_log(log_path) as log:
        log_begin = log.seek(0, os.SEEK_END)
        try:
            process = subprocess.Popen(  # noqa: S603 (the command is built by this package)
                ending_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                start_new_session=True,
            )
        except OSError as error:
            raise NotStarted(
                f"{name} cannot be started: {error.strerror}: wanted room for its process "
                f"(ulimit -u, memory), and an interpreter that can be run: {sys.executable}"
            ) from None
    return ChildProcess(name, process, log_path, log_begin)


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """Return what runs `command` such that, on Linux, it is killed when this process dies.

    A command that cannot be started ends with code 127 and a line in the log.
    """
    return [sys.executable, "-I", "-S", str(_EXEC_CHILD), str(os.getpid()), *command]


def stop_children(
    children: Iterable[ChildProcess],
    signals: Signals,
    clock: Clock,
    *,
    num_patient_stops: int,
    timeout_s: float,
    number: signal.Signals = signal.SIGTERM,
) -> list[str]:
    """Send all the signal `number`, wait, then kill; return the names of those killed.

    It stops waiting when `signals` counts more than `num_patient_stops` stop signals in all.
    """
    alive = [child for child in children if child.exit_code() is None]
    for child in alive:
        child.send(number)
    deadline_s = clock.now_s() + timeout_s
    while alive := [child for child in alive if child.exit_code() is None]:
        left_s = deadline_s - clock.now_s()
        if left_s <= 0 or signals.num_stops > num_patient_stops:
            break
        signals.wait(left_s)
    for child in alive:
        child.kill()
    return [child.name for child in alive]


def described_exit(code: int) -> str:
    """Describe an exit code: `exit code 3`, or `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
