"""From a Triton function to a launch: compiled in this process, launched through the driver.

Triton compiles for a target that is named, so neither a card nor a framework is asked, and the
result is kept in Triton's own cache folder. A compiled kernel's parameters are those of its
signature without the constants, followed by two addresses of scratch memory, which these kernels
do not use.

Two kernels that have to agree in their bits must not differ in which products and sums the compiler
fuses: fusing is off (`enable_fp_fusion`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from common.errors import ConfigError
from engine.runner.gpu.cuda_driver import Device, Launch
from engine.runner.gpu.tensor_map import MatrixView, encode_tensor_map

_WARP = 32
ADDRESS_ALIGNMENT = 16
"""Bytes of which every address is a multiple; kernels are compiled for that."""
_CTYPES = {
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "fp32": ctypes.c_float,
}


@dataclass(frozen=True)
class KernelSpec:
    """One configuration of a kernel.

    `types` gives each argument's type in Triton's notation ("*bf16", "i32", or
    "tensordesc<bf16[16,64]>" for a `MatrixView`); `constants` are the compile-time arguments.
    Addresses are multiples of `ADDRESS_ALIGNMENT`. `options` are Triton's own, such as `maxnreg`.
    """

    function: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    is_programmatic: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> tuple[Any, ...]:
        """A key that is equal for equal configurations."""
        parts = (self.types, self.constants, self.options)
        return (
            self.function.__name__, *(tuple(part.items()) for part in parts), self.num_warps,
            self.num_stages, self.is_programmatic,
        )  # fmt: skip

    @property
    def arguments(self) -> list[tuple[str, str]]:
        """The name and the type of each argument of a launch, in order."""
        names = self.function.arg_names
        return [(name, self.types[name]) for name in names if name not in self.constants]

    def compile(self, capability: int) -> Any:
        """Return Triton's compiled kernel for a compute capability such as 90."""
        names = self.function.arg_names
        signature = {
            name: "constexpr" if name in self.constants else self.types[name] for name in names
        }
        attributes = {
            (place,): [["tt.divisibility", ADDRESS_ALIGNMENT]]
            for place, name in enumerate(names)
            if name not in self.constants and self.types[name].startswith("*")
        }
        source = ASTSource(
            fn=self.function, signature=signature, constexprs=dict(self.constants), attrs=attributes
        )
        options = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": False,
            "launch_pdl": self.is_programmatic,
            **self.options,
        }
        return triton.compile(source, target=GPUTarget("cuda", capability, _WARP), options=options)


def checked_address(name: str, address: int) -> int:
    """Return the address of an argument; `ValueError` unless it is aligned.

    At another one the first wide load would fail, and with it the context.
    """
    if address % ADDRESS_ALIGNMENT:
        raise ValueError(f"{name} is at {address:#x}: wanted a multiple of {ADDRESS_ALIGNMENT}")
    return address


def optional(name: str, address: int) -> tuple[dict[str, None], tuple[int, ...]]:
    """Return the constants and the arguments by which a kernel is told of what it may be without.

    An address of 0 makes another kernel, which has no such parameter.
    """
    return ({}, (address,)) if address else ({name: None}, ())


class BindableKernel(Protocol):
    """A compiled kernel, to which a grid and arguments can be bound."""

    def bind(self, grid: tuple[int, ...], *arguments: float | MatrixView) -> Callable[[int], None]:
        """Return a function that launches it on a stream."""


class Kernel:
    """A compiled kernel on one card."""

    def __init__(self, device: Device, spec: KernelSpec) -> None:
        """Raise `ConfigError` where the card has too little shared memory for it, or is of a kind
        that Triton does not know."""
        card = device.properties
        try:
            compiled = spec.compile(card.capability)
        except Exception as error:  # Triton and its assembler have many kinds
            raise ConfigError(
                f"{spec.function.__name__} does not compile for {card.name}, compute capability "
                f"{card.capability / 10}, with Triton {triton.__version__}: wanted "
                f"attention_backend numba: {type(error).__name__}: {str(error)[-300:]}"
            ) from error
        self._device, self._spec = device, spec
        self._shared = int(compiled.metadata.shared)
        if self._shared > card.shared_bytes:
            raise ConfigError(
                f"{compiled.metadata.name} takes {self._shared >> 10} KiB of shared memory, and "
                f"{card.name} has {card.shared_bytes >> 10}: wanted attention_backend numba"
            )
        self._threads = _WARP * int(compiled.metadata.num_warps)
        self._function = device.load_function(
            compiled.asm["cubin"], compiled.metadata.name, self._shared
        )
        self._arguments = spec.arguments
        self._maps = list(getattr(compiled.metadata, "tensordesc_meta", None) or ())

    def bind(self, grid: tuple[int, ...], *arguments: float | MatrixView) -> Launch:
        """Return a launch of this grid; arguments in the function's order, addresses as integers.

        Raises `ValueError` for a wrong number of arguments, and as `checked_address` does.
        """
        values: list[Any] = []
        maps = iter(self._maps)
        for (name, kind), value in zip(self._arguments, arguments, strict=True):
            if isinstance(value, MatrixView):
                values += encode_tensor_map(self._device, value, next(maps))
            elif kind.startswith("*"):
                values.append(ctypes.c_uint64(checked_address(name, int(value))))
            else:
                values.append(_CTYPES[kind](value))  # type: ignore[arg-type]
        scratch = [ctypes.c_uint64(0), ctypes.c_uint64(0)]
        x, y, z = (*grid, 1, 1)[:3]
        return Launch(
            self._device, self._function, (x, y, z), self._threads, self._shared, values + scratch,
            is_programmatic=self._spec.is_programmatic,
        )  # fmt: skip
