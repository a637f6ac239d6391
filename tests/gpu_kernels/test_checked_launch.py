"""What a card's memory checker finds in a launch is found in the interpreter: with planted faults.

Every other test here runs its launches under the same checks, in which nothing is found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice, InterpretedKernel  # isort: skip

import numpy as np
import pytest
from triton.runtime.errors import InterpreterError

from engine.runner.gpu.kernels import attention, edits, filters, gathering, ordering, products, rows
from engine.runner.gpu.kernels.experts import grouped_products, listing
from engine.runner.gpu.launcher import KernelSpec
from engine.runner.gpu.launches import Launches
from engine.runner.gpu.steps.chunk_step import ChunkRow, ChunkStep
from engine.runner.gpu.tiles import Tile
from engine.runner.gpu.weights import Matrix
from engine.runner.weights.spec.expert_mixture import ExpertMixture
from tests.gpu.decoding import Decoding
from tests.gpu.kernels import behind_the_last, store_lanes, store_nothing
from tests.gpu_kernels.checked_launch import MemoryFault, programs_in
from tests.gpu_kernels.known_memory import KnownMemory, known
from tests.gpu_kernels.planted import plant
from tests.gpu_kernels.tiny_decoder import NUM_BLOCKS, SHAPE, SPEC, TinyDecoder
from tests.gpu_kernels.uploaded import upload

TILE = Tile(16, 32, 64, 4, 3)
TOKENS = list(range(20, 39))
BLOCKS = [9, 3, 17]


class AskingAhead(InterpretedKernel):
    """A kernel that asks for weights ahead, as on a card."""

    only_compiled: tuple[str, ...] = ("HAS_PTX",)


@pytest.fixture(scope="module")
def tiny() -> TinyDecoder:
    return TinyDecoder(spec=replace(SPEC, num_layers=1))


def computes_a_chunk(tiny: TinyDecoder, make: Launches | None = None) -> None:
    """Run a chunk of 19 rows, in buffers of as many."""
    make = make or tiny.launches(TILE)
    step = ChunkStep(tiny.device, make, 0, 19, 1, 64)  # type: ignore[arg-type]
    step.run([ChunkRow(TOKENS, 0, BLOCKS)])


def decodes(tiny: TinyDecoder) -> None:
    """Run a step of three rows and a padded one."""
    step = Decoding(tiny.device, tiny.launches(TILE), 0, 4, 64)
    tables = np.full((4, step.table_width), 40)
    tables[:3, : len(BLOCKS)] = BLOCKS
    step.set_rows(
        np.array([5, 6, 7, 8]), np.array([40, 0, 33, -1]), tables, np.array([0, 1.0, 1.0, 0])
    )
    step.begin()
    step.close()


def lists_tokens(tiny: TinyDecoder) -> None:
    """Run `list_kept` on a row of three slices."""
    device, slices, size = tiny.device, 3, 64
    types = {
        "logits": "*fp32", "temperatures": "*fp32", "best_scores": "*fp64", "slices": "i32",
        "cuts": "*i32", "listed": "*i32", "keys": "*i64",
    }  # fmt: skip
    constants = {"VOCABULARY": 130, "SLICE": size, "PARTS": 4, "IS_PROGRAMMATIC": False}
    logits = np.linspace(0, 1, 130, dtype=np.float32)
    best = np.array([logits[part * size : (part + 1) * size].max() for part in range(slices)])
    given: list[np.ndarray] = [logits, np.ones(1, np.float32), best.astype(np.float64)]
    rest: list[np.ndarray] = [
        np.full(1, 254, np.int32),
        np.zeros(1, np.int32),
        np.zeros(filters.LIST.value),
    ]
    kernel = InterpretedKernel(KernelSpec(filters.list_kept, types, constants))
    kernel.bind(
        (1, slices), *(upload(device, one) for one in given), slices,
        *(upload(device, one) for one in rest),
    )(0)  # fmt: skip


def copies_blocks(tiny: TinyDecoder) -> None:
    """Copy two of three blocks of the first of two layers."""
    device, words = tiny.device, 16
    types = {
        "pool": "*i64", "block_ids": "*i32", "host": "*i64", "host_ids": "*i32",
        "num_blocks": "i32", "num_host_blocks": "i32",
    }  # fmt: skip
    constants = {"WORDS": words, "SIZE": 16, "IS_OUT": True, "IS_PROGRAMMATIC": False}
    pool = upload(device, np.zeros((2, 2, 3, words), np.int64))
    host = upload(device, np.zeros((2, 2, words), np.int64))
    ids, host_ids = (upload(device, np.array(one, np.int32)) for one in ([0, 2], [1, 0]))
    kernel = InterpretedKernel(KernelSpec(gathering.copy_blocks, types, constants))
    kernel.bind((2, 1, 2), pool, ids, host, host_ids, 3, 2)(0)


def adds_listed(tiny: TinyDecoder) -> None:
    """Withhold a token of a row that is listed twice, and bias others."""
    device = tiny.device
    types = {"logits": "*fp32", "starts": "*i32", "tokens": "*i32", "values": "*fp32"}
    constants = {"VOCABULARY": 50, "TILE": 16, "IS_PROGRAMMATIC": False}
    given: list[np.ndarray] = [
        np.zeros((2, 50), np.float32), np.array([0, 3, 5], np.int32),
        np.array([7, 7, 9, 3, 4], np.int32),
        np.array([-np.inf, -np.inf, -np.inf, 1, 2], np.float32),
    ]  # fmt: skip
    kernel = InterpretedKernel(KernelSpec(edits.add_listed, types, constants))
    kernel.bind((2,), *(upload(device, one) for one in given))(0)


def computes_experts(_: TinyDecoder) -> None:
    """Run a chunk of a model whose layer has experts."""
    mixture = ExpertMixture(
        layers=(0,), num_experts=4, num_chosen=2, inner_size=32, shared_size=0, is_normalised=True,
        least_sum=0.0, has_choice_bias=False,
    )  # fmt: skip
    computes_a_chunk(TinyDecoder(spec=replace(SPEC, num_layers=1, experts=mixture)))


RUNS = [computes_a_chunk, decodes, lists_tokens, copies_blocks, adds_listed, computes_experts]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("order", ["reversed", 3])
def test_nothing_is_found_without_a_fault(
    tiny: TinyDecoder, run: Callable[[TinyDecoder], None], order: str | int
) -> None:
    with programs_in(order):
        run(tiny)


LOADED = """    values = tl.load(hidden + row * N + columns, mask=inside, other=0.0).to(tl.float32)
    if added_weight"""
FAULTS: list[tuple[Callable[[TinyDecoder], None], ModuleType, str, str, str]] = [
    # A mask that is dropped.
    (computes_a_chunk, products,
     "_results(is_row[:, None], outputs, N, BN)\n    result = tl.trans(total)",
     "_results((rows >= 0)[:, None], outputs, N, BN)\n    result = tl.trans(total)",
     "product, program .*: stores bytes .* of y"),
    (computes_a_chunk, products, "y + place, result, mask=is_result",
     "y + place, result, mask=is_row[:, None] & (outputs >= 0)[None, :]",
     "product, program .*: stores bytes .* of y"),
    (computes_a_chunk, rows, "weight + is_column[1], mask=is_column[0], other=0.0",
     "weight + is_column[1] + N", "embed, program 0: loads bytes 256 to 512 of weight, which has "
     "256"),
    (decodes, attention, "last_positions + index, mask=index < num_sequences, other=-1",
     "last_positions + index + 1", "list_pieces, program 0: loads bytes .* of last_positions"),
    # An offset that is one row, or one block, too far.
    (computes_a_chunk, rows, "tl.load(hidden + row * N + columns, mask=inside",
     "tl.load(hidden + (row + 1) * N + columns, mask=inside",
     r"norm, program 18: loads bytes .* of hidden, which has 4864 \(hidden\)"),
    (decodes, attention, "block = tl.load(piece_blocks + piece * PARTS + part)",
     "block = tl.load(piece_blocks + piece * PARTS + part) + 40",
     r"attend_pieces, program .*: loads bytes .* of keys, which has .*a layer.*s keys"),
    (copies_blocks, gathering, "there = pool + (kind * num_blocks + block) * WORDS + word",
     "there = pool + (kind * num_blocks + block + 1) * WORDS + word",
     "copy_blocks, program 3: loads bytes 768 to 896 of pool, which has 768"),
    # Two programs of a launch that write the same row, or read what the other one writes.
    (computes_a_chunk, rows, "    tl.store(normed + row * N + columns, result, mask=inside)\n\n\n"
     "@triton.jit\ndef rotate", "    tl.store(normed + row // 2 * N + columns, result, mask=inside)"
     "\n\n\n@triton.jit\ndef rotate", "norm, program 0: writes bytes of normed that program 1"),
    (computes_a_chunk, rows, "queries + (row * HEADS + head)[:, None]",
     "queries + (row * HEADS + head // 2)[:, None]",
     "rotate_and_store, program .* writes bytes of queries that program"),
    (computes_a_chunk, products, "residual + place, mask=is_result, other=0.0",
     "residual + place - N * (rows > 0)[:, None], mask=is_result, other=0.0",
     "product, program .*: reads bytes of residual that program .* writes"),
    (lists_tokens, filters, "start = tl.atomic_add(listed + row, tl.sum(taken, 0))",
     "start = tl.load(listed + row)\n            tl.store(listed + row, start + tl.sum(taken, 0))",
     "list_kept, program 0: writes bytes of listed that program 1 writes too"),
    (computes_experts, listing, "pairs + reached + up_to - 1", "pairs + reached + up_to",
     "list_pairs, program .*: (writes|stores) bytes .*of pairs"),
    (computes_experts, listing, "if own == EXPERTS - 1:", "if own >= EXPERTS - 2:",
     "list_pairs, program .* writes bytes of num_tiles that program"),
    (computes_experts, grouped_products, "is_pair = place < tl.load(at + 2)",
     "is_pair = place >= 0",
     "grouped_gate_up, program .*: (loads bytes .* of pairs|writes bytes of y that program)"),
    (computes_experts, grouped_products, "total, pair, is_pair, outputs",
     "total, pair // 2, is_pair, outputs", "grouped_product, program .* writes bytes of y that"),
    # Lanes of one program.
    (adds_listed, edits, "value + tl.load(values + place, mask=is_listed, other=0.0), mask",
     "value + tl.where(is_listed, place, 0), mask",
     "add_listed, program 0: stores different values in one place of logits"),
    (adds_listed, edits, "mask=is_listed)\n\n\n@triton.jit\ndef _counts",
     "mask=is_listed)\n        tl.store(values + place, tl.load(at, mask=is_listed), "
     "mask=is_listed)\n\n\n@triton.jit\ndef _counts",
     "add_listed, program 0: reads bytes of logits that it has written itself"),
    # What is touched before the wait.
    (computes_a_chunk, rows, "    begin(IS_PROGRAMMATIC)\n    row = tl.program_id(0).to(tl.int64)\n"
     "    columns = tl.arange(0, COLUMNS)\n    inside = columns < N\n" + LOADED,
     "    row = tl.program_id(0).to(tl.int64)\n    columns = tl.arange(0, COLUMNS)\n"
     "    inside = columns < N\n" + LOADED.replace("    if", "    begin(IS_PROGRAMMATIC)\n"
     "    if"), "norm, program 0: loads hidden before it waits for the kernel before"),
    (decodes, attention, "    begin(IS_PROGRAMMATIC)\n    GROUP: tl.constexpr = HEADS // KV_HEADS\n"
     "    PARTS", "    GROUP: tl.constexpr = HEADS // KV_HEADS\n    PARTS",
     "attend_pieces, program 0: loads first_pieces before it waits"),
    (computes_experts, listing, "    begin(IS_PROGRAMMATIC)\n    own", "    own",
     "list_pairs, program 0: loads experts before it waits"),
]  # fmt: skip


def run_twice(run: Callable[[TinyDecoder], None], tiny: TinyDecoder) -> None:
    """What a kernel stores to is known from its first launch."""
    for _ in range(2):
        run(tiny)


@pytest.mark.parametrize(
    ("run", "module", "old", "new", "fault"), FAULTS,
    ids=[f"{one[1].__name__.rpartition('.')[2]} {place}" for place, one in enumerate(FAULTS)],
)  # fmt: skip
def test_a_fault_is_found(
    run: Callable[[TinyDecoder], None], module: ModuleType, old: str, new: str, fault: str,
    tiny: TinyDecoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    plant(monkeypatch, tmp_path, module, old, new)
    with pytest.raises((InterpreterError, MemoryFault), match=fault):
        run_twice(run, tiny)


def test_a_program_that_never_waits_is_found(
    tiny: TinyDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a kernel that is launched while the one before runs has to wait, whatever it touches."""
    monkeypatch.setattr(ordering, "gdc_wait", lambda: None)
    with pytest.raises(InterpreterError, match="embed, program 0: loads tokens before it waits"):
        computes_a_chunk(tiny)
    with pytest.raises(AssertionError, match="program 0: ends without a wait"):
        launch_nothing(tiny.device)


