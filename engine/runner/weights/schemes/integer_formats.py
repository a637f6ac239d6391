"""Integers with scales of groups, in a grouped format that the kernels have, or as floats.

A value is (number - zero) * scale: of a number of 4 or 8 bits and a scale of at most 16 bits this
product is exact in float32. Where a group has a multiple of 32 inputs and scales are float16
numbers, Q4_0 (zero at 8) or Q8_0 (number - zero within a byte) have the same values; their groups
of 32 then repeat the scale of the group that they are part of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.runner.weights.schemes.scheme import in_parts

_FORMAT_GROUP = 32
"""Inputs of a group of Q4_0 and Q8_0."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """`scales`, float32, and `zeros`, int16, are `[outputs, groups]`.

    Group `group_of[i]` has input i; None: the groups are equal ranges of inputs. A stored number is
    from `lowest` to `highest`.
    """

    scales: np.ndarray
    zeros: np.ndarray
    lowest: int
    highest: int
    group_of: np.ndarray | None = None


def exact_format(scaling: Scaling, num_inputs: int) -> str:
    """Return the smallest format that has these values exactly: Q4_0, Q8_0 or F32."""
    group = num_inputs // scaling.scales.shape[1]
    if scaling.group_of is not None or group % _FORMAT_GROUP or not _are_halves(scaling.scales):
        return "F32"
    lowest = scaling.lowest - int(scaling.zeros.max())
    highest = scaling.highest - int(scaling.zeros.min())
    if lowest >= -8 and highest <= 7:
        return "Q4_0"
    return "Q8_0" if lowest >= -128 and highest <= 127 else "F32"


def rows_in_format(
    format_name: str,
    scaling: Scaling,
    numbers: Callable[[int, int], np.ndarray],
    shape: tuple[int, int],
) -> np.ndarray:
    """Return the values in `format_name`, uint8 `[outputs, bytes of a row]`.

    `numbers` returns the stored numbers of the outputs from one up to another, int16
    `[outputs, inputs]`; all but its last call get a multiple of eight.
    """
    num_inputs = shape[1]

    def widened(grouped: np.ndarray) -> np.ndarray:
        if scaling.group_of is not None:
            return grouped[:, scaling.group_of]
        return np.repeat(grouped, num_inputs // grouped.shape[1], axis=1)

    def rows(first: int, last: int) -> np.ndarray:
        steps = numbers(first, last) - widened(scaling.zeros[first:last])
        scales = scaling.scales[first:last]
        if format_name == "F32":
            # What is not finite is reported with the logits.
            with np.errstate(over="ignore", invalid="ignore"):
                return steps.astype(np.float32) * widened(scales)
        return _with_scales(format_name, steps.astype(np.int8), scales)

    return in_parts(shape, rows)


def _are_halves(scales: np.ndarray) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        return bool((scales.astype(np.float16).astype(np.float32) == scales).all())


def _with_scales(format_name: str, steps: np.ndarray, scales: np.ndarray) -> np.ndarray:
    num_outputs, num_inputs = steps.shape
    in_groups = steps.reshape(num_outputs, -1, _FORMAT_GROUP)
    repeated = np.repeat(scales, num_inputs // scales.shape[1] // _FORMAT_GROUP, axis=1)
    halves = np.ascontiguousarray(repeated.astype(np.float16)[:, :, None]).view(np.uint8)
    numbers: np.ndarray = in_groups.view(np.uint8)
    if format_name == "Q4_0":
        raised = numbers + np.uint8(8)  # modulo 256
        numbers = raised[:, :, :16] | (raised[:, :, 16:] << 4)
    return np.concatenate([halves, numbers], axis=2).reshape(num_outputs, -1)
