"""The shape of a KV cache, and the fingerprint that nodes compare before exchanging blocks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

from common.errors import LayoutMismatch

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a number, by the types that a model is computed in."""
STORED_BYTES = DTYPE_BYTES | {"int8": 1}
"""Bytes of a stored number, by the types of a KV cache."""
SCALE_BYTES = 4
"""Bytes of an int8 slot's scale, a little-endian float32."""
MAX_PLANES = 2
MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A block in one layer: `num_planes` pieces `[num_kv_heads, block_size, head_dim]`.

    Two planes are keys and values; a latent, of which both are computed, is one.
    """

    num_planes: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        planes = f"{self.num_planes} plane{'s' * (self.num_planes != 1)}"
        return f"{planes} of {self.num_kv_heads} x {self.head_dim}"


@dataclass(frozen=True, slots=True)
class Layer:
    """A block in one layer, in bytes: `num_planes` pieces of `num_kv_heads` heads each.

    The heads of a piece follow each other, so some adjacent heads are one range of it.
    """

    num_planes: int
    num_kv_heads: int
    head_bytes: int

    @property
    def piece_bytes(self) -> int:
        """Bytes of one block's keys (or values, or latents): the unit of a transfer."""
        return self.num_kv_heads * self.head_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of one block, all planes."""
        return self.num_planes * self.piece_bytes

    def range_of_heads(self, first: int, count: int) -> tuple[int, int]:
        """Return (offset in a piece, bytes) of `count` heads from `first` on.

        Raises `ValueError` for heads that are not there.
        """
        if not 0 <= first < first + count <= self.num_kv_heads:
            raise ValueError(
                f"heads {first} to {first + count - 1}: the layer has {self.num_kv_heads}"
            )
        return first * self.head_bytes, count * self.head_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Blocks of a cache: in memory layer by layer, in each plane by plane, in each all blocks.

    One block in one plane is a *piece*: `[num_kv_heads, block_size, slot_bytes]`. A *slot* is one
    head's key or value of one token: `head_dim` numbers of `dtype`, and with int8 their scale
    after them (on a card behind all slots of its head: `gpu/kernels/slots.py`). So what is stored
    of a token depends on that token alone, and a head of a piece is one range of it.

    `model_digest` names the weights and their dtype: the model, whatever part of it a node holds.
    `arithmetic` says for people what the model is computed in; what of it changes bits is in the
    digest. All other fields are geometry. When two nodes have equal fingerprints, each would
    compute the same block as the other. The number of blocks is left out, because pools can differ
    in size.

    Most caches have two planes of `num_kv_heads` heads of `head_dim` in every layer. In all other
    cases `shapes` has one entry per layer and these two fields are 0: `of_layers` makes such a
    layout. Raises `ValueError` for a type or shapes that cannot be.

    A tensor-parallel node would attach here: a field for the slice, as a range of the model's KV
    heads, beside `num_kv_heads` of this rank. It would become part of the fingerprint, and nodes of
    one model and different slices could still exchange the heads that both have: see
    `Layer.range_of_heads`.
    """

    model_digest: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    shapes: tuple[LayerShape, ...] = ()
    arithmetic: str = ""

    @classmethod
    def of_layers(
        cls,
        shapes: tuple[LayerShape, ...],
        *,
        model_digest: str,
        block_size: int,
        dtype: str,
    ) -> KVLayout:
        """Return the layout of these layers, whatever they are. Raises `ValueError`."""
        is_usual = bool(shapes) and _is_usual(shapes)
        return cls(
            model_digest=model_digest,
            num_layers=len(shapes),
            num_kv_heads=shapes[0].num_kv_heads if is_usual else 0,
            head_dim=shapes[0].head_dim if is_usual else 0,
            block_size=block_size,
            dtype=dtype,
            shapes=() if is_usual else shapes,
        )

    def __post_init__(self) -> None:
        if self.dtype not in STORED_BYTES:
            raise ValueError(f"KV dtype {self.dtype!r}: wanted one of {sorted(STORED_BYTES)}")
        if self.shapes:
            self._check_shapes()

    def _check_shapes(self) -> None:
        if len(self.shapes) != self.num_layers or len(self.shapes) > MAX_LAYERS:
            raise ValueError(
                f"KV shapes of {len(self.shapes)} layers: wanted {self.num_layers}, "
                f"at most {MAX_LAYERS}"
            )
        if self.num_kv_heads or self.head_dim or _is_usual(self.shapes):
            raise ValueError(
                "KV shapes: wanted either num_kv_heads and head_dim, of two equal planes in every "
                "layer, or shapes"
            )
        for layer, shape in enumerate(self.shapes):
            sizes = shape.num_kv_heads, shape.head_dim
            if not 1 <= shape.num_planes <= MAX_PLANES or min(sizes) < 1:
                raise ValueError(
                    f"KV layer {layer} has {shape}: wanted 1 to {MAX_PLANES} planes, and sizes of "
                    "1 or more"
                )

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Each layer's planes and bytes."""
        return _layers(self)

    @property
    def num_planes(self) -> int:
        """Pieces of a block in each layer. Raises `ValueError` when layers differ."""
        return self._each_layer.num_planes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one head's key or value of one token. `ValueError` when layers differ."""
        return self.head_bytes // self.block_size

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in a piece. Raises `ValueError` when layers differ."""
        return self._each_layer.head_bytes

    @property
    def piece_bytes(self) -> int:
        """Bytes of one block's keys (or values) in each layer. `ValueError` when layers differ."""
        return self._each_layer.piece_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one block in each layer, all planes. Raises `ValueError` when layers differ."""
        return self._each_layer.num_bytes

    @property
    def _each_layer(self) -> Layer:
        first, *others = self.layers
        if any(other != first for other in others):
            raise ValueError("the layers of this KV layout differ")
        return first

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and planes."""
        return sum(layer.num_bytes for layer in self.layers)

    def pool_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        """Return `(num_layers, num_planes, num_blocks, piece_bytes)`: a pool as bytes.

        Raises `ValueError` when layers differ.
        """
        return self.num_layers, self.num_planes, num_blocks, self.piece_bytes

    @property
    def description(self) -> str:
        """The parts of the fingerprint in words."""
        heads = f"{self.num_kv_heads} KV heads of {self.head_dim}"
        if self.shapes:
            runs = [(shape, len(list(run))) for shape, run in groupby(self.shapes)]
            heads = " then ".join(f"{count} with {shape}" for shape, count in runs)
        words = (
            f"{self.num_layers} layers, {heads}, "
            f"blocks of {self.block_size}, {self.dtype}, weights {self.model_digest[:8]}"
        )
        return f"{words}, computed in {self.arithmetic}" if self.arithmetic else words

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the fingerprint: strings, integers and lists, no default ones.

        These are the fields of earlier releases, unless the layout is one that they do not have.
        An earlier release ignores `shapes`, but never takes such a layout for its own: it compares
        `head_dim` with 0.
        """
        found: dict[str, Any] = {
            "model_digest": self.model_digest,
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "block_size": self.block_size,
            "dtype": self.dtype,
        }
        if self.shapes:
            found["shapes"] = [
                [shape.num_planes, shape.num_kv_heads, shape.head_dim] for shape in self.shapes
            ]
        return found

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits over every field."""
        return _fingerprint(self)


