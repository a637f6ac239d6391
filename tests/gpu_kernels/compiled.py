"""What the shipped kernels compile to: `python -m tests.gpu_kernels.compiled [CAPABILITY…]`.

Prints one JSON line a kernel: registers, spills (loads and stores of local memory in the machine
code), shared memory, the matrix instruction, how wide global memory is read, and the bytes of each
parameter, as compiled and as launched. `--largest` is for the largest tiles of each kernel alone.
No card is needed; the disassembler is part of the package triton.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import triton

from engine.runner.gpu.attention_launches import PieceList
from engine.runner.gpu.experts.expert_launches import ExpertLaunches
from engine.runner.gpu.launcher import Kernel, KernelSpec
from engine.runner.gpu.launches import AttentionShape
from engine.runner.gpu.steps.piece_lists import reach_of
from engine.runner.gpu.tensor_map import MatrixView
from engine.runner.gpu.tiles import chunk_rows
from engine.runner.gpu.weights import GATE_PARTS, NO_MATRIX, ExpertWeights, Form, Matrix
from tests.gpu.measuring import SHARED_BYTES, NoDevice, SpecRecorder
from tests.gpu.stages.draws import draws
from tests.gpu.stages.experts import experts, gpt_oss_of, spec_of
from tests.gpu.stages.model import BLOCK, Findings, Model
from tests.gpu.stages.products import products
from tests.gpu.stages.sharing import ipc
from tests.gpu.stages.steps import prefill, step

_TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_OPERATION = re.compile(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)", re.MULTILINE)
_K_WIDTH = re.compile(r"dot_op<\{.*?kWidth = (\d+)")
_WAIT, _MAY_START = "ACQBULK", "PREEXIT"
"""The wait for the kernel before, and from where on the next one may start, in machine code."""
_TAKES_COLUMNS = "UTCATOMSWS.FIND_AND_SET"
_GLOBAL = re.compile(r"(LDG|STG|LD|ST|LDGSTS|ATOMG?|REDG?|UTMA\w+|UBLK\w+)(\.|$)")
_MATRIX = re.compile(r"(wgmma|mma\.sync|tcgen05)(?:\.mma|\.aligned)")


class _Loading:
    """Takes the place of a card that kernels are loaded onto."""

    def __init__(self, capability: int) -> None:
        self.properties = NoDevice(capability).properties

    def load_function(self, *_: Any) -> None: ...
    def call(self, *_: Any) -> None: ...


def launched_bytes(spec: KernelSpec, capability: int) -> list[int]:
    """Return the bytes of each parameter of a launch."""
    device: Any = _Loading(capability)
    given = [
        MatrixView(0, 64, 4096) if kind.startswith("tensordesc") else 0
        for _, kind in spec.arguments
    ]
    launch = Kernel(device, spec).bind((1,), *given)
    return [ctypes.sizeof(one) for one in launch.arguments]


def compiled_bytes(ptx: str) -> list[int]:
    """Return the bytes of each parameter of a kernel."""
    entry = ptx[ptx.index(".entry") :]
    parameters = entry[entry.index("(") + 1 : entry.index(")")].split(",")
    found = []
    for one in parameters:
        size = re.search(r"\[(\d+)\]", one) or re.search(r"\.param\s+\.[a-z](\d+)", one)
        assert size is not None, one
        found.append(int(size[1]) if "[" in one else int(size[1]) // 8)
    return found


def has_window(spec: KernelSpec) -> bool:
    """Return whether a kernel is told of a layer's window."""
    return any(name in ("window", "reach") for name, _ in spec.arguments)


def largest(specs: Sequence[KernelSpec]) -> list[KernelSpec]:
    """Return the configuration with the largest tile of each kernel with matrix instructions."""
    found: dict[tuple[Any, ...], tuple[int, KernelSpec]] = {}
    for spec in specs:
        given = spec.constants
        across = given.get("BN", given.get("BLOCK"))
        if "BM" not in given or across is None:
            continue
        size = given["BM"] * across
        key = (
            spec.function.__name__, *map(given.get, ("HAS_SCALES", "FORM", "DIM")), has_window(spec)
        )  # fmt: skip
        if key not in found or found[key][0] < size:
            found[key] = size, spec
    return [spec for _, spec in found.values()]


