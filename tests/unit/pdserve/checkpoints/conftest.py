"""A tiny GGUF file of the llama architecture, and the demo model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from pdserve.checkpoints.demo_model import demo_model_folder
from tests.support.models.tokenizer_gguf import WriteGguf, write_tiny_gguf


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """Write a tiny GGUF file; None as a value leaves out a metadata key or a tensor."""
    return partial(write_tiny_gguf, tmp_path / "tiny.gguf")


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return demo_model_folder()
