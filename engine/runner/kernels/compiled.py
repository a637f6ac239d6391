"""Kernels that are compiled by themselves and called through their addresses.

A format's kernels are chosen at run time, weight by weight, so the code around them is compiled
once for all formats, and of the formats only those that a model has.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.runner.kernels.vector_ir import INT64

NUM_ARGUMENTS = 8
SIGNATURE = types.void(*[types.int64] * NUM_ARGUMENTS)
"""Of all kernels that are called so: addresses and counts, 0 for what a kernel does not need."""


@intrinsic
def call_at(
    typing: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any
) -> Any:
    """Call the kernel at address `function` with eight integers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [INT64] * NUM_ARGUMENTS)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * (NUM_ARGUMENTS + 1)), codegen


_kept: list[Any] = []


def address_of(kernel: Any) -> int:
    """Return the address of a `cfunc` that lives as long as the process."""
    _kept.append(kernel)
    return int(kernel.address)
