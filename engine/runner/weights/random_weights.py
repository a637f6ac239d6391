"""Weights of a model's shape without a file: random, and the same bits wherever they are made.

A value of a matrix is an entry of a table, at a byte of a stream of random numbers; the table has
256 quantiles of a normal distribution. The stream is Philox4x64-10 from counter 0, its key the
first 16 bytes of SHA-256 of the tensor's name. A byte for each value is cheap to draw, and any part
of a tensor can be made alone, on a device too.

Each product keeps the size of what it multiplies, what is added to the residual stream is smaller
by the square root of how often that is done, and logits have a standard deviation of about four.
Embeddings are small beside what layers add: a head that is the embedding would predict the last
token again, and answers would say nothing of the context.

Of a mixture, what the chosen experts and the shared MLP add together has the size of what one MLP
adds, whatever function of gate and up they compute; the scores of experts differ from token to
token, so tokens go to all of them. Sinks are normal, as scores of keys are.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import NormalDist

import numpy as np

from common.errors import CheckpointError
from engine.runner.weights.spec.decoder_tensors import (
    CHOICE_BIAS,
    SHARED_EXPERTS,
    SINKS,
    expected_shapes,
)
from engine.runner.weights.spec.expert_mixture import ClampedSwish, ExpertMixture
from engine.runner.weights.spec.model_spec import DecoderSpec, without_defaults
from engine.runner.weights.stored_tensor import GroupedTensor
from engine.runner.weights.tensor_source import TensorSource

_FORMAT = "BF16"
_VERSION = 1
"""A part of the identity: raise it when the bits change."""
_LEVELS = 256
_LOGIT_DEVIATION = 4.0
_BIAS_DEVIATION = 0.02
_CHOICE_BIAS_DEVIATION = 0.25
"""A share of an expert's usual score: it changes some choices, and leaves no expert out."""
_SIGMOID_BIAS_DEVIATION = 0.02
"""The same where scores are sigmoids, of which the highest are close to each other."""
_EMBEDDING = "model.embed_tokens.weight"
_EMBEDDING_SHARE = 0.25
_RESIDUAL = ("o_proj.weight", "down_proj.weight")
_PAIRS_AT_A_TIME = 1 << 16
"""Pairs of values that are looked up at a time: indices and results stay in a core's cache."""
_VALUES_OF_A_NUMBER = 8


class RandomWeights(TensorSource):
    """All tensors of a decoder, in bfloat16. Any number of threads may read them at a time."""

    def __init__(self, spec: DecoderSpec) -> None:
        """Take the shapes of `spec`; a tensor is made whenever it is read."""
        self.metadata: dict[str, str] = {}
        self._shapes = expected_shapes(spec)
        self._calm = 1 / math.sqrt(2 * spec.num_layers)
        self._output_norms = {
            f"model.layers.{layer}.{norm}.weight"
            for layer in range(spec.num_layers if spec.has_output_norms else 0)
            for norm in ("post_attention_layernorm", "post_feedforward_layernorm")
        }
        self._embedding_share = _EMBEDDING_SHARE / spec.embedding_scale
        head_share = self._embedding_share if spec.has_tied_embeddings else 1.0
        self._final_norm = _LOGIT_DEVIATION / head_share
        self._mixture = spec.experts

    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def check(
        self,
        source: Path,
        name: str,
        shape: tuple[int, ...],
        dtypes: Sequence[str] | None = None,
    ) -> None:
        """Raise `CheckpointError` unless the tensor is among these, with this shape."""
        found = self._shapes.get(name)
        if found != shape or (dtypes is not None and _FORMAT not in dtypes):
            made = f"{_FORMAT} {list(found)}" if found is not None else "not made"
            raise CheckpointError(
                f"{source}: with random weights tensor {name} is {made}: wanted shape {list(shape)}"
                f"{' of ' + ' or '.join(dtypes) if dtypes else ''}"
            )

    def format_and_shape(self, name: str) -> tuple[str, tuple[int, int]]:
        shape = self._shapes[name]
        return _FORMAT, (math.prod(shape[:-1]), shape[-1])

    def grouped(self, name: str) -> GroupedTensor:
        """Return a new array; the interpreter lock is free while it is filled."""
        format_name, shape = self.format_and_shape(name)
        count = math.prod(shape)
        if name.endswith("norm.weight"):
            size = self._norm_size(name)
            values = np.full(count, _bfloat16(np.array(size)), np.uint16)
        else:
            values = _draw(name, count, self._deviation(name))
        return GroupedTensor(format_name, shape, values.view(np.uint8).reshape(shape[0], -1))

    def identity(self) -> str:
        """Return a digest of what decides all values: names, shapes, and how experts are chosen."""
        described = f"random {_VERSION} {json.dumps(self._shapes)}"
        if self._mixture is not None:
            described += f" {json.dumps(without_defaults(self._mixture), sort_keys=True)}"
        return hashlib.sha256(described.encode()).hexdigest()

    def stamps(self) -> list[list[int]]:
        return []

    def _norm_size(self, name: str) -> float:
        if name == "model.norm.weight":
            return self._final_norm
        return self._calm if name in self._output_norms else 1.0

    def _deviation(self, name: str) -> float:
        if name.endswith(".bias"):
            return _BIAS_DEVIATION
        if name.endswith(SINKS):
            return 1.0
        if name.endswith(CHOICE_BIAS):
            if self._mixture is not None and self._mixture.is_sigmoid:
                return _SIGMOID_BIAS_DEVIATION
            return _CHOICE_BIAS_DEVIATION / self._shapes[name][-1]
        share = self._embedding_share if name == _EMBEDDING else 1.0
        if name.endswith(_RESIDUAL):
            share = self._calm * self._share_of_mixture(name)
        return share / math.sqrt(self._shapes[name][-1])

    def _share_of_mixture(self, name: str) -> float:
        """Return by how much one part of a mixture is larger than an MLP that is alone; else 1."""
        mixture, is_shared = self._mixture, f".{SHARED_EXPERTS}." in name
        if mixture is None or not (is_shared or ".mlp.experts." in name):
            return 1.0
        share = math.sqrt(0.5) if mixture.shared_size else 1.0
        if is_shared:
            return share
        return share / (_size_of_weights(mixture) * _size_of_inner(mixture.clamped_swish))


