"""What is computed in integers, and what nodes with other arithmetics call each other."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from common.errors import ConfigError, LayoutMismatch
from common.kv.kv_layout import check_compatible
from engine.runner.cpu.integer_products import decoder_products, integer_weights
from engine.runner.cpu.packed_weights import PackedPlan, decoder_plans
from engine.runner.kernels.products.linear import BYTES
from engine.runner.weights.arithmetic import Arithmetic, stored_formats
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.derived.quantised_source import QuantisedSource
from engine.runner.weights.spec.model_spec import DecoderSpec, read_decoder_spec
from tests.support.models.mtp_running import load_with_mtp, write_inside
from tests.support.models.packing import packed, stored
from tests.support.models.running import load
from tests.support.models.tiny_checkpoints import CONFIGS, write_checkpoint

DTYPES = ("auto", "float32", "int8")


def opened(folder: Path, name: str) -> tuple[DecoderSpec, Checkpoint]:
    write_checkpoint(folder, CONFIGS[name])
    spec = read_decoder_spec(folder)
    return spec, Checkpoint(folder, spec)


def test_every_product_of_groups_is_named_with_its_format(tmp_path: Path) -> None:
    spec, checkpoint = opened(tmp_path, "qwen3")
    source = QuantisedSource(checkpoint, "Q4_1")
    found = dict(integer_weights(source, decoder_products(spec)))
    products = [name for plan in decoder_plans(spec) for name in plan.names]
    assert list(found) == products[1:]  # an embedding of its own is only looked up
    assert found.pop("lm_head.weight") == "Q8_0"
    assert set(found.values()) == {"Q4_1"}
    assert stored_formats(spec, source) == ("Q4_1", "Q8_0")
    assert integer_weights(checkpoint, decoder_products(spec)) == ()


def test_a_tied_embedding_is_a_product(tmp_path: Path) -> None:
    spec, checkpoint = opened(tmp_path, "qwen2")
    source = QuantisedSource(checkpoint, "Q4_1")
    found = integer_weights(source, decoder_products(spec))
    assert found[0] == ("model.embed_tokens.weight", "Q8_0")


def test_the_gate_of_the_experts_is_never_multiplied_in_integers(tmp_path: Path) -> None:
    spec, checkpoint = opened(tmp_path, "qwen3_moe")
    source = QuantisedSource(checkpoint, "Q8_0")
    assert spec.experts is not None
    found = dict(integer_weights(source, decoder_products(spec)))
    experts = [f"mlp.experts.{i}.{n}_proj" for i in range(8) for n in ("gate", "up", "down")]
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        assert f"{prefix}mlp.gate.weight" not in found
        assert {f"{prefix}{name}.weight" for name in experts} <= found.keys()


class _Formats(Checkpoint):
    """A packed weight's tensors in any formats."""

    def __init__(self, formats: dict[str, str]) -> None:
        self._formats = formats

    def format_and_shape(self, name: str) -> tuple[str, tuple[int, int]]:
        return self._formats[name], (16, 64)


def test_what_is_named_is_what_the_kernels_do() -> None:
    for formats in itertools.product(("Q8_0", "Q4_1", "F16", "F32", "BF16"), repeat=2):
        table = packed(*(stored(name, 16, 64) for name in formats), with_bytes=True).table
        source = _Formats(dict(zip("ab", formats, strict=True)))
        named = integer_weights(source, [PackedPlan("pair", ("a", "b"))])
        assert bool(named) == bool(table[:, BYTES].all()) == bool(table[:, BYTES].any())


def test_identities_differ_by_format_only_where_it_changes_bits() -> None:
    wide = Arithmetic("float32", "numba", ("F32",))
    narrow = Arithmetic("float32", "numba", ("Q4_0", "Q8_0"))
    assert wide.identity == narrow.identity == "float32\nnumba"
    in_bytes = [
        Arithmetic("float32", "numba", ("Q4_0", "Q8_0"), formats)
        for formats in (
            (("a", "Q4_0"), ("b", "Q8_0")), (("a", "Q8_0"), ("b", "Q4_0")), (("a", "Q4_0"),)
        )
    ]  # fmt: skip
    assert len({one.identity for one in (wide, *in_bytes)}) == 4
    assert in_bytes[0].description == (
        "float32 on numba, weights in Q4_0 Q8_0, activations in int8 (steps of 16 and 32)"
    )
    assert wide.description == "float32 on numba, weights in F32, activations in float32"


def test_identities_differ_by_the_order_of_sums() -> None:
    """Both nodes may have the same formats: the orders are by the name of a weight."""
    orders = [
        (("a", "Q4_0 in 8 ranges"), ("b", "Q8_0 in 4 ranges")),
        (("a", "Q8_0 in 4 ranges"), ("b", "Q4_0 in 8 ranges")),
        (("a", "Q4_0 in 4 ranges"), ("b", "Q8_0 in 4 ranges")),
        (("a", "Q4_0 in 8 ranges"),),
        (),
    ]
    found = [Arithmetic("bfloat16", "triton", ("Q4_0", "Q8_0"), orders=each) for each in orders]
    assert len({one.identity for one in found}) == len(orders)
    assert found[-1].identity == "bfloat16\ntriton"
    assert (
        found[0].description
        == found[1].description
        == (
            "bfloat16 on triton, weights in Q4_0 Q8_0, Q4_0 in 8 ranges, Q8_0 in 4 ranges, "
            "activations in bfloat16"
        )
    )


def test_a_refused_pair_names_both_arithmetics(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIGS["qwen2"])
    ours = load(tmp_path, quantization="q8_0").layout
    theirs = load(tmp_path, quantization="q8_0", activation_dtype="float32").layout
    with pytest.raises(LayoutMismatch) as caught:
        check_compatible(ours, theirs)
    assert (
        "weights in Q8_0, activations in int8 (steps of 16 and 32)', peer 'float32 on numba"
        in str(caught.value)
    )
    assert "weights in Q8_0, activations in float32'" in str(caught.value)


def test_a_drafting_layer_in_groups_beside_wide_weights(tmp_path: Path) -> None:
    """Its products are in integers if int8 is asked for, and its KV is one more layer's."""
    folder = write_inside(tmp_path, "deepseek")
    layouts = {name: load_with_mtp(folder, activation_dtype=name).layout for name in DTYPES}
    assert layouts["auto"] == layouts["float32"]
    assert layouts["int8"].model_digest != layouts["float32"].model_digest
    assert layouts["int8"].arithmetic.endswith(
        "weights in F32, activations in int8 (steps of 16 and 32)"
    )


def test_int8_needs_the_cpu_kernels(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIGS["qwen2"])
    with pytest.raises(ConfigError, match="activation_dtype is int8: wanted the CPU kernels"):
        load(tmp_path, activation_dtype="int8", attention_backend="paddle")
