"""The `llama` architecture in GGUF's words and in Hugging Face's: sizes and tensor names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from common.errors import CheckpointError
from pdserve.checkpoints.gguf_file import GgufFile, GgufTensor
from pdserve.checkpoints.rope_factors import (
    ROPE_FACTORS_TENSOR,
    llama3_scaling_factor,
    rope_scaling,
)

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama decoder, and whether its output matrix is the embedding.

    `rope_factor` is that of Llama 3's scaling of RoPE, None without scaling.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    has_tied_embeddings: bool
    rope_factor: float | None = None

    @classmethod
    def of(cls, gguf: GgufFile) -> Self:
        """Return the sizes `gguf` states. Raises CheckpointError where they cannot be supported."""
        num_heads = gguf.integer("llama.attention.head_count")
        hidden_size = gguf.integer("llama.embedding_length")
        shape = cls(
            num_layers=gguf.integer("llama.block_count"),
            hidden_size=hidden_size,
            intermediate_size=gguf.integer("llama.feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=gguf.integer("llama.attention.head_count_kv", num_heads),
            head_dim=gguf.integer("llama.attention.key_length", hidden_size // max(num_heads, 1)),
            vocab_size=len(gguf.texts("tokenizer.ggml.tokens")),
            max_positions=gguf.integer("llama.context_length"),
            # Stored as float32: seven digits give back the number that was meant.
            rms_norm_eps=float(f"{gguf.number('llama.attention.layer_norm_rms_epsilon'):.7g}"),
            rope_theta=gguf.number("llama.rope.freq_base", 10000.0),
            has_tied_embeddings="output.weight" not in gguf.tensors,
        )
        shape._check(gguf)
        rope_factor = llama3_scaling_factor(gguf, shape.head_dim, shape.rope_theta)
        return replace(shape, rope_factor=rope_factor)

    def _check(self, gguf: GgufFile) -> None:
        for rule, wanted in (
            (1 <= self.num_layers <= _MAX_LAYERS, f"1 to {_MAX_LAYERS} layers"),
            (min(self.hidden_size, self.intermediate_size, self.vocab_size) >= 1, "sizes above 0"),
            (self.num_kv_heads >= 1, "at least one KV head"),
            (self.max_positions >= 1, "a context of at least one token"),
            (
                self.num_kv_heads >= 1 and self.num_heads % self.num_kv_heads == 0,
                "heads that are a multiple of the KV heads",
            ),
            (self.head_dim >= 2 and self.head_dim % 2 == 0, "an even head size"),
            (
                gguf.integer("llama.rope.dimension_count", self.head_dim) == self.head_dim,
                "RoPE over the whole head",
            ),
            (gguf.integer("llama.expert_count", 0) == 0, "a dense model without experts"),
            (self.rope_theta > 0, "a RoPE base above 0"),
            (
                gguf.text("llama.rope.scaling.type", "none") == "none",
                "RoPE without scaling, or with Llama 3's",
            ),
        ):
            if not rule:
                raise CheckpointError(f"{gguf.path}: {self}: wanted {wanted}")

    def config(self) -> dict[str, Any]:
        """Return config.json without the special token ids."""
        scaling = {} if self.rope_factor is None else rope_scaling(self.rope_factor)
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            **({"rope_scaling": scaling} if scaling else {}),
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": self.has_tied_embeddings,
            "torch_dtype": "float32",
        }

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "attn_norm": (self.hidden_size,),
            "attn_q": (queries, self.hidden_size),
            "attn_k": (keys, self.hidden_size),
            "attn_v": (keys, self.hidden_size),
            "attn_output": (self.hidden_size, queries),
            "ffn_norm": (self.hidden_size,),
            "ffn_gate": (self.intermediate_size, self.hidden_size),
            "ffn_up": (self.intermediate_size, self.hidden_size),
            "ffn_down": (self.hidden_size, self.intermediate_size),
        }

    def names_and_shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return GGUF tensor name → (Hugging Face name, shape), in the order they are written."""
        table: dict[str, tuple[str, tuple[int, ...]]] = {
            "token_embd.weight": ("model.embed_tokens.weight", (self.vocab_size, self.hidden_size))
        }
        for layer in range(self.num_layers):
            for part, shape in self._layer_shapes().items():
                name = f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
                table[f"blk.{layer}.{part}.weight"] = (name, shape)
        table["output_norm.weight"] = ("model.norm.weight", (self.hidden_size,))
        if not self.has_tied_embeddings:
            table["output.weight"] = ("lm_head.weight", (self.vocab_size, self.hidden_size))
        return table


def expected_tensors(gguf: GgufFile, shape: LlamaShape) -> dict[str, GgufTensor]:
    """Return the tensors under their Hugging Face names: exactly those of a Llama decoder.

    Raises `CheckpointError` when one is missing, has another shape, or is not known: without a bias
    the decoder would compute another model.
    """
    table = shape.names_and_shapes()
    if unknown := sorted(gguf.tensors.keys() - table.keys() - {ROPE_FACTORS_TENSOR}):
        raise CheckpointError(f"{gguf.path}: tensor {unknown[0]} is not part of a Llama decoder")
    tensors = {}
    for gguf_name, (name, wanted) in table.items():
        tensor = gguf.tensors.get(gguf_name)
        if tensor is None:
            raise CheckpointError(f"{gguf.path}: tensor {gguf_name} is missing")
        if tensor.shape != wanted:
            raise CheckpointError(
                f"{gguf.path}: tensor {gguf_name} has shape {tensor.shape}: wanted {wanted}"
            )
        tensors[name] = tensor
    return tensors
