"""The shape of a KV cache, and the fingerprint that nodes compare before exchanging blocks."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass

from common.errors import LayoutMismatch

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a number, by the types that a model is computed in."""
STORED_BYTES = DTYPE_BYTES | {"int8": 1}
"""Bytes of a stored number, by the types of a KV cache."""
SCALE_BYTES = 4
"""Bytes of an int8 slot's scale, a little-endian float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """One allocation `[num_layers, num_planes, num_blocks, num_kv_heads, block_size, slot_bytes]`.

    A *slot* is one head's key or value of one token: `head_dim` numbers of `dtype`, and with int8
    their scale behind them. So what is stored of a token depends on that token alone.

    `model_digest` names the weights and their dtype: the model, whatever part of it a node holds.
    All other fields are geometry. When two nodes have equal fingerprints, each would compute the
    same block as the other. `num_blocks` is left out, because pools can differ in size. Raises
    `ValueError` for an unknown `dtype`.

    A tensor-parallel node would attach here: a field for the slice, as a range of the model's KV
    heads, beside `num_kv_heads` of this rank. It would become part of the fingerprint, and nodes of
    one model and different slices could still exchange the heads that both have, each of which is
    one range of a piece.
    """

    model_digest: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in STORED_BYTES:
            raise ValueError(f"KV dtype {self.dtype!r}: wanted one of {sorted(STORED_BYTES)}")

    @property
    def num_planes(self) -> int:
        """Pieces of a block in one layer: keys and values. A latent cache would have one."""
        return 2

    @property
    def slot_bytes(self) -> int:
        """Bytes of one head's key or value of one token."""
        scale_bytes = SCALE_BYTES if self.dtype == "int8" else 0
        return self.head_dim * STORED_BYTES[self.dtype] + scale_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in a piece. Heads follow each other; scales lie inside."""
        return self.block_size * self.slot_bytes

    @property
    def piece_bytes(self) -> int:
        """Bytes of one block's keys (or values) in one layer: the unit of a transfer."""
        return self.num_kv_heads * self.head_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one block in one layer, keys and values."""
        return self.num_planes * self.piece_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        return self.num_layers * self.layer_bytes

    def pool_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        """Return `(num_layers, num_planes, num_blocks, piece_bytes)`: a pool as bytes."""
        return self.num_layers, self.num_planes, num_blocks, self.piece_bytes

    @property
    def description(self) -> str:
        """The parts of the fingerprint in words."""
        return (
            f"{self.num_layers} layers, {self.num_kv_heads} KV heads of {self.head_dim}, "
            f"blocks of {self.block_size}, {self.dtype}, weights {self.model_digest[:8]}"
        )

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits over every field."""
        text = "\n".join(f"{key}={value}" for key, value in sorted(asdict(self).items()))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def check_compatible(ours: KVLayout, theirs: KVLayout) -> None:
    """Raise `LayoutMismatch` naming every field in which the two differ, with both values.

    It says apart whether the models differ or only their geometry.
    """
    mine, other = asdict(ours), asdict(theirs)
    wrong = [f"{k}: here {mine[k]!r}, peer {other[k]!r}" for k in mine if mine[k] != other[k]]
    if wrong:
        what = "KV layouts" if ours.model_digest == theirs.model_digest else "models"
        raise LayoutMismatch(f"{what} differ: " + "; ".join(wrong))
