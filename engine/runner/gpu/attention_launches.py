"""The launches of attention: of a few rows a sequence, in pieces, and of many rows, a chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from engine.runner.gpu.cuda_driver import DeviceProperties
from engine.runner.gpu.kernels import attention
from engine.runner.gpu.launcher import BindableKernel, optional
from engine.runner.weights.spec.model_spec import DecoderSpec

Bound = Callable[[int], None]

_LOG2_E = 1.4426950408889634
_PIECE_ROWS = 64
"""Rows of a piece's largest tile, up to a head_dim of 128; half as many of 256, or over keys of a
byte each. A larger one takes more registers, or more shared memory, than a card has."""
FEW_SEQUENCES = 2
"""The most sequences with at most one piece a multiprocessor at contexts of 2,000 tokens."""

_TYPES = {
    "queries": "*bf16", "keys": "*bf16", "values": "*bf16", "tables": "*i32",
    "key_scales": "*fp32", "value_scales": "*fp32",
    "first_pieces": "*i32", "piece_sequences": "*i32", "piece_starts": "*i32",
    "piece_lasts": "*i32", "piece_blocks": "*i32",
    "last_positions": "*i32", "totals": "*fp32", "tops": "*fp32", "scale": "fp32",
    "num_sequences": "i32", "table_width": "i32", "tile_sequences": "*i32", "tile_rows": "*i32",
    "first_rows": "*i32", "num_rows": "*i32", "out": "*bf16", "window": "i32", "reach": "i32",
    "sinks": "*fp32",
}  # fmt: skip


class PieceList(NamedTuple):
    """Addresses of the list of pieces that `kernels.attention.list_pieces` writes."""

    first_pieces: int
    piece_sequences: int
    piece_starts: int
    piece_lasts: int
    piece_blocks: int


class Maker(Protocol):
    """A `launches.Launches`: its model, an `AttentionShape`, its `KVPool`, and its kernels."""

    spec: DecoderSpec
    weights: Any
    shape: Any
    pool: Any

    def kernel(
        self, function: Any, types: Mapping[str, str], constants: Mapping[str, Any],
        num_warps: int, stages: int, max_registers: int = 0,
    ) -> BindableKernel: ...  # fmt: skip

    def heads(self) -> dict[str, int]: ...

    def cached(self, layer: int) -> tuple[int, int, int, int]: ...


class AttentionLaunches:
    """Makes the launches of attention of one model's `Launches`."""

    def __init__(self, make: Maker, card: DeviceProperties) -> None:
        self._make, self._card = make, card

    @property
    def _scale(self) -> float:
        """What scores are multiplied by, in base 2."""
        spec = self._make.spec
        return _LOG2_E / float(spec.score_divisor or spec.head_dim) ** 0.5

    def _types(self) -> dict[str, str]:
        return _TYPES | ({"keys": "*i16", "values": "*i16"} if self._make.pool.has_scales else {})

    def list_pieces(
        self, last_positions: int, tables: int, table_width: int, pieces: PieceList,
        num_sequences: int, reach: int | None,
    ) -> Bound:  # fmt: skip
        """Return the launch that lists a decoding step's pieces, for all layers with a window.

        `reach`: how many positions before a sequence's last one are seen, at most; None: all.
        """
        constants = {
            "BLOCK": self._make.pool.block_size,
            "PIECE": self._make.shape.piece,
            "SEQUENCES": max(1 << (num_sequences - 1).bit_length(), 2),
        } | ({"reach": None} if reach is None else {})
        kernel = self._make.kernel(attention.list_pieces, _TYPES, constants, 4, 1)
        return kernel.bind(
            (num_sequences,), last_positions, tables, table_width, num_sequences,
            *(() if reach is None else (reach,)), *pieces,
        )  # fmt: skip

    def _window(self, layer: int) -> tuple[dict[str, None], tuple[int, ...]]:
        """Return the constants and the arguments by which kernels are told of a layer's window.

        All windows have one kernel; without any it is another one, which knows of none.
        """
        window = self._make.spec.window_of(layer)
        return ({}, (window,)) if window else ({"window": None}, ())

    def _sinks(self, layer: int) -> tuple[dict[str, None], tuple[int, ...]]:
        """Return the constants and the arguments by which kernels are told of a layer's sinks."""
        has_sinks = self._make.spec.has_sinks
        return optional("sinks", self._make.weights.layers[layer].sinks if has_sinks else 0)

    def attend_pieces(
        self, layer: int, queries: int, last_positions: int, pieces: PieceList,
        scratch: tuple[int, int], out: int, num_sequences: int, rows_each: int,
    ) -> tuple[Bound, Bound]:  # fmt: skip
        """Return attention of a few rows a sequence: the pieces, and their merge.

        `scratch`: totals and tops.
        """
        shape, programs, stages = (
            self._make.shape,
            self._make.shape.programs,
            self._make.shape.stages,
        )
        if num_sequences <= FEW_SEQUENCES:
            programs, stages = shape.few_programs, shape.few_stages
        # A stage has as many numbers of keys as of values.
        stage_bytes = 2 * self._make.pool.number_bytes * shape.tile_keys * self._make.spec.head_dim
        stages = max(min(stages, self._card.shared_bytes // stage_bytes), 2)
        tile_rows = self.attention_rows(rows_each)
        (unseen, window), (no_sinks, sinks) = self._window(layer), self._sinks(layer)
        common = {
            **self._make.heads(), **unseen, "ROWS": rows_each, "BM": tile_rows,
            "PIECE": shape.piece,
        }  # fmt: skip
        compute = self._make.kernel(
            attention.attend_pieces, self._types(),
            {
                **common, "BLOCK": self._make.pool.block_size, "PROGRAMS": programs,
                "HAS_SCALES": self._make.pool.has_scales,
            },
            shape.num_warps, stages, shape.max_registers,
        )  # fmt: skip
        merge = self._make.kernel(attention.merge_pieces, _TYPES, common | no_sinks, 1, 1)
        first = compute.bind(
            (programs,), queries, *self._make.cached(layer), *pieces, *scratch, self._scale,
            num_sequences, *window,
        )  # fmt: skip
        grid = (num_sequences, rows_each * self._make.spec.num_heads)
        return first, merge.bind(
            grid, *scratch, last_positions, pieces.first_pieces, out, *window, *sinks
        )

    def attention_rows(self, rows_each: int) -> int:
        """Return the rows of a piece's matrix tile: `rows_each` query rows of one KV head."""
        needed = rows_each * self._make.spec.num_heads // self._make.spec.num_kv_heads
        return max(16, int(self._make.shape.tile_rows), 1 << (needed - 1).bit_length())

    def can_attend(self, rows_each: int) -> bool:
        """Return whether a piece's tile for so many rows of a sequence fits into a card."""
        width = max(self._make.spec.head_dim, 128) * (2 if self._make.pool.has_scales else 1)
        return self.attention_rows(rows_each) * width <= 128 * _PIECE_ROWS

    def attend_chunk(
        self, layer: int, queries: int, tables: int, table_width: int, tiles: tuple[int, int],
        sequences: tuple[int, int, int], out: int, num_tiles: int,
    ) -> Bound:  # fmt: skip
        """Return attention of many rows a sequence."""
        shape, (first_rows, num_rows, last_positions) = self._make.shape, sequences
        (unseen, window), (no_sinks, sinks) = self._window(layer), self._sinks(layer)
        constants = {
            **self._make.heads(), "BLOCK": self._make.pool.block_size, "BM": shape.chunk_rows,
            "BN": shape.tile_keys, "PIECE": shape.piece, "HAS_SCALES": self._make.pool.has_scales,
            **unseen, **no_sinks,
        }  # fmt: skip
        kernel = self._make.kernel(
            attention.attend_chunk,
            self._types(),
            constants,
            shape.chunk_warps,
            shape.chunk_stages,
        )
        return kernel.bind(
            (num_tiles, self._make.spec.num_kv_heads), queries, *self._make.cached(layer), tables,
            *tiles, first_rows, num_rows, last_positions, out, self._scale, table_width, *window,
            *sinks,
        )  # fmt: skip
