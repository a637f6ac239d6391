"""Attention of one layer by itself, with a sliding window or sinks: random queries, keys and
values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice, InterpretedKernel, rounded, widened  # isort: skip

import numpy as np

from engine.runner.gpu.launches import AttentionShape, KVPool, Launches
from engine.runner.gpu.steps.piece_lists import list_all, list_sizes, lists_in
from engine.runner.gpu.steps.step_memory import StepMemory
from tests.gpu_kernels.tiny_decoder import SPEC
from tests.gpu_kernels.uploaded import upload

LENGTH = 100
"""Positions of the sequence whose attention is compared."""
PIECE = 32
NUM_BLOCKS = 24


@dataclass(frozen=True)
class Layer:
    """A layer's sizes; its keys and values are in blocks of `block` tokens."""

    window: int
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    block: int = 16
    piece: int = PIECE
    has_scales: bool = False
    has_sinks: bool = False


class AttentionAlone:
    """Attention to LENGTH positions, in a cache whose other slots are NaN."""

    def __init__(self, layer: Layer) -> None:
        self.layer, self.device = layer, InterpretedDevice()
        spec = replace(
            SPEC, num_layers=1, num_heads=layer.heads, num_kv_heads=layer.kv_heads,
            head_dim=layer.dim, windows=(layer.window,) if layer.window else (),
            has_sinks=layer.has_sinks,
        )  # fmt: skip
        rng = np.random.default_rng(2)
        self._queries = rounded(rng.standard_normal((LENGTH, layer.heads, layer.dim)) * 2)
        slot_bytes = layer.dim + 4 if layer.has_scales else 2 * layer.dim
        self.piece_bytes = layer.kv_heads * layer.block * slot_bytes
        memory = self.device.allocate(2 * NUM_BLOCKS * self.piece_bytes)
        self.pool = KVPool(
            memory.address, NUM_BLOCKS, layer.block, self.piece_bytes, layer.has_scales
        )
        self.blocks = rng.permutation(NUM_BLOCKS)[: -(-LENGTH // layer.block)]
        self.width = len(self.blocks)
        self.keys = self._fill(rng, self.pool.keys(0))
        self.values = self._fill(rng, self.pool.values(0))
        shape = AttentionShape(
            piece=layer.piece, programs=5, few_programs=3, few_stages=2, tile_keys=layer.block,
        )  # fmt: skip
        # Of a row's scores, one of these is the largest, and one is far below.
        self.sinks = np.linspace(9, -4, layer.heads).astype(np.float32)
        own = SimpleNamespace(sinks=upload(self.device, self.sinks))
        weights: Any = SimpleNamespace(layers=[own])
        self.make = Launches(
            InterpretedKernel, self.device.properties, spec, weights, self.pool, shape
        )

    def _fill(self, rng: np.random.Generator, address: int) -> np.ndarray:
        """Write the sequence's slots; return their numbers, float64 [LENGTH, kv_heads, dim]."""
        layer = self.layer
        shape = (LENGTH, layer.kv_heads, layer.dim)
        bits = rounded(rng.standard_normal(shape))
        numbers = rng.integers(-127, 128, shape).astype(np.int8)
        scales = (rng.random(shape[:2]) / 64).astype(np.float32)
        for position in range(LENGTH):
            block, place = self.blocks[position // layer.block], position % layer.block
            for head in range(layer.kv_heads):
                own = address + int(block) * self.piece_bytes
                own += head * self.piece_bytes // layer.kv_heads
                if not layer.has_scales:
                    self.device.upload(own + 2 * layer.dim * place, bits[position, head].tobytes())
                    continue
                halves = numbers[position, head].reshape(2, -1).T
                self.device.upload(own + layer.dim * place, np.ascontiguousarray(halves).tobytes())
                self.device.upload(
                    own + layer.dim * layer.block + 4 * place, scales[position, head].tobytes()
                )
        if layer.has_scales:
            return numbers.astype(np.float64) * scales[..., None]
        return widened(bits).astype(np.float64)

    def forget(self, place: int) -> None:
        """Let the sequence's block `place` hold NaN."""
        for address in (self.pool.keys(0), self.pool.values(0)):
            own = address + int(self.blocks[place]) * self.piece_bytes
            self.device.fill(own, 0xFF, self.piece_bytes, 0)

    def exact(self, position: int) -> np.ndarray:
        """Return a row's attention, float64 [heads, dim]."""
        layer = self.layer
        first = max(position - layer.window + 1, 0) if layer.window else 0
        group = layer.heads // layer.kv_heads
        keys, values = (
            np.repeat(one[first : position + 1], group, 1) for one in (self.keys, self.values)
        )
        query = widened(self._queries[position]).astype(np.float64)
        scores = np.einsum("hd,khd->hk", query, keys) / np.sqrt(layer.dim)
        if layer.has_sinks:
            scores = np.concatenate([scores, self.sinks[:, None]], axis=1)
        shares = np.exp(scores - scores.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        shares = shares[:, : len(keys)]
        found: np.ndarray = np.einsum("hk,khd->hd", shares, values)
        return found

    def chunk(self, first: int, end: int, chunk_rows: int = 32) -> np.ndarray:
        """Return the bits of rows `first` to `end` as one chunk, in tiles of that height."""
        make, layer = self.make, self.layer
        make.shape = replace(make.shape, chunk_rows=chunk_rows)
        tile = chunk_rows // (layer.heads // layer.kv_heads)
        starts = np.arange(0, end - first, tile)[::-1]
        given = [
            upload(self.device, np.asarray(values, np.int32))
            for values in (
                self.blocks, np.zeros(len(starts)), starts, [0], [end - first], [end - 1],
            )
        ]  # fmt: skip
        tables, tiles, sequences = given[0], (given[1], given[2]), (given[3], given[4], given[5])
        queries = upload(self.device, self._queries[first:end])
        out = self._out(end - first)
        make.attention.attend_chunk(
            0, queries, tables, self.width, tiles, sequences, out, len(starts)
        )(0)  # fmt: skip
        return self._bits(out, end - first)

    def _out(self, num_rows: int) -> int:
        return self.device.allocate(2 * num_rows * self.layer.heads * self.layer.dim).address

    def _bits(self, out: int, num_rows: int) -> np.ndarray:
        shape = (num_rows, self.layer.heads, self.layer.dim)
        raw = self.device.download(out, 2 * int(np.prod(shape)))
        return np.frombuffer(raw, np.uint16).reshape(shape).copy()

    def decode(self, lasts: list[int], rows_each: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Return the bits of `rows_each` rows that end at each of `lasts` (-1: padding), and the
        number of pieces that were computed for each.

        Sequences share the cache. Rows before position 0 have the queries of position 0.
        """
        make, layer, count = self.make, self.layer, len(lasts)
        most = count * -(-LENGTH // layer.piece)
        parts = layer.piece // layer.block
        heads = most * layer.kv_heads * make.attention.attention_rows(rows_each)
        sizes = list_sizes(make.spec, count, most, parts)
        card: Any = self.device
        memory = StepMemory(card, sizes | {"totals": 4 * heads * layer.dim, "tops": 8 * heads})
        lists = lists_in(memory, make.spec)
        positions = np.array(lasts)[:, None] + np.arange(1 - rows_each, 1)
        queries = upload(self.device, self._queries[np.maximum(positions, 0).ravel()])
        last_positions = upload(self.device, np.array(lasts, np.int32))
        tables = upload(self.device, np.tile(self.blocks.astype(np.int32), (count, 1)))
        out = self._out(count * rows_each)
        launches = list_all(make, lists, last_positions, (tables, self.width), count, rows_each)
        launches += make.attention.attend_pieces(
            0, queries, last_positions, lists[layer.window], (memory["totals"], memory["tops"]),
            out, count, rows_each,
        )  # fmt: skip
        for launch in launches:
            launch(0)
        first_pieces = lists[layer.window].first_pieces
        firsts = np.frombuffer(self.device.download(first_pieces, 4 * (count + 1)), np.int32)
        return self._bits(out, count * rows_each), np.diff(firsts)
