"""What the card itself gives: memory, matrix units and launches."""

from __future__ import annotations

import time
from typing import Any

from engine.runner.gpu.launcher import KernelSpec
from engine.runner.gpu.launches import AttentionShape
from tests.gpu.kernels import read
from tests.gpu.stages.model import (
    CONTEXT,
    Findings,
    Model,
)
from tests.gpu.stages.steps import decode_step


def ceilings(card: Any, found: Findings) -> None:
    """What memory and matrix units give here."""
    size = 4 << 30
    programs = 132 * 4
    spec = KernelSpec(
        read, {"source": "*fp32", "out": "*fp32"},
        {"COUNT": size // 4, "SIZE": 4096, "PROGRAMS": programs}, 8, 4,
    )  # fmt: skip
    reader = card.kernel(spec)
    if not card.is_real:
        return
    device = card.device
    one, other, out = (device.allocate(n) for n in (size, size, 4 * programs))
    copy = card.milliseconds(lambda: device.copy(one.address, other.address, size, card.stream))
    launch = reader.bind((programs,), one.address, out.address)
    reading = card.milliseconds(lambda: launch(card.stream))
    for memory in (one, other, out):
        memory.close()
    found["copy_gb_s"] = round(2 * size / copy / 1e6)
    found["read_gb_s"] = round(size / reading / 1e6)
    print(f"copy {found['copy_gb_s']} GB/s, read {found['read_gb_s']} GB/s", flush=True)
    found["matrix_tflops"] = _library_tflops()
    print(f"matrix peak {found['matrix_tflops']} TFLOP/s (library, 8192^3)", flush=True)


def _library_tflops() -> float | None:
    """Return what a vendor's library reaches, where one is installed: a ceiling to compare with."""
    try:
        import torch
    except ImportError:
        return None
    size = 8192
    x = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    y = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        x @ y
    torch.cuda.synchronize()
    begun = time.monotonic()
    for _ in range(10):
        x @ y
    torch.cuda.synchronize()
    return float(round(2 * size**3 * 10 / (time.monotonic() - begun) / 1e12))


def launch_cost(card: Any, found: Findings) -> None:
    """Host time of one launch by ctypes, and by NVIDIA's own bindings where they are installed."""
    model = Model.of(card)
    fixed = decode_step(card, model, 1, CONTEXT, AttentionShape())
    if card.is_real:
        fixed.launch()
        card.device.synchronize(card.stream)
        begun = time.perf_counter()
        for _ in range(3):
            fixed.launch()
        spent = (time.perf_counter() - begun) / (3 * len(fixed.launches))
        card.device.synchronize(card.stream)
        found["launch_us"] = round(1e6 * spent, 2)
        fixed.capture()
        begun = time.perf_counter()
        for _ in range(20):
            fixed.run()
        found["graph_launch_us"] = round(1e6 * (time.perf_counter() - begun) / 20, 1)
        card.device.synchronize(card.stream)
        try:
            from cuda.bindings import driver

            stream = driver.CUstream(card.stream)
            event = driver.cuEventCreate(0)[1]
            begun = time.perf_counter()
            for _ in range(1000):
                driver.cuEventRecord(event, stream)
            found["bindings_record_us"] = round(1e3 * (time.perf_counter() - begun), 2)
        except ImportError as error:
            found["bindings_record_us"] = str(error)
        own = card.device.event()
        begun = time.perf_counter()
        for _ in range(1000):
            own.record(card.stream)
        found["ctypes_record_us"] = round(1e3 * (time.perf_counter() - begun), 2)
        print({key: found[key] for key in found if key.endswith("_us")}, flush=True)
    fixed.close()
