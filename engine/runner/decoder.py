"""The decoder: the same three parts for every family and every computation."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from engine.runner.flat_batch import FlatBatch


class Decoder(Protocol):
    """A loaded model on its KV cache. `hidden` is a back end's own `[rows, hidden_size]` array.

    An entry of `hidden` depends on its own sequence's tokens and cached KV alone.
    """

    num_layers: int

    def begin(self, batch: FlatBatch) -> Any:
        """Embed the batch's tokens; later calls with this `hidden` belong to this batch."""

    def run_layer(self, index: int, hidden: Any) -> None:
        """Advance `hidden` by one layer in place, writing the batch's keys and values."""

    def logits(self, hidden: Any, rows: np.ndarray) -> np.ndarray:
        """Float32 logits `[len(rows), vocab_size]` of some rows; the caller may change them."""
