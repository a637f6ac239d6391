"""An MTP layer that does not fit is refused at start, naming tensor and file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from common.errors import CheckpointError
from common.settings.config import EngineConfig, ModelConfig, SpeculationConfig
from engine.core.step.step_batch import batch_of
from engine.runner.start.load import load_model_runner
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.model_spec import read_decoder_spec
from tests.support.models.mtp_running import load_with_mtp, only, step
from tests.support.models.tiny_checkpoints import (
    CONFIGS,
    mtp_weights_of,
    prompt_of,
    weights_of,
    write_checkpoint,
    write_safetensors,
)

LLAMA = CONFIGS["llama"]
DEEPSEEK = "model.layers.2."
Tensors = dict[str, np.ndarray]


def _load(tmp_path: Path, change: Callable[[Tensors], object], layout: str = "deepseek") -> None:
    folder = write_checkpoint(tmp_path / "target", LLAMA)
    tensors = mtp_weights_of(LLAMA, layout)
    change(tensors)
    write_safetensors(tmp_path / "mtp.safetensors", tensors)
    load_with_mtp(folder, tmp_path / "mtp.safetensors")


def _set(name: str, values: np.ndarray) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: values})


def _without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def _renumbered(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[name.replace("layers.2.", "layers.30.")] = tensors.pop(name)


ZEROS = np.zeros((64, 64), np.float32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without(f"{DEEPSEEK}enorm.weight"), ("enorm", "missing", "[64]")),
        (_without(f"{DEEPSEEK}shared_head.norm.weight"), ("shared_head.norm", "missing")),
        (_without(f"{DEEPSEEK}mlp.up_proj.weight"), ("mlp.up_proj", "missing", "[96, 64]")),
        (_without(f"{DEEPSEEK}eh_proj.weight"), ("no MTP layer", "ERNIE-4.5", "MiMo")),
        (_set(f"{DEEPSEEK}eh_proj.weight", ZEROS), ("eh_proj", "[64, 64]", "[64, 128]")),
        (_set(f"{DEEPSEEK}hnorm.weight", ZEROS[0, :32]), ("hnorm", "[32]", "[64]")),
        (_renumbered, ("number 30", "wanted 2")),
        (
            _set(f"{DEEPSEEK}mlp.experts.0.up_proj.weight", ZEROS),
            ("mixture of experts", "dense", "LlamaForCausalLM"),
        ),
        (_set(f"{DEEPSEEK}mlp.gate.weight", ZEROS), ("mixture of experts",)),
        (_set(f"{DEEPSEEK}self_attn.kv_a_proj_with_mqa.weight", ZEROS), ("latent attention",)),
        (_set(f"{DEEPSEEK}embed_tokens.weight", ZEROS), ("embed_tokens", "[97, 64]")),
    ],
)
def test_layers_that_do_not_fit(
    tmp_path: Path, change: Callable[[Tensors], object], words: tuple[str, ...]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        _load(tmp_path, change)
    for word in ("mtp.safetensors", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        np.array([3, 5, 5], np.int32),
        np.array([5, 3], np.int32),
        np.array([-1, 3], np.int32),
        np.array([3, 97], np.int32),
        np.zeros((2, 2), np.int32),
        np.zeros(0, np.int32),
        np.arange(5, dtype=np.float32),
    ],
)
def test_a_draft_vocabulary_that_is_none(tmp_path: Path, values: np.ndarray) -> None:
    with pytest.raises(CheckpointError, match=r"mtp.safetensors.*draft_token_ids"):
        _load(tmp_path, _set("draft_token_ids", values))


def test_a_file_for_another_target(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "target", LLAMA)
    other = write_checkpoint(tmp_path / "other", LLAMA, seed=1)
    identities = [Checkpoint(path, read_decoder_spec(path)).identity() for path in (folder, other)]
    file = tmp_path / "mtp.safetensors"
    for identity in identities:
        metadata = {"target": "Llama", "target_identity": identity}
        write_safetensors(file, mtp_weights_of(LLAMA, "deepseek"), metadata=metadata)
        if identity == identities[0]:
            load_with_mtp(folder, file)
            continue
        with pytest.raises(CheckpointError, match=f"made for Llama with identity {identity}"):
            load_with_mtp(folder, file)


@pytest.mark.parametrize("family", ["mistral_window", "gemma3"])
def test_a_target_whose_layers_are_others(tmp_path: Path, family: str) -> None:
    config = CONFIGS[family]
    folder = write_checkpoint(tmp_path / "target", config)
    write_safetensors(tmp_path / "mtp.safetensors", mtp_weights_of(config, "deepseek"))
    with pytest.raises(CheckpointError, match=r"sliding window .* wanted ngram, suffix, grammar"):
        load_with_mtp(folder, tmp_path / "mtp.safetensors")


def test_a_checkpoint_without_the_layer(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, LLAMA)
    with pytest.raises(CheckpointError, match=r"no MTP layer in it.*--speculative-model FILE"):
        load_with_mtp(folder)


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
@pytest.mark.parametrize("family", ["llama", "llama_tied_biased"])
def test_an_embedding_and_a_head_of_its_own_must_be_the_targets(
    tmp_path: Path, name: str, family: str
) -> None:
    config = CONFIGS[family]
    weights = weights_of(config)
    shared = weights["model.embed_tokens.weight"]
    if name == "shared_head.head":
        shared = weights.get("lm_head.weight", shared)
    for values in (shared, -shared):
        extra = mtp_weights_of(config, "deepseek") | {f"{DEEPSEEK}{name}.weight": values}
        folder = write_checkpoint(tmp_path, config, extra=extra)
        if values is shared:
            load_with_mtp(folder)
            continue
        with pytest.raises(CheckpointError, match=f"{name}.weight differs from the target's"):
            load_with_mtp(folder)


def test_of_several_layers_the_first_drafts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = mtp_weights_of(LLAMA, "deepseek")
    both = one | mtp_weights_of(LLAMA, "deepseek", seed=1, index=1)
    with caplog.at_level(logging.WARNING, "pdserve.engine"):
        runners = [
            load_with_mtp(write_checkpoint(tmp_path / name, LLAMA, extra=extra))
            for name, extra in (("one", one), ("both", both))
        ]
    assert caplog.messages == ["2 MTP layers: the first of them drafts every token"]
    first, second = (
        only(runner.execute(batch_of([step(prompt_of(20), 0, [3, 1], num_proposals=3)])))
        for runner in runners
    )
    assert first == second
    assert len(first.draft_token_ids) == 3


def test_other_weights_of_the_layer_are_another_layout(tmp_path: Path) -> None:
    """Its keys and values travel between nodes as those of any other layer."""
    folder = write_checkpoint(tmp_path / "target", LLAMA)
    layouts = []
    for seed in (0, 1):
        file = tmp_path / f"{seed}.safetensors"
        write_safetensors(file, mtp_weights_of(LLAMA, "deepseek", seed=seed))
        layouts.append(load_with_mtp(folder, file).layout)
    assert [layout.num_layers for layout in layouts] == [3, 3]
    assert layouts[0].fingerprint != layouts[1].fingerprint


@pytest.mark.parametrize("method", ["none", "ngram", "suffix"])
def test_other_methods_leave_the_layer_alone(tmp_path: Path, method: str) -> None:
    extra = mtp_weights_of(LLAMA, "deepseek")
    folder = write_checkpoint(tmp_path, LLAMA, extra=extra)
    runner = load_model_runner(
        ModelConfig(model=str(folder)),
        EngineConfig(block_size=16, kv_cache_memory=2 << 20),
        speculation=SpeculationConfig(speculative_method=method),
    )
    assert runner.layout.num_layers == 2
    assert only(runner.execute(batch_of([step(prompt_of(9), 0, [3])]))).draft_token_ids == ()
