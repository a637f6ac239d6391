"""Layers whose MLP is a mixture of experts, as config.json states them.

The *gate* of a layer's experts has a row of weights for each. A token's scores are the softmax, or
the sigmoids, of their products with its normed state, in float32; it is sent to the experts with
the highest scores, plus their bias where a model has one, and of equal ones to the first. Their
outputs are added, each times its score, with the output of a shared MLP where a model has one.

The arithmetic is that of the models qwen3_moe, ernie4_5_moe, glm4_moe, gpt_oss and mixtral of
transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.runner.weights.spec.config_values import ConfigValues

_MOST_EXPERTS = 1 << 17
"""The experts of all layers, far beyond any model: their names and shapes would take memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSwish:
    """What some experts compute of gate and up: `(up + 1) * gate * sigmoid(steepness * gate)`.

    Gate is at most `limit`, and up is between `-limit` and `limit`, before.
    """

    steepness: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMixture:
    """The experts of the layers in `layers`, which is sorted; the other layers have one MLP.

    Each of `num_experts` is an MLP of `inner_size` outputs of gate and up, and a token is sent to
    `num_chosen` of them. `shared_size` is that of an MLP for all tokens (0: none).
    `is_normalised`: scores of the chosen experts are divided by their sum, or by `least_sum` if
    that is larger. `has_choice_bias`: a bias is added to the scores by which experts are chosen,
    and not to those that weight them. `is_sigmoid`: scores are sigmoids, each of one product, in
    place of a softmax. `weight_scale`: what weighs an expert's output is multiplied by it.
    `has_gate_bias`: each product with the gate has a bias. `has_biases`: each projection of an
    expert has one. `clamped_swish` takes the place of `silu(gate) * up` (None: it does not).
    """

    layers: tuple[int, ...]
    num_experts: int
    num_chosen: int
    inner_size: int
    shared_size: int
    is_normalised: bool
    least_sum: float
    has_choice_bias: bool
    is_sigmoid: bool = False
    weight_scale: float = 1.0
    has_gate_bias: bool = False
    has_biases: bool = False
    clamped_swish: ClampedSwish | None = None

    @property
    def outputs_of_a_token(self) -> int:
        """Outputs of gate, and as many of up, that are computed for a token in a layer."""
        return self.num_chosen * self.inner_size + self.shared_size


def _qwen3(config: ConfigValues, num_layers: int) -> ExpertMixture | None:
    step = config.integer("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(
        type(layer) is int and 0 <= layer < num_layers for layer in dense
    ):
        raise config.refuse("mlp_only_layers", f"a list of layers, 0 to {num_layers - 1}, or null")
    layers = (i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense)
    count = "num_local_experts" if config.has("num_local_experts") else "num_experts"
    return _checked(
        config,
        (count, "num_experts_per_tok"),
        ExpertMixture(
            layers=tuple(layers),
            num_experts=config.integer(count, 128),
            num_chosen=config.integer("num_experts_per_tok", 8),
            inner_size=config.integer("moe_intermediate_size", 768),
            shared_size=0,
            is_normalised=config.flag("norm_topk_prob", False),
            least_sum=0.0,
            has_choice_bias=False,
        ),
    )


def _mixtral(config: ConfigValues, num_layers: int) -> ExpertMixture | None:
    return _checked(
        config,
        ("num_local_experts", "num_experts_per_tok"),
        ExpertMixture(
            layers=tuple(range(num_layers)),
            num_experts=config.integer("num_local_experts", 8),
            num_chosen=config.integer("num_experts_per_tok", 2),
            inner_size=config.integer("intermediate_size"),
            shared_size=0,
            is_normalised=True,
            least_sum=0.0,
            has_choice_bias=False,
        ),
    )


def _ernie4_5(config: ConfigValues, num_layers: int) -> ExpertMixture | None:
    if config.flag("use_bias", False):
        raise config.refuse("use_bias", "false: with experts the output matrix has a bias too")
    inner_size = config.integer("moe_intermediate_size", 1536)
    num_shared = config.integer("moe_num_shared_experts", 2, least=0)
    return _checked(
        config,
        ("moe_num_experts", "moe_k"),
        ExpertMixture(
            layers=_ernie4_5_layers(config, num_layers),
            num_experts=config.integer("moe_num_experts", 64),
            num_chosen=config.integer("moe_k", 6),
            inner_size=inner_size,
            shared_size=num_shared * inner_size,
            is_normalised=True,
            least_sum=config.number("moe_norm_min", 1e-12),
            has_choice_bias=True,
        ),
    )


