"""A model's weights in other formats, as folders that a node can serve: for `perplexity`.

file        the model's own files
f32         their values in float32
f16, bf16   those, rounded
q8_0, …     those, in groups, as --quantization makes them: embedding and head in Q8_0
X_as_f32    the values of X in float32: what X is to be computed as
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from engine.runner.cache.kv_formats import stored_slots
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.derived.quantised_source import QuantisedSource
from engine.runner.weights.spec.config_values import read_json_object
from engine.runner.weights.spec.decoder_tensors import expected_shapes
from engine.runner.weights.spec.model_spec import read_decoder_spec
from engine.runner.weights.stored_formats import QUANTISERS
from engine.runner.weights.tensor_source import TensorSource

FILE = "file"
AS_F32 = "_as_f32"
WIDE = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
GROUPED = tuple(name.lower() for name in QUANTISERS)
ALL_WEIGHTS = (
    *("f32", FILE),
    *(name + suffix for name in ("f16", "bf16", *GROUPED) for suffix in ("", AS_F32)),
)


@dataclass(frozen=True, slots=True)
class WeightFolder:
    """What a node is given: `--model`, `--quantization`, and a folder for packed weights."""

    folder: Path
    quantization: str
    packed: Path


@contextmanager
def weight_folder(model: Path, name: str) -> Iterator[WeightFolder]:
    """Yield the weights `name` of `ALL_WEIGHTS` of the folder `model`, which exist until the end.

    Raises `CheckpointError` for a folder that cannot be read.
    """
    with TemporaryDirectory(prefix="pdserve-weights-") as temporary:
        made = Path(temporary)
        stored = name.removesuffix(AS_F32)
        if stored == FILE:
            found = WeightFolder(model, "none", made / "packed")
        else:
            written = write_wide(_source(model, "none"), model, made / stored, WIDE.get(stored))
            quantization = stored if stored in GROUPED else "none"
            found = WeightFolder(written, quantization, made / "packed")
        if name != stored:
            source = _source(found.folder, found.quantization)
            written = write_wide(source, model, made / name, None)
            found = WeightFolder(written, "none", made / "packed")
        yield found


def write_wide(source: TensorSource, model: Path, folder: Path, dtype: str | None) -> Path:
    """Write a folder with all values of `source` in `dtype`, a value of `WIDE` (None: F32).

    The configuration is that of the folder `model`, but for how its weights are quantised.
    """
    dtype = dtype or WIDE["f32"]
    folder.mkdir()
    config = read_json_object(model / "config.json")
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = expected_shapes(read_decoder_spec(model))
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * (4 if dtype == "F32" else 2)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name in shapes:
            file.write(_stored(source.read(name), dtype).data)
    return folder


def _source(folder: Path, quantization: str) -> TensorSource:
    checkpoint = Checkpoint(folder, read_decoder_spec(folder))
    if quantization == "none":
        return checkpoint
    return QuantisedSource(checkpoint, quantization.upper())


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return stored_slots(values, "bfloat16")
    return np.ascontiguousarray(values, np.float16 if dtype == "F16" else np.float32)
