"""A decoder's weights on the card: one matrix for each product, in bfloat16 or quantised."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from engine.runner.gpu.cuda_driver import Device, Memory
from engine.runner.gpu.kernels.random_numbers import fill_bytes, fill_normal
from engine.runner.gpu.launcher import BindableKernel, KernelSpec
from engine.runner.weights.rope import rotary_tables
from engine.runner.weights.spec.expert_mixture import ExpertMixture
from engine.runner.weights.spec.model_spec import DecoderSpec
from engine.runner.weights.spec.rope_spec import RopeSpec

_ELEMENT = 2
_COUNTERS = 1024
_VALUES_PER_COUNTER = 4
_SMALL = 0.1
_E2M1_DEVIATION = 2.9
"""The standard deviation of the numbers of MXFP4's 16 codes."""


class Form(IntEnum):
    """How weights are stored (`kernels.stored_weights`)."""

    BF16 = 0
    FP8 = 1
    INT4 = 2
    Q4_0 = 3
    Q8_0 = 4
    MXFP4 = 5

    @property
    def bits(self) -> int:
        """Bits of a weight, without its scale."""
        return {Form.BF16: 16, Form.FP8: 8, Form.Q8_0: 8}.get(self, 4)

    @property
    def group_inputs(self) -> int:
        """Inputs that share a scale."""
        return 32 if self in (Form.Q4_0, Form.Q8_0, Form.MXFP4) else STRIP_INPUTS


SCALES = {
    Form.FP8: "*fp32", Form.INT4: "*bf16", Form.Q4_0: "*u64", Form.Q8_0: "*u64", Form.MXFP4: "*u32",
}  # fmt: skip
"""What a product's kernel takes for the scales: Q4_0 and Q8_0 have four float16 in a word, and
MXFP4 four bytes."""
STRIP_INPUTS = 128
"""Inputs that a product of quantised weights reads together."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights [outputs, inputs] at `address`; `scales` is an address too, 0 for BF16."""

    address: int
    num_outputs: int
    num_inputs: int
    form: Form = Form.BF16
    scales: int = 0

    @property
    def num_strips(self) -> int:
        """Strips that hold an output's inputs; the last one may be held in part."""
        return -(-self.num_inputs // STRIP_INPUTS)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights without their scales; quantised ones are stored in whole strips."""
        held = self.num_inputs if self.form is Form.BF16 else self.num_strips * STRIP_INPUTS
        return self.num_outputs * held * self.form.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales."""
        if self.form is Form.FP8:
            return 4 * (-(-self.num_outputs // STRIP_INPUTS)) * self.num_strips
        each = {Form.BF16: 0, Form.INT4: 2, Form.MXFP4: 4}.get(self.form, 8)
        return each * self.num_outputs * self.num_strips

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads, scales included."""
        return self.weight_bytes + self.scale_bytes


GATE_PARTS = 3
"""Matrices in bfloat16 whose sum a gate in float32 is: 8 bits of its numbers' 24 each."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of a layer.

    `expert_gate` is [parts * experts, inputs], of one part or of `GATE_PARTS`. The others have the
    outputs of all experts, one after the other: of each its gate and then its up rows, and its
    down rows. The others are addresses of float32, 0 where there are none: `choice_bias` and
    `gate_bias` [experts], `gate_up_biases` and `down_biases` of all outputs, in their order.
    """

    expert_gate: Matrix
    gate_up: Matrix
    down: Matrix
    choice_bias: int = 0
    gate_bias: int = 0
    gate_up_biases: int = 0
    down_biases: int = 0


NO_MATRIX = Matrix(0, 0, 0)


def norm_type(spec: DecoderSpec) -> str:
    """Return what kernels take for the weights of norms.

    bfloat16, in which files have them; float32 where files have them less one: w has the same bits
    in bfloat16, but 1 + w would be rounded to 8 of them.
    """
    return "*fp32" if spec.has_norm_offsets else "*bf16"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer's weights; norms are addresses. Gate rows precede up rows.

    With `experts`, `gate_up` and `down` are of the MLP that all rows share, `NO_MATRIX` where there
    is none. `attended_norm` and `mlp_output_norm` are those of what attention and MLP add, 0 where
    there are none.
    """

    input_norm: int
    qkv: Matrix
    query_norm: int
    key_norm: int
    output: Matrix
    middle_norm: int
    gate_up: Matrix
    down: Matrix
    qkv_bias: int = 0
    """The address of query, key and value biases; 0: there are none."""
    key_divisors: int = 0
    """The address of float32 `[kv_heads, head_dim / 2]` (`weights/key_scales.py`); 0: none."""
    sinks: int = 0
    """The address of the query heads' sinks, float32 `[heads]`; 0: there are none."""
    output_bias: int = 0
    """The address of the bias of `output`, float32 `[hidden]`; 0: there is none."""
    attended_norm: int = 0
    mlp_output_norm: int = 0
    experts: ExpertWeights | None = None

    @property
    def kind(self) -> tuple[tuple[int, Form], ...]:
        """Outputs and form of each product: equal where layers take the same kernels."""
        found = [self.qkv, self.output, self.gate_up, self.down]
        if self.experts is not None:
            found += [self.experts.expert_gate, self.experts.gate_up, self.experts.down]
        return tuple((matrix.num_outputs, matrix.form) for matrix in found)


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights, and `angles` for each kind of rotary positions in the decoder's layers.

    They are the address of cosines, then sines, float32 [positions, head_dim].
    """

    layers: tuple[LayerWeights, ...]
    embedding: int
    final_norm: int
    head: Matrix
    angles: Mapping[RopeSpec, int]
    memories: tuple[Memory, ...]

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a step reads, whichever rows it has: without the experts'."""
        products = sum(
            matrix.num_bytes
            for layer in self.layers
            for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)
        )
        return products + self.head.num_bytes

    def close(self) -> None:
        """Free the memory."""
        for memory in self.memories:
            memory.close()


