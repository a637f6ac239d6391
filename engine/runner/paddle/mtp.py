"""The MTP layer in Paddle operators, beside a `PaddleDecoder`, with any of its attentions."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.runner.flat_batch import FlatBatch
from engine.runner.mtp.mtp_weights import MtpWeights
from engine.runner.paddle.decoder import Linear, PaddleDecoder
from engine.runner.paddle_import import paddle


class PaddleMtp:
    """A `draft_step.MtpLayer`."""

    def __init__(self, weights: MtpWeights, decoder: PaddleDecoder, layer_index: int) -> None:
        """Load the layer; `layer_index` is its layer of the cache."""
        self._decoder, self._index = decoder, layer_index
        self._embedding_norm = decoder.tensor(weights.embedding_norm())
        self._hidden_norm = decoder.tensor(weights.hidden_norm())
        self._output_norm = decoder.tensor(weights.output_norm())
        joined = np.concatenate(weights.projections(), axis=1).T
        bias = weights.projection_bias()
        self._projection = Linear(
            decoder.tensor(np.ascontiguousarray(joined)),
            None if bias is None else decoder.tensor(bias),
        )
        self._layer = decoder.load_layer(weights.files, weights.layer_prefix)
        self._recurses_on_normed = weights.recurses_on_normed
        self._head, self._draft_ids = decoder.head, weights.draft_token_ids
        if self._draft_ids is not None:
            self._head = decoder.head[paddle.to_tensor(self._draft_ids)]

    @paddle.no_grad()
    def first_drafts(self, hidden: Any, rows: np.ndarray, batch: FlatBatch) -> np.ndarray:
        outputs = self._run(self._decoder.final_states(hidden, rows), batch)
        if not len(batch.sampled_rows):
            return np.zeros(0, np.int64)
        return self._draft(outputs[paddle.to_tensor(batch.sampled_rows)])

    @paddle.no_grad()
    def next_drafts(self, kept: np.ndarray, batch: FlatBatch) -> np.ndarray:
        return self._draft(self._run(self._states[paddle.to_tensor(kept)], batch))

    def _run(self, states: paddle.Tensor, batch: FlatBatch) -> paddle.Tensor:
        """Return the layer's outputs `[rows, hidden_size]`."""
        decoder = self._decoder
        decoder.begin_rows(batch)
        embedded = decoder.embedding[paddle.to_tensor(batch.token_ids)]
        normed = [
            decoder.norm(embedded, self._embedding_norm),
            decoder.norm(states, self._hidden_norm),
        ]
        return decoder.advance(
            self._layer, self._index, self._projection(paddle.concat(normed, axis=-1))
        )

    def _draft(self, outputs: paddle.Tensor) -> np.ndarray:
        normed = self._decoder.norm(outputs, self._output_norm)
        self._states = normed if self._recurses_on_normed else outputs
        logits = paddle.matmul(normed, self._head, transpose_y=True).astype("float32")
        best = np.asarray(logits.argmax(axis=-1).numpy())
        return best if self._draft_ids is None else self._draft_ids[best]
