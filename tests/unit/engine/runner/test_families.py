"""Every family on every back end, against transformers' stored logits and a float64 decoder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.models.reference_decoder import reference_logits
from tests.support.models.running import load, logits_in_chunks, logits_of, scheduled
from tests.support.models.tiny_checkpoints import (
    CONFIGS,
    prompt_of,
    weights_of,
    write_checkpoint,
)

STORED = json.loads((Path(__file__).with_name("data") / "stored_logits.json").read_text())
TOLERANCE = 1e-4


@pytest.mark.covers("K20")
@pytest.mark.parametrize("backend", ["numba", "paddle"])
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, backend: str) -> None:
    runner = load(write_checkpoint(tmp_path, CONFIGS[family]), attention_backend=backend)
    assert runner.attention_backend == backend
    for length, stored in STORED[family].items():
        [logits] = logits_of(runner, scheduled(prompt_of(int(length)), 0, range(10)))
        np.testing.assert_allclose(logits, stored, atol=TOLERANCE)


@pytest.mark.parametrize("backend", ["numba", "paddle"])
@pytest.mark.parametrize(
    "family",
    [
        *("llama_llama3", "mistral_window", "qwen2", "qwen3", "qwen3_mixed", "ernie_biased"),
        *("gemma3", "gemma3_newer", "qwen3_yarn", "qwen3_moe", "ernie_moe"),
        *("phi4_mini", "glm4_yarn", "glm4_moe", "mixtral", "granite", "gpt_oss", "gpt_oss_newer"),
    ],
)
def test_decoding_in_a_mixed_batch_matches_the_float64_decoder(
    tmp_path: Path, family: str, backend: str
) -> None:
    config = CONFIGS[family]
    runner = load(write_checkpoint(tmp_path, config), attention_backend=backend)
    prompts = [prompt_of(70, 1), prompt_of(33, 2), prompt_of(5, 3)]
    tables = [[9, 3, 4, 1, 8], [7, 2, 11], [5]]
    logits_of(runner, scheduled(prompts[0][:-1], 0, tables[0]))
    logits_of(runner, scheduled(prompts[1][:20], 0, tables[1]))
    # One token, a chunk over a cached prefix and a whole prompt, in one step.
    found = logits_of(
        runner,
        scheduled(prompts[0][-1:], 69, tables[0]),
        scheduled(prompts[1][20:], 20, tables[1]),
        scheduled(prompts[2], 0, tables[2]),
    )
    weights = weights_of(config)
    for prompt, logits in zip(prompts, found, strict=True):
        wanted = reference_logits(config, weights, prompt)[-1]
        np.testing.assert_allclose(logits, wanted, atol=TOLERANCE)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_float64_decoder_agrees_with_transformers(family: str) -> None:
    config = CONFIGS[family]
    for length, stored in STORED[family].items():
        logits = reference_logits(config, weights_of(config), prompt_of(int(length)))[-1]
        np.testing.assert_allclose(logits, stored, atol=5e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_stored_logits_are_what_transformers_computes(tmp_path: Path, family: str) -> None:
    pytest.importorskip("transformers", reason="needs transformers and torch")
    from tests.unit.engine.runner.make_stored_logits import transformers_logits

    folder = write_checkpoint(tmp_path, CONFIGS[family])
    for length, stored in STORED[family].items():
        logits = transformers_logits(folder, prompt_of(int(length)))
        np.testing.assert_allclose(logits, stored, atol=5e-5)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize("backend", ["numba", "paddle"])
def test_half_precision_weights_compute_as_their_exact_float32_values(
    tmp_path: Path, dtype: str, backend: str
) -> None:
    config = CONFIGS["qwen3"]
    folder = write_checkpoint(tmp_path, config, dtype=dtype, num_shards=3)
    runner = load(folder, attention_backend=backend)
    weights = {}
    for name, values in weights_of(config).items():
        if dtype == "F16":
            weights[name] = values.astype(np.float16).astype(np.float32)
        else:
            weights[name] = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    prompt = prompt_of(40)
    wanted = reference_logits(config, weights, prompt)[-1]
    found = logits_in_chunks(runner, prompt, range(3), 16)
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
