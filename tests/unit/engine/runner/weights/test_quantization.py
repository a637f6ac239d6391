"""`--quantization`: a wide model in groups is the model of the groups' values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.errors import ConfigError
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.derived.quantised_source import QuantisedSource
from engine.runner.weights.spec.decoder_tensors import expected_shapes
from engine.runner.weights.spec.model_spec import read_decoder_spec
from engine.runner.weights.stored_formats import QUANTISERS, dequantise, quantise
from tests.support.models.running import load, logits_of, scheduled
from tests.support.models.tiny_checkpoints import (
    CONFIGS,
    prompt_of,
    weights_of,
    write_checkpoint,
)
from tests.support.models.tiny_gguf import write_pair, write_wide

QWEN3 = CONFIGS["qwen3"]
SEVENS = QWEN3 | {"intermediate_size": 112}
"""The rows of `down_proj` are no whole groups of 32."""
EIGHT_BITS = ("model.embed_tokens.weight", "lm_head.weight")


def formats_of(config: dict[str, object], wanted: str) -> dict[str, str]:
    """Return the formats that weights should have, by name."""
    formats = {}
    for name, weight in weights_of(config).items():
        formats[name] = "Q8_0" if name in EIGHT_BITS else wanted
        if weight.ndim == 1 or weight.shape[1] % 32:
            formats[name] = "F32"
    return formats


@pytest.mark.parametrize("config", [QWEN3, SEVENS, CONFIGS["qwen2"]])
def test_embedding_and_head_keep_8_bits_and_odd_rows_all(
    tmp_path: Path, config: dict[str, object]
) -> None:
    write_checkpoint(tmp_path, config)
    spec = read_decoder_spec(tmp_path)
    source = QuantisedSource(Checkpoint(tmp_path, spec), "Q4_0")
    found = {name: source.format_and_shape(name)[0] for name in expected_shapes(spec)}
    assert found == formats_of(config, "Q4_0")
    for name, format_name in found.items():
        assert source.grouped(name).format == format_name


@pytest.mark.parametrize("config", [QWEN3, SEVENS], ids=["whole groups", "odd rows"])
@pytest.mark.parametrize("wanted", QUANTISERS)
def test_logits_are_those_of_the_values_of_the_groups(
    tmp_path: Path, wanted: str, config: dict[str, object]
) -> None:
    formats = formats_of(config, wanted)
    values = {
        name: weight if formats[name] == "F32" else dequantise(quantise(weight, formats[name]))
        for name, weight in weights_of(config).items()
    }
    plain = write_checkpoint(tmp_path / "plain", config)
    wide = load(write_wide(tmp_path / "wide", config, values))
    batch = scheduled(prompt_of(33), 0, range(10))
    exact = logits_of(wide, batch)
    runners = [
        load(plain, quantization=wanted.lower(), activation_dtype=dtype)
        for dtype in ("float32", "int8", "auto")
    ]
    in_float, in_int8, by_default = (logits_of(runner, batch) for runner in runners)
    np.testing.assert_array_equal(in_float, exact)
    assert not np.array_equal(in_int8, exact)
    np.testing.assert_allclose(in_int8, exact, atol=0.05 * np.abs(exact).max())
    np.testing.assert_array_equal(by_default, in_int8)
    assert not np.array_equal(exact, logits_of(load(plain), batch))


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_weights_of_16_bits_are_quantised_by_their_values(tmp_path: Path, dtype: str) -> None:
    narrow = write_checkpoint(tmp_path / "narrow", QWEN3, dtype=dtype)
    source = Checkpoint(narrow, read_decoder_spec(narrow))
    values = {name: source.read(name) for name in expected_shapes(read_decoder_spec(narrow))}
    wide = write_wide(tmp_path / "wide", QWEN3, values)
    batch = scheduled(prompt_of(9), 0, [0])
    found, wanted = (logits_of(load(one, quantization="q4_0"), batch) for one in (narrow, wide))
    np.testing.assert_array_equal(found, wanted)


def test_other_quantisations_are_other_layouts(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, QWEN3)
    names = ("none", *(name.lower() for name in QUANTISERS))
    digests = {
        load(folder, quantization=name, activation_dtype="float32").layout.model_digest
        for name in names
    }
    assert len(digests) == len(names)


def test_weights_in_groups_are_not_quantised_again(tmp_path: Path) -> None:
    stored, _ = write_pair(tmp_path, CONFIGS["qwen2"], {"up_proj": "Q5_0"})
    words = (
        r"quantization is q4_0, but model\.layers\.0\.mlp\.up_proj\.weight is Q5_0: wanted none, "
        r"or weights in F32, F16, BF16"
    )
    with pytest.raises(ConfigError, match=f"^{words}$"):
        load(stored, quantization="q4_0")


def test_a_wide_gguf_file_is_quantised_as_any_other(tmp_path: Path) -> None:
    stored, wide = write_pair(tmp_path, CONFIGS["qwen2"], {})
    batch = scheduled(prompt_of(9), 0, [0])
    found, wanted = (logits_of(load(one, quantization="q4_1"), batch) for one in (stored, wide))
    np.testing.assert_array_equal(found, wanted)
