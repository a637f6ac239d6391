"""How long the latest outputs were, and how long those that still run are expected to become."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_MOST_RECENT = 256
"""Outputs that are remembered of each class, and of all together."""
_LEAST_RECENT = 8
"""A class of fewer outputs predicts nothing: all classes together do."""
_ALL = 0
"""The class of all outputs; those of `max_tokens` are numbered from 1."""
_NUM_CLASSES = 41
_POWERS = 1 << np.arange(_NUM_CLASSES - 1, dtype=np.int64)
_NONE: Ints = np.zeros(0, np.int64)
_LEAST_MORE = 16
"""Tokens expected at least of an output that is longer than all remembered ones."""
_SHIFT = 40
_LENGTH_BITS = (1 << _SHIFT) - 1


def inserted(numbers: Ints, index: int, number: int) -> Ints:
    """Return `numbers` with one more before `index`; `np.insert` takes five times as long."""
    longer = np.empty(len(numbers) + 1, np.int64)
    longer[:index] = numbers[:index]
    longer[index] = number
    longer[index + 1 :] = numbers[index:]
    return longer


def _moved(numbers: Ints, oldest: int, index: int, number: int) -> Ints:
    """Return `numbers` without the one at `oldest`, and with another before that at `index`."""
    changed = numbers.copy()
    if oldest < index:
        changed[oldest : index - 1] = numbers[oldest + 1 : index]
        changed[index - 1] = number
    else:
        changed[index + 1 : oldest + 1] = numbers[index:oldest]
        changed[index] = number
    return changed


@dataclass(frozen=True, slots=True)
class OutputHistory:
    """The latest lengths of complete outputs, by class of `max_tokens`.

    A class holds the requests whose `max_tokens` have the same power of two: who asks for at most
    200 tokens gets other answers than who asks for 8000. `recent` has the lengths of each class in
    the order of their ends. All lengths stand in `keys` too, sorted, with the class in the high
    bits; those of a class end at `key_ends`. `used_class` is the class that predicts for each
    class.
    """

    recent: tuple[tuple[int, ...], ...] = ((),) * _NUM_CLASSES
    keys: Ints = field(default_factory=_NONE.copy, compare=False, repr=False)
    key_ends: Ints = field(
        default_factory=lambda: np.zeros(_NUM_CLASSES, np.int64), compare=False, repr=False
    )
    used_class: Ints = field(
        default_factory=lambda: np.full(_NUM_CLASSES, _ALL, np.int64), compare=False, repr=False
    )

    def after_output(self, num_output: int, max_new_tokens: int) -> OutputHistory:
        """Return the history with one more output, without the oldest where a class is full."""
        recent, keys = list(self.recent), self.keys
        key_ends, used_class = self.key_ends, self.used_class
        for number in (_ALL, max_new_tokens.bit_length()):
            lengths, key = recent[number], (number << _SHIFT) + num_output
            index = int(keys.searchsorted(key))
            if len(lengths) == _MOST_RECENT:
                oldest = int(keys.searchsorted((number << _SHIFT) + lengths[0]))
                keys = _moved(keys, oldest, index, key)
                recent[number] = (*lengths[1:], num_output)
                continue
            keys = inserted(keys, index, key)
            recent[number] = lengths = (*lengths, num_output)
            key_ends = key_ends.copy()
            key_ends[number:] += 1
            if len(lengths) == _LEAST_RECENT:
                used_class = used_class.copy()
                used_class[number] = number
        return OutputHistory(tuple(recent), keys, key_ends, used_class)

    @property
    def can_predict(self) -> bool:
        """Whether enough outputs are remembered."""
        return len(self.recent[_ALL]) >= _LEAST_RECENT

    def remaining(self, num_output: Ints, max_new_tokens: Ints, quantile_ppm: int) -> Ints:
        """Return the output tokens that are still expected, at least 1 where any are allowed.

        Of the remembered outputs of a sequence's class that are longer than its own so far, it is
        expected to become as long as the one at the quantile. Requires `can_predict`.
        """
        keys = self.keys
        classes = self.used_class[np.searchsorted(_POWERS, max_new_tokens, side="right")]
        first = np.searchsorted(keys, (classes << _SHIFT) + num_output, side="right")
        end = self.key_ends[classes]
        num_longer = end - first
        index = first + np.minimum(num_longer * quantile_ppm // 1_000_000, num_longer - 1)
        expected = (keys[index] & _LENGTH_BITS) - num_output
        beyond = np.maximum(num_output // 2, _LEAST_MORE)
        allowed = np.maximum(max_new_tokens - num_output, 0)
        found: Ints = np.minimum(np.where(num_longer > 0, expected, beyond), allowed)
        return found

    def remaining_of(self, num_output: int, max_new_tokens: int, quantile_ppm: int) -> int:
        """Return `remaining` of one sequence."""
        number = int(self.used_class[max_new_tokens.bit_length()])
        first = int(self.keys.searchsorted((number << _SHIFT) + num_output, side="right"))
        num_longer = int(self.key_ends[number]) - first
        expected = max(num_output // 2, _LEAST_MORE)
        if num_longer > 0:
            index = first + min(num_longer * quantile_ppm // 1_000_000, num_longer - 1)
            expected = (int(self.keys[index]) & _LENGTH_BITS) - num_output
        return min(expected, max(max_new_tokens - num_output, 0))
