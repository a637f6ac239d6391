"""The kernels of mixtures of experts: which experts, which pairs, the bits of each result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import rounded, widened  # isort: skip

import numpy as np
import pytest

from engine.runner.gpu.experts.expert_launches import ExpertLaunches
from engine.runner.gpu.experts.expert_tiles import ExpertTiles, expert_tiles, most_tiles
from engine.runner.gpu.load_weights import bfloat16_parts
from engine.runner.gpu.steps.step_memory import StepMemory, activation_sizes
from engine.runner.gpu.tiles import Tile
from engine.runner.gpu.weights import Form, Matrix
from engine.runner.weights.spec.expert_mixture import ClampedSwish, ExpertMixture
from tests.gpu_kernels.tiny_decoder import SPEC, TinyDecoder
from tests.gpu_kernels.uploaded import upload
from tests.support.models.fused_experts import NUMBERS

MIXTURE = ExpertMixture(
    layers=(0, 1), num_experts=6, num_chosen=3, inner_size=48, shared_size=32, is_normalised=True,
    least_sum=1e-12, has_choice_bias=True,
)  # fmt: skip
EXPERTS, CHOSEN, INNER, HIDDEN = 6, 3, 48, SPEC.hidden_size
ROWS = 37
NARROW, WIDE = Tile(16, 32, 16, 4, 3), Tile(64, 64, 16, 4, 3)


@pytest.fixture(scope="module")
def tiny() -> TinyDecoder:
    return TinyDecoder(spec=replace(SPEC, experts=MIXTURE))


class Step:
    """The buffers of a step of `num_rows` rows, and one layer's launches."""

    def __init__(self, tiny: TinyDecoder, num_rows: int, mixture: ExpertMixture = MIXTURE) -> None:
        spec = replace(tiny.spec, experts=mixture)
        self.device, self.num_rows, self.mixture = tiny.device, num_rows, mixture
        card: Any = tiny.device
        self.memory = StepMemory(card, activation_sizes(spec, num_rows))
        dense = tiny.launches(NARROW)
        self.make = ExpertLaunches(dense, card.properties, spec, mixture)
        layer = tiny.weights.layers[0].experts
        assert layer is not None
        self.weights = layer

    def put(self, name: str, values: np.ndarray) -> None:
        self.device.upload(self.memory[name], np.ascontiguousarray(values).tobytes())

    def get(self, name: str, kind: Any, *shape: int) -> np.ndarray:
        raw = self.device.download(self.memory[name], np.dtype(kind).itemsize * int(np.prod(shape)))
        return np.frombuffer(raw, kind).reshape(shape)

    def choose(
        self, products: np.ndarray, bias: np.ndarray | None = None, padding: int = 0,
        gate_bias: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Return the experts and the weights of rows; the last `padding` of them are padding."""
        parts = products.shape[1] // EXPERTS
        positions = np.arange(self.num_rows, dtype=np.int32)
        positions[self.num_rows - padding :] = -1
        self.put("gate_products", products.astype(np.float32))
        weights = replace(
            self.weights, expert_gate=Matrix(0, parts * EXPERTS, HIDDEN),
            choice_bias=0 if bias is None else upload(self.device, bias.astype(np.float32)),
            gate_bias=(
                0 if gate_bias is None else upload(self.device, gate_bias.astype(np.float32))
            ),
        )  # fmt: skip
        at = upload(self.device, positions)
        self.make.choose(weights, self.memory, self.num_rows, at)(0)
        shape = self.num_rows, CHOSEN
        return self.get("experts", np.int32, *shape), self.get("expert_weights", np.float32, *shape)

    def list_pairs(self, experts: np.ndarray, tiles: ExpertTiles) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs and the tiles of rows that are sent to these experts."""
        self.put("experts", experts.astype(np.int32))
        self.make.list_pairs(self.memory, self.num_rows, tiles)(0)
        num_tiles = int(self.get("num_tiles", np.int32, 1)[0])
        assert num_tiles <= most_tiles(experts.size, EXPERTS, tiles.rows)
        return (
            self.get("pairs", np.int32, experts.size),
            self.get("tiles", np.int32, num_tiles, 4)[:, :3],
        )


def products_of(num_rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_rows, EXPERTS)).astype(np.float32)


