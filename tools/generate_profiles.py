"""Write `simulator/profiles/`: profiles of devices that nobody has measured with pdserve.

`python -m tools.generate_profiles`. The points of each file come from a roofline:

    decode  overhead_s + max(weights_s, token_s * rows) + context_s * rows * context
    chunk   overhead_s + max(weights_s, token_s * tokens) + pair_s * pairs of attention

with numbers that follow from sizes of the model, rates of the device and published times per token;
`source` in the file says how. A file that `pdserve profile` writes on such a device is better.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.measured_profile import (
    ChunkTime,
    DecodeTime,
    MeasuredProfile,
    ProfiledMachine,
    ProfiledModel,
    TransferTime,
    encode_profile,
)
from common.version import VERSION

FOLDER = Path(__file__).parents[1] / "simulator" / "profiles"
BLOCK = 64
MADE_AT = "2026-11-27T12:00:00+00:00"
PORT_BYTES_PER_S, PORT_LATENCY_S = 45e9, 20e-6
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 512)
CONTEXTS = (128, 1024, 4096, 16_384, 65_536)
CHUNKS = (16, 64, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
CHUNK_CONTEXTS = (0, 1024, 4096, 16_384, 65_536)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a step reads and computes. `kv_bytes` are those of a token, `pair_flop` of a pair."""

    name: str
    weight_bytes: float
    kv_bytes: int
    token_flop: float
    pair_flop: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Cards of one node: `bytes_per_s` and `flop_per_s` are reached, of all of them together."""

    device: str
    num_cards: int
    memory_bytes: float
    bytes_per_s: float
    rate: str
    overhead_s: float
    overhead: str


SMALL = Model(
    name="8B dense, 36 layers, 8 KV heads of 128, bfloat16",
    weight_bytes=15.1e9, kv_bytes=147_456, token_flop=15.1e9, pair_flop=0.59e6,
)  # fmt: skip
LARGE = Model(
    name="70B dense, 80 layers, 8 KV heads of 128, bfloat16",
    weight_bytes=141e9, kv_bytes=327_680, token_flop=141e9, pair_flop=2.62e6,
)  # fmt: skip
H100: dict[str, Any] = {"memory_bytes": 80e9, "bytes_per_s": 3.0e12, "rate": "3.0 of 3.35 TB/s"}
H200: dict[str, Any] = {"memory_bytes": 141e9, "bytes_per_s": 4.3e12, "rate": "4.3 of 4.8 TB/s"}
_ALONE = (
    "what is left of 7.28 ms per token on an H100, published for one request of vLLM 0.11 "
    "(gpustack performance lab, Qwen3-8B; for 8 requests 7.71 ms)"
)
_TOGETHER = (
    "what is left of 16.2 ms per token of 8 requests on four H200, published by vLLM's performance "
    "benchmark (128 tokens of llama 70B in 2,078 ms)"
)
_SMALL_NODE: dict[str, Any] = {"num_cards": 1, "overhead_s": 2.24e-3, "overhead": _ALONE}
_LARGE_NODE: dict[str, Any] = {"num_cards": 4, "overhead_s": 8e-3, "overhead": _TOGETHER}
FILES = {
    "8b_h100": (SMALL, Node(device="NVIDIA H100 SXM, 80 GB", **_SMALL_NODE, **H100)),
    "8b_h200": (SMALL, Node(device="NVIDIA H200 SXM, 141 GB", **_SMALL_NODE, **H200)),
    "70b_h100": (LARGE, Node(device="4 NVIDIA H100 SXM, 80 GB", **_LARGE_NODE, **H100)),
    "70b_h200": (LARGE, Node(device="4 NVIDIA H200 SXM, 141 GB", **_LARGE_NODE, **H200)),
}


def profile_of(model: Model, node: Node) -> MeasuredProfile:
    """Return the profile of a model on a node."""
    cards = node.num_cards
    bytes_per_s, flop_per_s = node.bytes_per_s * cards, 600e12 * cards
    weights_s, context_s = model.weight_bytes / bytes_per_s, model.kv_bytes / bytes_per_s
    token_s, pair_s = model.token_flop / flop_per_s, model.pair_flop / (400e12 * cards)
    free_bytes = (0.9 * node.memory_bytes - 4e9) * cards - model.weight_bytes
    num_blocks = int(free_bytes // (model.kv_bytes * BLOCK))

    def products_s(tokens: int) -> float:
        return node.overhead_s + max(weights_s, token_s * tokens)

    decodes = tuple(
        DecodeTime(rows=n, context=c, step_s=_rounded(products_s(n) + context_s * n * c))
        for n in ROWS
        for c in CONTEXTS
        if n * (c + 1) <= num_blocks * BLOCK
    )
    chunks = tuple(
        ChunkTime(
            tokens=n, context=c, step_s=_rounded(products_s(n) + pair_s * n * (c + (n + 1) / 2))
        )
        for n in CHUNKS
        for c in CHUNK_CONTEXTS
    )
    transfers = tuple(
        TransferTime(
            transport="rdma",
            num_bytes=size << 20,
            seconds=_rounded(PORT_LATENCY_S + (size << 20) / PORT_BYTES_PER_S),
        )
        for size in (1, 16, 256)
    )
    return MeasuredProfile(
        pdserve_version=VERSION,
        measured_at=MADE_AT,
        model=ProfiledModel(
            name=model.name, layout="", kv_bytes_per_token=model.kv_bytes, block_size=BLOCK,
            max_model_len=131_072,
        ),
        machine=ProfiledMachine(
            processor="", num_cores=0, memory_bytes=0, device=node.device, back_end="",
            num_blocks=num_blocks,
        ),
        decodes=decodes, chunks=chunks, verified=(), transfers=transfers,
        source=source_of(model, node),
    )  # fmt: skip


def source_of(model: Model, node: Node) -> str:
    """Return in words where the numbers are from."""
    cards = f"{node.num_cards} cards, each " if node.num_cards > 1 else ""
    return (
        "Not measured by pdserve: worked out from published figures. A step reads "
        f"{model.weight_bytes / 1e9:.1f} GB of weights and {model.kv_bytes >> 10} KiB of KV per "
        f"token of context, at {cards}{node.rate}, what copies reach. Beside that it takes "
        f"{node.overhead_s * 1e3:.2f} ms: {node.overhead}. Products: "
        f"{model.token_flop / 1e9:.0f} GFLOP per token at 600 of 989 TFLOP/s; attention: "
        f"{model.pair_flop / 1e6:.2f} MFLOP per pair of tokens at 400 TFLOP/s. Memory for KV: 0.9 "
        "of each card without the weights and 4 GB for a step. Network: a port of 400 Gbit/s at "
        "0.9 of its speed."
    )


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.6g}")


def main() -> None:
    for name, (model, node) in FILES.items():
        text = encode_profile(profile_of(model, node))
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
