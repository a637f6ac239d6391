"""Which sequence is preempted first when blocks run out, and how many blocks are freed at once.

Only decoding sequences are passed to these functions. Ties are broken by the sequence id, so the
order never depends on the order of the arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from common.kv.blocks import blocks_for
from engine.core.policies.growth import GrowthView


class VictimView(Protocol):
    """The fields of a sequence that an order reads. A larger `priority` is more important.

    `num_output_since_resume` is None for a sequence that was never preempted.
    """

    @property
    def sequence_id(self) -> int: ...
    @property
    def arrival(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def num_output(self) -> int: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def num_output_since_resume(self) -> int | None: ...


View = TypeVar("View", bound=VictimView)


def last_in_first_out(views: Sequence[View]) -> list[View]:
    """Sort by arrival, the latest first (FastDeploy)."""
    return sorted(views, key=lambda view: (-view.arrival, -view.sequence_id))


def shortest_output(views: Sequence[View]) -> list[View]:
    """Sort by output length, shortest first, then longest prompt (SGLang): least work is lost."""
    return sorted(views, key=_least_produced)


def lowest_priority(views: Sequence[View]) -> list[View]:
    """Sort by priority, the least important first, then by output length, shortest first."""
    return sorted(views, key=lambda view: (view.priority, *_least_produced(view)))


def _least_produced(view: VictimView) -> tuple[int, int, int, int]:
    return view.num_output, -view.num_prompt, -view.arrival, -view.sequence_id


class VictimOrder(Protocol):
    """Sorts candidates; the first element is the first victim."""

    def __call__(self, views: Sequence[View], /) -> list[View]: ...


VICTIM_ORDERS: dict[str, VictimOrder] = {
    "last_in_first_out": last_in_first_out,
    "shortest_output": shortest_output,
    "priority": lowest_priority,
}


def lowest_priority_first(ordered: Sequence[View]) -> list[View]:
    """Sort by priority, the least important first; the order within one priority stays."""
    return sorted(ordered, key=lambda view: view.priority)


def spare_recently_resumed(ordered: Sequence[View], min_progress_tokens: int) -> list[View]:
    """Move sequences to the end that drew fewer than `min_progress_tokens` since their return."""
    return sorted(ordered, key=lambda view: is_recently_resumed(view, min_progress_tokens))


def is_recently_resumed(view: VictimView, min_progress_tokens: int) -> bool:
    """Return whether a sequence has drawn fewer than `min_progress_tokens` since its return."""
    progress = view.num_output_since_resume
    return progress is not None and progress < min_progress_tokens


def headroom_blocks(
    left: Sequence[GrowthView], *, retract_decode_steps: int, tokens_per_seq: int, block_size: int
) -> int:
    """Return the blocks to have free after a preemption, for the next decode steps of `left`.

    A step can write `tokens_per_seq` tokens of a sequence, drafts included, but never more than its
    remaining output. The sum is rounded up once.
    """
    most = retract_decode_steps * tokens_per_seq
    num_tokens = sum(max(min(most, view.max_new_tokens - view.num_output), 0) for view in left)
    return blocks_for(num_tokens, block_size)
