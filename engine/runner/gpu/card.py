"""The card that a node computes on: its driver, its streams, and the kernels loaded onto it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError
from engine.runner.gpu.compiling import compile_together, use_own_cache
from engine.runner.gpu.cuda_driver import LEAST_CAPABILITY, Device, load_driver
from engine.runner.gpu.launcher import BindableKernel, Kernel, KernelSpec


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

    def compile(self, specs: Sequence[KernelSpec]) -> None:
        """Compile kernels at once, so that `kernel` finds them in Triton's cache."""
        compile_together(specs, self.device.properties.capability)


class KernelList:
    """Stands in for `Card.kernel` to collect the kernels that are needed; launches nothing."""

    def __init__(self) -> None:
        self._found: dict[Any, KernelSpec] = {}

    @property
    def specs(self) -> list[KernelSpec]:
        """The kernels so far."""
        return list(self._found.values())

    def kernel(self, spec: KernelSpec) -> BindableKernel:
        self._found[spec.identity] = spec
        return self

    def bind(self, grid: tuple[int, ...], *arguments: Any) -> Callable[[int], None]:
        return lambda stream: None


def open_card(ordinal: int = 0) -> Card:
    """Open a card; `ConfigError` where there is none, or one that is too old."""
    use_own_cache()
    device = Device(load_driver(), ordinal)
    found = device.properties
    if found.capability < LEAST_CAPABILITY:
        device.close()
        raise ConfigError(
            f"card {ordinal} is {found.name}, compute capability {found.capability / 10}: wanted "
            f"at least {LEAST_CAPABILITY / 10}, or attention_backend numba"
        )
    return Card(device, device.stream(), {})
