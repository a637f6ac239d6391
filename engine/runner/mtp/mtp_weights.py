"""Find an MTP layer in a checkpoint or a file, under the names of its publisher.

The layouts differ in names, in the order of the projection's inputs, in the norm before the head
and in the layer's input after its first draft. All embed with the target's embedding and predict
with its head. Every position is computed as in training; some engines zero the embedding at
position 0.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import CheckpointError
from engine.runner.weights.derived.rotary_order import in_rotary_order
from engine.runner.weights.spec.decoder_tensors import layer_shapes
from engine.runner.weights.spec.model_spec import DecoderSpec
from engine.runner.weights.tensor_files import TensorFiles
from engine.runner.weights.tensor_source import TensorSource

_logger = logging.getLogger("pdserve.engine")

TARGET_IDENTITY = "target_identity"
"""The metadata key that holds the identity of the weights that the layer was trained for."""
_DRAFT_IDS = "draft_token_ids"
_FINAL_NORM = "model.norm.weight"
_OTHER_LAYERS = {
    "mlp.experts.": "a mixture of experts",
    "mlp.gate.": "a mixture of experts",
    "self_attn.q_a_proj.": "latent attention",
    "self_attn.kv_a_proj": "latent attention",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """A publisher's tensor names; `{n}` is the layer's number.

    `layer_prefix` begins the names of the decoder layer. `output_norm` empty: the target's final
    norm. `copies` are tensors that repeat the target's, with the target's names.
    """

    projection: str
    embedding_norm: str
    hidden_norm: str
    layer_prefix: str
    output_norm: str
    is_hidden_first: bool = False
    recurses_on_normed: bool
    copies: tuple[tuple[str, str], ...] = ()


_LAYOUTS = {
    # DeepSeek-V3: its first MTP layer's number is the target's number of layers.
    "DeepSeek": _Layout(
        projection="model.layers.{n}.eh_proj",
        embedding_norm="model.layers.{n}.enorm.weight",
        hidden_norm="model.layers.{n}.hnorm.weight",
        layer_prefix="model.layers.{n}.",
        output_norm="model.layers.{n}.shared_head.norm.weight",
        recurses_on_normed=False,
        copies=(
            ("model.layers.{n}.embed_tokens.weight", "model.embed_tokens.weight"),
            ("model.layers.{n}.shared_head.head.weight", "lm_head.weight"),
        ),
    ),
    "ERNIE-4.5": _Layout(
        projection="model.mtp_linear_proj.{n}",
        embedding_norm="model.mtp_emb_norm.{n}.weight",
        hidden_norm="model.mtp_hidden_norm.{n}.weight",
        layer_prefix="model.mtp_block.{n}.",
        output_norm="",
        recurses_on_normed=True,
    ),
    "MiMo": _Layout(
        projection="model.mtp_layers.{n}.input_proj",
        embedding_norm="model.mtp_layers.{n}.token_layernorm.weight",
        hidden_norm="model.mtp_layers.{n}.hidden_layernorm.weight",
        layer_prefix="model.mtp_layers.{n}.",
        output_norm="model.mtp_layers.{n}.final_layernorm.weight",
        is_hidden_first=True,
        recurses_on_normed=True,
    ),
}


class MtpWeights:
    """One MTP layer's tensors by purpose, checked against the target.

    `layer_prefix` begins the names of its decoder layer, which `files` reads. With
    `recurses_on_normed` the head's input replaces the hidden state for the next draft, otherwise
    the layer's output does.
    """

    def __init__(
        self, source: Path, files: TensorSource, checkpoint: TensorSource, spec: DecoderSpec
    ) -> None:
        """Find and check the layer.

        Raises `CheckpointError`, naming what is missing, does not fit, or is for another target.
        """
        layout, number = _find_layout(source, files, spec)
        self.files = files
        self.layer_prefix = layout.layer_prefix.format(n=number)
        self.recurses_on_normed = layout.recurses_on_normed
        self._layout, self._number = layout, number
        self._checkpoint, self._spec = checkpoint, spec
        if spec.windows or spec.has_output_norms:
            raise CheckpointError(
                f"{source}: speculative_method is mtp, and layers of {spec.architecture} have "
                "a sliding window or norms on what they add: wanted ngram, suffix, grammar or none"
            )
        self._refuse_other_layers(source)
        self._check_target(source)
        for name, shape in self._shapes().items():
            files.check(source, name, shape)
        self.draft_token_ids = self._read_draft_token_ids(source)
        """The tokens that can be drafted, int64 and rising; None: all."""

    def identity(self) -> str:
        """Return the identity of these weights."""
        return f"{self._layout.projection}\n{self.files.identity()}"

    def target_identity(self) -> str:
        """Return the identity of the target's weights."""
        return self._checkpoint.identity()

    def embedding_norm(self) -> np.ndarray:
        """Read the norm of the token's embedding, `[hidden_size]`."""
        return self.files.read(self._layout.embedding_norm.format(n=self._number))

    def hidden_norm(self) -> np.ndarray:
        """Read the norm of the hidden state, `[hidden_size]`."""
        return self.files.read(self._layout.hidden_norm.format(n=self._number))

    def output_norm(self) -> np.ndarray:
        """Read the norm before the head, `[hidden_size]`."""
        if not self._layout.output_norm:
            return self._checkpoint.read(_FINAL_NORM)
        return self.files.read(self._layout.output_norm.format(n=self._number))

    def projections(self) -> tuple[np.ndarray, np.ndarray]:
        """Read the projections of the token and of the hidden state, `[outputs, inputs]` each."""
        size = self._spec.hidden_size
        weight = self.files.read(f"{self._projection}.weight")
        first, second = weight[:, :size], weight[:, size:]
        pair = (second, first) if self._layout.is_hidden_first else (first, second)
        return np.ascontiguousarray(pair[0]), np.ascontiguousarray(pair[1])

    def projection_bias(self) -> np.ndarray | None:
        """Read the projection's bias, `[hidden_size]`; None without one."""
        name = f"{self._projection}.bias"
        return self.files.read(name) if name in self.files.names() else None

    def check_copies(self) -> None:
        """Raise `CheckpointError` if an embedding or head of the layer is not the target's.

        Reads both, so this is not part of opening the files.
        """
        for pattern, shared in self._layout.copies:
            name = pattern.format(n=self._number)
            if name not in self.files.names():
                continue
            if shared == "lm_head.weight" and self._spec.has_tied_embeddings:
                shared = "model.embed_tokens.weight"
            if not np.array_equal(self.files.read(name), self._checkpoint.read(shared)):
                raise CheckpointError(
                    f"tensor {name} differs from the target's {shared}: wanted an MTP layer that "
                    "shares embedding and head with its target"
                )

    @property
    def _projection(self) -> str:
        return self._layout.projection.format(n=self._number)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        layout, size = self._layout, self._spec.hidden_size
        norms = filter(None, (layout.embedding_norm, layout.hidden_norm, layout.output_norm))
        shapes: dict[str, tuple[int, ...]] = {
            name.format(n=self._number): (size,) for name in norms
        }
        shapes[f"{self._projection}.weight"] = (size, 2 * size)
        if f"{self._projection}.bias" in self.files.names():
            shapes[f"{self._projection}.bias"] = (size,)
        for pattern, _ in layout.copies:
            name = pattern.format(n=self._number)
            if name in self.files.names():
                shapes[name] = (self._spec.vocab_size, size)
        return shapes | layer_shapes(self._spec, self.layer_prefix)

    def _refuse_other_layers(self, source: Path) -> None:
        for name in self.files.names():
            for part, words in _OTHER_LAYERS.items():
                if name.startswith(self.layer_prefix + part):
                    raise CheckpointError(
                        f"{source}: tensor {name}: the MTP layer has {words}: wanted a dense layer "
                        f"like those of {self._spec.architecture}"
                    )

    def _check_target(self, source: Path) -> None:
        trained_for = self.files.metadata.get(TARGET_IDENTITY)
        ours = self._checkpoint.identity()
        if self.files is self._checkpoint or trained_for in (None, ours):
            return
        raise CheckpointError(
            f"{source}: the MTP layer was made for {self.files.metadata.get('target', 'a target')} "
            f"with identity {trained_for}: wanted one for this checkpoint, {ours}"
        )

    def _read_draft_token_ids(self, source: Path) -> np.ndarray | None:
        if _DRAFT_IDS not in self.files.names():
            return None
        count = int(np.prod(self.files.shape(_DRAFT_IDS)))
        self.files.check(source, _DRAFT_IDS, (max(1, count),), ("I32",))
        ids = self.files.read(_DRAFT_IDS).astype(np.int64)
        if ids[0] < 0 or ids[-1] >= self._spec.vocab_size or (np.diff(ids) < 1).any():
            raise CheckpointError(
                f"{source}: {_DRAFT_IDS} are not all different, rising and within 0 to "
                f"{self._spec.vocab_size - 1}, the target's vocabulary"
            )
        return ids


