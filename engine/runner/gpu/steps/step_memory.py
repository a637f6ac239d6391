"""The buffers of a step, taken once for its largest number of rows: a step allocates nothing."""

from __future__ import annotations

from collections.abc import Mapping

from engine.runner.gpu.cuda_driver import Device, Memory
from engine.runner.gpu.experts.expert_tiles import LEAST_TILE_ROWS, TILE_BYTES, most_tiles
from engine.runner.gpu.weights import GATE_PARTS
from engine.runner.weights.spec.expert_mixture import ExpertMixture
from engine.runner.weights.spec.model_spec import DecoderSpec

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
    """Return the bytes of each buffer between the kernels of a layer, mostly in bfloat16."""
    attention, experts = spec.num_heads * spec.head_dim, spec.experts
    shared_size = 0 if experts is None else experts.shared_size
    widths = {
        "hidden": spec.hidden_size,
        "normed": spec.hidden_size,
        "qkv": spec.qkv_size,
        "queries": attention,
        "attended": attention,
        "activated": max(spec.intermediate_size, shared_size),
    }
    sizes = {name: 2 * num_rows * width for name, width in widths.items()}
    return sizes if experts is None else sizes | expert_sizes(spec.hidden_size, experts, num_rows)


def expert_sizes(hidden_size: int, mixture: ExpertMixture, num_rows: int) -> dict[str, int]:
    """Return the bytes of each buffer of a mixture's kernels."""
    num_pairs = num_rows * mixture.num_chosen
    return {
        "gate_products": 4 * num_rows * GATE_PARTS * mixture.num_experts,
        "experts": 4 * num_pairs, "expert_weights": 4 * num_pairs, "pairs": 4 * num_pairs,
        "tiles": TILE_BYTES * most_tiles(num_pairs, mixture.num_experts, LEAST_TILE_ROWS),
        "num_tiles": 4,
        "pair_activated": 2 * num_pairs * mixture.inner_size,
        "pair_results": 2 * num_pairs * hidden_size,
        "shared": 2 * num_rows * hidden_size if mixture.shared_size else 0,
    }  # fmt: skip
