"""The parameters of a decoder, read from config.json: one frozen value for every family.

Llama, Mistral, Qwen2, MiMo, Qwen3 and ERNIE-4.5 are one decoder: pre-norm attention and a gated
SiLU MLP, or a mixture of such MLPs (`expert_mixture`). They differ in biases, in norms on query and
key heads, in how head dimensions are paired for rotary positions, and in defaults. A configuration
that this decoder would compute wrongly is refused.

A family of the same decoder attaches here: one row of `_FAMILIES`. CONTRIBUTING.md, Seams, says
where sliding windows attach.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from common.errors import CheckpointError
from common.files.tokenizer_files import tokenizer_end_ids
from engine.runner.weights.config_values import ConfigValues, read_json_object
from engine.runner.weights.expert_mixture import READ_EXPERTS, ExpertMixture


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary positions. `kind` is default, linear or llama3; the last four fields are llama3's."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """The parameters of one decoder.

    `is_rope_interleaved`: rotary pairs are neighbours (2i, 2i + 1), not halves. With `experts` some
    layers have a mixture of MLPs; `intermediate_size` is that of the other layers.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_epsilon: float
    rope: RopeSpec
    is_rope_interleaved: bool
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_head_norms: bool
    experts: ExpertMixture | None = None

    @property
    def identity(self) -> str:
        """Text that is equal for equal decoders, also among releases.

        What a decoder does not have is left out where the value is None, so a release that knows
        more of other models pairs with the one before.
        """
        has = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(has, sort_keys=True)

    def mixture_of(self, layer: int) -> ExpertMixture | None:
        """Return the experts of a layer; None for one with a single MLP."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    @property
    def qkv_size(self) -> int:
        """Outputs of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def pairs_per_token(self) -> int:
        """The tokens to which one attends at the cost of its matrix products; at least 1.

        Both count multiplications in all layers; embeddings and logits are left out, and so are
        the experts that a token is not sent to.
        """
        attention_size = self.num_heads * self.head_dim
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.experts is not None:
            share = len(self.experts.layers) / self.num_layers
            inner_size = self.experts.outputs_of_a_token
            mlp = round((1 - share) * mlp + share * 3 * self.hidden_size * inner_size)
        products = self.hidden_size * (self.qkv_size + attention_size) + mlp
        return max(products // (2 * attention_size), 1)


@dataclass(frozen=True, slots=True)
class _Family:
    """Properties that an architecture fixes (booleans) or takes from config.json (key names)."""

    qkv_bias: bool | str
    output_bias: bool | str
    mlp_bias: bool | str
    has_head_norms: bool
    is_rope_interleaved: bool
    default_theta: float
    default_head_dim: int | None = None
    is_tied_by_default: bool = False
    has_qkv_bias_by_default: bool = False


_FAMILIES = {
    "LlamaForCausalLM": _Family(
        "attention_bias", "attention_bias", "mlp_bias", False, False, 10000.0
    ),
    "Qwen2ForCausalLM": _Family(True, False, False, False, False, 10000.0),
    "MistralForCausalLM": _Family(False, False, False, False, False, 10000.0),
    "MiMoForCausalLM": _Family(True, False, False, False, False, 10000.0),
    "Qwen3ForCausalLM": _Family(
        "attention_bias", "attention_bias", False, True, False, 10000.0, default_head_dim=128
    ),
    "Ernie4_5ForCausalLM": _Family(
        "use_bias", "use_bias", "use_bias", False, True, 500000.0,
        default_head_dim=128, is_tied_by_default=True,
    ),
    "SeedOssForCausalLM": _Family(
        "attention_bias", "attention_out_bias", "mlp_bias", False, False, 10000.0,
        default_head_dim=128, has_qkv_bias_by_default=True,
    ),
    "Qwen3MoeForCausalLM": _Family(
        "attention_bias", "attention_bias", False, True, False, 10000.0, default_head_dim=128
    ),
    "Ernie4_5_MoeForCausalLM": _Family(
        False, False, False, False, True, 500000.0, default_head_dim=128, is_tied_by_default=True
    ),
}  # fmt: skip


def read_decoder_spec(folder: Path) -> DecoderSpec:
    """Return the decoder of config.json; `CheckpointError` names what is unsupported."""
    path = folder / "config.json"
    values = read_json_object(path)
    config = ConfigValues(path, values)
    architectures = values.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    family = _FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None or not isinstance(architecture, str):
        raise config.refuse("architectures", f"one of {', '.join(_FAMILIES)}")
    _refuse_other_arithmetic(config)
    if architecture == "MistralForCausalLM":
        _refuse_window(config)

    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
    if (
        config.get("head_dim") is None
        and family.default_head_dim is None
        and hidden_size % num_heads
    ):
        raise config.refuse("num_attention_heads", f"a divisor of hidden_size, {hidden_size}")
    head_dim = config.integer("head_dim", family.default_head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise config.refuse("head_dim", "an even number, to be paired for rotary positions")
    max_position = config.integer("max_position_embeddings")
    num_layers = config.integer("num_hidden_layers")
    read_experts = READ_EXPERTS.get(architecture)

    def has_bias(rule: bool | str, default: bool = False) -> bool:
        return rule if isinstance(rule, bool) else config.flag(rule, default)

    return DecoderSpec(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size"),
        max_position=max_position,
        rms_epsilon=config.number("rms_norm_eps", 1e-5 if family.is_tied_by_default else 1e-6),
        rope=_rope_spec(config, family.default_theta, max_position),
        is_rope_interleaved=family.is_rope_interleaved,
        has_tied_embeddings=config.flag("tie_word_embeddings", family.is_tied_by_default),
        has_qkv_bias=has_bias(family.qkv_bias, family.has_qkv_bias_by_default),
        has_output_bias=has_bias(family.output_bias),
        has_mlp_bias=has_bias(family.mlp_bias),
        has_head_norms=family.has_head_norms,
        experts=None if read_experts is None else read_experts(config, num_layers),
    )


def _refuse_other_arithmetic(config: ConfigValues) -> None:
    """Raise `CheckpointError` for settings that this decoder would compute wrongly."""
    if config.get("hidden_act") not in (None, "silu", "swish"):
        raise config.refuse("hidden_act", "silu")
    if config.flag("use_sliding_window", False):
        raise config.refuse("use_sliding_window", "false: every layer attends to all positions")
    layer_types = config.get("layer_types")
    is_list = isinstance(layer_types, list)
    if layer_types is not None and not (
        is_list and all(kind == "full_attention" for kind in layer_types)
    ):
        raise config.refuse("layer_types", "a list of full_attention, one for each layer")


def _refuse_window(config: ConfigValues) -> None:
    """Raise `CheckpointError` for a sliding window that is shorter than the context.

    A Mistral file without the key has a window of 4096, as in transformers.
    """
    window = config.get("sliding_window")
    is_named = window is not None or config.has("sliding_window")
    if not is_named or (
        window is not None
        and config.integer("sliding_window") < config.integer("max_position_embeddings")
    ):
        raise config.refuse(
            "sliding_window",
            "null or at least max_position_embeddings: sliding windows are not computed",
        )


def _rope_spec(config: ConfigValues, default_theta: float, max_position: int) -> RopeSpec:
    """Return the rotary positions.

    They are in `rope_parameters` (newer files) or in `rope_theta` and `rope_scaling` (older ones).
    """
    newer = config.section("rope_parameters")
    scaling = newer or config.section("rope_scaling")
    theta = (newer or config).number("rope_theta", config.number("rope_theta", default_theta))
    if (config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise config.refuse("partial_rotary_factor", "1: all of a head is rotated")
    if scaling is None:
        return RopeSpec(kind="default", theta=theta)
    if (scaling.get("partial_rotary_factor") or 1.0) != 1.0:
        raise scaling.refuse("partial_rotary_factor", "1: all of a head is rotated")
    key = "rope_type" if scaling.get("rope_type") is not None else "type"
    kind = scaling.get(key) or "default"
    if kind == "default":
        return RopeSpec(kind=kind, theta=theta)
    if kind == "linear":
        return RopeSpec(kind=kind, theta=theta, factor=scaling.number("factor"))
    if kind != "llama3":
        raise scaling.refuse(key, "default, linear or llama3")
    return RopeSpec(
        kind=kind,
        theta=theta,
        factor=scaling.number("factor"),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_position=scaling.integer("original_max_position_embeddings", max_position),
    )


def read_eos_token_ids(folder: Path) -> frozenset[int]:
    """Return the end-of-sequence ids of config.json, generation_config.json and the tokenizer.

    The files but the first may be missing. Raises `CheckpointError` for values that are not token
    ids.
    """
    found: set[int] = set(tokenizer_end_ids(folder))
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if name == "generation_config.json" and not path.exists():
            continue
        value = read_json_object(path).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise CheckpointError(f"{path}: eos_token_id is {value!r}: wanted a token id or a list")
        found.update(ids)
    return frozenset(found)
