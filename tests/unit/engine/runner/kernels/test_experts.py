"""A mixture of experts: which are chosen, and that a row is the sum of its own, in their order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from numba import get_num_threads, set_num_threads

from common.kv.kv_layout import KVLayout
from engine.core.runner_contract import ScheduledSequence
from engine.core.step.step_batch import batch_of
from engine.runner.back_end import StepShape
from engine.runner.cache.kv_cache import KVCache
from engine.runner.cpu.decoder import NumbaDecoder
from engine.runner.flat_batch import BatchLimits, flatten
from engine.runner.kernels.experts import BAND_ROWS, ExpertBuffers
from engine.runner.kernels.norms import quantise_rows
from engine.runner.kernels.products.activations import silu_kernel
from engine.runner.kernels.products.linear import gated_linear, linear
from engine.runner.weights.spec.decoder_tensors import CHOICE_BIAS, expected_shapes
from engine.runner.weights.spec.expert_mixture import ClampedSwish, ExpertMixture
from engine.runner.weights.spec.model_spec import DecoderSpec
from engine.runner.weights.spec.rope_spec import RopeSpec
from engine.runner.weights.stored_formats import dequantise
from engine.runner.weights.stored_tensor import GroupedTensor
from engine.runner.weights.tensor_source import TensorSource
from tests.support.models.packing import GROUPED_FORMATS, NONE, NONE_2D, floats, normal, stored

SIZE = 256
"""Inputs of every product: the least of all formats."""
MOST_ROWS = 3 * BAND_ROWS + 5
NUM_BLOCKS = 4
LAYER = "model.layers.0."
SPEC = DecoderSpec(
    architecture="", num_layers=1, hidden_size=SIZE, intermediate_size=SIZE, num_heads=2,
    num_kv_heads=1, head_dim=16, vocab_size=16, max_position=256, rms_epsilon=1e-6,
    rope=RopeSpec(kind="default", theta=1e4), is_rope_interleaved=False, has_tied_embeddings=True,
    has_qkv_bias=False, has_output_bias=False, has_mlp_bias=False, has_head_norms=False,
)  # fmt: skip
MIXTURE = ExpertMixture(
    layers=(0,), num_experts=6, num_chosen=3, inner_size=SIZE, shared_size=0, is_normalised=True,
    least_sum=0.0, has_choice_bias=False,
)  # fmt: skip
BIASED = replace(
    MIXTURE, has_gate_bias=True, has_biases=True,
    clamped_swish=ClampedSwish(steepness=1.702, limit=2.0),
)  # fmt: skip
"""As gpt-oss has them, with a limit that half of all numbers exceed."""
SIGMOIDS = replace(MIXTURE, is_sigmoid=True, has_choice_bias=True, weight_scale=2.5)
NARROW = replace(SPEC, hidden_size=96)
"""Sizes that are no multiples of 64."""
ARITHMETICS = [
    ("F32", False), ("BF16", False), ("F16", False),
    *((name, with_bytes) for name in GROUPED_FORMATS for with_bytes in (False, True)),
]  # fmt: skip


class Weights(TensorSource):
    """A layer's weights in one format, the experts' gate in float32. Attention adds nothing."""

    def __init__(
        self,
        mixture: ExpertMixture,
        name: str = "F32",
        spec: DecoderSpec = SPEC,
        **gate: np.ndarray,
    ) -> None:
        self.metadata: dict[str, str] = {}
        self._shapes = expected_shapes(replace(spec, experts=mixture))
        self._made: dict[str, GroupedTensor] = {}
        for seed, (tensor, shape) in enumerate(self._shapes.items()):
            if "o_proj" in tensor or "norm" in tensor:
                rows = np.full(shape if len(shape) == 2 else (1, *shape), "norm" in tensor)
                self._made[tensor] = floats(rows)
            elif CHOICE_BIAS in tensor:
                bias = gate.get("bias", normal(*shape, seed=seed) / 8)
                self._made[tensor] = floats(bias.reshape(1, -1))
            elif len(shape) == 1:
                self._made[tensor] = floats(normal(1, *shape, seed=seed))
            elif "mlp.gate." in tensor:
                weight = gate.get("weight", normal(*shape, seed=seed) / 8)
                self._made[tensor] = floats(weight)
            elif "mlp" in tensor:
                num_outputs, num_inputs = shape
                self._made[tensor] = stored(name, num_outputs, num_inputs, seed=seed)
            else:
                self._made[tensor] = floats(normal(*shape, seed=seed))

    def names(self) -> Iterable[str]:
        return self._made

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def check(
        self,
        source: Path,
        name: str,
        shape: tuple[int, ...],
        dtypes: Sequence[str] | None = None,
    ) -> None:
        raise AssertionError("nothing is checked")

    def format_and_shape(self, name: str) -> tuple[str, tuple[int, int]]:
        return self._made[name].format, self._made[name].shape

    def grouped(self, name: str) -> GroupedTensor:
        return self._made[name]

    def identity(self) -> str:
        return ""

    def stamps(self) -> list[list[int]]:
        return []


@dataclass
class Layer:
    """A layer with experts, alone in a decoder."""

    mixture: ExpertMixture
    weights: Weights
    with_bytes: bool = False
    spec: DecoderSpec = SPEC

    def __post_init__(self) -> None:
        layout = KVLayout(
            model_digest="", num_layers=1, num_kv_heads=1, head_dim=16, block_size=256,
            dtype="float32",
        )  # fmt: skip
        cache = KVCache(layout, NUM_BLOCKS * layout.block_bytes)
        self.decoder = NumbaDecoder(
            replace(self.spec, experts=self.mixture), self.weights, cache, 256,
            StepShape(num_tokens=MOST_ROWS, num_seqs=NUM_BLOCKS, num_logits_rows=1),
            with_bytes=self.with_bytes,
        )  # fmt: skip
        for buffer in self.decoder.step_buffers.buffers:
            buffer.first(buffer.num_rows).fill(np.nan)

    def __call__(self, x: np.ndarray, num_sequences: int = 1) -> np.ndarray:
        """Return what the layer makes of rows of hidden states, of sequences of equal length."""
        limits = BatchLimits(
            max_tokens=MOST_ROWS, max_len=256, num_blocks=NUM_BLOCKS, block_size=256, vocab_size=16
        )
        tokens = [1] * (len(x) // num_sequences)
        batch = [ScheduledSequence(0, tokens, 0, [block], None) for block in range(num_sequences)]
        hidden = self.decoder.begin(flatten(batch_of(batch), limits))
        hidden[:] = x
        self.decoder.run_layer(0, hidden)
        self.num_rows = len(x)
        return np.array(hidden)

    @property
    def choice(self) -> ExpertBuffers:
        """What the last call has left."""
        buffers = self.decoder.buffers
        assert buffers.experts is not None
        return ExpertBuffers(*buffers.experts.first(self.num_rows, buffers.gated))

    def mlp(self, row: np.ndarray, kind: str, index: int) -> np.ndarray:
        """The output of one MLP for one normed row, by the products of layers without experts."""
        layer, inner_size = self.decoder.layers[0], self.mixture.inner_size
        gate_up, down = (layer.packed[f"{kind}{n}"] for n in ("gate_up", "down"))
        gated, out = np.empty((1, inner_size), np.float32), np.empty_like(row)
        pair = gate_up.table[2 * index : 2 * index + 2]
        biases, activation = [NONE, NONE], silu_kernel()
        if kind and layer.experts is not None:
            activation = layer.experts.activation
            if self.mixture.has_biases:
                biases = [layer.experts.gate_up_bias[index], layer.experts.down_bias[index]]
        gated_linear(row, pair, biases[0], activation, self._in_int8(row), gated, 1)
        down_of = down.table[index : index + 1]
        linear(gated, down_of, biases[1], NONE_2D, self._in_int8(gated), out, 1)
        row_out: np.ndarray = out[0]
        return row_out

    def _in_int8(self, row: np.ndarray) -> np.ndarray:
        out = np.zeros((1, row.shape[1] // 2), np.float32)
        quantise_rows(row, out, False)
        return out


def normed(row: np.ndarray) -> np.ndarray:
    return np.asarray(row / np.sqrt((row.astype(np.float64) ** 2).mean() + 1e-6))


def linear_in_float64(weights: Weights, name: str, row: np.ndarray) -> np.ndarray:
    product = row @ dequantise(weights.grouped(f"{LAYER}{name}.weight")).astype(np.float64).T
    has_bias = f"{LAYER}{name}.bias" in weights.names()
    return np.asarray(product + (weights.read(f"{LAYER}{name}.bias") if has_bias else 0.0))


def mlp_in_float64(
    weights: Weights, part: str, row: np.ndarray, clamped: ClampedSwish | None = None
) -> np.ndarray:
    gate, up = (linear_in_float64(weights, f"{part}.{n}_proj", row) for n in ("gate", "up"))
    steepness = 1.0
    if clamped is not None:
        gate, steepness = np.minimum(gate, clamped.limit), clamped.steepness
        up = np.clip(up, -clamped.limit, clamped.limit) + 1
    swish = gate * (1 + np.tanh(steepness * gate / 2)) / 2
    return linear_in_float64(weights, f"{part}.down_proj", swish * up)


def scores_in_float64(mixture: ExpertMixture, products: np.ndarray) -> np.ndarray:
    powers = np.exp(products - products.max())
    return np.asarray(1 / (1 + np.exp(-products)) if mixture.is_sigmoid else powers / powers.sum())


def assert_as_in_float64(
    mixture: ExpertMixture, weights: Weights, x: np.ndarray, found: np.ndarray
) -> None:
    """`found` is what the layer adds to the rows `x`."""
    bias = weights.read(LAYER + CHOICE_BIAS)[0] if mixture.has_choice_bias else 0.0
    for row in range(len(x)):
        scores = scores_in_float64(mixture, linear_in_float64(weights, "mlp.gate", normed(x[row])))
        best = np.argsort(-(scores + bias), kind="stable")[: mixture.num_chosen]
        total = max(scores[best].sum(), mixture.least_sum) if mixture.is_normalised else 1.0
        outputs = [
            mlp_in_float64(weights, f"mlp.experts.{n}", normed(x[row]), mixture.clamped_swish)
            for n in best
        ]
        wanted = mixture.weight_scale * (scores[best] / total) @ np.array(outputs)
        np.testing.assert_allclose(found[row], wanted, atol=2e-5 * np.abs(wanted).max() + 1e-5)


def rows_of(count: int, seed: int = 1, size: int = SIZE) -> np.ndarray:
    return normal(count, size, seed=seed)


@pytest.mark.parametrize(("name", "with_bytes"), ARITHMETICS)
@pytest.mark.parametrize("shared_size", [0, SIZE])
def test_a_row_is_the_sum_of_its_own_experts_by_number_to_the_last_bit(
    name: str, with_bytes: bool, shared_size: int
) -> None:
    """Then the shared MLP. Each is what the products of other layers give for the row alone."""
    mixture = replace(MIXTURE, shared_size=shared_size)
    layer = Layer(mixture, Weights(mixture, name), with_bytes)
    x = rows_of(9)
    found = layer(x)
    chosen, weights = layer.choice.chosen.copy(), layer.choice.weights.copy()
    rows_normed = layer.decoder.buffers.normed.first(9).copy()
    for row in range(9):
        wanted = x[row].copy()
        assert list(chosen[row]) == sorted(set(chosen[row]))
        for number, weight in zip(chosen[row], weights[row], strict=True):
            wanted += weight * layer.mlp(rows_normed[row : row + 1], "experts_", number)
        if shared_size:
            wanted = layer.mlp(rows_normed[row : row + 1], "", 0) + wanted
        np.testing.assert_array_equal(found[row], wanted)


@pytest.mark.parametrize(("name", "with_bytes"), ARITHMETICS)
def test_a_row_does_not_depend_on_its_neighbours(name: str, with_bytes: bool) -> None:
    layer = Layer(MIXTURE, Weights(MIXTURE, name), with_bytes)
    x = rows_of(MOST_ROWS)
    together = layer(x)
    assert np.isfinite(together).all()
    for first, count in ((0, 1), (77, 1), (3, 2), (60, 12), (10, 70), (0, MOST_ROWS - 1)):
        part = slice(first, first + count)
        np.testing.assert_array_equal(layer(x[part]), together[part])


@pytest.mark.parametrize("is_normalised", [True, False])
@pytest.mark.parametrize("name", ["F32", "BF16", "F16", *GROUPED_FORMATS])
def test_rows_are_those_of_a_float64_mixture(name: str, is_normalised: bool) -> None:
    mixture = replace(MIXTURE, is_normalised=is_normalised)
    weights = Weights(mixture, name)
    x = rows_of(20)
    assert_as_in_float64(mixture, weights, x, Layer(mixture, weights)(x) - x)


@pytest.mark.parametrize(
    "mixture",
    [
        BIASED,
        replace(BIASED, has_gate_bias=False, has_biases=False),
        replace(BIASED, clamped_swish=None, is_normalised=False),
        SIGMOIDS,
        replace(SIGMOIDS, is_normalised=False, has_choice_bias=False),
        replace(SIGMOIDS, least_sum=2.0),
    ],
)
def test_so_are_those_with_biases_another_activation_or_sigmoids(mixture: ExpertMixture) -> None:
    mixture = replace(mixture, inner_size=160)
    weights = Weights(mixture, "MXFP4", NARROW)
    x = rows_of(20, size=96)
    found = Layer(mixture, weights, spec=NARROW)(x)
    assert_as_in_float64(mixture, weights, x, found - x)


@pytest.mark.parametrize("mixture", [BIASED, replace(SIGMOIDS, has_biases=True)])
@pytest.mark.parametrize("with_bytes", [False, True])
def test_their_rows_too_are_sums_of_their_own_experts_whatever_is_beside_them(
    mixture: ExpertMixture, with_bytes: bool
) -> None:
    mixture = replace(mixture, inner_size=160)
    layer = Layer(mixture, Weights(mixture, "MXFP4", NARROW), with_bytes, NARROW)
    x = rows_of(MOST_ROWS, size=96)
    together = layer(x)
    chosen, weights = layer.choice.chosen.copy(), layer.choice.weights.copy()
    rows_normed = layer.decoder.buffers.normed.first(MOST_ROWS).copy()
    for row in range(9):
        wanted = x[row].copy()
        for number, weight in zip(chosen[row], weights[row], strict=True):
            wanted += weight * layer.mlp(rows_normed[row : row + 1], "experts_", number)
        np.testing.assert_array_equal(together[row], wanted)
    for first, count in ((0, 1), (3, 2), (10, 70)):
        part = slice(first, first + count)
        np.testing.assert_array_equal(layer(x[part]), together[part])
    x[2, 7] = np.nan
    found = layer(x[:4], 4)
    assert np.isnan(found[2]).all()
    np.testing.assert_array_equal(found[[0, 1, 3]], together[[0, 1, 3]])


def test_any_number_of_threads_gives_the_same_bits() -> None:
    x, found = rows_of(90), []
    before = get_num_threads()
    try:
        for num_threads in range(1, before + 1):
            set_num_threads(num_threads)
            layer = Layer(MIXTURE, Weights(MIXTURE, "Q4_0"), with_bytes=True)
            found.append([layer(x), layer(x[:1])])
    finally:
        set_num_threads(before)
    for one in found[1:]:
        np.testing.assert_array_equal(one[0], found[0][0])
        np.testing.assert_array_equal(one[1], found[0][1])


@pytest.mark.parametrize("with_bytes", [False, True])
def test_all_rows_may_go_to_one_expert_and_none_to_another(with_bytes: bool) -> None:
    mixture = replace(MIXTURE, num_chosen=1, has_choice_bias=True)
    bias = np.array([0, 0, 0, 0, 5, 0], np.float32)
    layer = Layer(mixture, Weights(mixture, "Q8_0", bias=bias), with_bytes)
    x = rows_of(MOST_ROWS)
    together = layer(x)
    assert set(layer.choice.chosen.reshape(-1)) == {4}
    assert list(layer.choice.ends) == [0, 0, 0, 0, MOST_ROWS, MOST_ROWS]
    for row in (0, BAND_ROWS - 1, BAND_ROWS, MOST_ROWS - 1):
        np.testing.assert_array_equal(layer(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("with_bytes", [False, True])
def test_there_may_be_more_experts_than_rows_and_a_row_may_go_to_all(with_bytes: bool) -> None:
    many = replace(MIXTURE, num_experts=45)
    few = Layer(many, Weights(many, "Q4_0"), with_bytes)(rows_of(2))
    assert np.isfinite(few).all()
    everywhere = replace(MIXTURE, num_chosen=6)
    layer = Layer(everywhere, Weights(everywhere, "Q4_0"), with_bytes)
    layer(rows_of(3))
    assert layer.choice.chosen.tolist() == [list(range(6))] * 3


def test_of_equal_scores_the_first_experts_are_chosen() -> None:
    """Also behind a higher one, and where all are equal."""
    same = np.zeros((6, SIZE), np.float32)
    layer = Layer(MIXTURE, Weights(MIXTURE, weight=same))
    layer(rows_of(2))
    assert layer.choice.chosen.tolist() == [[0, 1, 2]] * 2
    np.testing.assert_array_equal(layer.choice.weights, np.full((2, 3), 1 / 3, np.float32))
    mixture = replace(MIXTURE, has_choice_bias=True)
    bias = np.array([0.5, 0.25, 0.75, 0.25, 0.25, 0.25], np.float32)
    layer = Layer(mixture, Weights(mixture, weight=same, bias=bias))
    layer(rows_of(1))
    assert layer.choice.chosen.tolist() == [[0, 1, 2]]
    bias = np.array([0.25, 0.25, 0.25, 0.25, 0.5, 0.75], np.float32)
    layer = Layer(mixture, Weights(mixture, weight=same, bias=bias))
    layer(rows_of(1))
    assert layer.choice.chosen.tolist() == [[0, 4, 5]]


def test_a_bias_chooses_and_does_not_weigh() -> None:
    mixture = replace(MIXTURE, has_choice_bias=True, is_normalised=False)
    bias = np.array([0, 9, 0, 7, 8, 0], np.float32)
    same = np.zeros((6, SIZE), np.float32)
    layer = Layer(mixture, Weights(mixture, weight=same, bias=bias))
    layer(rows_of(1))
    assert layer.choice.chosen.tolist() == [[1, 3, 4]]
    np.testing.assert_array_equal(layer.choice.weights, np.full((1, 3), 1 / 6, np.float32))


def test_a_sum_of_scores_is_not_less_than_the_least() -> None:
    mixture = replace(MIXTURE, num_chosen=1, least_sum=0.5)
    layer = Layer(mixture, Weights(mixture, weight=np.zeros((6, SIZE), np.float32)))
    layer(rows_of(1))
    wanted = np.float32(1 / 6) / np.float32(0.5)
    np.testing.assert_array_equal(layer.choice.weights, [[wanted]])


@pytest.mark.parametrize("with_bytes", [False, True])
def test_a_row_that_is_not_a_number_stays_one_alone(with_bytes: bool) -> None:
    layer = Layer(MIXTURE, Weights(MIXTURE, "Q8_0"), with_bytes)
    x = rows_of(4)
    whole = layer(x, 4)
    x[2, 7] = np.nan
    found = layer(x, 4)
    assert np.isnan(found[2]).all()
    others = [0, 1, 3]
    np.testing.assert_array_equal(found[others], whole[others])


def test_the_gate_of_the_experts_takes_float32_rows_whatever_its_format() -> None:
    """A choice by rows in int8 would be that of another model."""
    weights = Weights(MIXTURE, "Q8_0")
    name = f"{LAYER}mlp.gate.weight"
    weights._made[name] = stored("Q8_0", 6, SIZE, seed=3, scale=0.002)
    x = rows_of(8)
    in_int8, in_floats = (Layer(MIXTURE, weights, with_bytes) for with_bytes in (True, False))
    in_int8(x)
    in_floats(x)
    np.testing.assert_array_equal(in_int8.choice.weights, in_floats.choice.weights)
    np.testing.assert_array_equal(in_int8.choice.chosen, in_floats.choice.chosen)
