"""The tensors of a decoder: their names, as Hugging Face folders have them, and their shapes."""

from __future__ import annotations

from engine.runner.weights.spec.expert_mixture import ExpertMixture
from engine.runner.weights.spec.model_spec import DecoderSpec

EXPERT_GATE = "mlp.gate"
"""The projection that scores a layer's experts; expert number n is `mlp.experts.n`."""
CHOICE_BIAS = "mlp.moe_statics.e_score_correction_bias"
SHARED_EXPERTS = "mlp.shared_experts"
SINKS = "self_attn.sinks"
"""A layer's score of each query head that has no value."""


def expected_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Return all tensors that the decoder reads: shapes by Hugging Face names."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        shapes |= layer_shapes(spec, f"model.layers.{layer}.", spec.mixture_of(layer))
    shapes["model.norm.weight"] = (hidden,)
    if not spec.has_tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def layer_shapes(
    spec: DecoderSpec, prefix: str, mixture: ExpertMixture | None = None
) -> dict[str, tuple[int, ...]]:
    """Return all tensors of one layer: shapes by name, which begins with `prefix`.

    `mixture` is that of the layer, None for one with a single MLP.
    """
    hidden = spec.hidden_size
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv_bias, output_bias = spec.has_qkv_bias, spec.has_output_bias
    attention = {
        "self_attn.q_proj": (query, hidden, qkv_bias),
        "self_attn.k_proj": (kv, hidden, qkv_bias),
        "self_attn.v_proj": (kv, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, query, output_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for norm, linears in (("input", attention), ("post_attention", _mlp_linears(spec, mixture))):
        shapes[f"{prefix}{norm}_layernorm.weight"] = (hidden,)
        for name, (num_outputs, num_inputs, has_bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (num_outputs, num_inputs)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (num_outputs,)
    if spec.has_sinks:
        shapes[f"{prefix}{SINKS}"] = (spec.num_heads,)
    if mixture is not None and mixture.has_choice_bias:
        shapes[f"{prefix}{CHOICE_BIAS}"] = (1, mixture.num_experts)
    if spec.has_output_norms:
        for norm in ("pre_feedforward", "post_feedforward"):
            shapes[f"{prefix}{norm}_layernorm.weight"] = (hidden,)
    if spec.has_head_norms:
        shapes[f"{prefix}self_attn.q_norm.weight"] = (spec.head_dim,)
        shapes[f"{prefix}self_attn.k_norm.weight"] = (spec.head_dim,)
    return shapes


def _mlp_linears(
    spec: DecoderSpec, mixture: ExpertMixture | None
) -> dict[str, tuple[int, int, bool]]:
    """Return outputs, inputs and whether there is a bias, for each projection after attention."""
    hidden = spec.hidden_size

    def mlp(part: str, inner: int, has_bias: bool) -> dict[str, tuple[int, int, bool]]:
        return {
            f"{part}.gate_proj": (inner, hidden, has_bias),
            f"{part}.up_proj": (inner, hidden, has_bias),
            f"{part}.down_proj": (hidden, inner, has_bias),
        }

    if mixture is None:
        return mlp("mlp", spec.intermediate_size, spec.has_mlp_bias)
    linears = {EXPERT_GATE: (mixture.num_experts, hidden, mixture.has_gate_bias)}
    for index in range(mixture.num_experts):
        linears |= mlp(f"mlp.experts.{index}", mixture.inner_size, mixture.has_biases)
    if mixture.shared_size:
        linears |= mlp(SHARED_EXPERTS, mixture.shared_size, spec.has_mlp_bias)
    return linears
