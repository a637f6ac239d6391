"""The buffers of a step, taken once for its largest number of rows: a step allocates nothing."""

from __future__ import annotations

from collections.abc import Mapping

from engine.runner.gpu.cuda_driver import Device, Memory
from engine.runner.weights.model_spec import DecoderSpec

_ALIGNMENT = 256


class StepMemory:
    """Named buffers in one allocation; `buffer[name]` is an address."""

    def __init__(self, device: Device, sizes: Mapping[str, int]) -> None:
        self._offsets: dict[str, int] = {}
        end = 0
        for name, num_bytes in sizes.items():
            self._offsets[name] = end
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._memory: Memory = device.allocate(end)

    def __getitem__(self, name: str) -> int:
        return self._memory.address + self._offsets[name]

    def close(self) -> None:
        """Free the buffers."""
        self._memory.close()


def activation_sizes(spec: DecoderSpec, num_rows: int) -> dict[str, int]:
    """Return the bytes of each buffer between the kernels of a layer, in bfloat16."""
    attention = spec.num_heads * spec.head_dim
    widths = {
        "hidden": spec.hidden_size,
        "normed": spec.hidden_size,
        "qkv": spec.qkv_size,
        "queries": attention,
        "attended": attention,
        "activated": spec.intermediate_size,
    }
    return {name: 2 * num_rows * width for name, width in widths.items()}