@cache
def _size_of_weights(mixture: ExpertMixture) -> float:
    """Return the root of the sum of squares of a token's weights, whose experts are unlike.

    Products with the gate are those of a normal distribution with a deviation of one.
    """
    products = _normal_values(mixture.num_experts)
    if mixture.is_sigmoid:
        scores = [1 / (1 + math.exp(-product)) for product in products]
    else:
        whole = sum(math.exp(product) for product in products)
        scores = [math.exp(product) / whole for product in products]
    chosen = scores[-mixture.num_chosen :]
    if mixture.is_normalised:
        chosen_sum = max(sum(chosen), mixture.least_sum)
        chosen = [score / chosen_sum for score in chosen]
    return mixture.weight_scale * math.sqrt(sum(score * score for score in chosen))


@cache
def _size_of_inner(function: ClampedSwish | None) -> float:
    """Return how large what `down` multiplies is beside `silu(gate) * up`, as root mean squares.

    Gate and up are those of a normal distribution with a deviation of one.
    """
    if function is None:
        return 1.0
    values = np.array(_normal_values(_LEVELS))
    usual = np.square(values / (1 + np.exp(-values))).mean()  # times that of up, 1
    gate = np.minimum(values, function.limit)
    up = np.clip(values, -function.limit, function.limit) + 1
    gate /= 1 + np.exp(-function.steepness * gate)
    return math.sqrt(np.square(gate).mean() * np.square(up).mean() / usual)


def _normal_values(count: int) -> list[float]:
    """Return as many values that are equally likely in a normal distribution, in their order."""
    normal = NormalDist()
    return [normal.inv_cdf((i + 0.5) / count) for i in range(count)]


def _draw(name: str, count: int, deviation: float) -> np.ndarray:
    """Return `count` bfloat16 values as uint16."""
    table = _pairs_of_levels(deviation)
    numbers = -(-count // _VALUES_OF_A_NUMBER)
    values = np.empty(numbers * _VALUES_OF_A_NUMBER, np.uint16)
    pairs = values.view(np.uint32)
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    stream = np.random.Philox(key=key)
    for start in range(0, pairs.size, _PAIRS_AT_A_TIME):
        part = pairs[start : start + _PAIRS_AT_A_TIME]
        drawn = stream.random_raw(part.size * 2 // _VALUES_OF_A_NUMBER).view(np.uint16)
        np.take(table, drawn, out=part, mode="clip")
    return values[:count]


@cache
def _pairs_of_levels(deviation: float) -> np.ndarray:
    """Return the two values of each pair of bytes, uint32 `[65536]`; the first byte is the low one.

    A look-up of two values costs as much as one of a single value.
    """
    levels = np.array(_normal_values(_LEVELS))
    levels *= deviation / math.sqrt(np.square(levels).mean())
    bits = _bfloat16(levels).astype(np.uint32)
    pairs: np.ndarray = (bits[None, :] | bits[:, None] << 16).reshape(-1)
    return pairs


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the nearest bfloat16 bits of finite values, ties to even, as uint16."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded: np.ndarray = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return rounded
