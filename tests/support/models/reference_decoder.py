"""The decoder in float64 numpy, written from the papers and without a cache: the slow reference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support.tiny_kin import usual_name


def _norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    scaled: np.ndarray = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight
    return scaled


_GPT_OSS_SCALING: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """How rotary positions are scaled; gpt-oss has a way where its file says nothing."""
    default = _GPT_OSS_SCALING if config["model_type"] == "gpt_oss" else {}
    return config.get("rope_parameters") or config.get("rope_scaling") or default


def _rotated(config: Mapping[str, Any], head_dim: int) -> int:
    """How many of a head's first dimensions are rotated."""
    scaling = _scaling(config)
    share = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return round(head_dim * float(share))


def _frequencies(config: Mapping[str, Any], head_dim: int, window: int) -> np.ndarray:
    """Radians per position of the pairs of a head whose first `head_dim` numbers are rotated."""
    scaling = _scaling(config)
    scaling = scaling.get("sliding_attention" if window else "full_attention", scaling)
    if window and "rope_local_base_freq" in config:
        scaling = {"rope_theta": config["rope_local_base_freq"]}
    theta: float = scaling.get("rope_theta") or config.get("rope_theta", 150000.0)
    frequencies = np.array([theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2)])
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        frequencies /= scaling["factor"]
    if kind == "longrope":
        frequencies /= scaling["short_factor"]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
        for i, frequency in enumerate(frequencies):
            wavelength = 2 * math.pi / frequency
            if wavelength > original / low:
                frequencies[i] = frequency / factor
            elif wavelength > original / high:
                smooth = (original / wavelength - low) / (high - low)
                frequencies[i] = (1 - smooth) * frequency / factor + smooth * frequency
    if kind == "yarn":
        bounds = []  # the pairs, as fractions, that turn beta_fast and beta_slow times
        for turns in (scaling.get("beta_fast", 32), scaling.get("beta_slow", 1)):
            wavelength = scaling["original_max_position_embeddings"] / turns
            bounds.append(head_dim / 2 * math.log(wavelength / (2 * math.pi), theta))
        if scaling.get("truncate", True):
            bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
        first, last = max(bounds[0], 0), min(bounds[1], head_dim - 1)
        for i, frequency in enumerate(frequencies):
            stretched = min(max((i - first) / (last - first), 0), 1)
            slow = frequency / scaling["factor"]
            frequencies[i] = stretched * slow + (1 - stretched) * frequency
    return frequencies


def _length(config: Mapping[str, Any]) -> float:
    """By what YaRN and LongRoPE multiply what they rotate; 1 for other kinds."""
    scaling = _scaling(config)
    if scaling.get("type") == "longrope":
        original = config["original_max_position_embeddings"]
        return math.sqrt(1 + math.log(config["max_position_embeddings"] / original, original))
    if scaling.get("rope_type", scaling.get("type")) != "yarn":
        return 1.0
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    growth = math.log(scaling["factor"]) / 10
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return float((1 + growth * scaling["mscale"]) / (1 + growth * scaling["mscale_all_dim"]))
    return 1 + growth