class _RandomMaker:
    """Makes matrices of normal numbers, each of its own seed, so that products keep their scale."""

    def __init__(
        self, device: Device, make_kernel: Callable[[KernelSpec], BindableKernel], seed: int,
        stream: int, *, has_float_norms: bool,
    ) -> None:  # fmt: skip
        self._device, self._seed, self._stream = device, seed, stream
        self._has_float_norms = has_float_norms
        self.memories: list[Memory] = []
        types = {"out": "*bf16", "seed": "i64", "scale": "fp32", "count": "i64"}
        self._fill = make_kernel(KernelSpec(fill_normal, types, {"SIZE": _COUNTERS}))
        self._fill_floats = make_kernel(
            KernelSpec(fill_normal, types | {"out": "*fp32"}, {"SIZE": _COUNTERS})
        )
        self._fill_halves = make_kernel(
            KernelSpec(fill_normal, types | {"out": "*fp16"}, {"SIZE": _COUNTERS})
        )
        self._fill_bytes = make_kernel(
            KernelSpec(fill_bytes, {"out": "*u32", "seed": "i64", "count": "i64", "mask": "i64"},
                       {"SIZE": _COUNTERS})
        )  # fmt: skip

    def matrix(
        self, num_outputs: int, num_inputs: int, gain: float = 1.0, form: Form = Form.BF16
    ) -> Matrix:
        """Return a matrix whose products with normal inputs have the standard deviation `gain`."""
        deviation = gain / math.sqrt(num_inputs)
        if form is Form.BF16:
            address = self._normal(self._fill, num_outputs * num_inputs, _ELEMENT, deviation)
            return Matrix(address, num_outputs, num_inputs)
        asked = Matrix(0, num_outputs, num_inputs, form)
        # Bytes of e4m3 with the highest bit of the exponent cleared: numbers below 2.
        address = self._bytes(asked.weight_bytes, 0xBFBFBFBF if form is Form.FP8 else 0xFFFFFFFF)
        if form is Form.MXFP4:
            exponent = round(math.log2(deviation / _E2M1_DEVIATION))
            scales = self._take(asked.scale_bytes).address
            self._device.fill(scales, 127 + exponent, asked.scale_bytes, self._stream)
            return Matrix(address, num_outputs, num_inputs, form, scales)
        fill, size = {Form.FP8: (self._fill_floats, 4), Form.INT4: (self._fill, 2)}.get(
            form, (self._fill_halves, 2)
        )
        share = {Form.FP8: 2, Form.Q8_0: 1 / 64}.get(form, 1 / 4)
        scales = self._normal(fill, asked.scale_bytes // size, size, share * deviation)
        return Matrix(address, num_outputs, num_inputs, form, scales)

    def experts(
        self, mixture: ExpertMixture, hidden: int, calm: float, form: Form
    ) -> ExpertWeights:
        """Return experts whose sum is as small as `calm` says; no expert is preferred."""
        count, inner = mixture.num_experts, mixture.inner_size
        bias = 0
        if mixture.has_choice_bias:
            bias = self._take(4 * count).address
            self._device.upload(bias, bytes(4 * count))
        gate_up_biases = down_biases = 0
        if mixture.has_biases:
            gate_up_biases = self.floats(count * 2 * inner)
            down_biases = self.floats(count * hidden)
        return ExpertWeights(
            expert_gate=self.matrix(count, hidden),
            gate_up=self.matrix(count * 2 * inner, hidden, 1.0, form),
            down=self.matrix(count * hidden, inner, calm, form),
            choice_bias=bias,
            gate_bias=self.floats(count) if mixture.has_gate_bias else 0,
            gate_up_biases=gate_up_biases,
            down_biases=down_biases,
        )

    def floats(self, count: int) -> int:
        """Return the address of small float32 numbers: of biases, or of sinks."""
        return self._normal(self._fill_floats, count, 4, _SMALL)

    def norm(self, size: int, weight: float = 1.0) -> int:
        """Return the address of equal weights of a norm; in bfloat16 they are cut off."""
        values: np.ndarray = np.full(size, weight, np.float32)
        if not self._has_float_norms:
            values = (values.view(np.uint32) >> 16).astype(np.uint16)
        memory = self._take(values.nbytes)
        self._device.upload(memory.address, values.tobytes())
        return memory.address

    def _normal(self, fill: BindableKernel, count: int, size: int, deviation: float) -> int:
        memory = self._take(count * size)
        self._seed += 1
        programs = -(-count // (_VALUES_PER_COUNTER * _COUNTERS))
        fill.bind((programs,), memory.address, self._seed, deviation, count)(self._stream)
        return memory.address

    def _bytes(self, count: int, mask: int) -> int:
        memory = self._take(count)
        self._seed += 1
        words = count // 4
        programs = -(-words // (_VALUES_PER_COUNTER * _COUNTERS))
        self._fill_bytes.bind((programs,), memory.address, self._seed, words, mask)(self._stream)
        return memory.address

    def _take(self, num_bytes: int) -> Memory:
        memory = self._device.allocate(num_bytes)
        self.memories.append(memory)
        return memory


def send_angles(device: Device, spec: DecoderSpec, max_len: int) -> dict[RopeSpec, Memory]:
    """Return the angles of up to `max_len` positions on the card: see `DecoderWeights`."""
    memories = {}
    for rope in spec.ropes:
        tables = rotary_tables(replace(spec, rope=rope), max_len)
        angles = np.concatenate(tables, axis=1).astype(np.float32)
        memories[rope] = device.allocate(angles.nbytes)
        device.upload(memories[rope].address, angles.tobytes())
    return memories


def random_weights(
    device: Device,
    make_kernel: Callable[[KernelSpec], BindableKernel],
    spec: DecoderSpec,
    max_len: int,
    seed: int,
    stream: int,
    form: Form = Form.BF16,
) -> DecoderWeights:
    """Make weights of the decoder's shape on the card; a stream's later work finds them.

    Entries have variance 1 / inputs, and outputs that are added to the residual stream are smaller
    by sqrt(2 layers), so activations and logits have the size of a trained model's.
    """
    maker = _RandomMaker(
        device, make_kernel, seed << 32, stream, has_float_norms=spec.has_norm_offsets
    )
    hidden, dim = spec.hidden_size, spec.head_dim
    calm = 1.0 / math.sqrt(2 * spec.num_layers)
    layers = []
    for index in range(spec.num_layers):
        mixture = spec.mixture_of(index)
        inner = spec.intermediate_size if mixture is None else mixture.shared_size
        layers.append(
            LayerWeights(
                input_norm=maker.norm(hidden),
                qkv=maker.matrix(spec.qkv_size, hidden, 1.0, form),
                query_norm=maker.norm(dim),
                key_norm=maker.norm(dim),
                output=maker.matrix(hidden, spec.num_heads * dim, calm, form),
                middle_norm=maker.norm(hidden),
                gate_up=maker.matrix(2 * inner, hidden, 1.0, form) if inner else NO_MATRIX,
                down=maker.matrix(hidden, inner, calm, form) if inner else NO_MATRIX,
                sinks=maker.floats(spec.num_heads) if spec.has_sinks else 0,
                output_bias=maker.floats(hidden) if spec.has_output_bias else 0,
                attended_norm=maker.norm(hidden, calm) if spec.has_output_norms else 0,
                mlp_output_norm=maker.norm(hidden, calm) if spec.has_output_norms else 0,
                experts=None if mixture is None else maker.experts(mixture, hidden, calm, form),
            )
        )
    embedding = maker.matrix(spec.vocab_size, hidden, math.sqrt(hidden) / spec.embedding_scale)
    final_norm = maker.norm(hidden)
    # The head stays in 16 bits, as in most quantised models.
    head = embedding if spec.has_tied_embeddings else maker.matrix(spec.vocab_size, hidden, 4.0)
    angles = send_angles(device, spec, max_len)
    return DecoderWeights(
        layers=tuple(layers), embedding=embedding.address, final_norm=final_norm, head=head,
        angles={rope: memory.address for rope, memory in angles.items()},
        memories=(*maker.memories, *angles.values()),
    )  # fmt: skip
