"""A loaded runner's properties, and settings that do not fit."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import CheckpointError, ConfigError, InternalError
from common.settings.config import EngineConfig, ModelConfig, SpeculationConfig
from engine.core.runner_contract import ScheduledSequence, SequencesFailed
from engine.core.step.step_batch import batch_of
from engine.runner.gpu import back_end as gpu_back_end
from engine.runner.kernels.attention_plan import PIECE_KEYS
from engine.runner.model_runner import ModelRunner
from engine.runner.start.load import load_model_runner
from engine.runner.weights.spec.model_spec import read_decoder_spec
from tests.support.models.running import load, logits_of, scheduled
from tests.support.models.tiny_checkpoints import CONFIGS, mtp_weights_of, write_checkpoint

BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # layers, key and value, KV heads, block, head, float32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "llama", CONFIGS["llama"])


def test_what_a_runner_says_of_itself(folder: Path) -> None:
    runner = load(folder, kv_cache_memory=10 * BLOCK_BYTES + 1)
    assert runner.num_blocks == 10
    # The pool's 10 blocks but one, for one more step of the longest sequence.
    assert runner.max_model_len == 144
    assert load(folder).max_model_len == 512
    assert load(folder, max_model_len=100).max_model_len == 100
    assert runner.eos_token_ids == {2, 7}
    assert runner.vocab_size == 97
    assert runner.pairs_per_token == read_decoder_spec(folder).pairs_per_token > 1
    assert (runner.layout.num_layers, runner.layout.block_bytes) == (2, BLOCK_BYTES)
    assert runner.kv_bytes.shape == (2, 2, 10, runner.layout.piece_bytes)
    with pytest.raises(InternalError, match="warm_up must run first"):
        _ = runner.step_costs
    runner.warm_up()
    # Wider steps are measured if time is left, and a narrow one behind them.
    assert runner.step_costs.rows[-1] >= 8


def test_without_a_readable_tokenizer_grammars_are_refused(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "tokenizer.json").mkdir()  # that no user can read as a file, root included
    runner = load(folder)
    assert not runner.has_grammars
    assert "answers under grammars are refused: " in caplog.text
    assert f"{folder / 'tokenizer.json'} cannot be read: " in caplog.text


def test_a_tokenizer_that_cannot_be_read_and_has_an_end_ends_the_start(folder: Path) -> None:
    (folder / "tokenizer.json").mkdir()
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read: "):
        load(folder)


def test_attention_costs_as_much_as_the_matrix_products_at_some_distance(folder: Path) -> None:
    spec = replace(
        read_decoder_spec(folder),
        hidden_size=4096,
        intermediate_size=14_336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
    )
    # An 8B model: 218 million weights a layer, and 2 x 32 x 128 products for each pair.
    assert spec.pairs_per_token == 218_103_808 // 8192 == 26_624
    assert replace(spec, hidden_size=1, intermediate_size=1).pairs_per_token == 1
    # With windows, only the attention of the other layers grows with the context.
    mixed = replace(spec, num_layers=4, windows=(512, 512, 512, 0))
    assert mixed.pairs_per_token == 4 * 218_103_808 // 8192
    assert replace(spec, num_layers=2, windows=(512, 512)).pairs_per_token == 0


def test_what_a_spec_says_of_a_model_of_earlier_releases_stays(tmp_path: Path) -> None:
    """It is a part of the fingerprint, and nodes of two releases exchange KV."""
    plain = read_decoder_spec(write_checkpoint(tmp_path / "a", CONFIGS["llama"]))
    assert set(json.loads(plain.identity)) == {
        *("architecture", "num_layers", "hidden_size", "intermediate_size", "num_heads"),
        *("num_kv_heads", "head_dim", "vocab_size", "max_position", "rms_epsilon", "rope"),
        *("is_rope_interleaved", "has_tied_embeddings", "has_qkv_bias", "has_output_bias"),
        *("has_mlp_bias", "has_head_norms"),
    }
    windowed = read_decoder_spec(write_checkpoint(tmp_path / "b", CONFIGS["mistral_window"]))
    assert json.loads(windowed.identity)["windows"] == [37, 37]


def test_of_experts_those_count_to_which_a_token_is_sent(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIGS["ernie_moe"]))
    spec = read_decoder_spec(folder)
    assert spec.experts is not None
    experts = replace(
        spec.experts, layers=tuple(range(48)), num_experts=128, num_chosen=8, inner_size=768,
        shared_size=0,
    )  # fmt: skip
    # Qwen3-30B-A3B: 57 million weights of a layer's 623 million are multiplied with a token.
    spec = replace(
        spec, num_layers=48, hidden_size=2048, num_heads=32, num_kv_heads=4, head_dim=128,
        intermediate_size=6144, experts=experts,
    )  # fmt: skip
    assert spec.pairs_per_token == (2048 * (5120 + 4096) + 3 * 2048 * 8 * 768) // 8192 == 6912
    with_shared = replace(spec, experts=replace(experts, shared_size=1536))
    assert with_shared.pairs_per_token == 6912 + 3 * 2048 * 1536 // 8192
    half = replace(spec, experts=replace(experts, layers=tuple(range(24))))
    assert half.pairs_per_token == 6912, "an MLP of 6,144 is as much as 8 experts of 768"


def test_a_missing_paddle_is_told_with_the_command_that_installs_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "paddle", None)  # importing it is a ModuleNotFoundError
    with pytest.raises(
        ConfigError, match=r"wanted pip install '\.\[cpu\]', or '\.\[paddle-gpu\]' with Paddle"
    ):
        load(folder, attention_backend="paddle")


def test_weights_that_cannot_be_packed_are_told_before_kernels_are_compiled(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling takes a minute or more where the cache is empty, as it is where it is full."""
    compile_all = "engine.runner.cpu.common_kernels.compile_common_kernels"
    monkeypatch.setattr(compile_all, lambda **_: pytest.fail("kernels are compiled first"))
    (tmp_path / "full").touch()
    model, engine = ModelConfig(model=str(folder)), EngineConfig(attention_backend="numba")
    with pytest.raises(CheckpointError, match=r"cannot be written: Not a directory"):
        load_model_runner(model, engine, packed_folder=tmp_path / "full" / "packed")


