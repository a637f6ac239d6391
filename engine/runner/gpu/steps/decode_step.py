"""A decoding step as one graph: rows of many sequences in, the next token of each appended.

Everything that the next step reads is on the card and is advanced there by the last kernel, so a
step is started without the host knowing the tokens of the one before.
"""

from __future__ import annotations

import numpy as np

from engine.runner.gpu.cuda_driver import Device, Graph
from engine.runner.gpu.launches import DRAW_SLICE, Bound, Launches, PieceList
from engine.runner.gpu.steps.step_memory import StepMemory, activation_sizes

_NO_TOKEN = -1


class DecodeStep:
    """Steps of up to `num_sequences` sequences with one row each; unused rows are padding."""

    def __init__(
        self, device: Device, launches: Launches, stream: int, num_sequences: int, max_len: int,
        history_length: int = 64,
    ) -> None:  # fmt: skip
        self._device, self._stream = device, stream
        self.num_sequences, self.history_length = num_sequences, history_length
        spec, pool, shape = launches.spec, launches.pool, launches.shape
        self.table_width = -(-max_len // pool.block_size)
        slices = -(-spec.vocab_size // DRAW_SLICE)
        pieces = num_sequences * -(-max_len // shape.piece)
        heads = pieces * spec.num_kv_heads * max(launches.group_rows(1), shape.tile_rows)
        rows = num_sequences
        self.memory = StepMemory(
            device,
            activation_sizes(spec, rows)
            | {
                "logits": 4 * rows * spec.vocab_size,
                "first_pieces": 4 * (rows + 1),
                "piece_sequences": 4 * pieces, "piece_starts": 4 * pieces,
                "piece_lasts": 4 * pieces,
                "piece_blocks": 4 * pieces * (shape.piece // pool.block_size),
                "totals": 4 * heads * spec.head_dim,
                "tops": 8 * heads,
                "tokens": 4 * rows, "last_positions": 4 * rows, "slots": 4 * rows,
                "indices": 4 * rows, "temperatures": 4 * rows, "seeds": 8 * rows,
                "tables": 4 * rows * self.table_width, "history": 4 * rows * history_length,
                "best_scores": 8 * rows * slices, "best_tokens": 4 * rows * slices,
            },
        )  # fmt: skip
        self.launches = self._plan(launches)
        self._graph: Graph | None = None

    def _plan(self, make: Launches) -> list[Bound]:
        memory, rows = self.memory, self.num_sequences
        pieces = PieceList(*(memory[name] for name in PieceList._fields))

        def attend(layer: int) -> tuple[Bound, ...]:
            return make.attend_pieces(
                layer, memory["queries"], memory["last_positions"], pieces,
                (memory["totals"], memory["tops"]), memory["attended"], rows, 1,
            )  # fmt: skip

        names = (
            "temperatures", "seeds", "indices", "best_scores", "best_tokens", "tokens",
            "last_positions", "slots", "tables", "history",
        )  # fmt: skip
        state = {name: memory[name] for name in names}
        return [
            make.list_pieces(
                memory["last_positions"], memory["tables"], self.table_width, pieces, rows
            ),
            make.embed(memory["tokens"], memory["hidden"], memory["normed"], rows),
            *make.layers(memory, rows, memory["last_positions"], attend),
            make.product(
                memory["normed"], make.weights.head, memory["logits"], rows, is_float=True
            ),
            *make.draw(memory["logits"], state, self.table_width, self.history_length, rows),
        ]

    def set_rows(
        self, tokens: np.ndarray, last_positions: np.ndarray, tables: np.ndarray, block_size: int,
        temperatures: np.ndarray | None = None, seeds: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Set every row. `tokens` are at `last_positions` [rows]; `tables` [rows, table_width]."""
        rows = self.num_sequences
        blocks = tables[np.arange(rows), np.maximum(last_positions, 0) // block_size]
        slots = blocks * block_size + last_positions % block_size
        slots = np.where(last_positions < 0, _NO_TOKEN, slots)
        given = {
            "tokens": tokens.astype(np.int32),
            "last_positions": last_positions.astype(np.int32),
            "slots": slots.astype(np.int32),
            "tables": tables.astype(np.int32),
            "indices": np.zeros(rows, np.int32),
            "temperatures": np.zeros(rows, np.float32) if temperatures is None
            else temperatures.astype(np.float32),
            "seeds": np.zeros(rows, np.int64) if seeds is None else seeds.astype(np.int64),
        }  # fmt: skip
        self._device.synchronize(self._stream)
        for name, values in given.items():
            self._device.upload(self.memory[name], np.ascontiguousarray(values).tobytes())

    def capture(self) -> None:
        """Record the step as a graph."""
        self._graph = self._device.capture(self._stream, self.launch)

    def launch(self) -> None:
        """Launch every kernel of a step."""
        for launch in self.launches:
            launch(self._stream)

    def run(self) -> None:
        """Start a step, which ends later."""
        if self._graph is None:
            self.launch()
        else:
            self._graph.launch(self._stream)

    def history(self) -> np.ndarray:
        """Return the last tokens that were drawn, [rows, history_length], after all steps ended."""
        self._device.synchronize(self._stream)
        raw = self._device.download(
            self.memory["history"], 4 * self.num_sequences * self.history_length
        )
        return np.frombuffer(raw, np.int32).reshape(self.num_sequences, self.history_length)

    def close(self) -> None:
        """Free the graph and the buffers."""
        if self._graph is not None:
            self._graph.close()
        self.memory.close()