def shipped(capability: int) -> list[KernelSpec]:
    """Return every kernel that steps of an 8B model, and of one with experts, launch there."""
    recorder = SpecRecorder(capability)
    for stage in (products, step, prefill, ipc, draws, experts):
        stage(recorder, Findings())
    _launch_quantised(recorder)
    _launch_over_bytes(recorder)
    _launch_of_heads(recorder)
    _launch_of_experts(recorder)
    _launch_of_gpt_oss(recorder)
    _launch_of_gemma(recorder)
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
        make.attention.attend_pieces(0, 0, 0, pieces, (0, 0), 0, count, 1)
    make.attention.attend_chunk(0, 0, 0, 1, (0, 0), (0, 0, 0), 0, 1)
    make.rotate(0, 0, 0, 0, 0, 1)


def _launch_of_heads(recorder: SpecRecorder) -> None:
    """Launch attention of chunks, of single rows with a window, and of the most drafts that such
    heads have graphs for, with a window and without."""
    model, pieces = Model.of(recorder), PieceList(0, 0, 0, 0, 0)
    for head_dim, has_scales, window in product((128, 256), (False, True), (0, 4096)):
        model.pool = replace(model.pool, has_scales=has_scales)
        make = model.launches(recorder, shape_of(recorder, head_dim, has_scales=has_scales))
        make.spec = replace(make.spec, head_dim=head_dim, windows=(window,) if window else ())
        make.attention.attend_chunk(0, 0, 0, 1, (0, 0), (0, 0, 0), 0, 1)
        most = max(filter(make.attention.can_attend, (4, 8, 16)))
        for count, rows_each in product((1, 32), (1, most) if window else (most,)):
            make.attention.attend_pieces(0, 0, 0, pieces, (0, 0), 0, count, rows_each)
        make.attention.list_pieces(0, 0, 1, pieces, 32, reach_of(window, most))


def _launch_of_experts(recorder: SpecRecorder) -> None:
    """Launch what the model of the stage does not: a gate in float32, a bias, a shared MLP."""
    found: Any = defaultdict(int)
    spec = spec_of(1)
    assert spec.experts is not None
    mixture = replace(spec.experts, num_experts=64, num_chosen=6, inner_size=1536)
    hidden, inner = spec.hidden_size, mixture.inner_size
    for form in (Form.BF16, Form.Q4_0):
        own = ExpertWeights(
            Matrix(0, GATE_PARTS * 64, hidden), Matrix(0, 64 * 2 * inner, hidden, form),
            Matrix(0, 64 * hidden, inner, form), choice_bias=16,
        )  # fmt: skip
        dense = Model.of(recorder).launches(recorder)
        make = ExpertLaunches(dense, recorder.device.properties, spec, mixture)
        for rows in (1, 256, 4096):
            tiles = make.tiles(rows, own)
            make.choose(own, found, rows, 0)
            make.list_pairs(found, rows, tiles)
            make.gate_up(0, own.gate_up, found, rows, tiles)
            make.down(0, own.down, found, rows, tiles)
    shared = replace(mixture, shared_size=1536)
    ExpertLaunches(dense, recorder.device.properties, spec, shared).add(found, 1, 0)


def _launch_of_gpt_oss(recorder: SpecRecorder) -> None:
    """Launch attention with sinks, with a window and without, an output product with a bias, and a
    choice by sigmoids."""
    model, pieces, spec = Model.of(recorder), PieceList(0, 0, 0, 0, 0), gpt_oss_of(2)
    for has_scales in (False, True):
        model.pool = replace(model.pool, has_scales=has_scales)
        shape = shape_of(recorder, spec.head_dim, has_scales=has_scales)
        make = model.launches(recorder, shape, sinks=16)
        make.spec = spec
        # A cache in bytes beside a window, and one in floats without it too.
        for layer in range(1 if has_scales else spec.num_layers):
            make.attention.attend_pieces(layer, 0, 0, pieces, (0, 0), 0, 32, 1)
            make.attention.attend_chunk(layer, 0, 0, 1, (0, 0), (0, 0, 0), 0, 1)
    for rows in (1, 4096):
        make.product(0, Matrix(0, spec.hidden_size, 4096), 0, rows, residual=16, bias=16)
    assert spec.experts is not None
    mixture = replace(spec.experts, is_sigmoid=True, weight_scale=2.5)
    own = ExpertWeights(Matrix(0, mixture.num_experts, 2880), NO_MATRIX, NO_MATRIX, 16, 16)
    found: Any = defaultdict(int)
    ExpertLaunches(make, recorder.device.properties, spec, mixture).choose(own, found, 1, 0)


