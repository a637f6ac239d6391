"""Models as hubs have them quantised: GPTQ, AWQ, fp8 and compressed-tensors, packed here.

Every packer is written from the definition of its format, one number after the other, and shares
nothing with what reads them. It returns the values too that the format defines.
"""

from __future__ import annotations

import json
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

Scales = list[list[float]]
_BITS_OF = {"F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "I8": 8, "I32": 32, "I64": 64}
_CODES = {"F32": "f", "F16": "e", "I8": "b", "F8_E4M3": "B", "I64": "q"}


@dataclass(frozen=True)
class Tensor:
    """A tensor for a safetensors file: its numbers in order, words unsigned."""

    dtype: str
    shape: tuple[int, ...]
    numbers: Sequence[float]

    def raw(self) -> bytes:
        if self.dtype == "BF16":
            wide = _packed_numbers("f", self.numbers)
            return b"".join(wide[at + 2 : at + 4] for at in range(0, len(wide), 4))
        if self.dtype == "I32":
            return _packed_numbers("I", [int(number) % (1 << 32) for number in self.numbers])
        kind = float if self.dtype in ("F32", "F16") else int
        return _packed_numbers(_CODES[self.dtype], [kind(number) for number in self.numbers])


def _packed_numbers(code: str, numbers: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(numbers)}{code}", *numbers)


def matrix(dtype: str, rows: Sequence[Sequence[float]]) -> Tensor:
    return Tensor(dtype, (len(rows), len(rows[0])), [number for row in rows for number in row])


def floats(dtype: str, values: np.ndarray) -> Tensor:
    return Tensor(dtype, values.shape, [float(value) for value in values.reshape(-1)])


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file by its specification."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.raw()
        assert len(raw) * 8 == math.prod(tensor.shape) * _BITS_OF[tensor.dtype], name
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets,
        }  # fmt: skip
        data += raw
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def nearest(dtype: str, value: float) -> float:
    """Return a number of this type near `value`."""
    if dtype == "BF16":
        return float(struct.unpack("<f", b"\0\0" + struct.pack("<f", value)[2:])[0])
    code = f"<{_CODES[dtype]}"
    return float(struct.unpack(code, struct.pack(code, value))[0])


def word(integers: Sequence[int], bits: int) -> int:
    """Return integers in a word, the first one in the lowest bits."""
    return sum(integer << bits * place for place, integer in enumerate(integers))


class Packer(ABC):
    """One format, as one config.json describes it."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return its `quantization_config`."""

    @abstractmethod
    def pack(self, weight: np.ndarray, seed: int) -> tuple[dict[str, Tensor], np.ndarray]:
        """Return tensors by the end of their name, and the values that they stand for."""


@dataclass(frozen=True)
class Integers:
    """A weight in integers `numbers[output][input]`, from 0; `group[input]` is an input's group."""

    numbers: list[list[int]]
    zeros: list[list[int]]
    scales: Scales
    group: list[int]

    def values(self) -> np.ndarray:
        steps = np.array(self.numbers) - np.array(self.zeros)[:, self.group]
        made: np.ndarray = np.array(self.scales)[:, self.group] * steps
        return made.astype(np.float32)


