"""From what `--model` names to a Hugging Face folder."""

from __future__ import annotations

import re
from pathlib import Path

from common.errors import CheckpointError
from common.files.cache_folder import full_path
from common.model_names import KNOWN_MODELS

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_checkpoint(model: str, *, progress: bool = True) -> Path:
    """Return the Hugging Face folder that `model` stands for, as an absolute path.

    `model` is such a folder (returned as it is), a `.gguf` file (its config and tokenizer are
    written into the cache on first use), or one of `KNOWN_MODELS`. A folder called `demo` is
    written `./demo`. Raises CheckpointError naming the path and what was wanted, and
    `ConfigError` as `full_path` does.
    """
    path = full_path(model)
    if model not in KNOWN_MODELS and path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(
                f"{path}: no config.json in it: wanted a Hugging Face folder{_gguf_files_in(path)}"
            )
        return path
    if model in KNOWN_MODELS or (path.is_file() and path.suffix.lower() == ".gguf"):
        return _from_gguf(model, path, progress=progress)
    if _HUB_ID.fullmatch(model) and not path.exists():
        raise CheckpointError(
            f"{path} does not exist: if {model} is a model of the Hugging Face Hub, download it "
            f"first with `hf download {model} --local-dir {path.name}`, and name that folder"
        )
    found = "is not a folder or .gguf file" if path.exists() else "does not exist"
    raise CheckpointError(
        f"{path} {found}: wanted a Hugging Face folder, a .gguf file or one of the names "
        f"{', '.join(KNOWN_MODELS)}"
    )


def names_of(model: str, folder: Path) -> str:
    """Return the names in the API: that of the folder, and what was typed where that is a name."""
    name = folder.name.replace(",", "-")  # a comma separates names
    return f"{name},{model}" if model in KNOWN_MODELS else name


def _gguf_files_in(folder: Path) -> str:
    """Return what to name instead, where the folder has GGUF files."""
    files = sorted(one.name for one in folder.iterdir() if one.suffix.lower() == ".gguf")
    return f", or a file in it, such as {files[0]}" if files else ""


def _from_gguf(model: str, path: Path, *, progress: bool) -> Path:
    # Imported here: reading GGUF needs numpy, which a router given a Hugging Face folder does not
    # have.
    try:
        if model in KNOWN_MODELS:
            from pdserve.checkpoints import known_models
            from pdserve.checkpoints.packaged_model import packaged_model_folder

            return packaged_model_folder(known_models.KNOWN_MODELS[model], progress=progress)
        from pdserve.checkpoints.gguf_folder import gguf_folder_cached

        return gguf_folder_cached(path)
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{model}: reading GGUF needs the Python package {error.name}: "
            "`pip install '.[local]'`, or name a Hugging Face folder"
        ) from None
