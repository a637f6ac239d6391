"""How many blocks a step must add to a block table before it can run."""

from __future__ import annotations


def new_blocks(
    num_computed: int, num_tokens: int, lookahead: int, num_held: int, block_size: int
) -> int:
    """Blocks to add so that `num_tokens` more tokens, and `lookahead` slots behind them, fit.

    `lookahead` counts tokens, not blocks, and is 0 unless the step samples: chunks in the middle of
    a prompt draft nothing. Never negative: a table that is longer than needed stays as it is.
    """
    missing = -(-(num_computed + num_tokens + lookahead) // block_size) - num_held
    return missing if missing > 0 else 0
