"""Bytes that four bits stand for, by the instruction that the processor has.

x86 and AArch64 look bytes up in a register of sixteen; elsewhere each byte is compared with every
choice of four bits. All give the same bytes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils

from engine.runner.kernels.products.byte_dot import in_parts
from engine.runner.kernels.vector_ir import INT_VECTOR, LANES

INSTRUCTIONS = {
    "avx512": ("llvm.x86.avx512.pshuf.b.512", 16),
    "avx2": ("llvm.x86.avx2.pshuf.b", 8),
    "neon": ("llvm.aarch64.neon.tbl1.v16i8", 4),
}
"""Their names in LLVM, and the 32-bit lanes of an operand."""
_TABLE_BYTES = 16


def _choose(triple: str) -> str:
    """Return the instruction of a processor; of x86 only the host's features are known."""
    if triple.startswith(("aarch64", "arm64")):
        return "neon"
    features = get_host_cpu_features()
    if triple.startswith("x86_64") and features.get("avx512bw"):
        return "avx512"
    return "avx2" if triple.startswith("x86_64") and features.get("avx2") else "plain"


def emit_lookup(builder: Any, table: tuple[int, ...], numbers: Any, instruction: str = "") -> Any:
    """Emit `table[n]` for every byte n, below 16, of a vector of sixteen 32-bit lanes.

    `instruction` is a key of `INSTRUCTIONS`, or `plain` (empty: the fastest).
    """
    instruction = instruction or _choose(builder.module.triple)
    if instruction == "plain":
        return _compared(builder, table, numbers)
    name, lanes = INSTRUCTIONS[instruction]
    octets = ir.VectorType(ir.IntType(8), 4 * lanes)
    kind = ir.FunctionType(octets, [octets, octets])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    # Each part of 16 bytes is looked up in the same part of the first operand.
    entries = ir.Constant(octets, list(table) * (octets.count // _TABLE_BYTES))

    def look_up(part: Any) -> Any:
        found = builder.call(function, [entries, builder.bitcast(part, octets)])
        return builder.bitcast(found, part.type)

    return in_parts(builder, lanes, [numbers], look_up)


def _compared(builder: Any, table: tuple[int, ...], numbers: Any) -> Any:
    octets = ir.VectorType(ir.IntType(8), 4 * LANES)
    numbers = builder.bitcast(numbers, octets)
    found = ir.Constant(octets, [table[0]] * octets.count)
    for number, entry in enumerate(table[1:], 1):
        is_it = builder.icmp_unsigned("==", numbers, ir.Constant(octets, [number] * octets.count))
        found = builder.select(is_it, ir.Constant(octets, [entry] * octets.count), found)
    return builder.bitcast(found, INT_VECTOR)
