"""Pulls that are told to a `PullCost` one after the other."""

from __future__ import annotations

from itertools import count

from node.flow.pulls.pull_cost import PullCost

_BEGAN_AT_S = count(1_000_000, 1_000_000)


def on_pulled(cost: PullCost, num_tokens: int, took_s: float, num_at_source: int = 0) -> None:
    """Tell of a pull that took so long, and that began when all before it had ended."""
    began_at_s = float(next(_BEGAN_AT_S))
    cost.on_pulled(num_tokens, began_at_s, began_at_s + took_s, num_at_source)
