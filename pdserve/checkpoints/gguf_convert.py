"""A GGUF file of the `llama` architecture as a Hugging Face folder.

Weights become float32, which holds every quantised value exactly as it is dequantised. They are
written one tensor at a time, so the memory needed is that of the largest tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import CheckpointError
from pdserve.checkpoints.cache import build_once, cache_root
from pdserve.checkpoints.gguf_file import GgufFile, GgufTensor
from pdserve.checkpoints.gguf_tokenizer import (
    build_tokenizer,
    end_of_turn_id,
    special_token_ids,
    tokenizer_config,
)
from pdserve.checkpoints.llama_names import LlamaShape, expected_tensors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Part of every cache key: raise it when the conversion writes something else.
CONVERSION_VERSION = 1

_HEAD_BYTES = 1 << 20


def convert_gguf_cached(gguf_path: Path, *, progress: bool) -> Path:
    """Return the Hugging Face folder for `gguf_path`, converted into the cache on first use.

    A file counts as the same while its size, modification time and first MiB stay.
    Raises CheckpointError when the file cannot be read, is not whole or is not supported.
    """
    return build_once(
        cache_root() / "gguf" / _cache_key(gguf_path) / gguf_path.stem,
        lambda folder: convert_gguf(gguf_path, folder, progress=progress),
    )


def convert_gguf(gguf_path: Path, folder: Path, *, progress: bool) -> None:
    """Write config, weights, tokenizer and generation config of `gguf_path` into `folder`.

    Raises `CheckpointError` when the file is not supported.
    """
    gguf = GgufFile(gguf_path)
    architecture = gguf.text("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{gguf_path}: architecture is {architecture!r}: supported is llama")
    shape = LlamaShape.of(gguf)
    tensors = expected_tensors(gguf, shape)
    tokenizer = build_tokenizer(gguf)
    special_ids = {f"{name}_id": token_id for name, token_id in special_token_ids(gguf).items()}
    special_ids.pop("unk_token_id", None)
    _write_json(folder / "config.json", {**shape.config(), **special_ids})
    _write_json(folder / "generation_config.json", {**special_ids, **_stops(gguf, special_ids)})
    _write_json(folder / "tokenizer_config.json", tokenizer_config(gguf))
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_weights(folder / "model.safetensors", tensors, shape, progress=progress)


def _stops(gguf: GgufFile, special_ids: dict[str, int]) -> dict[str, list[int]]:
    """Return the ids that end an answer; empty unless the file names an end of turn of its own."""
    end_of_turn = end_of_turn_id(gguf)
    end_of_text = special_ids.get("eos_token_id")
    if end_of_turn is None or end_of_turn == end_of_text:
        return {}
    return {"eos_token_id": [i for i in (end_of_text, end_of_turn) if i is not None]}


def _cache_key(gguf_path: Path) -> str:
    try:
        status = gguf_path.stat()
        with gguf_path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise CheckpointError(f"{gguf_path}: cannot be read: {error.strerror}") from None
    identity = f"{CONVERSION_VERSION} {status.st_size} {status.st_mtime_ns} ".encode()
    return hashlib.sha256(identity + head).hexdigest()[:24]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(
    path: Path, tensors: dict[str, GgufTensor], shape: LlamaShape, *, progress: bool
) -> None:
    """Write a safetensors file: header length (u64), JSON header, then one tensor after another."""
    from tqdm import tqdm

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + 4 * math.prod(tensor.shape)
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensor data starts 8-byte aligned
    with (
        path.open("wb") as file,
        # disable=None: silent where standard error is not a terminal
        tqdm(total=end, unit="B", unit_scale=True, desc="converting the model",
             disable=None if progress else True) as bar,
    ):  # fmt: skip
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for values in _converted(tensors, shape):
            file.write(values.tobytes())
            bar.update(values.nbytes)


def _converted(tensors: dict[str, GgufTensor], shape: LlamaShape) -> Iterator[NDArray[np.float32]]:
    for name, tensor in tensors.items():
        values = tensor.dequantised()
        if name.endswith("q_proj.weight"):
            values = half_split_rows(values, shape.num_heads)
        elif name.endswith("k_proj.weight"):
            values = half_split_rows(values, shape.num_kv_heads)
        yield values


def half_split_rows(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Reorder the rows of a q or k projection from interleaved RoPE order to half-split order.

    GGUF's llama pairs rows (2i, 2i + 1) of a head for rotation; Hugging Face pairs (i, i + d/2).
    `weight` is [num_heads * head_dim, hidden_size].
    """
    rows, hidden_size = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden_size)
    return pairs.swapaxes(1, 2).reshape(rows, hidden_size)
