"""Weights in integers of 4 or 8 bits: GPTQ, AWQ, and two forms of compressed-tensors.

Words are 32 bits, with several integers each, the first one in the lowest bits unless it is said.
The layouts are those that the tools write which gave the formats their names (AutoGPTQ and
GPTQModel, AutoAWQ, compressed-tensors).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from engine.runner.weights.schemes.integer_formats import Scaling, exact_format, rows_in_format
from engine.runner.weights.schemes.scheme import FLOATS, PartOfWeight, Scheme, Tensors

_WORD_BITS = 32
_WORDS = ("I32",)
_AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7], np.uint32)
"""The place of each of eight outputs in an AWQ word, where 0, 2, 4, 6, 1, 3, 5, 7 follow."""

Numbers = Callable[[int, int], np.ndarray]
"""Stored numbers of the outputs from one up to another, int16 `[outputs, inputs]`."""


class IntegerScheme(Scheme):
    """Values are (number - zero) * scale, with a scale and a zero for each output and group."""

    bits: int
    group_size: int
    """Inputs of a group; -1: all of them."""

    @abstractmethod
    def scaling(self, tensors: Tensors) -> Scaling:
        """Read all but the weight's numbers."""

    @abstractmethod
    def numbers(self, tensors: Tensors) -> Numbers:
        """Read the weight's numbers."""

    def format(self, tensors: Tensors) -> str:
        return exact_format(self.scaling(tensors), self.shape(tensors)[1])

    def rows(self, tensors: Tensors, format_name: str) -> np.ndarray:
        numbers, shape = self.numbers(tensors), self.shape(tensors)
        return rows_in_format(format_name, self.scaling(tensors), numbers, shape)

    @property
    def in_a_word(self) -> int:
        """Integers of a word."""
        return _WORD_BITS // self.bits

    def groups(self, tensors: Tensors, num_inputs: int) -> int:
        """Return how many groups a row has; raise `CheckpointError` if they are not equal."""
        size = num_inputs if self.group_size == -1 else self.group_size
        if num_inputs % size:
            raise tensors.refuse(
                self.stored,
                f"group_size is {size}: wanted a divisor of the weight's {num_inputs} inputs",
            )
        return num_inputs // size

    def words(self, tensors: Tensors, count: int, of_what: str) -> int:
        """Return the words of `count` integers; raise `CheckpointError` for a part of a word."""
        if count % self.in_a_word:
            raise tensors.refuse(
                self.stored,
                f"the weight has {count} {of_what}: wanted a multiple of {self.in_a_word}, "
                f"the integers of {self.bits} bits in a word",
            )
        return count // self.in_a_word

    def check_groups(self, tensors: Tensors, suffix: str, count: int) -> None:
        """Raise `CheckpointError` if an input is in none of `count` groups."""
        if not tensors.has(suffix):
            return
        found = tensors.read(suffix)
        if found.min() < 0 or found.max() >= count:
            raise tensors.refuse(
                suffix, f"has groups {found.min()} to {found.max()}: wanted 0 to {count - 1}"
            )


