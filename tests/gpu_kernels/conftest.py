"""Options of the tests without a card."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from engine.runner.gpu.card import Card
    from tests.gpu_kernels.late_device import LateDevice


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernels", action="store_true", help="test GPU kernels, without a GPU")


@pytest.fixture
def interpreted_card(monkeypatch: pytest.MonkeyPatch) -> list[Card]:
    """Nodes' runners in Triton's interpreter, and the cards that they open."""
    from tests.gpu_kernels.interpreted_runner import put_interpreter_in_place

    return put_interpreter_in_place(monkeypatch)


@pytest.fixture
def late_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    """A card that answers late, in the place of nodes' cards."""
    from tests.gpu_kernels.interpreted_runner import put_interpreter_in_place
    from tests.gpu_kernels.late_device import LateCard, LateDevice

    late = LateDevice()
    put_interpreter_in_place(monkeypatch, lambda: late, LateCard)
    yield late
    assert late.faults == []


@pytest.fixture
def one_layer(tmp_path: Path) -> Path:
    """The folder of a tiny model with one layer."""
    from tests.gpu_kernels.interpreted_runner import FAMILIES
    from tests.support.models.tiny_checkpoints import write_checkpoint

    return write_checkpoint(tmp_path, FAMILIES["qwen2"] | {"num_hidden_layers": 1})
