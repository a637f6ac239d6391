"""The weights of a model folder, in the types in which its files store them.

A folder has safetensors files (`tensor_files`), whose weights are quantised where config.json says
so (`schemes`), or a file `weights.gguf` (`gguf_weights`). Every header is checked before any
weight is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from common.errors import CheckpointError
from engine.runner.weights.derived.derived_weights import DerivedWeights
from engine.runner.weights.derived.divided_logits import DividedLogits
from engine.runner.weights.derived.fused_experts import (
    FusedExperts,
    has_fused_experts,
    inputs_come_first,
)
from engine.runner.weights.derived.fused_weights import (
    FusedWeights,
    fused_projections,
    fused_shapes,
)
from engine.runner.weights.derived.norm_offsets import NORM, NormOffsets
from engine.runner.weights.derived.other_names import stored_shapes, with_our_names
from engine.runner.weights.derived.rotary_order import in_rotary_order
from engine.runner.weights.derived.text_weights import TextWeights, beginning_of_names
from engine.runner.weights.gguf_weights import WEIGHTS_FILE, GgufWeights
from engine.runner.weights.schemes.quantization_config import read_quantization
from engine.runner.weights.schemes.scheme_weights import SchemeWeights
from engine.runner.weights.spec.config_values import read_json_object
from engine.runner.weights.spec.decoder_tensors import (
    CHOICE_BIAS,
    EXPERT_GATE,
    expected_shapes,
)
from engine.runner.weights.spec.expert_mixture import ExpertMixture
from engine.runner.weights.spec.model_spec import DecoderSpec
from engine.runner.weights.tensor_files import TensorFiles
from engine.runner.weights.tensor_source import TensorSource

_EXPERTS = ".mlp.experts."
_CHOOSING = (f".{CHOICE_BIAS}", f".{EXPERT_GATE}.bias")
"""The ends of names of what is added to the scores of experts."""


class Checkpoint(DerivedWeights):
    """The tensors of one folder, checked against what the decoder needs.

    Heads of queries and keys are in the order in which they are rotated (`rotary_order`).
    """

    def __init__(self, folder: Path, spec: DecoderSpec) -> None:
        """Read all headers.

        Raises `CheckpointError`, naming the file and the first tensor that is missing, wrong or not
        written yet.
        """
        shapes = expected_shapes(spec)
        fused = fused_projections(spec.architecture)
        stored = stored_shapes(fused_shapes(shapes, fused), spec)
        link = folder / WEIGHTS_FILE
        self.quantization = ""
        """What config.json says of how the weights are quantised, in words; empty: nothing."""
        source: TensorSource
        if is_gguf := link.is_symlink() or link.exists():
            # What is wrong is said of the file that people know, not of a link in the cache.
            source = GgufWeights(link.resolve(), stored, spec.num_heads, spec.num_kv_heads)
        else:
            source, self.quantization = _opened_files(folder, spec)
        if beginning := beginning_of_names(source):
            source = TextWeights(source, beginning)
        source = with_our_names(source, spec)
        if fused:
            source = FusedWeights(source, shapes, fused)
        # What adds to norms is set last: zeros in a file have to be seen.
        super().__init__(source)
        if spec.experts is not None:
            self._refuse_other_experts(folder, spec.experts)
        for name, shape in shapes.items():
            self._source.check(folder, name, shape)
        self._check_few_numbers(link.resolve() if link.exists() else folder, shapes)
        if spec.has_norm_offsets and not is_gguf:  # tools add the ones when they write GGUF
            source = NormOffsets(source)
        if spec.logits_divisor != 1.0:
            source = DividedLogits(source, spec.logits_divisor)
        self._source = in_rotary_order(source, spec)

    def _refuse_other_experts(self, folder: Path, mixture: ExpertMixture) -> None:
        """Raise `CheckpointError` for experts in one tensor, and for biases that are not zero.

        Experts of quantised files are in one where `fused_experts` does not read them. Some tools
        write a bias of zeros for each weight that they quantise.
        """
        for name in self.names():
            layer, found, rest = name.partition(_EXPERTS)
            if not found:
                continue
            if rest.startswith(("gate_up_proj", "down_proj")):
                raise CheckpointError(
                    f"{folder}: tensor {name} holds all experts of a layer: wanted a tensor for "
                    f"each, such as {layer}{_EXPERTS}0.down_proj.weight"
                )
            if rest.endswith(".bias") and not mixture.has_biases and self.read(name).any():
                raise CheckpointError(
                    f"{folder}: tensor {name} is a bias of an expert: wanted experts without biases"
                )

    def _check_few_numbers(self, where: Path, names: Iterable[str]) -> None:
        """Raise `CheckpointError` for a norm of zeros alone, and for one that is not finite.

        A copy that reserves its space first has the size of the whole file, and zeros where it has
        not come yet. Norms are short, lie in every part of a file, and are never zero. What chooses
        experts is short too, and a number that is none would choose any of them.
        """
        for name in names:
            if not name.endswith((NORM, *_CHOOSING)):
                continue
            values = self._source.read(name)
            if name.endswith(NORM) and not values.any():
                raise CheckpointError(
                    f"{where}: tensor {name} holds zeros alone: its file is still being copied, or "
                    "was not copied wholly"
                )
            if not np.isfinite(values).all():
                raise CheckpointError(
                    f"{where}: tensor {name} has a number that is not finite: wanted finite ones"
                )


def _opened_files(folder: Path, spec: DecoderSpec) -> tuple[TensorSource, str]:
    """Return the tensors of safetensors files, and how config.json says they are quantised."""
    files, quantization = TensorFiles(_shards(folder)), read_quantization(folder)
    if quantization is not None and quantization.schemes:
        return SchemeWeights(files, quantization), quantization.description
    is_gpt_oss = spec.has_sinks
    if quantization is not None and not is_gpt_oss:
        raise CheckpointError(
            f"{folder / 'config.json'}: quantization_config.quant_method is "
            f"{quantization.description!r}: wanted it of experts of gpt-oss"
        )
    description = "" if quantization is None else quantization.description
    if spec.experts is None or not has_fused_experts(files.names()):
        return files, description

    def is_in_mxfp4(experts: str) -> bool:
        return quantization is not None and quantization.has_mxfp4(experts)

    fused = FusedExperts(
        files,
        spec.experts,
        is_gpt_oss=is_gpt_oss,
        has_inputs_first=is_gpt_oss
        or inputs_come_first(files, spec.hidden_size, spec.experts.inner_size),
        is_in_mxfp4=is_in_mxfp4,
    )
    return fused, description


def _shards(folder: Path) -> dict[Path, list[str]]:
    """Return the files to read, with the tensors the index expects in each (empty: all)."""
    single, index_path = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return {single: []}
    if not index_path.exists():
        raise CheckpointError(
            f"{folder}: no weights: wanted model.safetensors or model.safetensors.index.json"
        )
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index_path}: weight_map is not an object of file names")
    names: dict[str, list[str]] = {}
    for name, file_name in weight_map.items():
        names.setdefault(file_name, []).append(name)
    for file_name, of_file in names.items():
        if Path(file_name).name != file_name:
            raise CheckpointError(
                f"{index_path}: {of_file[0]} is in {file_name!r}: wanted a file name"
            )
    shards = {folder / file_name: of_file for file_name, of_file in names.items()}
    for path in shards:
        if not path.exists():
            raise CheckpointError(f"{path}: shard is missing: {index_path.name} lists it")
    return shards


def file_with_weights(folder: Path) -> Path | None:
    """Return the file in which a folder's weights are looked for first; None without weights."""
    names = (WEIGHTS_FILE, "model.safetensors", "model.safetensors.index.json")
    return next((folder / name for name in names if (folder / name).exists()), None)
