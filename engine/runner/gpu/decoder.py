"""A decoder on a card: the three parts of a `decoder.Decoder`, as launches.

A step that decodes, drafts included, is one graph (`steps/decode_step.py`), launched as soon as the
rows are on the card. Steps with chunks are launched layer by layer, while the ones before compute.
Either way a row has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.runner.back_end import StepShape
from engine.runner.flat_batch import FlatBatch
from engine.runner.gpu.cuda_driver import Device
from engine.runner.gpu.drawing.staged_rules import staged_rules
from engine.runner.gpu.kernels.gathering import gather_rows
from engine.runner.gpu.launches import Bound, KVPool, Launches
from engine.runner.gpu.steps.decode_step import (
    DecodeSteps,
    DrawWays,
    attend_few,
    draw_sizes,
)
from engine.runner.gpu.steps.piece_lists import (
    list_all,
    list_sizes,
    lists_in,
    longest_window,
)
from engine.runner.gpu.steps.staging import Staging
from engine.runner.gpu.steps.step_memory import StepMemory, activation_sizes
from engine.runner.gpu.steps.step_rows import (
    NO_ROW,
    Chunks,
    DecodeRoom,
    StepRows,
    lay_out,
    rows_at,
)
from engine.runner.weights.spec.model_spec import DecoderSpec

_MOST_PIECES = 8192
"""Pieces of one step: 256 sequences of 8,000 tokens. Their results take 0.5 GB at 8 KV heads."""
_LOGITS_ROWS = 256
"""Rows of logits in memory, at most: 156 MB at 152,000 tokens."""
_DRAFTED_ROWS = 256
"""A step with drafts that has more rows is no graph: it computes for longer than launches take."""
_STEP_ROWS = 64
"""Steps with chunks are padded to a multiple of so many rows."""
_GATHER = {"source": "*bf16", "rows": "*i32", "out": "*bf16"}

MakeLaunches = Callable[[KVPool], Launches]


@dataclass(frozen=True, slots=True)
class Hidden:
    """The rows of a step: `num_rows` of them, padding included, if it has chunks.

    A step without chunks is computed by a graph. `is_drawn`: the graph has left logits and a token
    of each row in memory.
    """

    rows: StepRows
    num_rows: int
    is_drawn: bool = False

    def places_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the indices on the card of these rows of the batch."""
        return rows if self.rows.places is None else self.rows.places[rows]