def test_kv_of_one_back_end_is_not_taken_for_that_of_another(folder: Path) -> None:
    """Each rounds in its own way: equal fingerprints promise equal KV."""
    ours, theirs = (load(folder, attention_backend=name) for name in ("numba", "paddle"))
    assert ours.layout.fingerprint != theirs.layout.fingerprint
    assert ours.layout.fingerprint == load(folder).layout.fingerprint


def test_other_pieces_of_keys_are_another_layout(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are merged in another order, which changes the last bits of long contexts."""
    now = load(folder, attention_backend="numba").layout.fingerprint
    monkeypatch.setattr("engine.runner.kernels.attention_plan.PIECE_KEYS", PIECE_KEYS // 2)
    assert load(folder, attention_backend="numba").layout.fingerprint != now


def test_kv_bytes_are_the_cache_itself(folder: Path) -> None:
    ours, theirs = load(folder), load(folder)
    prompt = [5, 9, 30, 4] * 10
    logits_of(ours, scheduled(prompt, 0, [4, 2, 7]))
    theirs.kv_bytes[:, :, [1, 3, 5]] = ours.kv_bytes[:, :, [4, 2, 7]]
    [here] = logits_of(ours, scheduled([8], 40, [4, 2, 7]))
    [there] = logits_of(theirs, scheduled([8], 40, [1, 3, 5]))
    np.testing.assert_array_equal(here, there)


@pytest.mark.covers("F136")
def test_the_layout_names_weights_and_config(tmp_path: Path) -> None:
    llama = CONFIGS["llama"]
    kinds = {
        "same": (llama, 0),
        "again": (llama, 0),
        "weights": (llama, 1),
        "config": (llama | {"rope_theta": 20000.0}, 0),
    }
    prints = {
        name: load(write_checkpoint(tmp_path / name, config, seed=seed)).layout.fingerprint
        for name, (config, seed) in kinds.items()
    }
    assert prints["same"] == prints["again"]
    assert len(set(prints.values())) == 3


def test_a_pool_that_is_too_small_names_the_numbers(folder: Path) -> None:
    memory = 2 * BLOCK_BYTES - 1
    with pytest.raises(ConfigError, match=f"{memory} bytes: wanted at least {2 * BLOCK_BYTES}"):
        load(folder, kv_cache_memory=memory)


def test_settings_that_do_not_fit(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len is 513: wanted at most 512"):
        load(folder, max_model_len=513)
    with pytest.raises(ConfigError, match="num_threads is 100000: wanted 0 to"):
        load(folder, num_threads=100000)


def test_more_drafts_than_a_sequence_has_room_for(folder: Path) -> None:
    for method in ("ngram", "mtp"):
        speculation = SpeculationConfig(speculative_method=method, num_speculative_tokens=20)
        engine = EngineConfig(block_size=16, kv_cache_memory=2 << 20)
        model = ModelConfig(model=str(folder), max_model_len=20)
        if method == "mtp":
            write_checkpoint(
                folder, CONFIGS["llama"], extra=mtp_weights_of(CONFIGS["llama"], "deepseek")
            )
        with pytest.raises(ConfigError, match="num_speculative_tokens is 20: wanted less than"):
            load_model_runner(model, engine, speculation=speculation)


def test_a_step_may_be_larger_than_the_budget_of_prompts(folder: Path) -> None:
    engine = EngineConfig(block_size=16, kv_cache_memory=2 << 20, max_num_batched_tokens=64)
    runner = load_model_runner(ModelConfig(model=str(folder)), engine, max_chunk_tokens=70)
    runner.execute(batch_of([scheduled([1] * 70, 0, list(range(5)))]))
    with pytest.raises(InternalError, match="a step of 71 tokens: wanted at most 70"):
        runner.execute(batch_of([scheduled([1] * 71, 0, list(range(5)))]))


@pytest.fixture
def compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling the first time takes up to a minute: wrong settings are reported before."""
    compile_all = "engine.runner.cpu.common_kernels.compile_common_kernels"
    monkeypatch.setattr(compile_all, lambda **_: pytest.fail("compiles"))


@pytest.mark.usefixtures("compiles_nothing")
def test_a_cpu_computes_in_float32(folder: Path) -> None:
    with pytest.raises(ConfigError, match="dtype is bfloat16: a CPU computes in float32"):
        load_model_runner(ModelConfig(model=str(folder), dtype="bfloat16"), EngineConfig())


def test_sizes_of_experts_that_the_cpu_kernels_cannot_take(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["qwen3_moe"] | {"moe_intermediate_size": 40})
    with pytest.raises(ConfigError, match="moe_intermediate_size is 40"):
        load(folder, attention_backend="numba")


def test_sizes_that_the_cpu_kernels_cannot_take(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["llama"] | {"intermediate_size": 100})
    with pytest.raises(ConfigError, match="intermediate_size is 100"):
        load(folder, attention_backend="numba")
    with caplog.at_level(logging.WARNING, "pdserve.engine"):
        runner = load(folder, attention_backend="auto")
    assert runner.attention_backend == "paddle"
    assert "intermediate_size is 100" in caplog.text
    assert len(runner.execute(batch_of([scheduled([5], 0, [0])]))) == 1


@pytest.mark.parametrize(
    ("sequence", "words"),
    [
        (scheduled([97], 0, [0]), "token id 97: wanted 0 to 96"),
        (scheduled([-1], 0, [0]), "token id -1"),
        (scheduled([1], 0, [256]), "block id 256: wanted 0 to 255"),
        (scheduled([1], 0, [-1]), "block id -1"),
        (scheduled([1], 16, [0]), "1 blocks for 17 tokens: wanted 2"),
        (scheduled([1], 512, list(range(33))), "positions 512 to 513"),
        (scheduled([1], -1, [0]), "positions -1 to 0"),
        (scheduled([], 0, [0]), "at least one token"),
        (scheduled([1] * 65, 0, list(range(5))), "a step of 65 tokens: wanted at most 64"),
        (
            replace(scheduled([1], 0, [0], is_sampled=False), next_token_id=97),
            "next token id 97: wanted 0 to 96",
        ),
        (replace(scheduled([1, 2], 0, [0]), num_drafts=2), "2 drafts among 2 tokens"),
        (replace(scheduled([1, 2], 0, [0]), num_drafts=-1), "-1 drafts among 2 tokens"),
        (
            replace(scheduled([1, 2], 0, [0], is_sampled=False), num_drafts=1),
            "drafts without a sample",
        ),
    ],
)
def test_a_plan_outside_the_limits_touches_nothing(
    folder: Path, sequence: ScheduledSequence, words: str
) -> None:
    runner = load(folder, max_num_batched_tokens=64)
    before = runner.kv_bytes.copy()
    with pytest.raises(InternalError, match=words):
        runner.execute(batch_of([sequence]))
    np.testing.assert_array_equal(runner.kv_bytes, before)


def test_bad_logits_name_the_batch_entries_and_spare_the_others(folder: Path) -> None:
    runner = load(folder)
    good = [scheduled([3 + i], 0, [100 + i]) for i in range(70)]
    bad = scheduled([5], 16, [50, 51])
    runner.kv_bytes[:, :, 50] = 0xFF  # NaN in what this sequence did compute, as it says
    batch = [scheduled([4], 0, [0], is_sampled=False), *good[:66], bad, *good[66:]]
    with pytest.raises(SequencesFailed) as caught:
        runner.execute(batch_of(batch))
    assert list(caught.value.errors) == [67]
    assert caught.value.results[0] is None
    assert caught.value.results[67] is None
    assert [*caught.value.results[1:67], *caught.value.results[68:]] == runner.execute(
        batch_of(good)
    )


def test_a_gpu_back_end_without_a_card_says_what_is_missing(folder: Path) -> None:
    pytest.importorskip("triton")
    with pytest.raises(ConfigError, match="no NVIDIA driver: libcuda"):
        load(folder, attention_backend="triton")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"kv_cache_dtype": "float32"},
            "kv_cache_dtype is float32: attention_backend triton takes",
        ),
        ({"block_size": 128}, "block_size is 128: attention_backend triton takes 16, 32, 64"),
        ({"activation_dtype": "int8"}, "activation_dtype is int8: attention_backend triton takes"),
    ],
)
def test_what_the_gpu_kernels_lack_is_told_before_a_card_is_opened(
    folder: Path, settings: dict[str, Any], words: str
) -> None:
    pytest.importorskip("triton")
    with pytest.raises(ConfigError, match=words):
        load(folder, attention_backend="triton", **settings)


