"""Quantised weights of files, in the order in which kernels read them.

Nothing is rounded: numbers and scales only change their order (`kernels.stored_weights`).
"""

from __future__ import annotations

import numpy as np

from engine.runner.gpu.weights import STRIP_INPUTS, Form

Bytes = np.ndarray
"""An array of uint8."""

FORMS = {"BF16": Form.BF16, "Q4_0": Form.Q4_0, "Q8_0": Form.Q8_0, "MXFP4": Form.MXFP4}
"""The formats of files that kernels read as they are."""

_PARTS = 4
"""A strip's groups of 32 inputs."""


def repacked(form: Form, rows: Bytes) -> tuple[Bytes, Bytes]:
    """Return the words and the scales of rows of Q4_0, Q8_0 or MXFP4.

    All are [outputs, bytes]; a row has a multiple of 32 inputs, and behind them zeros up to a
    multiple of 128.
    """
    outputs = len(rows)
    scale_bytes = 1 if form is Form.MXFP4 else 2
    group_bytes = scale_bytes + form.group_inputs * form.bits // 8
    missing = -rows.shape[1] % (_PARTS * group_bytes)
    if missing:
        rows = np.pad(rows, ((0, 0), (0, missing)))
    groups = rows.reshape(outputs, -1, _PARTS, group_bytes)
    scales = np.ascontiguousarray(groups[..., :scale_bytes]).reshape(outputs, -1)
    values = groups[..., scale_bytes:]
    strips = groups.shape[1]
    words: Bytes = np.empty((outputs, strips, form.bits * STRIP_INPUTS // 16, 2), np.uint8)
    if form is Form.Q8_0:
        halves = words.reshape(outputs, strips, 2, 32, 2)
        halves[..., 0], halves[..., 1] = values[:, :, ::2], values[:, :, 1::2]
        return words.reshape(outputs, -1), scales
    # A group's byte has the inputs j and 16 + j; a word has one input of each group.
    for place in range(2):
        low, high = values[:, :, 2 * place], values[:, :, 2 * place + 1]
        words[:, :, :16, place] = (low & 15) | (high << 4)
        words[:, :, 16:, place] = (low >> 4) | (high & 0xF0)
    return words.reshape(outputs, -1), scales


def float8_words(numbers: Bytes) -> Bytes:
    """Return the words of e4m3 numbers [outputs, inputs], as bytes of the same shape."""
    halves = numbers.reshape(len(numbers), -1, 2, STRIP_INPUTS // 2)
    return np.ascontiguousarray(halves.swapaxes(2, 3)).reshape(len(numbers), -1)
