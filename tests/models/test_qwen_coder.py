"""Qwen2.5-Coder-0.5B-Instruct from a Q4_K_M file: five formats, biases, an untied head."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from common.request import SamplingParams
from common.settings.config import EngineConfig, ModelConfig
from engine.core.runner_contract import SampleInput, ScheduledSequence
from engine.core.step.step_batch import batch_of
from engine.runner.model_runner import ModelRunner
from engine.runner.start.load import load_model_runner
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.spec.model_spec import read_decoder_spec, read_eos_token_ids
from router.text.text_model import TextModel

REFERENCE_PATH = Path(__file__).parents[1] / "data" / "qwen_coder_reference.json"
TIE_MARGIN = 0.02
BLOCK_SIZE = 64
CHUNK = 512
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


def reference() -> list[dict[str, Any]]:
    """What transformers answers, as `tests/data/make_reference.py` writes it."""
    if not REFERENCE_PATH.exists():
        pytest.skip(f"{REFERENCE_PATH.name} was not made with make_reference.py yet")
    entries: list[dict[str, Any]] = json.loads(REFERENCE_PATH.read_text(encoding="utf-8"))
    return entries


@pytest.fixture(scope="module")
def runner(qwen_folder: Path) -> ModelRunner:
    return load_model_runner(
        ModelConfig(model=str(qwen_folder), max_model_len=2048, activation_dtype="float32"),
        EngineConfig(kv_cache_memory=64 << 20, block_size=BLOCK_SIZE, max_num_batched_tokens=CHUNK),
    )


def greedy_tokens(runner: ModelRunner, prompt: list[int], count: int) -> list[int]:
    table = range(-(-(len(prompt) + count) // BLOCK_SIZE))
    start = 0
    while len(prompt) - start > CHUNK:
        end = start + CHUNK
        chunk = ScheduledSequence(
            0, prompt[start:end], start, table, None, next_token_id=prompt[end]
        )
        assert runner.execute(batch_of([chunk])) == [None]
        start = end
    known = prompt[start:]
    drawn: list[int] = []
    while len(drawn) < count:
        sample = SampleInput(GREEDY, len(drawn), prompt, drawn)
        sequence = ScheduledSequence(0, known, start, table, sample)
        [result] = runner.execute(batch_of([sequence]))
        assert result is not None
        start, known = start + len(known), list(result.token_ids)
        drawn = drawn + known
    return drawn


def test_the_file_has_its_formats(qwen_folder: Path) -> None:
    checkpoint = Checkpoint(qwen_folder, read_decoder_spec(qwen_folder))
    formats = Counter(checkpoint.grouped(name).format for name in checkpoint.names())
    assert formats == {"Q5_0": 133, "F32": 121, "Q8_0": 13, "Q4_K": 12, "Q6_K": 12}
    assert read_eos_token_ids(qwen_folder) == {151645}


def test_prompts_have_the_tokens_of_transformers(qwen_folder: Path) -> None:
    text_model = TextModel.load(qwen_folder, "qwen", 0)
    for entry in reference():
        text = entry["text"]
        if entry["kind"] == "chat":
            text = text_model.render_chat([{"role": "user", "content": text}])
        tokens = text_model.encode(text, add_special_tokens=False, param="prompt")
        assert list(tokens) == entry["prompt_token_ids"], entry["text"]


def num_clear(entry: dict[str, Any]) -> int:
    """Return how many tokens come before the first tie of two logits."""
    margins = entry["margins"]
    return next((i for i, margin in enumerate(margins) if margin < TIE_MARGIN), len(margins))


def test_the_reference_has_a_long_prompt_and_long_clear_answers() -> None:
    entries = reference()
    assert Counter(entry["kind"] for entry in entries) == {"chat": 4, "completion": 5}
    assert {len(entry["token_ids"]) for entry in entries} == {48}
    assert max(len(entry["prompt_token_ids"]) for entry in entries) > 2 * CHUNK
    assert sum(map(num_clear, entries)) >= 0.8 * 48 * len(entries)


@pytest.mark.parametrize("number", range(9))
def test_answers_are_those_of_transformers(runner: ModelRunner, number: int) -> None:
    """On the dequantised weights, up to ties of the first two logits."""
    entry = reference()[number]
    count = num_clear(entry)
    found = greedy_tokens(runner, entry["prompt_token_ids"], max(1, count))
    assert found[:count] == entry["token_ids"][:count]
