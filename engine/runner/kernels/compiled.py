"""Kernels that are compiled by themselves and called through their addresses.

A format's kernels are chosen at run time, weight by weight, so the code around them is compiled
once for all formats, and of the formats only those that a model has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic

from engine.runner.kernels.vector_ir import INT64

NUM_ARGUMENTS = 8
SIGNATURE = types.void(*[types.int64] * NUM_ARGUMENTS)
"""Arguments of kernels that are called so: addresses and counts, 0 for what one does not need."""


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


def own_function(module: Any, name: str, num_args: int, emit: Any) -> Any:
    """Return a function of integers that is never inlined; `emit(builder, args)` is its body.

    Its loop then has all registers, whatever the code around the call needs.
    """
    kind = ir.FunctionType(ir.VoidType(), [INT64] * num_args)
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    emit(builder, function.args)
    builder.ret_void()
    return function


def switch_rows(
    builder: Any, rows: Any, choices: Sequence[int], args: Sequence[Any], make: Any
) -> None:
    """Emit a call of `make(num_rows)`'s function with `args`; `rows` is one of `choices`."""
    done = builder.append_basic_block("done")
    cases = [builder.append_basic_block(f"rows_{n}") for n in choices]
    switch = builder.switch(rows, cases[0])
    for num_rows, case in zip(choices, cases, strict=True):
        switch.add_case(INT64(num_rows), case)
        builder.position_at_end(case)
        builder.call(make(num_rows), args)
        builder.branch(done)
    builder.position_at_end(done)


_kept: list[Any] = []


def compiled_address(kernel: Any, form: str) -> int:
    """Return the address of a kernel with `SIGNATURE`, which is compiled now or loaded.

    It lives as long as the process. `form` names what a function was made for. Every form has files
    of its own in the cache: numba numbers those of one function, and two processes that add a form
    each at the same moment may use one number. Then one form would be loaded as the other.
    """
    kernel.__qualname__ += f"_{form}"
    compiled = cfunc(SIGNATURE, cache=True)(kernel)
    _kept.append(compiled)
    return int(compiled.address)
