"""A step of many rows a sequence: a prompt's chunk is computed, and its last row's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.runner.gpu.cuda_driver import Device
from engine.runner.gpu.launcher import ADDRESS_ALIGNMENT
from engine.runner.gpu.launches import Bound, Launches
from engine.runner.gpu.steps.step_memory import StepMemory, activation_sizes


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """Tokens of one sequence from position `start` on, and its block table."""

    tokens: Sequence[int]
    start: int
    table: Sequence[int]


class ChunkStep:
    """Steps of up to `max_rows` rows in up to `max_sequences` chunks."""

    def __init__(
        self, device: Device, launches: Launches, stream: int, max_rows: int, max_sequences: int,
        max_len: int,
    ) -> None:  # fmt: skip
        self._device, self._make, self._stream = device, launches, stream
        self._table_width = -(-max_len // launches.pool.block_size)
        spec = launches.spec
        self._tile = launches.shape.chunk_rows // (spec.num_heads // spec.num_kv_heads)
        tiles = max_sequences + -(-max_rows // self._tile)
        # One product per row writes them, each at an aligned address.
        self._logits_bytes = -(-4 * spec.vocab_size // ADDRESS_ALIGNMENT) * ADDRESS_ALIGNMENT
        self.memory = StepMemory(
            device,
            activation_sizes(spec, max_rows)
            | {
                "logits": self._logits_bytes * max_sequences,
                "tokens": 4 * max_rows, "positions": 4 * max_rows, "slots": 4 * max_rows,
                "tile_sequences": 4 * tiles, "tile_rows": 4 * tiles,
                "first_rows": 4 * max_sequences, "num_rows": 4 * max_sequences,
                "last_positions": 4 * max_sequences,
                "tables": 4 * max_sequences * self._table_width,
            },
        )  # fmt: skip

    def run(self, chunks: Sequence[ChunkRow]) -> None:
        """Compute the chunks; `logits` has a row for each one's last token."""
        num_rows, num_tiles = self._upload(chunks)
        for launch in self.plan(chunks, num_rows, num_tiles):
            launch(self._stream)

    def _upload(self, chunks: Sequence[ChunkRow]) -> tuple[int, int]:
        block = self._make.pool.block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        tile_sequences: list[int] = []
        tile_rows: list[int] = []
        firsts: list[int] = []
        tables = np.zeros((len(chunks), self._table_width), np.int32)
        for index, chunk in enumerate(chunks):
            firsts.append(len(tokens))
            tables[index, : len(chunk.table)] = chunk.table
            places = np.arange(chunk.start, chunk.start + len(chunk.tokens))
            tokens.extend(chunk.tokens)
            positions.extend(places)
            slots.extend(tables[index, places // block] * block + places % block)
            starts = range(0, len(chunk.tokens), self._tile)
            tile_rows.extend(starts)
            tile_sequences.extend([index] * len(starts))
        # Later tiles have more keys: they start first, so that none of them runs alone at the end.
        order = sorted(range(len(tile_rows)), key=lambda tile: -tile_rows[tile])
        given = {
            "tokens": tokens, "positions": positions, "slots": slots, "first_rows": firsts,
            "tile_sequences": [tile_sequences[tile] for tile in order],
            "tile_rows": [tile_rows[tile] for tile in order],
            "num_rows": [len(chunk.tokens) for chunk in chunks],
            "last_positions": [chunk.start + len(chunk.tokens) - 1 for chunk in chunks],
            "tables": tables,
        }  # fmt: skip
        # The step before may still read these buffers.
        self._device.synchronize(self._stream)
        for name, values in given.items():
            self._device.upload(self.memory[name], np.asarray(values, np.int32).tobytes())
        return len(tokens), len(tile_rows)

    def plan(self, chunks: Sequence[ChunkRow], num_rows: int, num_tiles: int) -> list[Bound]:
        """Return the step's launches."""
        make, memory, spec = self._make, self.memory, self._make.spec
        normed, size = memory["normed"], spec.hidden_size

        def attend(layer: int) -> list[Bound]:
            launch = make.attention.attend_chunk(
                layer, memory["queries"], memory["tables"], self._table_width,
                (memory["tile_sequences"], memory["tile_rows"]),
                (memory["first_rows"], memory["num_rows"], memory["last_positions"]),
                memory["attended"], num_tiles,
            )  # fmt: skip
            return [launch]

        found = [
            make.embed(memory["tokens"], memory["hidden"], normed, num_rows),
            *make.layers(memory, num_rows, memory["positions"], attend),
        ]
        last_row = -1
        for index, chunk in enumerate(chunks):
            last_row += len(chunk.tokens)
            found.append(
                make.product(
                    normed + 2 * last_row * size, make.weights.head,
                    memory["logits"] + index * self._logits_bytes, 1, is_float=True,
                )
            )  # fmt: skip
        return found

    def logits(self, count: int) -> np.ndarray:
        """Return the logits of the step's chunks, float32 [count, vocab_size]."""
        self._device.synchronize(self._stream)
        raw = self._device.download(self.memory["logits"], self._logits_bytes * count)
        rows = np.frombuffer(raw, np.float32).reshape(count, -1)
        return rows[:, : self._make.spec.vocab_size]

    def close(self) -> None:
        """Free the buffers."""
        self.memory.close()
