"""A KV layout as a field of HELLO.

Earlier releases know neither a cache of int8 nor its name: they would not answer at all. So such a
layout travels with a model and a dtype that they know and that are not theirs, which they refuse by
name, and with what it really is in `stored`, which they ignore. They also ignore `arithmetic`.
"""

from __future__ import annotations

from typing import Any

from common.errors import PeerProtocolError
from common.kv.kv_layout import DTYPE_BYTES, MAX_LAYERS, KVLayout, LayerShape
from kv_transfer.shared.limits import MAX_NODE_ID_CHARS
from kv_transfer.wire.field_checks import Check, missing_means, text, uint, uints

KNOWN_DTYPE = "float16"
SHOWN_CHARS = 64


def layout_to_wire(layout: KVLayout) -> dict[str, Any]:
    """Return the fields of a layout as strings, integers, lists and maps."""
    fields = layout.fields
    if layout.arithmetic:
        fields["arithmetic"] = layout.arithmetic[:MAX_NODE_ID_CHARS]
    if layout.dtype in DTYPE_BYTES:
        return fields
    stored = {"model_digest": layout.model_digest, "dtype": layout.dtype}
    model = f"{layout.model_digest[:SHOWN_CHARS]} with KV in {layout.dtype}"
    return {**fields, "model_digest": model, "dtype": KNOWN_DTYPE, "stored": stored}


def layout(name: str, value: object) -> KVLayout:
    """Return a KV layout, or raise `PeerProtocolError`."""
    if type(value) is not dict:
        raise PeerProtocolError(f"{name} is not a KV layout")
    checked = _checked(name, value, _FIELDS)
    checked |= checked.pop("stored")
    try:
        return KVLayout(**checked)
    except ValueError as error:
        raise PeerProtocolError(f"{name}: {error}") from None


def _checked(name: str, value: dict[Any, Any], checks: dict[str, Check]) -> dict[str, Any]:
    return {field: check(f"{name}.{field}", value.get(field)) for field, check in checks.items()}


def _stored(name: str, value: object) -> dict[str, Any]:
    """Return the model and the dtype that replace the known ones, or raise `PeerProtocolError`."""
    if type(value) is not dict:
        raise PeerProtocolError(f"{name} is not a map")
    return _checked(name, value, _TEXTS)


def _shapes(name: str, value: object) -> tuple[LayerShape, ...]:
    """Return the shape of each layer of a KV layout, or raise `PeerProtocolError`."""
    if type(value) is not list or len(value) > MAX_LAYERS:
        raise PeerProtocolError(f"{name} is not a list of at most {MAX_LAYERS} shapes")
    shapes = []
    for of_layer in value:
        sizes = uints(32, 3)(name, of_layer)
        if len(sizes) != 3:
            raise PeerProtocolError(f"{name} has {len(sizes)} numbers for a layer: wanted 3")
        shapes.append(LayerShape(*sizes))
    return tuple(shapes)


_TEXTS: dict[str, Check] = {
    "model_digest": text(MAX_NODE_ID_CHARS),
    "dtype": text(MAX_NODE_ID_CHARS),
}
_FIELDS: dict[str, Check] = {
    **_TEXTS,
    "num_layers": uint(31),
    "num_kv_heads": uint(31),
    "head_dim": uint(31),
    "block_size": uint(31),
    "shapes": missing_means((), _shapes),
    "arithmetic": missing_means("", text(MAX_NODE_ID_CHARS)),
    "stored": missing_means({}, _stored),
}
