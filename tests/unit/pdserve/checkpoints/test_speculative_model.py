"""Which file the layer that drafts is read from."""

from pathlib import Path

import pytest

from common.errors import CheckpointError
from common.settings.config import SpeculationConfig
from engine.runner.mtp.mtp_weights import TARGET_IDENTITY
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.spec.decoder_tensors import layer_shapes
from engine.runner.weights.spec.model_spec import DecoderSpec, read_decoder_spec
from engine.runner.weights.spec.rope_spec import RopeSpec
from engine.runner.weights.tensor_files import TensorFiles
from pdserve.checkpoints import speculative_model
from pdserve.checkpoints.speculative_model import resolve_speculation
from tests.support.models.tiny_checkpoints import (
    CONFIGS,
    mtp_weights_of,
    write_checkpoint,
    write_safetensors,
)

LLAMA = CONFIGS["llama"]
DEMO = DecoderSpec(
    architecture="LlamaForCausalLM", num_layers=30, hidden_size=576, intermediate_size=1536,
    num_heads=9, num_kv_heads=3, head_dim=64, vocab_size=49152, max_position=8192,
    rms_epsilon=1e-5, rope=RopeSpec(kind="default", theta=100000.0), is_rope_interleaved=False,
    has_tied_embeddings=True, has_qkv_bias=False, has_output_bias=False, has_mlp_bias=False,
    has_head_norms=False,
)  # fmt: skip
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


def test_the_file_that_comes_with_pdserve_is_for_the_demo_model() -> None:
    """SmolLM2-135M-Instruct's sizes; all but one tensor are what the runner reads."""
    file = Path(speculative_model.__file__).with_name("demo_mtp.safetensors")
    assert file.stat().st_size <= 10 * 10**6
    files = TensorFiles({file: ()})
    assert files.metadata["target"] == "SmolLM2-135M-Instruct"
    assert len(files.metadata[TARGET_IDENTITY]) == 64
    block = "model.layers.30."
    shapes = layer_shapes(DEMO, block) | {
        f"{block}enorm.weight": (576,),
        f"{block}hnorm.weight": (576,),
        f"{block}shared_head.norm.weight": (576,),
        f"{block}eh_proj.weight": (576, 1152),
    }
    for name, shape in shapes.items():
        files.check(file, name, shape)
    assert set(files.names()) == {*shapes, "draft_token_ids"}
    ids = files.read("draft_token_ids")
    assert ids[0] >= 0
    assert ids[-1] < DEMO.vocab_size
    assert (ids[1:] > ids[:-1]).all()
