"""Which products of a decoder are computed in integers."""

from __future__ import annotations

from engine.runner.back_end import ModelFiles
from engine.runner.cpu.packed_weights import PackedPlan, decoder_plans, layer_plans
from engine.runner.mtp.draft_source import mtp_in_groups
from engine.runner.weights.arithmetic import IntegerWeights
from engine.runner.weights.derived.quantised_source import WIDE_FORMATS
from engine.runner.weights.spec.model_spec import DecoderSpec
from engine.runner.weights.tensor_source import TensorSource


def products_in_integers(wanted: str, files: ModelFiles) -> IntegerWeights:
    """Return the weights whose products take activations in int8; `wanted` is the setting.

    An MTP layer's weights are in groups whatever the checkpoint has.
    """
    if wanted == "float32":
        return ()
    spec, mtp = files.spec, files.mtp
    found = integer_weights(files.weights, decoder_products(spec))
    if mtp is not None and (found or wanted == "int8"):
        found += integer_weights(mtp_in_groups(mtp), layer_plans(spec, mtp.layer_prefix))
    return found


def decoder_products(spec: DecoderSpec) -> list[PackedPlan]:
    """Return the packed weights of a decoder that are multiplied, and not only looked up."""
    is_looked_up = "" if spec.has_tied_embeddings else "embedding"
    return [plan for plan in decoder_plans(spec) if plan.key != is_looked_up]


def integer_weights(source: TensorSource, plans: list[PackedPlan]) -> IntegerWeights:
    """Return the weights whose products are computed in integers if activations are in int8.

    `packed_view` leaves packed weights alone of which one has no groups.
    """
    found: list[tuple[str, str]] = []
    for plan in plans:
        formats = [name for name, _ in plan.formats_and_shapes(source)]
        if not plan.in_floats and not set(formats).intersection(WIDE_FORMATS):
            found += zip(plan.names, formats, strict=True)
    return tuple(found)
