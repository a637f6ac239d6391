"""Draw a step's tokens with one read from the device, and a further one for rows that need it."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.core.step.step_batch import StepBatch
from engine.runner.drawing.device_sampler import DeviceSampler
from engine.runner.drawing.host_draw import add_draws
from engine.runner.drawing.sampler import SampledRows, Sampler
from engine.runner.drawing.verification import Draws, draw_inputs
from engine.runner.paddle.decoder import PaddleDecoder
from engine.runner.paddle_import import paddle

_ROWS_AT_A_TIME = 64
"""Rows of logits that are held on the device at a time, with the noise of each."""


class DeviceDraw:
    """Draws for all rows of a step together: on the device, or on the host where it must."""

    def __init__(
        self, decoder: PaddleDecoder, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._decoder = decoder
        self._on_device = DeviceSampler(vocab_size, eos_token_ids)
        self._on_host = Sampler(vocab_size)

    def draw(self, hidden: Any, sampled: np.ndarray, rows: SampledRows, batch: StepBatch) -> Draws:
        """Draw from the logits after rows `sampled` of `hidden`."""
        if not len(sampled):
            return Draws()
        inputs = list(draw_inputs(batch))
        groups = [
            range(first, min(first + _ROWS_AT_A_TIME, len(inputs)))
            for first in range(0, len(inputs), _ROWS_AT_A_TIME)
        ]
        width = self._on_device.width(inputs)
        parts = [
            self._on_device.find(
                self._decoder.device_logits(hidden, sampled[group.start : group.stop]),
                inputs[group.start : group.stop],
                width,
            )
            for group in groups
        ]
        found = [
            self._on_device.draw(head, width, one)
            for head, one in zip(_read(parts), inputs, strict=True)
        ]
        # The device knows neither grammars nor rules about tokens: these rows are read whole.
        for row in _ruled_rows(rows, batch):
            found[row] = None
        draws = Draws([token_id or 0 for token_id in found], [True] * len(found))
        for group in groups:
            left = np.array([row for row in group if found[row] is None], np.int64)
            if len(left):
                self._draw_on_host(hidden, sampled, rows, group, left, draws)
        return draws

    def _draw_on_host(
        self,
        hidden: Any,
        sampled: np.ndarray,
        rows: SampledRows,
        group: range,
        left: np.ndarray,
        draws: Draws,
    ) -> None:
        """Draw for rows of a group from their whole logits."""
        # The whole group is computed again: products of another shape differ in their last bits.
        logits = self._decoder.device_logits(hidden, sampled[group.start : group.stop])
        places = paddle.to_tensor(left - group.start)
        part = Draws()
        values = paddle.gather(logits, places).numpy()
        add_draws(part, self._on_host, values, rows.take(left))
        for number, row in enumerate(left.tolist()):
            draws.token_ids[row] = part.token_ids[number]
            draws.is_drawn[row] = part.is_drawn[number]
            if number in part.logprobs:
                draws.logprobs[row] = part.logprobs[number]


def _ruled_rows(rows: SampledRows, batch: StepBatch) -> list[int]:
    """Return the rows under a grammar, or under rules about tokens."""
    seats = batch.seats
    is_ruled = seats.has_rules[rows.histories] | seats.has_grammar[rows.histories]
    return np.flatnonzero(is_ruled).tolist()


def _read(parts: list[paddle.Tensor]) -> np.ndarray:
    """Return the rows of all groups in one read; only some groups have columns for noise."""
    most = max(part.shape[1] for part in parts)
    padded = [paddle.nn.functional.pad(part, [0, 0, 0, most - part.shape[1]]) for part in parts]
    return np.asarray(paddle.concat(padded).numpy())
