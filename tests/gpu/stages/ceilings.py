"""What the card itself gives: memory and matrix units. Other stages compare with it."""

from __future__ import annotations

import statistics
from typing import Any

from engine.runner.gpu.kernels.random_numbers import fill_normal
from engine.runner.gpu.launcher import KernelSpec
from tests.gpu.kernels import read
from tests.gpu.stages.model import Findings

_BYTES = 4 << 30
_SIZE = 4096
_PRODUCTS, _ROUNDS = 20, 5
"""Products of a round, some 30 ms of them: one round warms the card up, as a prompt does."""


def ceilings(card: Any, found: Findings) -> None:
    """What memory and matrix units give here."""
    read_gb_s(card, found)
    matrix_tflops(card, found)


def read_gb_s(card: Any, found: Findings) -> float:
    """Return the speed of reading, GB/s, measured once by whichever stage asks first."""
    programs = 4 * card.device.properties.num_multiprocessors
    constants = {"COUNT": _BYTES // 4, "SIZE": _SIZE, "PROGRAMS": programs}
    reader = card.kernel(KernelSpec(read, {"source": "*fp32", "out": "*fp32"}, constants, 8, 4))
    types = {"out": "*bf16", "seed": "i64", "scale": "fp32", "count": "i64"}
    fill = card.kernel(KernelSpec(fill_normal, types, {"SIZE": 1024}))
    if card.is_real and "read_gb_s" not in found:
        device, stream = card.device, card.stream
        one, other, out = (device.allocate(n) for n in (_BYTES, _BYTES, 4 * programs))
        count = _BYTES // 2
        fill.bind((count // 4096,), one.address, 3, 1.0, count)(stream)  # zeros take less power
        copy = card.milliseconds(lambda: device.copy(other.address, one.address, _BYTES, stream))
        launch = reader.bind((programs,), one.address, out.address)
        reading = card.milliseconds(lambda: launch(stream))
        for memory in (one, other, out):
            memory.close()
        found["copy_gb_s"] = round(2 * _BYTES / copy / 1e6)
        found["read_gb_s"] = round(_BYTES / reading / 1e6)
        print(f"copy {found['copy_gb_s']} GB/s, read {found['read_gb_s']} GB/s", flush=True)
    return float(found.get("read_gb_s", 1))


def matrix_tflops(card: Any, found: Findings) -> float | None:
    """Return what a vendor's library reaches, measured once; None where none is installed."""
    if card.is_real and "matrix_tflops" not in found:
        found["matrix_tflops"] = _library_tflops()
        print(f"matrix peak {found['matrix_tflops']} TFLOP/s (library, 8192^3)", flush=True)
    peak: float | None = found.get("matrix_tflops")
    return peak


def _library_tflops() -> float | None:
    try:
        import torch
    except ImportError:
        return None
    size = 8192
    x = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    y = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    taken = []
    for _ in range(_ROUNDS + 1):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(_PRODUCTS):
            x @ y
        last.record()
        last.synchronize()
        taken.append(first.elapsed_time(last) / _PRODUCTS)
    return float(round(2 * size**3 / statistics.median(taken[1:]) / 1e9))
