"""What the shipped kernels compile to: `python -m tests.gpu_kernels.compiled [CAPABILITY…]`.

Prints one JSON line a kernel: registers, spills (loads and stores of local memory in the machine
code), shared memory, the matrix instruction, and how wide global memory is read. No card is needed;
the disassembler is part of the package triton.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import triton

from engine.runner.gpu.launcher import KernelSpec
from engine.runner.gpu.launches import AttentionShape, PieceList, chunk_rows
from engine.runner.gpu.weights import Form
from tests.gpu.measuring import SpecRecorder
from tests.gpu.stages.draws import draws
from tests.gpu.stages.model import BLOCK, Findings, Model
from tests.gpu.stages.products import products
from tests.gpu.stages.sharing import ipc
from tests.gpu.stages.steps import prefill, step

_TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_OPERATION = re.compile(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)", re.MULTILINE)
_K_WIDTH = re.compile(r"dot_op<\{.*?kWidth = (\d+)")
_MATRIX = re.compile(r"(wgmma|mma\.sync|tcgen05)(?:\.mma|\.aligned)")


def shipped(capability: int) -> list[KernelSpec]:
    """Return every kernel that an 8B model's steps launch on such a card."""
    recorder = SpecRecorder(capability)
    for stage in (products, step, prefill, ipc, draws):
        stage(recorder, Findings())
    _launch_quantised(recorder)
    _launch_over_bytes(recorder)
    _launch_of_heads(recorder)
    return recorder.specs


def shape_of(recorder: SpecRecorder, head_dim: int, *, has_scales: bool) -> AttentionShape:
    """Return attention as a node on such a card divides it."""
    shared = recorder.device.properties.shared_bytes
    return AttentionShape(chunk_rows=chunk_rows(head_dim, BLOCK, shared, has_scales=has_scales))


def _launch_over_bytes(recorder: SpecRecorder) -> None:
    """Launch what reads and writes a cache in int8."""
    model = Model.of(recorder)
    model.pool = replace(model.pool, has_scales=True)
    make = model.launches(recorder, shape_of(recorder, 128, has_scales=True))
    pieces = PieceList(0, 0, 0, 0, 0)
    for count in (1, 32):
        make.attend_pieces(0, 0, 0, pieces, (0, 0), 0, count, 1)
    make.attend_chunk(0, 0, 0, 1, (0, 0), (0, 0, 0), 0, 1)
    make.rotate(0, 0, 0, 0, 0, 1)


def _launch_of_heads(recorder: SpecRecorder) -> None:
    """Launch attention of chunks, and of the most drafts that such heads have graphs for."""
    model = Model.of(recorder)
    for head_dim, has_scales in product((128, 256), (False, True)):
        model.pool = replace(model.pool, has_scales=has_scales)
        make = model.launches(recorder, shape_of(recorder, head_dim, has_scales=has_scales))
        make.spec = replace(make.spec, head_dim=head_dim)
        make.attend_chunk(0, 0, 0, 1, (0, 0), (0, 0, 0), 0, 1)
        most = max(filter(make.can_attend, (4, 8, 16)))
        for count in (1, 32):
            make.attend_pieces(0, 0, 0, PieceList(0, 0, 0, 0, 0), (0, 0), 0, count, most)


def _launch_quantised(recorder: SpecRecorder) -> None:
    """Launch every product of quantised weights, of a step and of a prompt."""
    model = Model.of(recorder)
    for form in (Form.FP8, Form.INT4, Form.Q4_0, Form.Q8_0):
        make = model.launches(recorder, form=form)
        layer = make.weights.layers[0]
        for rows in (1, 16, 32, 64, 4096):
            for matrix in (layer.qkv, layer.output, layer.down):
                make.product(0, matrix, 0, rows, residual=matrix.num_outputs == 4096)
            make.gate_up(0, layer.gate_up, 0, rows)


def _disassembled(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [_TOOL, option, file.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout


_tasks: list[tuple[int, KernelSpec]] = []
"""What is compiled; processes that are forked inherit it."""


def describe(place: int) -> dict[str, Any]:
    """Compile a kernel of `_tasks`, and return what it became."""
    capability, spec = _tasks[place]
    compiled = spec.compile(capability)
    cubin = compiled.asm["cubin"]
    usage = re.search(r"REG:(\d+)", _disassembled(cubin, "--dump-resource-usage"))
    operations = Counter(_OPERATION.findall(_disassembled(cubin, "--dump-sass")))

    def count(prefix: str) -> int:
        return sum(number for name, number in operations.items() if name.startswith(prefix))

    return {
        "kernel": spec.function.__name__,
        "capability": capability,
        "constants": {name: value for name, value in spec.constants.items() if name.isupper()},
        "warps": spec.num_warps,
        "stages": spec.num_stages,
        "registers": int(usage[1]) if usage else 0,
        "spills": count("LDL") + count("STL"),
        "shared_bytes": int(compiled.metadata.shared),
        "tensor_columns": int(compiled.metadata.tmem_size or 0),
        "scratch_bytes": int(compiled.metadata.global_scratch_size or 0)
        + int(compiled.metadata.profile_scratch_size or 0),
        "matrix": sorted(set(_MATRIX.findall(compiled.asm["ptx"]))),
        "k_widths": sorted(set(_K_WIDTH.findall(compiled.asm["ttgir"]))),
        "wide_loads": count("LDG.E.128") + count("LDGSTS") + count("UTMALDG"),
    }  # fmt: skip


if __name__ == "__main__":
    chosen = [int(argument) for argument in sys.argv[1:]] or [80, 90, 100]
    _tasks += [(capability, spec) for capability in chosen for spec in shipped(capability)]
    with multiprocessing.get_context("fork").Pool() as pool:
        for row in pool.imap(describe, range(len(_tasks))):
            print(json.dumps(row), flush=True)
