"""Every shipped kernel compiled for three generations of cards: registers, spills, instructions.

Of the cards beside those, the largest tiles for 12.0 are, which cards of 8.6 and 8.9 have too;
`python -m tests.gpu_kernels.compiled` compiles every kernel for all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels import interpreted  # noqa: F401 # isort: skip

from tests.gpu.measuring import SHARED_BYTES, SpecRecorder
from tests.gpu.stages.model import Model
from tests.gpu_kernels.compiled import taken_late, unwaited

ROOT = Path(__file__).resolve().parents[2]
WHOLE, LARGEST = (80, 90, 100), (120,)
WIDE = {90: "wgmma", 100: "tcgen05"}
"""The instructions of large tiles, where they are no `mma.sync`."""
TENSOR_COLUMNS = 512
"""Columns in the memory of matrix instructions on compute capability 10.0."""
MATRIX_KERNELS = {
    "product", "gate_up_product", "described_product", "described_gate_up", "attend_pieces",
    "attend_chunk", "ranges_together", "ranges_in_turn", "grouped_gate_up", "grouped_product",
    "grouped_ranges",
}  # fmt: skip
# On sm_80 and sm_120 a chunk's attention keeps some registers in memory before and after its
# loop over keys, and on sm_100 that of heads of 256 numbers.
# The gate and up of many rows in fp8 keep three on sm_80, whatever the tile.
# Random weights are made once, at the start.
# On sm_100 two tiles of 4 bits with 32 outputs keep four, and one of 8 bits does on sm_120.
MAY_SPILL = {
    ("attend_chunk", 80),
    ("attend_chunk", 120),
    ("attend_chunk", 100),
    ("ranges_in_turn", 80),
    ("ranges_in_turn", 120),
    ("ranges_together", 100),
} | {("fill_normal", capability) for capability in WHOLE}


@pytest.fixture(scope="module", params=[*WHOLE, *LARGEST])
def kernels(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The kernels as one kind of card would get them, compiled without Triton's interpreter."""
    without_interpreter = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu_kernels.compiled", str(request.param),
         *(["--largest"] if request.param in LARGEST else [])],
        cwd=ROOT, env=without_interpreter, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"kernel"')]
    return [json.loads(line) for line in lines]


@pytest.mark.timeout(700)
def test_no_kernel_spills_or_takes_too_much(kernels: list[dict[str, Any]]) -> None:
    capability = kernels[0]["capability"]
    assert {row["kernel"] for row in kernels} >= MATRIX_KERNELS - (
        set() if capability in WIDE else {"described_product", "described_gate_up"}
    )
    assert all(row["registers"] for row in kernels)
    spilling = {row["kernel"] for row in kernels if row["spills"]}
    assert spilling <= {name for name, where in MAY_SPILL if where == capability}
    assert max(row["registers"] for row in kernels) <= 255
    assert max(row["shared_bytes"] for row in kernels) <= SHARED_BYTES[capability]
    assert max(row["tensor_columns"] for row in kernels) <= TENSOR_COLUMNS
    assert not any(row["scratch_bytes"] for row in kernels), "a launch gives none"

    assert not any(row["unwaited"] for row in kernels), "before the wait for the kernel before"
    assert not any(row["taken_late"] for row in kernels), "when the next kernel may have started"

    for row in kernels:
        compiled, launched = row["parameters"]
        assert compiled == launched, row
        if row["kernel"] not in MATRIX_KERNELS:
            continue
        assert row["matrix"], row
        assert row["wide_loads"], row
        constants = row["constants"]
        is_product = row["kernel"] not in {"attend_pieces", "attend_chunk"}
        # Another width gives an instruction other inputs, and sums of it other bits.
        assert row["k_widths"] in ([], ["2"]), row
        is_together = row["kernel"] == "ranges_together" or constants.get("IS_TOGETHER")
        is_large = is_product and not is_together
        if is_large and constants["BN"] >= 64:
            assert row["matrix"] == [WIDE.get(capability, "mma.sync")], row


def test_what_stands_before_a_wait_and_behind_a_start_is_found() -> None:
    operations = [
        "LDC",
        "CCTL.E.PF2",
        "UTCATOMSWS.FIND_AND_SET.ALIGN",
        "PREEXIT",
        "ACQBULK",
        "LDG.E",
    ]
    assert unwaited(operations) == taken_late(operations) == []
    assert unwaited(["LDG.E.128", *operations]) == ["LDG.E.128"]
    assert unwaited(["LDC", "LDS", "UTMALDG.2D", "STG.E"]) == ["UTMALDG.2D", "STG.E"]
    assert taken_late([*operations, operations[2]]) == [operations[2]]


@pytest.mark.parametrize(
    ("head_dim", "has_scales", "most"),
    [(64, False, 64), (128, False, 64), (256, False, 32), (128, True, 32), (256, True, 16)],
)
def test_tiles_of_drafts_are_as_large_as_fits_into_a_card(
    head_dim: int, has_scales: bool, most: int
) -> None:
    """A larger one was compiled too: it spilled, or took 258 KiB of shared memory."""
    recorder = SpecRecorder()
    model = Model.of(recorder)
    model.pool = replace(model.pool, has_scales=has_scales)
    make = model.launches(recorder)
    make.spec = replace(make.spec, head_dim=head_dim)
    attention = make.attention
    taken = [attention.attention_rows(n) for n in range(1, 40) if attention.can_attend(n)]
    assert max(taken) == most