def _launch_of_gemma(recorder: SpecRecorder) -> None:
    """Launch what Gemma 3 has of its own, in the widest rows and the largest heads that it has."""
    make = Model.of(recorder).launches(recorder, norms=16)
    make.spec = replace(make.spec, hidden_size=5376, head_dim=256)  # of the models of 27B and 4B
    make.embed(0, 0, 0, 1, (0, 0))
    make.norm(0, 0, 0, 1, 16)
    make.rotate(0, 0, 0, 0, 0, 1)
    for form, rows in ((Form.BF16, 4096), (Form.Q4_0, 1)):
        make.gate_up(0, Matrix(0, 2 * 10240, 2560, form), 0, rows)


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
    """Return what the tool says; nothing for 10.3, which the assembler knows and the tool not."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [_TOOL, option, file.name], capture_output=True, text=True, check=False, timeout=60
        ).stdout


def unwaited(operations: Sequence[str]) -> list[str]:
    """Return what of a programmatic kernel touches global memory before its wait, or all of it that
    does where there is none."""
    before = list(operations)
    if _WAIT in before:
        before = before[: before.index(_WAIT)]
    return [name for name in before if _GLOBAL.match(name)]


def taken_late(operations: Sequence[str]) -> list[str]:
    """Return what takes memory of matrix instructions when the next kernel may have started.

    Programs of that one could have taken it, and they wait for this kernel's end.
    """
    first = operations.index(_MAY_START) if _MAY_START in operations else len(operations)
    return [name for name in operations[first:] if name.startswith(_TAKES_COLUMNS)]


_tasks: list[tuple[int, KernelSpec]] = []
"""What is compiled; processes that are forked inherit it."""


def describe(place: int) -> dict[str, Any]:
    """Compile a kernel of `_tasks`, and return what it became."""
    capability, spec = _tasks[place]
    compiled = spec.compile(capability)
    cubin = compiled.asm["cubin"]
    usage = re.search(r"REG:(\d+)", _disassembled(cubin, "--dump-resource-usage"))
    listed = _OPERATION.findall(_disassembled(cubin, "--dump-sass"))
    operations = Counter(listed)

    def count(prefix: str) -> int:
        return sum(number for name, number in operations.items() if name.startswith(prefix))

    return {
        "kernel": spec.function.__name__,
        "capability": capability,
        "constants": {name: value for name, value in spec.constants.items() if name.isupper()},
        "has_window": has_window(spec),
        "warps": spec.num_warps,
        "stages": spec.num_stages,
        "registers": int(usage[1]) if usage else 0,
        "spills": count("LDL") + count("STL") if operations else None,
        "shared_bytes": int(compiled.metadata.shared),
        "tensor_columns": int(compiled.metadata.tmem_size or 0),
        "scratch_bytes": int(compiled.metadata.global_scratch_size or 0)
        + int(compiled.metadata.profile_scratch_size or 0),
        "matrix": sorted(set(_MATRIX.findall(compiled.asm["ptx"]))),
        "k_widths": sorted(set(_K_WIDTH.findall(compiled.asm["ttgir"]))),
        "parameters": [compiled_bytes(compiled.asm["ptx"]), launched_bytes(spec, capability)],
        "unwaited": unwaited(listed) if spec.is_programmatic else [],
        "taken_late": taken_late(listed),
        "wide_loads": count("LDG.E.128") + count("LDGSTS") + count("UTMALDG"),
    }  # fmt: skip


if __name__ == "__main__":
    chosen = [int(argument) for argument in sys.argv[1:] if argument.isdecimal()]
    for capability in chosen or SHARED_BYTES:
        specs = shipped(capability)
        chosen_specs = largest(specs) if "--largest" in sys.argv else specs
        _tasks += [(capability, spec) for spec in chosen_specs]
    with multiprocessing.get_context("fork").Pool() as pool:
        for row in pool.imap(describe, range(len(_tasks))):
            print(json.dumps(row), flush=True)
