"""Experts, rows and pairs that lie further from their addresses than 32 bits count."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice, InterpretedKernel, rounded  # isort: skip

import numpy as np
import pytest

from engine.runner.gpu.experts.expert_launches import ExpertLaunches
from engine.runner.gpu.experts.expert_tiles import ExpertTiles
from engine.runner.gpu.launches import Launches
from engine.runner.gpu.tiles import Tile
from engine.runner.gpu.weights import ExpertWeights, Matrix
from engine.runner.weights.spec.expert_mixture import ExpertMixture
from tests.gpu_kernels.far_memory import LastProgram, array_at, behind, sparse
from tests.gpu_kernels.tiny_decoder import SHAPE, SPEC
from tests.gpu_kernels.uploaded import upload

HIDDEN, INNER, CHOSEN, COUNT = 128, 64, 3, 5
"""What one program computes: COUNT pairs of one expert."""
FAR_EXPERT = 2**31 // (HIDDEN * INNER) + 1
FAR_PLACE = 2**31 // INNER + 1
FAR_ROW = 2**31 // HIDDEN + 1
TILES = ExpertTiles(Tile(16, INNER, 64, 4, 3), Tile(16, HIDDEN, 64, 4, 3))


def mixture_of(num_experts: int) -> ExpertMixture:
    return ExpertMixture(
        layers=(0,), num_experts=num_experts, num_chosen=CHOSEN, inner_size=INNER, shared_size=0,
        is_normalised=False, least_sum=0.0, has_choice_bias=True,
    )  # fmt: skip


def launches(mixture: ExpertMixture, kernel: Any = InterpretedKernel) -> ExpertLaunches:
    nothing: Any = None
    spec, card = replace(SPEC, experts=mixture), InterpretedDevice.properties
    dense = Launches(kernel, card, spec, nothing, nothing, SHAPE)
    return ExpertLaunches(dense, card, spec, mixture)


def bfloat16(seed: int, *shape: int) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return rounded(values).reshape(shape)


def product(expert: int, place: int, row: int, *, is_gated: bool) -> np.ndarray:
    """Return the results of the same pairs and weights, which lie there."""
    outputs, inputs = (INNER, HIDDEN) if is_gated else (HIDDEN, INNER)
    device = InterpretedDevice()
    pairs = (row + np.arange(COUNT, dtype=np.int32)) * CHOSEN + 1
    with ExitStack() as stack:
        own = bfloat16(1, (2 if is_gated else 1) * outputs, inputs)
        weights = Matrix(
            behind(stack, expert * own.size, own), (expert + 1) * own.shape[0], inputs
        )  # fmt: skip
        x = behind(stack, (row if is_gated else place) * inputs, bfloat16(2, COUNT, inputs))
        to = place + np.arange(COUNT) if is_gated else pairs.astype(np.int64)
        y = stack.enter_context(sparse(2 * (int(to[-1]) + 1) * outputs))
        memory: Any = {
            "tiles": upload(device, np.array([[expert, place, COUNT, 0]], np.int32)),
            "num_tiles": upload(device, np.array([1], np.int32)),
            "pairs": behind(stack, place, pairs), "pair_activated": y, "pair_results": y,
        }  # fmt: skip
        make = launches(mixture_of(expert + 1))
        launch = make.gate_up if is_gated else make.down
        launch(x, weights, memory, 1, TILES)(0)
        return np.array([
            array_at(y + 2 * outputs * one, outputs, np.uint16).copy() for one in to.tolist()
        ])  # fmt: skip


@pytest.mark.parametrize("is_gated", [False, True], ids=["down", "gate and up"])
def test_far_experts_places_and_rows_are_multiplied(is_gated: bool) -> None:
    near = product(0, 0, 0, is_gated=is_gated)
    assert near.any(axis=1).all()
    for expert, place, row in ((FAR_EXPERT, 0, 0), (0, FAR_PLACE, 0), (0, 0, FAR_ROW)):
        assert np.array_equal(product(expert, place, row, is_gated=is_gated), near)


def test_experts_of_a_far_row_are_chosen() -> None:
    experts, device = 6, InterpretedDevice()
    row = 2**31 // (3 * experts) + 1
    products = np.random.default_rng(3).standard_normal((1, 3 * experts)).astype(np.float32)
    weights = ExpertWeights(
        Matrix(0, 3 * experts, HIDDEN), Matrix(0, 0, 0), Matrix(0, 0, 0),
        upload(device, np.zeros(experts, np.float32)),
    )  # fmt: skip

    def chosen(row: int) -> tuple[list[int], list[float]]:
        with ExitStack() as stack:
            memory: Any = {
                "gate_products": behind(stack, row * 3 * experts, products),
                "experts": stack.enter_context(sparse(4 * (row + 1) * CHOSEN)),
                "expert_weights": stack.enter_context(sparse(4 * (row + 1) * CHOSEN)),
            }
            positions = behind(stack, row, np.array([7], np.int32))
            make = launches(mixture_of(experts), LastProgram)
            make.choose(weights, memory, row + 1, positions)(0)
            own = 4 * row * CHOSEN
            return (
                array_at(memory["experts"] + own, CHOSEN, np.int32).tolist(),
                array_at(memory["expert_weights"] + own, CHOSEN, np.float32).tolist(),
            )

    near = chosen(0)
    assert near[0] != [0, 1, 2]
    assert chosen(row) == near


def test_results_of_a_far_row_are_added() -> None:
    device = InterpretedDevice()
    norm = upload(device, bfloat16(9, HIDDEN))

    def added(row: int) -> tuple[bytes, bytes]:
        with ExitStack() as stack:
            memory: Any = {
                "hidden": behind(stack, row * HIDDEN, bfloat16(4, HIDDEN)),
                "pair_results": behind(stack, row * CHOSEN * HIDDEN, bfloat16(5, CHOSEN, HIDDEN)),
                "experts": behind(stack, row * CHOSEN, np.array([1, 2, 4], np.int32)),
                "expert_weights": behind(stack, row * CHOSEN, np.array([0.5, 2, 1], np.float32)),
                "shared": 0, "normed": stack.enter_context(sparse(2 * (row + 1) * HIDDEN)),
            }  # fmt: skip
            launches(mixture_of(6), LastProgram).add(memory, row + 1, norm)(0)
            own = 2 * row * HIDDEN
            hidden, normed = (
                array_at(memory[name] + own, HIDDEN, np.uint16) for name in ("hidden", "normed")
            )
            return hidden.tobytes(), normed.tobytes()

    near = added(0)
    assert any(near[1])
    assert added(FAR_ROW) == near
