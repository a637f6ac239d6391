"""Draw a step's tokens with one read from the device, and a further one for rows that need it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.core.plan import SampleInput
from engine.runner.device_sampler import DeviceSampler
from engine.runner.framework import paddle
from engine.runner.paddle_decoder import PaddleDecoder
from engine.runner.sampler import BadLogits, Sampled, Sampler

_ROWS_AT_A_TIME = 64
"""Rows of logits that are held on the device at a time, with the noise of each."""


class DrawnRows:
    """What was drawn from rows, by their numbers. Stands in for a `Sampler` over the rows."""

    def __init__(self, drawn: dict[int, Sampled | BadLogits]) -> None:
        self._drawn = drawn

    def sample(self, row: int, one: SampleInput) -> Sampled:
        """Return what was drawn from a row; raises `BadLogits` if nothing could be."""
        found = self._drawn[row]
        if isinstance(found, BadLogits):
            raise found
        return found


class DeviceDraw:
    """Draws for all rows of a step together: on the device, or on the host where it must."""

    def __init__(
        self, decoder: PaddleDecoder, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._decoder = decoder
        self._on_device = DeviceSampler(vocab_size, eos_token_ids)
        self._on_host = Sampler(vocab_size, eos_token_ids)

    def draw(self, hidden: Any, rows: np.ndarray, inputs: Sequence[SampleInput]) -> DrawnRows:
        """Draw from the logits after each of `rows`; `inputs` has one entry per row."""
        groups = [
            range(first, min(first + _ROWS_AT_A_TIME, len(inputs)))
            for first in range(0, len(inputs), _ROWS_AT_A_TIME)
        ]
        width = self._on_device.width(inputs)
        parts = [
            self._on_device.find(
                self._decoder.device_logits(hidden, rows[group.start : group.stop]),
                inputs[group.start : group.stop],
                width,
            )
            for group in groups
        ]
        drawn: dict[int, Sampled | BadLogits] = {}
        for row, (found, one) in enumerate(zip(_read(parts), inputs, strict=True)):
            token_id = self._on_device.draw(found, width, one)
            if token_id is not None:
                drawn[row] = token_id, None
        for group in groups:
            left = [row for row in group if row not in drawn]
            if left:
                self._draw_on_host(hidden, rows, inputs, group, left, drawn)
        return DrawnRows(drawn)

    def _draw_on_host(
        self,
        hidden: Any,
        rows: np.ndarray,
        inputs: Sequence[SampleInput],
        group: range,
        left: list[int],
        drawn: dict[int, Sampled | BadLogits],
    ) -> None:
        """Draw for rows of a group from their whole logits."""
        # Of the whole group again: products of another shape would differ in their last bits.
        logits = self._decoder.device_logits(hidden, rows[group.start : group.stop])
        places = paddle.to_tensor(np.array(left) - group.start)
        for row, values in zip(left, paddle.gather(logits, places).numpy(), strict=True):
            try:
                drawn[row] = self._on_host.sample(values, inputs[row])
            except BadLogits as error:
                drawn[row] = error


def _read(parts: list[paddle.Tensor]) -> np.ndarray:
    """Return the rows of all groups in one read; only some groups have columns for noise."""
    most = max(part.shape[1] for part in parts)
    padded = [paddle.nn.functional.pad(part, [0, 0, 0, most - part.shape[1]]) for part in parts]
    return np.asarray(paddle.concat(padded).numpy())
