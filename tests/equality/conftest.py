"""What of this folder everyday runs leave to `make test-equality`."""

from __future__ import annotations

from pathlib import Path

import pytest

ONLY_WITH_ALL = (
    "test_grammars.py",
    "test_kv_dtypes.py",
    "test_memory_of_steps.py",
    "test_narrow_registers.py",
)
"""Their first test alone loads runners of its own, or answers for half a minute."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore them without `--every-combination`."""
    is_left_out = collection_path.name in ONLY_WITH_ALL
    return True if is_left_out and not config.getoption("--every-combination") else None
