"""What reads a block waits for the step that wrote it, and for none that is queued behind that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.runner.cache.layers_out import LayersOut
from engine.runner.gpu.cache.layer_ends import LayerEnds, QueuedLayers, UntoldLayers

NUM_LAYERS, NUM_BLOCKS = 3, 8


class PlayedStream:
    """A device of one stream; `num_queued` is how much was queued there."""

    num_queued = 0

    def event(self) -> PlayedEvent:
        return PlayedEvent(self)


class PlayedEvent:
    """Behind what was queued when it was recorded."""

    def __init__(self, stream: PlayedStream) -> None:
        self._stream, self.place = stream, 0

    def record(self, stream: int) -> None:
        self.place = self._stream.num_queued

    def close(self) -> None:
        pass


@pytest.fixture
def stream() -> PlayedStream:
    return PlayedStream()


@pytest.fixture
def ends(stream: PlayedStream) -> LayerEnds:
    device: Any = stream
    ends = LayerEnds(device, 7, NUM_LAYERS)
    ends.forget(NUM_BLOCKS)
    return ends


def place_of(ends: LayerEnds, layer: int, *blocks: int) -> int:
    event: Any = ends.after(layer, blocks)
    return int(event.place)


def layers_of(ends: LayerEnds, *, is_told: bool) -> LayersOut:
    if not is_told:
        return UntoldLayers(ends)
    return LayersOut(lambda _: None, QueuedLayers(ends).mark, most_under_way=NUM_LAYERS)


@pytest.mark.parametrize("seed", range(10))
def test_a_block_waits_for_its_own_step(stream: PlayedStream, ends: LayerEnds, seed: int) -> None:
    """Whatever other steps write, told of layer by layer or not, also while one is queued."""
    rng = np.random.default_rng(seed)
    written: dict[int, list[int]] = {}

    def check_others(blocks: set[int], begins: int) -> None:
        for block in written.keys() - blocks:
            for layer in range(NUM_LAYERS):
                assert written[block][layer] <= place_of(ends, layer, block) <= begins

    for _ in range(30):
        blocks = set(rng.choice(NUM_BLOCKS, rng.integers(1, 4), replace=False).tolist())
        is_told, begins, places = rng.random() < 0.5, stream.num_queued, list[int]()
        ends.begin(np.array(list(blocks)))
        layers = layers_of(ends, is_told=is_told)
        for layer in range(NUM_LAYERS):
            stream.num_queued += 1
            places.append(stream.num_queued)
            layers.on_computed(layer)
            check_others(blocks, begins)
        layers.finish()
        for block in blocks:
            written[block] = places
            for layer in range(NUM_LAYERS):
                assert place_of(ends, layer, block) == (places[layer] if is_told else places[-1])


def test_blocks_of_two_steps_wait_for_the_later_one(stream: PlayedStream, ends: LayerEnds) -> None:
    for block in (1, 2):
        ends.begin(np.array([block]))
        for layer in range(NUM_LAYERS):
            stream.num_queued += 1
            ends.mark(layer)
    assert [place_of(ends, 0, *blocks) for blocks in ([1], [2], [1, 2], [2, 1])] == [1, 4, 4, 4]


def test_a_step_that_was_not_queued_wholly_counts_for_nothing(
    stream: PlayedStream, ends: LayerEnds
) -> None:
    for block, num_layers in ((1, NUM_LAYERS), (2, 1), (3, NUM_LAYERS)):
        ends.begin(np.array([block]))
        for layer in range(num_layers):
            stream.num_queued += 1
            ends.mark(layer)
    assert [place_of(ends, 1, block) for block in (1, 3)] == [2, 6]


def test_a_cache_that_moved_waits_for_nothing(stream: PlayedStream, ends: LayerEnds) -> None:
    ends.forget(2)
    assert place_of(ends, 0, 1) == 0