def _unpacked(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Return the integers of int32 words `[…, …]`, uint8, as many times as long along `axis`."""
    shifts = np.arange(0, _WORD_BITS, bits, dtype=np.uint32)
    shape = list(words.shape)
    shape[axis] *= len(shifts)
    along = shifts[:, None] if axis == 0 else shifts
    parts = np.expand_dims(words.view(np.uint32), axis + 1) >> along
    return (parts & np.uint32((1 << bits) - 1)).astype(np.uint8).reshape(shape)


def _grouping(found: np.ndarray, groups: int) -> np.ndarray | None:
    """Return the groups of inputs, or None if these are equal ranges."""
    ranges = np.arange(len(found)) // (len(found) // groups)
    return None if np.array_equal(found, ranges) else found.astype(np.int64)


@dataclass(frozen=True)
class Gptq(IntegerScheme):
    """GPTQ: `qweight` `[inputs / n, outputs]` has n integers of neighbouring inputs in a word.

    `qzeros` `[groups, outputs / n]` has the zeros of n neighbouring outputs, `scales` is
    `[groups, outputs]`, and `g_idx` `[inputs]` names the group of each input: with desc_act they
    are in no order. In the first version of the format the zeros are less one. GPTQModel takes the
    ones off (and adds them) in whole words, so the borrow of a zero that is 0 goes through its
    neighbours; without such zeros it is the same as to add one to each.
    """

    bits: int
    group_size: int
    is_less_one: bool
    has_order: bool
    """Whether groups may be in no order (desc_act)."""

    stored: ClassVar[str] = "qweight"
    stored_dtypes: ClassVar[tuple[str, ...]] = _WORDS
    suffixes: ClassVar[frozenset[str]] = frozenset({"qzeros", "scales", "g_idx"})

    def shape(self, tensors: Tensors) -> tuple[int, int]:
        _, (num_words, num_outputs) = tensors.form(self.stored)
        return num_outputs, num_words * self.in_a_word

    def parts(self, tensors: Tensors, shape: tuple[int, int]) -> Sequence[PartOfWeight]:
        num_outputs, num_inputs = shape
        groups = self.groups(tensors, num_inputs)
        rows = self.words(tensors, num_inputs, "inputs")
        columns = self.words(tensors, num_outputs, "outputs")
        return (
            PartOfWeight(self.stored, ((_WORDS, (rows, num_outputs)),)),
            PartOfWeight("scales", ((FLOATS, (groups, num_outputs)),)),
            PartOfWeight("qzeros", ((_WORDS, (groups, columns)),)),
            PartOfWeight("g_idx", ((_WORDS, (num_inputs,)),), is_optional=not self.has_order),
        )

    def check_values(self, tensors: Tensors, shape: tuple[int, int]) -> None:
        groups = self.groups(tensors, shape[1])
        self.check_groups(tensors, "g_idx", groups)
        if not self.has_order and self._group_of(tensors, groups) is not None:
            raise tensors.refuse(
                "g_idx", "groups are in no order: wanted equal ranges, as desc_act is false"
            )

    def scaling(self, tensors: Tensors) -> Scaling:
        zeros = tensors.read("qzeros")
        if self.is_less_one:
            one = sum(1 << place for place in range(0, _WORD_BITS, self.bits))
            zeros = (zeros.view(np.uint32) + np.uint32(one)).view(np.int32)
        scales = np.ascontiguousarray(tensors.read("scales").T)
        return Scaling(
            scales=scales,
            zeros=_unpacked(zeros, self.bits, 1).T.astype(np.int16),
            lowest=0,
            highest=(1 << self.bits) - 1,
            group_of=self._group_of(tensors, scales.shape[1]),
        )

    def numbers(self, tensors: Tensors) -> Numbers:
        words = tensors.read(self.stored)

        def unpacked(first: int, last: int) -> np.ndarray:
            numbers = _unpacked(np.ascontiguousarray(words[:, first:last]), self.bits, 0)
            return numbers.T.astype(np.int16)

        return unpacked

    def _group_of(self, tensors: Tensors, groups: int) -> np.ndarray | None:
        return _grouping(tensors.read("g_idx"), groups) if tensors.has("g_idx") else None


@dataclass(frozen=True)
class Awq(IntegerScheme):
    """AWQ, version gemm: `qweight` `[inputs, outputs / 8]` has eight outputs in a word.

    From the lowest bits up they are the outputs 0, 2, 4, 6, 1, 3, 5 and 7 of the eight. `qzeros`
    `[groups, outputs / 8]` has the same order; `scales` is `[groups, outputs]`.
    """

    bits: int
    group_size: int

    stored: ClassVar[str] = "qweight"
    stored_dtypes: ClassVar[tuple[str, ...]] = _WORDS
    suffixes: ClassVar[frozenset[str]] = frozenset({"qzeros", "scales"})

    def shape(self, tensors: Tensors) -> tuple[int, int]:
        _, (num_inputs, num_words) = tensors.form(self.stored)
        return num_words * self.in_a_word, num_inputs

    def parts(self, tensors: Tensors, shape: tuple[int, int]) -> Sequence[PartOfWeight]:
        num_outputs, num_inputs = shape
        groups = self.groups(tensors, num_inputs)
        columns = self.words(tensors, num_outputs, "outputs")
        return (
            PartOfWeight(self.stored, ((_WORDS, (num_inputs, columns)),)),
            PartOfWeight("scales", ((FLOATS, (groups, num_outputs)),)),
            PartOfWeight("qzeros", ((_WORDS, (groups, columns)),)),
        )

    def scaling(self, tensors: Tensors) -> Scaling:
        zeros = self._in_order(tensors.read("qzeros"))
        scales = np.ascontiguousarray(tensors.read("scales").T)
        return Scaling(scales, zeros.T.astype(np.int16), 0, (1 << self.bits) - 1)

    def numbers(self, tensors: Tensors) -> Numbers:
        words, count = tensors.read(self.stored), self.in_a_word

        def unpacked(first: int, last: int) -> np.ndarray:
            return self._in_order(words[:, first // count : last // count]).T.astype(np.int16)

        return unpacked

    def _in_order(self, words: np.ndarray) -> np.ndarray:
        numbers = _unpacked(np.ascontiguousarray(words), self.bits, 1)
        eights = numbers.reshape(len(words), -1, self.in_a_word)[:, :, _AWQ_PLACES]
        return eights.reshape(len(words), -1)


@dataclass(frozen=True)
class PackedIntegers(IntegerScheme):
    """compressed-tensors, `pack-quantized`: `weight_packed` `[outputs, words]` has rows in words.

    A row's last word may be filled up. The signed integers are stored raised by half their range,
    so a zero of 0 is that half. `weight_scale` is `[outputs, groups]`; `weight_zero_point`, if
    integers are not symmetric, has the zeros of neighbouring outputs in words, raised likewise
    (`[words, groups]`), or, of older files, in signed bytes `[outputs, groups]`. `weight_g_idx`
    names the group of each input, unless it has a -1: then groups are equal ranges.
    """

    bits: int
    group_size: int
    is_symmetric: bool

    stored: ClassVar[str] = "weight_packed"
    stored_dtypes: ClassVar[tuple[str, ...]] = _WORDS
    suffixes: ClassVar[frozenset[str]] = frozenset(
        {"weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx"}
    )

    def shape(self, tensors: Tensors) -> tuple[int, int]:
        num_outputs, num_inputs = (int(size) for size in tensors.read("weight_shape"))
        return num_outputs, num_inputs

    def parts(self, tensors: Tensors, shape: tuple[int, int]) -> Sequence[PartOfWeight]:
        num_outputs, num_inputs = shape
        groups = self.groups(tensors, num_inputs)
        columns, zero_rows = (-(-count // self.in_a_word) for count in (num_inputs, num_outputs))
        found = [
            PartOfWeight(self.stored, ((_WORDS, (num_outputs, columns)),)),
            PartOfWeight("weight_shape", ((("I64", "I32"), (2,)),)),
            PartOfWeight("weight_scale", ((FLOATS, (num_outputs, groups)),)),
            PartOfWeight("weight_g_idx", ((_WORDS, (num_inputs,)),), is_optional=True),
        ]
        if not self.is_symmetric:
            forms = ((_WORDS, (zero_rows, groups)), (("I8",), (num_outputs, groups)))
            found.append(PartOfWeight("weight_zero_point", forms))
        return found

    def check_values(self, tensors: Tensors, shape: tuple[int, int]) -> None:
        found = tuple(int(size) for size in tensors.read("weight_shape"))
        if found != shape:
            raise tensors.refuse(
                "weight_shape", f"is {list(found)}: config.json wants {list(shape)}"
            )
        groups = self.groups(tensors, shape[1])
        if tensors.has("weight_g_idx") and (tensors.read("weight_g_idx") != -1).all():
            self.check_groups(tensors, "weight_g_idx", groups)

    def scaling(self, tensors: Tensors) -> Scaling:
        half = 1 << (self.bits - 1)
        scales = tensors.read("weight_scale")
        zeros = np.full(scales.shape, half, np.int16)
        if not self.is_symmetric:
            stored = tensors.read("weight_zero_point")
            if stored.dtype == np.int8:
                zeros = stored.astype(np.int16) + np.int16(half)
            else:
                zeros = _unpacked(stored, self.bits, 0)[: len(scales)].astype(np.int16)
        group_of = None
        if tensors.has("weight_g_idx"):
            found = tensors.read("weight_g_idx")
            group_of = None if (found == -1).any() else _grouping(found, scales.shape[1])
        return Scaling(scales, zeros, 0, 2 * half - 1, group_of)

    def numbers(self, tensors: Tensors) -> Numbers:
        words, num_inputs = tensors.read(self.stored), self.shape(tensors)[1]

        def unpacked(first: int, last: int) -> np.ndarray:
            filled_up = _unpacked(words[first:last], self.bits, 1)
            return filled_up[:, :num_inputs].astype(np.int16)

        return unpacked


@dataclass(frozen=True)
class PlainIntegers(IntegerScheme):
    """compressed-tensors, `int-quantized`: `weight` `[outputs, inputs]` in signed bytes.

    `weight_scale` is `[outputs, groups]`, or one number for all; `weight_zero_point`, if integers
    are not symmetric, has the same shape, in signed bytes.
    """

    bits: int
    group_size: int
    is_symmetric: bool
    has_one_scale: bool

    stored: ClassVar[str] = "weight"
    stored_dtypes: ClassVar[tuple[str, ...]] = ("I8",)
    suffixes: ClassVar[frozenset[str]] = frozenset({"weight_scale", "weight_zero_point"})

    def shape(self, tensors: Tensors) -> tuple[int, int]:
        _, (num_outputs, num_inputs) = tensors.form(self.stored)
        return num_outputs, num_inputs

    def parts(self, tensors: Tensors, shape: tuple[int, int]) -> Sequence[PartOfWeight]:
        groups = self.groups(tensors, shape[1])
        shapes = ((1,), ()) if self.has_one_scale else ((shape[0], groups),)
        found = [
            PartOfWeight(self.stored, ((self.stored_dtypes, shape),)),
            PartOfWeight("weight_scale", tuple((FLOATS, one) for one in shapes)),
        ]
        if not self.is_symmetric:
            found.append(PartOfWeight("weight_zero_point", tuple((("I8",), one) for one in shapes)))
        return found

    def scaling(self, tensors: Tensors) -> Scaling:
        num_outputs, num_inputs = self.shape(tensors)
        shape = (num_outputs, self.groups(tensors, num_inputs))
        scales = np.ascontiguousarray(np.broadcast_to(tensors.read("weight_scale"), shape))
        zeros = np.zeros(shape, np.int16)
        if not self.is_symmetric:
            zeros += tensors.read("weight_zero_point")
        return Scaling(scales, zeros, -128, 127)

    def numbers(self, tensors: Tensors) -> Numbers:
        stored = tensors.read(self.stored)
        return lambda first, last: stored[first:last].astype(np.int16)
