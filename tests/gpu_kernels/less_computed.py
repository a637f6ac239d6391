"""What the interpreter computes for nothing: half of its time.

Each operation makes the type of its result and of both operands, with names and tuples that nobody
reads: here all tensors of one shape and element share what they do not change. Each sum and product
of integers is computed once more in 64 bits for an assertion, which the interpreter never makes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_plain_block_init = tl.core.block_type.__init__
_plain_numpy_type = interpreter._get_np_dtype
_make_tuple_type = tl.core._type_for_tuple_values

_blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
"""Attributes of block types, by the element's name and the shape."""
_numpy_types: dict[str, np.dtype[Any]] = {}
_NO_SHAPE = tl.core.tuple([])
_ONE = tl.core.constexpr(1)


def _init_block(self: Any, element_ty: Any, shape: Any) -> None:
    key = element_ty.name, tuple(int(tl.core._unwrap_if_constexpr(size)) for size in shape)
    if key not in _blocks:
        _plain_block_init(self, element_ty, shape)
        sizes = key[1]
        self.tensor_shape = tl.core.tuple([tl.core.constexpr(size) for size in sizes])
        self.tensor_numel = tl.core.constexpr(math.prod(sizes))
        _blocks[key] = dict(self.__dict__)
    self.__dict__.update(_blocks[key])


def _init_tensor(self: Any, handle: Any, kind: Any) -> None:
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    if kind.is_block():
        self.shape, self.numel = kind.tensor_shape, kind.tensor_numel
    else:
        self.shape, self.numel = _NO_SHAPE, _ONE


def _init_tuple(self: Any, args: Any, kind: Any = None) -> None:
    self.values = list(args)
    if kind is not None:
        is_whole = isinstance(kind, tl.core.tuple_type)
        self._type = kind if is_whole else tl.core.tuple_type(kind)


def _tuple_type(self: Any) -> Any:
    """Return a tuple's type, which is made when it is asked for: those of shapes are not."""
    found = self.__dict__.get("_type")
    return _make_tuple_type(self.values) if found is None else found


def _numpy_type(kind: Any) -> np.dtype[Any]:
    name = kind.element_ty.name if kind.is_block() else kind.name
    if name not in _numpy_types:
        _numpy_types[name] = _plain_numpy_type(kind)
    return _numpy_types[name]


def compute_less() -> None:
    """Let the interpreter leave that out from now on."""
    tl.core.block_type.__init__ = _init_block
    tl.core.tensor.__init__ = _init_tensor
    tl.core.tuple.__init__ = _init_tuple
    tl.core.tuple.type = property(
        _tuple_type, lambda self, found: self.__dict__.__setitem__("_type", found)
    )
    interpreter._get_np_dtype = _numpy_type
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "the assertion is made"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