def in_integers(
    weight: np.ndarray, bits: int, group_size: int, *, is_symmetric: bool, is_ordered: bool,
    scale_dtype: str, seed: int,
) -> Integers:  # fmt: skip
    """Quantise a weight: zeros are anything, scales of a type; groups in an order of their own."""
    _, inputs = weight.shape
    size = inputs if group_size == -1 else group_size
    draw = np.random.RandomState(seed)
    group = [place // size for place in range(inputs)]
    if not is_ordered:
        group = [group[place] for place in draw.permutation(inputs)]
    largest, half = (1 << bits) - 1, 1 << (bits - 1)
    places = [[i for i in range(inputs) if group[i] == index] for index in range(inputs // size)]
    numbers, zeros, scales = [], [], []
    for weights in weight.tolist():
        row = [0] * inputs
        row_zeros, row_scales = [], []
        for members in places:
            largest_weight = max(abs(weights[i]) for i in members)
            scale = nearest(scale_dtype, largest_weight / (half - 1))
            zero = half if is_symmetric else int(draw.randint(0, largest + 1))
            for place in members:
                integer = round(weights[place] / scale) + zero
                row[place] = 0 if integer < 0 else largest if integer > largest else integer
            row_zeros.append(zero)
            row_scales.append(scale)
        numbers.append(row)
        zeros.append(row_zeros)
        scales.append(row_scales)
    return Integers(numbers, zeros, scales, group)


def transposed(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


@dataclass(frozen=True)
class Gptq(Packer):
    bits: int = 4
    group_size: int = 128
    is_symmetric: bool = True
    is_ordered: bool = True
    version: str = "gptq"
    scale_dtype: str = "F16"
    has_groups: bool = True
    """Whether `g_idx` is written."""

    def config(self) -> dict[str, Any]:
        return {
            "quant_method": "gptq", "bits": self.bits, "group_size": self.group_size,
            "sym": self.is_symmetric, "desc_act": not self.is_ordered,
            "checkpoint_format": self.version, "damp_percent": 0.01,
        }  # fmt: skip

    def pack(self, weight: np.ndarray, seed: int) -> tuple[dict[str, Tensor], np.ndarray]:
        made = in_integers(
            weight, self.bits, self.group_size, is_symmetric=self.is_symmetric,
            is_ordered=self.is_ordered, scale_dtype=self.scale_dtype, seed=seed,
        )  # fmt: skip
        count = 32 // self.bits
        columns = transposed(made.numbers)
        weights = [
            [
                word([columns[first + place][output] for place in range(count)], self.bits)
                for output in range(len(made.numbers))
            ]
            for first in range(0, len(columns), count)
        ]
        ones = word([1] * count, self.bits) if self.version == "gptq" else 0
        zeros = [
            [
                (word(row[first : first + count], self.bits) - ones) % (1 << 32)
                for first in range(0, len(row), count)
            ]
            for row in transposed(made.zeros)
        ]
        tensors = {
            "qweight": matrix("I32", weights),
            "qzeros": matrix("I32", zeros),
            "scales": matrix(self.scale_dtype, transposed(made.scales)),
        }
        if self.has_groups:
            tensors["g_idx"] = Tensor("I32", (len(made.group),), made.group)
        return tensors, made.values()


@dataclass(frozen=True)
class Awq(Packer):
    group_size: int = 128
    scale_dtype: str = "F16"

    def config(self) -> dict[str, Any]:
        return {
            "quant_method": "awq", "bits": 4, "group_size": self.group_size, "version": "gemm",
            "zero_point": True, "modules_to_not_convert": None,
        }  # fmt: skip

    def pack(self, weight: np.ndarray, seed: int) -> tuple[dict[str, Tensor], np.ndarray]:
        made = in_integers(
            weight, 4, self.group_size, is_symmetric=False, is_ordered=True,
            scale_dtype=self.scale_dtype, seed=seed,
        )  # fmt: skip
        order = (0, 2, 4, 6, 1, 3, 5, 7)

        def words(row: Sequence[int]) -> list[int]:
            eights = [row[first : first + 8] for first in range(0, len(row), 8)]
            return [word([eight[output] for output in order], 4) for eight in eights]

        tensors = {
            "qweight": matrix("I32", [words(row) for row in transposed(made.numbers)]),
            "qzeros": matrix("I32", [words(row) for row in transposed(made.zeros)]),
            "scales": matrix(self.scale_dtype, transposed(made.scales)),
        }
        return tensors, made.values()


def grouped(targets: Sequence[str], weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return a `quantization_config` of compressed-tensors with one group."""
    group = {"targets": list(targets), "weights": dict(weights), "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed", **more,
    }  # fmt: skip


@dataclass(frozen=True)
class PackQuantized(Packer):
    bits: int = 4
    group_size: int = 128
    is_symmetric: bool = True
    is_ordered: bool = True
    scale_dtype: str = "BF16"
    are_zeros_packed: bool = True

    def config(self) -> dict[str, Any]:
        strategy = "channel" if self.group_size == -1 else "group"
        weights = {
            "num_bits": self.bits, "type": "int", "symmetric": self.is_symmetric,
            "strategy": strategy, "actorder": None if self.is_ordered else "group",
            "group_size": None if self.group_size == -1 else self.group_size,
        }  # fmt: skip
        return grouped(["Linear"], weights, format="pack-quantized")

    def pack(self, weight: np.ndarray, seed: int) -> tuple[dict[str, Tensor], np.ndarray]:
        made = in_integers(
            weight, self.bits, self.group_size, is_symmetric=self.is_symmetric,
            is_ordered=self.is_ordered, scale_dtype=self.scale_dtype, seed=seed,
        )  # fmt: skip
        count = 32 // self.bits

        def words(row: Sequence[int]) -> list[int]:
            return [word(row[at : at + count], self.bits) for at in range(0, len(row), count)]

        tensors = {
            "weight_packed": matrix("I32", [words(row) for row in made.numbers]),
            "weight_shape": Tensor("I64", (2,), weight.shape),
            "weight_scale": matrix(self.scale_dtype, made.scales),
        }
        if not self.is_symmetric and self.are_zeros_packed:
            columns = [words(column) for column in transposed(made.zeros)]
            tensors["weight_zero_point"] = matrix("I32", transposed(columns))
        elif not self.is_symmetric:
            half = 1 << (self.bits - 1)
            signed = [[zero - half for zero in row] for row in made.zeros]
            tensors["weight_zero_point"] = matrix("I8", signed)
        if not self.is_ordered:
            tensors["weight_g_idx"] = Tensor("I32", (len(made.group),), made.group)
        return tensors, made.values()


@dataclass(frozen=True)
class IntQuantized(Packer):
    scale_dtype: str = "BF16"
    is_symmetric: bool = True

    def config(self) -> dict[str, Any]:
        weights = {
            "num_bits": 8, "type": "int", "symmetric": self.is_symmetric, "strategy": "channel",
        }  # fmt: skip
        return grouped(["Linear"], weights, format="int-quantized")

    def pack(self, weight: np.ndarray, seed: int) -> tuple[dict[str, Tensor], np.ndarray]:
        made = in_integers(
            weight, 8, -1, is_symmetric=self.is_symmetric, is_ordered=True,
            scale_dtype=self.scale_dtype, seed=seed,
        )  # fmt: skip
        numbers = [[number - 128 for number in row] for row in made.numbers]
        tensors = {
            "weight": matrix("I8", numbers),
            "weight_scale": matrix(self.scale_dtype, made.scales),
        }
        if not self.is_symmetric:
            zeros = [[zero - 128 for zero in row] for row in made.zeros]
            tensors["weight_zero_point"] = matrix("I8", zeros)
        return tensors, made.values()


def e4m3(byte: int) -> float:
    """Return the value of a byte, by the definition of fp8 e4m3 without infinities."""
    exponent, mantissa = (byte & 0x78) // 8, byte & 7
    if exponent == 0:
        size = 2.0**-6 * mantissa / 8
    else:
        size = 2.0 ** (exponent - 7) * (1 + mantissa / 8)
    return -size if byte & 128 else size


_E4M3 = [e4m3(byte) for byte in range(256)]
_FINITE = [byte for byte in range(256) if byte & 127 != 127]


@dataclass(frozen=True)
class Fp8(Packer):
    """`height` by `width` weights share a scale; 0: all of them do.

    `shape_of_scales` changes how scales of one column, or a single one, are stored.
    """

    height: int = 128
    width: int = 128
    scale_dtype: str = "F32"
    described: Callable[[], dict[str, Any]] | None = None
    scale_name: str = "weight_scale_inv"
    shape_of_scales: Callable[[int], tuple[int, ...]] | None = None

    def config(self) -> dict[str, Any]:
        if self.described is not None:
            return self.described()
        tile = [self.height, self.width] if self.height and self.width else None
        return {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
            "weight_block_size": tile, "modules_to_not_convert": ["lm_head"],
        }  # fmt: skip

    def pack(self, weight: np.ndarray, seed: int) -> tuple[dict[str, Tensor], np.ndarray]:
        outputs, inputs = weight.shape
        height, width = self.height or outputs, self.width or inputs
        draw = np.random.RandomState(seed)
        scales = [
            [
                nearest(self.scale_dtype, float(draw.uniform(0.5, 1.5)) * 0.001)
                for _ in range(0, inputs, width)
            ]
            for _ in range(0, outputs, height)
        ]
        values, numbers = [], []
        for output in range(outputs):
            # Any bytes: also the smallest numbers, which have no leading bit.
            row = draw.choice(_FINITE, inputs).tolist()
            of_row = scales[output // height]
            values.append([_E4M3[byte] * of_row[place // width] for place, byte in enumerate(row)])
            numbers.append(row)
        made = np.array(values, np.float32)
        stored = matrix(self.scale_dtype, scales)
        if self.shape_of_scales is not None:
            shape = self.shape_of_scales(len(scales))
            stored = Tensor(self.scale_dtype, shape, stored.numbers)
        return {"weight": matrix("F8_E4M3", numbers), self.scale_name: stored}, made


def float_quantized(strategy: str, **more: Any) -> Callable[[], dict[str, Any]]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}
    return lambda: grouped(["Linear"], weights, format="float-quantized")


PACKERS: dict[str, Packer] = {
    "gptq": Gptq(),
    "gptq, groups of 32, any zeros": Gptq(group_size=32, is_symmetric=False),
    "gptq_v2, groups of 64, any zeros": Gptq(
        group_size=64, is_symmetric=False, version="gptq_v2"
    ),
    "gptq, one group, without g_idx": Gptq(group_size=-1, has_groups=False),
    "gptq, desc_act": Gptq(group_size=32, is_ordered=False),
    "gptq_v2, desc_act, any zeros": Gptq(
        group_size=64, is_ordered=False, is_symmetric=False, version="gptq_v2"
    ),
    "gptq, scales in BF16": Gptq(group_size=64, scale_dtype="BF16"),
    "gptq, scales in F32": Gptq(group_size=64, scale_dtype="F32"),
    "gptq, 8 bits": Gptq(8, 128),
    "gptq, 8 bits, one group": Gptq(8, -1, version="gptq_v2"),
    "gptq, 8 bits, any zeros": Gptq(8, 32, is_symmetric=False),
    "gptq, 8 bits, desc_act": Gptq(8, 32, is_ordered=False),
    "awq": Awq(),
    "awq, groups of 32": Awq(32),
    "awq, one group, BF16": Awq(-1, "BF16"),
    "fp8": Fp8(),
    "fp8, scales in BF16": Fp8(scale_dtype="BF16"),
    "fp8, tiles that do not fit": Fp8(48, 80),
    "fp8, one scale": Fp8(0, 0, scale_name="weight_scale", shape_of_scales=lambda _: ()),
    "fp8, scales of outputs": Fp8(1, 0, scale_name="weight_scale"),
    "pack-quantized": PackQuantized(),
    "pack-quantized, F16": PackQuantized(group_size=32, scale_dtype="F16"),
    "pack-quantized, channels": PackQuantized(group_size=-1),
    "pack-quantized, any zeros": PackQuantized(group_size=32, is_symmetric=False),
    "pack-quantized, zeros in bytes": PackQuantized(is_symmetric=False, are_zeros_packed=False),
    "pack-quantized, g_idx": PackQuantized(group_size=32, is_ordered=False),
    "pack-quantized, 8 bits": PackQuantized(8),
    "float-quantized, one scale": Fp8(
        0, 0, "BF16", float_quantized("tensor"), "weight_scale", lambda _: (1,)
    ),
    "float-quantized, channels": Fp8(
        1, 0, "BF16", float_quantized("channel"), "weight_scale"
    ),
    "float-quantized, tiles": Fp8(
        128, 128, "BF16", float_quantized("block", block_structure=[128, 128]), "weight_scale"
    ),
    "int-quantized": IntQuantized(),
    "int-quantized, any zeros": IntQuantized(is_symmetric=False),
}  # fmt: skip


def is_quantised(name: str, weight: np.ndarray) -> bool:
    """Whether tools quantise this tensor: linear layers, without embedding and head."""
    return weight.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name


@cache
def _packed(
    packer: Packer, weight: bytes, shape: tuple[int, ...], seed: int
) -> tuple[dict[str, Tensor], np.ndarray]:
    """Return what `packer.pack` does. It computes number by number, a third of a second a model."""
    return packer.pack(np.frombuffer(weight, np.float32).reshape(shape), seed)


def packed_model(
    weights: Mapping[str, np.ndarray], packer: Packer
) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
    """Return a model's tensors, its linear layers packed, and the values of all weights."""
    tensors, values = {}, {}
    for seed, (name, weight) in enumerate(weights.items()):
        if not is_quantised(name, weight):
            tensors[name], values[name] = floats("F32", weight), weight
            continue
        assert weight.dtype == np.float32
        parts, made = _packed(packer, weight.tobytes(), weight.shape, seed)
        values[name] = made.copy()
        layer = name.removesuffix(".weight")
        tensors |= {f"{layer}.{suffix}": tensor for suffix, tensor in parts.items()}
    return tensors, values


def pack_folder(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, np.ndarray], packer: Packer
) -> dict[str, np.ndarray]:
    """Write config.json and the weights of a folder; return the values of all weights."""
    tensors, values = packed_model(weights, packer)
    described = {**config, "quantization_config": packer.config()}
    (folder / "config.json").write_text(json.dumps(described))
    write_tensors(folder / "model.safetensors", tensors)
    return values
