"""The work of a prefill chunk: it costs more the further from the start of its prompt it lies.

A token costs its matrix products, the same for each, and its attention to all tokens before it.
Work is counted in pairs of a token and one that it attends to: the matrix products of one token
cost as much as `pairs_per_token` of them, by the model's shape (27,000 for an 8B model, so after
27,000 tokens of context a token costs twice as much as the first one). Integers only, so that the
same input gives the same chunk on every machine.
"""

from __future__ import annotations

from math import isqrt


def chunk_work(start: int, num_tokens: int, pairs_per_token: int) -> int:
    """Return the work of `num_tokens` tokens after `start` others, in pairs."""
    return num_tokens * (2 * (pairs_per_token + start) + num_tokens + 1) // 2


def tokens_within(work: int, start: int, pairs_per_token: int) -> int:
    """Return the most tokens after `start` others whose `chunk_work` is at most `work`; 0 or more.

    It is the root of `n² + (2 (pairs_per_token + start) + 1) n - 2 work`, rounded down.
    """
    if work <= 0:
        return 0
    linear = 2 * (pairs_per_token + start) + 1
    return (isqrt(linear * linear + 8 * work) - linear) // 2
