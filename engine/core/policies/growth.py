"""The number of blocks a sequence is expected to need beyond those it holds.

Shares are integers in millionths: in binary floating point 50 x 0.14 is a little more than 7, and
rounded up it would be 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Lacking = tuple[int, int]
"""The index of a sequence or seat, and how many blocks it needs beside those that it has."""

MILLION = 1_000_000
"""One whole, in millionths."""


class GrowthView(Protocol):
    """The fields of a sequence that a reservation reads.

    `max_new_tokens` is the longest output it can have, by its request and by the model's length; 0
    for a sequence that leaves this node after its prompt.
    """

    @property
    def num_known(self) -> int: ...
    @property
    def num_output(self) -> int: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def num_held_blocks(self) -> int: ...


# One is made for each candidate of each step, and a frozen dataclass costs three times as much.
@dataclass(slots=True)
class SeatedView:
    """A sequence as it will be (`GrowthView`), after an admission or an allocation."""

    num_known: int
    num_output: int
    max_new_tokens: int
    num_held_blocks: int


@dataclass(frozen=True, slots=True)
class GrowthColumns:
    """The fields of `GrowthView` for many sequences, int64 `[sequences]`.

    A row of zeros needs nothing.
    """

    num_known: Ints
    num_output: Ints
    max_new_tokens: Ints
    num_held_blocks: Ints

    def taken(self, rows: Ints) -> GrowthColumns:
        """Return these rows, in this order."""
        return GrowthColumns(
            self.num_known.take(rows),
            self.num_output.take(rows),
            self.max_new_tokens.take(rows),
            self.num_held_blocks.take(rows),
        )


def to_millionths(number: float) -> int:
    """Return the nearest integer number of millionths; at least 1 if `number` is above 0."""
    return max(round(number * MILLION), 1 if number > 0 else 0)


def growth_tokens(view: GrowthView, ratio_ppm: int, clip: int, lookahead: int) -> int:
    """Return the tokens to expect: a share of the remaining output, and slots for drafts.

    The remaining output is clipped after the tokens produced so far are subtracted, never before.
    The sum never exceeds the remaining output, since drafts never pass the last possible token.
    """
    remaining = view.max_new_tokens - view.num_output
    if remaining <= 0:
        return 0
    counted = clip if remaining > clip else remaining
    expected = -(-counted * ratio_ppm // MILLION) + lookahead
    return expected if expected < remaining else remaining


def growth_blocks(
    view: GrowthView, ratio_ppm: int, clip: int, lookahead: int, block_size: int
) -> int:
    """Return the blocks for these tokens, after the free slots of the blocks held are used."""
    num_tokens = view.num_known + growth_tokens(view, ratio_ppm, clip, lookahead)
    missing = -(-num_tokens // block_size) - view.num_held_blocks
    return missing if missing > 0 else 0


def all_growth_tokens(
    columns: GrowthColumns, ratio_ppm: int, clip: int | Ints, lookahead: int
) -> Ints:
    """Return `growth_tokens` of every row."""
    remaining = np.maximum(columns.max_new_tokens - columns.num_output, 0)
    counted = np.minimum(remaining, clip)
    expected: Ints = np.minimum(-(-counted * ratio_ppm // MILLION) + lookahead, remaining)
    return expected


def all_growth_blocks(
    columns: GrowthColumns,
    ratio_ppm: int,
    clip: int | Ints,
    lookahead: int,
    block_size: int,
) -> Ints:
    """Return `growth_blocks` of every row."""
    num_tokens = columns.num_known + all_growth_tokens(columns, ratio_ppm, clip, lookahead)
    missing: Ints = np.maximum(-(-num_tokens // block_size) - columns.num_held_blocks, 0)
    return missing
