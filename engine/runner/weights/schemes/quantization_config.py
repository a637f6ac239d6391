"""What `quantization_config` of config.json says of how a folder's weights are stored.

It is what transformers, vLLM and the tools write and read; what would be read wrongly is refused.
Lists of layers that were left alone (`modules_to_not_convert`, `ignored_layers`) are not needed for
GPTQ, AWQ and fp8: such a layer has a plain `weight`. In compressed-tensors, groups of layers have
schemes of their own, and `ignore` names those that have none.

Scales of activations and of KV (`input_scale`, `k_scale` and the like) are not used: activations
are computed as `--activation-dtype` says, and KV is stored as `--kv-cache-dtype` says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.runner.weights.schemes.float8_scheme import Float8
from engine.runner.weights.schemes.integer_schemes import Awq, Gptq, PackedIntegers, PlainIntegers
from engine.runner.weights.schemes.scheme import Scheme
from engine.runner.weights.spec.config_values import ConfigValues, read_json_object

KEY = "quantization_config"
GPTQ_FILE, AWQ_FILE = "quantize_config.json", "quant_config.json"
"""What AutoGPTQ and AutoAWQ wrote before config.json had a section for it."""
_REGULAR = "re:"
_EMBEDDING = "embed_tokens"


@dataclass(frozen=True, slots=True)
class _Layers:
    """Layers by name or class, or by a regular expression with which their names begin.

    A mixture of experts has tens of thousands of layers, of which a file may name hundreds.
    """

    names: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()

    def has(self, layer: str) -> bool:
        return layer in self.names or any(one.match(layer) for one in self.patterns)


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers whose weights have one form."""

    targets: _Layers
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class Quantization:
    """The schemes of a folder's weights. `description` is for people."""

    description: str
    schemes: tuple[Scheme, ...]
    groups: tuple[_Group, ...] = ()
    ignored: _Layers = _Layers()
    """Both are empty where the tensors themselves say which layers are quantised."""

    def has_mxfp4(self, layer: str) -> bool:
        """Return whether a layer is in MXFP4, which has no scheme: see `derived.fused_experts`."""
        return not self.schemes and not self.ignored.has(layer)

    def scheme_of(self, layer: str) -> Scheme | None:
        """Return the scheme of a layer, if it is quantised; None: it is not."""
        if not self.groups:
            return self.schemes[0]
        if self.ignored.has(layer):
            return None
        for group in self.groups:
            if group.targets.has(layer):
                return group.scheme
        kind = "Embedding" if layer.endswith(_EMBEDDING) else "Linear"
        return next((group.scheme for group in self.groups if kind in group.targets.names), None)

    def required_scheme(self, layer: str) -> Scheme | None:
        """Return the scheme in which a layer's weight has to be; None: it may be plain."""
        return self.scheme_of(layer) if self.groups else None


def read_quantization(folder: Path) -> Quantization | None:
    """Return how the weights of a folder are quantised; None: they are not.

    Raises `CheckpointError`, naming the key and what is wanted, for what cannot be read.
    """
    path = folder / "config.json"
    config = ConfigValues(path, read_json_object(path)).section(KEY) or _of_own_file(folder)
    if config is None:
        return None
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise config.refuse("quant_method", f"one of {', '.join(_METHODS)}")
    return _METHODS[method](config)


def _of_own_file(folder: Path) -> ConfigValues | None:
    """Return what a file of its own says, as config.json would."""
    path = folder / GPTQ_FILE
    if path.exists():
        return ConfigValues(path, {"quant_method": "gptq", **read_json_object(path)})
    path = folder / AWQ_FILE
    if path.exists():
        found = {"quant_method": "awq", **read_json_object(path)}
        for name, former in (("bits", "w_bit"), ("group_size", "q_group_size")):
            found.setdefault(name, found.get(former))
        return ConfigValues(path, found)
    return None


