"""The parameters of a decoder, read from config.json: one frozen value for every family.

Llama, Mistral, Qwen2, MiMo, Qwen3, ERNIE-4.5 and GLM are one decoder: pre-norm attention and a
gated SiLU MLP, or a mixture of such MLPs (`expert_mixture`). They differ in biases, in norms on
query and key heads, in which head dimensions are rotated and how they are paired, and in defaults.
GLM-4-0414 and Gemma 3 have norms after attention and MLP too, and Gemma 3 a gated GELU, scaled
embeddings, and other rotary positions in layers with a window. Granite has multipliers. A
configuration that this decoder would compute wrongly is refused.

A family of the same decoder attaches here: one row of `_FAMILIES`.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from common.files.model_config import longest_context, text_config
from common.files.tokenizer_files import tokenizer_end_ids
from engine.runner.weights.spec.config_values import ConfigValues, read_json_object
from engine.runner.weights.spec.expert_mixture import READ_EXPERTS, ExpertMixture
from engine.runner.weights.spec.multipliers import granite_parts
from engine.runner.weights.spec.rope_spec import (
    NO_ROTATION,
    RopeSpec,
    read_rope_spec,
    read_rotated_dim,
    read_unrotated_layers,
)
from engine.runner.weights.spec.sliding_windows import read_windows

_GEMMA_WINDOW_THETA = 10000.0
_LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """The parameters of one decoder.

    `is_rope_interleaved`: rotary pairs of a head in the files are neighbours (2i, 2i + 1), not
    halves. `rotated_dim`: only so many of its first dimensions are rotated, 0: all. With `experts`
    some layers have a mixture of MLPs; `intermediate_size` is that of the other layers. `windows`
    are those of the layers in positions, 0: all of them; empty: no layer has a window.
    `window_rope` is that of layers with a window (None: `rope`), and heads of `unrotated_layers`
    are not rotated at all. Scores are divided by the root of `score_divisor`
    (0: of `head_dim`). `has_output_norms`: what attention and MLP add has a norm of its own.
    `has_norm_offsets`: safetensors have the weights of all norms less one. `has_sinks`: each query
    head has a sink, a score that takes its share of the softmax and has no value. Logits are
    divided by `logits_divisor`, which `derived.divided_logits` does.
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
    windows: tuple[int, ...] = ()
    window_rope: RopeSpec | None = None
    unrotated_layers: tuple[int, ...] = ()
    score_divisor: float = 0.0
    embedding_scale: float = 1.0
    is_gelu: bool = False
    has_output_norms: bool = False
    has_norm_offsets: bool = False
    has_sinks: bool = False
    rotated_dim: int = 0
    logits_divisor: float = 1.0

    @property
    def rotated_pairs(self) -> int:
        """How many of the `head_dim / 2` rotary pairs of a head are rotated: the first ones."""
        return (self.rotated_dim or self.head_dim) // 2

    @property
    def score_scale(self) -> float:
        """What the product of a query and a key is multiplied by."""
        return float((self.score_divisor or self.head_dim) ** -0.5)

    @property
    def mlp_norm(self) -> str:
        """The name of the norm before the MLP."""
        return f"{'pre_feedforward' if self.has_output_norms else 'post_attention'}_layernorm"

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The rotary positions of all layers, and of a drafting layer."""
        return tuple(dict.fromkeys([self.rope, *map(self.rope_of, range(self.num_layers))]))

    def rope_of(self, layer: int) -> RopeSpec:
        """Return the rotary positions of a layer."""
        if layer in self.unrotated_layers:
            return NO_ROTATION
        return self.window_rope or self.rope if self.window_of(layer) else self.rope

    def window_of(self, layer: int) -> int:
        """Return to how many positions a row of a layer attends, its own included; 0: to all."""
        return self.windows[layer] if self.windows else 0

    @property
    def identity(self) -> str:
        """Return text that is equal for equal parameters, a part of the KV's fingerprint.

        What has its default is left out: models of earlier releases keep their fingerprints.
        """
        values = without_defaults(self)
        if self.experts is not None:
            values["experts"] = without_defaults(self.experts)
        return json.dumps(values, sort_keys=True)

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
        the experts that a token is not sent to. Layers with a window attend to few tokens wherever
        one is: what grows with the context is the attention of the others. 0: there is none.
        """
        attention_size = self.num_heads * self.head_dim
        num_growing = sum(not self.window_of(layer) for layer in range(self.num_layers))
        if not num_growing:
            return 0
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.experts is not None:
            share = len(self.experts.layers) / self.num_layers
            inner_size = self.experts.outputs_of_a_token
            mlp = round((1 - share) * mlp + share * 3 * self.hidden_size * inner_size)
        products = self.hidden_size * (self.qkv_size + attention_size) + mlp
        return max(products * self.num_layers // (2 * attention_size * num_growing), 1)


@dataclass(frozen=True, slots=True)
class _Family:
    """Properties that an architecture fixes (booleans) or takes from config.json (key names)."""

    qkv_bias: bool | str
    output_bias: bool | str
    mlp_bias: bool | str
    has_head_norms: bool | str
    is_rope_interleaved: bool
    default_theta: float
    default_head_dim: int | None = None
    is_tied_by_default: bool = False
    has_qkv_bias_by_default: bool = False
    windows: str = ""
    """Which layers have a sliding window: a rule of `sliding_windows.read_windows`."""
    is_gemma: bool = False
    has_unrotated_layers: bool = False
    has_sinks: bool = False
    rotated_share: float | None = None
    """The share of a head that is rotated where config.json says none; None: all of it is."""
    default_epsilon: float = 1e-6
    has_output_norms: bool = False
    is_granite: bool = False
    requires_scaling: bool = False
    """Whether config.json has to say how rotary positions are scaled."""


_FAMILIES = {
    "LlamaForCausalLM": _Family(
        "attention_bias", "attention_bias", "mlp_bias", False, False, 10000.0
    ),
    "Qwen2ForCausalLM": _Family(True, False, False, False, False, 10000.0, windows="after"),
    "MistralForCausalLM": _Family(False, False, False, False, False, 10000.0, windows="every"),
    "Ministral3ForCausalLM": _Family(
        False, False, False, False, False, 1000000.0, default_head_dim=128, windows="stated",
        default_epsilon=1e-5, requires_scaling=True,
    ),
    "MiMoForCausalLM": _Family(True, False, False, False, False, 10000.0, windows="after"),
    "Qwen3ForCausalLM": _Family(
        "attention_bias", "attention_bias", False, True, False, 10000.0, default_head_dim=128,
        windows="after",
    ),
    "Ernie4_5ForCausalLM": _Family(
        "use_bias", "use_bias", "use_bias", False, True, 500000.0,
        default_head_dim=128, is_tied_by_default=True, default_epsilon=1e-5,
    ),
    "Phi3ForCausalLM": _Family(
        False, False, False, False, False, 10000.0, windows="stated", rotated_share=1.0
    ),
    "GraniteForCausalLM": _Family(
        "attention_bias", "attention_bias", "mlp_bias", False, False, 10000.0, is_granite=True
    ),
    "SeedOssForCausalLM": _Family(
        "attention_bias", "attention_out_bias", "mlp_bias", False, False, 10000.0,
        default_head_dim=128, has_qkv_bias_by_default=True,
    ),
    "SmolLM3ForCausalLM": _Family(
        "attention_bias", "attention_bias", "mlp_bias", False, False, 2000000.0,
        is_tied_by_default=True, has_unrotated_layers=True,
    ),
    "Qwen3MoeForCausalLM": _Family(
        "attention_bias", "attention_bias", False, True, False, 10000.0, default_head_dim=128
    ),
    "MixtralForCausalLM": _Family(
        False, False, False, False, False, 1000000.0, windows="stated", default_epsilon=1e-5
    ),
    "Ernie4_5_MoeForCausalLM": _Family(
        False, False, False, False, True, 500000.0, default_head_dim=128, is_tied_by_default=True,
        default_epsilon=1e-5,
    ),
    "GlmForCausalLM": _Family(
        "attention_bias", False, False, False, True, 10000.0, default_head_dim=128,
        has_qkv_bias_by_default=True, rotated_share=0.5, default_epsilon=1.5625e-7,
    ),
    "Glm4ForCausalLM": _Family(
        "attention_bias", False, False, False, True, 10000.0, default_head_dim=128,
        has_qkv_bias_by_default=True, rotated_share=0.5, default_epsilon=1.5625e-7,
        has_output_norms=True,
    ),
    "Glm4MoeForCausalLM": _Family(
        "attention_bias", False, False, "use_qk_norm", False, 10000.0, rotated_share=0.5,
        default_epsilon=1e-5,
    ),
    "GptOssForCausalLM": _Family(
        "attention_bias", "attention_bias", False, False, False, 150000.0,
        default_head_dim=64, has_qkv_bias_by_default=True, windows="alternating", has_sinks=True,
        default_epsilon=1e-5,
    ),
    "Gemma3ForCausalLM": _Family(
        "attention_bias", "attention_bias", False, True, False, 1000000.0,
        default_head_dim=256, is_tied_by_default=True, windows="pattern", is_gemma=True,
        has_output_norms=True,
    ),
}  # fmt: skip


def without_defaults(value: DecoderSpec | ExpertMixture) -> dict[str, Any]:
    """Return the fields of a frozen value by name, but those that have their default."""
    values = asdict(value)
    for field in fields(value):
        if getattr(value, field.name) == field.default:
            del values[field.name]
    return values


def read_decoder_spec(folder: Path) -> DecoderSpec:
    """Return the decoder of config.json; `CheckpointError` names what is unsupported."""
    path = folder / "config.json"
    values = dict(text_config(read_json_object(path)))
    config = ConfigValues(path, values)
    architectures = values.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    family = _FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None or not isinstance(architecture, str):
        raise config.refuse("architectures", f"one of {', '.join(_FAMILIES)}")
    _refuse_other_arithmetic(config, family)
    max_position = config.integer("max_position_embeddings")
    hidden_size = config.integer("hidden_size")
    num_heads, num_kv_heads, head_dim = _read_heads(config, family, hidden_size)
    of_full_layers = _ropes_of_full_layers(config, family)
    rotated_dim = read_rotated_dim(of_full_layers, head_dim, family.rotated_share)
    rope = read_rope_spec(
        of_full_layers, family.default_theta, max_position, (rotated_dim or head_dim) // 2
    )
    longest = longest_context(values)
    if family.has_sinks:
        _refuse_another_context(config, rope)
    num_layers = config.integer("num_hidden_layers")
    read_experts = READ_EXPERTS.get(architecture)

    def has(rule: bool | str, default: bool = False) -> bool:
        return rule if isinstance(rule, bool) else config.flag(rule, default)

    spec = DecoderSpec(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size"),
        max_position=longest,
        rms_epsilon=config.number("rms_norm_eps", family.default_epsilon),
        rope=rope,
        is_rope_interleaved=family.is_rope_interleaved,
        has_tied_embeddings=config.flag("tie_word_embeddings", family.is_tied_by_default),
        has_qkv_bias=has(family.qkv_bias, family.has_qkv_bias_by_default),
        has_output_bias=has(family.output_bias, family.has_sinks),
        has_mlp_bias=has(family.mlp_bias),
        has_head_norms=has(family.has_head_norms),
        experts=None if read_experts is None else read_experts(config, num_layers),
        windows=read_windows(config, family.windows, num_layers, longest),
        unrotated_layers=(
            read_unrotated_layers(config, num_layers) if family.has_unrotated_layers else ()
        ),
        has_sinks=family.has_sinks,
        rotated_dim=rotated_dim,
        has_output_norms=family.has_output_norms,
        **(_gemma_parts(config, hidden_size, head_dim, max_position) if family.is_gemma else {}),
    )
    return replace(spec, **granite_parts(config, spec.rms_epsilon)) if family.is_granite else spec


def _read_heads(config: ConfigValues, family: _Family, hidden_size: int) -> tuple[int, int, int]:
    """Return the numbers of query heads and of key heads, and the size of each."""
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
    return num_heads, num_kv_heads, head_dim


def _gemma_parts(
    config: ConfigValues, hidden_size: int, head_dim: int, max_position: int
) -> dict[str, Any]:
    """Return the fields of a `DecoderSpec` that Gemma 3 alone has."""
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if config.get(key) is not None:
            raise config.refuse(key, "null: no scores or logits are capped")
    if config.flag("use_bidirectional_attention", False):
        raise config.refuse("use_bidirectional_attention", "false: no position sees later ones")
    newer = config.section("rope_parameters")
    if newer is not None and newer.has("sliding_attention"):
        section = newer.alone("sliding_attention", "rope_parameters")
        rope = read_rope_spec(section, _GEMMA_WINDOW_THETA, max_position, head_dim // 2)
    else:
        theta = config.number("rope_local_base_freq", _GEMMA_WINDOW_THETA)
        rope = RopeSpec(kind="default", theta=theta)
    return {
        "window_rope": rope,
        "score_divisor": config.number("query_pre_attn_scalar", 256.0),
        "embedding_scale": math.sqrt(hidden_size),
        "is_gelu": True,
        "has_norm_offsets": True,
    }


def _ropes_of_full_layers(config: ConfigValues, family: _Family) -> ConfigValues:
    """Return the values with the rotary positions of layers without a window.

    Files of Gemma 3 may have them by the kind of a layer: as objects in `rope_parameters`. Raises
    `CheckpointError` where a kind is missing, and for such files of other families.
    """
    newer = config.section("rope_parameters")
    kinds = [] if newer is None else [kind for kind in _LAYER_KINDS if newer.has(kind)]
    if newer is None or not kinds:
        return config
    if not family.is_gemma:
        raise config.refuse("rope_parameters", "the same rotary positions in all layers")
    for kind in _LAYER_KINDS:
        if kind not in kinds:
            raise newer.refuse(kind, f"the rotary positions of this kind, as of {kinds[0]}")
    return newer.alone("full_attention", "rope_parameters")


def _refuse_another_context(config: ConfigValues, rope: RopeSpec) -> None:
    """Raise `CheckpointError` for a context before scaling that the rotary positions do not have.

    OpenAI's own program reads this key, and transformers reads the section.
    """
    key, original = "initial_context_length", rope.original_max_position
    if original and config.get(key) not in (None, original):
        raise config.refuse(key, f"original_max_position_embeddings, {original}")


def _refuse_other_arithmetic(config: ConfigValues, family: _Family) -> None:
    """Raise `CheckpointError` for settings that this decoder would compute wrongly."""
    if family.is_gemma:
        if config.get("hidden_activation") not in (None, "gelu_pytorch_tanh"):
            raise config.refuse("hidden_activation", "gelu_pytorch_tanh")
    elif config.get("hidden_act") not in (None, "silu", "swish"):
        raise config.refuse("hidden_act", "silu")
    keys = ("rope_parameters", "rope_scaling")
    if family.requires_scaling and all(config.section(key) is None for key in keys):
        raise config.refuse(keys[0], "an object, which says how rotary positions are scaled")


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
