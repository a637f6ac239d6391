"""A folder's weights onto the card, one matrix for each product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from common.control_group import num_cores
from engine.runner.gpu.cuda_driver import Device, Memory
from engine.runner.gpu.repacking import float8_words, repacked
from engine.runner.gpu.weight_plan import EMBEDDING, HEAD, layer_matrices, planned
from engine.runner.gpu.weights import (
    GATE_PARTS,
    NO_MATRIX,
    DecoderWeights,
    ExpertWeights,
    Form,
    LayerWeights,
    Matrix,
    send_angles,
)
from engine.runner.weights.key_scales import has_key_scales, key_scales
from engine.runner.weights.spec.decoder_tensors import CHOICE_BIAS, EXPERT_GATE, SINKS
from engine.runner.weights.spec.expert_mixture import ExpertMixture
from engine.runner.weights.spec.model_spec import DecoderSpec
from engine.runner.weights.tensor_source import TensorSource

_ELEMENT = 2
_MOST_THREADS = 8
_PART_BYTES = 8 << 20
"""Bytes of stored rows that are repacked at a time."""


@dataclass(frozen=True, slots=True)
class _Upload:
    """A tensor on its way to `address`."""

    name: str
    address: int
    num_bytes: int
    form: Form = Form.BF16
    scales: int = 0


def _bias(weight: str) -> str:
    """Return the name of the bias of a weight's projection."""
    return f"{weight.removesuffix('weight')}bias"


