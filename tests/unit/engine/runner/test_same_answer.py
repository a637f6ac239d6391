"""A token's logits are equal to the last bit however its prompt was chunked and batched."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from engine.core.step.step_batch import batch_of
from engine.runner.model_runner import ModelRunner
from tests.support.models.fused_experts import in_mxfp4_form
from tests.support.models.running import load, logits_in_chunks, logits_of, scheduled
from tests.support.models.tiny_checkpoints import (
    CONFIGS,
    prompt_of,
    weights_of,
    write_checkpoint,
    write_safetensors,
)

PROMPT = prompt_of(150)
TABLE = [12, 3, 5, 1, 8, 20, 9, 10, 2, 6]


@pytest.fixture(
    scope="module",
    params=["qwen3", "qwen3_yarn", "qwen3_moe", "ernie_moe", "qwen3_mixed", "gemma3", "gpt_oss"],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, config = tmp_path_factory.mktemp(request.param), CONFIGS[request.param]
    return in_mxfp4(made) if request.param == "gpt_oss" else write_checkpoint(made, config)


def in_mxfp4(folder: Path) -> Path:
    """Experts in groups, whose products take rows in int8, beside weights in float32."""
    config = CONFIGS["gpt_oss"] | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", in_mxfp4_form(weights_of(config))[0])
    return folder


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return load(folder, max_model_len=256, kv_cache_memory=8 << 20)


@pytest.fixture(scope="module")
def whole(runner: ModelRunner) -> np.ndarray:
    [logits] = logits_of(runner, scheduled(PROMPT, 0, TABLE))
    return logits


@pytest.mark.parametrize("chunk", [1, 2, 5, 7, 16, 31, 63, 64, 65, 97, 149])
def test_chunks_of_any_size(runner: ModelRunner, whole: np.ndarray, chunk: int) -> None:
    runner.kv_bytes.fill(0xFF)  # NaN: nothing outside the sequence may be read into a sum
    np.testing.assert_array_equal(logits_in_chunks(runner, PROMPT, TABLE, chunk), whole)


@pytest.mark.parametrize("num_neighbours", [1, 2, 4, 5, 6, 12, 19])
def test_any_neighbours_anywhere_in_the_batch(
    runner: ModelRunner, whole: np.ndarray, num_neighbours: int
) -> None:
    runner.kv_bytes.fill(0xFF)
    logits_of(runner, scheduled(PROMPT[:-1], 0, TABLE))
    neighbours = [
        scheduled(prompt_of(1 + 3 * i % 16, seed=i), 0, [30 + i]) for i in range(num_neighbours)
    ]
    for place in (0, num_neighbours // 2, num_neighbours):
        batch = [*neighbours[:place], scheduled(PROMPT[-1:], 149, TABLE), *neighbours[place:]]
        np.testing.assert_array_equal(logits_of(runner, *batch)[place], whole)


def test_a_sequence_that_starts_on_shared_blocks(runner: ModelRunner, whole: np.ndarray) -> None:
    logits_of(runner, scheduled(PROMPT, 0, TABLE))
    shared = [*TABLE[:5], 40, 41, 42, 43, 44]
    [logits] = logits_of(runner, scheduled(PROMPT[80:], 80, shared))
    np.testing.assert_array_equal(logits, whole)


@pytest.mark.parametrize("block_size", [1, 8, 32, 64, 128])
def test_any_block_size(folder: Path, whole: np.ndarray, block_size: int) -> None:
    other = load(folder, max_model_len=256, block_size=block_size)
    other.kv_bytes.fill(0xFF)
    table = list(reversed(range(-(-len(PROMPT) // block_size))))
    for chunk in (37, 150):
        np.testing.assert_array_equal(logits_in_chunks(other, PROMPT, table, chunk), whole)


def test_one_thread_or_several(folder: Path, whole: np.ndarray) -> None:
    alone = load(folder, max_model_len=256, num_threads=1)
    np.testing.assert_array_equal(logits_in_chunks(alone, PROMPT, TABLE, 150), whole)


def test_more_sampled_rows_than_are_held_at_once(runner: ModelRunner) -> None:
    batch = [scheduled([3 + i % 90], 0, [i]) for i in range(100)]
    together = logits_of(runner, *batch)
    assert len(together) == 100
    for i in (0, 63, 64, 99):
        np.testing.assert_array_equal(together[i], logits_of(runner, batch[i])[0])


def test_unsampled_sequences_have_no_entry(runner: ModelRunner) -> None:
    batch = [
        scheduled([5], 0, [0], is_sampled=False),
        scheduled([6, 7], 0, [1]),
        scheduled([8], 0, [2], is_sampled=False),
    ]
    first, second, third = runner.execute(batch_of(batch))
    assert first is None
    assert second == runner.execute(batch_of([batch[1]]))[0]
    assert third is None
    assert runner.execute(batch_of([])) == []
