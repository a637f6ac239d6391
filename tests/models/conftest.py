"""The tests of further models require downloads, so only `make test-models` runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import CheckpointError
from pdserve.checkpoints.known_models import QWEN_CODER
from pdserve.checkpoints.packaged_model import packaged_model_folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--models", action="store_true", help="test models that are fetched for it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder more time; in a run of several folders all are passed."""
    for item in items:
        if item.nodeid.startswith("tests/models/"):
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def qwen_folder() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct, or a skipped test where its packages cannot be had."""
    try:
        return packaged_model_folder(QWEN_CODER, progress=False)
    except CheckpointError as reason:
        pytest.skip(str(reason))