def read_mtp_weights(
    path: str, folder: Path, checkpoint: TensorSource, spec: DecoderSpec
) -> MtpWeights:
    """Open the MTP layer in the file `path`, or, if that is empty, in the checkpoint itself.

    Raises `CheckpointError` like `MtpWeights`.
    """
    if path:
        source = Path(path)
        files = in_rotary_order(TensorFiles({source: ()}), spec)
        return MtpWeights(source, files, checkpoint, spec)
    return MtpWeights(folder, checkpoint, checkpoint, spec)


def _find_layout(source: Path, files: TensorSource, spec: DecoderSpec) -> tuple[_Layout, int]:
    """Return the layout in use and its first layer's number."""
    for publisher, layout in _LAYOUTS.items():
        before, after = re.escape(f"{layout.projection}.weight").split(re.escape("{n}"))
        pattern = re.compile(f"{before}(\\d+){after}")
        numbers = sorted(int(m[1]) for m in map(pattern.fullmatch, files.names()) if m)
        if not numbers:
            continue
        wanted = spec.num_layers if publisher == "DeepSeek" else 0
        if numbers[0] != wanted:
            raise CheckpointError(
                f"{source}: the first MTP layer is number {numbers[0]}: wanted {wanted}"
            )
        if len(numbers) > 1:
            _logger.warning("%d MTP layers: the first of them drafts every token", len(numbers))
        return layout, wanted
    names = ", ".join(f"{layout.projection}.weight ({who})" for who, layout in _LAYOUTS.items())
    raise CheckpointError(
        f"{source}: no MTP layer in it: wanted one of {names}, or --speculative-model FILE"
    )
