"""How many blocks a sequence is expected to need beyond those it holds.

Shares are integers in millionths: in binary floating point 50 x 0.14 is a little more than 7, and
rounded up it would be 8.
"""

from __future__ import annotations

from typing import Protocol

MILLION = 1_000_000
"""One whole, in millionths."""


class GrowthView(Protocol):
    """What a reservation reads of a sequence.

    `max_new_tokens` is the most output it can have: what its request and the model's length allow,
    0 for one that leaves this node after its prompt.
    """

    @property
    def num_known(self) -> int: ...
    @property
    def num_output(self) -> int: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def num_held_blocks(self) -> int: ...


def to_millionths(number: float) -> int:
    """The nearest integer number of millionths; at least one of a number above 0."""
    return max(round(number * MILLION), 1 if number > 0 else 0)


def growth_tokens(view: GrowthView, ratio_ppm: int, clip: int, lookahead: int) -> int:
    """Further tokens to expect: a share of the remaining output, and slots for the next drafts.

    The remaining output is clipped after what was produced is taken off it, never before. Drafts
    never go past the last token that may be produced, so neither does the sum.
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
    """Blocks for those tokens beyond the ones held, whose free slots are used first."""
    num_tokens = view.num_known + growth_tokens(view, ratio_ppm, clip, lookahead)
    missing = -(-num_tokens // block_size) - view.num_held_blocks
    return missing if missing > 0 else 0
