"""How the reference chooses experts and weights them, and what each of them computes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.runner.paddle.decoder import Experts, GatedMlp, Linear
from engine.runner.paddle_import import paddle
from engine.runner.weights.spec.expert_mixture import ClampedSwish, ExpertMixture

ROWS, HIDDEN, INNER = 40, 16, 12
MIXTURE = ExpertMixture(
    layers=(0,), num_experts=6, num_chosen=2, inner_size=INNER, shared_size=0, is_normalised=False,
    least_sum=0.0, has_choice_bias=False,
)  # fmt: skip
MIXTURES = {
    "softmax": MIXTURE,
    "scaled": replace(MIXTURE, weight_scale=2.5),
    "sigmoids": replace(MIXTURE, is_sigmoid=True),
    "as GLM": replace(
        MIXTURE, is_sigmoid=True, has_choice_bias=True, is_normalised=True, least_sum=1e-20,
        weight_scale=1.75,
    ),
    "as gpt-oss": replace(
        MIXTURE, is_normalised=True, has_gate_bias=True, has_biases=True,
        clamped_swish=ClampedSwish(steepness=1.5, limit=0.8),
    ),
}  # fmt: skip


class _Drawn:
    """Weights `[outputs, inputs]` and biases, as numpy and as Paddle's projections."""

    def __init__(self) -> None:
        self._random = np.random.RandomState(0)
        self.arrays: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def linear(self, name: str, outputs: int, inputs: int, has_bias: bool) -> Linear:
        weight = self._random.standard_normal((outputs, inputs)).astype(np.float32)
        bias = self._random.standard_normal(outputs).astype(np.float32) * has_bias
        self.arrays[name] = weight, bias
        return Linear(
            paddle.to_tensor(np.ascontiguousarray(weight.T)),
            paddle.to_tensor(bias) if has_bias else None,
        )


def _wanted(
    mixture: ExpertMixture, drawn: _Drawn, choice_bias: np.ndarray, x: np.ndarray
) -> np.ndarray:
    """The sum of each row's experts, in float64, row by row."""

    def linear(name: str, row: np.ndarray) -> np.ndarray:
        weight, bias = drawn.arrays[name]
        product: np.ndarray = weight.astype(np.float64) @ row + bias
        return product

    out = np.zeros(x.shape)
    for row, added in zip(x.astype(np.float64), out, strict=True):
        products = linear("gate", row)
        scores = np.exp(products) / np.exp(products).sum()
        if mixture.is_sigmoid:
            scores = 1 / (1 + np.exp(-products))
        chosen = np.argsort(-(scores + choice_bias * mixture.has_choice_bias))[:2]
        weights = scores[chosen]
        if mixture.is_normalised:
            weights = weights / weights.sum()
        for index, weight in zip(chosen, weights * mixture.weight_scale, strict=True):
            gate, up = np.split(linear(f"gate_up {index}", row), 2)
            steepness = 1.0
            if mixture.clamped_swish is not None:
                steepness, limit = mixture.clamped_swish.steepness, mixture.clamped_swish.limit
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
            inner = up * gate / (1 + np.exp(-steepness * gate))
            added += weight * linear(f"down {index}", inner)
    return out


@pytest.mark.parametrize("name", MIXTURES)
def test_a_row_is_the_weighted_sum_of_its_experts(name: str) -> None:
    mixture, drawn = MIXTURES[name], _Drawn()
    each = [
        GatedMlp(
            gate_up=drawn.linear(f"gate_up {index}", 2 * INNER, HIDDEN, mixture.has_biases),
            down=drawn.linear(f"down {index}", HIDDEN, INNER, mixture.has_biases),
            is_gelu=False,
            clamped_swish=mixture.clamped_swish,
        )
        for index in range(mixture.num_experts)
    ]
    gate = drawn.linear("gate", mixture.num_experts, HIDDEN, mixture.has_gate_bias)
    bias = np.random.RandomState(1).standard_normal(mixture.num_experts).astype(np.float32)
    choice = paddle.to_tensor(bias) if mixture.has_choice_bias else None
    x = np.random.RandomState(2).standard_normal((ROWS, HIDDEN)).astype(np.float32) / 4
    found = Experts(mixture, gate, choice, each, None)(paddle.to_tensor(x)).numpy()
    np.testing.assert_allclose(found, _wanted(mixture, drawn, bias, x), atol=2e-5, rtol=1e-5)
