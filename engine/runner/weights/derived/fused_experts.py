"""Weights of files that have all experts of a layer in one tensor.

gpt-oss has `mlp.experts.gate_up_proj` and `down_proj`, with `gate_up_proj_bias` `[experts,
2 * inner]` and `down_proj_bias` `[experts, hidden]`; rows of gate and up follow each other in
turns, gate first. What hubs have is in MXFP4: `gate_up_proj_blocks`, uint8 `[experts, 2 * inner,
hidden / 32, 16]`, has two numbers of a row in a byte, the first one in its low half, and
`gate_up_proj_scales`, uint8 `[experts, 2 * inner, hidden / 32]`, the exponents of their scales.
What is not quantised has inputs first: `gate_up_proj` `[experts, hidden, 2 * inner]` and
`down_proj` `[experts, inner, hidden]`.

Of other families, transformers 5 writes `gate_up_proj` `[experts, 2 * inner, hidden]`, all of gate
before up, and `down_proj` `[experts, hidden, inner]`, where it is told not to write the former
names. Those of Qwen3-VL-MoE on hubs have inputs first: `[experts, hidden, 2 * inner]`, all of gate
before up, and `[experts, inner, hidden]`.

Here each expert has tensors of its own. Only the expert that is asked for is read and copied.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import CheckpointError
from engine.runner.weights.derived.derived_weights import DerivedWeights
from engine.runner.weights.spec.decoder_tensors import EXPERT_GATE
from engine.runner.weights.spec.expert_mixture import ExpertMixture
from engine.runner.weights.stored_tensor import GroupedTensor
from engine.runner.weights.tensor_files import StoredTensor, TensorFiles

_EXPERTS = ".mlp.experts."
_RENAMED = {
    ".mlp.router.": f".{EXPERT_GATE}.",
    ".mlp.gate.moe_statics.": ".mlp.moe_statics.",
}
"""Parts of names in such files, and what stands for them where each expert has a tensor."""
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_WHOLE = {part: whole for whole, parts in _PARTS.items() for part in parts}
_NUMBERS, _SCALES = "_blocks", "_scales"
_BYTES = ("U8",)
_GROUP, _GROUP_BYTES = 32, 16
_LOW, _HALF_BYTE = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(4)
_NAN_SCALE = 255
_TYPES = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}


def has_fused_experts(names: Iterable[str]) -> bool:
    """Return whether a file with tensors of these names has all experts of a layer in one."""
    return any(
        name.partition(_EXPERTS)[2].startswith(tuple(_PARTS)) or ".mlp.router." in name
        for name in names
    )


def inputs_come_first(files: TensorFiles, hidden_size: int, inner_size: int) -> bool:
    """Return whether fused experts in floats have `[experts, inputs, outputs]`."""
    wanted = {
        "gate_up_proj": (hidden_size, 2 * inner_size),
        "down_proj": (inner_size, hidden_size),
    }
    for name in files.names():
        part = name.partition(_EXPERTS)[2]
        # A square tensor has either order; then the other one has different sides.
        if part in wanted and wanted[part][0] != wanted[part][1]:
            return files.shape(name)[1:] == wanted[part]
    return False


@dataclass(frozen=True, slots=True)
class _Place:
    """A part of an expert: `whole` is the beginning of the names of the tensors that have it."""

    whole: str
    part: str
    expert: int
    is_bias: bool

    @property
    def num_parts(self) -> int:
        """How many parts of an expert the tensor has."""
        return len(_PARTS[_WHOLE[self.part]])


class FusedExperts(DerivedWeights):
    """The tensors of `files`, with those of each expert out of what its layer has together."""

    def __init__(
        self,
        files: TensorFiles,
        mixture: ExpertMixture,
        *,
        is_gpt_oss: bool,
        has_inputs_first: bool,
        is_in_mxfp4: Callable[[str], bool],
    ) -> None:
        """Find which layers have such tensors; it reads no weight.

        `is_gpt_oss`: they are in the form of gpt-oss. `has_inputs_first`: so are those in floats,
        which have no turns otherwise. `is_in_mxfp4` says of a layer's experts, such
        as `model.layers.0.mlp.experts`, whether config.json has them in MXFP4.
        """
        super().__init__(files)
        self._files, self._num_experts = files, mixture.num_experts
        self._is_gpt_oss, self._is_in_mxfp4 = is_gpt_oss, is_in_mxfp4
        self._has_inputs_first = has_inputs_first
        self._stored: dict[str, str] = {}
        """Names in the files, by those that are not of an expert."""
        self._of_experts: list[str] = []
        for name in files.names():
            if name.partition(_EXPERTS)[2].startswith(tuple(_PARTS)):
                self._of_experts.append(name)
            else:
                self._stored[_renamed(name)] = name

    def names(self) -> Iterable[str]:
        found = list(self._stored)
        for name in self._of_experts:
            layer, _, rest = name.partition(_EXPERTS)
            whole = next(one for one in _PARTS if rest.startswith(one))
            kind = {"": "weight", _NUMBERS: "weight", "_bias": "bias"}.get(rest[len(whole) :])
            if kind is not None:
                found += (
                    f"{layer}{_EXPERTS}{index}.{part}.{kind}"
                    for index in range(self._num_experts)
                    for part in _PARTS[whole]
                )
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._place(name)
        if place is None:
            return self._files.shape(self._in_files(name))
        _, shape = self._form(place)
        return shape[1:] if place.is_bias else shape

    def check(
        self,
        source: Path,
        name: str,
        shape: tuple[int, ...],
        dtypes: Sequence[str] | None = None,
    ) -> None:
        """Raise `CheckpointError` unless the tensors that have this one are there as wanted."""
        place = self._place(name)
        if place is None:
            self._files.check(source, self._in_files(name), shape, dtypes)
            return
        num_rows = shape[0] * place.num_parts
        if place.is_bias:
            bias = f"{place.whole}_bias"
            self._files.check(source, bias, (self._num_experts, num_rows), dtypes)
            return
        self._refuse_two_forms(source, place)
        num_inputs = shape[1]
        if not self._has_mxfp4(place):
            rows = (num_inputs, num_rows) if self._has_inputs_first else (num_rows, num_inputs)
            self._files.check(source, place.whole, (self._num_experts, *rows), dtypes)
            return
        if num_inputs % _GROUP:
            raise CheckpointError(
                f"{source}: tensor {place.whole}{_NUMBERS} is of weights with {num_inputs} inputs: "
                f"wanted a multiple of {_GROUP}, the numbers of a scale of MXFP4"
            )
        scales = (self._num_experts, num_rows, num_inputs // _GROUP)
        self._files.check(source, f"{place.whole}{_NUMBERS}", (*scales, _GROUP_BYTES), _BYTES)
        self._files.check(source, f"{place.whole}{_SCALES}", scales, _BYTES)

    def format_and_shape(self, name: str) -> tuple[str, tuple[int, int]]:
        place = self._place(name)
        if place is None:
            return self._files.format_and_shape(self._in_files(name))
        return self._form(place)

    def grouped(self, name: str) -> GroupedTensor:
        """Return a weight as stored, which is a copy; `CheckpointError` for a scale that is NaN."""
        place = self._place(name)
        if place is None:
            return self._files.grouped(self._in_files(name))
        format_name, shape = self._form(place)
        if format_name == "MXFP4":
            rows = self._mxfp4_rows(place)
        elif place.is_bias:
            rows = self._rows(place, self._entry(place, "_bias").reshape(-1, 1))
        else:
            stored = self._entry(place)
            rows = self._rows(place, stored.T if self._has_inputs_first else stored)
        raw = np.ascontiguousarray(rows).view(np.uint8)
        return GroupedTensor(format_name, shape, raw.reshape(shape[0], -1))

    def identity(self) -> str:
        """Return a digest of the files' identity and of how experts are read from them."""
        form = "gpt-oss" if self._is_gpt_oss else "halves"
        if self._has_inputs_first and not self._is_gpt_oss:
            form = "halves, inputs first"
        found = [name for name in self._of_experts if name.endswith(_NUMBERS)]
        described = f"{self._files.identity()} {form} {json.dumps(found)}"
        return hashlib.sha256(described.encode()).hexdigest()

    def _in_files(self, name: str) -> str:
        return self._stored.get(name, name)

    def _place(self, name: str) -> _Place | None:
        """Return the part of an expert that a name says; None for a tensor of its own."""
        if name in self._stored:
            return None
        layer, found, rest = name.partition(_EXPERTS)
        index, _, of_expert = rest.partition(".")
        part, _, kind = of_expert.partition(".")
        if not found or part not in _WHOLE or not index.isdecimal():
            return None
        return _Place(f"{layer}{_EXPERTS}{_WHOLE[part]}", part, int(index), kind == "bias")

    def _has_mxfp4(self, place: _Place) -> bool:
        is_plain = self._files.location(place.whole) is not None
        return not is_plain and self._is_in_mxfp4(place.whole.rpartition(".")[0])

    def _refuse_two_forms(self, source: Path, place: _Place) -> None:
        """Raise `CheckpointError` for a weight in MXFP4 that is to be plain, or is plain too."""
        numbers = f"{place.whole}{_NUMBERS}"
        if self._files.location(numbers) is None or self._has_mxfp4(place):
            return
        if self._files.location(place.whole) is not None:
            raise CheckpointError(f"{source}: {place.whole} is there beside {numbers}: wanted one")
        raise CheckpointError(
            f"{source}: tensor {numbers} is there, and quantization_config of config.json does not "
            f"have {place.whole} in MXFP4: wanted {place.whole}"
        )

    def _form(self, place: _Place) -> tuple[str, tuple[int, int]]:
        """Return the format and (outputs, inputs); a bias is a single row."""
        suffix = "_bias" if place.is_bias else _NUMBERS if self._has_mxfp4(place) else ""
        stored = self._location(place, suffix)
        if place.is_bias:
            return stored.dtype, (1, stored.shape[1] // place.num_parts)
        if suffix:
            return "MXFP4", (stored.shape[1] // place.num_parts, stored.shape[2] * _GROUP)
        outputs, inputs = stored.shape[:0:-1] if self._has_inputs_first else stored.shape[1:]
        return stored.dtype, (outputs // place.num_parts, inputs)

    def _location(self, place: _Place, suffix: str) -> StoredTensor:
        found = self._files.location(f"{place.whole}{suffix}")
        assert found is not None
        return found

    def _entry(self, place: _Place, suffix: str = "") -> np.ndarray:
        """Return what a tensor has of an expert, as integers of as many bits as its numbers."""
        found = self._location(place, suffix)
        raw = self._files.entry(f"{place.whole}{suffix}", place.expert)
        return raw.view(_TYPES.get(found.dtype, np.uint8)).reshape(found.shape[1:])

    def _rows(self, place: _Place, rows: np.ndarray) -> np.ndarray:
        """Return the rows of a part out of those of all parts of its tensor."""
        if place.num_parts == 1:
            return rows
        at = int(place.part == "up_proj")
        return rows[at::2] if self._is_gpt_oss else np.split(rows, 2)[at]

    def _mxfp4_rows(self, place: _Place) -> np.ndarray:
        """Return an expert's rows in the order of `GROUP_SIZES`: numbers 0 to 15 in low halves."""
        scales = self._rows(place, self._entry(place, _SCALES))
        if (scales == _NAN_SCALE).any():
            path = self._location(place, _SCALES).path
            raise CheckpointError(
                f"{path}: tensor {place.whole}{_SCALES} has a scale that is NaN, {_NAN_SCALE}, in "
                f"expert {place.expert}: wanted none"
            )
        stored = self._rows(place, self._entry(place, _NUMBERS))
        # Eight bytes at a time: of a group, those of the numbers 0 to 15, and of 16 to 31.
        halves = np.ascontiguousarray(stored).view(np.uint64)
        first, second = halves[..., :1], halves[..., 1:]
        groups = np.empty((*scales.shape, 1 + _GROUP_BYTES), np.uint8)
        groups[..., 0] = scales
        even = (first & _LOW) | ((second & _LOW) << _HALF_BYTE)
        odd = ((first >> _HALF_BYTE) & _LOW) | (second & ~_LOW)
        groups[..., 1::2] = even.view(np.uint8)
        groups[..., 2::2] = odd.view(np.uint8)
        return groups.reshape(len(groups), -1)


def _renamed(name: str) -> str:
    for stored, usual in _RENAMED.items():
        name = name.replace(stored, usual)
    return name