def rotate(x: np.ndarray, frequencies: np.ndarray, is_interleaved: bool) -> np.ndarray:
    """Rotate `[heads, positions, head_dim]`; neighbours or halves of a head are the pairs."""
    angles = np.arange(x.shape[1])[:, None] * frequencies
    half = x.shape[2] // 2
    pairs = (x[..., 0::2], x[..., 1::2]) if is_interleaved else (x[..., :half], x[..., half:])
    turned = (pairs[0] + 1j * pairs[1]) * np.exp(1j * angles)
    if is_interleaved:
        return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def causal_attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    window: int = 0,
    divisor: float = 0,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """`[heads, positions, head_dim]` from queries and as many, or fewer, key and value heads.

    Each position attends to the last `window` ones up to itself; 0: to all. Scores are divided by
    the root of `divisor`; 0: of the head's size. `sinks` has a score for each head, which joins the
    softmax as that of a key without a value.
    """
    key, value = (np.repeat(x, len(query) // len(x), axis=0) for x in (key, value))
    scores = query @ key.swapaxes(1, 2) / math.sqrt(divisor or query.shape[2])
    offset = key.shape[1] - query.shape[1]  # queries are the last positions
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1 + offset)] = -np.inf
    if window:
        scores[:, np.tril(np.ones(scores.shape[1:], bool), offset - window)] = -np.inf
    if sinks is not None:
        column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, column], axis=2)
        value = np.concatenate([value, np.zeros_like(value[:, :1])], axis=1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    attended: np.ndarray = weights / weights.sum(-1, keepdims=True) @ value
    return attended


def _divisor(config: Mapping[str, Any]) -> float:
    """What the root of divides scores; 0: the size of a head."""
    if "attention_multiplier" in config:
        return float(config["attention_multiplier"]) ** -2
    return float(config.get("query_pre_attn_scalar", 0))


def _window(config: Mapping[str, Any], layer: int) -> int:
    """How many positions a layer attends to; 0: to all."""
    if config["model_type"] == "mistral":
        return int(config.get("sliding_window") or 0)
    if "sliding_window_pattern" in config:
        is_windowed = bool((layer + 1) % config["sliding_window_pattern"])
    elif "layer_types" in config:
        is_windowed = config["layer_types"][layer] == "sliding_attention"
    elif config["model_type"] == "gpt_oss":
        is_windowed = layer % 2 == 0
    else:
        is_last = layer >= config.get("max_window_layers", 0)
        is_windowed = bool(config.get("use_sliding_window")) and is_last
    return int(config["sliding_window"]) if is_windowed else 0


def _layer(
    config: Mapping[str, Any],
    w: Mapping[str, np.ndarray],
    prefix: str,
    x: np.ndarray,
    window: int = 0,
    is_rotated: bool = True,
) -> np.ndarray:
    """One decoder layer over all positions `[positions, hidden_size]`."""
    epsilon, num_heads = config["rms_norm_eps"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    rotated = _rotated(config, head_dim)
    frequencies = _frequencies(config, rotated, window) * is_rotated
    kind = config["model_type"]
    is_gemma = kind == "gemma3_text"
    is_interleaved = kind.startswith("ernie4_5") or kind in ("glm", "glm4")

    def linear(values: np.ndarray, name: str) -> np.ndarray:
        product: np.ndarray = values @ w[f"{prefix}{name}.weight"].T
        return product + w.get(f"{prefix}{name}.bias", 0.0)

    def heads(values: np.ndarray) -> np.ndarray:
        return values.reshape(len(x), -1, head_dim).swapaxes(0, 1)

    def norm(values: np.ndarray, name: str) -> np.ndarray:
        return _norm(values, w[f"{prefix}{name}.weight"] + is_gemma, epsilon)

    normed = norm(x, "input_layernorm")
    q, k, v = (heads(linear(normed, f"self_attn.{n}_proj")) for n in "qkv")
    if f"{prefix}self_attn.q_norm.weight" in w:
        q, k = norm(q, "self_attn.q_norm"), norm(k, "self_attn.k_norm")
    for values in (q, k):
        turned = rotate(values[..., :rotated], frequencies, is_interleaved)
        values[..., :rotated] = _length(config) * turned
    share = config.get("residual_multiplier", 1.0)
    divisor, sinks = _divisor(config), w.get(f"{prefix}self_attn.sinks")
    attended = causal_attention(q, k, v, window, divisor, sinks)
    attended = attended.swapaxes(0, 1).reshape(len(x), -1)
    if is_gemma:
        x = x + norm(linear(attended, "self_attn.o_proj"), "post_attention_layernorm")
        normed = norm(x, "pre_feedforward_layernorm")
        gate, up = linear(normed, "mlp.gate_proj"), linear(normed, "mlp.up_proj")
        gate = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        added = norm(linear(gate * up, "mlp.down_proj"), "post_feedforward_layernorm")
        summed: np.ndarray = x + added
        return summed
    added = linear(attended, "self_attn.o_proj")
    x = x + share * (norm(added, "post_self_attn_layernorm") if kind == "glm4" else added)
    normed = norm(x, "post_attention_layernorm")

    def mlp(values: np.ndarray, part: str) -> np.ndarray:
        gate, up = linear(values, f"{part}.gate_proj"), linear(values, f"{part}.up_proj")
        steepness = 1.0
        if kind == "gpt_oss":
            steepness, limit = config.get("swiglu_alpha", 1.702), config.get("swiglu_limit", 7.0)
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
        return linear(gate / (1 + np.exp(-steepness * gate)) * up, f"{part}.down_proj")

    after: np.ndarray
    if f"{prefix}mlp.gate.weight" not in w:
        added = mlp(normed, "mlp")
        after = x + share * (norm(added, "post_mlp_layernorm") if kind == "glm4" else added)
        return after
    has_shared = f"{prefix}mlp.shared_experts.up_proj.weight" in w
    outputs = mlp(normed, "mlp.shared_experts") if has_shared else np.zeros_like(x)
    for row, chosen in enumerate(_chosen_experts(config, linear(normed, "mlp.gate"), w, prefix)):
        for index, weight in chosen:
            outputs[row] += weight * mlp(normed[row], f"mlp.experts.{index}")
    after = x + outputs
    return after


def _chosen_experts(
    config: Mapping[str, Any], products: np.ndarray, w: Mapping[str, np.ndarray], prefix: str
) -> list[list[tuple[int, float]]]:
    """The experts of each row of products with the gate, with their weights."""
    if config["model_type"] == "glm4_moe":
        scores = 1 / (1 + np.exp(-products))
        bias = w[f"{prefix}mlp.gate.e_score_correction_bias"]
    else:
        scores = np.exp(products - products.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        no_bias = np.zeros((1, len(scores[0])))
        bias = w.get(f"{prefix}mlp.moe_statics.e_score_correction_bias", no_bias)[0]
    num_chosen = config.get("num_experts_per_tok") or config["moe_k"]
    chosen = []
    for row in scores:
        best = np.argsort(-(row + bias), kind="stable")[:num_chosen]
        total = sum(row[i] for i in best) if config.get("norm_topk_prob", True) else 1.0
        scale = config.get("routed_scaling_factor", 1.0) / total
        chosen.append([(int(i), float(row[i] * scale)) for i in best])
    return chosen


def _wide(config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All weights in float64; a fused one as its parts."""
    wide: dict[str, np.ndarray] = {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * head_dim
    for stored, values in weights.items():
        name = usual_name(stored)
        parts = {name: values.astype(np.float64)}
        if ".qkv_proj." in name:
            rows = np.split(parts[name], [len(values) - 2 * kv, len(values) - kv])
            parts = {name.replace("qkv", n): one for n, one in zip("qkv", rows, strict=True)}
        elif ".gate_up_proj." in name:
            gate, up = np.split(parts[name], 2)
            parts = {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        wide |= parts
    return wide


def _head(w: Mapping[str, np.ndarray]) -> np.ndarray:
    return w.get("lm_head.weight", w["model.embed_tokens.weight"])


def _final_states(
    config: Mapping[str, Any], w: Mapping[str, np.ndarray], token_ids: list[int]
) -> np.ndarray:
    """Hidden states after the final norm."""
    x = w["model.embed_tokens.weight"][token_ids]
    is_gemma = config["model_type"] == "gemma3_text"
    if is_gemma:
        x = x * math.sqrt(config["hidden_size"])
    x = x * config.get("embedding_multiplier", 1.0)
    for layer in range(config["num_hidden_layers"]):
        is_rotated = bool(config.get("no_rope_layers", [1] * (layer + 1))[layer])
        x = _layer(config, w, f"model.layers.{layer}.", x, _window(config, layer), is_rotated)
    return _norm(x, w["model.norm.weight"] + is_gemma, config["rms_norm_eps"])


def reference_logits(
    config: Mapping[str, Any], weights: Mapping[str, np.ndarray], token_ids: list[int]
) -> np.ndarray:
    """Logits `[len(token_ids), vocab_size]` of one sequence."""
    w = _wide(config, weights)
    logits: np.ndarray = _final_states(config, w, token_ids) @ _head(w).T
    logits /= config.get("logits_scaling", 1.0)
    return logits


def reference_drafts(
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    mtp: Mapping[str, np.ndarray],
    token_ids: list[int],
    count: int,
    head: np.ndarray | None = None,
) -> list[int]:
    """What an MTP layer, under any published names, drafts behind `token_ids`.

    `head` stands for the target's where it is given. Fails when a draft is so close to another
    that rounding could decide.
    """
    w, m = _wide(config, weights), _wide(config, mtp)
    epsilon, n = config["rms_norm_eps"], config["num_hidden_layers"]

    def project(first: np.ndarray, second: np.ndarray, name: str) -> np.ndarray:
        joined: np.ndarray = np.concatenate([first, second]) @ m[f"{name}.weight"].T
        return joined + m.get(f"{name}.bias", 0.0)

    def join(token: int, hidden: np.ndarray) -> np.ndarray:
        embedded = w["model.embed_tokens.weight"][token]
        if "model.mtp_layers.0.input_proj.weight" in m:
            return project(
                _norm(hidden, m["model.mtp_layers.0.hidden_layernorm.weight"], epsilon),
                _norm(embedded, m["model.mtp_layers.0.token_layernorm.weight"], epsilon),
                "model.mtp_layers.0.input_proj",
            )
        if "model.mtp_linear_proj.0.weight" in m:
            return project(
                _norm(embedded, m["model.mtp_emb_norm.0.weight"], epsilon),
                _norm(hidden, m["model.mtp_hidden_norm.0.weight"], epsilon),
                "model.mtp_linear_proj.0",
            )
        return project(
            _norm(embedded, m[f"model.layers.{n}.enorm.weight"], epsilon),
            _norm(hidden, m[f"model.layers.{n}.hnorm.weight"], epsilon),
            f"model.layers.{n}.eh_proj",
        )

    def run(x: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The last output: for the head, and for the next draft."""
        if "model.mtp_layers.0.input_proj.weight" in m:
            out = _layer(config, m, "model.mtp_layers.0.", np.array(x))[-1]
            out = _norm(out, m["model.mtp_layers.0.final_layernorm.weight"], epsilon)
            return out, out
        if "model.mtp_linear_proj.0.weight" in m:
            out = _layer(config, m, "model.mtp_block.0.", np.array(x))[-1]
            out = _norm(out, w["model.norm.weight"], epsilon)
            return out, out
        out = _layer(config, m, f"model.layers.{n}.", np.array(x))[-1]
        return _norm(out, m[f"model.layers.{n}.shared_head.norm.weight"], epsilon), out

    states = _final_states(config, w, token_ids[:-1])
    x = [join(token, h) for token, h in zip(token_ids[1:], states, strict=True)]
    vocabulary = m.get("draft_token_ids", np.arange(config["vocab_size"])).astype(int)
    drafts: list[int] = []
    while len(drafts) < count:
        seen, hidden = run(x)
        logits = (_head(w) if head is None else head)[vocabulary] @ seen
        second, first = np.argsort(logits)[-2:]
        assert logits[first] - logits[second] > 2e-4, "too close to tell"
        drafts.append(int(vocabulary[first]))
        x.append(join(drafts[-1], hidden))
    return drafts
