"""Effects that move KV: copies before a push, and copies of what landed until they are done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from node.messages import CheckStaged, Message, PushBlocks, Staged, StageIn
from node.perform_effects import NodeEffects


class Copy:
    def __init__(self) -> None:
        self.is_complete = False

    def is_done(self) -> bool:
        return self.is_complete


class Parts:
    """In place of the connector and the model: writes down what is copied and pushed."""

    layout = SimpleNamespace(num_layers=3)

    def __init__(self) -> None:
        self.done: list[tuple[object, ...]] = []
        self.copies: dict[tuple[int, ...], Copy] = {}

    def stage_out(self, block_ids: tuple[int, ...]) -> None:
        self.done.append(("stage out", block_ids))

    def begin_stage_in(self, block_ids: tuple[int, ...]) -> Copy:
        self.copies[block_ids] = Copy()
        return self.copies[block_ids]

    def push(
        self, lease_token: int, *, layer: int, ordinals: tuple[int, ...], source_blocks: object
    ) -> None:
        self.done.append(("push", lease_token, layer, ordinals, source_blocks))


def effects_of(parts: Parts, staged: list[Message]) -> NodeEffects:
    nothing = cast(Any, None)
    return NodeEffects(
        cast(Any, parts), nothing, nothing, cast(Any, parts),
        on_drained=nothing, on_staged=staged.append,
    )  # fmt: skip


def test_blocks_of_earlier_steps_are_copied_out_and_pushed_layer_by_layer() -> None:
    parts = Parts()
    effects_of(parts, []).perform_effect(PushBlocks(7, None, (0, 1), (5, 4)))
    pushes = [("push", 7, layer, (0, 1), (5, 4)) for layer in range(3)]
    assert parts.done == [("stage out", (5, 4)), *pushes]


def test_a_layer_of_this_step_was_copied_out_by_the_runner() -> None:
    parts = Parts()
    effects_of(parts, []).perform_effect(PushBlocks(7, 1, (0,), (5,)))
    assert parts.done == [("push", 7, 1, (0,), (5,))]


def test_each_copy_of_landed_kv_is_reported_once_when_it_is_done() -> None:
    parts, staged = Parts(), list[Message]()
    effects = effects_of(parts, staged)
    effects.perform_effect(StageIn(7, (1, 2)))
    effects.perform_effect(StageIn(8, (3,)))
    effects.perform_effect(CheckStaged())
    assert staged == []
    parts.copies[3,].is_complete = True
    for _ in range(2):
        effects.perform_effect(CheckStaged())
    assert staged == [Staged(8)]
    parts.copies[1, 2].is_complete = True
    effects.perform_effect(CheckStaged())
    assert staged == [Staged(8), Staged(7)]
