"""What `--model` may name, and what a router given a folder does not need."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import CheckpointError, ConfigError
from pdserve.checkpoints.resolve import names_of, resolve_checkpoint


def test_a_hugging_face_folder_is_returned_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert resolve_checkpoint(str(tmp_path / "model")) == tmp_path / "model"
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("./model") == tmp_path / "model"


def test_a_model_is_called_as_it_was_typed_too() -> None:
    assert names_of("demo", Path("/cache/SmolLM2")) == "SmolLM2,demo"
    assert names_of("./demo", Path("/here/demo")) == "demo"
    assert names_of("/here/a,b", Path("/here/a,b")) == "a-b"


def test_a_folder_needs_no_numerics(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    script = (
        "import sys\n"
        "from pdserve.checkpoints.resolve import resolve_checkpoint\n"
        "resolve_checkpoint(sys.argv[1])\n"
        "heavy = {'numpy', 'gguf', 'safetensors', 'tqdm', 'paddle', 'numba'}\n"
        "print(sorted(heavy & {*sys.modules}))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert printed.stdout.strip() == "[]"


def test_the_folder_of_a_gguf_file_is_in_the_cache(
    write_gguf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    folder = resolve_checkpoint(str(write_gguf()), progress=False)
    assert folder.is_relative_to(tmp_path / "cache")
    assert (folder / "config.json").is_file()


def test_a_gguf_file_may_be_called_in_capitals(
    write_gguf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    path = write_gguf().rename(tmp_path / "UPPER.GGUF")
    assert resolve_checkpoint(str(path), progress=False).name == "UPPER"
    with pytest.raises(CheckpointError, match=r"or a file in it, such as UPPER\.GGUF"):
        resolve_checkpoint(str(tmp_path), progress=False)


def test_a_home_folder_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match="~no-such-user/model: there is no such user"):
        resolve_checkpoint("~no-such-user/model", progress=False)


def test_a_missing_package_says_what_to_install(
    write_gguf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    path = write_gguf()
    for name in ("gguf_folder", "gguf_tokenizer"):
        monkeypatch.delitem(sys.modules, f"pdserve.checkpoints.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        CheckpointError, match=r"needs the Python package tokenizers: .*'\.\[local\]'"
    ):
        resolve_checkpoint(str(path), progress=False)


def test_demo_is_the_demo_model(demo_folder: Path) -> None:
    assert resolve_checkpoint("demo") == demo_folder


def test_a_name_of_the_hub_is_told_how_to_download_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"hf download Qwen/Qwen3-0\.6B --local-dir Qwen3-0\.6B"
    ):
        resolve_checkpoint("Qwen/Qwen3-0.6B", progress=False)
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"no config\.json in it"):
        resolve_checkpoint("Qwen/Qwen3-0.6B", progress=False)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "missing",
            "missing does not exist: wanted a Hugging Face folder, a .gguf file or one of the "
            "names demo, qwen2.5-coder-0.5b",
        ),
        ("empty", "empty: no config.json in it"),
        ("notes.txt", "notes.txt is not a folder or .gguf file"),
        ("broken.gguf", "wanted a GGUF file"),
    ],
)
def test_anything_else_is_named(
    tmp_path: Path, name: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "broken.gguf").write_text("hello")
    with pytest.raises(CheckpointError) as raised:
        resolve_checkpoint(str(tmp_path / name), progress=False)
    assert wanted in str(raised.value)
