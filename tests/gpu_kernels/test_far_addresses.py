"""Blocks, rows and logits that lie further from their addresses than 32 bits count."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice, InterpretedKernel  # isort: skip

import numpy as np
import pytest

from engine.runner.gpu.cache.card_pool import specs_of
from engine.runner.gpu.cache.copies import copy_specs
from engine.runner.gpu.kernels import draw, gathering, rows
from engine.runner.gpu.launcher import KernelSpec
from engine.runner.gpu.launches import Launches
from engine.runner.gpu.steps.chunk_step import ChunkRow, ChunkStep
from engine.runner.gpu.tiles import Tile
from tests.gpu.decoding import Decoding
from tests.gpu_kernels.far_memory import array_at, sparse
from tests.gpu_kernels.tiny_decoder import SPEC, TinyDecoder
from tests.gpu_kernels.uploaded import upload
from tests.support.engine.fake_card import bytes_sum

FAR_BLOCKS = 9_000_000
"""The blocks of a pool; one has 256 words of 8 bytes, or 288 scales."""
NEAR = np.array([9, 3, 17])
FAR = NEAR + FAR_BLOCKS - 48
PROMPT = list(range(20, 43))


def logits_of(tiny: TinyDecoder, make: Launches, blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the logits of the prompt's last token, of a chunk and decoded."""
    chunks = ChunkStep(tiny.device, make, 0, 64, 1, 64)  # type: ignore[arg-type]
    chunks.run([ChunkRow(PROMPT, 0, blocks.tolist())])
    step = Decoding(tiny.device, make, 0, 1, 64)
    tables = np.zeros((1, step.table_width), np.int64)
    tables[0, : len(blocks)] = blocks
    step.set_rows(np.array(PROMPT[-1:]), np.array([len(PROMPT) - 1]), tables)
    step.begin()
    return chunks.logits(1)[0].copy(), step.logits()[0].copy()


@pytest.mark.parametrize("windows", [(), (9,)], ids=["all keys", "a window"])
@pytest.mark.parametrize("has_scales", [False, True], ids=["bfloat16", "int8"])
def test_keys_and_values_are_written_and_read_in_far_blocks(
    has_scales: bool, windows: tuple[int, ...]
) -> None:
    spec = replace(SPEC, num_layers=1, windows=windows)
    tiny = TinyDecoder(spec=spec, has_scales=has_scales)
    near = tiny.launches(Tile(16, 32, 64, 4, 3))
    wanted = logits_of(tiny, near, NEAR)
    with sparse(2 * FAR_BLOCKS * tiny.piece_bytes) as address:
        make = tiny.launches(Tile(16, 32, 64, 4, 3))
        make.pool = replace(make.pool, address=address, num_blocks=FAR_BLOCKS)
        found = logits_of(tiny, make, FAR)
        assert np.array_equal(found, wanted)
        own = array_at(address + int(FAR[0]) * tiny.piece_bytes, tiny.piece_bytes, np.uint8)
        assert own.any()


def pieces_at(pool: int, block: int, kind: int, piece_bytes: int) -> np.ndarray:
    start = pool + (kind * FAR_BLOCKS + int(block)) * piece_bytes
    return array_at(start, piece_bytes, np.uint8)


def filled(pool: int, piece_bytes: int) -> np.ndarray:
    """Write random blocks into a pool; return them `[kinds, blocks, piece_bytes]`."""
    content = np.random.default_rng(1).integers(0, 256, (2, len(FAR), piece_bytes), np.uint8)
    for kind in range(2):
        for place, block in enumerate(FAR):
            pieces_at(pool, block, kind, piece_bytes)[:] = content[kind, place]
    return content


