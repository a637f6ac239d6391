"""How long the latest outputs were, and how long those that still run are expected to become."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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


@dataclass(frozen=True, slots=True)
class OutputHistory:
    """The latest lengths of complete outputs, by class of `max_tokens`.

    A class holds the requests whose `max_tokens` have the same power of two: who asks for at most
    200 tokens gets other answers than who asks for 8000. `recent` has the lengths of each class in
    the order of their ends, `ordered` by length. All lengths that predict stand in `keys`, sorted,
    with the class in the high bits; those of a class end at `key_ends`. `used_class` is the class
    that predicts for each class.
    """

    recent: tuple[tuple[int, ...], ...] = ((),) * _NUM_CLASSES
    ordered: tuple[Ints, ...] = field(default=(_NONE,) * _NUM_CLASSES, compare=False, repr=False)
    keys: Ints = field(default_factory=_NONE.copy, compare=False, repr=False)
    key_ends: Ints = field(default_factory=_NONE.copy, compare=False, repr=False)
    used_class: Ints = field(default_factory=_NONE.copy, compare=False, repr=False)

    def after_output(self, num_output: int, max_new_tokens: int) -> OutputHistory:
        """Return the history with one more output, without the oldest where a class is full."""
        recent, ordered = list(self.recent), list(self.ordered)
        key_ends, used_class = self.key_ends, self.used_class
        for number in (_ALL, max_new_tokens.bit_length()):
            lengths, in_order = recent[number], ordered[number]
            if len(lengths) == _MOST_RECENT:
                oldest = int(in_order.searchsorted(lengths[0]))
                in_order = np.concatenate((in_order[:oldest], in_order[oldest + 1 :]))
            recent[number] = (*lengths, num_output)[-_MOST_RECENT:]
            ordered[number] = inserted(in_order, int(in_order.searchsorted(num_output)), num_output)
        counts = [len(lengths) for lengths in recent]
        usable = [n for n, count in enumerate(counts) if count >= _LEAST_RECENT]
        if counts != [len(lengths) for lengths in self.recent]:
            key_ends = np.cumsum([count if count >= _LEAST_RECENT else 0 for count in counts])
            used_class = np.full(_NUM_CLASSES, _ALL, np.int64)
            used_class[usable] = usable
        return replace(
            self,
            recent=tuple(recent),
            ordered=tuple(ordered),
            keys=np.concatenate([_NONE, *(ordered[n] + (n << _SHIFT) for n in usable)]),
            key_ends=key_ends,
            used_class=used_class,
        )

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
