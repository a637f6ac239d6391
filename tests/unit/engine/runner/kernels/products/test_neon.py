"""Products of int8 rows on AArch64: compiled here, and run where QEMU and a compiler are."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from engine.runner.kernels.products.byte_rows import RECORD_BYTES
from engine.runner.kernels.products.group_layout import CODES, LAYOUTS
from engine.runner.kernels.vector_ir import LANES
from tests.support.models.byte_kernels import KINDS
from tests.support.models.packing import GROUPED_FORMATS, normal, packed, stored
from tests.unit.engine.runner.kernels.products.aarch64 import compiled, kernel_name
from tests.unit.engine.runner.kernels.products.byte_reference import (
    in_int8,
    wanted_product,
)

ROW_COUNTS = (1, 2, 3)
"""As many as there are products for without AVX-512."""
NUM_OUTPUTS = 48
COMPILER = shutil.which("aarch64-linux-gnu-gcc")
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


@pytest.mark.parametrize("is_fine", KINDS)
@pytest.mark.parametrize("name", GROUPED_FORMATS)
def test_four_bytes_of_a_lane_are_one_instruction(name: str, is_fine: bool) -> None:
    """A group of a row has 8 vectors of 16 lanes, of which an instruction takes 4."""
    assembly, _ = compiled([name], ROW_COUNTS, is_fine=is_fine)
    for num_rows in ROW_COUNTS:
        kernel = kernel_name(name, num_rows)
        body = assembly.split(f"\n{kernel}:", 1)[1].split(f".size\t{kernel}", 1)[0]
        assert len(re.findall(r"\tsdot\t", body)) == 32 * num_rows
        assert not re.search(r"\t[su]mull?\t", body)


@pytest.mark.parametrize("name", GROUPED_FORMATS)
def test_other_products_have_no_such_instruction(name: str) -> None:
    assert "sdot" not in compiled([name], (1,), "plain")[0]


HARNESS = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
typedef void kernel(int64_t, int64_t, int64_t, int64_t, int64_t);
extern kernel {names};
static kernel *kernels[] = {{ {names} }};
int main(void) {{
    int64_t head[6];
    while (fread(head, 8, 6, stdin) == 6) {{
        char *rows = malloc(head[2]), *panels = aligned_alloc(64, head[3]);
        float *sums = malloc(head[1] * 64);
        if (fread(rows, 1, head[2], stdin) != head[2]) return 1;
        if (fread(panels, 1, head[3], stdin) != head[3]) return 2;
        for (int64_t at = 0; at + head[4] <= head[3]; at += head[4]) {{
            int64_t panel = (int64_t)(panels + at);
            kernels[head[0]]((int64_t)rows, panel, head[5], (int64_t)sums, panel);
            fwrite(sums, 64, head[1], stdout);
        }}
    }}
    return 0;
}}
"""
"""Takes kernel, rows, their bytes, those of all panels and of one, and `depth`; then the bytes."""


@pytest.mark.skipif(
    COMPILER is None or QEMU is None, reason="aarch64-linux-gnu-gcc or qemu-aarch64 is missing"
)
@pytest.mark.parametrize("is_fine", KINDS)
def test_products_have_the_bits_of_the_reference(tmp_path: Path, is_fine: bool) -> None:
    _, linked = compiled(GROUPED_FORMATS, ROW_COUNTS, is_fine=is_fine)
    names = [kernel_name(name, rows) for name in GROUPED_FORMATS for rows in ROW_COUNTS]
    (tmp_path / "kernels.o").write_bytes(linked)
    (tmp_path / "main.c").write_text(HARNESS.format(names=", ".join(names)))
    subprocess.run(
        [str(COMPILER), "-static", "-o", "main", "main.c", "kernels.o"], cwd=tmp_path, check=True
    )
    sent, wanted = b"", []
    for name in GROUPED_FORMATS:
        depth = 768 if name.endswith("K") else 96
        x, tensor = normal(max(ROW_COUNTS), depth, seed=1), stored(name, NUM_OUTPUTS, depth)
        x[1, :32] *= 1e4
        data = packed(tensor, with_bytes=True).data
        records = in_int8(x, is_fine=is_fine)
        product = wanted_product(name, x, NUM_OUTPUTS, is_fine=is_fine)
        panel_bytes = LAYOUTS[CODES[name]].panel_bytes(depth)
        for num_rows in ROW_COUNTS:
            rows = records[:num_rows].tobytes()
            assert len(rows) == num_rows * depth // 32 * RECORD_BYTES
            number = names.index(kernel_name(name, num_rows))
            head = [number, num_rows, len(rows), data.nbytes, panel_bytes, depth]
            sent += np.array(head, np.int64).tobytes() + rows + data.tobytes()
            panels = product[:num_rows].reshape(num_rows, -1, LANES)
            wanted.append(np.ascontiguousarray(panels.swapaxes(0, 1)).ravel())
    done = subprocess.run(
        [str(QEMU), "-cpu", "max", str(tmp_path / "main")],
        input=sent, capture_output=True, check=True, timeout=100,
    )  # fmt: skip
    found = np.frombuffer(done.stdout, np.float32)
    np.testing.assert_array_equal(found, np.concatenate(wanted))
