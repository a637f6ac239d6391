"""From what `--model` names to a Hugging Face folder."""

from __future__ import annotations

import re
from pathlib import Path

from common.errors import CheckpointError

DEMO_MODEL = "demo"

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_checkpoint(model: str, *, progress: bool = True) -> Path:
    """Return the Hugging Face folder that `model` stands for, as an absolute path.

    `model` is such a folder (returned as it is), a `.gguf` file (converted into the cache on first
    use), or "demo". A folder called `demo` is written `./demo`. Raises CheckpointError naming the
    path and what was wanted.
    """
    path = Path(model).expanduser().absolute()
    if model != DEMO_MODEL and path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path}: no config.json in it: wanted a Hugging Face folder")
        return path
    if model == DEMO_MODEL or (path.is_file() and path.suffix == ".gguf"):
        return _converted(model, path, progress=progress)
    if _HUB_ID.fullmatch(model) and not path.exists():
        raise CheckpointError(
            f"{path} does not exist: if {model} is a model of the Hugging Face Hub, download it "
            f"first with `hf download {model} --local-dir {path.name}`, and name that folder"
        )
    found = "is not a folder or .gguf file" if path.exists() else "does not exist"
    raise CheckpointError(
        f"{path} {found}: wanted a Hugging Face folder, a .gguf file or '{DEMO_MODEL}'"
    )


def _converted(model: str, path: Path, *, progress: bool) -> Path:
    # Imported here: the converters need numpy, gguf and tqdm, which a router given a Hugging Face
    # folder does not have.
    try:
        if model == DEMO_MODEL:
            from pdserve.checkpoints.demo_model import demo_model_folder

            return demo_model_folder(progress)
        from pdserve.checkpoints.gguf_convert import convert_gguf_cached

        return convert_gguf_cached(path, progress=progress)
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{model}: converting GGUF needs the Python package {error.name}: "
            "`pip install '.[local]'`, or name a Hugging Face folder"
        ) from None
