"""Copies of KV blocks that a flow began and whose ends it waits for. Pure."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Protocol

from engine.core.blocks.cache_copy import CacheCopy, CopyKind, PrefixCopy
from engine.core.step.step_in_flight import SwapCopy
from node.flow.messages import BeginCopy, CopyEnded, Effect, PushBlocks

CHECK_S = 0.001
"""How soon an idle node looks again whether a copy has ended."""

OnEnd = Callable[[Exception | None], list[Effect]]
"""Takes the end of a copy, or why it failed."""


class EndSwap(Protocol):
    """Takes the end of a copy to or from host memory."""

    def __call__(self, copy: SwapCopy | PrefixCopy, *, is_good: bool) -> None: ...


class CopiesUnderWay:
    """The copies in progress, with the callback for the end of each."""

    def __init__(self) -> None:
        self._on_end: dict[int, OnEnd] = {}
        self._numbers = count(1)
        self._check_at_s = 0.0

    def __len__(self) -> int:
        return len(self._on_end)

    def begin(self, copy: CacheCopy, on_end: OnEnd, push: PushBlocks | None = None) -> BeginCopy:
        """Return the effect that begins a copy; `on_end` is called once, at its end."""
        number = next(self._numbers)
        self._on_end[number] = on_end
        return BeginCopy(number, copy, push)

    def begin_swap(self, swap: SwapCopy | PrefixCopy, end: EndSwap) -> BeginCopy:
        """Return the effect that begins a copy to or from host memory; `end` is called once."""
        kind = CopyKind.SWAP_OUT if swap.is_out else CopyKind.SWAP_IN

        def on_end(error: Exception | None) -> list[Effect]:
            end(swap, is_good=error is None)
            return []

        return self.begin(CacheCopy(kind, swap.block_ids, swap.host_block_ids), on_end)

    def end(self, message: CopyEnded) -> list[Effect]:
        """Handle the end of a copy."""
        return self._on_end.pop(message.number)(message.error)

    def on_check(self, now_s: float) -> None:
        """Record that the copies are looked at now."""
        self._check_at_s = now_s + CHECK_S

    def next_check_s(self) -> float | None:
        """Return when an idle node must look again; None: there is no copy."""
        return self._check_at_s if self._on_end else None
