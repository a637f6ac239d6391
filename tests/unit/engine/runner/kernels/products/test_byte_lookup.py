"""Bytes that four bits stand for: the same by every way, by one instruction where there is one."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.extending import intrinsic

from engine.runner.kernels.products.byte_lookup import emit_lookup
from engine.runner.kernels.vector_ir import INT_VECTOR, vector_at

TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 255, 200, 128, 127, 17, 29, 31, 77)


def looked_up(numbers: np.ndarray, instruction: str) -> np.ndarray:
    @intrinsic
    def look_up(typing: Any, source: Any, target: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, target = (vector_at(builder, at, INT_VECTOR) for at in args)
            found = emit_lookup(builder, TABLE, builder.load(source, align=1), instruction)
            builder.store(found, target, align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    @njit
    def run(source: int, target: int) -> None:
        look_up(source, target)

    out = np.zeros(64, np.uint8)
    run(numbers.ctypes.data, out.ctypes.data)
    return out


def test_every_way_that_this_processor_has_gives_the_same_bytes() -> None:
    numbers = np.random.RandomState(1).permutation(np.arange(64, dtype=np.uint8) % 16)
    wanted = np.array(TABLE, np.uint8)[numbers]
    has_avx2 = ["avx2"] if get_host_cpu_features().get("avx2") else []
    for instruction in ("", "plain", *has_avx2):
        np.testing.assert_array_equal(looked_up(numbers, instruction), wanted, instruction)


@pytest.mark.parametrize(
    ("instruction", "triple", "features", "wanted"),
    [
        ("avx512", "x86_64-unknown-linux-gnu", "+avx512f,+avx512bw", ("vpshufb\t", "%zmm", 1)),
        ("avx2", "x86_64-unknown-linux-gnu", "+avx2", ("vpshufb\t", "%ymm", 2)),
        ("", "aarch64-unknown-linux-gnu", "+neon", ("tbl\t", ".16b", 4)),
    ],
)
def test_a_vector_takes_few_instructions(
    instruction: str, triple: str, features: str, wanted: tuple[str, str, int]
) -> None:
    """Compiled for these processors; of AVX-512 and NEON nothing is run here."""
    module = ir.Module("one")
    module.triple = triple
    pointer = INT_VECTOR.as_pointer()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer, pointer]), "one")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    source, target = function.args
    found = emit_lookup(builder, TABLE, builder.load(source, align=4), instruction)
    builder.store(found, target, align=4)
    builder.ret_void()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(features=features, opt=3)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    name, register, count = wanted
    lines = machine.emit_assembly(parsed).splitlines()
    assert len([one for one in lines if name in one and register in one]) == count
