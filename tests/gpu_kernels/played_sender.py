"""The other process of the stages `ipc` and `ipc_lane`, on an interpreted card: a small cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice, InterpretedKernel  # isort: skip

from common.kv.kv_layout import KVLayout
from tests.gpu import ipc_sender
from tests.gpu.measuring import Bound

SIZES = {
    "LAYOUT": KVLayout(
        model_digest="random", num_layers=2, num_kv_heads=1, head_dim=16, block_size=16,
        dtype="bfloat16",
    ),
    "PROMPT_BLOCKS": 2,
    "NUM_BLOCKS": 8,
}  # fmt: skip
"""What takes the place of `ipc_sender`'s: four prompts of two blocks."""


class _StageDevice(InterpretedDevice):
    def memory(self) -> tuple[int, int]:
        return 70 << 30, 80 << 30


class InterpretedStageCard:
    """Has what a stage's card has; what it measures takes a millisecond."""

    is_real, kernel, stream = True, InterpretedKernel, 1

    def __init__(self) -> None:
        self.device: Any = _StageDevice()

    def milliseconds(self, work: Callable[[], None]) -> float:
        work()
        return 1.0

    def graph_milliseconds(self, launches: Sequence[Bound]) -> float:
        for launch in launches:
            launch(self.stream)
        return 1.0


if __name__ == "__main__":
    vars(ipc_sender).update(SIZES)
    ipc_sender.main(InterpretedStageCard())
