"""The card that a node computes on: its driver, its streams, and the kernels loaded onto it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError
from engine.runner.gpu.cuda_driver import Device, load_driver
from engine.runner.gpu.launcher import BindableKernel, Kernel, KernelSpec

LEAST_CAPABILITY = 80
"""The first compute capability with matrix instructions in bfloat16: 8.0."""


@dataclass(slots=True)
class Card:
    """A device with the stream of its steps; equal kernels are compiled and loaded once."""

    device: Device
    stream: int
    kernels: dict[Any, BindableKernel]

    def kernel(self, spec: KernelSpec) -> BindableKernel:
        """Return a kernel, compiled unless Triton's cache has it."""
        key = spec.identity
        if key not in self.kernels:
            self.kernels[key] = Kernel(self.device, spec)
        return self.kernels[key]


def open_card(ordinal: int = 0) -> Card:
    """Open a card; `ConfigError` where there is none, or one that is too old."""
    device = Device(load_driver(), ordinal)
    found = device.properties
    if found.capability < LEAST_CAPABILITY:
        device.close()
        raise ConfigError(
            f"card {ordinal} is {found.name}, compute capability {found.capability / 10}: wanted "
            f"at least {LEAST_CAPABILITY / 10}, or attention_backend numba"
        )
    return Card(device, device.stream(), {})