class _Loader:
    """Allocates a decoder's matrices and notes which tensors they consist of."""

    def __init__(
        self, device: Device, source: TensorSource, spec: DecoderSpec, stored: str
    ) -> None:
        self._device, self._source, self._spec, self._stored = device, source, spec, stored
        self.memories: list[Memory] = []
        self.uploads: list[_Upload] = []

    def joined(self, names: Sequence[str]) -> tuple[int, int]:
        """Return the address of these tensors, one after the other, and the sum of their rows."""
        shapes = [self._source.shape(name) for name in names]
        sizes = [_ELEMENT * int(np.prod(shape)) for shape in shapes]
        memory = self._device.allocate(sum(sizes))
        self.memories.append(memory)
        address = memory.address
        for name, size in zip(names, sizes, strict=True):
            self.uploads.append(_Upload(name, address, size))
            address += size
        return memory.address, sum(shape[0] for shape in shapes)

    def matrix(self, names: Sequence[str]) -> Matrix:
        """Return the matrix of these tensors, in the form that `planned` says."""
        plan = planned(self._source, names).matrix
        if plan.form is Form.BF16:
            return replace(plan, address=self.joined(names)[0])
        words, scales = (
            self._device.allocate(size) for size in (plan.weight_bytes, plan.scale_bytes)
        )
        self.memories += [words, scales]
        address, scale_address = words.address, scales.address
        for name in names:
            outputs = self._source.shape(name)[0]
            part = replace(plan, num_outputs=outputs)
            self.uploads.append(_Upload(name, address, part.weight_bytes, plan.form, scale_address))
            address += part.weight_bytes
            scale_address += part.scale_bytes
        return replace(plan, address=words.address, scales=scales.address)

    def vector(self, name: str) -> int:
        return self.joined([name])[0]

    def layer(self, prefix: str, mixture: ExpertMixture | None) -> LayerWeights:
        spec = self._spec
        names = layer_matrices(prefix, mixture)
        bias = query_norm = key_norm = 0
        if spec.has_qkv_bias:
            biases = [f"{prefix}self_attn.{name}_proj.bias" for name in "qkv"]
            bias = self.joined(biases)[0]
        if spec.has_head_norms:
            query_norm = self.vector(f"{prefix}self_attn.q_norm.weight")
            key_norm = self.vector(f"{prefix}self_attn.k_norm.weight")
        return LayerWeights(
            input_norm=self.vector(f"{prefix}input_layernorm.weight"),
            qkv=self.matrix(names["qkv"]),
            query_norm=query_norm,
            key_norm=key_norm,
            output=self.matrix(names["output"]),
            middle_norm=self.vector(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self.matrix(names["gate_up"]) if "gate_up" in names else NO_MATRIX,
            down=self.matrix(names["down"]) if "down" in names else NO_MATRIX,
            qkv_bias=bias,
            key_divisors=self._key_divisors(prefix),
            sinks=self._floats(f"{prefix}{SINKS}") if spec.has_sinks else 0,
            output_bias=(
                self._floats(f"{prefix}self_attn.o_proj.bias") if spec.has_output_bias else 0
            ),
            experts=None if mixture is None else self._experts(prefix, mixture, names),
        )

    def _experts(
        self, prefix: str, mixture: ExpertMixture, names: Mapping[str, tuple[str, ...]]
    ) -> ExpertWeights:
        gate_up, down = names["experts_gate_up"], names["experts_down"]
        gate_bias, choice_bias = f"{prefix}{EXPERT_GATE}.bias", f"{prefix}{CHOICE_BIAS}"
        return ExpertWeights(
            expert_gate=self._expert_gate(f"{prefix}{EXPERT_GATE}.weight"),
            gate_up=self.matrix(gate_up),
            down=self.matrix(down),
            choice_bias=self._floats(choice_bias) if mixture.has_choice_bias else 0,
            gate_bias=self._floats(gate_bias) if mixture.has_gate_bias else 0,
            gate_up_biases=self._floats(*map(_bias, gate_up)) if mixture.has_biases else 0,
            down_biases=self._floats(*map(_bias, down)) if mixture.has_biases else 0,
        )

    def _floats(self, *names: str) -> int:
        """Return the address of these tensors in float32, one after the other."""
        values = [self._source.read(name).ravel() for name in names]
        return self._array(np.concatenate(values).astype(np.float32))

    def _expert_gate(self, name: str) -> Matrix:
        """Return a gate: one that is not in bfloat16 as the parts that it is the sum of."""
        if self._source.format_and_shape(name)[0] == "BF16":
            return Matrix(*self.joined([name]), self._spec.hidden_size)
        parts = bfloat16_parts(self._source.read(name))
        return Matrix(self._array(parts), len(parts), self._spec.hidden_size)

    def _array(self, values: np.ndarray) -> int:
        """Return the address of an array that is sent at once."""
        memory = self._device.allocate(values.nbytes)
        self.memories.append(memory)
        self._device.upload_array(memory.address, np.ascontiguousarray(values))
        return memory.address

    def _key_divisors(self, prefix: str) -> int:
        if not has_key_scales(self._spec, self._stored):
            return 0
        return self._array(key_scales(self._source, prefix, self._spec, self._stored))

    def upload(self) -> None:
        """Read and send all tensors, several at a time."""

        def send(one: _Upload) -> None:
            self._device.use()
            if one.form is Form.BF16:
                self._device.upload_array(one.address, self._bfloat16(one))
            elif one.form is Form.FP8:
                self._send_float8(one)
            else:
                self._send_groups(one)

        with ThreadPoolExecutor(min(_MOST_THREADS, num_cores())) as threads:
            # The largest first, so that none of them is sent alone at the end.
            largest_first = sorted(self.uploads, key=lambda one: -one.num_bytes)
            list(threads.map(send, largest_first))

    def _send_groups(self, one: _Upload) -> None:
        """Send a tensor's words and scales, some rows at a time."""
        rows = self._source.grouped(one.name).rows
        step = max(1, _PART_BYTES // rows.shape[1])
        address, scale_address = one.address, one.scales
        for first in range(0, len(rows), step):
            words, scales = repacked(one.form, np.ascontiguousarray(rows[first : first + step]))
            self._device.upload_array(address, words)
            self._device.upload_array(scale_address, scales)
            address += words.nbytes
            scale_address += scales.nbytes

    def _send_float8(self, one: _Upload) -> None:
        """Send a tensor's words and scales."""
        stored = self._source.float8(one.name)
        numbers = stored.numbers
        self._device.upload_array(one.scales, np.ascontiguousarray(stored.scales))
        address = one.address
        step = max(1, _PART_BYTES // numbers.shape[1])
        for first in range(0, len(numbers), step):
            words = float8_words(np.ascontiguousarray(numbers[first : first + step]))
            self._device.upload_array(address, words)
            address += words.nbytes

    def _bfloat16(self, one: _Upload) -> np.ndarray:
        """Return a tensor as bfloat16 bits, C-contiguous."""
        stored = self._source.grouped(one.name)
        shape = self._source.shape(one.name)
        if stored.format == "BF16":
            bits = np.ascontiguousarray(stored.rows).view(np.uint16).reshape(shape)
        else:
            bits = rounded_to_bfloat16(self._source.read(one.name))
        return np.ascontiguousarray(bits)


def rounded_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return float32 values as bfloat16 bits, uint16, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    found: np.ndarray = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return found


def bfloat16_parts(values: np.ndarray) -> np.ndarray:
    """Return float32 values [rows, columns] as bfloat16 bits [GATE_PARTS * rows, columns].

    The parts lie one after the other, the largest first; their sum is exact, but for numbers that
    are smaller than 2**-110.
    """
    parts, rest = [], values.astype(np.float32)
    for _ in range(GATE_PARTS):
        bits = rounded_to_bfloat16(rest)
        rest = rest - (bits.astype(np.uint32) << 16).view(np.float32)
        parts.append(bits)
    return np.concatenate(parts)


def load_weights(
    device: Device,
    source: TensorSource,
    spec: DecoderSpec,
    max_len: int,
    stored: str = "bfloat16",
) -> DecoderWeights:
    """Read a folder's weights; weights without a form of the kernels are rounded to bfloat16.

    `stored` is the type of the numbers of the KV cache.

    Raises `CheckpointError` for a truncated file.
    """
    loader = _Loader(device, source, spec, stored)
    # The embedding is in bfloat16, even if the file's is quantised.
    address, vocabulary = loader.joined([EMBEDDING])
    embedding = Matrix(address, vocabulary, spec.hidden_size)
    layers = tuple(
        loader.layer(f"model.layers.{index}.", spec.mixture_of(index))
        for index in range(spec.num_layers)
    )
    final_norm = loader.vector("model.norm.weight")
    head = embedding if spec.has_tied_embeddings else loader.matrix([HEAD])
    loader.upload()
    angles = send_angles(device, spec, max_len)
    return DecoderWeights(
        layers=layers, embedding=embedding.address, final_norm=final_norm, head=head,
        angles={rope: memory.address for rope, memory in angles.items()},
        memories=(*loader.memories, *angles.values()),
    )  # fmt: skip
