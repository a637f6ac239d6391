"""Which file the layer that drafts is read from."""

from pathlib import Path

import pytest

from common.config import SpeculationConfig
from common.errors import CheckpointError
from engine.runner.checkpoint import Checkpoint
from engine.runner.model_spec import read_decoder_spec
from pdserve.checkpoints import speculative_model
from pdserve.checkpoints.speculative_model import resolve_speculation
from tests.unit.runner.tiny_checkpoints import (
    CONFIGS,
    mtp_weights_of,
    write_checkpoint,
    write_safetensors,
)

LLAMA = CONFIGS["llama"]
MTP = SpeculationConfig(speculative_method="mtp")


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that the shipped file was made for."""
    folder = write_checkpoint(tmp_path / "demo", LLAMA)
    shipped = tmp_path / "shipped.safetensors"
    identity = Checkpoint(folder, read_decoder_spec(folder)).identity()
    metadata = {"target": "demo", "target_identity": identity}
    write_safetensors(shipped, mtp_weights_of(LLAMA, "deepseek"), metadata=metadata)
    monkeypatch.setattr(speculative_model, "_SHIPPED", shipped)
    return folder


def test_the_demo_model_has_a_file_that_comes_with_it(demo: Path) -> None:
    found = resolve_speculation(MTP, demo)
    assert found.speculative_model == str(demo.parent / "shipped.safetensors")
    assert found.speculative_method == "mtp"


def test_other_weights_must_carry_their_layer_themselves(demo: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", LLAMA, seed=1)
    assert resolve_speculation(MTP, other) == MTP


def test_a_named_file_goes_first(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.safetensors").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    named = SpeculationConfig(speculative_method="mtp", speculative_model="mine.safetensors")
    found = resolve_speculation(named, demo)
    assert found.speculative_model == str(tmp_path / "mine.safetensors")


def test_a_named_file_that_is_not_there(demo: Path) -> None:
    named = SpeculationConfig(speculative_method="mtp", speculative_model="/nowhere/mtp")
    with pytest.raises(CheckpointError, match="/nowhere/mtp: no such file"):
        resolve_speculation(named, demo)


@pytest.mark.parametrize("method", ["none", "ngram", "suffix"])
def test_methods_that_need_no_file_read_none(tmp_path: Path, method: str) -> None:
    speculation = SpeculationConfig(speculative_method=method)
    assert resolve_speculation(speculation, tmp_path / "nowhere") == speculation
