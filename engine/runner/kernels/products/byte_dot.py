"""Integer dot products of four bytes in every 32-bit lane, by the instruction the processor has.

The first operand is four unsigned bytes of a weight, the second four signed bytes of a row. All
instructions give the same integers. Unsigned bytes of 8 bits would exceed what `vpmaddubsw` and
`sdot` can do, so there they are made signed first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name, get_process_triple
from numba.core import cgutils

from engine.runner.kernels.vector_ir import LANES, int_constant

_LARGEST_BYTE, _LARGEST_SHORT = 127, 32767
INSTRUCTIONS = ("vnni512", "vnni256", "avx2", "neon", "plain")


def available(root: Path = Path("/")) -> tuple[str, ...]:
    """Return those of `INSTRUCTIONS` that this processor has, the fastest first.

    The kernel's files are read below `root`.
    """
    features = get_host_cpu_features()
    found = []
    if features.get("avx512vnni") and features.get("avx512f"):
        found.append("vnni512")
    if features.get("avxvnni") or (features.get("avx512vnni") and features.get("avx512vl")):
        found.append("vnni256")
    if features.get("avx2"):
        found.append("avx2")
    is_arm = get_process_triple().startswith(("aarch64", "arm64"))
    if is_arm and (features.get("dotprod") or _has_dotprod_on_linux(root)):
        found.append("neon")
    return (*found, "plain")


def _has_dotprod_on_linux(root: Path) -> bool:
    """Return whether the kernel lists the instruction and LLVM has it for this processor.

    LLVM does not list it among the features of a Linux host, and emits it by the processor's name.
    """
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    listed = [line.partition(":")[2].split() for line in lines if line.startswith("Features")]
    is_listed = bool(listed) and all("asimddp" in names for names in listed)
    return is_listed and get_host_cpu_name() != "generic"


def _vector(bits: int, lanes: int) -> Any:
    return ir.VectorType(ir.IntType(bits), lanes)


def _function(builder: Any, name: str, result: Any, parameters: list[Any]) -> Any:
    kind = ir.FunctionType(result, parameters)
    return cgutils.get_or_insert_function(builder.module, kind, name)


def in_parts(builder: Any, lanes: int, operands: list[Any], combine: Any) -> Any:
    """Emit `combine` on parts of the operands with this many lanes; return the joined result."""
    results = []
    for first in range(0, LANES, lanes):
        chosen = ir.Constant(_vector(32, lanes), list(range(first, first + lanes)))
        results.append(combine(*[builder.shuffle_vector(x, x, chosen) for x in operands]))
    while len(results) > 1:
        joined = []
        for low, high in zip(results[::2], results[1::2], strict=True):
            size = 2 * low.type.count
            chosen = ir.Constant(_vector(32, size), list(range(size)))
            joined.append(builder.shuffle_vector(low, high, chosen))
        results = joined
    return results[0]


def _vnni(builder: Any, lanes: int, total: Any, weights: Any, row: Any) -> Any:
    kind = _vector(32, lanes)
    name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
    return builder.call(_function(builder, name, kind, [kind] * 3), [total, weights, row])


def _avx2(builder: Any, is_signed: bool, total: Any, *operands: Any) -> Any:
    """Emit the products of several vectors of weights with as many of rows, in this order."""
    octets, shorts, lanes = _vector(8, 32), _vector(16, 16), _vector(32, 8)
    signs = _function(builder, "llvm.x86.avx2.psign.b", octets, [octets, octets])
    multiply = _function(builder, "llvm.x86.avx2.pmadd.ub.sw", shorts, [octets, octets])
    add = _function(builder, "llvm.x86.avx2.pmadd.wd", lanes, [shorts, shorts])
    operands = tuple(builder.bitcast(one, octets) for one in operands)
    half, pairs = len(operands) // 2, None
    for weights, row in zip(operands[:half], operands[half:], strict=True):
        if is_signed:  # |weight| · (row with the weight's sign): a sum of two is below 2^15
            row, weights = (
                builder.call(signs, [row, weights]),
                builder.call(signs, [weights, weights]),
            )
        products = builder.call(multiply, [weights, row])
        pairs = products if pairs is None else builder.add(pairs, products)
    return builder.add(total, builder.call(add, [pairs, ir.Constant(shorts, [1] * 16)]))


def _neon(builder: Any, total: Any, weights: Any, row: Any) -> Any:
    octets, lanes = _vector(8, 16), _vector(32, 4)
    operands = [total, builder.bitcast(weights, octets), builder.bitcast(row, octets)]
    name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
    return builder.call(_function(builder, name, lanes, [lanes, octets, octets]), operands)


def _plain(builder: Any, is_signed: bool, total: Any, weights: Any, row: Any) -> Any:
    for byte in range(4):
        up, down = int_constant(24 - 8 * byte), int_constant(24)
        shift = builder.ashr if is_signed else builder.lshr
        weight = shift(builder.shl(weights, up), down)
        value = builder.ashr(builder.shl(row, up), down)
        total = builder.add(total, builder.mul(weight, value))
    return total


def makes_signed(instruction: str, offset: int) -> bool:
    """Return whether `emit_dot` multiplies signed weights, whose sums need no offset removed."""
    return offset == 128 and not instruction.startswith("vnni")


def emit_signed(builder: Any, weights: Any) -> Any:
    """Emit bytes of weights less 128, as signed bytes."""
    return builder.xor(weights, int_constant(-0x7F7F7F80))


def vectors_together(instruction: str, largest: int) -> int:
    """Return how many vectors of weights at most `emit_dot` takes at a time.

    AVX2 adds products of two bytes in 16 bits, and for small weights those of several vectors.
    """
    return max(1, _LARGEST_SHORT // (2 * _LARGEST_BYTE * largest)) if instruction == "avx2" else 1


def emit_dot(
    builder: Any, instruction: str, total: Any, weights: list[Any], rows: list[Any], *,
    is_signed: bool,
) -> Any:  # fmt: skip
    """Emit `total + Σ weights · rows` over the four bytes of every lane, and over the vectors.

    There are at most `vectors_together` of each.
    """
    operands = [total, *weights, *rows]
    if instruction == "vnni512":
        return _vnni(builder, LANES, *operands)
    if instruction == "vnni256":
        return in_parts(builder, 8, operands, lambda *part: _vnni(builder, 8, *part))
    if instruction == "avx2":
        return in_parts(builder, 8, operands, lambda *part: _avx2(builder, is_signed, *part))
    if instruction == "neon":
        return in_parts(builder, 4, operands, lambda *part: _neon(builder, *part))
    return _plain(builder, is_signed, *operands)
