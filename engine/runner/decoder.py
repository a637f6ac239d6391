"""The decoder: the same three parts for every family and every computation.

A model family with another kind of layer attaches here: implementations run their layers in
`run_layer`, which has the layer's index, as they do those with a mixture of experts or with a
sliding window. Such a family needs its fields in `model_spec.DecoderSpec`.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from engine.runner.flat_batch import FlatBatch


class Decoder(Protocol):
    """A loaded model on its KV cache. `hidden` is a back end's own `[rows, hidden_size]` array.

    A row of `hidden` depends on its own sequence's tokens and cached KV alone.
    """

    num_layers: int

    def begin(self, batch: FlatBatch) -> Any:
        """Embed the batch's tokens and return `hidden`; later calls with it are for this batch."""

    def run_layer(self, index: int, hidden: Any) -> None:
        """Advance `hidden` by one layer in place; write the batch's keys and values."""

    def logits(self, hidden: Any, rows: np.ndarray) -> np.ndarray:
        """Return float32 logits `[len(rows), vocab_size]` of these rows.

        The caller may change them; the next call may overwrite them.
        """
