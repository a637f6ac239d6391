"""From `--speculative-model`, or nothing, to the file with the layer that drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from common.errors import CheckpointError
from common.files.cache_folder import full_path
from common.settings.config import SpeculationConfig
from engine.runner.mtp.mtp_weights import TARGET_IDENTITY
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.spec.model_spec import read_decoder_spec
from engine.runner.weights.tensor_files import TensorFiles

_SHIPPED = Path(__file__).with_name("demo_mtp.safetensors")
"""An MTP layer that was distilled for the demo model; `tools/train_mtp.py` makes it."""


def resolve_speculation(
    speculation: SpeculationConfig, folder: Path, *, load_format: str = "auto"
) -> SpeculationConfig:
    """Return `speculation`; with the method mtp, with an absolute path to the layer's file.

    The path stays empty when no file is named and the shipped one was made for other weights, as
    those of `load_format` random always are: then the checkpoint in `folder` has to contain the
    layer. Raises `CheckpointError` when a named file is not there or `folder` cannot be read.
    """
    if speculation.speculative_method != "mtp":
        return speculation
    if speculation.speculative_model:
        path = full_path(speculation.speculative_model)
        if not path.is_file():
            raise CheckpointError(f"speculative_model {path}: no such file: wanted safetensors")
        return replace(speculation, speculative_model=str(path))
    if load_format == "random":
        return speculation
    if _shipped_target() == Checkpoint(folder, read_decoder_spec(folder)).identity():
        return replace(speculation, speculative_model=str(_SHIPPED))
    return speculation


def _shipped_target() -> str | None:
    return TensorFiles({_SHIPPED: ()}).metadata.get(TARGET_IDENTITY)
