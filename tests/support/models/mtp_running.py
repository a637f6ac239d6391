"""Sequences that decode on a runner with an MTP layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.request import SamplingParams
from common.settings.config import EngineConfig, ModelConfig, SpeculationConfig
from engine.core.runner_contract import DrawnTokens, SampleInput, ScheduledSequence
from engine.runner.model_runner import ModelRunner
from engine.runner.start.load import load_model_runner
from tests.support.models.running import GREEDY
from tests.support.models.tiny_checkpoints import (
    CONFIGS,
    mtp_weights_of,
    write_checkpoint,
    write_safetensors,
)

TARGETS = {"deepseek": "llama", "ernie": "ernie_biased", "mimo": "mimo"}
"""A tiny model for each layout."""


def draft_ids(count: int) -> np.ndarray:
    """Some token ids of the tiny vocabulary, rising."""
    chosen = np.random.RandomState(7).permutation(97)[:count]
    return np.sort(chosen).astype(np.int32)


def load_with_mtp(
    folder: Path,
    file: Path | None = None,
    *,
    host_space: int = 0,
    packed_folder: Path | None = None,
    activation_dtype: str = "auto",
    **engine: Any,
) -> ModelRunner:
    """A runner that drafts with the layer in `file`, or in the checkpoint."""
    settings: dict[str, Any] = {
        "block_size": 16,
        "kv_cache_memory": 2 << 20,
        "attention_backend": "numba",
    }
    return load_model_runner(
        ModelConfig(model=str(folder), activation_dtype=activation_dtype),
        EngineConfig(**(settings | engine)),
        speculation=SpeculationConfig(
            speculative_method="mtp", speculative_model=str(file) if file else ""
        ),
        host_space=host_space,
        packed_folder=packed_folder,
    )


def write_inside(folder: Path, layout: str) -> Path:
    """Write a checkpoint that contains its MTP layer."""
    config = CONFIGS[TARGETS[layout]]
    return write_checkpoint(folder, config, extra=mtp_weights_of(config, layout))


def write_beside(folder: Path, family: str, num_draft_ids: int = 0) -> tuple[Path, Path]:
    """Write a checkpoint, and a file with a DeepSeek style layer for it."""
    config = CONFIGS[family]
    tensors = mtp_weights_of(config, "deepseek")
    if num_draft_ids:
        tensors["draft_token_ids"] = draft_ids(num_draft_ids)
    write_checkpoint(folder / "target", config)
    write_safetensors(folder / "mtp.safetensors", tensors)
    return folder / "target", folder / "mtp.safetensors"


def step(
    known: Sequence[int],
    start: int,
    table: Sequence[int],
    drafts: Sequence[int] = (),
    *,
    num_prompt: int | None = None,
    num_proposals: int = 0,
    params: SamplingParams = GREEDY,
) -> ScheduledSequence:
    """All known tokens from `start` on and `drafts`; the next token is drawn."""
    num_prompt = len(known) if num_prompt is None else num_prompt
    output = list(known[num_prompt:])
    sample = SampleInput(params, len(output), list(known[:num_prompt]), output)
    tokens = [*known[start:], *drafts]
    return ScheduledSequence(
        0, tokens, start, table, sample, num_drafts=len(drafts), num_proposals=num_proposals
    )


def chunk(known: Sequence[int], start: int, end: int, table: Sequence[int]) -> ScheduledSequence:
    """A part of a prompt, not its end."""
    return ScheduledSequence(0, known[start:end], start, table, None, next_token_id=known[end])


def only(results: Sequence[DrawnTokens | None]) -> DrawnTokens:
    """Return the result of a step with one sequence."""
    [result] = results
    assert result is not None
    return result


def ids(result: DrawnTokens) -> list[int]:
    """The drawn tokens' ids."""
    return list(result.token_ids)


def slots(runner: ModelRunner, table: Sequence[int], count: int) -> np.ndarray:
    """Keys and values of the first `count` positions, every layer: `[layers, 2, heads, n, dim]`."""
    layout = runner.layout
    shape = (layout.num_layers, 2, runner.num_blocks, layout.num_kv_heads, layout.block_size, -1)
    cache = runner.kv_bytes.view(np.float32).reshape(shape)
    blocks = [cache[:, :, block] for block in table]
    return np.concatenate(blocks, axis=3)[..., :count, :].copy()
