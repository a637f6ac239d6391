"""When computed layers are handed over: rarely where they are small, at once where they are not."""

from __future__ import annotations

import pytest

from node.flow.layers_to_push import MOST_HELD_BYTES, LayersToPush
from node.flow.messages import PushBlocks

TWO = PushBlocks(7, None, (0, 1), (5, 4))
ONE = PushBlocks(8, None, (3,), (9,))


def hand_overs(
    layer_bytes: tuple[int, ...], pushes: tuple[PushBlocks, ...] = (TWO,)
) -> list[list[PushBlocks]]:
    """Return what each layer hands over, if it hands something over."""
    layers = LayersToPush(pushes, layer_bytes)
    return [told for layer in range(len(layer_bytes)) if (told := layers.on_computed(layer))]


def layers_of(told: list[PushBlocks]) -> list[int | None]:
    return [push.layer for push in told]


def test_small_layers_are_handed_over_a_few_times_a_step_and_the_last_one_alone() -> None:
    told = [layers_of(one) for one in hand_overs((64,) * 30)]
    assert [len(one) for one in told] == [15, 8, 4, 2, 1]
    assert [layer for one in told for layer in one] == list(range(30))


@pytest.mark.parametrize("num_layers", range(1, 130))
def test_every_layer_is_handed_over_once_and_in_order(num_layers: int) -> None:
    told = hand_overs((64,) * num_layers)
    assert [push.layer for one in told for push in one] == list(range(num_layers))
    assert layers_of(told[-1]) == [num_layers - 1]
    assert len(told) <= num_layers.bit_length()


def test_large_layers_do_not_wait() -> None:
    told = hand_overs((MOST_HELD_BYTES // 2,) * 9)
    assert [layers_of(one) for one in told] == [[layer] for layer in range(9)]


def test_no_more_bytes_wait_than_may() -> None:
    two_blocks = MOST_HELD_BYTES // 4
    told = hand_overs((two_blocks // 2,) * 40)
    assert [len(one) for one in told[:9]] == [4] * 9


def test_bytes_are_those_of_all_blocks_of_the_step_and_of_each_layer() -> None:
    small, large = 1, MOST_HELD_BYTES // 3
    told = hand_overs((small, large, *(small,) * 20), (TWO, ONE))
    assert layers_of(told[0]) == [0, 1, 0, 1]


def test_what_is_handed_over_is_every_push_of_each_layer() -> None:
    assert hand_overs((64, 64), (TWO, ONE)) == [
        [TWO.of_layer(0), ONE.of_layer(0)],
        [TWO.of_layer(1), ONE.of_layer(1)],
    ]
