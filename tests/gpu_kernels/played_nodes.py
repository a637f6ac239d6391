"""Lets the nodes of this process, or of its forks, have Triton's interpreter for a card.

It is imported in a template of nodes (`tests/support/templates.py`). A card that fails is one that
no thread can use any more.
"""

from __future__ import annotations

from typing import NoReturn

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice  # isort: skip
from tests.gpu_kernels.interpreted_runner import InterpretedCard  # isort: skip

from engine.runner.gpu.back_end import GpuBackEnd
from engine.runner.gpu.card import Card
from engine.runner.gpu.cuda_driver import GpuError
from engine.runner.start import choose
from tests.support.cluster import slow_serve

_opened: list[Card] = []


def _open_card(ordinal: int) -> Card:
    _opened.append(InterpretedCard(InterpretedDevice(ordinal), 1, {}))  # type: ignore[arg-type]
    return _opened[-1]


def _lose_cards() -> None:
    """Do what the kernel does that `slow_serve.break_gpu` launches."""

    def use() -> NoReturn:
        raise GpuError("cuCtxSetCurrent: an illegal memory access was encountered (700)")

    for card in _opened:
        card.device.use = use  # type: ignore[method-assign]


choose.BACK_ENDS = dict(choose.BACK_ENDS) | {"triton": lambda engine: GpuBackEnd(0, _open_card)}
slow_serve.break_gpu = _lose_cards