class GpuDecoder:
    """A `decoder.Decoder`. Its calls queue work on `stream` and do not wait for it."""

    def __init__(
        self,
        device: Device,
        make_launches: MakeLaunches,
        pool: KVPool,
        spec: DecoderSpec,
        shape: StepShape,
        max_len: int,
        stream: int,
    ) -> None:
        """Allocate the buffers of the largest step, of sequences of at most `max_len` tokens."""
        self.num_layers, self.spec, self.stream = spec.num_layers, spec, stream
        self.device, self.max_len = device, max_len
        self._make_launches, self._shape = make_launches, shape
        self._heads: dict[tuple[int, bool, int, int], list[Bound]] = {}
        self.launches = make = make_launches(pool)
        self._width = -(-max_len // pool.block_size)
        self._tile = make.shape.chunk_rows // (spec.num_heads // spec.num_kv_heads)
        per_seq = self._most_pieces_each(make.shape.piece)
        self._most_pieces = min(shape.num_seqs * per_seq, max(_MOST_PIECES, per_seq))
        self._most_rows = -(-shape.num_tokens // _STEP_ROWS) * _STEP_ROWS
        self._room = self._decode_room(make)
        # All rows of a decoding step at once, so that the head is read once.
        decode_rows = max(each * most for each, (most, _) in self._room.most.items())
        self.most_logits_rows = max(min(decode_rows, _LOGITS_ROWS), shape.num_logits_rows)
        self._first_places = np.arange(self.most_logits_rows)
        self.memory = StepMemory(device, self._buffer_sizes(make))
        self.steps = DecodeSteps(
            device, self.memory, stream, self._room, self._width, self.most_logits_rows,
            staged_rules(self.most_logits_rows, spec.vocab_size),
        )  # fmt: skip
        self.steps.use(make)
        self.staging = Staging(device, self._staged_shapes())
        self._pieces = lists_in(self.memory, spec)

    def _most_pieces_each(self, piece: int) -> int:
        """Return the most pieces of `piece` keys that a sequence's rows see."""
        window, rows_each = longest_window(self.spec), self._shape.decode_rows
        num_seen = min(window + rows_each - 1, self.max_len) if window else self.max_len
        # Keys that do not begin where a piece does lie in one piece more.
        return min(-(-self.max_len // piece), -(-num_seen // piece) + 1)

    def _decode_room(self, make: Launches) -> DecodeRoom:
        """Return the room of steps without chunks, with one row a sequence and with drafts.

        A piece takes as much memory as its matrix tile has rows.
        """
        most_seqs, most_pieces = self._shape.num_seqs, self._most_pieces
        found = {1: (most_seqs, most_pieces)}
        most_rows = min(self._most_rows, _DRAFTED_ROWS)
        decode_rows = min(self._shape.decode_rows, most_rows)
        numbers = [2**power for power in range(1, 8) if 2**power < decode_rows]
        for each in [*numbers, decode_rows] if decode_rows > 1 else []:
            if make.attention.can_attend(each):
                share = make.attention.attention_rows(each) // make.attention.attention_rows(1)
                found[each] = (min(most_seqs, most_rows // each), most_pieces // share)
        return DecodeRoom(make.shape.piece, found, longest_window(self.spec))

    def _buffer_sizes(self, make: Launches) -> dict[str, int]:
        spec, shape, pieces = self.spec, self._shape, self._most_pieces
        heads = pieces * spec.num_kv_heads * make.attention.attention_rows(1)
        logits = self.most_logits_rows
        return activation_sizes(spec, self._most_rows) | {
            "chosen": 2 * logits * spec.hidden_size,
            "logits": 4 * logits * spec.vocab_size,
            **list_sizes(
                spec, shape.num_seqs, pieces, make.shape.piece // make.pool.block_size
            ),
            "totals": 4 * heads * spec.head_dim, "tops": 8 * heads,
            **draw_sizes(make.num_slices, logits),
        }  # fmt: skip

    def _staged_shapes(self) -> dict[str, tuple[int, ...]]:
        seqs, rows, width = self._shape.num_seqs, self._most_rows, self._width
        tiles = seqs + -(-rows // self._tile)
        return {
            "tokens": (rows,), "positions": (rows,), "slots": (rows,),
            "single_tables": (seqs, width),
            "first_rows": (seqs,), "num_rows": (seqs,), "last_positions": (seqs,),
            "tile_chunks": (tiles,), "tile_rows": (tiles,), "chunk_tables": (seqs, width),
            "chosen_rows": (self.most_logits_rows,),
        }  # fmt: skip

    def use_pool(self, pool: KVPool) -> None:
        """Use `pool` for keys and values from now on."""
        self._heads.clear()
        self.launches = self._make_launches(pool)
        self.steps.use(self.launches)

    def bind_all(self) -> None:
        """Bind every kind of launch that a step can have: asks for every kernel."""
        for rows_each, sizes in self.steps.sizes.items():
            for size in sizes:
                self.steps.launches(size, rows_each, self._kinds_of_layers())
                self._list_pieces(size)
        for num_rows in (1, 32, 64, 256, 1024, self._most_rows):
            if num_rows <= self._most_rows:
                self._embed(num_rows)
                for layer in self._kinds_of_layers():
                    self._layer(layer, num_rows, 1, 1)
        for count in (1, 9, 17, 33, 65, self.most_logits_rows):
            if count <= self.most_logits_rows:
                self._head(count, self.memory["normed"], self.memory["logits"], is_gathered=True)

    def _kinds_of_layers(self) -> list[int]:
        """Return one layer of each kind: with a window or without, and weights in other forms."""
        kinds = {
            (layer.kind, self.spec.window_of(index) > 0): index
            for index, layer in enumerate(self.launches.weights.layers)
        }
        return list(kinds.values())

    def begin(self, batch: FlatBatch, ways: DrawWays | None = None) -> Hidden:
        """Send the rows; a step without chunks is computed to its last layer.

        With `ways` it is computed to its tokens, unless it has more rows than are drawn at once.
        """
        self.device.use()
        rows = lay_out(batch, self._tile, self._room)
        if rows.chunks is None:
            if ways is not None and rows.places is not None:
                ways = ways.take(rows_at(rows.places, rows.count))
            return Hidden(rows, rows.count, self.steps.begin(rows, ways))
        num_rows = -(-rows.count // _STEP_ROWS) * _STEP_ROWS
        self._send(rows, rows.chunks, num_rows)
        self._embed(num_rows)(self.stream)
        if rows.num_singles:
            for launch in self._list_pieces(rows.num_singles):
                launch(self.stream)
        return Hidden(rows, num_rows)

    def has_pieces_for(self, positions: np.ndarray) -> bool:
        """Return whether rows at these positions can be a step without chunks."""
        return self._room.rows_each(1, positions) == 1

    def _send(self, rows: StepRows, chunks: Chunks, num_rows: int) -> None:
        staging = self.staging
        staging.wait()
        staging.put("tokens", rows.tokens, num_rows)
        staging.put("positions", rows.positions, num_rows, NO_ROW)
        staging.put("slots", rows.slots, num_rows, NO_ROW)
        staging.put("single_tables", rows.single_tables)
        for name in ("first_rows", "num_rows", "last_positions", "tile_chunks", "tile_rows"):
            staging.put(name, getattr(chunks, name))
        staging.put("chunk_tables", chunks.tables)
        staging.send(self.stream)

    def run_layer(self, index: int, hidden: Hidden) -> None:
        rows, chunks = hidden.rows, hidden.rows.chunks
        if chunks is None:
            return
        for launch in self._layer(index, hidden.num_rows, rows.num_singles, len(chunks.tile_rows)):
            launch(self.stream)

    def _list_pieces(self, num_singles: int) -> list[Bound]:
        staging = self.staging
        # A single row's position is its sequence's last one.
        return list_all(
            self.launches, self._pieces, staging["positions"],
            (staging["single_tables"], self._width), num_singles,
        )  # fmt: skip

    def _embed(self, num_rows: int) -> Bound:
        memory = self.memory
        return self.launches.embed(
            self.staging["tokens"], memory["hidden"], memory["normed"], num_rows
        )

    def _layer(self, index: int, num_rows: int, num_singles: int, num_tiles: int) -> list[Bound]:
        """Return the launches of one layer."""

        def attend(layer: int) -> list[Bound]:
            return self._attention(layer, num_singles, num_tiles)

        staging = self.staging
        return self.launches.layer(
            index, self.memory, num_rows, staging["positions"], staging["slots"], attend
        )

    def _attention(self, layer: int, num_singles: int, num_tiles: int) -> list[Bound]:
        memory, staging, make = self.memory, self.staging, self.launches
        found: list[Bound] = []
        if num_singles:
            found += attend_few(
                make, memory, self._pieces, staging["positions"], layer, num_singles
            )
        if num_tiles:
            found.append(
                make.attention.attend_chunk(
                    layer, memory["queries"], staging["chunk_tables"], self._width,
                    (staging["tile_chunks"], staging["tile_rows"]),
                    (staging["first_rows"], staging["num_rows"], staging["last_positions"]),
                    memory["attended"], num_tiles,
                )
            )  # fmt: skip
        return found

    def logits(self, hidden: Hidden, rows: np.ndarray) -> np.ndarray:
        count, vocab_size = len(rows), self.spec.vocab_size
        self.queue_logits(hidden.places_of(rows))
        self.device.synchronize(self.stream)
        raw = self.device.download(self.memory["logits"], 4 * count * vocab_size)
        return np.frombuffer(raw, np.float32).reshape(count, vocab_size)

    def queue_logits(self, places: np.ndarray, normed: int = 0, logits: int = 0) -> None:
        """Queue the logits after the rows at the indices `places`.

        They go from the buffer `normed` into the buffer `logits`, or as the addresses say.
        """
        normed, logits = normed or self.memory["normed"], logits or self.memory["logits"]
        count = len(places)
        is_gathered = bool((places != self._first_places[:count]).any())
        if is_gathered:
            self.staging.wait()
            self.staging.put("chosen_rows", places)
            self.staging.send(self.stream)
        key = (count, is_gathered, normed, logits)
        if key not in self._heads:
            self._heads[key] = self._head(count, normed, logits, is_gathered=is_gathered)
        for launch in self._heads[key]:
            launch(self.stream)

    def _head(self, count: int, normed: int, logits: int, *, is_gathered: bool) -> list[Bound]:
        make, chosen = self.launches, self.memory["chosen"]
        if not is_gathered:
            return [make.product(normed, make.weights.head, logits, count, is_float=True)]
        size = self.spec.hidden_size
        constants = {"N": size, "COLUMNS": 1 << (size - 1).bit_length()}
        gather = make.kernel(gather_rows, _GATHER, constants, 4, 1)
        return [
            gather.bind((count,), normed, self.staging["chosen_rows"], chosen),
            make.product(chosen, make.weights.head, logits, count, is_float=True),
        ]

    def close(self) -> None:
        """Wait for the card; free graphs and buffers."""
        self.device.synchronize_all()
        self.steps.close()
        self.staging.close()
        self.memory.close()
