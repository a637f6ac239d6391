"""The figures of bench.perplexity: which tokens count, and what a loss is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.perplexity import AXES, TEXT, figures, kept_score, kv_bytes, score, windows
from bench.serving import cluster_arguments, cluster_names
from common.config import EngineConfig, ModelConfig
from engine.core.plan import SampleInput, ScheduledSequence
from tests.unit.runner.running import GREEDY, load, logits_of
from tests.unit.runner.tiny_checkpoints import CONFIGS, prompt_of, write_checkpoint

NAMED: dict[Any, dict[str, str]] = {ModelConfig: {"model": "demo"}, EngineConfig: {}}
"""What a section requires."""


def test_windows_are_whole() -> None:
    assert windows(range(10), 4) == [range(4), range(4, 8)]
    assert windows(range(8), 4) == [range(4), range(4, 8)]
    assert windows(range(3), 4) == []


def test_a_loss_is_that_of_the_same_tokens() -> None:
    exact = np.log([0.5, 0.25])
    found = figures({"float32": exact, "int8": np.log([0.4, 0.25])})
    assert found["num_tokens"] == 2
    perplexity, loss = found["perplexity"], found["loss"]
    assert isinstance(perplexity, dict)
    assert isinstance(loss, dict)
    assert perplexity["float32"] == pytest.approx(8**0.5, abs=1e-4)
    assert loss["float32"] == 0
    assert loss["int8"] == pytest.approx(1.25**0.5 - 1, abs=1e-6)


def test_every_axis_is_a_setting_with_these_values() -> None:
    for key, values in AXES.items():
        section: Any = ModelConfig if hasattr(ModelConfig, key) else EngineConfig
        for value in values:
            assert not section(**{key: value}, **NAMED[section]).problems()


def test_the_text_is_long_enough_and_plain() -> None:
    text = TEXT.read_text(encoding="utf-8")
    assert text.isascii()
    assert len(text) > 80_000  # 22,744 tokens of the demo model
    assert "Gutenberg" not in text


def test_log_likelihoods_are_those_of_the_logits(tmp_path_factory: pytest.TempPathFactory) -> None:
    """In chunks of any size; a token's chance is that after the tokens before it."""
    folder = write_checkpoint(tmp_path_factory.mktemp("llama"), CONFIGS["llama"])
    prompt = prompt_of(150)
    runner = load(folder, max_model_len=256, max_num_batched_tokens=70)
    found = runner.log_likelihoods(prompt)
    assert len(found) == len(prompt) - 1
    whole = load(folder, max_model_len=256)
    np.testing.assert_array_equal(whole.log_likelihoods(prompt), found)
    for last in (1, 63, 64, 65, 71, 140, 149):
        sample = SampleInput(GREEDY, 0, [], [])
        (logits,) = logits_of(whole, ScheduledSequence(0, prompt[:last], 0, range(10), sample))
        chances = logits.astype(np.float64)
        total = math.log(np.exp(chances).sum())
        assert found[last - 1] == pytest.approx(chances[prompt[last]] - total, abs=1e-9)


def test_scores_of_a_window_are_computed_once(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ended command continues; other weights, arithmetic or tokens are other scores."""
    folder = write_checkpoint(tmp_path_factory.mktemp("llama"), CONFIGS["llama"])
    keep = tmp_path_factory.mktemp("scores")
    runner = load(folder, max_model_len=256)
    first = kept_score(runner, prompt_of(40), keep)
    np.testing.assert_array_equal(first, score(runner, prompt_of(40)))
    assert len(first) == 19
    (kept,) = keep.iterdir()
    np.save(kept, first + 1)
    np.testing.assert_array_equal(kept_score(runner, prompt_of(40), keep), first + 1)
    assert len(kept_score(runner, prompt_of(41), keep)) == 20
    other = load(folder, max_model_len=256, kv_cache_dtype="int8")
    assert kept_score(other, prompt_of(40), keep).tolist() != (first + 1).tolist()
    assert len(list(keep.iterdir())) == 3
    monkeypatch.setattr("bench.perplexity.sources_digest", lambda: "other kernels")
    np.testing.assert_array_equal(kept_score(runner, prompt_of(40), keep), first)
    assert len(list(keep.iterdir())) == 4


@pytest.mark.parametrize("context", [100, 128, 512])
def test_the_cache_holds_a_window(tmp_path: Path, context: int) -> None:
    folder = write_checkpoint(tmp_path / "llama", CONFIGS["llama"])
    runner = load(
        folder, max_model_len=context, block_size=64, kv_cache_memory=kv_bytes(folder, context)
    )
    assert runner.max_model_len == context
    assert runner.num_blocks <= context // 64 + 3


def test_clusters_of_each_topology_with_each_kv_cache() -> None:
    assert cluster_names(["pd", "mixed"], []) == ["pd", "mixed"]
    assert cluster_names(["pd"], ["float32", "int8"]) == ["pd float32", "pd int8"]
    assert cluster_arguments("pd int8", 3) == [
        "--prefill", "1", "--decode", "2", "--kv-cache-dtype", "int8",
    ]  # fmt: skip
    assert cluster_arguments("mixed", 3) == ["--mixed", "3"]
