"""Runners on tiny checkpoints, and the logits they hand to the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from common.request import SamplingParams
from common.settings.config import EngineConfig, ModelConfig, SpeculationConfig
from engine.core.runner_contract import SampleInput, ScheduledSequence
from engine.core.step.step_batch import batch_of
from engine.runner.cache.kv_cache import KVCache
from engine.runner.drawing.draws import HostDraw
from engine.runner.drawing.sampler import SampledRows, Sampler
from engine.runner.model_runner import ModelRunner
from engine.runner.start.load import load_model_runner

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


def load(
    folder: Path,
    max_model_len: int = 0,
    *,
    num_drafts: int = 0,
    activation_dtype: str = "auto",
    quantization: str = "none",
    load_format: str = "auto",
    host_space: int = 0,
    **engine: Any,
) -> ModelRunner:
    """A runner with a small cache of blocks of 16, unless `engine` says otherwise.

    It verifies at most `num_drafts` drafts of a sequence in a step, and swaps into `host_space`
    bytes.
    """
    settings: dict[str, Any] = {
        "block_size": 16,
        "kv_cache_memory": 2 << 20,
        "attention_backend": "numba",
    }
    return load_model_runner(
        ModelConfig(
            model=str(folder),
            max_model_len=max_model_len,
            activation_dtype=activation_dtype,
            quantization=quantization,
            load_format=load_format,
        ),
        EngineConfig(**(settings | engine)),
        speculation=SpeculationConfig(
            speculative_method="ngram" if num_drafts else "none", num_speculative_tokens=num_drafts
        ),
        host_space=host_space,
    )


class RecordingSampler:
    """Keeps the logits it is given; draws the likeliest token."""

    def __init__(self) -> None:
        self.logits: list[np.ndarray] = []

    def draw(self, logits: np.ndarray, rows: SampledRows) -> tuple[np.ndarray, np.ndarray]:
        self.logits += [row.copy() for row in logits]
        return logits.argmax(axis=1), np.ones(len(logits), np.bool_)


def kv_cache_of(runner: ModelRunner) -> KVCache:
    """The runner's cache, which is in host memory."""
    cache = runner.cache
    assert isinstance(cache, KVCache)
    return cache


def host_draw(runner: ModelRunner) -> HostDraw:
    """What draws from the runner's logits on the host."""
    return HostDraw(runner.decoder, runner.vocab_size)


def scheduled(
    token_ids: Sequence[int], start: int, block_table: Sequence[int], *, is_sampled: bool = True
) -> ScheduledSequence:
    """Tokens of one sequence in one step."""
    sample = SampleInput(GREEDY, 0, [], []) if is_sampled else None
    return ScheduledSequence(0, token_ids, start, block_table, sample)


def logits_of(runner: ModelRunner, *batch: ScheduledSequence) -> list[np.ndarray]:
    """The logits of a step's sampled sequences, in order."""
    recorder = RecordingSampler()
    recording = host_draw(runner)
    recording._sampler = cast(Sampler, recorder)
    row_draw, runner._row_draw = runner._row_draw, recording
    try:
        runner.execute(batch_of(batch))
    finally:
        runner._row_draw = row_draw
    return recorder.logits


def logits_in_chunks(
    runner: ModelRunner, prompt: Sequence[int], table: Sequence[int], chunk: int
) -> np.ndarray:
    """Logits after `prompt`, computed `chunk` tokens at a time."""
    for start in range(0, len(prompt), chunk):
        [last] = logits_of(runner, scheduled(prompt[start : start + chunk], start, table))
    return last


def unscaled_keys(num_kv_heads: int, head_dim: int) -> np.ndarray:
    """The kernels' scales `[2, kv_heads, head_dim / 2]` where keys are not divided."""
    scales = np.ones((2, num_kv_heads, head_dim // 2), np.float32)
    scales[0] = np.float32(head_dim**-0.5)
    return scales
