"""A node's decoding steps by themselves: rows that are set once, and run again and again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from engine.runner.back_end import StepShape
from engine.runner.gpu.decoder import GpuDecoder
from engine.runner.gpu.launches import Bound, Launches
from engine.runner.gpu.steps.decode_step import DrawWays
from engine.runner.gpu.steps.step_rows import NO_ROW, StepRows


class Decoding:
    """Steps of `count` sequences of at most `max_len` tokens, one row each."""

    def __init__(self, device: Any, make: Launches, stream: int, count: int, max_len: int) -> None:
        shape = StepShape(num_tokens=count, num_seqs=count, num_logits_rows=count)
        self.decoder = GpuDecoder(
            device, lambda pool: make, make.pool, make.spec, shape, max_len, stream
        )
        self.steps, self.memory = self.decoder.steps, self.decoder.memory
        self.count, self.table_width = count, -(-max_len // make.pool.block_size)
        self._device, self._stream = device, stream
        self._block_size = make.pool.block_size
        self._launches: list[Bound] = []
        self._rows: StepRows | None = None
        self._ways: DrawWays | None = None
        self._graph: Any = None

    @property
    def launches(self) -> list[Bound]:
        """The launches of a step, as `DecodeSteps.launches` orders them."""
        if not self._launches:
            self._launches = self.steps.launches(self.count)
        return self._launches

    def set_rows(
        self, tokens: np.ndarray, positions: np.ndarray, tables: np.ndarray,
        temperatures: np.ndarray | None = None, seeds: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Set every row: the token at a position (-1: padding), with its block table."""
        zeros = np.zeros(self.count)
        self._rows = StepRows(tokens, positions, self._slots(positions, tables), self.count, tables)
        self._ways = DrawWays(
            (zeros if temperatures is None else temperatures).astype(np.float32),
            (zeros if seeds is None else seeds).astype(np.int64),
            zeros.astype(np.int64),
        )

    def _slots(self, positions: np.ndarray, tables: np.ndarray) -> np.ndarray:
        size = self._block_size
        blocks = tables[np.arange(self.count), np.maximum(positions, 0) // size]
        slots: np.ndarray = np.where(positions < 0, NO_ROW, blocks * size + positions % size)
        return slots

    def begin(self) -> None:
        """Send the rows and queue a step, as a node does."""
        assert self._rows is not None
        assert self.steps.begin(self._rows, self._ways)

    def drawn(self) -> np.ndarray:
        """Run a step; return its tokens."""
        self.begin()
        self.steps.read(self.count)
        return self.steps.tokens()

    def go_on(self) -> None:
        """Queue the way of the last step's tokens to the host, and the step after it."""
        self.steps.read(self.count)
        rows, ways = self._rows, self._ways
        assert rows is not None
        assert ways is not None
        positions = np.where(rows.positions < 0, NO_ROW, rows.positions + 1)
        self._rows = replace(
            rows, positions=positions, slots=self._slots(positions, rows.single_tables),
            sources=np.arange(self.count),
        )  # fmt: skip
        self._ways = replace(ways, indices=ways.indices + 1)
        self.begin()

    def tokens(self) -> np.ndarray:
        """Wait for the tokens that are on their way."""
        return self.steps.tokens()

    def logits(self) -> np.ndarray:
        """Return the logits of the last step, float32 [count, vocab_size]."""
        self._device.synchronize(self._stream)
        size = self.decoder.spec.vocab_size
        raw = self._device.download(self.memory["logits"], 4 * self.count * size)
        return np.frombuffer(raw, np.float32).reshape(self.count, size)

    def capture(self) -> None:
        """Record a step of the rows that are on the card."""
        self._graph = self._device.capture(self._stream, self.launch)

    def launch(self) -> None:
        """Launch every kernel of a step of the rows that are on the card."""
        for one in self.launches:
            one(self._stream)

    def run(self) -> None:
        """Start the step that was recorded."""
        self._graph.launch(self._stream)

    def close(self) -> None:
        """Free the graph and the buffers."""
        if self._graph is not None:
            self._graph.close()
        self.decoder.close()
