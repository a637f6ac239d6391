"""The folder of one run: logs that survive a failure, and private files that never do."""

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
        """Where the output of the process called `name` goes."""
        return self.path / f"{name}.log"

    def keep_logs(self) -> None:
        """Something failed: whoever looks into it needs them."""
        self.keeps_logs = True
