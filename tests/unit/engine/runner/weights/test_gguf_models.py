"""A GGUF file of each family, in mixed formats, computes what its values in float32 compute."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import CheckpointError
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.spec.model_spec import read_decoder_spec
from pdserve.checkpoints.gguf_folder import make_gguf_folder
from tests.support.models.running import load, logits_in_chunks, logits_of, scheduled
from tests.support.models.tiny_checkpoints import CONFIGS, prompt_of
from tests.support.models.tiny_gguf import FAMILIES, FORMATS, K_CONFIG, write_gguf, write_pair

K_FORMATS = {
    "embed_tokens": "Q6_K", "q_proj": "Q4_K", "k_proj": "Q5_K", "v_proj": "Q6_K",
    "o_proj": "Q5_K", "gate_proj": "Q4_K", "up_proj": "Q6_K", "down_proj": "Q6_K",
    "lm_head": "BF16",
}  # fmt: skip


@pytest.fixture(params=[*FAMILIES, "K types"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    if request.param == "K types":
        return write_pair(tmp_path, K_CONFIG, K_FORMATS)
    return write_pair(tmp_path, CONFIGS[request.param], FORMATS)


def test_stored_and_wide_weights_give_the_same_bits(pair: tuple[Path, Path]) -> None:
    stored, wide = (load(folder, activation_dtype="float32") for folder in pair)
    for length in (1, 33):
        prompt = prompt_of(length)
        found = logits_of(stored, scheduled(prompt, 0, range(10)))
        wanted = logits_of(wide, scheduled(prompt, 0, range(10)))
        np.testing.assert_array_equal(found, wanted)


def test_reference_operators_compute_with_the_same_values(pair: tuple[Path, Path]) -> None:
    stored, wide = (load(folder, attention_backend="paddle") for folder in pair)
    prompt = prompt_of(33)
    found = logits_of(stored, scheduled(prompt, 0, range(10)))
    np.testing.assert_array_equal(found, logits_of(wide, scheduled(prompt, 0, range(10))))
    kernels = load(pair[0], activation_dtype="float32")
    on_kernels = logits_of(kernels, scheduled(prompt, 0, range(10)))
    np.testing.assert_allclose(on_kernels, found, atol=1e-4)


def test_int8_activations_are_near_and_leave_no_trace_of_chunks(pair: tuple[Path, Path]) -> None:
    stored = load(pair[0], activation_dtype="float32")
    in_bytes = load(pair[0], activation_dtype="int8")
    assert in_bytes.layout.model_digest != stored.layout.model_digest
    prompt = prompt_of(33)
    [exact] = logits_of(stored, scheduled(prompt, 0, range(10)))
    [found] = logits_of(in_bytes, scheduled(prompt, 0, range(10)))
    assert not np.array_equal(found, exact)
    np.testing.assert_allclose(found, exact, atol=0.05 * np.abs(exact).max())
    for chunk in (1, 7):
        in_chunks = logits_in_chunks(in_bytes, prompt, list(range(10)), chunk)
        np.testing.assert_array_equal(in_chunks, found)


def test_auto_is_int8_where_weights_are_quantised(pair: tuple[Path, Path]) -> None:
    stored, wide = pair

    def digest(folder: Path, activation_dtype: str, backend: str = "numba") -> str:
        runner = load(folder, activation_dtype=activation_dtype, attention_backend=backend)
        return runner.layout.model_digest

    assert digest(stored, "auto") == digest(stored, "int8") != digest(stored, "float32")
    assert digest(wide, "auto") == digest(wide, "float32")
    assert digest(stored, "auto", "paddle") == digest(stored, "float32", "paddle")


def test_equal_digests_mean_equal_bits(pair: tuple[Path, Path]) -> None:
    """Equal values are multiplied in integers only where they are stored in groups."""
    bits: dict[str, set[bytes]] = {}
    digests = {}
    for folder, activation_dtype in itertools.product(pair, ("float32", "int8")):
        runner = load(folder, activation_dtype=activation_dtype)
        logits = logits_of(runner, scheduled(prompt_of(20), 0, range(10)))
        digest = runner.layout.model_digest
        bits.setdefault(digest, set()).add(np.stack(logits).tobytes())
        digests[folder, activation_dtype] = digest
    assert {len(of_digest) for of_digest in bits.values()} == {1}
    stored, wide = pair
    assert digests[wide, "int8"] == digests[wide, "float32"] != digests[stored, "int8"]
    if not read_decoder_spec(stored).has_norm_offsets:  # then norms are stored as other values
        assert digests[wide, "float32"] == digests[stored, "float32"]


def test_the_decoder_is_the_one_of_the_family(pair: tuple[Path, Path]) -> None:
    """Biases, head norms and rotary positions too: only what the values are stored in differs."""
    stored, wide = (read_decoder_spec(folder) for folder in pair)
    assert stored == wide
    checkpoints = [Checkpoint(folder, stored) for folder in pair]
    names = [set(checkpoint.names()) for checkpoint in checkpoints]
    assert names[0] == names[1]


PATTERN = "gemma3.attention.sliding_window_pattern"


def _with_pattern(folder: Path, config: dict[str, Any], value: Any) -> Path:
    """The folder of a Gemma 3 file whose key says which layers have no window; None: no key."""
    write_gguf(folder / "model.gguf", config, {}, {PATTERN: value})
    made = folder / "made"
    made.mkdir()
    make_gguf_folder(folder / "model.gguf", made)
    return made


@pytest.mark.covers("K24")
@pytest.mark.parametrize(
    ("value", "windows"),
    [
        (None, (29, 29, 29, 29, 29, 0, 29)),
        (6, (29, 29, 29, 29, 29, 0, 29)),
        (3, (29, 29, 0, 29, 29, 0, 29)),
        (1, ()),
        (9, (29,) * 7),
    ],
)
def test_a_file_may_say_which_layers_of_gemma_have_no_window(
    tmp_path: Path, value: int | None, windows: tuple[int, ...]
) -> None:
    made = _with_pattern(tmp_path, CONFIGS["gemma3"], value)
    spec = read_decoder_spec(made)
    assert spec.windows == windows
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "config.json").write_text(
        json.dumps(CONFIGS["gemma3"] | {"sliding_window_pattern": value or 6})
    )
    assert spec == read_decoder_spec(tmp_path / "wide")


@pytest.mark.parametrize("value", [0, -1, True, "6", 2.0])
def test_a_pattern_of_windows_that_cannot_be_is_named(tmp_path: Path, value: Any) -> None:
    with pytest.raises(
        CheckpointError, match=rf"model\.gguf: metadata key {PATTERN} is .*: wanted"
    ):
        _with_pattern(tmp_path, CONFIGS["gemma3"], value)


def test_families_without_windows_have_no_pattern(tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "model.gguf", CONFIGS["qwen3"], {}, {PATTERN.replace("gemma3", "qwen3"): "x"}
    )
    made = tmp_path / "made"
    made.mkdir()
    make_gguf_folder(tmp_path / "model.gguf", made)
    assert read_decoder_spec(made).windows == ()
