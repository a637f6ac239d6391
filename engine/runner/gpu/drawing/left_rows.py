"""Logits of the few rows that the host draws, computed once more.

The logits of the step may by then be changed by edits, or overwritten by the next step. So the
head's inputs are kept, 2 bytes a number of a hidden row; the head gives a row the same bits again.
"""

from __future__ import annotations

import numpy as np

from engine.runner.gpu.cuda_driver import Device
from engine.runner.gpu.decoder import GpuDecoder

MOST_LEFT = 16
"""Rows at a time: 10 MB on the card, and of pinned memory, at 152,000 tokens."""


class LeftRows:
    """Brings rows of logits to the host, at most `MOST_LEFT` at a time."""

    def __init__(self, device: Device, decoder: GpuDecoder) -> None:
        self._device, self._decoder = device, decoder
        self._hidden_bytes = 2 * decoder.spec.hidden_size
        self._row_bytes = 4 * decoder.spec.vocab_size
        self._kept = device.allocate(self._hidden_bytes * decoder.most_logits_rows)
        self._logits = device.allocate(self._row_bytes * MOST_LEFT)
        self._pinned = device.allocate_pinned(self._row_bytes * MOST_LEFT)

    def keep(self, num_rows: int) -> None:
        """Keep the head's inputs of a step's first rows, before another step is queued."""
        source, size = self._decoder.memory["normed"], self._hidden_bytes * num_rows
        self._device.copy(self._kept.address, source, size, self._decoder.stream)

    def logits(self, places: np.ndarray, *, are_kept: bool) -> np.ndarray:
        """Wait for the logits of rows at these indices, float32 `[rows, vocab_size]`.

        The next call overwrites them. `are_kept`: the rows are those of the step that was kept
        last; else of the latest step.
        """
        decoder, count = self._decoder, len(places)
        source = self._kept.address if are_kept else decoder.memory["normed"]
        decoder.queue_logits(places, source, self._logits.address)
        size = self._row_bytes * count
        self._device.copy(self._pinned.address, self._logits.address, size, decoder.stream)
        self._device.synchronize(decoder.stream)
        return self._pinned.host_bytes()[:size].view(np.float32).reshape(count, -1)
