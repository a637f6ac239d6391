"""Arrays on the card that the interpreter plays."""

from __future__ import annotations

from tests.gpu_kernels.interpreted import InterpretedDevice  # isort: skip
import numpy as np


def upload(device: InterpretedDevice, values: np.ndarray) -> int:
    memory = device.allocate(values.nbytes)
    device.upload(memory.address, np.ascontiguousarray(values).tobytes())
    return memory.address
