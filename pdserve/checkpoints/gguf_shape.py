"""The decoder that a GGUF file describes, as a config.json of Hugging Face.

A family attaches here: one row of `_FAMILIES`, and of `engine.runner.weights.spec.model_spec`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

from common.errors import CheckpointError
from engine.runner.weights.gguf_file import GgufFile
from engine.runner.weights.gguf_weights import num_drafting_layers
from pdserve.checkpoints.gguf_experts import (
    ernie_experts,
    glm4moe_experts,
    gpt_oss_experts,
    llama_experts,
    qwen3moe_experts,
)
from pdserve.checkpoints.gguf_multipliers import granite_multipliers
from pdserve.checkpoints.rope_factors import rope_scaling

_MAX_LAYERS = 1024
_UNBIASED_LLAMA = {"attention_bias": False, "mlp_bias": False}


@dataclass(frozen=True, slots=True)
class _Family:
    """An architecture's name in config.json, and what it says there about biases.

    `optional_biases` names the key that says whether all layers have them. `experts` returns the
    keys of a mixture of experts, for the file and its `intermediate_size`; None: there is none.
    `window_period`: all but every so many-th layer have a sliding window, where a file does not say
    so; 0: none has. `window_theta` is their base of RoPE, where a file does not say it; 0: they
    have that of the others. `rotates_a_part`:
    `rope.dimension_count` may be less than a head. `has_sections`: pairs of a head turn by three
    positions, which are equal in a text.
    """

    architecture: str
    model_type: str
    biases: dict[str, bool]
    optional_biases: str = ""
    experts: Callable[[GgufFile, int], dict[str, Any]] | None = None
    window_period: int = 0
    window_theta: float = 0.0
    rotates_a_part: bool = False
    has_sections: bool = False


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", "llama", _UNBIASED_LLAMA, experts=llama_experts),
    "phi3": _Family("Phi3ForCausalLM", "phi3", {}, rotates_a_part=True),
    "glm4": _Family("Glm4ForCausalLM", "glm4", {}, "attention_bias", rotates_a_part=True),
    "glm4moe": _Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {},
        "attention_bias",
        glm4moe_experts,
        rotates_a_part=True,
    ),
    "granite": _Family("GraniteForCausalLM", "granite", _UNBIASED_LLAMA),
    "mistral3": _Family("Ministral3ForCausalLM", "ministral3", {}),
    "qwen2": _Family("Qwen2ForCausalLM", "qwen2", {}),
    "qwen2vl": _Family("Qwen2ForCausalLM", "qwen2", {}, has_sections=True),
    "qwen3vl": _Family(
        "Qwen3ForCausalLM", "qwen3", {"attention_bias": False}, has_sections=True
    ),
    "qwen3vlmoe": _Family(
        "Qwen3MoeForCausalLM", "qwen3_moe", {"attention_bias": False}, experts=qwen3moe_experts,
        has_sections=True,
    ),
    "qwen3": _Family("Qwen3ForCausalLM", "qwen3", {"attention_bias": False}),
    "ernie4_5": _Family("Ernie4_5ForCausalLM", "ernie4_5", {}, "use_bias"),
    "qwen3moe": _Family(
        "Qwen3MoeForCausalLM", "qwen3_moe", {"attention_bias": False}, experts=qwen3moe_experts
    ),
    "ernie4_5-moe": _Family(
        "Ernie4_5_MoeForCausalLM", "ernie4_5_moe", {}, "use_bias", ernie_experts
    ),
    "gemma3": _Family(
        "Gemma3ForCausalLM", "gemma3_text", {"attention_bias": False}, window_period=6,
        window_theta=10000.0,
    ),
    "gpt-oss": _Family(
        "GptOssForCausalLM", "gpt_oss", {"attention_bias": True}, experts=gpt_oss_experts,
        window_period=2,
    ),
}  # fmt: skip
_GEMMA_LARGEST_LAYERS = 62
"""The layers of Gemma 3 27B, which alone divides scores by the root of hidden_size / heads."""

_WANTED_ROTATION = ("RoPE over the whole head", "RoPE over an even part of the head, or all of it")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufShape:
    """Sizes of a decoder, whether it has biases, and whether its output matrix is the embedding.

    `family` is the architecture in GGUF's words. Of each head the first `rotated_dim` dimensions
    are rotated. `rope_scaling` is that of config.json, empty
    without scaling, `experts` has its keys for a mixture of experts, and `multipliers` those of
    Granite. `window` is the
    sliding window of the layers that have one, 0: none has, and `window_rope_theta` their base of
    RoPE. Every `window_pattern`-th layer has no window.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotated_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    has_biases: bool
    has_tied_embeddings: bool
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    experts: dict[str, Any] = field(default_factory=dict)
    multipliers: dict[str, float] = field(default_factory=dict)
    window: int = 0
    window_rope_theta: float = 10000.0
    window_pattern: int = 1

    @classmethod
    def of(cls, gguf: GgufFile) -> Self:
        """Return the sizes `gguf` states. Raises CheckpointError where they cannot be supported."""
        family = gguf.text("general.architecture")
        if family not in _FAMILIES:
            raise CheckpointError(
                f"{gguf.path}: architecture is {family!r}: supported is {', '.join(_FAMILIES)}"
            )
        num_heads = gguf.integer(f"{family}.attention.head_count")
        hidden_size = gguf.integer(f"{family}.embedding_length")
        head_dim = gguf.integer(f"{family}.attention.key_length", hidden_size // max(num_heads, 1))
        epsilon = gguf.number(f"{family}.attention.layer_norm_rms_epsilon")
        rope_theta = gguf.number(f"{family}.rope.freq_base", 10000.0)
        period = _FAMILIES[family].window_period
        window_theta = _FAMILIES[family].window_theta or rope_theta
        shape = cls(
            family=family,
            num_layers=gguf.integer(f"{family}.block_count") - num_drafting_layers(gguf),
            hidden_size=hidden_size,
            intermediate_size=_inner_size(gguf, family),
            num_heads=num_heads,
            num_kv_heads=gguf.integer(f"{family}.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rotated_dim=gguf.integer(f"{family}.rope.dimension_count", head_dim),
            vocab_size=len(gguf.texts("tokenizer.ggml.tokens")),
            max_positions=gguf.integer(f"{family}.context_length"),
            # Stored as float32: seven digits give back the number that was meant.
            rms_norm_eps=float(f"{epsilon:.7g}"),
            rope_theta=rope_theta,
            window=gguf.integer(f"{family}.attention.sliding_window", 0),
            window_rope_theta=gguf.number(f"{family}.rope.freq_base_swa", window_theta),
            window_pattern=(
                gguf.integer(f"{family}.attention.sliding_window_pattern", period) if period else 1
            ),
            has_biases="blk.0.attn_q.bias" in gguf.tensors,
            has_tied_embeddings="output.weight" not in gguf.tensors,
        )
        shape._check(gguf)
        scaling = rope_scaling(gguf, family, shape.rotated_dim, shape.rope_theta)
        read_experts = _FAMILIES[family].experts
        experts = {} if read_experts is None else read_experts(gguf, shape.intermediate_size)
        multipliers = granite_multipliers(gguf, head_dim) if family == "granite" else {}
        return replace(shape, rope_scaling=scaling, experts=experts, multipliers=multipliers)

    def _check(self, gguf: GgufFile) -> None:
        """Raise `CheckpointError`, naming the key, for what cannot be supported."""
        family, row = self.family, _FAMILIES[self.family]
        kv_heads = "attention.head_count_kv"
        for rule, key, wanted in (
            (1 <= self.num_layers <= _MAX_LAYERS, "block_count", f"1 to {_MAX_LAYERS} layers"),
            (self.hidden_size >= 1, "embedding_length", "a size above 0"),
            (self.intermediate_size >= 1, "feed_forward_length", "a size above 0"),
            (self.num_heads >= 1, "attention.head_count", "at least one head"),
            (self.num_kv_heads >= 1, kv_heads, "at least one KV head"),
            (
                self.num_kv_heads >= 1 and self.num_heads % self.num_kv_heads == 0,
                kv_heads,
                "heads that are a multiple of the KV heads",
            ),
            (self.max_positions >= 1, "context_length", "a context of at least one token"),
            (
                self.head_dim >= 2 and self.head_dim % 2 == 0,
                "attention.key_length",
                "an even head size",
            ),
            (
                gguf.integer(f"{family}.attention.value_length", self.head_dim) == self.head_dim,
                "attention.value_length",
                "values of the head size",
            ),
            (self._has_rotation(row), "rope.dimension_count", _WANTED_ROTATION[row.rotates_a_part]),
            (
                row.has_sections or f"{family}.rope.dimension_sections" not in gguf.metadata,
                "rope.dimension_sections",
                "positions of texts alone",
            ),
            (
                row.experts is not None or gguf.integer(f"{family}.expert_count", 0) == 0,
                "expert_count",
                "a dense model without experts",
            ),
            (
                self.window >= 1
                if row.window_period
                else self.window == 0 or self.window >= self.max_positions,
                "attention.sliding_window",
                "a sliding window of at least one position"
                if row.window_period
                else "attention to all positions, without a sliding window",
            ),
            (self.window_pattern >= 1, "attention.sliding_window_pattern", "at least 1"),
            (self.rope_theta > 0, "rope.freq_base", "a RoPE base above 0"),
            (self.window_rope_theta > 0, "rope.freq_base_swa", "a RoPE base above 0"),
            (
                not row.window_period
                or bool(row.window_theta)
                or self.window_rope_theta == self.rope_theta,
                "rope.freq_base_swa",
                f"the base of all layers, {self.rope_theta:g}",
            ),
            (
                gguf.number(f"{family}.final_logit_softcapping", 0.0) == 0.0,
                "final_logit_softcapping",
                "logits that are not capped",
            ),
        ):
            if not rule:
                found = gguf.metadata.get(f"{family}.{key}", "missing")
                raise CheckpointError(
                    f"{gguf.path}: metadata key {family}.{key} is {found}: wanted {wanted}"
                )

    def _has_rotation(self, family: _Family) -> bool:
        """Return whether config.json can say which part of a head is rotated."""
        if not family.rotates_a_part:
            return self.rotated_dim == self.head_dim
        dim = self.rotated_dim
        is_part = 2 <= dim <= self.head_dim and dim % 2 == 0
        return is_part and int(self.head_dim * (dim / self.head_dim)) == dim

    def config(self) -> dict[str, Any]:
        """Return config.json without the special token ids."""
        family = _FAMILIES[self.family]
        optional = {family.optional_biases: self.has_biases} if family.optional_biases else {}
        return {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions,
            **(self._gemma_keys() if self.family == "gemma3" else {"hidden_act": "silu"}),
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            **(
                {"partial_rotary_factor": self.rotated_dim / self.head_dim}
                if family.rotates_a_part
                else {}
            ),
            **({"rope_scaling": self.rope_scaling} if self.rope_scaling else {}),
            **(self._gpt_oss_keys() if self.family == "gpt-oss" else {}),
            **family.biases,
            **optional,
            **self.experts,
            **self.multipliers,
            "tie_word_embeddings": self.has_tied_embeddings,
            "torch_dtype": "float32",
        }

    def _gemma_keys(self) -> dict[str, Any]:
        """Return what config.json of Gemma 3 has besides."""
        is_largest = self.num_layers == _GEMMA_LARGEST_LAYERS
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": (
                self.hidden_size // self.num_heads if is_largest else self.head_dim
            ),
            "rope_local_base_freq": self.window_rope_theta,
            "sliding_window": self.window,
            "sliding_window_pattern": self.window_pattern,
        }

    def _gpt_oss_keys(self) -> dict[str, Any]:
        """Return what config.json of gpt-oss has besides.

        The bounds of its YaRN are not rounded to whole pairs, which no key of a file says.
        llama.cpp rounds them in every model, and so differs a little from what was trained.
        """
        kinds = ("sliding_attention", "full_attention")
        is_full = ((layer + 1) % self.window_pattern == 0 for layer in range(self.num_layers))
        return {
            "sliding_window": self.window,
            "layer_types": [kinds[one] for one in is_full],
            "rope_scaling": {**(self.rope_scaling or {"rope_type": "default"}), "truncate": False},
        }


def _inner_size(gguf: GgufFile, family: str) -> int:
    """Return the outputs of an MLP; files whose layers all have experts may not say it."""
    inner_size = None
    if family == "gpt-oss":
        inner_size = gguf.integer(f"{family}.expert_feed_forward_length")
    return gguf.integer(f"{family}.feed_forward_length", inner_size)