def test_far_blocks_are_copied_and_summed() -> None:
    device, piece_bytes, count = InterpretedDevice(), 2048, len(FAR)
    size = 2 * FAR_BLOCKS * piece_bytes
    ids = upload(device, FAR.astype(np.int32))
    others = upload(device, (FAR - 20).astype(np.int32))
    sums = upload(device, np.zeros((2, count), np.int64))
    both = (FAR_BLOCKS, FAR_BLOCKS)
    with sparse(size) as source, sparse(size) as target:
        content = filled(source, piece_bytes)

        def arrived() -> np.ndarray:
            found = [
                [pieces_at(target, one - 20, kind, piece_bytes) for one in FAR] for kind in (0, 1)
            ]
            taken = np.array(found)
            for pieces in found:
                for piece in pieces:
                    piece[:] = 0
            return taken

        copy_and_sum, *_ = (InterpretedKernel(spec) for spec in specs_of(piece_bytes))
        copy_and_sum.bind((count, 1, 2), source, ids, target, others, sums, *both)(0)
        assert np.array_equal(arrived(), content)
        own = np.frombuffer(device.download(sums, 16 * count), np.uint64).reshape(2, count)
        assert own.tolist() == [[bytes_sum(piece) for piece in pieces] for pieces in content]
        inward, outward = (InterpretedKernel(spec) for spec in copy_specs(piece_bytes))
        outward.bind((count, 1, 2), source, ids, target, others, *both)(0)
        assert np.array_equal(arrived(), content)
        inward.bind((count, 1, 2), target, others, source, ids, *both)(0)
        assert np.array_equal(arrived(), content)


def test_far_rows_are_read_and_far_logits_drawn_from() -> None:
    device, width, far = InterpretedDevice(), 128, 17_000_001
    wanted = np.arange(1, width + 1, dtype=np.uint16) + 0x3F80
    out, normed = (upload(device, np.zeros(width, np.uint16)) for _ in range(2))
    weight = upload(device, np.full(width, 0x3F80, np.uint16))
    row = upload(device, np.array([far], np.int32))
    sizes = {"N": width, "COLUMNS": width, "IS_PROGRAMMATIC": False}
    with ExitStack() as stack:
        table = stack.enter_context(sparse(2 * width * (far + 1)))
        array_at(table + 2 * width * far, width, np.uint16)[:] = wanted
        types = {"source": "*bf16", "rows": "*i32", "out": "*bf16"}
        gather = InterpretedKernel(KernelSpec(gathering.gather_rows, types, sizes))
        gather.bind((1,), table, row, out)(0)
        assert np.array_equal(np.frombuffer(device.download(out, 2 * width), np.uint16), wanted)
        device.fill(out, 0, 2 * width, 0)
        types = dict.fromkeys(rows.embed.arg_names, "*bf16")
        types |= {"tokens": "*i32", "sources": "*i32", "drawn": "*i32", "epsilon": "fp32"}
        constants = {**sizes, "HAS_DRAWN": False, "scale": None}
        embed = InterpretedKernel(KernelSpec(rows.embed, types, constants))
        embed.bind((1,), row, 0, 0, table, weight, out, normed, 1e-6)(0)
        assert np.array_equal(np.frombuffer(device.download(out, 2 * width), np.uint16), wanted)
        vocabulary, size = 1 << 30, 256
        logits = stack.enter_context(sparse(4 * 4 * vocabulary))
        array_at(logits + 4 * 3 * vocabulary, size, np.float32)[77] = 1.0
        zeros = upload(device, np.zeros(8, np.int64))
        scores, tokens = upload(device, np.zeros(4)), upload(device, np.zeros(4, np.int32))
        types = {
            "logits": "*fp32", "temperatures": "*fp32", "seeds": "*i64", "indices": "*i32",
            "best_scores": "*fp64", "best_tokens": "*i32", "slices": "i32",
        }  # fmt: skip
        constants = {"VOCABULARY": vocabulary, "SLICE": size, "IS_PROGRAMMATIC": False}
        find = InterpretedKernel(KernelSpec(draw.draw_slices, types, constants))
        find.bind((4, 1), logits, zeros, zeros, zeros, scores, tokens, 1)(0)
        found = np.frombuffer(device.download(tokens, 16), np.int32)
        assert found.tolist() == [0, 0, 0, 77]
