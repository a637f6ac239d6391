"""A GGUF file as a Hugging Face folder: config and tokenizer files, and a link to the weights.

The weights stay where and as they are: a node reads the GGUF file itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from common.files.cache_folder import build_once, cache_root
from common.files.model_config import longest_context
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.gguf_file import GgufFile
from engine.runner.weights.gguf_weights import WEIGHTS_FILE
from engine.runner.weights.spec.model_spec import read_decoder_spec
from pdserve.checkpoints.gguf_shape import GgufShape
from pdserve.checkpoints.gguf_tokenizer import (
    build_tokenizer,
    ends_of_turns,
    special_token_ids,
    tokenizer_config,
)

# Part of every cache key: raise it when other files are written.
FOLDER_VERSION = 5

_HEAD_BYTES = 1 << 20


def gguf_folder_cached(gguf_path: Path) -> Path:
    """Return the Hugging Face folder for `gguf_path`, made in the cache on first use.

    A file counts as the same while its size, modification time and first MiB stay.
    Raises CheckpointError when the file cannot be read, is not whole or is not supported, and when
    the cache cannot be written.
    """
    folder = build_once(
        cache_root() / "gguf" / _cache_key(gguf_path) / gguf_path.stem,
        lambda folder: make_gguf_folder(gguf_path, folder),
    )
    link = folder / WEIGHTS_FILE
    try:
        if not link.is_symlink() or link.readlink() != gguf_path.absolute():
            _link(gguf_path, folder)  # the same file in another place, such as after a move
    except OSError as error:
        raise CheckpointError(
            f"{link}: cannot be made a link to {gguf_path.absolute()}: {error.strerror}: wanted a "
            "cache folder that can be written, or another one in PDSERVE_CACHE"
        ) from None
    return folder


def make_gguf_folder(gguf_path: Path, folder: Path) -> None:
    """Write config, tokenizer and generation config of `gguf_path` into `folder`.

    The weights are linked to, unless they are in `folder` already. Raises `CheckpointError`
    when the file is not supported.
    """
    gguf = GgufFile(gguf_path)
    _refuse_a_part(gguf)
    shape = GgufShape.of(gguf)
    special_ids = {f"{name}_id": token_id for name, token_id in special_token_ids(gguf).items()}
    special_ids.pop("unk_token_id", None)
    config = {**shape.config(), **special_ids}
    _write_json(folder / "config.json", config)
    if gguf_path.parent != folder:
        _link(gguf_path, folder)
    try:
        spec = read_decoder_spec(folder)
    except CheckpointError as error:
        reason = str(error).removeprefix(f"{folder / 'config.json'}: ")
        raise CheckpointError(f"{gguf_path}: as config.json: {reason}") from None
    Checkpoint(folder, spec)  # a tensor that is missing is reported here
    _write_json(folder / "generation_config.json", {**special_ids, **_stops(gguf, special_ids)})
    _write_json(folder / "tokenizer_config.json", tokenizer_config(gguf, longest_context(config)))
    build_tokenizer(gguf).save(str(folder / "tokenizer.json"))


def _refuse_a_part(gguf: GgufFile) -> None:
    """Raise `CheckpointError` for one file of several that are a model together."""
    count = gguf.integer("split.count", 1)
    if count > 1:
        number = gguf.integer("split.no", 0) + 1
        raise CheckpointError(
            f"{gguf.path} is part {number} of {count} of a split model (split.count): split files "
            "are not read: join them with `llama-gguf-split --merge FIRST_PART WHOLE.gguf`"
        )


def _link(gguf_path: Path, folder: Path) -> None:
    """Make the folder's link to the weights, in one step if there is another one."""
    new = folder / f".{WEIGHTS_FILE}.{os.getpid()}"
    new.unlink(missing_ok=True)
    new.symlink_to(gguf_path.absolute())
    new.rename(folder / WEIGHTS_FILE)


def _stops(gguf: GgufFile, special_ids: dict[str, int]) -> dict[str, list[int]]:
    """Return the ids that end an answer; empty unless turns have ends of their own."""
    end_of_text = special_ids.get("eos_token_id")
    of_turns = [one for one in ends_of_turns(gguf) if one != end_of_text]
    if not of_turns:
        return {}
    return {"eos_token_id": [*([] if end_of_text is None else [end_of_text]), *of_turns]}


def _cache_key(gguf_path: Path) -> str:
    try:
        status = gguf_path.stat()
        with gguf_path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise CheckpointError(f"{gguf_path}: cannot be read: {error.strerror}") from None
    identity = f"{FOLDER_VERSION} {status.st_size} {status.st_mtime_ns} ".encode()
    return hashlib.sha256(identity + head).hexdigest()[:24]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
