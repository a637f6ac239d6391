"""The figures of bench.quality.perplexity: which tokens count, and what a loss is."""

from __future__ import annotations

import math
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.quality import perplexity
from bench.quality.perplexity import (
    GOALS,
    SETTINGS,
    TEXT,
    Combination,
    combinations,
    figures,
    kept_score,
    kv_bytes,
    measure,
    score,
    windows,
)
from bench.quality.weight_folders import ALL_WEIGHTS
from bench.serving import cluster_arguments, cluster_names
from common.settings.config import EngineConfig, ModelConfig
from engine.core.runner_contract import SampleInput, ScheduledSequence
from tests.support.models.running import GREEDY, load, logits_of
from tests.support.models.tiny_checkpoints import CONFIGS, prompt_of, write_checkpoint

NAMED: dict[Any, dict[str, str]] = {ModelConfig: {"model": "demo"}, EngineConfig: {}}
"""What a section requires."""


def test_windows_are_whole() -> None:
    assert windows(range(10), 4) == [range(4), range(4, 8)]
    assert windows(range(8), 4) == [range(4), range(4, 8)]
    assert windows(range(3), 4) == []


EXACT = Combination("f32", "float32", "float32")
FILE = Combination("file", "float32", "float32")
CASES = {
    FILE: ("weights", EXACT),
    EXACT._replace(weights="q4_0"): ("weights", EXACT._replace(weights="q4_0_as_f32")),
    FILE._replace(activation_dtype="int8"): ("activation_dtype", FILE),
    FILE._replace(activation_dtype="int8", kv_cache_dtype="bfloat16"): (
        "activation_dtype",
        FILE._replace(kv_cache_dtype="bfloat16"),
    ),
    FILE._replace(activation_dtype="int8", kv_cache_dtype="int8"): (
        "kv_cache_dtype",
        FILE._replace(activation_dtype="int8"),
    ),
}
"""The goal of a combination, and what it is compared with."""


def test_a_loss_is_that_of_the_same_tokens() -> None:
    exact = np.log([0.5, 0.25])
    int8 = FILE._replace(activation_dtype="int8")
    found: Any = figures({FILE: exact, int8: np.log([0.4, 0.25])})
    assert found["num_tokens"] == 2
    assert found["perplexity"][FILE.name] == pytest.approx(8**0.5, abs=1e-4)
    # Half the difference of the two ln p is their standard deviation.
    assert found["perplexity_error"][FILE.name] == pytest.approx(
        8**0.5 * math.log(2) / 2 / 2**0.5, abs=1e-4
    )
    assert found["loss"][FILE.name] == 0
    assert found["loss"][int8.name] == pytest.approx(1.25**0.5 - 1, abs=1e-6)
    assert found["goals"]["activation_dtype"] == {
        int8.name: {
            "than": FILE.name,
            "loss": found["loss"][int8.name],
            "loss_error": found["loss_error"][int8.name],
            "goal": 0.01,
            "holds": False,
        }
    }


def test_a_goal_holds_up_to_its_loss() -> None:
    exact, goal = np.zeros(4), math.log(1 + GOALS["weights"])
    for lost, holds in ((goal, True), (goal + 2e-6, False), (-1.0, True)):
        found: Any = figures({EXACT: exact, FILE: exact - lost})
        assert found["goals"]["weights"][FILE.name]["holds"] is holds
    assert not found["goals"]["activation_dtype"]


@pytest.mark.parametrize(("one", "goal"), CASES.items())
def test_each_goal_is_about_one_change(one: Combination, goal: tuple[str, Combination]) -> None:
    assert one.goal == goal


def test_other_combinations_have_no_goal() -> None:
    for one in (
        FILE._replace(kv_cache_dtype="bfloat16"),
        EXACT._replace(weights="q4_0_as_f32"),
    ):
        assert one.goal is None


def test_combinations_differ_in_what_they_compute() -> None:
    found = combinations(ALL_WEIGHTS, *SETTINGS.values())
    assert found[0] == EXACT
    assert len(set(found)) == len(found)
    by_weights = {name: [one for one in found if one.weights == name] for name in ALL_WEIGHTS}
    assert {len(by_weights[name]) for name in ("f32", "f16", "bf16")} == {3}
    assert {len(by_weights[name]) for name in ("file", "q8_0", "q4_0")} == {6}
    assert {len(ones) for name, ones in by_weights.items() if name.endswith("_as_f32")} == {1}
    assert all(one.goal is None or one.goal[1] in found for one in found)


def test_every_value_is_one_of_a_node() -> None:
    for key, values in SETTINGS.items():
        section: Any = ModelConfig if hasattr(ModelConfig, key) else EngineConfig
        for value in values:
            assert not section(**{key: value}, **NAMED[section]).problems()


def test_one_model_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "llama", CONFIGS["llama"])
    loaded: list[weakref.ref[object]] = []
    original = perplexity.load

    def counted(*args: Any) -> Any:
        assert [one for one in loaded if one() is not None] == []
        runner = original(*args)
        loaded.append(weakref.ref(runner))
        return runner

    monkeypatch.setattr(perplexity, "load", counted)
    wanted = combinations(["file", "q8_0"], ["float32"], ["float32", "int8"])
    found = measure(folder, wanted, [prompt_of(40), prompt_of(40, 1)], 1, None)
    assert list(found) == wanted
    assert len(loaded) == 4
    assert {len(score) for score in found.values()} == {2 * 19}
    assert len({score.tobytes() for score in found.values()}) == 4


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
    first = kept_score(runner, "file", prompt_of(40), keep)
    np.testing.assert_array_equal(first, score(runner, prompt_of(40)))
    assert len(first) == 19
    (kept,) = keep.iterdir()
    np.save(kept, first + 1)
    np.testing.assert_array_equal(kept_score(runner, "file", prompt_of(40), keep), first + 1)
    assert len(kept_score(runner, "file", prompt_of(41), keep)) == 20
    other = load(folder, max_model_len=256, kv_cache_dtype="int8")
    assert kept_score(other, "file", prompt_of(40), keep).tolist() != (first + 1).tolist()
    assert len(list(keep.iterdir())) == 3
    # Weights of the same values have the same layout, in whatever format.
    np.testing.assert_array_equal(kept_score(runner, "f32", prompt_of(40), keep), first)
    monkeypatch.setattr("bench.quality.perplexity.sources_digest", lambda: "other kernels")
    np.testing.assert_array_equal(kept_score(runner, "file", prompt_of(40), keep), first)
    assert len(list(keep.iterdir())) == 5


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