def _ernie4_5_layers(config: ConfigValues, num_layers: int) -> tuple[int, ...]:
    interval = config.integer("moe_layer_interval", 1)
    first = _layer(config, "moe_layer_start_index", 1)
    last = _layer(config, "moe_layer_end_index", -1)
    last = num_layers - 1 if last == -1 else last
    return tuple(i for i in range(num_layers) if (i + 1) % interval == 0 and first <= i <= last)


def _layer(config: ConfigValues, key: str, default: int) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < -1:
        raise config.refuse(key, "the index of a layer, or -1 for the last one")
    return value


def _gpt_oss(config: ConfigValues, num_layers: int) -> ExpertMixture | None:
    num_chosen = config.integer("num_experts_per_tok", 4)
    if config.get("experts_per_token") not in (None, num_chosen):
        raise config.refuse("experts_per_token", f"num_experts_per_tok, {num_chosen}")
    return _checked(
        config,
        ("num_local_experts", "num_experts_per_tok"),
        ExpertMixture(
            layers=tuple(range(num_layers)),
            num_experts=config.integer("num_local_experts", 128),
            num_chosen=num_chosen,
            inner_size=config.integer("intermediate_size", 2880),
            shared_size=0,
            # The softmax of the chosen products is that of all, divided by the sum of the chosen.
            is_normalised=True,
            least_sum=0.0,
            has_choice_bias=False,
            has_gate_bias=True,
            has_biases=True,
            clamped_swish=ClampedSwish(
                steepness=config.number("swiglu_alpha", 1.702),
                limit=config.number("swiglu_limit", 7.0),
            ),
        ),
    )


def _glm4(config: ConfigValues, num_layers: int) -> ExpertMixture | None:
    for key in ("n_group", "topk_group"):
        if config.integer(key, 1) != 1:
            raise config.refuse(key, "1: all experts are in one group")
    inner_size = config.integer("moe_intermediate_size", 1408)
    num_shared = config.integer("n_shared_experts", 1, least=0)
    return _checked(
        config,
        ("n_routed_experts", "num_experts_per_tok"),
        ExpertMixture(
            layers=tuple(range(config.integer("first_k_dense_replace", 1, least=0), num_layers)),
            num_experts=config.integer("n_routed_experts", 128),
            num_chosen=config.integer("num_experts_per_tok", 8),
            inner_size=inner_size,
            shared_size=num_shared * inner_size,
            is_normalised=config.flag("norm_topk_prob", True),
            least_sum=1e-20,
            has_choice_bias=True,
            is_sigmoid=True,
            weight_scale=config.number("routed_scaling_factor", 1.0),
        ),
    )


def _checked(
    config: ConfigValues, keys: tuple[str, str], mixture: ExpertMixture
) -> ExpertMixture | None:
    """Return the mixture, None if no layer has one.

    Raises `CheckpointError` for more chosen experts than there are, and for too many in all layers.
    """
    all_experts, chosen = keys
    num_layers = max(len(mixture.layers), 1)
    if mixture.num_experts * num_layers > _MOST_EXPERTS:
        raise config.refuse(
            all_experts, f"at most {_MOST_EXPERTS // num_layers} in each of {num_layers} layers"
        )
    if mixture.num_chosen > mixture.num_experts:
        raise config.refuse(chosen, f"at most {all_experts}, {mixture.num_experts}")
    return mixture if mixture.layers else None


READ_EXPERTS: Mapping[str, Callable[[ConfigValues, int], ExpertMixture | None]] = {
    "Qwen3MoeForCausalLM": _qwen3,
    "MixtralForCausalLM": _mixtral,
    "Ernie4_5_MoeForCausalLM": _ernie4_5,
    "GptOssForCausalLM": _gpt_oss,
    "Glm4MoeForCausalLM": _glm4,
}
"""What reads the mixture from config.json, for this many layers, by architecture."""
