"""What the runners that these tests load share."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest


@pytest.fixture(scope="session", autouse=True)
def _kept_library() -> Iterator[None]:
    """Keep LLVM's pages: this process loads hundreds of runners, and each of them needs LLVM."""
    with patch("engine.runner.cpu.back_end.release_pages"):
        yield