def _bits(config: ConfigValues, key: str, known: Sequence[int]) -> int:
    bits = config.integer(key)
    if bits not in known:
        raise config.refuse(key, " or ".join(str(one) for one in known))
    return bits


def _group_size(config: ConfigValues) -> int:
    return -1 if config.get("group_size") == -1 else config.integer("group_size")


def _one_of(config: ConfigValues, key: str, known: Sequence[str], default: str) -> str:
    found = config.get(key)
    found = default if found is None else found
    if not isinstance(found, str) or found.lower() not in known:
        raise config.refuse(key, " or ".join(known))
    return found.lower()


def _in_groups(size: int) -> str:
    return "one group a row" if size == -1 else f"groups of {size}"


def _gptq(config: ConfigValues) -> Quantization:
    bits, group_size = _bits(config, "bits", (4, 8)), _group_size(config)
    key = "checkpoint_format" if config.has("checkpoint_format") else "format"
    version = _one_of(config, key, ("gptq", "gptq_v2"), "gptq")
    _one_of(config, "pack_dtype", ("int32",), "int32")
    if config.flag("is_marlin_format", False):
        raise config.refuse("is_marlin_format", "false: integers in GPTQ's order")
    rules = config.get("dynamic") or {}
    if not isinstance(rules, dict) or not all(str(rule).startswith("-:") for rule in rules):
        raise config.refuse("dynamic", "the same bits and groups for all layers")
    has_order = config.flag("desc_act", False)
    scheme = Gptq(bits, group_size, version == "gptq", has_order)
    order = ", in no order" if has_order else ""
    return Quantization(f"{version}, {bits} bits, {_in_groups(group_size)}{order}", (scheme,))


def _awq(config: ConfigValues) -> Quantization:
    bits = _bits(config, "bits", (4,))
    version = _one_of(config, "version", ("gemm",), "gemm")
    _one_of(config, "backend", ("autoawq",), "autoawq")
    if not config.flag("zero_point", True):
        raise config.refuse("zero_point", "true: zeros in qzeros")
    group_size = _group_size(config)
    description = f"awq {version}, {bits} bits, {_in_groups(group_size)}"
    return Quantization(description, (Awq(bits, group_size),))


def _fp8(config: ConfigValues) -> Quantization:
    _one_of(config, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    tile = config.get("weight_block_size")
    if tile is None:
        return Quantization("fp8", (Float8(None, "weight_scale"),))
    sizes = _tile(config, "weight_block_size")
    name = f"fp8, tiles of {sizes[0]} by {sizes[1]}"
    return Quantization(name, (Float8(sizes, "weight_scale_inv"),))


_MXFP4_KEYS = ("quant_method", "modules_to_not_convert", "dequantize")


def _mxfp4(config: ConfigValues) -> Quantization:
    """Return how experts of gpt-oss are stored; layers that were left alone are by transformers'.

    Its rule is that a key matches from the start of a name to its end or to a dot, as a regular
    expression, or is the end of the name.
    """
    for key in config.given_keys():
        if key not in _MXFP4_KEYS:
            raise config.refuse(key, f"no key with mxfp4 but {', '.join(_MXFP4_KEYS)}")
    config.flag("dequantize", False)
    found = config.get("modules_to_not_convert")
    found = [] if found is None else found
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise config.refuse("modules_to_not_convert", "a list of names of layers, or null")
    patterns = []
    for one in found:
        try:
            patterns.append(re.compile(rf"(?:{one})(?:(?<=\.)|(?=\.|$))"))
        except re.error as error:
            said = f"regular expressions: {one!r}: {error}"
            raise config.refuse("modules_to_not_convert", said) from None
        patterns.append(re.compile(rf".*{re.escape(one)}$"))
    return Quantization("mxfp4", (), ignored=_Layers(patterns=tuple(patterns)))


def _tile(config: ConfigValues, key: str) -> tuple[int, int]:
    sizes = config.get(key)
    is_pair = isinstance(sizes, list) and len(sizes) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in sizes):
        raise config.refuse(key, "two whole numbers above 0")
    return sizes[0], sizes[1]