def launch_nothing(device: InterpretedDevice) -> None:
    spec = KernelSpec(store_nothing, {"out": "*i32"}, {}, is_programmatic=True)
    InterpretedKernel(spec).bind((1,), upload(device, np.zeros(4, np.int32)))(0)


def test_a_lane_that_is_off_has_no_number(tiny: TinyDecoder) -> None:
    """What is loaded there is undefined, unless it is said."""
    kernel = InterpretedKernel(KernelSpec(store_lanes, {"out": "*i32", "count": "i32"}, {}))
    out = upload(tiny.device, np.zeros(8, np.int32))
    kernel.bind((1,), out, 6)(0)
    assert np.frombuffer(tiny.device.download(out, 32), np.int32).tolist() == [0] * 6 + [-1] * 2


@pytest.mark.parametrize("form", ["product", "gate_up", "described", "described gate_up"])
def test_what_is_asked_for_ahead_is_of_the_weights(tiny: TinyDecoder, form: str) -> None:
    """Outputs that no tile divides, and a tile that asks for rows behind the last one."""
    device, rows_asked = tiny.device, 3
    count = 2 * 72 if "gate_up" in form else 72
    weights = Matrix(upload(device, np.zeros((count, 128), np.uint16)), count, 128)
    tile = replace(TILE, prefetch=128, is_described="described" in form)
    x, y = (upload(device, np.zeros((rows_asked, size), np.uint16)) for size in (128, 72))

    def launch() -> None:
        pool = tiny.launches(TILE).pool
        make = Launches(AskingAhead, device.properties, SPEC, tiny.weights, pool, SHAPE)
        if "gate_up" in form:
            make.gate_up(x, weights, y, rows_asked, tile)(0)
        else:
            make.product(x, weights, y, rows_asked, tile=tile)(0)

    launch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "sources_of", behind_the_last)
        with pytest.raises(InterpreterError, match=r"prefetches bytes|loads bytes"):
            launch()


