"""Effects that move KV: pushes, and copies beside the steps until they have ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.core.blocks.cache_copy import CacheCopy, CopyKind
from node.flow.messages import BeginCopy, CheckCopies, CopyEnded, Message, PushBlocks
from node.flow.perform_effects import NodeEffects


class Copy:
    def __init__(self) -> None:
        self.is_complete = False
        self.error: Exception | None = None
        self.might_begin = True

    def is_done(self, *, may_begin: bool = True) -> bool:
        self.might_begin = may_begin
        if self.error is not None:
            raise self.error
        return self.is_complete


class Parts:
    """In place of the connector and the model: writes down what is copied and pushed."""

    layout = SimpleNamespace(num_layers=3)

    def __init__(self) -> None:
        self.done: list[tuple[object, ...]] = []
        self.copies: dict[tuple[int, ...], Copy] = {}
        self.error: Exception | None = None

    def begin_copy(self, copy: CacheCopy) -> Copy:
        if self.error is not None:
            raise self.error
        block_ids = tuple(copy.block_ids)
        self.copies[block_ids] = Copy()
        return self.copies[block_ids]

    def push(
        self, lease_token: int, *, layer: int, ordinals: tuple[int, ...], source_blocks: object
    ) -> None:
        self.done.append(("push", lease_token, layer, ordinals, source_blocks))


def effects_of(parts: Parts, copied: list[Message]) -> NodeEffects:
    nothing = cast(Any, None)
    return NodeEffects(
        cast(Any, parts), nothing, nothing, cast(Any, parts),
        on_drained=nothing, on_copied=copied.append,
    )  # fmt: skip


def test_blocks_of_earlier_steps_are_pushed_layer_by_layer() -> None:
    parts = Parts()
    effects_of(parts, []).perform_effect(PushBlocks(7, None, (0, 1), (5, 4)))
    pushes = [("push", 7, layer, (0, 1), (5, 4)) for layer in range(3)]
    assert parts.done == pushes


def test_a_layer_of_this_step_was_copied_out_by_the_runner() -> None:
    parts = Parts()
    effects_of(parts, []).perform_effect(PushBlocks(7, 1, (0,), (5,)))
    assert parts.done == [("push", 7, 1, (0,), (5,))]


def begin(number: int, block_ids: tuple[int, ...], push: PushBlocks | None = None) -> BeginCopy:
    return BeginCopy(number, CacheCopy(CopyKind.STAGE_OUT, block_ids), push)


def test_each_copy_is_reported_once_when_it_has_ended() -> None:
    parts, copied = Parts(), list[Message]()
    effects = effects_of(parts, copied)
    effects.perform_effect(begin(7, (1, 2)))
    effects.perform_effect(begin(8, (3,)))
    effects.perform_effect(CheckCopies())
    assert copied == []
    parts.copies[3,].is_complete = True
    for _ in range(2):
        effects.perform_effect(CheckCopies())
    assert copied == [CopyEnded(8)]
    parts.copies[1, 2].is_complete = True
    effects.perform_effect(CheckCopies())
    assert copied == [CopyEnded(8), CopyEnded(7)]


def test_what_was_copied_out_is_pushed_before_its_end_is_reported_also_while_a_step_runs() -> None:
    parts, copied = Parts(), list[Message]()
    effects = effects_of(parts, copied)
    effects.perform_effect(begin(7, (5, 4), PushBlocks(9, None, (0, 1), (5, 4))))
    parts.copies[5, 4].is_complete = True
    effects.perform_effect(PushBlocks(9, 0, (2,), (6,)))
    pushes = [("push", 9, layer, (0, 1), (5, 4)) for layer in range(3)]
    assert parts.done == [*pushes, ("push", 9, 0, (2,), (6,))]
    assert not parts.copies[5, 4].might_begin
    assert copied == [CopyEnded(7)]


@pytest.mark.parametrize("is_at_begin", [True, False])
def test_a_copy_that_fails_is_reported_once_and_pushes_nothing(is_at_begin: bool) -> None:
    parts, copied = Parts(), list[Message]()
    effects = effects_of(parts, copied)
    parts.error = RuntimeError("no pinned memory") if is_at_begin else None
    effects.perform_effect(begin(7, (5,), PushBlocks(9, None, (0,), (5,))))
    if not is_at_begin:
        parts.copies[5,].error = RuntimeError("no pinned memory")
    for _ in range(2):
        effects.perform_effect(CheckCopies())
    (message,) = copied
    assert isinstance(message, CopyEnded)
    assert message.number == 7
    assert "no pinned memory" in str(message.error)
    assert parts.done == []
