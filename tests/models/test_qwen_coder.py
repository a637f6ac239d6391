"""Qwen2.5-Coder-0.5B-Instruct from a Q4_K_M file: five formats, biases, an untied head."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from common.config import EngineConfig, ModelConfig
from common.request import SamplingParams
from engine.core.plan import SampleInput, ScheduledSequence
from engine.runner.checkpoint import Checkpoint
from engine.runner.load import load_model_runner
from engine.runner.model_runner import ModelRunner
from engine.runner.model_spec import read_decoder_spec, read_eos_token_ids
from router.text.text_model import TextModel

REFERENCE_PATH = Path(__file__).parents[1] / "data" / "qwen_coder_reference.json"
TIE_MARGIN = 0.02
BLOCK_SIZE = 64
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


def reference() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(REFERENCE_PATH.read_text(encoding="utf-8"))
    return entries


@pytest.fixture(scope="module")
def runner(qwen_folder: Path) -> ModelRunner:
    return load_model_runner(
        ModelConfig(model=str(qwen_folder), max_model_len=1024, activation_dtype="float32"),
        EngineConfig(kv_cache_memory=64 << 20, block_size=BLOCK_SIZE, max_num_batched_tokens=512),
    )


def greedy_tokens(runner: ModelRunner, prompt: list[int], count: int) -> list[int]:
    known, start, drawn = prompt, 0, []
    while len(drawn) < count:
        table = range(-(-(len(prompt) + count) // BLOCK_SIZE))
        sample = SampleInput(GREEDY, len(drawn), prompt, drawn)
        sequence = ScheduledSequence(0, known, start, table, sample)
        [result] = runner.execute([sequence])
        assert result is not None
        start, known = start + len(known), list(result.token_ids)
        drawn = drawn + known
    return drawn


def test_the_file_has_its_formats(qwen_folder: Path) -> None:
    checkpoint = Checkpoint(qwen_folder, read_decoder_spec(qwen_folder))
    formats = Counter(checkpoint.blocks(name).format for name in checkpoint.names())
    assert formats == {"Q5_0": 133, "F32": 121, "Q8_0": 13, "Q4_K": 12, "Q6_K": 12}
    assert read_eos_token_ids(qwen_folder) == {151645}


def test_prompts_have_the_tokens_of_transformers(qwen_folder: Path) -> None:
    text_model = TextModel.load(qwen_folder, "qwen", 0)
    for entry in reference():
        if entry["kind"] == "completion":
            tokens = text_model.encode(entry["text"], add_special_tokens=False, param="prompt")
            assert list(tokens) == entry["prompt_token_ids"], entry["text"]


def test_answers_are_those_of_transformers(runner: ModelRunner) -> None:
    """On the dequantised weights, up to ties of the first two logits."""
    num_compared = 0
    for entry in reference():
        wanted = entry["token_ids"]
        ties = [i for i, margin in enumerate(entry["margins"]) if margin < TIE_MARGIN]
        num_clear = ties[0] if ties else len(wanted)
        found = greedy_tokens(runner, entry["prompt_token_ids"], max(1, num_clear))
        assert found[:num_clear] == wanted[:num_clear], entry["text"]
        num_compared += num_clear
    assert num_compared >= 0.8 * sum(len(entry["token_ids"]) for entry in reference())
