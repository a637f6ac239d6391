"""A runner of models with mixtures of experts, in the interpreter: real steps and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted_runner import PROMPT, TABLE, InterpretedCard, computed, on_card  # isort: skip

import numpy as np
import pytest

from common.errors import ConfigError
from common.request import SamplingParams
from engine.core.runner_contract import SampleInput, ScheduledSequence
from engine.core.step.step_batch import batch_of
from engine.runner.gpu.weights import Form
from tests.support.models.hub_formats import Fp8, pack_folder
from tests.support.models.reference_decoder import reference_logits
from tests.support.models.running import load, logits_of, scheduled
from tests.support.models.tiny_checkpoints import CONFIGS, prompt_of, weights_of, write_checkpoint

pytestmark = pytest.mark.usefixtures("interpreted_card")
FAMILIES = ("qwen3_moe", "qwen3_moe_mixed", "ernie_moe", "ernie_moe_untied", "glm4_moe")
OTHERS = [[6, 7, 8], [10, 11, 12], [13, 14, 15]]
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


def folder_of(name: str, tmp_path: Path, **changed: Any) -> Path:
    return write_checkpoint(tmp_path, CONFIGS[name] | changed)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_logits_are_those_of_float64(name: str, dtype: str, tmp_path: Path) -> None:
    """bfloat16 beside float64: equal up to its rounding. A gate in bfloat16 is one matrix."""
    folder = write_checkpoint(tmp_path, CONFIGS[name], dtype=dtype)
    runner = on_card(folder)
    decoder: Any = runner.decoder
    gate = decoder.launches.weights.layers[1].experts.expert_gate
    assert gate.num_outputs == 8 * (3 if dtype == "F32" else 1)
    ours = computed(runner, PROMPT, [])
    exact = reference_logits(CONFIGS[name], weights_of(CONFIGS[name]), PROMPT)[-1]
    assert np.linalg.norm(ours - exact) / np.linalg.norm(exact) < 0.06


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("qwen3_moe", (1, 38, 39)),
        ("qwen3_moe_mixed", (16, 17, 33)),
        ("ernie_moe", (36, 37, 38, 39)),
    ],
)
def test_a_prompt_cut_anywhere_has_the_same_bits(
    name: str, cuts: Sequence[int], tmp_path: Path
) -> None:
    """Chunks, and at the ends single rows, which are graphs."""
    folder = folder_of(name, tmp_path)
    whole = computed(on_card(folder), PROMPT, [])
    assert np.array_equal(computed(on_card(folder), PROMPT, cuts), whole)


@pytest.mark.parametrize("name", ["qwen3_moe", "ernie_moe"])
def test_rows_beside_others_have_the_same_bits(name: str, tmp_path: Path) -> None:
    """A decoding row and a chunk in one step, and rows of a graph that has padding."""
    folder = folder_of(name, tmp_path)
    runner = on_card(folder)
    whole = computed(on_card(folder), PROMPT, [])
    computed(runner, PROMPT[:39], [])
    others = [scheduled(prompt_of(count, count), 0, table) for count, table in
              zip((1, 7, 20), OTHERS, strict=True)]  # fmt: skip
    mine = scheduled(PROMPT[39:], 39, TABLE)
    for place in (0, 3):
        batch = [*others[:place], mine, *others[place:]]
        assert np.array_equal(logits_of(runner, *batch)[place], whole)
    rows = [scheduled([5], count, table) for count, table in zip((1, 7), OTHERS, strict=False)]
    assert np.array_equal(logits_of(runner, rows[0], mine, rows[1])[1], whole)


@pytest.mark.parametrize("name", ["qwen3_moe", "ernie_moe"])
def test_drafts_are_verified_as_one_by_one(name: str, tmp_path: Path) -> None:
    """In a graph for four rows of a sequence, whose pairs are tiles with those of others."""
    runner = on_card(folder_of(name, tmp_path), max_num_seqs=2, num_drafts=3)
    runner.execute(batch_of([scheduled(PROMPT[:30], 0, TABLE, is_sampled=False)]))
    alone = [
        logits_of(runner, scheduled(PROMPT[place : place + 1], place, TABLE))[0]
        for place in range(30, 34)
    ]
    drafts = [
        ScheduledSequence(
            0, tokens, start, table, SampleInput(GREEDY, 0, PROMPT[: start + 1], []),
            num_drafts=len(tokens) - 1,
        )
        for tokens, start, table in ((PROMPT[30:34], 30, TABLE), ([7, 8, 9], 0, OTHERS[0]))
    ]  # fmt: skip
    assert np.array_equal(logits_of(runner, *drafts)[:4], alone)


def test_random_weights_are_computed_without_a_file(tmp_path: Path) -> None:
    """As a card measures a model that nobody has there."""
    folder = folder_of("ernie_moe", tmp_path)
    (folder / "model.safetensors").unlink()
    runner = on_card(folder, load_format="random")
    logits = computed(runner, PROMPT, [])
    assert np.isfinite(logits).all()
    assert np.array_equal(computed(runner, PROMPT, [38, 39]), logits)


def test_all_kernels_are_compiled_at_the_start_and_steps_allocate_nothing(
    tmp_path: Path, interpreted_card: list[InterpretedCard]
) -> None:
    """For layers of both kinds, and steps of up to 256 rows."""
    folder = folder_of("qwen3_moe_mixed", tmp_path)
    runner = on_card(folder, max_num_batched_tokens=256, kv_cache_memory=1 << 19)
    [card] = interpreted_card
    before = card.device.allocated_bytes
    for count, num_seqs in ((50, 4), (50, 1), (1, 3)):
        logits_of(runner, *(
            scheduled(prompt_of(count), 0, range(4 * one, 4 * one + 4)) for one in range(num_seqs)
        ))  # fmt: skip
    assert card.device.allocated_bytes == before
    assert card.late == ()


@pytest.mark.parametrize(
    ("name", "inner", "quantization", "forms"),
    [
        ("qwen3_moe", 128, "q4_0", (Form.Q4_0, Form.Q4_0)),
        ("ernie_moe", 128, "q8_0", (Form.Q8_0, Form.Q8_0)),
        ("qwen3_moe", 48, "q8_0", (Form.Q8_0, Form.BF16)),
    ],
    ids=["q4_0", "q8_0 beside a shared MLP", "down in bfloat16"],
)
def test_quantised_experts_have_the_same_bits_however_they_are_computed(
    name: str, inner: int, quantization: str, forms: tuple[Form, Form], tmp_path: Path,
    interpreted_card: list[InterpretedCard],
) -> None:  # fmt: skip
    """Single rows, chunks and rows beside others take tiles of several sizes."""
    wide = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": inner}
    folder = folder_of(name, tmp_path, **wide)
    runner = on_card(folder, quantization)
    decoder: Any = runner.decoder
    own = decoder.launches.weights.layers[1].experts
    assert (own.gate_up.form, own.down.form) == forms
    whole = computed(runner, PROMPT, [])
    exact = load(folder, 64, attention_backend="paddle", quantization=quantization)
    assert np.linalg.norm(whole - computed(exact, PROMPT, [])) / np.linalg.norm(whole) < 0.06
    assert np.array_equal(computed(runner, PROMPT, (17, 38, 39)), whole)
    other = scheduled(prompt_of(20), 0, OTHERS[0])
    assert np.array_equal(logits_of(runner, other, scheduled(PROMPT[17:], 17, TABLE))[1], whole)
    assert interpreted_card[0].late == ()


def test_experts_in_fp8_have_the_values_of_the_file(tmp_path: Path) -> None:
    config = CONFIGS["qwen3_moe"] | {
        "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 64,
    }  # fmt: skip
    (tmp_path / "stored").mkdir()
    values = pack_folder(tmp_path / "stored", config, weights_of(config), Fp8())
    runner = on_card(tmp_path / "stored")
    decoder: Any = runner.decoder
    own = decoder.launches.weights.layers[0].experts
    assert (own.gate_up.form, own.down.form) == (Form.FP8, Form.FP8)
    whole = computed(runner, PROMPT, [])
    exact = reference_logits(config, values, PROMPT)[-1]
    assert np.linalg.norm(whole - exact) / np.linalg.norm(exact) < 0.06
    assert np.array_equal(computed(runner, PROMPT, (17, 38, 39)), whole)


def test_what_the_kernels_cannot_compute_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model has biases in its MLP"):
        on_card(folder_of("llama_tied_biased", tmp_path / "biased"))
    folder = folder_of("qwen3_moe", tmp_path / "odd", moe_intermediate_size=40)
    with pytest.raises(ConfigError, match="inner_size is 40: the GPU kernels take multiples of 16"):
        on_card(folder)
