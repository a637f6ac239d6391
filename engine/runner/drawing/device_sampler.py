"""Find on the device which tokens can be drawn, and bring back only those: one read per step.

For each row the device applies penalties and withheld tokens, and finds the likeliest tokens and,
where every token can be drawn, those with the largest noise - depth. `head_draw` draws from them on
the host, exactly. The whole row is brought back for log probabilities, for a filter that keeps more
tokens than the head holds, and where rounding could decide.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np

from common.request import GREEDY_BELOW
from engine.core.runner_contract import SampleInput
from engine.core.sequences.stop_rules import withheld_token_ids
from engine.runner.drawing.device_noise import DeviceNoise
from engine.runner.drawing.head_draw import Head, draw_from_head, is_unfiltered
from engine.runner.paddle_import import paddle

NUM_KEPT = 512
"""Tokens of a row's head where filters decide what can be drawn."""
NUM_BEST = 8
"""Tokens of a head of which only the best is wanted."""
_LARGEST = 1e35


class DeviceSampler:
    """Draws tokens from logits on a device. It keeps no state between steps."""

    def __init__(self, vocab_size: int, eos_token_ids: Set[int]) -> None:
        self._vocab_size, self._eos_token_ids = vocab_size, eos_token_ids
        self._noise = DeviceNoise()

    def width(self, inputs: Sequence[SampleInput]) -> int:
        """Return the number of tokens that the heads of these rows must hold."""
        has_filters = any(
            one.params.temperature >= GREEDY_BELOW and not is_unfiltered(one, self._vocab_size)
            for one in inputs
        )
        return min(NUM_KEPT if has_filters else NUM_BEST, self._vocab_size)

    @paddle.no_grad()
    def find(
        self, logits: paddle.Tensor, inputs: Sequence[SampleInput], width: int
    ) -> paddle.Tensor:
        """Return the heads of `logits` `[rows, vocab_size]`, float32, as one int32 array.

        `inputs` has one entry per row. Queues work and does not wait for it.
        """
        changed = self._changed(logits, inputs)
        values, ids = paddle.topk(changed, width, axis=-1)
        temperatures = [
            one.params.temperature if one.params.temperature >= GREEDY_BELOW else 1.0
            for one in inputs
        ]
        scale = paddle.to_tensor(np.array(temperatures, np.float32)).unsqueeze(1)
        depths = (values[:, :1] - changed) / scale
        total = paddle.exp(-depths).astype("float64").sum(axis=-1, keepdim=True)
        # False for NaN too. Penalties do not take smaller numbers to infinity.
        is_bounded = (logits.abs() < _LARGEST).all(axis=-1, keepdim=True)
        columns = [ids, paddle.take_along_axis(logits, ids, axis=1), total, is_bounded]
        if any(is_unfiltered(one, self._vocab_size) for one in inputs):
            columns += self._noisy(logits, depths, inputs)
        return paddle.concat([_bits(column) for column in columns], axis=1)

    def _noisy(
        self, logits: paddle.Tensor, depths: paddle.Tensor, inputs: Sequence[SampleInput]
    ) -> list[paddle.Tensor]:
        """Return ids and logits of the tokens with the largest noise - depth."""
        noise = self._noise.rows(
            [one.params.seed for one in inputs],
            [one.output_index for one in inputs],
            self._vocab_size,
        )
        count = min(NUM_BEST, self._vocab_size)
        _, ids = paddle.topk(noise - depths.astype("float64"), count, axis=-1)
        return [ids, paddle.take_along_axis(logits, ids, axis=1)]

    def _changed(self, logits: paddle.Tensor, inputs: Sequence[SampleInput]) -> paddle.Tensor:
        """Return the logits after penalties, with withheld tokens lowest."""
        rows: list[np.ndarray] = []
        ids: list[np.ndarray] = []
        factors: list[np.ndarray] = []
        amounts: list[np.ndarray] = []
        for row, one in enumerate(inputs):
            found, factor, amount = self._changes(one)
            rows.append(np.full(len(found), row))
            ids.append(found)
            factors.append(factor)
            amounts.append(amount)
        places = np.concatenate(rows) * self._vocab_size + np.concatenate(ids)
        if not len(places):
            return logits
        flat, at = logits.reshape([-1]), paddle.to_tensor(places)
        factor, amount = paddle.to_tensor(
            np.stack([np.concatenate(factors), np.concatenate(amounts)]).astype(np.float32)
        )
        found = paddle.gather(flat, at)
        found = paddle.where(found > 0, found / factor, found * factor) - amount
        return paddle.scatter(flat, at, found, overwrite=True).reshape(logits.shape)

    def _changes(self, one: SampleInput) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens whose logits change, the factor of each, and what is subtracted."""
        params = one.params
        output = np.asarray(one.output_token_ids, np.int64)
        seen, ids = np.zeros(0, np.int64), output
        if params.repetition_penalty != 1.0:
            seen = ids = np.union1d(np.asarray(one.prompt_token_ids, np.int64), output)
        elif not params.has_penalties:
            ids = np.zeros(0, np.int64)
        withheld = self._withheld(one)
        ids = np.union1d(ids, withheld)
        counts = np.zeros(len(ids))
        if params.has_penalties:
            distinct, num = np.unique(output, return_counts=True)
            counts[np.searchsorted(ids, distinct)] = num
        factors = np.where(np.isin(ids, seen), params.repetition_penalty, 1.0)
        amounts = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        amounts[np.isin(ids, withheld)] = np.inf
        return ids, factors, amounts

    def _withheld(self, one: SampleInput) -> np.ndarray:
        ids = withheld_token_ids(one.params, one.output_index, self._eos_token_ids)
        return np.array([i for i in ids if 0 <= i < self._vocab_size], np.int64)

    def draw(self, found: np.ndarray, width: int, one: SampleInput) -> int | None:
        """Return a row's token from what `find` found; None if the whole row is needed."""
        if one.params.logprobs is not None:
            return None
        ids, logits, total, is_bounded, noisy = np.split(
            found, np.cumsum([width, width, 2, 1]).tolist()
        )
        if not is_bounded[0]:
            return None
        noisy_ids, noisy_logits = np.split(noisy, 2)
        is_noisy = is_unfiltered(one, self._vocab_size)
        head = Head(
            *_by_id(ids, logits),
            width == self._vocab_size,
            float(total.view(np.float64)[0]),
            *(_by_id(noisy_ids, noisy_logits) if is_noisy else (ids[:0], logits[:0])),
        )
        return draw_from_head(head, one, self._withheld(one).tolist(), self._vocab_size)


def _by_id(ids: np.ndarray, logit_bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(ids)
    return ids[order].astype(np.int64), logit_bits.view(np.float32)[order]


def _bits(column: paddle.Tensor) -> paddle.Tensor:
    """Return values as int32 columns; token ids and flags fit, floats keep their bits."""
    if column.dtype in (paddle.float32, paddle.float64):
        return column.view("int32")
    return column.astype("int32")
