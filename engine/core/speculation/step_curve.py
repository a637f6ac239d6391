"""The seconds of a step by its rows: measured at the start, corrected by every step that ran.

The curve is linear between knots: the measured numbers of rows, and further ones that grow by a
quarter each. A step teaches the knot next to its rows how its time compares with the measurement:
a moving average of that ratio. A knot that no recent step taught has a ratio between those of its
neighbours. What was measured counts as taught when the engine started. Otherwise wide steps that
are all slower than they were taken for would only say that the machine is slow.

All rows of a step count, those of prompt chunks too.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

import numpy as np

from engine.core.runner_contract import StepCosts

_GROWTH = 1.25
_MOST_ROWS = 65536
_LEAST_S = 1e-9
_LARGEST_FACTOR = 2.0
"""The most that one step counts above or below its knot: a single stall says little."""
_LATEST_WEIGHT = 0.125
_FRESH_STEPS = 1024
"""Steps after which a knot's ratio is forgotten: contexts and the machine have changed since."""
_NEWS = 0.02
"""The relative change of a ratio that changes the curve."""


class StepCurve:
    """Seconds per step, linear between `rows`, never falling. Used by one thread."""

    def __init__(self, costs: StepCosts) -> None:
        rows = list(costs.rows)
        # More rows never make a step cheaper; a measurement that shows it is noise.
        measured_s = list(accumulate(costs.step_s, max, initial=_LEAST_S))[1:]
        num_measured, last_s, tail_s = len(rows), measured_s[-1], 0.0
        if num_measured > 1:
            tail_s = (last_s - measured_s[-2]) / (rows[-1] - rows[-2])
        while rows[-1] < _MOST_ROWS:
            rows.append(math.ceil(rows[-1] * _GROWTH))
            measured_s.append(last_s + tail_s * (rows[-1] - costs.rows[-1]))
        self.rows: tuple[int, ...] = tuple(rows)
        self.step_s: tuple[float, ...] = tuple(measured_s)
        """Seconds of a step of `rows[i]` rows."""
        self._knots, self._measured_s = np.array(rows, np.float64), np.array(measured_s)
        self._log_rows = np.log(rows)
        self._num_steps = 0
        self._ratios = np.ones(len(rows))
        self._num_taught = [0] * len(rows)
        self._fresh_until = np.zeros(len(rows), np.int64)
        self._fresh_until[:num_measured] = _FRESH_STEPS
        self._is_taught = np.zeros(len(rows), np.bool_)
        self._shown = np.ones(len(rows))
        self._shown_until = _FRESH_STEPS

    def observe(self, rows: int, step_s: float) -> bool:
        """Learn from a step of `rows` that took `step_s`; return whether the curve has changed."""
        if rows < 1 or step_s <= 0:
            return False
        self._num_steps += 1
        knot = self._teach(rows, step_s)
        shown = self._shown[knot]
        if self._num_steps < self._shown_until and abs(self._ratios[knot] - shown) <= _NEWS * shown:
            return False
        self._show()
        return True

    def _teach(self, rows: int, step_s: float) -> int:
        """Move the ratio of the knot next to `rows` towards this step's; return the knot."""
        knot = self._nearest(rows)
        if self._num_steps >= self._fresh_until[knot]:
            self._ratios[knot], self._num_taught[knot] = self._shown[knot], 0
        ratio = float(self._ratios[knot])
        expected_s = float(np.interp(rows, self._knots, self._measured_s)) * ratio
        factor = step_s / expected_s
        if 1 / _LARGEST_FACTOR <= factor <= _LARGEST_FACTOR:
            self._num_taught[knot] += 1
        else:
            factor = min(max(factor, 1 / _LARGEST_FACTOR), _LARGEST_FACTOR)
        weight = max(_LATEST_WEIGHT, 1 / (self._num_taught[knot] + 1))
        self._ratios[knot] = ratio * (1 + weight * (factor - 1))
        self._fresh_until[knot] = self._num_steps + _FRESH_STEPS
        self._is_taught[knot] = True
        return knot

    def _nearest(self, rows: int) -> int:
        right = min(bisect_left(self.rows, rows), len(self.rows) - 1)
        if right and rows - self.rows[right - 1] < self.rows[right] - rows:
            return right - 1
        return right

    def _show(self) -> None:
        """Set the curve from the ratios of the knots that were taught lately."""
        fresh = np.flatnonzero(self._fresh_until > self._num_steps)
        self._shown = np.interp(self._log_rows, self._log_rows[fresh], self._ratios[fresh])
        self._shown_until = int(self._fresh_until[fresh].min())
        step_s = self._measured_s * self._shown
        # Fewer rows than those of a step that ran take no longer, whatever was measured for them.
        is_known = self._is_taught & (self._fresh_until > self._num_steps)
        most_s = np.minimum.accumulate(np.where(is_known, step_s, np.inf)[::-1])[::-1]
        self.step_s = tuple(np.maximum.accumulate(np.minimum(step_s, most_s)).tolist())