def expected_choice(
    products: np.ndarray, bias: np.ndarray, mixture: ExpertMixture
) -> tuple[np.ndarray, np.ndarray]:
    """Return experts in ascending order and their weights; of equal scores the first is chosen."""
    wide = products.astype(np.float64)
    scores = np.exp(wide - wide.max(1, keepdims=True))
    scores /= scores.sum(1, keepdims=True)
    experts = np.sort(np.argsort(-(scores + bias), axis=1, kind="stable")[:, :CHOSEN], axis=1)
    weights = np.take_along_axis(scores, experts, axis=1)
    if mixture.is_normalised:
        weights /= weights.sum(1, keepdims=True)
    return experts, weights


@pytest.mark.parametrize("is_normalised", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_highest_scores_are_chosen_and_weight_without_their_bias(
    tiny: TinyDecoder, has_bias: bool, is_normalised: bool
) -> None:
    mixture = replace(MIXTURE, is_normalised=is_normalised)
    step, products = Step(tiny, ROWS, mixture), products_of(ROWS)
    bias = np.array([0.5, -0.2, 0.0, 0.1, 0.0, -0.4]) if has_bias else np.zeros(EXPERTS)
    found, weights = step.choose(products, bias if has_bias else None)
    experts, wanted = expected_choice(products, bias, mixture)
    assert np.array_equal(found, experts)
    assert np.allclose(weights, wanted, rtol=1e-5)
    if has_bias:
        assert not np.array_equal(found, expected_choice(products, np.zeros(EXPERTS), mixture)[0])


def test_scores_are_sigmoids_whose_sum_a_model_scales(tiny: TinyDecoder) -> None:
    """A bias of the gate is in the scores that weight; that of the choice is not."""
    mixture = replace(MIXTURE, is_sigmoid=True, weight_scale=2.5)
    products, gate_bias = products_of(ROWS), np.array([0.3, -2.0, 0.0, 1.0, 0.5, -0.1])
    bias = np.array([0.5, -0.2, 0.0, 0.1, 0.0, -0.4])
    found, weights = Step(tiny, ROWS, mixture).choose(products, bias, 0, gate_bias)
    scores = 1 / (1 + np.exp(-(products + gate_bias)))
    experts = np.sort(np.argsort(-(scores + bias), axis=1, kind="stable")[:, :CHOSEN], axis=1)
    chosen = np.take_along_axis(scores, experts, axis=1)
    assert np.array_equal(found, experts)
    assert np.allclose(weights, 2.5 * chosen / chosen.sum(1, keepdims=True), rtol=1e-5)


def test_of_equal_scores_the_first_experts_are_chosen(tiny: TinyDecoder) -> None:
    step = Step(tiny, 3)
    products = np.array([[0, 0, 0, 0, 0, 0], [1, 2, 1, 2, 1, 1], [0, 5, 1, 1, 1, 1]], np.float32)
    found, _ = step.choose(products)
    assert found.tolist() == [[0, 1, 2], [0, 1, 3], [1, 2, 3]]


def test_a_row_that_is_not_finite_has_experts_and_padding_has_none(tiny: TinyDecoder) -> None:
    products = products_of(5)
    products[0] = np.nan
    products[1, 2] = np.inf
    products[4] = np.nan
    found, weights = Step(tiny, 5).choose(products, np.zeros(EXPERTS), padding=2)
    assert found[:2].tolist() == [[0, 1, 2]] * 2
    assert np.isnan(weights[:2]).all()
    assert found[3:].tolist() == [[EXPERTS] * CHOSEN] * 2
    alone, own = Step(tiny, 1).choose(products[2:3], np.zeros(EXPERTS))
    assert np.array_equal(found[2], alone[0])
    assert np.array_equal(weights[2], own[0])


def test_a_sum_of_chosen_scores_is_at_least_what_the_model_says(tiny: TinyDecoder) -> None:
    mixture, products = replace(MIXTURE, least_sum=4.0), products_of(4)
    _, weights = Step(tiny, 4, mixture).choose(products)
    _, plain = expected_choice(products, np.zeros(EXPERTS), replace(mixture, is_normalised=False))
    assert np.allclose(weights, plain / 4.0, rtol=1e-5)


def test_a_gate_in_float32_keeps_all_its_bits(tiny: TinyDecoder) -> None:
    rng = np.random.default_rng(4)
    values = (rng.standard_normal((7, 64)) * 10.0 ** rng.integers(-9, 9, (7, 64))).astype(
        np.float32
    )
    parts = widened(bfloat16_parts(values)).reshape(3, 7, 64).astype(np.float64)
    assert np.array_equal(parts.sum(0), values.astype(np.float64))
    one = products_of(4)
    halves = np.concatenate([one, one / 512, -one / 65536], axis=1)
    found, weights = Step(tiny, 4).choose(halves)
    experts, wanted = expected_choice(one * (1 + 1 / 512 - 1 / 65536), np.zeros(EXPERTS), MIXTURE)
    assert np.array_equal(found, experts)
    assert np.allclose(weights, wanted, rtol=1e-5)


def tiles_of(rows: int, gate_up: Tile = NARROW, down: Tile = NARROW) -> ExpertTiles:
    return ExpertTiles(replace(gate_up, rows=rows), replace(down, rows=rows))


def random_experts(num_rows: int, seed: int = 1) -> np.ndarray:
    """Return experts in ascending order; the last one is chosen twice as often."""
    order = np.random.default_rng(seed).random((num_rows, EXPERTS))
    order[:, -1] *= 0.3
    return np.sort(np.argsort(order, axis=1)[:, :CHOSEN], axis=1)


CASES = {
    "any": random_experts(ROWS),
    "one row": random_experts(1),
    "the same": np.tile([1, 2, 4], (ROWS, 1)),
    "padding among them": np.where(
        np.arange(ROWS)[:, None] % 5 == 0, EXPERTS, random_experts(ROWS)
    ),
    "padding alone": np.full((4, CHOSEN), EXPERTS),
    "more than are looked at together": random_experts(400),
}


@pytest.mark.parametrize("tile_rows", [16, 64])
@pytest.mark.parametrize("experts", CASES.values(), ids=list(CASES))
def test_each_pair_is_listed_once_with_its_expert(
    tiny: TinyDecoder, experts: np.ndarray, tile_rows: int
) -> None:
    pairs, tiles = Step(tiny, len(experts)).list_pairs(experts, tiles_of(tile_rows))
    flat = experts.reshape(-1)
    wanted = np.concatenate([np.flatnonzero(flat == one) for one in range(EXPERTS)])
    assert np.array_equal(pairs[: len(wanted)], wanted)
    listed = [
        (one, first + place) for one, first, count in tiles.tolist() for place in range(count)
    ]
    assert listed == [(int(flat[pair]), place) for place, pair in enumerate(wanted)]
    assert all(0 < count <= tile_rows for _, _, count in tiles.tolist())


def computed(
    tiny: TinyDecoder, experts: np.ndarray, x: np.ndarray, tiles: ExpertTiles,
    mixture: ExpertMixture = MIXTURE,
) -> np.ndarray:  # fmt: skip
    """Return the results of each row's experts [rows, CHOSEN, HIDDEN]; NaN where it has none."""
    step = Step(tiny, len(experts), mixture)
    step.list_pairs(experts, tiles)
    make, memory, weights = step.make, step.memory, step.weights
    at, biases = upload(step.device, x), (weights.gate_up_biases, weights.down_biases)
    make.gate_up(at, weights.gate_up, memory, step.num_rows, tiles, biases[0])(0)
    make.down(memory["pair_activated"], weights.down, memory, step.num_rows, tiles, biases[1])(0)
    return step.get("pair_results", np.uint16, *experts.shape, HIDDEN)


def expert_of(tiny: TinyDecoder, number: int) -> tuple[Matrix, Matrix]:
    """Return the gate and up, and the down matrix of one expert, with scales of its own."""
    weights = tiny.weights.layers[0].experts
    assert weights is not None

    def part(matrix: Matrix) -> Matrix:
        one = replace(matrix, num_outputs=matrix.num_outputs // EXPERTS)
        one = replace(one, address=one.address + number * one.weight_bytes)
        if one.form is Form.BF16:
            return one
        raw = tiny.device.download(one.scales + number * one.scale_bytes, one.scale_bytes)
        return replace(one, scales=upload(tiny.device, np.frombuffer(raw, np.uint8)))

    return part(weights.gate_up), part(weights.down)


def alone(tiny: TinyDecoder, row: np.ndarray, number: int) -> np.ndarray:
    """Return one row's results of one expert by the products of an MLP."""
    device, make = tiny.device, tiny.launches(NARROW)
    gate_up, down = expert_of(tiny, number)
    activated, y = device.allocate(2 * down.num_inputs), device.allocate(2 * HIDDEN)
    make.gate_up(upload(device, row), gate_up, activated.address, 1)(0)
    make.product(activated.address, down, y.address, 1)(0)
    return np.frombuffer(device.download(y.address, 2 * HIDDEN), np.uint16)


def rows_of(count: int) -> np.ndarray:
    values = np.random.default_rng(8).standard_normal((count, HIDDEN)).astype(np.float32)
    return rounded(values).reshape(count, HIDDEN)


@pytest.mark.parametrize("case", ["any", "the same", "padding among them"])
def test_results_have_the_bits_of_an_mlp_that_is_computed_alone(
    tiny: TinyDecoder, case: str
) -> None:
    """In tiles of any size, whose outputs overhang an expert's and another one's follow."""
    experts, x = CASES[case], rows_of(ROWS)
    found = computed(tiny, experts, x, tiles_of(16))
    for tiles in (
        tiles_of(16, Tile(16, 64, 64, 4, 3), Tile(16, 64, 16, 4, 3)), tiles_of(32),
        tiles_of(64, WIDE, Tile(64, 256, 16, 8, 3)),
    ):  # fmt: skip
        again = computed(tiny, experts, x, tiles)
        assert again.tobytes() == found.tobytes()
    for row in (0, 1, 17, ROWS - 1):
        for slot, number in enumerate(experts[row].tolist()):
            if number < EXPERTS:
                assert np.array_equal(found[row, slot], alone(tiny, x[row], number))
            else:
                assert (found[row, slot] == 0xFFFF).all()


@pytest.mark.parametrize("form", [form for form in Form if form is not Form.BF16])
def test_results_of_quantised_experts_have_the_bits_of_an_mlp_that_is_computed_alone(
    form: Form,
) -> None:
    """In the tiles that are shipped: of each size, with ranges together and in turn."""
    mixture = replace(MIXTURE, inner_size=256, shared_size=0)
    tiny = TinyDecoder(form, replace(SPEC, experts=mixture))
    experts, x = CASES["padding among them"][:19], rows_of(19)
    gate_up, down = expert_of(tiny, 0)
    found = []
    for rows, num_rows in ((8, 8), (32, 64), (64, 1024)):
        share = replace(mixture, num_experts=num_rows, num_chosen=rows)
        tiles = expert_tiles(num_rows, share, gate_up, down)
        assert tiles.rows == rows
        assert tiles.gate_up.is_together == (rows == 8)
        assert tiles.down.is_together == (rows <= 32)
        found.append(computed(tiny, experts, x, tiles, mixture))
        assert found[-1].tobytes() == found[0].tobytes()
    for row in (1, 17):
        for slot, number in enumerate(experts[row].tolist()):
            assert np.array_equal(found[0][row, slot], alone(tiny, x[row], number))


@pytest.mark.parametrize("form", [Form.BF16, Form.MXFP4])
def test_biases_and_a_clamped_swish_are_those_of_float64(form: Form) -> None:
    """In tiles of every size the same bits; a number that is none stays none within the limits."""
    swish = ClampedSwish(steepness=1.702, limit=0.75)
    mixture = replace(MIXTURE, inner_size=96, shared_size=0, has_biases=True, clamped_swish=swish)
    tiny = TinyDecoder(form, replace(SPEC, experts=mixture, num_layers=1))
    [layer] = tiny.weights.layers
    own = layer.experts
    assert own is not None
    experts, x = CASES["padding among them"][:19], rows_of(19)
    x[3, 7] = 0x7FC0
    shipped = [
        expert_tiles(num_rows, replace(mixture, num_experts=num_rows, num_chosen=rows),
                     expert_of(tiny, 0)[0], expert_of(tiny, 0)[1])
        for rows, num_rows in ((8, 8), (64, 1024))
    ]  # fmt: skip
    found = [computed(tiny, experts, x, tiles, mixture) for tiles in shipped]
    assert found[0].tobytes() == found[1].tobytes()
    gates_and_ups, downs = (
        np.frombuffer(tiny.device.download(at, 4 * EXPERTS * size), np.float32).reshape(EXPERTS, -1)
        for at, size in ((own.gate_up_biases, 192), (own.down_biases, HIDDEN))
    )
    gate_ups, down_weights = (
        stored_values(tiny, one).reshape(EXPERTS, -1, one.num_inputs)
        for one in (own.gate_up, own.down)
    )
    for row in (0, 1, 3, 17):
        for slot, number in enumerate(experts[row].tolist()):
            if number == EXPERTS:
                continue
            both = gate_ups[number] @ widened(x[row]) + gates_and_ups[number]
            gate, up = np.minimum(both[:96], 0.75), np.clip(both[96:], -0.75, 0.75)
            wanted = down_weights[number] @ ((up + 1) * gate / (1 + np.exp(-1.702 * gate)))
            wanted += downs[number]
            result = widened(found[0][row, slot])
            assert np.isnan(result).all() == (row == 3)
            if row != 3:
                assert np.linalg.norm(result - wanted) / np.linalg.norm(wanted) < 8e-3


def stored_values(tiny: TinyDecoder, matrix: Matrix) -> np.ndarray:
    """Return the weights of a matrix in BF16 or MXFP4, float64 [outputs, inputs]."""
    if matrix.form is Form.BF16:
        return tiny.matrix(matrix)
    strips = -(-matrix.num_inputs // 128)
    raw = tiny.device.download(matrix.address, matrix.weight_bytes)
    words = np.frombuffer(raw, np.uint16).reshape(-1, strips, 1, 32)
    codes = words >> np.arange(0, 16, 4).reshape(4, 1) & 15
    raw = tiny.device.download(matrix.scales, matrix.scale_bytes)
    scales = np.ldexp(1.0, np.frombuffer(raw, np.uint8).astype(int) - 127)
    values: np.ndarray = np.array(NUMBERS)[codes] * scales.reshape(-1, strips, 4, 1)
    return values.reshape(matrix.num_outputs, -1)[:, : matrix.num_inputs]


@pytest.mark.parametrize("shared", [True, False])
def test_results_are_added_in_ascending_order_and_rounded_once(
    tiny: TinyDecoder, shared: bool
) -> None:
    mixture = MIXTURE if shared else replace(MIXTURE, shared_size=0)
    rows, rng = 3, np.random.default_rng(3)
    step = Step(tiny, rows, mixture)
    experts = random_experts(rows)
    experts[1] = EXPERTS
    weights = rng.random((rows, CHOSEN)).astype(np.float32)
    results = rounded(rng.standard_normal((rows, CHOSEN, HIDDEN)).astype(np.float32))
    # Numbers that cancel: in another order the others would be lost beside them.
    weights[:, :2] = 1024
    results[:, 1] = results[:, 0] ^ 0x8000
    results[1] = 0xFFFF
    hidden, other = (rounded(rng.standard_normal((rows, HIDDEN)).astype(np.float32)) for _ in "12")
    step.put("experts", experts.astype(np.int32))
    step.put("expert_weights", weights)
    step.put("pair_results", results)
    step.put("hidden", hidden)
    if shared:
        step.put("shared", other)
    norm = upload(step.device, rounded(np.ones(HIDDEN, np.float32)))
    step.make.add(step.memory, rows, norm)(0)
    total = np.zeros((rows, HIDDEN), np.float32)
    for slot in range(CHOSEN):
        own = weights[:, slot, None] * widened(results[:, slot])
        total += np.where(experts[:, slot, None] < EXPERTS, own, np.float32(0))
    if shared:
        total += widened(other)
    wanted = rounded(widened(hidden) + total)
    assert np.array_equal(step.get("hidden", np.uint16, rows, HIDDEN), wanted)
    wide = widened(wanted).astype(np.float64)
    scaled = wide / np.sqrt((wide * wide).mean(1, keepdims=True) + SPEC.rms_epsilon)
    normed = widened(step.get("normed", np.uint16, rows, HIDDEN))
    assert np.allclose(normed, scaled, rtol=1e-2)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 64, 128, 256, 320, 1000, 1024, 1088, 4096, 9000])
def test_tiles_are_those_of_a_number_of_rows_that_kernels_are_compiled_for(num_rows: int) -> None:
    """Chunks have multiples of 64 rows; `GpuDecoder.bind_all` asks for 64, 256, 1,024 and most."""
    mixture = replace(MIXTURE, num_experts=128, num_chosen=8)
    gate_up, down = Matrix(0, 1536, 2048), Matrix(0, 2048, 768)
    bound = next((one for one in (1, 16, 64, 256, 1024) if num_rows <= one), 4096)
    found = expert_tiles(num_rows, mixture, gate_up, down)
    assert found == expert_tiles(bound, mixture, gate_up, down)
    assert found.gate_up.rows == found.down.rows


def test_memory_of_a_step_holds_its_tiles() -> None:
    for pairs in (1, 8, 100, 4096):
        for rows in (16, 32, 128):
            assert most_tiles(pairs, 64, rows) <= most_tiles(pairs, 64, 16)
    assert most_tiles(8, 128, 16) == 8
