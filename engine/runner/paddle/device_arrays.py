"""Index arrays of a step on the device, sent in one copy."""

from __future__ import annotations

import numpy as np

from engine.runner.paddle_import import paddle


def to_device(*arrays: np.ndarray) -> list[paddle.Tensor]:
    """Return integer arrays as int64 tensors of the same shapes, all sent in one copy."""
    flat = paddle.to_tensor(np.concatenate([array.reshape(-1) for array in arrays], dtype=np.int64))
    ends = np.cumsum([array.size for array in arrays]).tolist()
    return [
        flat[end - array.size : end].reshape(list(array.shape))
        for array, end in zip(arrays, ends, strict=True)
    ]
