"""Options of the tests without a card."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernels", action="store_true", help="test GPU kernels, without a GPU")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore this folder without the option: Triton's interpreter takes a whole process."""
    is_wanted = config.getoption("--kernels", default=False)
    return None if is_wanted or collection_path.suffix != ".py" else True


@pytest.fixture
def interpreted_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes' runners in Triton's interpreter."""
    from tests.gpu_kernels.interpreted_runner import put_interpreter_in_place

    put_interpreter_in_place(monkeypatch)
