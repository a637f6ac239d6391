"""Buffers of steps: allocated once, never grown, and nothing of an earlier step is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numba import get_num_threads

from common.errors import InternalError
from engine.core.runner_contract import DrawnTokens
from engine.core.step.step_batch import batch_of
from engine.runner.cpu.decoder import NumbaDecoder
from engine.runner.cpu.step_buffers import RowBuffer, StepBuffers
from engine.runner.kernels.attention import STATE_LANES
from engine.runner.kernels.attention_plan import PART_ROWS
from engine.runner.kernels.experts import BAND_ROWS
from engine.runner.model_runner import ModelRunner
from tests.support.models.mtp_running import chunk, load_with_mtp, step, write_inside
from tests.support.models.running import load, scheduled
from tests.support.models.tiny_checkpoints import CONFIGS, write_checkpoint

PROMPT = [5, 9, 30, 4, 77, 12, 8, 61, 3, 44] * 4
OTHER = [88, 1, 2, 90, 17, 23, 42, 6] * 5


def buffers_of(runner: ModelRunner) -> StepBuffers:
    decoder = runner.decoder
    assert isinstance(decoder, NumbaDecoder)
    return decoder.step_buffers


def poison(runner: ModelRunner) -> None:
    """Make every buffer such that reading what a step did not write shows in its results."""
    for buffer in buffers_of(runner).buffers:
        buffer.first(buffer.num_rows).fill(np.nan)


def test_the_first_rows_are_contiguous_and_of_one_memory() -> None:
    buffer = RowBuffer(6, 8)
    buffer.first(6)[:] = np.arange(48).reshape(6, 8)
    few, narrow = buffer.first(2), buffer.first(3, 4)
    assert few.shape == (2, 8)
    assert narrow.shape == (3, 4)
    assert few.flags.c_contiguous
    assert narrow.flags.c_contiguous
    np.testing.assert_array_equal(few.reshape(-1), np.arange(16))
    np.testing.assert_array_equal(narrow.reshape(-1), np.arange(12))
    assert buffer.num_bytes == 6 * 8 * 4


def test_rows_are_copied_in_their_order() -> None:
    buffer, source = RowBuffer(4, 3), np.arange(15, dtype=np.float32).reshape(5, 3)
    copied = buffer.copy_rows(source, np.array([4, 0, 2]))
    np.testing.assert_array_equal(copied, source[[4, 0, 2]])
    assert np.shares_memory(copied, buffer.first(4))


def test_a_buffer_does_not_grow() -> None:
    buffer = RowBuffer(6, 8)
    with pytest.raises(InternalError, match="7 rows of 8: wanted at most 6 rows of 8"):
        buffer.first(7)
    with pytest.raises(InternalError, match="6 rows of 9: wanted at most 6 rows of 8"):
        buffer.first(6, 9)
    with pytest.raises(InternalError, match="7 rows"):
        buffer.copy_rows(np.zeros((9, 8), np.float32), np.arange(7))


def test_experts_take_no_more_between_their_products_than_what_a_token_is_sent_to(
    tmp_path: Path,
) -> None:
    """Inputs and outputs of a hidden size for each expert of a row would be many times that."""
    config = CONFIGS["qwen3_moe"]
    folder = write_checkpoint(tmp_path, config)
    dense = config | {"mlp_only_layers": list(range(config["num_hidden_layers"]))}
    without = load(write_checkpoint(tmp_path / "dense", dense), max_num_batched_tokens=900)
    runner = load(folder, max_num_batched_tokens=900)
    chosen, experts = config["num_experts_per_tok"], config["num_experts"]
    inner = max(0, chosen * config["moe_intermediate_size"] - config["intermediate_size"])
    by_row = inner + experts + 3 * chosen
    by_thread = BAND_ROWS * config["hidden_size"]
    wanted = 900 * by_row + get_num_threads() * by_thread + experts
    assert buffers_of(runner).num_bytes - buffers_of(without).num_bytes == 4 * wanted


def test_the_sizes_follow_from_the_largest_step(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["llama"])
    runner = load(folder, max_num_batched_tokens=50, max_num_seqs=4)
    config = CONFIGS["llama"]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = 16
    heads = config["num_attention_heads"] * head_dim
    qkv = heads + 2 * config["num_key_value_heads"] * head_dim
    by_row = 2 * hidden + qkv + heads + inner
    by_logits_row = 2 * hidden + config["vocab_size"]
    parts = PART_ROWS * (head_dim + STATE_LANES)
    assert buffers_of(runner).num_bytes == 4 * (50 * (by_row + by_logits_row) + parts)


def test_every_step_uses_the_same_memory(tmp_path: Path) -> None:
    runner = load(write_checkpoint(tmp_path, CONFIGS["llama"]), max_num_batched_tokens=64)
    decoder = runner.decoder
    seen = set()
    begin = decoder.begin

    def noting_begin(batch: object) -> np.ndarray:
        hidden: np.ndarray = begin(batch)  # type: ignore[arg-type]
        seen.add(hidden.ctypes.data)
        return hidden

    decoder.begin = noting_begin  # type: ignore[method-assign]
    count = len(buffers_of(runner).buffers)
    for end in (64, 3, 40):
        runner.execute(batch_of([scheduled(([*PROMPT, *OTHER])[:end], 0, range(4))]))
    assert len(seen) == 1
    assert len(buffers_of(runner).buffers) == count


def serve(runner: ModelRunner, *, is_poisoned: bool) -> list[DrawnTokens | None]:
    """Steps of different sizes: chunks, decodes with drafts, and proposals of several sequences."""
    results: list[DrawnTokens | None] = []
    for batch in (
        [chunk(PROMPT, 0, 30, [1, 2, 3, 4]), step(OTHER, 0, [5, 6, 7, 8], num_proposals=3)],
        [step(PROMPT, 30, [1, 2, 3, 4], num_proposals=3)],
        [
            step([*OTHER, 7], 40, [5, 6, 7, 8], [9, 11, 4], num_prompt=40, num_proposals=2),
            step([*PROMPT, 3], 40, [1, 2, 3, 4], [9], num_prompt=40, num_proposals=3),
        ],
        [step([*PROMPT, 3, 4], 41, [1, 2, 3, 4], num_prompt=40, num_proposals=1)],
    ):
        if is_poisoned:
            poison(runner)
        results += runner.execute(batch_of(batch))
    return results


@pytest.mark.parametrize("layout", ["deepseek", "ernie", "mimo"])
def test_nothing_of_an_earlier_step_is_read(tmp_path: Path, layout: str) -> None:
    folder = write_inside(tmp_path, layout)
    usual = serve(load_with_mtp(folder), is_poisoned=False)
    poisoned = serve(load_with_mtp(folder), is_poisoned=True)
    assert poisoned == usual
    exact = load_with_mtp(folder, max_num_batched_tokens=70, max_num_seqs=2)
    assert serve(exact, is_poisoned=True) == usual


def test_a_step_beyond_the_buffers_is_refused_by_them(tmp_path: Path) -> None:
    folder = write_inside(tmp_path, "deepseek")
    runner = load_with_mtp(folder, max_num_seqs=2)
    batch = [step(PROMPT, 0, [i, i + 1, i + 2], num_proposals=1) for i in (0, 3, 6)]
    with pytest.raises(InternalError, match="a step buffer of 3 rows"):
        runner.execute(batch_of(batch))
