"""The form of the weights of each of a decoder's products on the card, by the form in the files.

A product whose weights are stored in a form of the kernels is computed from them as they are; any
other weights are rounded to bfloat16 while they are loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine.runner.gpu.repacking import FORMS
from engine.runner.gpu.tiles import num_ranges
from engine.runner.gpu.weights import STRIP_INPUTS, Form, Matrix
from engine.runner.weights.derived.quantised_source import WIDE_FORMATS
from engine.runner.weights.spec.decoder_tensors import SHARED_EXPERTS
from engine.runner.weights.spec.expert_mixture import ExpertMixture
from engine.runner.weights.spec.model_spec import DecoderSpec
from engine.runner.weights.tensor_source import TensorSource

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class PlannedMatrix:
    """Tensors that are one matrix on the card, one after the other; its `address` is 0."""

    names: tuple[str, ...]
    matrix: Matrix
    refusal: str = ""
    """The reason why quantised weights are computed in bfloat16; empty if they are not."""

    @property
    def order_of_sums(self) -> str:
        """The order of sums, on which the bits of its products depend; empty for BF16."""
        form = self.matrix.form
        if form is Form.BF16:
            return ""
        return f"{form.name} in {num_ranges(self.matrix)} ranges of groups of {form.group_inputs}"


def layer_matrices(prefix: str, mixture: ExpertMixture | None = None) -> dict[str, tuple[str, ...]]:
    """Return the tensors of each product of a layer, but for the gate of its `mixture`.

    Those of experts follow each other, an expert's gate before its up.
    """
    attention = f"{prefix}self_attn."
    found = {
        "qkv": tuple(f"{attention}{name}_proj.weight" for name in "qkv"),
        "output": (f"{attention}o_proj.weight",),
    }
    if mixture is None:
        return found | _mlp_matrices([f"{prefix}mlp"])
    if mixture.shared_size:
        found |= _mlp_matrices([f"{prefix}{SHARED_EXPERTS}"])
    each = _mlp_matrices([f"{prefix}mlp.experts.{i}" for i in range(mixture.num_experts)])
    return found | {f"experts_{name}": names for name, names in each.items()}


def _mlp_matrices(parts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    return {
        "gate_up": tuple(f"{one}.{name}_proj.weight" for one in parts for name in ("gate", "up")),
        "down": tuple(f"{one}.down_proj.weight" for one in parts),
    }


def planned(source: TensorSource, names: Sequence[str]) -> PlannedMatrix:
    """Return the matrix that these tensors become."""
    found = [source.format_and_shape(name) for name in names]
    outputs, inputs = sum(shape[0] for _, shape in found), found[0][1][1]
    formats = sorted({name for name, _ in found})
    form = FORMS.get(formats[0], Form.BF16) if len(formats) == 1 else Form.BF16
    refusal = ""
    if all(source.has_float8(name) for name in names):
        form = Form.FP8
        if any(shape[0] % STRIP_INPUTS for _, shape in found[:-1]):
            form, refusal = Form.BF16, "tiles of fp8 that two tensors share"
    if form is not Form.BF16 and inputs % form.group_inputs:
        form, refusal = Form.BF16, f"{inputs} inputs, no multiple of {form.group_inputs}"
    elif form is Form.BF16 and not set(formats) <= set(WIDE_FORMATS):
        refusal = f"weights in {' and '.join(formats)}"
    return PlannedMatrix(tuple(names), Matrix(0, outputs, inputs, form), refusal)


def planned_products(spec: DecoderSpec, source: TensorSource) -> list[PlannedMatrix]:
    """Return the products of all layers, and the head unless it is the embedding."""
    plans = [
        planned(source, names)
        for index in range(spec.num_layers)
        for names in layer_matrices(f"model.layers.{index}.", spec.mixture_of(index)).values()
    ]
    if not spec.has_tied_embeddings:
        plans.append(planned(source, [HEAD]))
    return plans


def orders_of_sums(spec: DecoderSpec, source: TensorSource) -> tuple[tuple[str, str], ...]:
    """Return each quantised product's first tensor, and the order of its sums."""
    return tuple(
        (plan.names[0], plan.order_of_sums)
        for plan in planned_products(spec, source)
        if plan.order_of_sums
    )


def refusals(spec: DecoderSpec, source: TensorSource) -> str:
    """Return why products of quantised weights are in bfloat16, in words; empty if none is."""
    counted = Counter(plan.refusal for plan in planned_products(spec, source) if plan.refusal)
    return "; ".join(f"{count} matrices: {why}" for why, count in sorted(counted.items()))
