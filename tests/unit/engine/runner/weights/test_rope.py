"""Rotary positions: the angles of each kind, what a configuration has to say, and how far it goes.

Logits with them are compared in `test_families`.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import CheckpointError, ConfigError
from engine.runner.weights.rope import inverse_frequencies, rotary_tables
from engine.runner.weights.spec.model_spec import DecoderSpec, read_decoder_spec
from engine.runner.weights.spec.rope_spec import YarnSpec
from tests.support.models.running import load
from tests.support.models.tiny_checkpoints import CONFIGS, write_checkpoint

LLAMA = CONFIGS["llama"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
PUBLISHED: dict[str, tuple[int, float, dict[str, Any], float, dict[int, float]]] = {
    "Qwen3": (
        128, 1e6, {"factor": 4.0, "original_max_position_embeddings": 32768},
        1.138629436111989,
        {0: 1.0, 16: 0.0316228, 19: 0.0165482, 30: 0.00106436, 32: 0.000602941, 35: 0.000246258,
         48: 7.90569e-06, 63: 3.10234e-07},
    ),
    "Yarn-Llama-2": (
        128, 1e4,
        {"factor": 32.0, "original_max_position_embeddings": 4096, "finetuned": True},
        1.3465735902799727,
        {0: 1.0, 16: 0.1, 19: 0.0649382, 30: 0.00836656, 32: 0.00552885, 35: 0.00286446,
         48: 3.125e-05, 63: 3.60869e-06},
    ),
    "Mistral": (
        128, 1e6,
        {"factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
         "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        1.0,
        {0: 1.0, 16: 0.0316228, 19: 0.0165482, 30: 0.000690702, 32: 0.000338235, 35: 9.0423e-05,
         48: 1.97642e-06, 63: 7.75586e-08},
    ),
    "DeepSeek": (
        64, 1e4,
        {"factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
         "mscale": 0.707, "mscale_all_dim": 0.5},
        1.064468903941252,
        {0: 1.0, 8: 0.1, 11: 0.0390069, 14: 0.012448, 16: 0.0055, 19: 0.00137051, 24: 2.5e-05,
         31: 3.3338e-06},
    ),
    "gpt-oss": (
        64, 150000.0,
        {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        1.3465735902799727,
        {0: 1.0, 8: 0.0508133, 11: 0.011592, 14: 0.00209379, 16: 0.000456484, 19: 2.63965e-05,
         24: 4.09998e-06, 31: 3.02351e-07},
    ),
    "attention_factor": (
        64, 1e4,
        {"factor": 2.0, "original_max_position_embeddings": 8192, "attention_factor": 1.5,
         "mscale": 2.0, "mscale_all_dim": 1.0},
        1.5,
        {0: 1.0, 8: 0.1, 11: 0.0421696, 14: 0.0164149, 16: 0.00846154, 19: 0.00308163,
         24: 0.000538462, 31: 6.66761e-05},
    ),
}  # fmt: skip
"""Head size, base, section, and what transformers 5.23 computes: the attention factor, and radians
per position of some pairs."""


def spec_of(folder: Path, **change: Any) -> DecoderSpec:
    """The decoder of a Llama with `change` in its configuration."""
    (folder / "config.json").write_text(json.dumps(LLAMA | change))
    return read_decoder_spec(folder)


def yarn_of(folder: Path, **change: Any) -> YarnSpec:
    rope = spec_of(folder, **change).rope
    assert isinstance(rope, YarnSpec)
    return rope


@pytest.mark.covers("K20")
@pytest.mark.parametrize("name", PUBLISHED)
def test_yarn_is_that_of_transformers(tmp_path: Path, name: str) -> None:
    head_dim, theta, section, attention_factor, wanted = PUBLISHED[name]
    section = {"rope_type": "yarn", "rope_theta": theta} | section
    spec = spec_of(tmp_path, head_dim=head_dim, rope_parameters=section)
    assert isinstance(spec.rope, YarnSpec)
    assert spec.rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    found = inverse_frequencies(spec.rope, head_dim)
    assert {pair: found[pair] for pair in wanted} == pytest.approx(wanted, rel=1e-5)


def published_frequencies(rope: YarnSpec, head_dim: int) -> list[float]:
    """The published code pair by pair: interpolated and extrapolated, and a ramp between."""
    bounds = []
    for turns in (rope.high_freq_factor, rope.low_freq_factor):
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        bounds.append(head_dim * math.log(ratio) / (2 * math.log(rope.theta)))
    if rope.has_whole_bounds:
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], head_dim - 1)
    if low == high:
        high += 0.001
    found = []
    for pair in range(head_dim // 2):
        extrapolated = 1 / rope.theta ** (2 * pair / head_dim)
        ramp = min(max((pair - low) / (high - low), 0.0), 1.0)
        found.append(extrapolated / rope.factor * ramp + extrapolated * (1 - ramp))
    return found


@pytest.mark.covers("K20")
def test_any_yarn_is_that_of_the_published_code(tmp_path: Path) -> None:
    choose = random.Random(7)
    for _ in range(200):
        head_dim = choose.choice([16, 64, 96, 128])
        slow = choose.uniform(0.5, 8.0)
        section = YARN | {
            "factor": choose.choice([1, 1.25, 2.0, 4, 40.0]),
            "original_max_position_embeddings": choose.choice([7, 2048, 4096, 32768, 10**6]),
            "beta_slow": slow,
            "beta_fast": slow + choose.choice([0.001, 1, 31, 100]),
            "truncate": choose.choice([True, False]),
        }
        theta = choose.choice([2.0, 500.0, 10000.0, 1e6, 1e7])
        rope = yarn_of(tmp_path, rope_theta=theta, rope_scaling=section)
        found = inverse_frequencies(rope, head_dim)
        np.testing.assert_allclose(found, published_frequencies(rope, head_dim), rtol=1e-9)


@pytest.mark.covers("K20")
def test_the_attention_factor_is_in_the_cosines_and_the_sines(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, rope_scaling=YARN | {"attention_factor": 1.5})
    cosines, sines = rotary_tables(spec, 600)
    assert cosines.dtype == sines.dtype == np.float32
    np.testing.assert_allclose(np.hypot(cosines, sines), 1.5, rtol=1e-6)
    angles = np.arange(600)[:, None] * inverse_frequencies(spec.rope, spec.head_dim)
    np.testing.assert_allclose(cosines, 1.5 * np.cos(angles), atol=1e-4)
    np.testing.assert_allclose(sines, 1.5 * np.sin(angles), atol=1e-4)


@pytest.mark.parametrize(
    "section",
    [
        {"mscale": 1.0},
        {"mscale_all_dim": 1.0},
        {"mscale": 1.0, "mscale_all_dim": 0},
        {"mscale": 0.0, "mscale_all_dim": 1.0, "attention_factor": None},
        {"beta_fast": None, "beta_slow": None, "attn_factor": 1.0, "extrapolation_factor": 1},
        {"llama_4_scaling_beta": 0.0, "finetuned": True},
    ],
)
def test_values_that_change_nothing(tmp_path: Path, section: dict[str, Any]) -> None:
    plain = yarn_of(tmp_path, rope_scaling=YARN)
    assert plain.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
    assert yarn_of(tmp_path, rope_scaling=YARN | section) == plain


@pytest.mark.covers("K21")
def test_newer_and_older_files_say_the_same(tmp_path: Path) -> None:
    older = yarn_of(tmp_path, rope_scaling={"type": "yarn"} | YARN, rope_theta=5000.0)
    newer = yarn_of(tmp_path, rope_parameters=YARN | {"rope_theta": 5000.0})
    assert older == newer
    both = {"rope_parameters": YARN | {"rope_theta": 5000.0}, "rope_scaling": YARN}
    assert yarn_of(tmp_path, **both) == newer


def test_the_original_context_beside_the_section_counts_first(tmp_path: Path) -> None:
    wanted = yarn_of(tmp_path, rope_scaling=YARN)
    beside = {"original_max_position_embeddings": 128}
    without = {key: value for key, value in YARN.items() if key not in beside}
    assert yarn_of(tmp_path, rope_scaling=without, **beside) == wanted
    other = YARN | {"original_max_position_embeddings": 64}
    assert yarn_of(tmp_path, rope_scaling=other, **beside) == wanted
    llama3 = CONFIGS["llama_llama3"]["rope_parameters"] | {"original_max_position_embeddings": 64}
    found = spec_of(tmp_path, rope_parameters=llama3, **beside).rope
    assert found == spec_of(tmp_path, rope_parameters=llama3 | beside).rope


@pytest.mark.covers("K22")
def test_dynamic_scaling_changes_nothing_within_the_context(tmp_path: Path) -> None:
    plain = spec_of(tmp_path)
    assert spec_of(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0}) == plain
    assert plain.max_position == 512


@pytest.mark.covers("K19")
@pytest.mark.parametrize(
    ("positions", "section", "longest"),
    [
        (32768, {"original_max_position_embeddings": 32768}, 131072),
        (40960, {"original_max_position_embeddings": 32768}, 131072),
        (131072, {"original_max_position_embeddings": 32768}, 131072),
        (163840, {"original_max_position_embeddings": 32768}, 163840),
        (32768, {"original_max_position_embeddings": 32768, "factor": 1.3}, 42598),
        (32768, {"original_max_position_embeddings": 32768, "factor": 1}, 32768),
    ],
)
def test_the_longest_context_is_the_extended_one(
    tmp_path: Path, positions: int, section: dict[str, Any], longest: int
) -> None:
    change = {"max_position_embeddings": positions, "rope_scaling": YARN | section}
    assert spec_of(tmp_path, **change).max_position == longest
    change = {"max_position_embeddings": positions, "rope_parameters": YARN | section}
    assert spec_of(tmp_path, **change).max_position == longest


@pytest.mark.parametrize(
    ("stated", "unrotated"),
    [
        ({"no_rope_layers": [1, 0, 1, 0]}, (1, 3)),
        ({"no_rope_layers": [True, True, True, True]}, ()),
        ({"no_rope_layers": None}, (3,)),
        ({"no_rope_layers": None, "no_rope_layer_interval": 2}, (1, 3)),
    ],
)
def test_layers_without_rotation(
    tmp_path: Path, stated: dict[str, Any], unrotated: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["smollm3"] | stated))
    spec = read_decoder_spec(tmp_path)
    assert spec.unrotated_layers == unrotated
    for layer in range(spec.num_layers):
        cosines, sines = rotary_tables(replace(spec, rope=spec.rope_of(layer)), 8)
        assert (cosines == 1).all() == (sines == 0).all() == (layer in unrotated)


@pytest.mark.covers("K19")
def test_a_runner_takes_the_extended_context_and_no_more(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["qwen3_yarn"])
    assert load(folder).max_model_len == 256
    with pytest.raises(ConfigError, match="257: wanted at most 256, the model's longest context"):
        load(folder, max_model_len=257)


def test_other_yarn_is_another_model_to_the_nodes(tmp_path: Path) -> None:
    """Each value changes keys, so nodes that differ in one exchange none."""
    changes: list[dict[str, Any]] = [
        {}, {"factor": 2.0}, {"original_max_position_embeddings": 64}, {"beta_fast": 16.0},
        {"beta_slow": 2.0}, {"attention_factor": 1.5}, {"truncate": False},
    ]  # fmt: skip
    digests = set()
    for change in changes:
        change = {"max_position_embeddings": 512, "rope_scaling": YARN | change}
        write_checkpoint(tmp_path, LLAMA | change)
        digests.add(load(tmp_path, max_model_len=100).layout.model_digest)
    assert len(digests) == len(changes)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in CONFIGS
        if not any(kind in name for kind in ("yarn", "gpt", "phi4", "ministral3"))
    ],
)
def test_other_models_are_described_as_before(tmp_path: Path, name: str) -> None:
    """The description is hashed for the fingerprint: nodes of the release before still pair."""
    write_checkpoint(tmp_path, CONFIGS[name])
    assert asdict(read_decoder_spec(tmp_path).rope).keys() == {
        "kind", "theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position",
    }  # fmt: skip


KINDS = "wanted default, dynamic, linear, llama3, mrope, yarn or longrope"
HUGE = 10**400


@pytest.mark.covers("K21", "K22")
@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"factor": None}, ("rope_scaling.factor is None", "a number above 0")),
        ({"factor": "4"}, ("rope_scaling.factor is '4'", "a number above 0")),
        ({"factor": True}, ("rope_scaling.factor is True", "a number above 0")),
        ({"factor": math.nan}, ("rope_scaling.factor is nan", "a number above 0")),
        ({"factor": math.inf}, ("rope_scaling.factor is inf", "a number above 0")),
        ({"factor": 0.5}, ("rope_scaling.factor is 0.5", "at least 1")),
        ({"factor": 1e29}, ("rope_scaling.factor is 1e+29", "a context that is possible")),
        ({"original_max_position_embeddings": None},
         ("rope_scaling.original_max_position_embeddings is None", "at least 1")),
        ({"original_max_position_embeddings": 128.0},
         ("rope_scaling.original_max_position_embeddings is 128.0", "whole number")),
        ({"original_max_position_embeddings": HUGE},
         ("rope_scaling.original_max_position_embeddings", "at most")),
        ({"beta_fast": 1.0}, ("rope_scaling.beta_fast is 1.0", "more than beta_slow, 1")),
        ({"beta_fast": 0.5}, ("rope_scaling.beta_fast is 0.5", "more than beta_slow, 1")),
        ({"beta_slow": 32}, ("rope_scaling.beta_fast is missing", "more than beta_slow, 32")),
        ({"beta_slow": -1}, ("rope_scaling.beta_slow is -1", "above 0")),
        ({"beta_slow": [1]}, ("rope_scaling.beta_slow", "a number above 0")),
        ({"attention_factor": 0}, ("rope_scaling.attention_factor is 0", "above 0")),
        ({"attention_factor": "auto"}, ("rope_scaling.attention_factor", "a number above 0")),
        ({"mscale": math.nan}, ("rope_scaling.mscale is nan", "a number above 0")),
        ({"mscale_all_dim": "1"}, ("rope_scaling.mscale_all_dim is '1'", "a number above 0")),
        ({"truncate": 1}, ("rope_scaling.truncate is 1", "true or false")),
        ({"rope_theta": 1.0}, ("rope_scaling.rope_theta is 1.0", "above 1")),
        ({"attn_factor": 1.2}, ("rope_scaling.attn_factor is 1.2", "wanted 1:")),
        ({"extrapolation_factor": 0.5}, ("rope_scaling.extrapolation_factor is 0.5", "wanted 1:")),
        ({"llama_4_scaling_beta": -0.1}, ("rope_scaling.llama_4_scaling_beta is -0.1", "above 0")),
        ({"llama_4_scaling_beta": 0.1, "rope_type": "linear"},
         ("rope_scaling.llama_4_scaling_beta is 0.1", "wanted 0: it is read with yarn alone")),
        *(({"mrope_section": value}, ("rope_scaling.mrope_section", "three numbers of pairs, 8 to"))
          for value in (None, 8, [8], [2, 3, 4], [0, 4, 4], [2.0, 3, 3], [2, 2, 2, 2])),
        ({"partial_rotary_factor": 0.5},
         ("rope_scaling.partial_rotary_factor is 0.5", "wanted 1:")),
        ({"rope_type": "deepseek_yarn"}, ("rope_scaling.rope_type is 'deepseek_yarn'", KINDS)),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
         ("rope_scaling.short_factor is [1.0]", "wanted a list of 8 numbers")),
        ({"rope_type": "dynamic", "alpha": 1000.0}, ("rope_scaling.alpha is 1000.0", "wanted 1:")),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    tmp_path: Path, section: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(CheckpointError) as error:
        spec_of(tmp_path, rope_scaling=YARN | section)
    for word in ("config.json", *words):
        assert word in str(error.value)


LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = CONFIGS["llama_llama3"]["rope_parameters"]


@pytest.mark.parametrize(
    ("section", "key"),
    [
        *((YARN, key) for key in ("factor", "beta_slow", "beta_fast", "rope_theta", "mscale")),
        (YARN | {"mscale": 1.0}, "mscale_all_dim"),
        (YARN, "attention_factor"),
        *((LINEAR, key) for key in ("factor", "rope_theta")),
        *((LLAMA3, key) for key in ("factor", "low_freq_factor", "high_freq_factor", "rope_theta")),
    ],
)
@pytest.mark.parametrize("value", [5e-324, 1e-320, 1e-300, 1e-30, 1e-15, 1e30, 1e300])
def test_numbers_that_are_almost_none_have_finite_angles_or_are_refused(
    tmp_path: Path, section: dict[str, Any], key: str, value: float
) -> None:
    """Those too small for a float32, or to divide by, are no numbers above 0 here."""
    try:
        spec = spec_of(tmp_path, rope_scaling=section | {key: value})
    except CheckpointError:
        return
    with np.errstate(all="raise", under="ignore"):
        for table in rotary_tables(spec, 1 << 12):
            assert np.isfinite(table).all()


def test_a_missing_original_context_is_named(tmp_path: Path) -> None:
    """Without it the factor may be over the context that the file has, or already in it."""
    section = {"rope_type": "yarn", "factor": 4.0}
    with pytest.raises(CheckpointError, match="original_max_position_embeddings is missing"):
        spec_of(tmp_path, rope_scaling=section)


@pytest.mark.parametrize("high", [0.5, 1.0])
def test_factors_of_llama3_in_the_wrong_order_are_named(tmp_path: Path, high: float) -> None:
    """The share between them would be a division by 0, or fall where it has to rise."""
    section = CONFIGS["llama_llama3"]["rope_parameters"] | {"high_freq_factor": high}
    with pytest.raises(CheckpointError, match=r"high_freq_factor is .*: wanted more than low_freq"):
        spec_of(tmp_path, rope_parameters=section)


@pytest.mark.covers("K21")
def test_two_sections_that_differ_are_named(tmp_path: Path) -> None:
    """Programs read either: YaRN that was added to a newer file must not be without effect."""
    newer = {"rope_type": "default", "rope_theta": 10000.0}
    with pytest.raises(CheckpointError, match=r"rope_scaling is .*: wanted what rope_parameters"):
        spec_of(tmp_path, rope_parameters=newer, rope_scaling=YARN)
    assert spec_of(tmp_path, rope_parameters=newer, rope_scaling=None) == spec_of(tmp_path)


def test_only_a_window_as_long_as_the_extended_context_is_none(tmp_path: Path) -> None:
    mistral = CONFIGS["mistral"] | {"rope_scaling": YARN, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(mistral | {"sliding_window": 128}))
    assert read_decoder_spec(tmp_path).windows == (128, 128)
    (tmp_path / "config.json").write_text(json.dumps(mistral | {"sliding_window": 512}))
    spec = read_decoder_spec(tmp_path)
    assert (spec.windows, spec.max_position) == ((), 512)