def test_blocks_that_were_given_back_are_not_touched(tiny: TinyDecoder) -> None:
    make = tiny.launches(TILE)
    known.give_back(make.pool.address, 2 * NUM_BLOCKS * tiny.piece_bytes)
    with pytest.raises(
        InterpreterError, match=r"rotate_and_store, program .*: stores bytes .* keys"
    ):
        computes_a_chunk(tiny, make)


def test_what_is_copied_lies_in_one_allocation(tiny: TinyDecoder) -> None:
    device = tiny.device
    ours, theirs = (device.allocate(64) for _ in range(2))
    device.copy(ours.address + 8, theirs.address, 56, 0)
    with pytest.raises(AssertionError, match="the target of a copy: 57 bytes at 8 of"):
        device.copy(ours.address + 8, theirs.address, 57, 0)
    with pytest.raises(AssertionError, match="the source of a copy"):
        device.copy(ours.address, theirs.address + 1, 64, 0)
    theirs.close()
    with pytest.raises(AssertionError, match=r"a fill: 1 bytes at 0 of .*was given back"):
        device.fill(theirs.address, 0, 1, 0)


def test_memory_is_known_until_it_is_gone_or_other_memory_is_there() -> None:
    memory = KnownMemory()
    memory.add(1000, 100)
    memory.add(2000, 100)
    memory.divide({"a": (2000, 40), "b": (2064, 10)})
    assert memory.at(999) is memory.at(1100) is None
    found: list[Any] = [memory.at(one) for one in (1099, 2039, 2040, 2064)]
    assert [one.name for one in found] == ["memory", "a", "memory", "b"]
    memory.add(2050, 100)
    assert memory.at(2000) is None
    memory.give_back(1000, 100)
    gone: Any = memory.at(1050)
    assert gone.end == gone.start
    memory.remove(1000, 100)
    assert memory.at(1000) is None
    assert memory.at(2149) is memory.whole_at(2050)