def check_compatible(ours: KVLayout, theirs: KVLayout) -> None:
    """Raise `LayoutMismatch` naming every field in which the two differ, with both values.

    It says apart whether the models differ or only their geometry.
    """
    mine, other = ours.fields, theirs.fields
    is_other_model = ours.model_digest != theirs.model_digest
    if is_other_model:
        mine, other = (
            {**one.fields, "arithmetic": one.arithmetic or "unknown"} for one in (ours, theirs)
        )
    wrong = [
        f"{key}: here {mine.get(key)!r}, peer {other.get(key)!r:.200}"
        for key in {**mine, **other}
        if mine.get(key) != other.get(key)
    ]
    if wrong:
        what = "models" if is_other_model else "KV layouts"
        raise LayoutMismatch(f"{what} differ: " + "; ".join(wrong))


def _is_usual(shapes: tuple[LayerShape, ...]) -> bool:
    """Return whether every layer has two planes, of the same shape."""
    return shapes[0].num_planes == 2 and all(shape == shapes[0] for shape in shapes)


@lru_cache(maxsize=64)
def _fingerprint(layout: KVLayout) -> str:
    text = "\n".join(f"{key}={value}" for key, value in sorted(layout.fields.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@lru_cache(maxsize=64)
def _layers(layout: KVLayout) -> tuple[Layer, ...]:
    usual = LayerShape(2, layout.num_kv_heads, layout.head_dim)
    value_bytes = STORED_BYTES[layout.dtype]
    scale_bytes = SCALE_BYTES if layout.dtype == "int8" else 0
    return tuple(
        Layer(
            shape.num_planes,
            shape.num_kv_heads,
            layout.block_size * (shape.head_dim * value_bytes + scale_bytes),
        )
        for shape in layout.shapes or (usual,) * layout.num_layers
    )