def _compressed_tensors(config: ConfigValues) -> Quantization:
    for key in ("sparsity_config", "transform_config"):
        other = config.get(key) or {}
        if other and not (isinstance(other, dict) and other.get("format") == "dense"):
            raise config.refuse(key, "none: weights that are quantised only")
    section = config.section("config_groups")
    described = [] if section is None else section.sections()
    if not described:
        raise config.refuse("config_groups", "groups of layers, with the form of their weights")
    groups = tuple(_Group(_layers(one, "targets"), _scheme(config, one)) for one in described)
    schemes = tuple(dict.fromkeys(group.scheme for group in groups))
    formats = " and ".join(sorted({_format(config, one) for one in described}))
    ignored = _layers(config, "ignore") if config.get("ignore") else _Layers()
    return Quantization(f"compressed-tensors, {formats}", schemes, groups, ignored)


def _layers(config: ConfigValues, key: str) -> _Layers:
    found = config.get(key)
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise config.refuse(key, "a list of names of layers")
    patterns = []
    for one in found:
        if not one.startswith(_REGULAR):
            continue
        try:
            patterns.append(re.compile(one.removeprefix(_REGULAR)))
        except re.error as error:
            raise config.refuse(key, f"regular expressions: {one!r}: {error}") from None
    return _Layers(frozenset(found), tuple(patterns))


_PACKED, _FLOATS, _INTEGERS = "pack-quantized", "float-quantized", "int-quantized"
_NAIVE = "naive-quantized"
"""Integers or floats that are not packed, as the type of the weights says."""


def _format(config: ConfigValues, group: ConfigValues) -> str:
    described = config if group.get("format") is None else group
    return _one_of(described, "format", (_PACKED, _FLOATS, _INTEGERS, _NAIVE), "")


def _scheme(config: ConfigValues, group: ConfigValues) -> Scheme:
    """Return the form of the weights of a group of compressed-tensors."""
    name, weights = _format(config, group), group.section("weights")
    if weights is None:
        raise group.refuse("weights", "an object")
    kind = _one_of(weights, "type", ("int", "float"), "int")
    is_symmetric = weights.flag("symmetric", True)
    if name == _NAIVE:
        name = _FLOATS if kind == "float" else _INTEGERS
    wanted = "float" if name == _FLOATS else "int"
    if kind != wanted:
        raise weights.refuse("type", f"{wanted}, as format is {name}")
    if name == _FLOATS:
        _bits(weights, "num_bits", (8,))
        if not is_symmetric:
            raise weights.refuse("symmetric", "true for weights of type float")
        return _float_scheme(weights)
    bits = _bits(weights, "num_bits", (4, 8))
    strategies = ("group", "channel", "tensor") if name == _INTEGERS else ("group", "channel")
    strategy = _strategy(weights, strategies)
    group_size = _group_size(weights) if strategy == "group" else -1
    if name == _INTEGERS:
        return PlainIntegers(bits, group_size, is_symmetric, strategy == "tensor")
    return PackedIntegers(bits, group_size, is_symmetric)


def _strategy(weights: ConfigValues, known: Sequence[str]) -> str:
    """Return what shares a scale; files of some age say it by `group_size` alone."""
    size = weights.get("group_size")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    return _one_of(weights, "strategy", known, default)


def _float_scheme(weights: ConfigValues) -> Float8:
    strategy = _strategy(weights, ("tensor", "channel", "group", "block"))
    tile: tuple[int, int] = (0, 0)
    if strategy == "channel":
        tile = (1, 0)
    elif strategy == "group":
        tile = (1, _group_size(weights))
    elif strategy == "block":
        tile = _tile(weights, "block_structure")
    return Float8(tile, "weight_scale")


_METHODS: dict[str, Callable[[ConfigValues], Quantization]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": _mxfp4,
}
