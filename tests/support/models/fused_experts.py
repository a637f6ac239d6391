"""Experts of a layer in one tensor, as gpt-oss's files and newer ones of transformers have them.

Every form is written from its definition, and shares nothing with what reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

Weights = Mapping[str, np.ndarray]

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUMBERS = (*MAGNITUDES, *(-one for one in MAGNITUDES))
"""The numbers of four bits (e2m1), by their bits."""


def _by_layer(weights: Weights) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
    """Return the tensors that are not of an expert, and those of each layer's experts.

    The latter are by `gate.weight` and the like, one expert below the other.
    """
    others: dict[str, np.ndarray] = {}
    parts: dict[str, dict[str, list[np.ndarray]]] = {}
    for name, values in weights.items():
        if found := _EXPERT.fullmatch(name):
            layer, index, part, kind = found.groups()
            of_layer = parts.setdefault(layer, {}).setdefault(f"{part}.{kind}", [])
            assert int(index) == len(of_layer)
            of_layer.append(values)
        else:
            others[name] = values
    stacked = {
        layer: {part: np.stack(each) for part, each in of_layer.items()}
        for layer, of_layer in parts.items()
    }
    return others, stacked


def _in_turns(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Return rows of gate and up in turns, `[experts, 2 * inner, …]`."""
    return np.stack([gate, up], axis=2).reshape(len(gate), -1, *gate.shape[2:])


def in_gpt_oss_form(weights: Weights) -> dict[str, np.ndarray]:
    """Return the tensors of a file of gpt-oss that is not quantised: inputs come first."""
    others, layers = _by_layer(weights)
    stored = {name.replace(".mlp.gate.", ".mlp.router."): one for name, one in others.items()}
    for layer, parts in layers.items():
        gate_up = _in_turns(parts["gate.weight"], parts["up.weight"])
        stored[f"{layer}.gate_up_proj"] = np.ascontiguousarray(gate_up.swapaxes(1, 2))
        stored[f"{layer}.down_proj"] = np.ascontiguousarray(parts["down.weight"].swapaxes(1, 2))
        stored |= _biases(layer, parts)
    return stored


def _biases(layer: str, parts: Weights) -> dict[str, np.ndarray]:
    return {
        f"{layer}.gate_up_proj_bias": _in_turns(parts["gate.bias"], parts["up.bias"]),
        f"{layer}.down_proj_bias": parts["down.bias"],
    }


def in_newer_form(weights: Weights) -> dict[str, np.ndarray]:
    """Return what transformers 5 writes of other families for `save_original_format=False`.

    All rows of gate come before those of up.
    """
    others, layers = _by_layer(weights)
    stored = {
        name.replace(".moe_statics.", ".gate.moe_statics."): one for name, one in others.items()
    }
    for layer, parts in layers.items():
        rows = [parts["gate.weight"], parts["up.weight"]]
        stored[f"{layer}.gate_up_proj"] = np.concatenate(rows, axis=1)
        stored[f"{layer}.down_proj"] = parts["down.weight"]
    return stored


def in_mxfp4_form(weights: Weights) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the tensors of a file of gpt-oss in MXFP4, and the values of all weights.

    Experts have any numbers of four bits, with scales about as large as their weights were.
    """
    draw = np.random.RandomState(7)
    values = dict(weights)
    stored: dict[str, np.ndarray] = {}
    others, layers = _by_layer(weights)
    stored |= {name.replace(".mlp.gate.", ".mlp.router."): one for name, one in others.items()}
    for layer, parts in layers.items():
        made: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for part in ("gate", "up", "down"):
            numbers, scales = _drawn(parts[f"{part}.weight"], draw)
            made[part] = _packed(numbers), scales
            wide = np.array(NUMBERS)[numbers] * np.repeat(2.0 ** (scales - 127.0), 32, axis=2)
            for index, one in enumerate(wide):
                values[f"{layer}.{index}.{part}_proj.weight"] = one.astype(np.float32)
        for suffix, at in (("blocks", 0), ("scales", 1)):
            stored[f"{layer}.gate_up_proj_{suffix}"] = _in_turns(made["gate"][at], made["up"][at])
            stored[f"{layer}.down_proj_{suffix}"] = made["down"][at]
        stored |= _biases(layer, parts)
    return stored, values


def _drawn(weight: np.ndarray, draw: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers of four bits `[experts, outputs, inputs]`, and a scale for each 32 of them."""
    experts, outputs, inputs = weight.shape
    usual = int(np.floor(np.log2(weight.std() / 3)))
    scales = draw.randint(127 + usual - 1, 127 + usual + 2, (experts, outputs, inputs // 32))
    numbers = draw.randint(0, 16, weight.shape)
    return numbers, scales.astype(np.uint8)


def _packed(numbers: np.ndarray) -> np.ndarray:
    """Return two neighbours in a byte, the first one in its low half: `[…, groups, 16]`."""
    experts, outputs, inputs = numbers.shape
    pairs = numbers.reshape(experts, outputs, inputs // 32, 16, 2)
    packed: np.ndarray = (pairs[..., 0] + 16 * pairs[..., 1]).astype(np.uint8)
    return packed
