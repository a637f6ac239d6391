"""Products of int8 rows compiled for another processor, AArch64, to look at or to run in QEMU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import llvmlite.binding as llvm
from llvmlite import ir

from engine.runner.kernels.compiled import own_function
from engine.runner.kernels.products import byte_product
from engine.runner.kernels.products.group_layout import CODES, LAYOUTS

TRIPLE = "aarch64-unknown-linux-gnu"
NUM_ARGUMENTS = 5
"""The address of the rows' records, of a panel, `depth`, those of the sums and of a prefetch."""


@contextmanager
def _without_wide_registers() -> Iterator[None]:
    """Emit what is emitted on a processor without AVX-512."""
    with mock.patch.object(byte_product, "_ROWS_TOGETHER", 1):
        yield


def kernel_name(format_name: str, num_rows: int) -> str:
    return f"bytes_{num_rows}_rows_{format_name}"


def compiled(
    format_names: Sequence[str],
    row_counts: Sequence[int],
    instruction: str = "neon",
    *,
    is_fine: bool = False,
) -> tuple[str, bytes]:
    """Return the verified kernels of these formats and numbers of rows: assembly, and an object."""
    module = ir.Module("aarch64")
    module.triple = TRIPLE
    with _without_wide_registers():
        for name in format_names:
            layout = LAYOUTS[CODES[name]]
            for num_rows in row_counts:
                function = own_function(
                    module,
                    kernel_name(name, num_rows),
                    NUM_ARGUMENTS,
                    lambda builder, args, layout=layout, num_rows=num_rows: (
                        byte_product.emit_product(
                            builder, layout, instruction, num_rows, is_fine, args
                        )
                    ),
                )
                function.linkage = ""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(TRIPLE).create_target_machine(
        features="+neon,+dotprod", opt=3, reloc="pic", codemodel="small"
    )
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    return machine.emit_assembly(parsed), machine.emit_object(parsed)
