"""The mixture of experts that a GGUF file describes, in the keys of a config.json of Hugging Face.

Keys and defaults are those of llama.cpp: its `qwen3moe` has experts in every layer, and divides the
weights of the chosen ones by their sum where the file does not say whether to.
"""

from __future__ import annotations

from typing import Any

from common.errors import CheckpointError
from engine.runner.weights.gguf_file import GgufFile

_MOST = 1 << 16
"""Far beyond any model, of experts as of the outputs of one."""
_SOFTMAX, _SIGMOID = (1, "softmax"), (2, "sigmoid")
_SOFTMAX_OF_CHOSEN = (3, "softmax of the chosen experts")
"""Values of `expert_gating_func`; 0: that of the architecture."""


class _Keys:
    """The metadata keys of one architecture, with errors that name them."""

    def __init__(self, gguf: GgufFile, family: str) -> None:
        self._gguf, self._family = gguf, family

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        found = self._gguf.integer(self._key(name), default)
        if not least <= found <= _MOST:
            raise self.refuse(name, found, f"a whole number from {least} to {_MOST}")
        return found

    def flag(self, name: str, default: bool) -> bool:
        return self._gguf.flag(self._key(name), default)

    def number(self, name: str, default: float) -> float:
        return self._gguf.number(self._key(name), default)

    def refuse(self, name: str, found: object, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"{self._gguf.path}: metadata key {self._key(name)} is {found}: wanted {wanted}"
        )

    def _key(self, name: str) -> str:
        return f"{self._family}.{name}"


def qwen3moe_experts(gguf: GgufFile, intermediate_size: int) -> dict[str, Any]:
    """Return the keys of `Qwen3MoeForCausalLM`, of `qwen3moe` and `qwen3vlmoe`.

    Raises `CheckpointError`, naming the metadata key, for what cannot be computed.
    """
    keys = _Keys(gguf, gguf.text("general.architecture"))
    num_experts, num_chosen = _experts_and_chosen(keys)
    _refuse_a_scale(keys)
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": num_chosen,
        "moe_intermediate_size": keys.count(
            "expert_feed_forward_length", intermediate_size // num_chosen
        ),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def llama_experts(gguf: GgufFile, intermediate_size: int) -> dict[str, Any]:
    """Return the keys of `MixtralForCausalLM`, its name among them, raising as above.

    llama.cpp has Mixtral in the architecture of Llama. Without experts there are no keys.
    """
    keys = _Keys(gguf, "llama")
    if keys.count("expert_count", 0, least=0) == 0:
        return {}
    num_experts, num_chosen = _experts_and_chosen(keys)
    _refuse_a_scale(keys)
    if not keys.flag("expert_weights_norm", True):
        raise keys.refuse("expert_weights_norm", False, "true, as this architecture has it")
    inner_size = keys.count("expert_feed_forward_length", intermediate_size)
    if inner_size != intermediate_size:
        raise keys.refuse(
            "expert_feed_forward_length", inner_size, f"feed_forward_length, {intermediate_size}"
        )
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": num_experts,
        "num_experts_per_tok": num_chosen,
    }


def ernie_experts(gguf: GgufFile, intermediate_size: int) -> dict[str, Any]:
    """Return the keys of `Ernie4_5_MoeForCausalLM`, raising `CheckpointError` as above."""
    del intermediate_size
    keys = _Keys(gguf, "ernie4_5-moe")
    num_experts, num_chosen = _experts_and_chosen(keys)
    _refuse_a_scale(keys)
    if not keys.flag("expert_weights_norm", True):
        raise keys.refuse("expert_weights_norm", False, "true, as this architecture has it")
    return {
        "moe_num_experts": num_experts,
        "moe_k": num_chosen,
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.count("expert_shared_count", 0, least=0),
        "moe_layer_start_index": keys.count("leading_dense_block_count", 0, least=0),
        "moe_layer_end_index": -1,
        "moe_layer_interval": keys.count("interleave_moe_layer_step", 1),
    }


def gpt_oss_experts(gguf: GgufFile, intermediate_size: int) -> dict[str, Any]:
    """Return the keys of `GptOssForCausalLM`, raising `CheckpointError` as above."""
    keys = _Keys(gguf, "gpt-oss")
    num_experts, num_chosen = _experts_and_chosen(keys, _SOFTMAX_OF_CHOSEN)
    _refuse_a_scale(keys)
    return {
        "num_local_experts": num_experts,
        "num_experts_per_tok": num_chosen,
        "intermediate_size": keys.count("expert_feed_forward_length", intermediate_size),
    }


def glm4moe_experts(gguf: GgufFile, intermediate_size: int) -> dict[str, Any]:
    """Return the keys of `Glm4MoeForCausalLM`, raising `CheckpointError` as above.

    As in llama.cpp the weights of the chosen experts are divided by their sum only if the file says
    so, and a scale of 0 is none.
    """
    del intermediate_size
    keys = _Keys(gguf, "glm4moe")
    num_experts, num_chosen = _experts_and_chosen(keys, _SIGMOID)
    # Stored as float32: seven digits give back the number that was meant.
    scale = float(f"{keys.number('expert_weights_scale', 0.0):.7g}")
    return {
        "n_routed_experts": num_experts,
        "num_experts_per_tok": num_chosen,
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "n_shared_experts": keys.count("expert_shared_count", least=0),
        "first_k_dense_replace": keys.count("leading_dense_block_count", 0, least=0),
        "routed_scaling_factor": scale or 1.0,
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in gguf.tensors,
    }


def _experts_and_chosen(keys: _Keys, function: tuple[int, str] = _SOFTMAX) -> tuple[int, int]:
    num_experts, num_chosen = keys.count("expert_count"), keys.count("expert_used_count")
    if num_chosen > num_experts:
        raise keys.refuse("expert_used_count", num_chosen, f"at most {num_experts}, expert_count")
    number, name = function
    if (found := keys.count("expert_gating_func", 0, least=0)) not in (0, number):
        raise keys.refuse("expert_gating_func", found, f"{number}, {name}")
    if (groups := keys.count("expert_group_count", 0, least=0)) > 1:
        raise keys.refuse("expert_group_count", groups, "experts without groups")
    return num_experts, num_chosen


def _refuse_a_scale(keys: _Keys) -> None:
    if (scale := keys.number("expert_weights_scale", 1.0)) not in (0.0, 1.0):
        raise keys.refuse("expert_weights_scale", scale, "1: weights without a scale")