def test_where_there_is_a_card_auto_takes_it_or_says_why_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A setting that the GPU kernels lack is computed on the CPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr(gpu_back_end, "has_card", lambda: True)
    with caplog.at_level(logging.WARNING, "pdserve.engine"):
        runner = load(folder, attention_backend="auto", kv_cache_dtype="float32")
    assert runner.attention_backend == "numba"
    assert "kv_cache_dtype is float32: attention_backend triton takes" in caplog.text


def test_cards_that_are_asked_for_are_not_replaced_by_the_cpu(folder: Path) -> None:
    pytest.importorskip("triton")
    with pytest.raises(ConfigError, match="no NVIDIA driver"):
        load(folder, attention_backend="auto", gpus="1")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (CONFIGS["llama_tied_biased"], "the model has biases"),
        (CONFIGS["gemma3"] | {"sliding_window": 512}, "the model has norms after attention"),
    ],
    ids=["biases", "norms"],
)
def test_a_model_that_the_gpu_kernels_lack_names_the_back_ends_that_take_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    config: dict[str, Any],
    words: str,
) -> None:
    """And is computed on the CPU where the back end is left open."""
    folder = write_checkpoint(tmp_path, config)
    with pytest.raises(ConfigError, match=rf"triton, but {words}.*; wanted numba or paddle"):
        load(folder, attention_backend="triton")
    monkeypatch.setattr(gpu_back_end, "has_card", lambda: True)
    with caplog.at_level(logging.WARNING, "pdserve.engine"):
        assert load(folder, attention_backend="auto").attention_backend == "numba"
    assert words in caplog.text


def test_mtp_on_a_card_is_refused_with_what_to_set_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And computed on the CPU where the back end is left open, with the reason in the log."""
    pytest.importorskip("triton")
    extra = mtp_weights_of(CONFIGS["llama"], "deepseek")
    model = ModelConfig(model=str(write_checkpoint(tmp_path, CONFIGS["llama"], extra=extra)))
    speculation = SpeculationConfig(speculative_method="mtp", num_speculative_tokens=2)

    def runner_on(back_end: str, gpus: str = "") -> ModelRunner:
        engine = EngineConfig(
            block_size=16, kv_cache_memory=2 << 20, attention_backend=back_end, gpus=gpus
        )
        return load_model_runner(model, engine, speculation=speculation)

    told = "speculative_method is mtp, which has no kernels on a GPU; wanted ngram, suffix, grammar"
    with pytest.raises(ConfigError, match=f"attention_backend is triton, but {told}"):
        runner_on("triton")
    with pytest.raises(ConfigError, match=told):
        runner_on("auto", gpus="0")
    monkeypatch.setattr(gpu_back_end, "has_card", lambda: True)
    with caplog.at_level(logging.WARNING, "pdserve.engine"):
        assert runner_on("auto").attention_backend == "numba"
    assert told in caplog.text
