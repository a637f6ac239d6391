"""Weights of files that call some tensors of a layer otherwise than `decoder_tensors` does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from engine.runner.weights.derived.derived_weights import DerivedWeights
from engine.runner.weights.spec.decoder_tensors import CHOICE_BIAS, EXPERT_GATE
from engine.runner.weights.spec.model_spec import DecoderSpec
from engine.runner.weights.tensor_source import TensorSource

_OF_ARCHITECTURES: Mapping[str, Mapping[str, str]] = {
    "Glm4ForCausalLM": {
        "post_attention_layernorm.weight": "post_self_attn_layernorm.weight",
        "pre_feedforward_layernorm.weight": "post_attention_layernorm.weight",
        "post_feedforward_layernorm.weight": "post_mlp_layernorm.weight",
    },
    "Glm4MoeForCausalLM": {CHOICE_BIAS: "mlp.gate.e_score_correction_bias"},
}
"""What the files call the tensors of a layer whose names end so."""
_MIXTRAL = ".block_sparse_moe."
"""A part of all names of experts in files of Mixtral that have a tensor for each expert."""
_MIXTRAL_PARTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_LAYERS = "model.layers."


def stored_shapes(
    shapes: Mapping[str, tuple[int, ...]], spec: DecoderSpec
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors in the files, under their names there, in the same order."""
    names = _OF_ARCHITECTURES.get(spec.architecture, {})
    found = {}
    for name, shape in shapes.items():
        stored = _renamed(name, names)
        is_choice_bias = stored != name and name.endswith(CHOICE_BIAS)
        found[stored] = shape[1:] if is_choice_bias else shape
    return found


def with_our_names(source: TensorSource, spec: DecoderSpec) -> TensorSource:
    """Return `source` with its tensors under the names of `decoder_tensors`."""
    names = _OF_ARCHITECTURES.get(spec.architecture)
    if spec.experts is not None and any(_MIXTRAL in name for name in source.names()):
        names = dict(_names_of_mixtral(spec.experts.num_experts))
    return source if names is None else OtherNames(source, names)


def _names_of_mixtral(num_experts: int) -> Iterator[tuple[str, str]]:
    """Yield our name and that of the files for each tensor of a layer's experts."""
    for kind in ("weight", "bias"):
        yield f"{EXPERT_GATE}.{kind}", f"block_sparse_moe.gate.{kind}"
        for index in range(num_experts):
            for our, stored in _MIXTRAL_PARTS.items():
                part = f"experts.{index}"
                yield f"mlp.{part}.{our}.{kind}", f"block_sparse_moe.{part}.{stored}.{kind}"


class OtherNames(DerivedWeights):
    """The tensors of `source`, where some are called otherwise.

    The bias of a choice of experts has one dimension in the files, and a first one of one here.
    """

    def __init__(self, source: TensorSource, names: Mapping[str, str]) -> None:
        """Take the names of a layer's tensors in the files, by ours; it reads nothing."""
        super().__init__(source)
        self._stored_names, self._our_names = names, {stored: our for our, stored in names.items()}

    def names(self) -> Iterable[str]:
        return [_renamed(name, self._our_names) for name in self._source.names()]

    def shape(self, name: str) -> tuple[int, ...]:
        shape = super().shape(name)
        return (1, math.prod(shape)) if name.endswith(CHOICE_BIAS) else shape

    def check(
        self,
        source: Path,
        name: str,
        shape: tuple[int, ...],
        dtypes: Sequence[str] | None = None,
    ) -> None:
        wanted = shape[1:] if name.endswith(CHOICE_BIAS) else shape
        super().check(source, name, wanted, dtypes)

    def stored_name(self, name: str) -> str:
        return _renamed(name, self._stored_names)


def _renamed(name: str, names: Mapping[str, str]) -> str:
    layer, _, rest = name.removeprefix(_LAYERS).partition(".")
    return f"{_LAYERS}{layer}.{names[rest]}" if rest in names else name
