"""What launches and events take the host."""

from __future__ import annotations

import time
from typing import Any

from engine.runner.gpu.launches import AttentionShape
from tests.gpu.stages.model import (
    CONTEXT,
    Findings,
    Model,
)
from tests.gpu.stages.steps import decode_step


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
        found["bindings_record_us"] = _bindings_record_us(card.stream)
        own = card.device.event()
        begun = time.perf_counter()
        for _ in range(1000):
            own.record(card.stream)
        found["ctypes_record_us"] = round(1e3 * (time.perf_counter() - begun), 2)
        print({key: found[key] for key in found if key.endswith("_us")}, flush=True)
    fixed.close()


def _bindings_record_us(stream: int) -> float | str:
    """Return what an event takes by NVIDIA's own bindings, or why that is not known."""
    try:
        from cuda.bindings import driver

        handle, event = driver.CUstream(stream), driver.cuEventCreate(0)[1]
        begun = time.perf_counter()
        for _ in range(1000):
            driver.cuEventRecord(event, handle)
        return round(1e3 * (time.perf_counter() - begun), 2)
    except Exception as error:  # whatever keeps them from loading: they are compared with, only
        return f"{type(error).__name__}: {error}"[:160]
