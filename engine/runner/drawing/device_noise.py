"""The noise of token draws, computed on the device: the same Philox words as `philox`.

Products of two 32-bit words are taken in int64. They wrap around, and the bits are the right ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.runner.paddle_import import paddle

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYLS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_MASK = 0xFFFFFFFF


class DeviceNoise:
    """Gumbel noise of whole rows."""

    def __init__(self) -> None:
        # As tensors: a Python number would be multiplied as a float.
        self._mask, self._half, *multipliers = (
            paddle.to_tensor(np.array(value, np.int64)) for value in (_MASK, 32, *_MULTIPLIERS)
        )
        self._multipliers = multipliers

    def rows(
        self, seeds: Sequence[int], output_indices: Sequence[int], vocab_size: int
    ) -> paddle.Tensor:
        """Return noise, float64 `[rows, vocab_size]`, within a few last bits of the host's."""
        words = self.words(seeds, output_indices, -(-vocab_size // 4))[:, :vocab_size]
        uniform = (words.astype("float64") + 0.5) * 2.0**-32
        return -paddle.log(-paddle.log(uniform))

    def words(
        self, seeds: Sequence[int], output_indices: Sequence[int], num_blocks: int
    ) -> paddle.Tensor:
        """Return the words of blocks 0 to `num_blocks - 1`, int64 `[rows, 4 * num_blocks]`."""
        keys = np.array([[seed & _MASK, seed >> 32 & _MASK] for seed in seeds], np.int64)
        weyls = np.arange(_NUM_ROUNDS)[:, None, None] * np.array(_WEYLS) + keys
        round_keys = paddle.to_tensor(weyls & _MASK)  # [rounds, rows, 2]
        indices = paddle.to_tensor(np.array(output_indices, np.int64)).unsqueeze(1)
        x0 = paddle.arange(num_blocks, dtype="int64").unsqueeze(0).expand([len(seeds), -1])
        x1 = indices.expand(x0.shape)
        x2 = x3 = paddle.zeros(x0.shape, "int64")
        for number in range(_NUM_ROUNDS):
            low_0, high_0 = self._product(0, x0)
            low_1, high_1 = self._product(1, x2)
            x0 = high_1 ^ x1 ^ round_keys[number, :, 0:1]
            x2 = high_0 ^ x3 ^ round_keys[number, :, 1:2]
            x1, x3 = low_1, low_0
        return paddle.stack([x0, x1, x2, x3], axis=-1).reshape([len(seeds), -1])

    def _product(self, index: int, words: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return the low and the high word of the products with a multiplier."""
        product = self._multipliers[index] * words
        return product & self._mask, paddle.bitwise_right_shift(product, self._half) & self._mask
