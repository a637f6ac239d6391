"""The folder of one run: logs, kept after a failure, and private files, always removed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self


class RunFolder:
    """A temporary folder, readable by its owner alone.

    On exit the private part (configurations with secrets, Redis's folder) is removed; the logs are
    removed with it unless `keep_logs` was called.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="pdserve-"))
        self.private = self.path / "private"
        self.private.mkdir(mode=0o700)
        self.keeps_logs = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.private if self.keeps_logs else self.path, ignore_errors=True)

    def log_path(self, name: str) -> Path:
        """Return the path of the log of the process called `name`."""
        return self.path / f"{name}.log"

    def keep_logs(self) -> None:
        """Keep the logs behind the run, for the diagnosis of a failure."""
        self.keeps_logs = True
