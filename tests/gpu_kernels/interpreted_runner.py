"""A node's runner whose card is Triton's interpreter on host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice, InterpretedKernel  # isort: skip

import numpy as np
import pytest

from engine.runner.gpu.back_end import GpuBackEnd
from engine.runner.gpu.card import Card
from engine.runner.gpu.launcher import KernelSpec
from engine.runner.model_runner import ModelRunner
from engine.runner.start import choose
from tests.support.models.running import load, logits_of, scheduled
from tests.support.models.tiny_checkpoints import CONFIGS, prompt_of

PROMPT = prompt_of(40)
TABLE = [5, 3, 1]
FAMILIES = {
    "llama": CONFIGS["llama"],
    "qwen2": CONFIGS["qwen2"],
    "qwen3": CONFIGS["qwen3"],
    "qwen3_yarn": CONFIGS["qwen3_yarn"],
    "ernie": CONFIGS["ernie"],
}


class InterpretedCard(Card):
    """A card whose kernels are interpreted.

    `late` are those that were not compiled together with the others before they were needed.
    """

    compiled: frozenset[Any] = frozenset()
    late: tuple[str, ...] = ()

    def kernel(self, spec: KernelSpec) -> Any:
        if self.compiled and spec.identity not in self.compiled:
            self.late += (repr(spec.identity),)
        return InterpretedKernel(spec)

    def compile(self, specs: Sequence[KernelSpec]) -> None:
        assert len(specs) > 10
        self.compiled = frozenset(spec.identity for spec in specs)


def put_interpreter_in_place(
    monkeypatch: pytest.MonkeyPatch,
    make_device: Callable[[], Any] = InterpretedDevice,
    card: type[Card] = InterpretedCard,
) -> list[Card]:
    """Let the back end `triton` have an interpreted card; return those that it has opened."""
    opened: list[Card] = []

    def open_card(ordinal: int) -> Card:
        opened.append(card(make_device(), 1, {}))
        return opened[-1]

    backs = dict(choose.BACK_ENDS) | {"triton": lambda engine: GpuBackEnd(0, open_card)}
    monkeypatch.setattr(choose, "BACK_ENDS", backs)
    return opened


def on_card(
    folder: Path, quantization: str = "none", load_format: str = "auto", **engine: Any
) -> ModelRunner:
    """A runner with a cache of 16 blocks of 16 tokens."""
    settings: dict[str, Any] = {
        "attention_backend": "triton", "kv_cache_memory": 1 << 18, "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
    }  # fmt: skip
    runner = load(
        folder, 64, quantization=quantization, load_format=load_format, **(settings | engine)
    )
    assert runner.num_blocks >= 16
    return runner


def computed(runner: ModelRunner, tokens: Sequence[int], cuts: Sequence[int]) -> np.ndarray:
    """The logits after `tokens`, in chunks that end at `cuts`."""
    start = 0
    for end in (*cuts, len(tokens)):
        [last] = logits_of(runner, scheduled(tokens[start:end], start, TABLE))
        start = end
    return last
